"""States as safetensors bytes: what was sent comes back, and nothing hostile gets through or costs memory."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from blocktrain.protocol.errors import TensorError
from blocktrain.protocol.tensors import (
    MAX_STATE_HEADER,
    check_state,
    decode_state,
    digest,
    encode_state,
)

LIMIT = 100_000
METADATA = {"round": "3", "fingerprint": "0" * 32, "a": "λ\n", "": ""}


def tensors() -> dict[str, Tensor]:
    return {
        "w": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,  # not contiguous
        "half": torch.tensor([0.5, -0.0], dtype=torch.float16),
        "step": torch.tensor(7),
        "empty": torch.zeros(0, 4),
    }


GOOD = encode_state(tensors(), METADATA)


def state_of(header: object, body: bytes = b"", length: int | None = None) -> bytes:
    """Hand-made safetensors bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(start: int, stop: int, shape: tuple[int, ...] = (1,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def check_line(message: str) -> None:
    """An error's message is one line that can't garble a terminal."""
    assert message.isprintable()
    assert len(message) < 400


def refusal(data: bytes) -> str:
    with pytest.raises(TensorError) as caught:
        decode_state(data, max_bytes=LIMIT)
    check_line(str(caught.value))
    return str(caught.value)


def test_a_state_comes_back_with_shapes_types_values_and_metadata() -> None:
    found, metadata = decode_state(GOOD, max_bytes=LIMIT)
    check_state(found, tensors())
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())
    assert metadata == METADATA


def test_equal_states_are_equal_bytes_whatever_the_order() -> None:
    shuffled = dict(reversed(tensors().items()))
    assert encode_state(shuffled, dict(reversed(METADATA.items()))) == GOOD
    assert digest(GOOD) != digest(encode_state(tensors(), METADATA | {"round": "4"}))


@pytest.mark.slow
def test_another_process_writes_the_same_bytes() -> None:
    # The library's own metadata is in the order of a hash map that every process seeds anew.
    code = (
        "import torch, sys; from blocktrain.protocol.tensors import digest, encode_state;"
        "print(digest(encode_state({'b': torch.ones(2), 'a': torch.ones(3)}, {c: c for c in 'hgfedcba'})))"
    )
    here = digest(encode_state({"a": torch.ones(3), "b": torch.ones(2)}, {c: c for c in "abcdefgh"}))
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert there.stdout.strip() == here


def test_the_values_stay_aligned() -> None:
    assert (struct.unpack_from("<Q", GOOD)[0] + 8) % 8 == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_infinity_are_refused(value: float, dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    tensor[2] = value
    assert (
        refusal(encode_state({"good": torch.ones(2), "bad": tensor}, {}))
        == "tensor 'bad' holds NaN or infinity"
    )


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.float64, torch.bool]
)
def test_types_that_no_state_holds_are_refused(dtype: torch.dtype) -> None:
    assert "which no state holds" in refusal(save({"x": torch.zeros(2).to(dtype)}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        state_of(b"", length=2**64 - 1),
        state_of(b"{}", length=3),
        state_of(b"{}", length=MAX_STATE_HEADER + 1),
        state_of(b"{"),
        state_of(b"[" * 50_000),
        state_of([]),
        state_of("text"),
        state_of({"a": 1}),
        state_of({"a": {}}),
        state_of({"a": entry(0, 4)}),
        state_of({"a": entry(0, 4)}, b"\0" * 3),
        state_of({"a": entry(0, 4)}, b"\0" * 5),
        state_of({"a": entry(0, 2**62, (2**60,))}, b"\0" * 4),
        state_of({"a": entry(0, 4, (2**40, 2**40))}, b"\0" * 4),
        state_of({"a": entry(0, 4, (-1,))}, b"\0" * 4),
        state_of({"a": entry(4, 0)}, b"\0" * 4),
        state_of({"a": entry(0, 8, (1,))}, b"\0" * 8),
        state_of({"a": entry(0, 4, dtype="F31")}, b"\0" * 4),
        state_of({"a": entry(0, 4), "b": entry(0, 4)}, b"\0" * 4),
        state_of({"a": entry(0, 8, (2,)), "b": entry(4, 12, (2,))}, b"\0" * 12),
        state_of({"a": entry(0, 4), "b": entry(8, 12)}, b"\0" * 12),
        state_of(
            b'{"a":%b,"a":%b}' % ((json.dumps(entry(0, 4)).encode(), json.dumps(entry(4, 8)).encode())),
            b"\0" * 8,
        ),
        state_of({"__metadata__": []}),
        state_of({"__metadata__": {"round": 3}}),
        state_of({"__metadata__": {"round": {"a": "b"}}}),
        state_of({"__metadata__": {"round": "3"}, "forged\nline": entry(0, 4, dtype="F\n1")}, b"\0" * 4),
        state_of({str(i): entry(0, 0, (0,)) for i in range(70_000)}),
        GOOD[:-1],
        GOOD + b"\0",
    ],
    ids=range(32),
)
def test_malformed_states_are_refused(data: bytes) -> None:
    with pytest.raises(TensorError) as caught:
        decode_state(data, max_bytes=10_000_000)
    check_line(str(caught.value))


def test_a_claimed_length_allocates_nothing() -> None:
    claims = [state_of({"a": entry(0, 2**40, (2**38,))}, b"\0" * 64), state_of(b"{}", length=2**40)]
    tracemalloc.start()
    try:
        for data in claims:
            refusal(data)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_state_over_the_limit_is_not_parsed() -> None:
    with pytest.raises(TensorError, match=f"state of {len(GOOD)} bytes; at most {len(GOOD) - 1}"):
        decode_state(GOOD, max_bytes=len(GOOD) - 1)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    refusal(data)
    refusal(state_of(data))


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_damaged_byte_gives_tensors_or_our_error(position: int, change: int) -> None:
    damaged = bytearray(GOOD)
    damaged[position] ^= change
    try:
        found, _ = decode_state(bytes(damaged), max_bytes=LIMIT)
    except TensorError as error:
        check_line(str(error))
    else:
        assert all(bool(torch.isfinite(tensor).all()) for tensor in found.values())


@given(st.integers(0, len(GOOD) - 1))
def test_a_state_cut_anywhere_is_refused(length: int) -> None:
    refusal(GOOD[:length])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"w": torch.zeros(2, 3)}, "tensor 'w' is torch.float32 (2, 3), expected torch.float32 (3, 2)"),
        (
            {"w": torch.zeros(3, 2).half()},
            "tensor 'w' is torch.float16 (3, 2), expected torch.float32 (3, 2)",
        ),
        (
            {"step": torch.zeros(1, dtype=torch.int64)},
            "tensor 'step' is torch.int64 (1,), expected torch.int64 ()",
        ),
        ({"extra": torch.zeros(1)}, "tensor 'extra' does not belong here"),
        ({"a\nb": torch.zeros(1)}, "tensor 'a\\nb' does not belong here"),
    ],
)
def test_the_first_tensor_that_differs_is_named(changes: dict[str, Tensor], told: str) -> None:
    with pytest.raises(TensorError) as caught:
        check_state(tensors() | changes, tensors())
    assert str(caught.value) == told


def test_a_missing_tensor_is_named() -> None:
    found = tensors()
    del found["half"]
    with pytest.raises(TensorError, match="tensor 'half' is missing"):
        check_state(found, tensors())
