"""Members of a real swarm in one process: each with a libp2p daemon on loopback, a DHT node and streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from hivemind.dht.node import DHTNode

from blocktrain.dht.averager import BlockAverager, Commit, Snapshot
from blocktrain.dht.daemon import DaemonConfig, run_daemon
from blocktrain.dht.dial import dial
from blocktrain.dht.directory import Directory, Holder
from blocktrain.dht.streams import Streams
from blocktrain.dht.swarm import JoinConfig, Swarm, dht_time, join_swarm
from blocktrain.protocol.addresses import peer_id_of
from blocktrain.protocol.errors import DaemonError, RoundAborted
from blocktrain.protocol.identity import load_or_create_identity
from blocktrain.protocol.messages import Join
from blocktrain.protocol.records import PeerRecord
from blocktrain.protocol.spec import RunSpec

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
SPEC = RunSpec.from_mapping({"name": "tests", "rounds": {"wire": "fp32", "deadline_s": 10, "timeout_s": 20}})
ANCHOR = "0" * 32
IDLE_S = 2.0
"""How soon a silent peer is given up in these tests."""


@dataclass
class Member:
    """One member, and the task that keeps it in the swarm until `leave` is set."""

    swarm: Swarm
    directory: Directory
    streams: Streams
    identity_file: Path
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    killed: bool = False

    @property
    def peer_id(self) -> str:
        return self.swarm.peer_id

    @property
    def daemon(self) -> psutil.Process:
        """Its p2pd process."""
        (found,) = [p for p in daemons() if f"-id={self.identity_file}" in p.cmdline()]
        return found

    def kill(self) -> None:
        """Take it off the network at once, as kill -9 of its process would."""
        self.killed = True
        self.daemon.kill()

    async def record(self, block: int = 0, **fields: Any) -> PeerRecord:
        """What it would say about itself."""
        base: dict[str, Any] = {
            "round": 0,
            "step": 20,
            "tokens_per_s": 1e3,
            "denoising_ce": None,
            "anchor": ANCHOR,
            "addresses": await self.swarm.addresses(),
            "version": "0.1.0",
            "time": dht_time(),
        }
        return PeerRecord(block=block, **base | fields)

    async def holder(self) -> Holder:
        """It, as others would find it in the directory."""
        return Holder(self.peer_id, await self.record(), dht_time() + 30)


def daemons() -> list[psutil.Process]:
    """All p2pd processes that this process has started and that still live."""
    return [p for p in psutil.Process().children(recursive=True) if p.name() == "p2pd"]


@contextlib.asynccontextmanager
async def members(
    count: int, folder: Path, spec: RunSpec = SPEC, peers: Sequence[str] = ()
) -> AsyncIterator[list[Member]]:
    """So many members of one swarm; the others join by the first, which joins by `peers` if there are any."""
    joined: list[Member] = []
    tasks: list[asyncio.Task[None]] = []
    stays: dict[str, asyncio.Task[None]] = {}

    async def add(index: int, initial: Sequence[str]) -> None:
        ready: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(_stay(folder / f"m{index}-{spec.seed}", spec, initial, ready))
        tasks.append(task)
        either: list[asyncio.Future[Any]] = [ready, task]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            await task
        joined.append(ready.result())
        stays[joined[-1].peer_id] = task

    try:
        await add(0, peers)
        first = await joined[0].swarm.addresses()
        await asyncio.gather(*(add(index, first) for index in range(1, count)))
        yield joined
    finally:
        for member in joined:
            member.leave.set()
        for task in tasks:
            if task not in stays.values():  # interrupted while it joined: nobody could tell it to leave
                task.cancel()
        await asyncio.gather(*tasks)


async def _stay(
    identity_file: Path, spec: RunSpec, initial: Sequence[str], ready: asyncio.Future[Member]
) -> None:
    identity = load_or_create_identity(identity_file)
    config = JoinConfig(DaemonConfig(identity_file, (LOOPBACK,)), tuple(initial), timeout_s=5.0)
    member = None
    try:
        async with asyncio.TaskGroup() as group, join_swarm(identity, config, group) as swarm:
            streams = Streams(swarm, spec.fingerprint, idle_s=IDLE_S)
            member = Member(swarm, Directory(swarm, spec), streams, identity_file)
            ready.set_result(member)
            await member.leave.wait()
            await streams.aclose()
    except* DaemonError:
        if member is None or not member.killed:
            raise


@contextlib.asynccontextmanager
async def child(
    role: str, home: Path, peers: Sequence[str] = (), clock_offset_s: float = 0.0
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """A member in a process of its own (child.py), and what it says about itself; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.swarm.child", role, str(home / "child"), str(clock_offset_s), *peers,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"TMPDIR": tempfile.gettempdir()},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        known = json.loads(await process.stdout.readline())
        yield process, known
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def raw_dht(folder: Path, initial: Sequence[str]) -> AsyncIterator[DHTNode]:
    """A hivemind DHT peer that checks nothing, neither what it stores nor what it sends."""
    load_or_create_identity(folder / "raw")
    async with (
        asyncio.TaskGroup() as group,
        run_daemon(DaemonConfig(folder / "raw", (LOOPBACK,)), group) as p2p,
    ):
        await dial(p2p, peer_id_of(initial[0]), initial)
        node = await DHTNode.create(p2p=p2p, initial_peers=list(initial), cache_locally=False)
        try:
            yield node
        finally:
            await node.shutdown()


@dataclass
class HolderOfBlock:
    """A member that holds block 0 with a given vector and averages it."""

    member: Member
    averager: BlockAverager
    values_N: np.ndarray
    anchor_N: np.ndarray
    join: Join

    async def average(
        self, within_s: float = 10.0, on_snapshot: Callable[[], Awaitable[None]] | None = None
    ) -> Commit:
        """One round, with the directory as it is now; `on_snapshot` is awaited when the group is known."""

        async def take_snapshot() -> Snapshot:
            if on_snapshot is not None:
                await on_snapshot()
            return Snapshot(self.values_N, self.anchor_N)

        self.averager.rendezvous.note_holders((await self.member.directory.holders())[0])
        return await self.averager.average(self.join, dht_time() + within_s, take_snapshot)


async def hold_block(joined: Sequence[Member], size: int, seed: int = 0) -> list[HolderOfBlock]:
    """Make all members advertised holders of block 0, with random vectors and a common anchor of zeros."""
    found = []
    for index, member in enumerate(joined):
        averager = BlockAverager(member.streams, member.directory, 0, member.directory.spec.rounds)
        await averager.start()
        values_N = np.random.default_rng((seed, index)).normal(size=size).astype(np.float32)
        zeros_N = np.zeros(size, np.float32)
        found.append(HolderOfBlock(member, averager, values_N, zeros_N, Join(0, ANCHOR, 100)))
        assert await member.directory.publish(await member.record())
    return found


async def outcome(holder: HolderOfBlock, within_s: float = 10.0) -> Commit | RoundAborted:
    """How a round ended for one holder; an abort leaves its inputs as they were."""
    before = holder.values_N.copy(), holder.anchor_N.copy()
    try:
        return await holder.average(within_s)
    except RoundAborted as error:
        return error
    finally:
        assert np.array_equal(holder.values_N, before[0])
        assert np.array_equal(holder.anchor_N, before[1])


async def round_of(holders: list[HolderOfBlock]) -> list[Commit]:
    """A round that all of them commit, with the same bits."""
    found = await asyncio.gather(*(outcome(holder) for holder in holders))
    commits = [commit for commit in found if isinstance(commit, Commit)]
    assert len(commits) == len(holders), found
    first = commits[0]
    for commit in commits:
        assert commit.mean_N.tobytes() == first.mean_N.tobytes()
        assert (commit.round, commit.members) == (first.round, first.members)
    return commits


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that nobody announces."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
