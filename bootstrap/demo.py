"""The demonstration: six nodes train three blocks on real text for about three minutes."""

from __future__ import annotations

import os
import time

import torch

from blocktrain.model.text import BatchStream, Text, split
from blocktrain.model.train_step import Learner, train_step
from blocktrain.protocol.spec import RunSpec

DEMO_NODES = 6
DEMO_SECONDS = 160.0
DEMO_STEPS_PER_ROUND = 20
MIN_ROUNDS, MAX_ROUNDS = 8, 80
SHARE_FOR_TRAINING = 0.85
"""Of the machine's speed when nothing else runs: rounds, checkpoints and the view take the rest."""


def demo_spec(seed: int) -> RunSpec:
    """The run of the demonstration: small enough for two cores."""
    rounds = {"steps": DEMO_STEPS_PER_ROUND, "deadline_s": 60.0}
    return RunSpec.from_mapping({"name": "sotu-demo", "seed": seed, "rounds": rounds})


def rounds_for(spec: RunSpec, text: Text, nodes: int, seconds: float) -> int:
    """How many rounds fit into this time, found by training one block for about two seconds on one core."""
    train, _ = split(text, spec.model.context)
    stream = BatchStream(
        train,
        context=spec.model.context,
        batch_size=spec.optimizer.batch,
        seed=spec.seed,
        peer_id="calibration",
    )
    learner, generator = Learner.initial(spec, 0, torch.device("cpu")), torch.Generator().manual_seed(0)
    torch.set_num_threads(1)
    train_step(learner, stream.batch(0), 0, generator)  # the first one allocates
    begin, steps = time.perf_counter(), 0
    while time.perf_counter() - begin < 2.0:
        train_step(learner, stream.batch(steps), steps, generator)
        steps += 1
    steps_per_s = steps / (time.perf_counter() - begin) * min(os.cpu_count() or 1, nodes) * SHARE_FOR_TRAINING
    rounds = int(seconds * steps_per_s / (nodes * spec.rounds.steps))
    return min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)
