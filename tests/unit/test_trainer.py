"""Local training: reproducible steps, exact rounds, and commits that keep what was learned meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.node.fetch import wanted_block, wanted_table
from blocktrain.node.trainer import TrainingThread
from blocktrain.node.vector import anchor_digest
from blocktrain.protocol.errors import DataError
from blocktrain.protocol.tensors import check_state, decode_state
from tests.unit.trainers import BATCH, CONTEXT, LONG_S, ROUND_SAMPLES, STEPS, make_trainer, train


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Sums are in one order then."""
    torch.set_num_threads(1)


def test_a_run_stops_exactly_at_the_steps_of_a_round(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.run(LONG_S)
    progress = trainer.progress
    assert (progress.step, progress.samples, progress.skipped) == (STEPS, ROUND_SAMPLES, 0)
    assert progress.tokens == STEPS * BATCH * CONTEXT
    assert progress.tokens_per_s > 0


def test_training_goes_on_past_a_round_that_has_not_come(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.run(LONG_S)
    trainer.run(0.0)
    assert trainer.progress.step == STEPS + 1


def test_the_same_peer_trains_alike_and_another_one_differently(tmp_path: Path) -> None:
    first, again, other = (make_trainer(tmp_path, peer_id=p) for p in ("a", "a", "b"))
    assert train(first, 4) == train(again, 4)
    assert np.array_equal(first.vector.read(), again.vector.read())
    assert train(other, 4) != train(make_trainer(tmp_path, peer_id="a"), 4)


def test_noise_has_a_seed_of_its_own_for_every_peer_and_step(tmp_path: Path) -> None:
    trainers = [make_trainer(tmp_path, peer_id=peer) for peer in ("a", "b", "a 1")]
    seeds = {trainer._noise_seed(step) for trainer in trainers for step in range(50)}
    assert len(seeds) == 150
    assert trainers[0]._noise_seed(7) == make_trainer(tmp_path, peer_id="a")._noise_seed(7)


def test_a_commit_keeps_the_steps_made_meanwhile(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.run(LONG_S)
    snapshot, samples = trainer.snapshot(), trainer.progress.samples
    train(trainer, 2)
    before_N = trainer.vector.read()
    mean_N = snapshot.values_N + np.random.default_rng(1).normal(size=trainer.vector.size).astype(np.float32)
    trainer.commit(mean_N, 1, snapshot, samples)
    assert np.array_equal(trainer.vector.read(), before_N + (mean_N - snapshot.values_N))
    assert np.array_equal(trainer.anchor_N, mean_N)
    assert (trainer.anchor, trainer.round) == (anchor_digest(mean_N), 1)
    assert trainer.progress.samples == 2 * BATCH  # those that the mean does not know


def test_the_mean_alone_is_left_when_nothing_was_trained_meanwhile(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    snapshot = trainer.snapshot()
    mean_N = np.random.default_rng(2).normal(size=trainer.vector.size).astype(np.float32)
    trainer.commit(mean_N, 1, snapshot, 0)
    assert np.allclose(trainer.vector.read(), mean_N, atol=1e-6)
    assert trainer.progress.samples == 0


def test_a_snapshot_is_not_moved_by_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    snapshot = trainer.snapshot()
    values_N, anchor_N = snapshot.values_N.copy(), snapshot.anchor_N.copy()
    train(trainer, 2)
    assert np.array_equal(snapshot.values_N, values_N)
    assert np.array_equal(snapshot.anchor_N, anchor_N)
    assert not np.array_equal(trainer.vector.read(), values_N)


def test_the_anchor_at_the_start_is_that_of_every_holder(tmp_path: Path) -> None:
    first, second = make_trainer(tmp_path, peer_id="a"), make_trainer(tmp_path, peer_id="b")
    assert first.anchor == second.anchor != make_trainer(tmp_path, block=1).anchor


def test_adopting_drops_local_steps(tmp_path: Path) -> None:
    trainer, donor = make_trainer(tmp_path), make_trainer(tmp_path, peer_id="donor")
    train(donor, 1)
    train(trainer, 2)
    values_N = donor.vector.read()
    trainer.adopt(values_N, 9)
    assert np.array_equal(trainer.vector.read(), values_N)
    assert (trainer.round, trainer.anchor) == (9, anchor_digest(values_N))
    assert (trainer.progress.samples, trainer.progress.step) == (0, 2)


def test_a_table_is_copied_shifted_and_replaced(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    before_VD = trainer.table()
    difference_VD = np.full_like(before_VD, 0.25)
    trainer.shift_table(difference_VD)
    assert np.array_equal(trainer.table(), before_VD + difference_VD)
    trainer.set_table(before_VD)
    assert np.array_equal(trainer.table(), before_VD)
    assert trainer.learner.table_VD.requires_grad
    assert trainer.learner.table_VD.is_leaf
    train(trainer, 1)
    assert not np.array_equal(trainer.table(), before_VD)


def test_a_block_is_given_away_as_its_anchor_and_a_table_as_it_is_now(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    train(trainer, 2)
    tensors, metadata = decode_state(trainer.encode("block"), max_bytes=2**24)
    wanted = wanted_block(0, trainer.vector)
    check_state(tensors, wanted.expected)
    joined_N = trainer.vector.join({name.removeprefix("block."): t for name, t in tensors.items()})
    assert anchor_digest(joined_N) == trainer.anchor
    assert metadata == {"fingerprint": trainer.learner.spec.fingerprint, "round": "0"}
    tensors, _ = decode_state(trainer.encode("table"), max_bytes=2**24)
    check_state(tensors, wanted_table(0, trainer.learner.table_VD).expected)
    assert np.array_equal(tensors["table"].numpy(), trainer.table())


def test_a_step_that_is_not_finite_is_counted_and_changes_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    train(trainer, 1)
    parameter = next(iter(trainer.vector.parameters.values()))
    with torch.no_grad():
        kept = parameter.clone()
        parameter.fill_(float("inf"))
    before_N, loss = trainer.vector.read(), trainer.progress.denoising_ce
    trainer.run(0.0)
    assert (trainer.progress.skipped, trainer.progress.step) == (1, 2)
    assert np.array_equal(trainer.vector.read(), before_N)
    assert trainer.progress.denoising_ce == loss
    with torch.no_grad():
        parameter.copy_(kept)
    assert len(train(trainer, 1)) == 1


def test_a_text_that_was_cut_short_ends_training_by_name(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    (tmp_path / "text.txt").write_bytes(b"short")
    with pytest.raises(DataError, match=r"text\.txt: became shorter"):
        trainer.run(0.0)


def test_work_in_the_training_thread_is_done_in_order_and_its_errors_come_back() -> None:
    async def body() -> list[int]:
        done: list[int] = []
        with contextlib.closing(TrainingThread()) as thread:
            await asyncio.gather(*(thread.call(done.append, i) for i in range(100)))
            with pytest.raises(ZeroDivisionError):
                await thread.call(divmod, 1, 0)
            assert await thread.call(divmod, 7, 2) == (3, 1)
        return done

    assert asyncio.run(body()) == list(range(100))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="priorities of threads are Linux's")
def test_training_stands_back_and_the_network_does_not() -> None:
    def priorities() -> tuple[int, int]:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.getpriority(
            os.PRIO_PROCESS, os.getpid()
        )

    async def both() -> tuple[int, int]:
        with contextlib.closing(TrainingThread(7)) as thread:
            return await thread.call(priorities)

    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert asyncio.run(both()) == (before + 7, before)
