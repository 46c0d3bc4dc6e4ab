"""Parts of a round as bytes: finite values of the expected number, as exact as their wire type."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol.errors import TensorError
from blocktrain.protocol.tensors import decode_part, encode_part

FINITE32 = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50)
FINITE16 = st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), max_size=50)


@given(FINITE32)
def test_fp32_parts_come_back_bit_for_bit(values: list[float]) -> None:
    values_N = np.array(values, dtype=np.float32)
    assert decode_part(encode_part(values_N, "fp32"), len(values), "fp32").tobytes() == values_N.tobytes()


@given(FINITE16)
def test_fp16_parts_come_back_exactly_where_fp16_can_hold_them(values: list[float]) -> None:
    values_N = np.array(values, dtype=np.float32)
    found_N = decode_part(encode_part(values_N, "fp16"), len(values), "fp16")
    assert found_N.dtype == np.float32
    assert found_N.tobytes() == values_N.tobytes()


@given(st.lists(st.floats(2.0**-14, 65_504, width=32), min_size=1, max_size=50))
def test_fp16_rounds_to_within_half_a_unit_in_the_last_place(values: list[float]) -> None:
    values_N = np.array(values, dtype=np.float32)
    found_N = decode_part(encode_part(values_N, "fp16"), len(values), "fp16")
    assert np.all(np.abs(found_N - values_N) <= values_N * 2.0**-11)


@pytest.mark.parametrize(
    ("value", "wire"),
    [
        (65_520.0, "fp16"),
        (-1e30, "fp16"),
        (np.nan, "fp16"),
        (np.nan, "fp32"),
        (np.inf, "fp32"),
        (-np.inf, "fp16"),
    ],
)
def test_values_that_the_wire_cannot_hold_are_not_sent(value: float, wire: str) -> None:
    with pytest.raises(TensorError, match=f"not finite in {wire}"):
        encode_part(np.array([1.0, value], dtype=np.float32), wire)


def test_the_greatest_half_is_sent() -> None:
    assert decode_part(encode_part(np.array([65_504.0], dtype=np.float32), "fp16"), 1, "fp16")[0] == 65_504


@given(st.binary(max_size=64), st.integers(0, 2**40), st.sampled_from(["fp16", "fp32"]))
def test_any_bytes_are_finite_values_of_the_expected_number_or_our_error(
    data: bytes, count: int, wire: str
) -> None:
    for expected in (count, len(data) // 2, len(data) // 4):
        try:
            values_N = decode_part(data, expected, wire)
        except TensorError:
            continue
        assert values_N.shape == (expected,)
        assert np.isfinite(values_N).all()


@pytest.mark.parametrize("wire", ["fp16", "fp32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_parts_with_nan_or_infinity_are_refused(value: float, wire: str) -> None:
    data = np.array([0.0, value], dtype={"fp16": "<f2", "fp32": "<f4"}[wire]).tobytes()
    with pytest.raises(TensorError, match="NaN or infinity"):
        decode_part(memoryview(data), 2, wire)


def test_decoded_values_can_be_written_to() -> None:
    values_N = decode_part(b"\0" * 8, 2, "fp32")
    values_N += 1
    assert values_N.tolist() == [1, 1]
