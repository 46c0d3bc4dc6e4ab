"""An exported model: a folder that can be loaded and evaluated anywhere, without a swarm.

`config.json` holds the format, the run's specification and the blocks' rounds; `block-<i>.safetensors`
holds block i's parameters (`block.…`) and its copy of the embedding table (`table`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blocktrain.model.block import Block
from blocktrain.node.collect import (
    CollectedModel,
    Piece,
    assemble,
    empty_table,
    load_parameters,
    named_parameters,
)
from blocktrain.node.tensor_file import (
    LFS_POINTER,
    check_format,
    read_tensors,
    sync_folder,
    write_synced,
    write_tensors,
)
from blocktrain.protocol.command import program_version
from blocktrain.protocol.errors import CheckpointError, HomeError, SpecError, TensorError, UsageError
from blocktrain.protocol.schema import bounded, from_mapping
from blocktrain.protocol.spec import MAX_SPEC_BYTES, RunSpec
from blocktrain.protocol.tensors import check_state

FORMAT = 1
"""Of the folder, and of the files in it."""
CONFIG = "config.json"
MAX_CONFIG_BYTES = 4 * MAX_SPEC_BYTES
_OURS = re.compile(r"config\.json|block-[0-9]+\.safetensors")


@dataclass(frozen=True, slots=True)
class _Header:
    """`config.json`, but for the specification."""

    format: int = bounded(low=1)
    blocktrain: str = bounded(low=1, high=32)
    """Version of the program that wrote it."""
    fingerprint: str = bounded(pattern=r"[0-9a-f]{32}")
    rounds: tuple[int, ...] = bounded(low=1)


def typed_path(text: str) -> Path:
    """A path as users type it: a leading `~` is their home."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path's raises for an unknown ~user


def check_target(folder: Path) -> None:
    """Find out, before anything is downloaded, whether an export may be written there.

    Raises:
        UsageError: it is a file, or a folder that holds anything but an earlier export.
        HomeError: the system would not let us write there.
    """
    folder = folder.resolve()
    try:
        if folder.is_dir():
            _check_replaceable(folder)
        elif folder.exists():
            raise UsageError(f"{folder}: is a file; give a new folder, or that of an earlier export")
        above = next(path for path in folder.parents if path.exists())
    except OSError as error:
        raise HomeError(f"{folder}: can't be read: {error.strerror}; choose another --out") from None
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise HomeError(f"{folder}: {above} can't be written; choose another --out")


def save_export(folder: Path, collected: CollectedModel) -> None:
    """Write a model to a new or empty folder, or in place of an earlier export, whole or not at all.

    Everything is written to a folder beside it, which is renamed when it is complete.

    Raises:
        UsageError, HomeError: as `check_target`, or the disk is full; what was there before still is.
    """
    check_target(folder)
    folder = folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
            fresh = Path(beside, "new")
            fresh.mkdir()
            _write(fresh, collected)
            _swap(fresh, folder, aside=Path(f"{beside}.old"))
    except OSError as error:
        raise HomeError(f"{folder}: can't be written: {error.strerror}; choose another --out") from None


def load_export(folder: Path, device: torch.device) -> CollectedModel:
    """Read an exported model.

    Raises:
        UsageError: there is no such folder.
        CheckpointError: a file of it is missing, damaged, foreign or of another format; the message names it.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 - Path's raises where a folder above can't be read
        raise UsageError(f"{folder}: no such folder; give one that blocktrain-export wrote")
    spec, rounds = _read_config(folder / CONFIG)
    pieces = [_read_block(folder / _block_name(i), spec, i, number) for i, number in enumerate(rounds)]
    return assemble(spec, pieces, device)


def _block_name(block: int) -> str:
    return f"block-{block}.safetensors"


def _write(folder: Path, collected: CollectedModel) -> None:
    model = collected.model
    fingerprint = model.spec.fingerprint
    for i, (block, table_VD) in enumerate(zip(model.blocks, model.tables, strict=True)):
        metadata = {"fingerprint": fingerprint, "block": str(i), "round": str(collected.rounds[i])}
        tensors = {**named_parameters(block), "table": table_VD}
        write_tensors(folder / _block_name(i), tensors, metadata, FORMAT)
    config = {
        "format": FORMAT,
        "blocktrain": program_version(),
        "fingerprint": fingerprint,
        "rounds": collected.rounds,
        "run": model.spec.to_mapping(),
    }
    write_synced(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    sync_folder(folder)


def _swap(fresh: Path, folder: Path, aside: Path) -> None:
    """Put a folder in the place of another one, or of none.

    The other one is moved aside first, and back if that is where it ends: at no moment is neither whole.
    """
    replaces = folder.is_dir()
    if replaces:
        folder.rename(aside)
    try:
        fresh.rename(folder)
    except OSError:
        if replaces:
            aside.rename(folder)
        raise
    sync_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _check_replaceable(folder: Path) -> None:
    """Refuse folders that hold anything that we did not write. Raises: UsageError."""
    names = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    if foreign:
        raise UsageError(f"{folder}: holds {foreign[0]!r}, which no export does; give an empty folder")
    if names and not _is_ours(folder / CONFIG):
        raise UsageError(f"{folder}: holds files but no {CONFIG} of an export; give an empty folder")


def _is_ours(config: Path) -> bool:
    with contextlib.suppress(CheckpointError):
        return {"format", "blocktrain", "fingerprint"} <= _read_json(config).keys()
    return False


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; is this a folder that blocktrain-export wrote?") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from None
    if data.startswith(LFS_POINTER):
        raise CheckpointError(f"{path}: a git-lfs pointer, not the file itself; run `git lfs pull`")
    try:
        document = json.loads(data) if len(data) <= MAX_CONFIG_BYTES else None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: damaged: not valid JSON") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: not the configuration of an exported model")
    return document


def _read_config(path: Path) -> tuple[RunSpec, tuple[int, ...]]:
    """The run's specification and the round of each block. Raises: CheckpointError."""
    data = _read_json(path)
    if "format" not in data or "run" not in data:
        raise CheckpointError(f"{path}: not the configuration of an exported model: it has no format or run")
    check_format(path, data["format"], FORMAT)
    mapping = data.pop("run")
    try:
        header = from_mapping(_Header, data, error=CheckpointError)
        spec = RunSpec.from_mapping(mapping)
    except SpecError as error:
        raise CheckpointError(f"{path}: run: {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if spec.fingerprint != header.fingerprint:
        raise CheckpointError(f"{path}: damaged: its run does not fit its fingerprint")
    if len(header.rounds) != spec.model.blocks:
        raise CheckpointError(f"{path}: rounds: {len(header.rounds)} of them for {spec.model.blocks} blocks")
    return spec, header.rounds


def _read_block(path: Path, spec: RunSpec, index: int, round_number: int) -> Piece:
    tensors, metadata = read_tensors(path, FORMAT)
    if metadata.get("fingerprint") != spec.fingerprint:
        raise CheckpointError(f"{path}: belongs to another run than {CONFIG} beside it")
    if (metadata.get("block"), metadata.get("round")) != (str(index), str(round_number)):
        raise CheckpointError(
            f"{path}: holds block {metadata.get('block')} of round {metadata.get('round')}, where {CONFIG} "
            f"says block {index} of round {round_number}; export the model again"
        )
    block = Block(spec.model, spec.noise.sigma_data)
    try:
        check_state(tensors, {**named_parameters(block), "table": empty_table(spec)})
    except TensorError as error:
        raise CheckpointError(f"{path}: {error}") from None
    table_VD = tensors.pop("table")
    load_parameters(block, tensors)
    return Piece(block, table_VD, round_number)
