"""Averaging among the holders of a block: the result is right to the bit, and the same for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from blocktrain.protocol.messages import Join
from blocktrain.protocol.spec import RunSpec
from tests.swarm.members import HolderOfBlock, hold_block, members, round_of

pytestmark = pytest.mark.slow
SIZE = 10_007
FP16 = RunSpec.from_mapping({"name": "tests", "rounds": {"wire": "fp16", "deadline_s": 10, "timeout_s": 20}})


def weighted_mean(holders: list[HolderOfBlock], weights: Sequence[float]) -> np.ndarray:
    return np.average([h.values_N.astype(np.float64) for h in holders], axis=0, weights=weights)


@pytest.mark.parametrize("count", [2, 3, 4])
async def test_the_result_is_the_weighted_mean_and_the_same_for_all(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With differences to a common anchor, then with whole parameters; several parts a member (fault 2)."""
    monkeypatch.setattr("blocktrain.dht.reduction.PART_VALUES", 300)
    async with members(count, tmp_path) as joined:
        holders = await hold_block(joined, SIZE)
        for index, holder in enumerate(holders):
            holder.join = Join(4, "a" * 32, 100 + 50 * index)
            holder.anchor_N = np.full(SIZE, 2.0, np.float32)
        median = sorted(h.join.samples for h in holders)[(count - 1) // 2]
        expected_N = weighted_mean(holders, [h.join.samples / median for h in holders])
        (commit, *_) = await round_of(holders)
        assert commit.round == 5
        assert commit.members == tuple(sorted(h.member.peer_id for h in holders))
        assert np.abs(commit.mean_N - expected_N).max() < 1e-6
        assert np.abs(commit.mean_N - holders[0].values_N).max() > 0.1
        holders[0].join = dataclasses.replace(holders[0].join, round=7, anchor="b" * 32)
        holders[0].anchor_N = np.full(SIZE, -50.0, np.float32)
        (commit, *_) = await round_of(holders)
        assert commit.round == 8
        assert np.abs(commit.mean_N - expected_N).max() < 1e-6


async def test_fp16_on_the_wire_costs_only_its_rounding(tmp_path: Path) -> None:
    async with members(3, tmp_path, FP16) as joined:
        holders = await hold_block(joined, SIZE)
        (commit, *_) = await round_of(holders)
        error_N = np.abs(commit.mean_N - weighted_mean(holders, [1, 1, 1]))
        assert error_N.max() < 2 * 2**-11 * 4  # two roundings of half a unit in the last place below 4
        assert 0 < error_N.mean() < 1e-3


async def test_one_value_is_averaged_by_more_members_than_there_are_values(tmp_path: Path) -> None:
    async with members(3, tmp_path) as joined:
        holders = await hold_block(joined, 1)
        (commit, *_) = await round_of(holders)
        assert abs(commit.mean_N[0] - weighted_mean(holders, [1, 1, 1])[0]) < 1e-6


async def test_weights_are_bounded_whatever_is_claimed(tmp_path: Path) -> None:
    """0 from all gives NaN in hivemind, and 1e12 is taken at its word (fault 12)."""
    async with members(2, tmp_path) as joined:
        holders = await hold_block(joined, 100)
        for claims, weights in (((0, 0), [1, 1]), ((2**53, 100), [4, 1]), ((2**53, 0), [4, 1])):
            for holder, samples in zip(holders, claims, strict=True):
                holder.join = dataclasses.replace(holder.join, samples=samples)
            (commit, *_) = await round_of(holders)
            assert np.abs(commit.mean_N - weighted_mean(holders, weights)).max() < 1e-6
