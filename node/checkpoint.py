"""Checkpoints: everything a node needs to go on where it stopped, as safetensors with metadata.

Written to a temporary file, synced, renamed; the last two are kept. One that can't be used is named, and
the one before is used.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blocktrain.node.fetch import BLOCK_PREFIX
from blocktrain.node.tensor_file import read_tensors, sync_folder, write_tensors
from blocktrain.node.trainer import Trainer
from blocktrain.protocol.errors import CheckpointError, TensorError
from blocktrain.protocol.tensors import check_state

log = logging.getLogger(__name__)
FORMAT = 1
KEEP = 2
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_NUMBERS = ("block", "round", "step", "tokens")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A trainer's state at one moment, on the CPU."""

    fingerprint: str
    block: int
    round: int
    step: int
    tokens: int
    tensors: dict[str, Tensor]


def capture(trainer: Trainer) -> Checkpoint:
    """Copy a trainer's state; to be called in the training thread."""
    learner = trainer.learner
    tensors: dict[str, Tensor] = {}
    for name, parameter in learner.block.named_parameters():
        tensors[BLOCK_PREFIX + name] = parameter
        tensors |= _moments(learner.optimizer, parameter, BLOCK_PREFIX + name)
    tensors["table"] = learner.table_VD
    tensors |= _moments(learner.optimizer, learner.table_VD, "table")
    tensors["anchor"] = torch.from_numpy(trainer.anchor_N)
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    progress = trainer.progress
    return Checkpoint(
        learner.spec.fingerprint, learner.index, trainer.round, progress.step, progress.tokens, copies
    )


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put a trainer into the state of a checkpoint; to be called in the training thread.

    Raises:
        CheckpointError: it belongs to another run or block, or its tensors don't fit; nothing was changed.
    """
    learner, tensors = trainer.learner, checkpoint.tensors
    if (checkpoint.fingerprint, checkpoint.block) != (learner.spec.fingerprint, learner.index):
        raise CheckpointError(f"belongs to block {checkpoint.block} of run {checkpoint.fingerprint[:12]}")
    parameters = {BLOCK_PREFIX + n: p for n, p in learner.block.named_parameters()} | {
        "table": learner.table_VD
    }
    moments = {name: tensor for name, tensor in tensors.items() if name.startswith("moments.")}
    plain = {name: tensor for name, tensor in tensors.items() if name not in moments}
    try:
        check_state(plain, {**parameters, "anchor": torch.from_numpy(trainer.anchor_N)})
        check_state(moments, _expected_moments(parameters) if moments else {})
    except TensorError as error:
        raise CheckpointError(str(error)) from None
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(plain[name])
            if moments:
                learner.optimizer.state[parameter] = {
                    kind: moments[f"moments.{name}.{kind}"].to(parameter.device) for kind in _MOMENTS
                }
    trainer.adopt_checkpoint(plain["anchor"].numpy(), checkpoint.round, checkpoint.step, checkpoint.tokens)


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint so that a crash at any moment leaves it whole or absent; keep the last two.

    Files of later rounds stay: they were passed over, so they are damaged or another release's.

    Raises:
        CheckpointError: the disk is full or the folder can't be written; older files are untouched.
    """
    metadata = {name: str(getattr(checkpoint, name)) for name in ("fingerprint", *_NUMBERS)}
    path = folder / f"{checkpoint.round:08d}.safetensors"
    partial = path.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(partial, checkpoint.tensors, metadata, FORMAT)
        partial.replace(path)
        sync_folder(folder)
        for old in [file for file in _files(folder) if file.name <= path.name][KEEP:]:
            old.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: can't be written: {error.strerror}") from None
    return path


def load(path: Path) -> Checkpoint:
    """Read one checkpoint file. Raises: CheckpointError, which names the file and what is wrong with it."""
    tensors, metadata = read_tensors(path, FORMAT)
    numbers = {name: metadata.get(name, "") for name in _NUMBERS}
    for name, text in numbers.items():
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            raise CheckpointError(f"{path}: not a checkpoint: its metadata has no valid {name}")
    block, round_number, step, tokens = map(int, numbers.values())
    return Checkpoint(metadata.get("fingerprint", ""), block, round_number, step, tokens, tensors)


def restore_newest(trainer: Trainer, folder: Path) -> Checkpoint | None:
    """Restore the newest checkpoint that can be used; the others are named in a warning and passed over.

    To be called in the training thread.
    """
    for path in _files(folder):
        try:
            found = load(path)
        except CheckpointError as error:
            log.warning("checkpoint skipped: %s", error)
            continue
        try:
            restore(trainer, found)
        except CheckpointError as error:
            log.warning("checkpoint skipped: %s: %s", path, error)
            continue
        return found
    return None


def has_any(folder: Path) -> bool:
    """Whether a folder holds checkpoints, usable or not."""
    return bool(_files(folder))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"), reverse=True)


def _moments(optimizer: torch.optim.Optimizer, parameter: Tensor, name: str) -> dict[str, Tensor]:
    return {f"moments.{name}.{kind}": value for kind, value in optimizer.state.get(parameter, {}).items()}


def _expected_moments(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    expected = {}
    for name, parameter in parameters.items():
        expected[f"moments.{name}.step"] = torch.zeros(())
        expected |= {f"moments.{name}.{kind}": parameter for kind in _MOMENTS[1:]}
    return expected
