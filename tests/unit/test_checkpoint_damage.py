"""A checkpoint that can't be used is named, and the one before is used; a full disk stops nobody."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from blocktrain.dht.session import Session
from blocktrain.node.checkpoint import FORMAT, Checkpoint, capture, load, restore, restore_newest, save
from blocktrain.node.events import EventLog
from blocktrain.node.tensor_file import LFS_POINTER, read_tensors, write_tensors
from blocktrain.node.trainer import Trainer, TrainingThread
from blocktrain.node.work import Work
from blocktrain.protocol.errors import CheckpointError
from tests.unit.trainers import make_trainer, small_spec, train

NEWEST = "00000008.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of rounds 7 and 8."""
    torch.set_num_threads(1)
    trainer = make_trainer(tmp_path)
    for number in (7, 8):
        train(trainer, 1)
        trainer.round = number
        save(tmp_path / "kept", capture(trainer))
    return tmp_path / "kept"


def rewrite(path: Path, file_format: int = FORMAT, **changes: str) -> None:
    """Write a sound file with other metadata."""
    tensors, metadata = read_tensors(path, FORMAT)
    write_tensors(path, tensors, metadata | changes, file_format)


def replace_by_another(path: Path, **kind: Any) -> None:
    """A sound checkpoint of another trainer."""
    other = make_trainer(path.parent.parent, **kind)
    other.round = 8
    save(path.parent, capture(other))


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "damaged: not a safetensors file: too short"),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-1000]), "damaged: not a safetensors file"),
    "header cut": (lambda p: p.write_bytes(p.read_bytes()[:100]), "damaged: not a safetensors file: its hea"),
    "not one of ours": (lambda p: p.write_text("x" * 5000), "damaged: not a safetensors file"),
    "lfs pointer": (lambda p: p.write_bytes(LFS_POINTER + b".com/spec/v1\n"), "a git-lfs pointer"),
    "newer": (lambda p: rewrite(p, FORMAT + 1), "it is newer; update blocktrain"),
    "no step": (lambda p: rewrite(p, step="-1"), "its metadata has no valid step"),
    "other run": (lambda p: replace_by_another(p, spec=small_spec("other")), "belongs to block 0 of run"),
    "other block": (lambda p: replace_by_another(p, block=1), "belongs to block 1 of run"),
    "other shape": (
        lambda p: rewrite_tensors(p, lambda t: t | {"table": torch.zeros(2, 2)}),
        "tensor 'table' is torch.float32 (2, 2), expected",
    ),
    "a moment missing": (
        lambda p: rewrite_tensors(p, lambda t: {n: v for n, v in t.items() if n != "moments.table.exp_avg"}),
        "tensor 'moments.table.exp_avg' is missing",
    ),
    "NaN": (
        lambda p: rewrite_tensors(p, lambda t: t | {"anchor": t["anchor"] * float("nan")}),
        "holds NaN or infinity",
    ),
    "a folder": (replace_by_a_folder, "can't be read: Is a directory"),
}


def rewrite_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors, metadata = read_tensors(path, FORMAT)
    write_tensors(path, change(tensors), metadata, FORMAT)


@pytest.mark.parametrize("kind", DAMAGE)
def test_an_unusable_checkpoint_is_named_and_the_one_before_is_used(
    folder: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    damage, words = DAMAGE[kind]
    damage(folder / NEWEST)
    trainer = make_trainer(folder.parent)
    found = restore_newest(trainer, folder)
    assert found is not None
    assert (found.round, trainer.round, trainer.progress.step) == (7, 7, 1)
    (warning,) = caplog.messages
    assert str(folder / NEWEST) in warning
    assert words in warning


def test_every_flipped_bit_is_noticed(folder: Path) -> None:
    path = folder / NEWEST
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*rng.integers(0, header, 60), *rng.integers(header, len(whole), 60)]
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match=NEWEST):
            load(path)


def test_a_refused_checkpoint_changes_nothing(folder: Path) -> None:
    sound, trainer = load(folder / NEWEST), make_trainer(folder.parent)
    before_N = trainer.vector.read()
    cut = {name: tensor for name, tensor in sound.tensors.items() if name != "moments.table.exp_avg"}
    broken = Checkpoint(sound.fingerprint, sound.block, sound.round, sound.step, sound.tokens, cut)
    with pytest.raises(CheckpointError, match=r"moments\.table\.exp_avg"):
        restore(trainer, broken)
    assert np.array_equal(trainer.vector.read(), before_N)
    assert (trainer.round, trainer.progress.step, len(trainer.learner.optimizer.state)) == (0, 0, 0)


def test_when_none_can_be_used_each_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in folder.iterdir():
        path.write_bytes(b"damaged")
    assert restore_newest(make_trainer(folder.parent), folder) is None
    assert [name in message for name, message in zip("87", caplog.messages, strict=True)] == [True, True]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("can't mount here")
    yield place
    subprocess.run(["umount", str(place)], check=True, capture_output=True)


def save_and_go_on(trainer: Trainer, folder: Path) -> None:
    """A node's own save, and a step after it."""
    session = cast(Session, SimpleNamespace(spec=trainer.learner.spec, swarm=SimpleNamespace(peer_id="me")))

    async def body() -> None:
        with contextlib.closing(TrainingThread()) as thread:
            work = Work(session, trainer, thread, folder, EventLog(None))
            await work.save()
            await thread.call(trainer.run, 0.0)

    asyncio.run(body())


def test_a_disk_that_is_full_is_a_warning_and_training_goes_on(
    tmp_path: Path, tiny_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path)
    train(trainer, 1)
    with caplog.at_level(logging.WARNING):
        save_and_go_on(trainer, tiny_disk / "kept")
    assert "checkpoint not saved, training goes on:" in caplog.text
    assert "can't be written: No space left on device" in caplog.text
    assert trainer.progress.step == 2
    assert not list((tiny_disk / "kept").iterdir())


def test_a_disk_that_fills_up_leaves_the_checkpoint_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(folder.parent)
    assert restore_newest(trainer, folder) is not None

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    train(trainer, 1)
    trainer.round = 9
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "fsync", full)
        save_and_go_on(trainer, folder)
    assert "checkpoint not saved, training goes on:" in caplog.text
    assert trainer.progress.step == 4
    assert sorted(path.name for path in folder.iterdir()) == ["00000007.safetensors", NEWEST]
