"""Tensors as bytes: safetensors for states, bare little-endian values for parts of a round.

Nothing is unpickled. Names, shapes, types, sizes and finiteness are checked before a value is used.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from blocktrain.protocol.errors import TensorError

WIRE_DTYPES: dict[str, np.dtype[np.floating[Any]]] = {"fp16": np.dtype("<f2"), "fp32": np.dtype("<f4")}
MAX_NAMES = 65_536
MAX_STATE_HEADER = 4_194_304
STATE_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8})
"""Types that a state may hold. Others, such as 8-bit floats, can't even be checked for NaN everywhere."""
_HEADER_LENGTH = struct.Struct("<Q")


def digest(data: bytes | memoryview) -> str:
    """The first 128 bits of SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()[:32]


def encode_state(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Safetensors bytes of named tensors. The same tensors and metadata give the same bytes."""
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in sorted(tensors.items())}
    data = save(plain)
    start = _HEADER_LENGTH.size + _HEADER_LENGTH.unpack_from(data)[0]
    # The library writes metadata in the order of a randomly seeded hash map, so it is put in here.
    tables = {"__metadata__": dict(sorted(metadata.items())), **json.loads(data[_HEADER_LENGTH.size : start])}
    header = json.dumps(tables, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # keeps the values aligned
    return b"".join((_HEADER_LENGTH.pack(len(header)), header, memoryview(data)[start:]))


def decode_state(data: bytes | bytearray, *, max_bytes: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Named tensors and metadata from safetensors bytes.

    Raises:
        TensorError: malformed, oversized, of a type not in STATE_DTYPES, or a value is NaN or infinite.
    """
    if len(data) > max_bytes:
        raise TensorError(f"state of {len(data)} bytes; at most {max_bytes} were expected")
    metadata = _metadata(data)
    try:
        tensors = load(bytes(data))  # no copy if it is `bytes`; the library takes nothing else
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise TensorError(f"not a safetensors file: {' '.join(repr(error).split())[:200]}") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in STATE_DTYPES:
            raise TensorError(f"tensor {name[:80]!r} is {tensor.dtype}, which no state holds")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise TensorError(f"tensor {name[:80]!r} holds NaN or infinity")
    return tensors, metadata


def check_state(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare names, shapes and types with those of `expected`. Raises: TensorError."""
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors:
            raise TensorError(f"tensor {name[:80]!r} is missing")
        if name not in expected:
            raise TensorError(f"tensor {name[:80]!r} does not belong here")
        got, want = tensors[name], expected[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            shown, due = f"{got.dtype} {tuple(got.shape)}", f"{want.dtype} {tuple(want.shape)}"
            raise TensorError(f"tensor {name[:80]!r} is {shown}, expected {due}")


def encode_part(values_N: np.ndarray, wire: str) -> bytes:
    """Bytes of N float32 values in the wire type.

    Raises:
        TensorError: a value is not finite, or too large for the wire type.
    """
    with np.errstate(over="ignore"):
        encoded = np.asarray(values_N, dtype=np.float32).astype(WIRE_DTYPES[wire])
    if not np.isfinite(encoded).all():
        raise TensorError(f"a value is not finite in {wire}")
    return encoded.tobytes()


def decode_part(data: bytes | memoryview, count: int, wire: str) -> np.ndarray:
    """`count` float32 values from their wire form. Raises: TensorError (length, NaN, infinity)."""
    dtype = WIRE_DTYPES[wire]
    if len(data) != count * dtype.itemsize:
        raise TensorError(f"part of {len(data)} bytes where {count * dtype.itemsize} were expected")
    values_N = np.frombuffer(data, dtype=dtype).astype(np.float32)
    if not np.isfinite(values_N).all():
        raise TensorError("part holds NaN or infinity")
    return values_N


def _metadata(data: bytes | bytearray) -> dict[str, str]:
    """The text metadata in a safetensors header; the library's in-memory loader does not give it."""
    if len(data) < _HEADER_LENGTH.size:
        raise TensorError("not a safetensors file: too short")
    (length,) = _HEADER_LENGTH.unpack_from(data)
    if length > min(MAX_STATE_HEADER, len(data) - _HEADER_LENGTH.size):
        raise TensorError("not a safetensors file: its header is cut short or too long")
    try:
        header = json.loads(data[_HEADER_LENGTH.size : _HEADER_LENGTH.size + length])
    except (ValueError, RecursionError):
        raise TensorError("not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict) or len(header) > MAX_NAMES:
        raise TensorError("not a safetensors file: its header is not a table of tensors")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise TensorError("not a safetensors file: its metadata is not text")
    return {str(k): v for k, v in metadata.items()}
