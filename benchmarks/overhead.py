"""What a node costs beside its bare training loop: two holders that average, against two loops alone.

    python -m benchmarks.overhead --seconds 20 --pairs 3

Both kinds run in turn on the same cores, as two processes of one thread each; the figure is the ratio of
their tokens a second, pair by pair. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import uvloop

from blocktrain.bootstrap.demo_text import sotu_text
from blocktrain.bootstrap.local import LocalSwarmConfig, run_local_swarm
from blocktrain.protocol.spec import RunSpec

BARE = """
import sys, time, torch
from blocktrain.model.text import BatchStream, open_text, split
from blocktrain.model.train_step import Learner, train_step
from blocktrain.protocol.spec import RunSpec
spec, path, seconds = RunSpec.from_toml(sys.argv[1]), sys.argv[2], float(sys.argv[3])
torch.set_num_threads(1)
train, _ = split(open_text(path), spec.model.context)
sizes = {"context": spec.model.context, "batch_size": spec.optimizer.batch}
stream = BatchStream(train, **sizes, seed=0, peer_id=sys.argv[4])
learner, generator, step = Learner.initial(spec, 0, torch.device("cpu")), torch.Generator(), 0
for step in range(10):
    train_step(learner, stream.batch(step), step, generator)
begin = time.perf_counter()
while time.perf_counter() - begin < seconds:
    step += 1
    generator.manual_seed(step)
    train_step(learner, stream.batch(step), step, generator)
print((step - 9) * spec.optimizer.batch * spec.model.context / (time.perf_counter() - begin))
"""


def bare(spec: RunSpec, path: str, seconds: float) -> float:
    """Tokens a second of two loops without a network, together."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BARE, spec.to_toml(), path, str(seconds), name],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    return sum(float(process.communicate()[0]) for process in processes)


async def nodes(spec: RunSpec, path: str, seconds: float) -> tuple[float, int]:
    """Tokens a second of two holders of one block, together, and the rounds that they committed meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        config = LocalSwarmConfig(spec, Path(folder), path, nodes=2)
        async with asyncio.TaskGroup() as group, run_local_swarm(config, group) as swarm:
            await swarm.until(lambda s: all(n.rounds("committed") for n in s.nodes), 120)
            first = [dict(n.status) for n in swarm.nodes]
            await swarm.until(
                lambda s: all(n.status["time"] > first[0]["time"] + seconds for n in s.nodes), 120
            )
            last = [dict(n.status) for n in swarm.nodes]
    rates = [(b["tokens"] - a["tokens"]) / (b["time"] - a["time"]) for a, b in zip(first, last, strict=True)]
    return sum(rates), last[0]["round"] - first[0]["round"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    spec = RunSpec.from_mapping({"name": "overhead", "model": {"blocks": 1}})
    path, pairs = sotu_text().name, []
    for _ in range(options.pairs):
        alone = bare(spec, path, options.seconds)
        together, rounds = uvloop.run(nodes(spec, path, options.seconds))
        pairs.append(
            {
                "bare_tokens_per_s": alone,
                "node_tokens_per_s": together,
                "rounds": rounds,
                "ratio": together / alone,
            }
        )
    print(json.dumps({"ratio": statistics.median(p["ratio"] for p in pairs), "pairs": pairs}, indent=2))


if __name__ == "__main__":
    main()
