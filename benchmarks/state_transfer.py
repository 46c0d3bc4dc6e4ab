"""How fast a joiner gets a block's state on loopback, and what twenty joiners cost a training donor.

    python -m benchmarks.state_transfer --out state_transfer.json

Every donor is a process of its own with its own p2pd. Rates are of a raw stream (one donor sends frames of
a chunk's size, nobody hashes) and of the whole transfer (manifest, hashes, digests, reassembly) from one,
two and three donors, in turn, so that whatever else the machine does falls on all of them. The crowd runs
on the donor's own processors, so training also pays for what joiners elsewhere would pay for themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import tyro
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.state_peers import MEGABYTE, Peer, holder_of, member, start
from blocktrain.dht.directory import Holder
from blocktrain.dht.manifest import CHUNK_BYTES
from blocktrain.dht.state import Download
from blocktrain.protocol.messages import Chunk, StateRequest


@dataclass(frozen=True)
class Options:
    """What to measure."""

    out: Path = Path("state_transfer.json")
    """Where the figures go."""
    mb: int = 200
    """Size of the state, in millions of bytes."""
    runs: int = 5
    """Downloads of each kind; the median counts."""
    joiners: int = 20
    """Joiners that come at once while a donor trains."""
    alone_s: float = 15.0
    """How long the donor trains alone first, to compare with."""


async def measure_rates(options: Options) -> dict[str, list[float]]:
    """MB/s of every run, by kind."""
    rates: dict[str, list[float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        donors: list[Holder] = []
        for _ in range(3):
            peers = donors[0].record.addresses if donors else ()
            peer = await stack.enter_async_context(start("donor", mb=options.mb, train=False, peers=peers))
            donors.append(holder_of(await peer.listen()))
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        streams = await stack.enter_async_context(member(home, donors[0].record.addresses))

        async def raw() -> None:
            first = donors[0]
            async with streams.open(first.peer_id, "raw", first.record.addresses) as stream:
                await stream.send(StateRequest("block"))
                for _ in range(-(-options.mb * MEGABYTE // CHUNK_BYTES)):
                    await stream.expect(Chunk, max_payload=CHUNK_BYTES)

        async def transfer(count: int) -> None:
            await Download(streams, 0, "block", options.mb * MEGABYTE).run(donors[:count])

        kinds: dict[str, Callable[[], Awaitable[None]]] = {"raw stream": raw}
        for count in (1, 2, 3):
            kinds[f"transfer, {count} donor{'s' * (count > 1)}"] = functools.partial(transfer, count)
        for _ in range(options.runs):
            for kind, work in kinds.items():
                begin = time.monotonic()
                await work()
                rates.setdefault(kind, []).append(options.mb / (time.monotonic() - begin))
    return rates


async def measure_crowd(options: Options) -> dict[str, float]:
    """What a training donor does alone, and while so many joiners download from it."""
    async with start("donor", mb=options.mb, train=True, peers=()) as donor:
        known = await donor.listen()
        fields = {"mb": options.mb, "count": options.joiners, "donors": [known]}
        async with start("crowd", **fields) as joiners:
            await joiners.listen()
            alone = await _tokens_per_s(donor, asyncio.sleep(options.alone_s))
            seconds: list[float] = []

            async def download() -> None:
                seconds.extend((await joiners.ask())["seconds"])

            serving = await _tokens_per_s(donor, download())
    return {
        "tokens_per_s_alone": alone,
        "tokens_per_s_serving": serving,
        "kept": serving / alone,
        "first_joiner_s": min(seconds),
        "last_joiner_s": max(seconds),
        "mb_per_s": options.joiners * options.mb / max(seconds),
    }


async def _tokens_per_s(donor: Peer, meanwhile: Awaitable[None]) -> float:
    before = await donor.ask()
    await meanwhile
    after = await donor.ask()
    return float((after["tokens"] - before["tokens"]) / (after["time"] - before["time"]))


async def _main(options: Options) -> None:
    rates = await measure_rates(options)
    crowd = await measure_crowd(options)
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    result = {"mb": options.mb, "mb_per_s": rates, "crowd": crowd, "machine": machine}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    table = Table(
        "MB/s", "median", "least", "most", title=f"{options.mb} MB on loopback, {options.runs} runs"
    )
    for kind, values in rates.items():
        shown = (statistics.median(values), min(values), max(values))
        table.add_row(kind, *(f"{value:.0f}" for value in shown))
    console = Console()
    console.print(table)
    console.print(
        f"{options.joiners} joiners at one training donor: it trained {crowd['tokens_per_s_serving']:.0f} "
        f"tokens/s, {crowd['kept']:.0%} of the {crowd['tokens_per_s_alone']:.0f} alone; "
        f"they were served at {crowd['mb_per_s']:.0f} MB/s, the last after {crowd['last_joiner_s']:.1f} s"
    )


if __name__ == "__main__":
    uvloop.run(_main(tyro.cli(Options, description=__doc__)))
