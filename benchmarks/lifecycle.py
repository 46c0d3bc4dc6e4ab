"""How long the turns in a node's life take on loopback, as a volunteer sees them.

    python -m benchmarks.lifecycle --out lifecycle.json

Each run starts a seed and two holders of one block of the default size (a thread each), then lets a third
come, kills it with SIGKILL, starts it again from its home, and stops it with SIGTERM. State transfer
is measured beside a raw stream by benchmarks/state_transfer.py, which runs with the same `--runs`.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro
import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import state_transfer
from blocktrain.bootstrap.demo_text import sotu_text
from blocktrain.bootstrap.local import LocalNode, LocalSwarm, LocalSwarmConfig, run_local_swarm
from blocktrain.dht.session import visit_run
from blocktrain.protocol.spec import RunSpec

SPEC = RunSpec.from_mapping({"name": "lifecycle", "model": {"blocks": 1}})
LIMIT_S = 180.0


@dataclass(frozen=True)
class Options:
    """What to measure."""

    out: Path = Path("lifecycle.json")
    """Where the figures go."""
    runs: int = 5
    """The median of so many counts."""
    mb: int = 200
    """Size of the state that is transferred, in millions of bytes."""


DEADLINE_S = SPEC.rounds.deadline_s
TARGETS: dict[str, float] = {
    "start to first step, s": 15.0,
    "start to first committed round, s": 2 * DEADLINE_S,
    "kill -9 to the others' next commit, s": DEADLINE_S + 15.0,
    "restart after kill -9 to a commit, s": DEADLINE_S + 15.0,
    "SIGTERM to exit, s": 3.0,
    "SIGTERM to gone from the directory, s": 2.0,
}


async def one_life(config: LocalSwarmConfig) -> dict[str, float]:
    """The seconds of each turn, in one swarm."""
    seconds: dict[str, float] = {}
    async with asyncio.TaskGroup() as group, run_local_swarm(config, group) as swarm:
        await swarm.until(lambda s: all(n.rounds("committed") for n in s.nodes), LIMIT_S)
        begin = time.monotonic()
        node = await swarm.add_node(0)
        await swarm.until(lambda s: node.status.get("event") == "steps", LIMIT_S)
        seconds["start to first step, s"] = time.monotonic() - begin
        await _commits(swarm, node)
        seconds["start to first committed round, s"] = time.monotonic() - begin
        others = {n.index: len(n.rounds("committed")) for n in swarm.nodes[:2]}
        await swarm.kill(node)
        begin = time.monotonic()
        await swarm.until(lambda s: _all_further(s, others), LIMIT_S)
        seconds["kill -9 to the others' next commit, s"] = time.monotonic() - begin
        begin = time.monotonic()
        node = await swarm.add_node(0, ("--home", str(config.home / f"node-{node.index}")))
        await _commits(swarm, node)
        seconds["restart after kill -9 to a commit, s"] = time.monotonic() - begin
        seconds |= await _leave(swarm, node)
    return seconds


async def _commits(swarm: LocalSwarm, node: LocalNode) -> None:
    await swarm.until(lambda s: bool(node.rounds("committed")), LIMIT_S)


def _all_further(swarm: LocalSwarm, before: dict[int, int]) -> bool:
    return all(len(swarm.nodes[i].rounds("committed")) > count for i, count in before.items())


async def _leave(swarm: LocalSwarm, node: LocalNode) -> dict[str, float]:
    """Stop a node in order, while somebody looks at the directory."""
    peer_id = node.events[0]["peer_id"]
    async with asyncio.TaskGroup() as group, visit_run([swarm.address], "", 30.0, group) as session:

        async def until_gone() -> float:
            while any(h.peer_id == peer_id for h in (await session.directory.holders())[0]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            return time.monotonic()

        begin = time.monotonic()
        gone = group.create_task(until_gone())
        await swarm.kill(node, signal.SIGTERM)
        exited = time.monotonic()
        return {
            "SIGTERM to exit, s": exited - begin,
            "SIGTERM to gone from the directory, s": await gone - begin,
        }


async def _main(options: Options) -> None:
    found: dict[str, list[float]] = {}
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            config = LocalSwarmConfig(SPEC, Path(folder), sotu_text().name, nodes=2)
            for name, value in (await one_life(config)).items():
                found.setdefault(name, []).append(value)
    rates = await state_transfer.measure_rates(state_transfer.Options(mb=options.mb, runs=options.runs))
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    result = {"seconds": found, "mb_per_s": rates, "targets": TARGETS, "machine": machine}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=100).print(table(found, rates))


def table(found: dict[str, list[float]], rates: dict[str, list[float]]) -> Table:
    """Medians and spreads, in Markdown's form so that they can stand in docs/."""
    shown = Table("", "median", "least", "most", "target", box=box.MARKDOWN)

    def add(name: str, values: list[float], digits: int, target: str) -> None:
        spread: list[Callable[[list[float]], float]] = [statistics.median, min, max]
        shown.add_row(name, *(f"{of(values):.{digits}f}" for of in spread), target)

    for name, values in found.items():
        add(name, values, 1, f"{TARGETS[name]:g}")
    for name, values in rates.items():
        add(f"{name}, MB/s", values, 0, "200" if name.startswith("transfer") else "")
    return shown


if __name__ == "__main__":
    uvloop.run(_main(tyro.cli(Options, description=__doc__)))
