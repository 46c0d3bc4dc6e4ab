"""Checkpoints: everything a node needs to go on where it stopped, as safetensors with metadata.

Written to a temporary file, synced, renamed; the last two are kept. A damaged one is named and the one
before is used.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blocktrain.node.trainer import BLOCK_PREFIX, Trainer
from blocktrain.protocol.errors import CheckpointError, TensorError
from blocktrain.protocol.tensors import check_state, decode_state, encode_state

log = logging.getLogger(__name__)
FORMAT = 1
KEEP = 2
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_NUMBERS = ("format", "block", "round", "step", "tokens")


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

    Raises:
        CheckpointError: the disk is full or the folder can't be written; older files are untouched.
    """
    metadata = {
        "format": str(FORMAT),
        "fingerprint": checkpoint.fingerprint,
        "block": str(checkpoint.block),
        "round": str(checkpoint.round),
        "step": str(checkpoint.step),
        "tokens": str(checkpoint.tokens),
        "content": _content_hash(checkpoint.tensors),
    }
    path = folder / f"{checkpoint.round:08d}.safetensors"
    partial = path.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(encode_state(checkpoint.tensors, metadata))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(folder)
        for old in _files(folder)[KEEP:]:
            old.unlink()
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: can't be written: {error.strerror}") from None
    return path


def load(path: Path) -> Checkpoint:
    """Read one checkpoint file. Raises: CheckpointError, which names the file and what is wrong with it."""
    try:
        data = path.read_bytes()
        if data.startswith(b"version https://git-lfs"):
            raise CheckpointError(f"{path}: a git-lfs pointer, not the file itself; run `git lfs pull`")
        tensors, metadata = decode_state(data, max_bytes=len(data))
        numbers = {name: int(metadata[name]) for name in _NUMBERS if metadata[name].isdecimal()}
        if numbers["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: written by another release (format {numbers['format']}, not {FORMAT})"
            )
        if metadata["content"] != _content_hash(tensors):
            raise CheckpointError(f"{path}: damaged: its content does not fit its hash")
        return Checkpoint(
            metadata["fingerprint"],
            numbers["block"],
            numbers["round"],
            numbers["step"],
            numbers["tokens"],
            tensors,
        )
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from None
    except TensorError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: its metadata lacks a valid {error}") from None


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that can be read; damaged ones are named in a warning and passed over."""
    for path in _files(folder):
        try:
            return load(path)
        except CheckpointError as error:
            log.warning("checkpoint skipped: %s", error)
    return None


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


def _content_hash(tensors: Mapping[str, Tensor]) -> str:
    content = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        content.update(tensor.contiguous().reshape(-1).numpy().data.cast("B"))
    return content.hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
