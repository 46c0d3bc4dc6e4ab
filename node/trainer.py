"""Local training of one block: everything that touches torch, run in one thread of its own.

`TrainingThread.call` queues work behind the steps that are running, so nothing here needs a lock.
N: number of parameters of the block. V, D: rows and columns of the embedding table.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import numpy as np
import torch

from blocktrain.dht.averager import Snapshot
from blocktrain.model.text import BatchStream
from blocktrain.model.train_step import Learner, train_step
from blocktrain.node.fetch import BLOCK_PREFIX
from blocktrain.node.vector import ParameterVector, anchor_digest
from blocktrain.protocol.tensors import encode_state

P = ParamSpec("P")
T = TypeVar("T")
_SMOOTHING = 0.95


class TrainingThread:
    """The one thread in which torch works.

    It yields the processor: on Linux to other programs, to the node's own network thread, and so to
    rounds and to those who download from it. `nice` goes from 0 (no yielding) to 19.
    """

    def __init__(self, nice: int = 0) -> None:
        self._pool = ThreadPoolExecutor(1, "training", initializer=_yield_processor, initargs=(nice,))

    async def call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` after what is queued already, and wait for it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """Let the work in progress end; no more is taken."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _yield_processor(nice: int) -> None:
    """Lower the priority of this thread, and of those that torch will start from it."""
    if nice and sys.platform.startswith("linux"):  # elsewhere it would slow the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


@dataclass(slots=True)
class Progress:
    """Where the training stands; replaced in the training thread, read anywhere."""

    step: int = 0
    tokens: int = 0
    samples: int = 0
    """Sequences since the last snapshot that was committed: this holder's weight in the next round."""
    skipped: int = 0
    """Steps whose gradient was not finite; they changed nothing."""
    denoising_ce: float | None = None
    """Smoothed local loss, nats. z is made from y: no measure of the model."""
    tokens_per_s: float = 0.0


class Trainer:
    """One learner with its data, its anchor and its progress. All methods run in the training thread."""

    def __init__(self, learner: Learner, stream: BatchStream, peer_id: str) -> None:
        self.learner, self._stream, self._peer_id = learner, stream, peer_id
        self.vector = ParameterVector(learner.block)
        self.anchor_N = self.vector.read()
        self.anchor = anchor_digest(self.anchor_N)
        self.round = 0
        self.progress = Progress()
        self._generator = torch.Generator()

    def run(self, seconds: float) -> None:
        """Train for about this long, at least one step, or until the steps of a round are complete.

        Raises:
            DataError: the text can't be read any more.
        """
        spec, begin = self.learner.spec, time.perf_counter()
        done, due = 0, spec.rounds.steps * spec.optimizer.batch
        while done == 0 or (time.perf_counter() - begin < seconds and self.progress.samples != due):
            step = self.progress.step
            self._generator.manual_seed(self._noise_seed(step))
            result = train_step(self.learner, self._stream.batch(step), step, self._generator)
            self.progress.step += 1
            self.progress.samples += spec.optimizer.batch
            self.progress.tokens += spec.optimizer.batch * spec.model.context
            if result.applied:
                self.progress.denoising_ce = _smooth(self.progress.denoising_ce, result.denoising_ce)
            else:
                self.progress.skipped += 1
            done += 1
        rate = done * spec.optimizer.batch * spec.model.context / (time.perf_counter() - begin)
        self.progress.tokens_per_s = _smooth(self.progress.tokens_per_s or None, rate)

    def snapshot(self) -> Snapshot:
        """The parameters now, beside the anchor; training goes on from here."""
        return Snapshot(self.vector.read(), self.anchor_N)

    def commit(self, mean_N: np.ndarray, round_number: int, snapshot: Snapshot, samples: int) -> None:
        """Take over a round's result: local += mean − snapshot, so that steps made meanwhile are kept.

        `samples` are those that the snapshot had behind it.
        """
        self.vector.add(mean_N - snapshot.values_N)
        self._set_anchor(mean_N, round_number)
        self.progress.samples = max(0, self.progress.samples - samples)

    def adopt(self, values_N: np.ndarray, round_number: int) -> None:
        """Take over another holder's anchor, dropping local steps."""
        self.vector.write(values_N)
        self._set_anchor(values_N, round_number)
        self.progress.samples = 0

    def adopt_checkpoint(self, anchor_N: np.ndarray, round_number: int, step: int, tokens: int) -> None:
        """Take over the counters that belong to parameters restored from a checkpoint."""
        self._set_anchor(anchor_N, round_number)
        self.progress = Progress(step=step, tokens=tokens)

    def _set_anchor(self, values_N: np.ndarray, round_number: int) -> None:
        self.anchor_N, self.anchor, self.round = values_N, anchor_digest(values_N), round_number

    @torch.no_grad()
    def table(self) -> np.ndarray:
        """A copy of the embedding table, (V, D)."""
        return self.learner.table_VD.to("cpu", copy=True).numpy()

    @torch.no_grad()
    def shift_table(self, difference_VD: np.ndarray) -> None:
        """Add a difference to the embedding table."""
        table_VD = self.learner.table_VD
        table_VD.add_(torch.from_numpy(difference_VD).to(table_VD.device))

    @torch.no_grad()
    def set_table(self, table_VD: np.ndarray) -> None:
        """Replace the embedding table."""
        self.learner.table_VD.copy_(torch.from_numpy(table_VD))

    def encode(self, what: str) -> bytes:
        """Safetensors bytes of the `block` anchor or of the current `table`."""
        metadata = {"fingerprint": self.learner.spec.fingerprint, "round": str(self.round)}
        if what == "table":
            return encode_state({"table": torch.from_numpy(self.table())}, metadata)
        named = self.vector.named(self.anchor_N)
        return encode_state({BLOCK_PREFIX + name: tensor for name, tensor in named.items()}, metadata)

    def _noise_seed(self, step: int) -> int:
        text = f"blocktrain noise {self.learner.spec.seed} {self._peer_id} {step}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else _SMOOTHING * old + (1 - _SMOOTHING) * new
