"""The arithmetic of a round: parts cover the vector once, means are right to the bit, weights are bounded."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.dht.reduction import (
    MAX_ABSOLUTE,
    MAX_WEIGHT_RATIO,
    MIN_WEIGHT,
    PART_VALUES,
    Accumulator,
    check_part,
    clamp_weights,
    plan_parts,
)
from blocktrain.protocol.errors import TensorError
from blocktrain.protocol.messages import Begin, Member, decode, encode

PEERS = [f"peer{first}{second}" for first in "ABCDEFGH" for second in "abcdefgh"]


def members(count: int) -> list[str]:
    return PEERS[:count]


@given(st.integers(1, 20 * PART_VALUES), st.integers(1, 64))
def test_parts_cover_the_vector_exactly_once_and_are_fairly_shared(size: int, count: int) -> None:
    spans = plan_parts(size, members(count))
    assert [s.index for s in spans] == list(range(len(spans)))
    assert spans[0].start == 0
    assert spans[-1].stop == size
    assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
    assert all(0 < s.stop - s.start <= PART_VALUES for s in spans)
    owned = [sum(s.stop - s.start for s in spans if s.owner == peer) for peer in members(count)]
    assert sum(owned) == size
    assert max(owned) - min(owned) <= 1
    assert [s.owner for s in spans] == sorted((s.owner for s in spans), key=members(count).index)


def mean_of(parts: dict[str, np.ndarray], weights: dict[str, float]) -> np.ndarray:
    sums, results = Accumulator(weights), []
    for peer, values_N in parts.items():
        results.append(sums.add(peer, values_N))
    assert all(r is None for r in results[:-1])
    assert results[-1] is not None
    assert not sums.parts
    return results[-1]


@given(st.integers(1, 8), st.integers(0, 40), st.integers(0, 2**32), st.data())
def test_the_mean_is_numpys_weighted_mean_in_float64(
    count: int, size: int, seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    parts = {
        p: (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 4)).astype(np.float32)
        for p in members(count)
    }
    drawn = data.draw(st.lists(st.floats(MIN_WEIGHT, MAX_WEIGHT_RATIO), min_size=count, max_size=count))
    weights = dict(zip(parts, drawn, strict=True))
    got_N = mean_of(parts, weights)
    stacked_PN = np.stack(list(parts.values())).astype(np.float64)
    assert got_N.dtype == np.float32
    want_N = np.average(stacked_PN, axis=0, weights=drawn)
    # Half a unit in float32's last place, and float64's error where large values cancel.
    np.testing.assert_array_less(
        np.abs(got_N - want_N), np.abs(want_N) * 2**-23 + np.abs(stacked_PN).sum(0) * 1e-15 + 1e-40
    )


@given(st.permutations(members(4)), st.permutations(members(4)), st.integers(0, 2**32))
def test_the_mean_has_the_same_bits_in_any_order_of_arrival_and_of_weights(
    arrival: list[str], listed: list[str], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    parts = {
        p: (rng.standard_normal(100) * 10.0 ** rng.integers(-6, 4)).astype(np.float32) for p in members(4)
    }
    weights = {p: float(rng.uniform(MIN_WEIGHT, MAX_WEIGHT_RATIO)) for p in members(4)}
    first_N = mean_of(parts, weights)
    again_N = mean_of({p: parts[p] for p in arrival}, {p: weights[p] for p in listed})
    assert again_N.tobytes() == first_N.tobytes()


@given(st.integers(1, 64), st.lists(st.floats(-1e4, 1e4, width=32), max_size=20), st.integers(0, 2**32))
def test_the_mean_of_members_that_agree_is_what_they_agree_on(
    count: int, values: list[float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values_N = np.array(values, dtype=np.float32) + np.float32(0)
    weights = {p: float(rng.uniform(MIN_WEIGHT, MAX_WEIGHT_RATIO)) for p in members(count)}
    assert mean_of(dict.fromkeys(members(count), values_N), weights).tobytes() == values_N.tobytes()


def test_the_contributions_themselves_are_left_alone() -> None:
    parts = {p: np.full(3, i, dtype=np.float32) for i, p in enumerate(members(3))}
    assert mean_of(parts, dict.fromkeys(parts, 1.0)).tolist() == [1, 1, 1]
    assert [v.tolist() for v in parts.values()] == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]


def test_a_stranger_and_a_second_contribution_are_faults_of_the_caller() -> None:
    sums = Accumulator({"a": 1.0, "b": 1.0})
    sums.add("a", np.zeros(1, dtype=np.float32))
    for sender in ("a", "c"):
        with pytest.raises(AssertionError):
            sums.add(sender, np.zeros(1, dtype=np.float32))


# Weights


def test_equal_members_weigh_the_same_and_honest_differences_count() -> None:
    assert clamp_weights({"a": 320, "b": 320, "c": 320}) == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert clamp_weights({"a": 160, "b": 320, "c": 640}) == {"a": 0.5, "b": 1.0, "c": 2.0}


def test_a_member_without_samples_still_has_a_weight() -> None:
    assert clamp_weights({"a": 0, "b": 0}) == {"a": 1.0, "b": 1.0}
    assert clamp_weights({"a": 0, "b": 100, "c": 100})["a"] == 0.01


def test_an_immense_claim_is_clamped_even_between_two() -> None:
    assert clamp_weights({"honest": 320, "liar": 2**53}) == {"honest": 1.0, "liar": MAX_WEIGHT_RATIO}
    assert clamp_weights({"a": 320, "b": 320, "liar": 2**53})["liar"] == MAX_WEIGHT_RATIO


@given(st.lists(st.integers(0, 2**53), min_size=1, max_size=64))
def test_weights_are_always_bounded_ordered_and_fit_into_the_message_that_carries_them(
    samples: list[int],
) -> None:
    weights = clamp_weights(dict(zip(PEERS, samples, strict=False)))
    assert all(MIN_WEIGHT <= w <= MAX_WEIGHT_RATIO for w in weights.values())
    in_order = [weights[p] for _, p in sorted(zip(samples, PEERS, strict=False))]
    assert in_order == sorted(in_order)
    if len(samples) >= 2:
        listed = tuple(Member(p, w) for p, w in weights.items())
        begin = Begin("0" * 32, 1, listed, relative=True)
        assert decode(encode(begin)[12:]) == begin


# Values


@given(st.lists(st.floats(-MAX_ABSOLUTE, MAX_ABSOLUTE, width=32), max_size=20))
def test_sound_values_pass_unchanged(values: list[float]) -> None:
    values_N = np.array(values, dtype=np.float32)
    assert check_part(values_N) is values_N


@pytest.mark.parametrize("value", [1.001e4, -1.001e4, 1e30, np.inf, -np.inf, np.nan])
def test_values_that_no_sound_peer_sends_are_refused(value: float) -> None:
    with pytest.raises(TensorError, match="the limit is 10000"):
        check_part(np.array([0.0, value, 1.0], dtype=np.float32))
