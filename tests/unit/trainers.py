"""Small trainers on a small text, for several files of tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from blocktrain.model.text import BatchStream, open_text
from blocktrain.model.train_step import Learner
from blocktrain.node.trainer import Trainer
from blocktrain.protocol.spec import RunSpec

BATCH, CONTEXT, STEPS = 4, 16, 3
ROUND_SAMPLES = BATCH * STEPS
LONG_S = 600.0
"""More than the steps of a round can take."""


def small_spec(name: str = "small", **model: object) -> RunSpec:
    """A run of two small blocks."""
    shape = {"d_model": 16, "heads": 2, "blocks": 2, "layers": 1, "context": CONTEXT} | model
    return RunSpec.from_mapping(
        {
            "name": name,
            "model": shape,
            "optimizer": {"batch": BATCH, "warmup_steps": 2},
            "rounds": {"steps": STEPS, "wire": "fp32"},
        }
    )


def make_trainer(folder: Path, spec: RunSpec | None = None, block: int = 0, peer_id: str = "me") -> Trainer:
    """A trainer at step 0; its text is kept in this folder."""
    path = folder / "text.txt"
    if not path.exists():
        words = np.array([b"the ", b"state ", b"of ", b"union "])
        path.write_bytes(b"".join(np.random.default_rng(0).choice(words, 1000)))
    spec = spec or small_spec()
    stream = BatchStream(
        open_text(str(path)), context=spec.model.context, batch_size=spec.optimizer.batch, seed=spec.seed,
        peer_id=peer_id,
    )  # fmt: skip
    return Trainer(Learner.initial(spec, block, torch.device("cpu")), stream, peer_id)


def train(trainer: Trainer, steps: int) -> list[float]:
    """So many steps, one at a time, and the smoothed loss after each."""
    losses = []
    for _ in range(steps):
        trainer.run(0.0)
        assert trainer.progress.denoising_ce is not None
        losses.append(trainer.progress.denoising_ce)
    return losses
