"""Named tensors in a safetensors file that can tell whether it is whole, and whose it is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from blocktrain.protocol.errors import CheckpointError, TensorError
from blocktrain.protocol.tensors import decode_state, encode_state

LFS_POINTER = b"version https://git-lfs"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], file_format: int
) -> None:
    """Write tensors, the caller's metadata, the format's number and a hash of the content, down to the disk.

    Raises:
        OSError: the system did not let us.
    """
    told = {**metadata, "format": str(file_format)}
    write_synced(path, encode_state(tensors, told | {"content": content_hash(tensors, told)}))


def read_tensors(path: Path, file_format: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file that `write_tensors` wrote in this format.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from None
    if data.startswith(LFS_POINTER):
        raise CheckpointError(f"{path}: a git-lfs pointer, not the file itself; run `git lfs pull`")
    try:
        tensors, metadata = decode_state(data, max_bytes=len(data))
    except TensorError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
    if not {"format", "content"} <= metadata.keys():
        raise CheckpointError(f"{path}: not a file of blocktrain: its metadata lacks format or content")
    check_format(path, metadata["format"], file_format)
    if metadata["content"] != content_hash(tensors, metadata):
        raise CheckpointError(f"{path}: damaged: its content does not fit its hash")
    return tensors, metadata


def check_format(path: Path, found: object, known: int) -> None:
    """Refuse what another release wrote in another format. Raises: CheckpointError."""
    text = str(found)[:40]
    if text != str(known):
        newer = text.isdecimal() and int(text) > known
        fix = "it is newer; update blocktrain" if newer else "it is damaged, or from an older release"
        raise CheckpointError(f"{path}: of format {text!r}, where this release reads format {known}: {fix}")


def content_hash(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256, in hexadecimal, of names, types, shapes, values and all metadata but the hash itself."""
    content = hashlib.sha256()
    content.update(repr(sorted((k, v) for k, v in metadata.items() if k != "content")).encode())
    for name, tensor in sorted(tensors.items()):
        content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        values = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        content.update(values.numpy().data)
    return content.hexdigest()


def write_synced(path: Path, data: bytes) -> None:
    """Write a file so that it survives a power cut after this call. Raises: OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
