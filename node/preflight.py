"""What a node needs and what the machine has, found out before anything is joined."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from blocktrain.model.block import Block
from blocktrain.model.text import Text
from blocktrain.protocol.errors import HomeError, UsageError
from blocktrain.protocol.spec import ModelSpec, RunSpec

PROGRAM_BYTES = 450_000_000
"""The interpreter and the libraries."""
CHECKPOINTS_ON_DISK = 3
"""The two that are kept and the one being written."""


def pick_device(wanted: str) -> torch.device:
    """The device to train on. Raises: UsageError when the machine lacks the one that is wanted."""
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wanted == "auto":
        wanted = next(name for name in ("cuda", "mps", "cpu") if present[name])
    kind = wanted.partition(":")[0]
    if kind not in present:
        raise UsageError(f"--device {wanted!r}: use auto, cpu, cuda or mps")
    if not present[kind]:
        raise UsageError(f"--device {wanted}: torch finds no such device here; use --device cpu")
    try:
        return torch.device(wanted)
    except RuntimeError as error:
        raise UsageError(f"--device {wanted!r}: {str(error).splitlines()[0]}") from None


def set_threads(wanted: int) -> int:
    """Let torch use this many cores (0: all) and say how many that is. Raises: UsageError."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not 0 <= wanted <= 4 * cores:
        raise UsageError(
            f"--threads {wanted}: this machine has {cores} cores; give 1 to {cores}, or 0 for all"
        )
    torch.set_num_threads(wanted or cores)
    return wanted or cores


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory and disk that one block takes, in bytes."""

    parameters: int
    """Number of parameters of the block and the table."""
    memory: int
    disk: int


def estimate_needs(spec: RunSpec, parameters: int) -> Needs:
    """Estimate from the shapes, before anything is allocated.

    In float32: parameters, gradients, two moments and the anchor, 20 bytes a parameter; and 48 while a
    checkpoint is written (a copy of all but the gradients, twice more as bytes), which is more than a round
    takes. Activations: about 34 values a layer, token and unit of width, and 6 logits a token and vocabulary
    entry. 450 MB for the interpreter and libraries.
    """
    model, batch = spec.model, spec.optimizer.batch
    tokens = batch * model.context
    activations = 4 * tokens * (34 * model.layers * model.d_model + 6 * model.vocabulary_size)
    return Needs(
        parameters, 68 * parameters + activations + PROGRAM_BYTES, CHECKPOINTS_ON_DISK * 16 * parameters
    )


def describe_memory(needs: Needs) -> str:
    """What the memory goes to; see `estimate_needs`."""
    parts = {
        "parameters and gradients": 8 * needs.parameters,
        "optimiser": 8 * needs.parameters,
        "anchor, rounds and checkpoints": 52 * needs.parameters,
        "activations": needs.memory - 68 * needs.parameters - PROGRAM_BYTES,
        "program": PROGRAM_BYTES,
    }
    return ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in parts.items())


def check_room(needs: Needs, home: Path, max_memory_mb: float = 0.0) -> str:
    """Compare with what is free, and with what may be taken (0: all), and describe it.

    Raises:
        HomeError: the block doesn't fit.
    """
    if 0 < max_memory_mb * 1e6 < needs.memory:
        raise HomeError(
            f"this block needs {needs.memory / 1e6:,.0f} MB of memory, --max-memory allows "
            f"{max_memory_mb:,.0f}; choose a run with smaller blocks, or allow more"
        )
    free_memory, free_disk = psutil.virtual_memory().available, shutil.disk_usage(home).free
    for need, free, what, fix in (
        (needs.memory, free_memory, "memory", "choose a run with smaller blocks or a larger machine"),
        (needs.disk, free_disk, f"disk space in {home}", "choose another --home"),
    ):
        if need > free:
            raise HomeError(
                f"this block needs {need / 1e6:,.0f} MB of {what}, {free / 1e6:,.0f} are free; {fix}"
            )
    return (
        f"{needs.memory / 1e6:,.0f} MB needed, {free_memory / 1e6:,.0f} free; "
        f"disk {needs.disk / 1e6:,.0f} MB of {free_disk / 1e6:,.0f}"
    )


def count_parameters(spec: RunSpec) -> int:
    """Of one block and the table; blocks differ in values, not in size. Allocates nothing."""
    with torch.device("meta"):
        block = Block(spec.model, spec.noise.sigma_data)
    return sum(p.numel() for p in block.parameters()) + spec.model.vocabulary_size * spec.model.d_model


def describe_model(model: ModelSpec) -> str:
    """Shape of a run's model, in words."""
    return f"{model.blocks} blocks of {model.layers} layers, d_model {model.d_model}, context {model.context}"


def describe_text(train: Text, heldout: Text) -> str:
    """Size of both parts of a text."""
    documents = len(train.pieces) + len(heldout.pieces)
    return f"{len(train):,} bytes to train on, {len(heldout):,} held out ({documents} pieces)"
