"""`blocktrain-node --check`: everything that a node needs, looked at one by one, and none left out."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from blocktrain.dht.contacts import FILE_NAME, Contacts
from blocktrain.dht.daemon import DaemonConfig
from blocktrain.dht.duplicates import place_of, refuse_taken_identity
from blocktrain.dht.probe import Probe, probe
from blocktrain.dht.session import Session, open_session
from blocktrain.dht.swarm import JoinConfig
from blocktrain.model.text import Text, open_text, split
from blocktrain.node.claim import look_for_block
from blocktrain.node.life import checkpoints_of, decided_block, kept_blocks
from blocktrain.node.options import NodeOptions
from blocktrain.node.preflight import (
    check_room,
    count_parameters,
    describe_memory,
    describe_model,
    describe_text,
    estimate_needs,
    pick_device,
    set_threads,
)
from blocktrain.protocol.addresses import parse_address, parse_addresses
from blocktrain.protocol.command import first_known, print_json
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.home import hold_home, with_last_port
from blocktrain.protocol.identity import Identity, load_or_create_identity
from blocktrain.protocol.records import CLOCK_TOLERANCE_S

OK, WARNING, FAILED, UNKNOWN = "ok", "warning", "failed", "unknown"
JOIN_TIMEOUT_S = 15.0
_STYLES = {OK: "green", WARNING: "yellow", FAILED: "red", UNKNOWN: "dim"}
_FORWARD = "to be reached directly, open or forward a TCP port and name it with --listen (and --announce)"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. Only `failed` keeps the node from training."""

    name: str
    status: str
    detail: str


class Findings:
    """All checks so far."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def add(self, name: str, status: str, detail: str) -> None:
        """Take one down."""
        self.checks.append(Check(name, status, detail))

    def look(self, name: str) -> _Look:
        """Take an error of ours in the block down as this check's failure, and go on."""
        return _Look(self, name)

    @property
    def failed(self) -> list[Check]:
        """What keeps the node from training."""
        return [check for check in self.checks if check.status == FAILED]

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if not self.failed:
            return "this node could train; leave out --check to begin"
        names = ", ".join(check.name for check in self.failed)
        return f"this node could not train; to be mended: {names}"


@dataclass(frozen=True, slots=True)
class _Look:
    found: Findings
    name: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        known = None if error is None else first_known(error)
        if known is not None:
            self.found.add(self.name, FAILED, str(known))
        return known is not None


async def check_node(options: NodeOptions) -> int:
    """Look at everything, print it, and give the exit code: 0 only if this node could train."""
    found = Findings()
    console = Console(stderr=True)
    with console.status("looking at this machine and the network …"), contextlib.ExitStack() as stack:
        text = _look_at_data(options, found)
        _look_at_device(options, found)
        home = None
        with found.look("home"):
            home = stack.enter_context(hold_home(options.home, "node"))
        if home is not None:
            await _look_with_home(options, home, text, found)
    if options.json:
        print_json({"could_train": not found.failed, "checks": [asdict(check) for check in found.checks]})
    else:
        show(found, Console())
    return 1 if found.failed else 0


def show(found: Findings, console: Console) -> None:
    """Print the table and the verdict."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what was found", overflow="fold")
    for check in found.checks:
        table.add_row(check.name, f"[{_STYLES[check.status]}]{check.status}[/]", escape(check.detail))
    console.print(table, highlight=False)
    console.print(found.verdict, style="red" if found.failed else "green", highlight=False, soft_wrap=True)


def _look_at_data(options: NodeOptions, found: Findings) -> Text | None:
    with found.look("data"):
        if not options.data:
            raise UsageError("--data is missing: name a file, a folder or a glob of text to train on")
        text = open_text(options.data)
        found.add("data", OK, f"{text.name}: {len(text):,} bytes")
        return text
    return None


def _look_at_device(options: NodeOptions, found: Findings) -> None:
    with found.look("device"):
        device = pick_device(options.device)
        threads = set_threads(options.threads)
        note = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
        found.add("device", OK, f"{device}{note}, {threads} thread(s)")


async def _look_with_home(options: NodeOptions, home: Path, text: Text | None, found: Findings) -> None:
    identity = None
    with found.look("identity"):
        key = home / "identity.key"
        kept = "kept" if key.exists() else "made now, kept"
        identity = load_or_create_identity(key)
        found.add("identity", OK, f"{identity.peer_id}, {kept} in {key}")
    peers = _look_at_addresses(options, home, found)
    daemon = None
    with found.look("addresses to listen on"):
        listen = tuple(parse_address(a, listening=True) for a in options.listen)
        announce = tuple(parse_address(a, listening=True) for a in options.announce)
        daemon = DaemonConfig(home / "identity.key", with_last_port(home, listen), announce)
    if identity is None or daemon is None:
        found.add("network", UNKNOWN, "not looked at, without an identity and addresses to listen on")
        return
    if not await _look_at_network(daemon, peers, found):
        found.add("run", UNKNOWN, "not looked at, as no peer answers")
        return
    with found.look("run"):
        config = JoinConfig(
            *(daemon, peers, JOIN_TIMEOUT_S), client_mode=True, place=place_of(home, identity.peer_id)
        )
        await _look_at_run(identity, config, options, (home, text), found)


def _look_at_addresses(options: NodeOptions, home: Path, found: Findings) -> tuple[str, ...]:
    """Initial peers that can be used, and those remembered from last time."""
    peers: dict[str, None] = {}
    for value in options.initial_peers:
        with found.look("initial peer"):
            peers |= dict.fromkeys(parse_addresses([value]))
    remembered = Contacts(home / FILE_NAME).peers
    if not peers:
        peers |= {address: None for addresses in remembered.values() for address in addresses}
    if remembered:
        found.add("remembered peers", OK, f"{len(remembered)} in {home / FILE_NAME}")
    if not peers:
        found.add("initial peers", FAILED, "none: paste the line that blocktrain-bootstrap or a node printed")
    return tuple(peers)


async def _look_at_network(daemon: DaemonConfig, peers: tuple[str, ...], found: Findings) -> bool:
    """Whether any peer answers."""
    with found.look("ports"):
        async with asyncio.TaskGroup() as group:
            seen = await probe(daemon, peers, group)
        found.add("ports", OK, f"listening on {' '.join(seen.listening)}")
        offsets = [answer for answer in seen.answers.values() if isinstance(answer, float)]
        for address, answer in seen.answers.items():
            resolved = f" ({seen.resolved[address]})" if address in seen.resolved else ""
            told = "answers" if isinstance(answer, float) else answer
            bad = WARNING if offsets else FAILED
            found.add(
                "initial peer", OK if isinstance(answer, float) else bad, f"{address}{resolved}: {told}"
            )
        if offsets:
            _look_at_clock(offsets, found)
            _look_at_reach(seen, daemon, found)
        return bool(offsets)
    return False


def _look_at_clock(offsets: list[float], found: Findings) -> None:
    offset = median_low(offsets)
    detail = f"{offset:+.2f} s against {len(offsets)} peer{'' if len(offsets) == 1 else 's'}"
    if abs(offset) <= CLOCK_TOLERANCE_S:
        found.add("clock", OK, detail)
    else:
        fix = "set it (for example `timedatectl set-ntp true`)"
        found.add("clock", FAILED, f"your clock is {offset:+.1f} s off; {fix}")


def _look_at_reach(seen: Probe, daemon: DaemonConfig, found: Findings) -> None:
    if daemon.announce:
        found.add("reachable", OK, f"by your own account at {' '.join(daemon.announce)}; not tried")
    elif seen.outside is None:
        found.add("reachable", UNKNOWN, "no peer says whether it can reach this node")
    elif seen.outside:
        found.add("reachable", OK, f"directly, at {seen.outside}")
    else:
        found.add("reachable", WARNING, f"not directly; others reach it through relays. {_FORWARD}")


async def _look_at_run(
    identity: Identity,
    config: JoinConfig,
    options: NodeOptions,
    here: tuple[Path, Text | None],
    found: Findings,
) -> None:
    async with (
        asyncio.TaskGroup() as group,
        open_session(identity, config, options.run, group, options.record_ttl) as session,
    ):
        spec = session.spec
        found.add("run", OK, f"{spec.name}, fingerprint {spec.fingerprint}: {describe_model(spec.model)}")
        with found.look("one of a kind"):
            await refuse_taken_identity(session.directory, config.place)
        with found.look("block"):
            await _look_at_block(session, options, here[0], found)
        with found.look("memory and disk"):
            needs = estimate_needs(spec, count_parameters(spec))
            room = check_room(needs, here[0], options.max_memory)
            found.add("memory and disk", OK, f"{room} ({describe_memory(needs)})")
        if here[1] is not None:
            with found.look("text for this run"):
                found.add("text for this run", OK, describe_text(*split(here[1], spec.model.context)))


async def _look_at_block(session: Session, options: NodeOptions, home: Path, found: Findings) -> None:
    spec = session.spec
    kept = kept_blocks(checkpoints_of(home, spec), spec)
    block, reason = await look_for_block(session, decided_block(options, spec), kept, random.Random())
    found.add("block", OK, f"{block}: {reason}")
