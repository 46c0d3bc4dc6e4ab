"""`blocktrain-bootstrap`: the first peer of a swarm, and the publisher of a run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from blocktrain.bootstrap.seed import keep_published
from blocktrain.dht.contacts import FILE_NAME, Contacts
from blocktrain.dht.daemon import DaemonConfig
from blocktrain.dht.directory import list_runs, publish_run
from blocktrain.dht.membership import stay_joined
from blocktrain.dht.swarm import JoinConfig, Swarm, join_swarm
from blocktrain.model.bands import noise_bands
from blocktrain.protocol.addresses import parse_address, parse_addresses
from blocktrain.protocol.command import Command, CommonOptions, print_json, run_command
from blocktrain.protocol.home import hold_home, remember_port, with_last_port
from blocktrain.protocol.identity import load_or_create_identity
from blocktrain.protocol.spec import RunSpec
from blocktrain.protocol.stop import Stop, stop_signals

log = logging.getLogger(__name__)
COMMAND = Command(
    "blocktrain-bootstrap",
    "Be the first peer of a swarm: others join through it. It holds no model.",
    "blocktrain-bootstrap --publish examples/run.toml",
)


@dataclass(frozen=True, kw_only=True)
class BootstrapOptions(CommonOptions):
    """How to be a seed."""

    publish: Annotated[str, tyro.conf.arg(metavar="RUN.toml")] = ""
    """Publish this run, so that nodes that join here find and train it."""
    listen: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MULTIADDR …")] = ("/ip4/0.0.0.0/tcp/0",)
    """Where to listen; port 0 takes a free port, the same again after a restart."""
    announce: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MULTIADDR …")] = ()
    """Addresses to tell others instead of this machine's own."""
    initial_peers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MULTIADDR …")] = ()
    """Members of an existing swarm to join; by default this peer begins a new one."""
    home: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""
    """Where identity and port are kept; by default the first free one of ~/.blocktrain/seed-1, -2, …"""
    json: bool = False
    """Print address and run as one JSON document once ready, instead of text."""


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_command(COMMAND, BootstrapOptions, run))


async def run(options: BootstrapOptions) -> int:
    """Be a seed until stopped."""
    spec = RunSpec.from_file(Path(options.publish)) if options.publish else None
    if spec is not None:
        noise_bands(
            spec.noise, spec.model.blocks
        )  # a run whose noise can't be drawn is refused here, not by every node
    peers = parse_addresses(options.initial_peers)
    listen = tuple(parse_address(a, listening=True) for a in options.listen)
    announce = tuple(parse_address(a, listening=True) for a in options.announce)
    with hold_home(options.home, "seed") as home, stop_signals() as stop:
        identity = load_or_create_identity(home / "identity.key")

        def join(group: asyncio.TaskGroup) -> contextlib.AbstractAsyncContextManager[Swarm]:
            daemon = DaemonConfig(home / "identity.key", with_last_port(home, listen), announce)
            contacts = Contacts(home / FILE_NAME)
            return join_swarm(identity, JoinConfig(daemon, peers, contacts=contacts, begin=True), group)

        await stay_joined(join, _Seed(spec, options, home, stop).serve, stop, lambda reason: None)
    return 0


@dataclass
class _Seed:
    """What a seed does while it is a member."""

    spec: RunSpec | None
    options: BootstrapOptions
    home: Path
    stop: Stop
    _told: bool = False

    async def serve(self, swarm: Swarm) -> None:
        """Publish the run and keep it published, until stopped."""
        addresses = await swarm.addresses()
        remember_port(self.home, addresses)
        if self.spec is not None:
            await publish_run(swarm, self.spec)
        if not self._told:
            self._told = True
            self._tell(addresses, await list_runs(swarm))
        self.stop.work_begins()
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(keep_published(swarm, self.spec)) if self.spec is not None else None
            await self.stop.asked.wait()
            if keeping is not None:
                keeping.cancel()
        log.info("stopped")

    def _tell(self, addresses: tuple[str, ...], runs: dict[str, str]) -> None:
        spec = self.spec
        if self.options.json:
            names = {"run": spec and spec.name, "fingerprint": spec and spec.fingerprint}
            print_json({"peer_id": addresses[0].rpartition("/")[2], "addresses": addresses, **names})
        else:
            print(_welcome(addresses, spec, self.home, runs), flush=True)


def _welcome(addresses: tuple[str, ...], spec: RunSpec | None, home: Path, runs: dict[str, str]) -> str:
    """What to paste elsewhere."""
    lines = [f"seed {addresses[0].rpartition('/')[2]}, kept in {home}"]
    if spec is not None:
        lines.append(f"publishing run {spec.name}, fingerprint {spec.fingerprint}")
    elif not runs:
        lines.append("no run is published here yet; add --publish RUN.toml")
    lines += ["", "Join it with:"]
    lines += [f"  blocktrain-node --initial-peers {address} --data my.txt" for address in addresses]
    lines += ["", "Ctrl-C stops the seed; nodes that have joined go on without it."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
