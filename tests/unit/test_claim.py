"""Newcomers spread over the blocks without a coordinator."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.dht.directory import Holder
from blocktrain.node.claim import NO_ANCHOR, crowded_out
from blocktrain.node.placement import choose_block
from blocktrain.protocol.records import PeerRecord


def holder(peer_id: str, block: int, *, joining: bool) -> Holder:
    """A holder's record."""
    return Holder(peer_id, PeerRecord(block, 0, 0, 0.0, None, NO_ANCHOR, (), "0.1.0", 0.0, joining), 1e9)


def test_only_the_greatest_newcomer_of_a_crowded_block_leaves_it() -> None:
    """And nobody who trains already."""
    holders = {
        0: [holder("c", 0, joining=False), holder("a", 0, joining=True), holder("b", 0, joining=True)],
        1: [],
    }
    assert [peer for peer in "abc" if crowded_out(holders, 0, peer)] == ["b"]


def test_a_difference_of_one_moves_nobody() -> None:
    """It would only be a difference of one the other way round."""
    holders = {0: [holder("a", 0, joining=True)], 1: []}
    assert not crowded_out(holders, 0, "a")


@given(nodes=st.integers(1, 12), blocks=st.integers(1, 4), seed=st.integers(0, 10_000))
def test_nodes_that_start_at_the_same_moment_end_up_evenly(nodes: int, blocks: int, seed: int) -> None:
    """All see an empty directory and draw; then they look, and give way one a block, until it is even."""
    rngs = {f"n{i:02}": random.Random(f"{seed} {i}") for i in range(nodes)}
    empty: dict[int, list[Holder]] = {b: [] for b in range(blocks)}
    claims = {peer: choose_block(empty, rng)[0] for peer, rng in rngs.items()}

    def listed(without: str = "") -> dict[int, list[Holder]]:
        return {
            b: [holder(p, b, joining=True) for p, c in claims.items() if c == b and p != without]
            for b in range(blocks)
        }

    for _ in range(8):
        seen = listed()
        leaving = [peer for peer, block in claims.items() if crowded_out(seen, block, peer)]

        def elsewhere(peer: str, seen: dict[int, list[Holder]] = seen) -> dict[int, list[Holder]]:
            return {b: [h for h in hs if h.peer_id != peer] for b, hs in seen.items()}

        moves = {peer: choose_block(elsewhere(peer), rngs[peer]) for peer in leaving}
        claims |= {peer: block for peer, (block, _) in moves.items()}
        if not leaving:
            break
    counts = [len(there) for there in listed().values()]
    assert max(counts) - min(counts) <= 1 or nodes > 8
