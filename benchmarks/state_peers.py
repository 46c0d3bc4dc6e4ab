"""Processes for the benchmark of state transfers: donors that may train meanwhile, and crowds of joiners.

    python -m benchmarks.state_peers ROLE '{"home": …, …}'

They print one JSON line once they are ready, and one for each line that they read; they end with their input.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import uvloop

from blocktrain.dht.daemon import DaemonConfig
from blocktrain.dht.directory import Holder
from blocktrain.dht.donor import StateServer
from blocktrain.dht.manifest import CHUNK_BYTES, State
from blocktrain.dht.state import Download
from blocktrain.dht.streams import Stream, Streams
from blocktrain.dht.swarm import JoinConfig, dht_time, join_swarm
from blocktrain.model.text import BatchStream, open_text
from blocktrain.model.train_step import Learner
from blocktrain.node.service import SLICE_S
from blocktrain.node.trainer import Trainer, TrainingThread
from blocktrain.protocol.identity import load_or_create_identity
from blocktrain.protocol.messages import Chunk, StateRequest
from blocktrain.protocol.records import PeerRecord
from blocktrain.protocol.spec import RunSpec

SPEC = RunSpec.from_mapping({"name": "state-transfer"})
ANCHOR = "0" * 32
MEGABYTE = 1_000_000


@contextlib.asynccontextmanager
async def member(home: Path, peers: Sequence[str] = ()) -> AsyncIterator[Streams]:
    """A member of the swarm, with its own daemon."""
    identity = load_or_create_identity(home / "identity")
    config = JoinConfig(DaemonConfig(home / "identity", ("/ip4/127.0.0.1/tcp/0",)), tuple(peers))
    async with asyncio.TaskGroup() as group, join_swarm(identity, config, group) as swarm:
        streams = Streams(swarm, SPEC.fingerprint)
        yield streams
        await streams.aclose()


def state_of(mb: int) -> State:
    """The state that every donor gives away; it compresses well, but nothing here compresses."""
    return State(bytes(range(250)) * (mb * MEGABYTE // 250), 1, ANCHOR)


async def donor(home: Path, mb: int, train: bool, peers: Sequence[str]) -> None:
    """A donor process: says who it is, then answers each line on its input with the tokens trained so far."""
    torch.set_num_threads(1)
    state, trainer, thread = state_of(mb), small_trainer(home), TrainingThread()

    async def provide(what: str) -> State:
        return state

    async def send_raw(stream: Stream) -> None:
        await stream.expect(StateRequest)
        view = memoryview(state.data)
        for start in range(0, len(view), CHUNK_BYTES):
            await stream.send(Chunk(0), view[start : start + CHUNK_BYTES])

    async def keep_training() -> None:
        while True:
            await thread.call(trainer.run, SLICE_S)

    async with member(home, peers) as streams:
        await StateServer(streams, 0, provide).start()
        await streams.serve("raw", send_raw)
        training = asyncio.create_task(keep_training()) if train else None
        record = PeerRecord(
            block=0, round=1, step=0, tokens_per_s=0.0, denoising_ce=None, anchor=ANCHOR,
            addresses=await streams.swarm.addresses(), version="0", time=dht_time(),
        )  # fmt: skip
        print(json.dumps({"peer_id": streams.swarm.peer_id} | dataclasses.asdict(record)), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps({"tokens": trainer.progress.tokens, "time": time.monotonic()}), flush=True)
        if training is not None:
            training.cancel()
    thread.close()


def small_trainer(home: Path) -> Trainer:
    """The demo's block on arbitrary text."""
    text = home / "text"
    text.write_bytes(Path(__file__).read_bytes() * 10)
    batches = BatchStream(
        open_text(str(text)), context=SPEC.model.context, batch_size=SPEC.optimizer.batch, seed=0, peer_id=""
    )
    return Trainer(Learner.initial(SPEC, 0, torch.device("cpu")), batches, "")


async def crowd(home: Path, mb: int, count: int, donors: Sequence[Holder]) -> None:
    """A process with so many joiners that all download at once; prints when each of them had the state."""
    addresses = donors[0].record.addresses
    async with contextlib.AsyncExitStack() as stack:
        homes = [home / str(index) for index in range(count)]
        joined = [await stack.enter_async_context(member(one, addresses)) for one in homes]
        print(json.dumps({"joined": count}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        started, seconds = time.monotonic(), list[float]()

        async def join(streams: Streams) -> None:
            state, _ = await Download(streams, 0, "block", mb * MEGABYTE).run(donors)
            assert len(state.data) == mb * MEGABYTE
            seconds.append(time.monotonic() - started)

        await asyncio.gather(*map(join, joined))
        print(json.dumps({"seconds": seconds}), flush=True)


class Peer:
    """A process started by this one, asked and answering in lines of JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def listen(self) -> dict[str, Any]:
        """Its next line."""
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return found

    async def ask(self) -> dict[str, Any]:
        """Give it a line, and read one."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return await self.listen()


@contextlib.asynccontextmanager
async def start(role: str, **fields: Any) -> AsyncIterator[Peer]:
    """Another process in this role, ended with the block."""
    with tempfile.TemporaryDirectory() as home:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.state_peers", role, json.dumps({"home": home} | fields),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        try:
            yield Peer(process)
        finally:
            process.stdin.close()
            await process.wait()


def holder_of(known: dict[str, Any]) -> Holder:
    """A donor, as the directory would show it."""
    record = {name: value for name, value in known.items() if name != "peer_id"}
    return Holder(known["peer_id"], PeerRecord(**record), dht_time() + 1e6)


async def _main(role: str, fields: Mapping[str, Any]) -> None:
    home = Path(fields["home"])
    if role == "donor":
        await donor(home, fields["mb"], fields["train"], fields["peers"])
    else:
        await crowd(home, fields["mb"], fields["count"], [holder_of(known) for known in fields["donors"]])


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], json.loads(sys.argv[2])))
