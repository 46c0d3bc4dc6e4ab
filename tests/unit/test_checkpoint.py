"""A checkpoint holds everything that training needs, and survives whatever happens while it is written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.node import checkpoint, tensor_file
from blocktrain.node.checkpoint import Checkpoint, capture, load, restore, restore_newest, save
from blocktrain.node.trainer import Trainer
from blocktrain.protocol.errors import CheckpointError
from tests.unit.trainers import LONG_S, make_trainer, train


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Sums are in one order then."""
    torch.set_num_threads(1)


class Killed(BaseException):
    """The process ends here: nobody cleans up."""


def trained(folder: Path, steps: int = 4, round_number: int = 7) -> Trainer:
    """A trainer in the middle of a round."""
    trainer = make_trainer(folder)
    train(trainer, steps)
    trainer.commit(trainer.vector.read(), round_number, trainer.snapshot(), 0)
    train(trainer, 1)
    return trainer


def at_round(trainer: Trainer, number: int) -> Checkpoint:
    """Its state, as if it were that of another round."""
    trainer.round = number
    return capture(trainer)


def same(first: Checkpoint, second: Checkpoint) -> bool:
    """Whether two checkpoints are equal bit for bit."""
    names = ("fingerprint", "block", "round", "step", "tokens")
    return (
        all(getattr(first, name) == getattr(second, name) for name in names)
        and first.tensors.keys() == second.tensors.keys()
        and all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
    )


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Round trip


def test_parameters_moments_anchor_and_counters_come_back_bit_for_bit(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    captured = capture(trainer)
    path = save(tmp_path / "kept", captured)
    assert path.name == "00000007.safetensors"
    assert same(load(path), captured)
    moments = [name for name in captured.tensors if name.startswith("moments.")]
    assert len(moments) == 3 * (len(trainer.vector.parameters) + 1)  # those of the table, too
    again = make_trainer(tmp_path)
    restore(again, load(path))
    assert same(capture(again), captured)
    assert (again.round, again.anchor, again.progress.step) == (7, trainer.anchor, 5)
    assert np.array_equal(again.vector.read(), trainer.vector.read())


def test_resumed_training_gives_the_losses_of_the_uninterrupted_one(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    captured = capture(trainer)
    resumed = make_trainer(tmp_path)
    restore(resumed, captured)
    trainer.progress.denoising_ce = None  # the smoothed loss alone begins anew
    assert train(resumed, 6) == train(trainer, 6)
    assert np.array_equal(resumed.vector.read(), trainer.vector.read())
    assert np.array_equal(resumed.table(), trainer.table())


def test_a_checkpoint_is_a_copy_that_training_does_not_move(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    captured = capture(trainer)
    kept = load(save(tmp_path / "kept", captured))
    train(trainer, 2)
    assert same(captured, kept)


def test_a_checkpoint_before_the_first_step_has_no_moments_and_can_be_resumed(tmp_path: Path) -> None:
    captured = capture(make_trainer(tmp_path))
    assert not any(name.startswith("moments.") for name in captured.tensors)
    resumed, fresh = make_trainer(tmp_path), make_trainer(tmp_path)
    restore(resumed, captured)
    resumed.run(LONG_S)
    fresh.run(LONG_S)
    assert np.array_equal(resumed.vector.read(), fresh.vector.read())


# Which are kept


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    trainer, folder = trained(tmp_path), tmp_path / "kept"
    for number in (7, 8, 9, 9, 12):
        save(folder, at_round(trainer, number))
    assert files(folder) == ["00000009.safetensors", "00000012.safetensors"]


def test_what_was_just_saved_stays_though_files_of_later_rounds_are_unusable(tmp_path: Path) -> None:
    trainer, folder = trained(tmp_path), tmp_path / "kept"
    folder.mkdir()
    for number in (100, 101):
        (folder / f"{number:08d}.safetensors").write_bytes(b"damaged")
    for number in (1, 2, 3):
        save(folder, at_round(trainer, number))
    assert [name[5:8] for name in files(folder)] == ["002", "003", "100", "101"]
    found = restore_newest(make_trainer(tmp_path), folder)
    assert found is not None
    assert found.round == 3


def test_no_folder_and_an_empty_folder_have_no_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    (tmp_path / "empty").mkdir()
    assert restore_newest(trainer, tmp_path / "none") is None
    assert restore_newest(trainer, tmp_path / "empty") is None


# Writing is atomic


def break_at(monkeypatch: pytest.MonkeyPatch, place: str, error: Callable[[], BaseException]) -> None:
    """Let this step of a save fail."""

    def fail(*_: object, **__: object) -> None:
        raise error()

    def write_half(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise error()

    if place == "half":
        monkeypatch.setattr(tensor_file, "write_synced", write_half)
    elif place == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    elif place == "sync_folder":
        monkeypatch.setattr(checkpoint, "sync_folder", fail)
    else:
        monkeypatch.setattr(Path, place, fail)


@pytest.mark.parametrize("place", ["mkdir", "open", "half", "fsync", "replace", "sync_folder"])
@pytest.mark.parametrize("end", ["error", "kill"])
def test_a_save_that_fails_at_any_step_leaves_a_whole_checkpoint(
    tmp_path: Path, place: str, end: str
) -> None:
    trainer, folder = trained(tmp_path), tmp_path / "kept"
    old = at_round(trainer, 7)
    save(folder, old)
    train(trainer, 1)
    new = at_round(trainer, 8)
    with pytest.MonkeyPatch.context() as patch:
        break_at(patch, place, Killed if end == "kill" else lambda: OSError(errno.ENOSPC, "No space left"))
        if end == "kill":
            with pytest.raises(Killed):
                save(folder, new)
        else:
            with pytest.raises(CheckpointError, match=r"00000008\.safetensors: can't be written: No space"):
                save(folder, new)
    again = make_trainer(tmp_path)
    found = restore_newest(again, folder)
    assert found is not None
    assert same(found, new if place == "sync_folder" else old)
    assert same(capture(again), found)
    if end == "error":
        assert not list(folder.glob("*.tmp"))
    save(folder, new)
    assert files(folder) == ["00000007.safetensors", "00000008.safetensors"]
