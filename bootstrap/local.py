"""A whole swarm on this machine: one seed and any number of `blocktrain-node` processes on loopback.

Real processes, real sockets, ports chosen by the system. What happens in them is read from their event
streams, so nothing here sleeps and hopes. All end with the `async with` block, and with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blocktrain.dht.daemon import die_with_parent
from blocktrain.protocol.errors import HomeError, NetworkError
from blocktrain.protocol.spec import RunSpec

log = logging.getLogger(__name__)
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 12.0
LINE_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class LocalSwarmConfig:
    """What to start."""

    spec: RunSpec
    home: Path
    """Holds the run file, one home a process, and their logs."""
    data: str
    nodes: int
    rounds: int = 0
    """Each node stops training after this round; 0: never."""
    threads: int = 1
    record_ttl_s: float = 15.0
    together: bool = True
    """Nodes begin to train when all of them are there."""


@dataclass(eq=False)
class LocalNode:
    """One node process, and what it has said so far."""

    index: int
    block: int
    process: asyncio.subprocess.Process
    log_file: Path
    status: dict[str, Any] = field(default_factory=dict)
    """The latest values of all fields of its events."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Its events but `steps`, in order."""
    expected_to_end: bool = False

    @property
    def tokens_before(self) -> int:
        """Tokens that it had been trained on before it was started here."""
        return next((int(e.get("tokens", 0)) for e in self.events if e["event"] == "started"), 0)

    def seen(self, event: str) -> bool:
        """Whether an event of this kind has come."""
        return any(e["event"] == event for e in self.events)

    def rounds(self, result: str) -> list[dict[str, Any]]:
        """Its rounds that ended this way: `committed`, `aborted`, `solo` or `resynced`."""
        return [e for e in self.events if e["event"] == "round" and e["result"] == result]


class LocalSwarm:
    """The running processes. Made by `run_local_swarm`."""

    def __init__(self, config: LocalSwarmConfig, group: asyncio.TaskGroup) -> None:
        self.config = config
        self.nodes: list[LocalNode] = []
        self.address = ""
        """Multiaddr of the seed."""
        self._group = group
        self._changed = asyncio.Condition()
        self._seed: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []

    async def until(self, condition: Callable[[LocalSwarm], bool], timeout_s: float) -> None:
        """Wait for a condition on the nodes, checked at each of their events.

        Raises:
            NetworkError: it did not come true in time, or a node ended that was not meant to.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: condition(self) or self._casualty() is not None)
        except TimeoutError:
            raise NetworkError(f"the local swarm did not get there within {timeout_s:.0f} s") from None
        casualty = self._casualty()
        if casualty is not None and not condition(self):
            raise NetworkError(casualty)

    async def add_node(self, block: int | str, extra: Sequence[str] = ()) -> LocalNode:
        """Start one more node."""
        index = len(self.nodes)
        config = self.config
        arguments = [
            *("--initial-peers", self.address, "--data", config.data, "--block", str(block)),
            *("--home", str(config.home / f"node-{index}"), "--listen", LOOPBACK, "--events", "-"),
            *("--threads", str(config.threads), "--rounds", str(config.rounds)),
            *("--record-ttl", str(config.record_ttl_s)),
            *("--join-timeout", str(START_TIMEOUT_S), *extra),
        ]
        process, log_file = await self._spawn("blocktrain.node.cli", arguments, f"node-{index}")
        node = LocalNode(index, int(block) if str(block).isdecimal() else -1, process, log_file)
        self.nodes.append(node)
        self._readers.append(self._group.create_task(self._follow(node), name=f"events of node {index}"))
        return node

    async def kill(self, node: LocalNode, number: int = signal.SIGKILL) -> None:
        """Send a signal to a node that is meant to end, and wait until it has."""
        node.expected_to_end = True
        with contextlib.suppress(ProcessLookupError):
            node.process.send_signal(number)
        await node.process.wait()

    async def start_seed(self, extra: Sequence[str] = ()) -> None:
        """Start the seed and learn its address. Raises: HomeError, or NetworkError with its own reason."""
        run_file = self.config.home / "run.toml"
        try:
            run_file.write_text(self.config.spec.to_toml())
        except OSError as error:
            raise HomeError(f"{run_file}: can't be written: {error.strerror}") from None
        arguments = ["--publish", str(run_file), "--listen", LOOPBACK, "--json"]
        arguments += ["--home", str(self.config.home / "seed"), *extra]
        self._seed, log_file = await self._spawn("blocktrain.bootstrap.cli", arguments, "seed")
        assert self._seed.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await self._seed.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            raise NetworkError(f"the seed did not start: {_last_line(log_file)}")
        self.address = json.loads(line)["addresses"][0]

    async def stop(self) -> None:
        """End all processes: nodes first, then the seed; politely, then not."""
        processes = [n.process for n in self.nodes]
        for node in self.nodes:
            node.expected_to_end = True
        await _end(processes)
        if self._seed is not None:
            await _end([self._seed])
        for reader in self._readers:
            reader.cancel()

    async def _spawn(
        self, module: str, arguments: Sequence[str], name: str
    ) -> tuple[asyncio.subprocess.Process, Path]:
        log_file = self.config.home / "logs" / f"{name}.log"
        try:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            errors = log_file.open("ab")
        except OSError as error:
            raise HomeError(f"{log_file}: can't be written: {error.strerror}") from None
        with errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=LINE_LIMIT,
                start_new_session=True,  # Ctrl-C in the terminal is for us; we end them in order
                preexec_fn=die_with_parent(),
            )
        return process, log_file

    async def _follow(self, node: LocalNode) -> None:
        assert node.process.stdout is not None
        while line := await node.process.stdout.readline():
            if not line.endswith(b"\n"):  # the node was killed in the middle of a line
                break
            event = json.loads(line)
            node.status |= event
            node.block = event.get("block", node.block)
            if event["event"] != "steps":
                node.events.append(event)
            async with self._changed:
                self._changed.notify_all()
        await node.process.wait()
        async with self._changed:
            self._changed.notify_all()

    def _casualty(self) -> str | None:
        """What to say about the first node that ended though it was not meant to."""
        for node in self.nodes:
            code = node.process.returncode
            if code is not None and not node.expected_to_end:
                return f"node {node.index} ended with status {code}: {_last_line(node.log_file)}"
        return None


@contextlib.asynccontextmanager
async def run_local_swarm(config: LocalSwarmConfig, group: asyncio.TaskGroup) -> AsyncIterator[LocalSwarm]:
    """Start a seed and the nodes, node i on block i modulo the number of blocks; end them all afterwards.

    Raises:
        NetworkError: a process did not start; the message holds its last words.
    """
    swarm = LocalSwarm(config, group)
    try:
        await swarm.start_seed()
        together = ("--wait-for", str(config.nodes)) if config.together else ()
        for index in range(config.nodes):
            await swarm.add_node(index % config.spec.model.blocks, together)
        await swarm.until(lambda s: all(n.seen("started") for n in s.nodes), START_TIMEOUT_S)
        yield swarm
    finally:
        await asyncio.shield(swarm.stop())


async def _end(processes: Sequence[asyncio.subprocess.Process]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await asyncio.gather(*(p.wait() for p in processes))
    except TimeoutError:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*(p.wait() for p in processes))


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(errors="replace").splitlines() if log_file.exists() else []
    return f"{lines[-1][-300:] if lines else 'it said nothing'} (log: {log_file})"
