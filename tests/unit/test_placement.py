"""Newcomers go where they are needed most, and spread where blocks are equally needy."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from blocktrain.dht.directory import Holder
from blocktrain.node.placement import choose_block, parse_block
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.records import PeerRecord


def holder(block: int, tokens_per_s: float = 1000.0, round_number: int = 5) -> Holder:
    record = PeerRecord(block, round_number, 0, tokens_per_s, None, "0" * 32, (), "0.1.0", 0.0)
    return Holder("peer", record, 30.0)


def choices(*holders: list[Holder]) -> set[int]:
    """All blocks that newcomers choose in this directory."""
    directory = dict(enumerate(holders))
    return {choose_block(directory, random.Random(seed))[0] for seed in range(40)}


def test_a_block_that_nobody_holds_comes_first() -> None:
    assert choices([holder(0)], [], [holder(2)]) == {1}
    block, reason = choose_block({0: [holder(0)], 1: []}, random.Random(0))
    assert block == 1
    assert reason == "nobody holds it (holders of each block: 0: 1, 1: 0)"


def test_then_the_one_with_the_fewest_holders() -> None:
    assert choices([holder(0)] * 3, [holder(1)] * 2, [holder(2)] * 3) == {1}


def test_then_the_slowest_and_then_the_one_that_is_furthest_behind() -> None:
    assert choices([holder(0)], [holder(1, 200.0)], [holder(2)]) == {1}
    assert choices([holder(0)], [holder(1, round_number=3)], [holder(2)]) == {1}


def test_a_difference_in_speed_that_is_only_noise_does_not_count() -> None:
    assert choices([holder(0, 1010.0)], [holder(1, 990.0)]) == {0, 1}


def test_newcomers_that_see_an_empty_swarm_spread_evenly() -> None:
    empty: dict[int, list[Holder]] = {0: [], 1: [], 2: []}
    drawn = Counter(choose_block(empty, random.Random(seed))[0] for seed in range(300))
    assert drawn.keys() == {0, 1, 2}
    assert min(drawn.values()) > 60  # of 100 expected: five standard deviations


@pytest.mark.parametrize(("text", "block"), [("auto", None), ("0", 0), ("2", 2), ("02", 2)])
def test_a_block_is_chosen_by_number_or_left_open(text: str, block: int | None) -> None:
    assert parse_block(text, 3) == block


@pytest.mark.parametrize("text", ["3", "-1", "1.0", "", "two", "²", "9" * 5000])
def test_a_block_that_the_run_does_not_have_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--block .*: this run has blocks 0 to 2; or give auto$"):
        parse_block(text, 3)


def test_a_returning_node_goes_back_to_the_block_it_has_a_state_of() -> None:
    """As long as no other block has fewer holders."""
    empty: dict[int, list[Holder]] = {0: [], 1: [], 2: []}
    for seed in range(20):
        block, reason = choose_block(empty, random.Random(seed), kept=[1])
        assert block == 1
        assert "has kept its state" in reason
    crowded = {**empty, 1: [holder(1)]}
    assert choose_block(crowded, random.Random(0), kept=[1])[0] != 1
