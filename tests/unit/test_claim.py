"""Newcomers spread over the blocks without a coordinator."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest

from blocktrain.dht.directory import Holder
from blocktrain.dht.session import Session
from blocktrain.node import claim
from blocktrain.node.claim import NO_ANCHOR, crowded_out
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


class Board:
    """The records of a run, as a directory would show them to everybody at once."""

    def __init__(self, blocks: int) -> None:
        self.records: dict[tuple[int, str], PeerRecord] = {}
        self.blocks = blocks

    def session(self, peer_id: str) -> Session:
        """One newcomer's view: what `_settle` needs of a session."""

        async def publish(record: PeerRecord) -> bool:
            self.records[record.block, peer_id] = record
            return True

        async def holders(*, joining: bool) -> dict[int, tuple[Holder, ...]]:
            assert joining
            live = {key: r for key, r in self.records.items() if not r.leaving}
            return {
                b: tuple(Holder(p, r, 1e9) for (c, p), r in live.items() if c == b)
                for b in range(self.blocks)
            }

        async def addresses() -> tuple[str, ...]:
            return ()

        swarm = SimpleNamespace(peer_id=peer_id, addresses=addresses)
        return cast(
            Session, SimpleNamespace(swarm=swarm, directory=SimpleNamespace(publish=publish, holders=holders))
        )


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "blocks"), [(2, 2), (4, 2), (6, 3), (9, 3), (12, 3), (12, 5)])
def test_nodes_that_start_at_the_same_moment_end_up_evenly(
    nodes: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All see an empty directory and draw a block; then those on a crowded one give way, one at a time."""
    monkeypatch.setattr(claim, "SETTLE_S", 0.01)

    async def start(seed: int) -> list[int]:
        board = Board(blocks)

        async def one(peer_id: str) -> int:
            session, rng = board.session(peer_id), random.Random(f"{seed} {peer_id}")
            block, reason = await claim.look_for_block(session, None, (), rng)
            return (await claim._settle(session, block, reason, (), rng))[0]

        return list(await asyncio.gather(*(one(f"n{i:02}") for i in range(nodes))))

    for seed in range(8):
        chosen = Counter(asyncio.run(start(seed)))
        counts = [chosen[block] for block in range(blocks)]
        assert max(counts) - min(counts) <= 1, counts
