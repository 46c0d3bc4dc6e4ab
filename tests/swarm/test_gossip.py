"""Gossip of the table in pairs: it converges, keeps the mean, and survives whatever a partner does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from blocktrain.dht.gossip import PURPOSE, TableGossip
from blocktrain.dht.streams import Stream
from blocktrain.protocol.errors import PeerError
from blocktrain.protocol.messages import Part, TableOffer
from tests.swarm.members import Member, members

pytestmark = pytest.mark.slow
SHAPE = (64, 16)
BYTES = 4 * SHAPE[0] * SHAPE[1]


class Node:
    """A member with a table, random at first."""

    def __init__(self, member: Member, seed: int, wire: str = "fp32") -> None:
        self.member = member
        self.table_VD = np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)
        self.gossip = TableGossip(member.streams, wire, self.take, self.shift, random.Random(seed))

    async def take(self) -> np.ndarray:
        return self.table_VD.copy()

    async def shift(self, difference_VD: np.ndarray) -> None:
        self.table_VD += difference_VD

    async def exchange(self, *partners: Member) -> str | None:
        return await self.gossip.exchange([await partner.holder() for partner in partners])


async def nodes_of(joined: list[Member], wire: str = "fp32") -> list[Node]:
    nodes = [Node(member, seed, wire) for seed, member in enumerate(joined)]
    for node in nodes:
        await node.gossip.start()
    return nodes


def spread(nodes: list[Node]) -> float:
    return float(np.std([n.table_VD for n in nodes], axis=0).mean())


@pytest.mark.parametrize(("wire", "error"), [("fp32", 1e-6), ("fp16", 2e-3)])
async def test_a_pair_takes_its_mean(tmp_path: Path, wire: str, error: float) -> None:
    async with members(2, tmp_path) as joined:
        one, two = await nodes_of(joined, wire)
        mean_VD = (one.table_VD + two.table_VD) / 2
        assert await one.exchange(two.member) == two.member.peer_id
        assert np.abs(one.table_VD - mean_VD).max() < error
        assert np.abs(two.table_VD - mean_VD).max() < error
        assert (one.gossip.exchanges, two.gossip.exchanges) == (1, 1)
        # What one gains the other loses, exactly as sent; fp16 rounding does not shift the mean.
        assert np.abs((one.table_VD + two.table_VD) / 2 - mean_VD).max() < 5e-7


async def test_tables_converge_and_their_mean_stays(tmp_path: Path) -> None:
    async with members(4, tmp_path) as joined:
        nodes = await nodes_of(joined)
        mean_VD = np.mean([n.table_VD for n in nodes], axis=0)
        spreads = [spread(nodes)]
        for _ in range(6):  # rounds in which each node gossips once, one after the other
            for node in nodes:
                assert await node.exchange(*(n.member for n in nodes if n is not node))
            spreads.append(spread(nodes))
        assert spreads == sorted(spreads, reverse=True)
        assert spreads[-1] < 0.1 * spreads[0]
        assert np.abs(np.mean([n.table_VD for n in nodes], axis=0) - mean_VD).max() < 1e-5


async def test_all_at_once_nobody_hangs_and_the_mean_stays(tmp_path: Path) -> None:
    async with members(4, tmp_path) as joined:
        nodes = await nodes_of(joined)
        mean_VD = np.mean([n.table_VD for n in nodes], axis=0)
        for _ in range(3):
            await asyncio.gather(*(n.exchange(*(m for m in joined if m is not n.member)) for n in nodes))
        assert np.abs(np.mean([n.table_VD for n in nodes], axis=0) - mean_VD).max() < 1e-5


async def test_a_busy_partner_says_so_and_the_next_one_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="blocktrain.dht.gossip")
    async with members(3, tmp_path) as joined:
        one, two, three = await nodes_of(joined)
        async with two.gossip._busy:
            for _ in range(3):
                assert await one.exchange(two.member) is None
                assert await one.exchange(two.member, three.member) == three.member.peer_id
            refusals = [r.getMessage() for r in caplog.records if two.member.peer_id[:16] in r.getMessage()]
            assert len(refusals) >= 3
            assert all(text.endswith("refused: busy with another gossip") for text in refusals)
        assert await one.exchange(two.member) == two.member.peer_id
        async with one.gossip._busy:
            assert await one.exchange(two.member) is None


async def table(stream: Stream, values: np.ndarray, rows: int = SHAPE[0]) -> None:
    await stream.send(TableOffer(rows, SHAPE[1]), values.astype("<f4").tobytes())


async def wrong_shape(stream: Stream) -> None:
    await table(stream, np.ones(SHAPE), rows=SHAPE[0] + 1)


async def not_a_number(stream: Stream) -> None:
    await table(stream, np.full(SHAPE, np.nan))


async def enormous_values(stream: Stream) -> None:
    await table(stream, np.full(SHAPE, 1e30))


async def too_short(stream: Stream) -> None:
    await table(stream, np.ones(5))


async def too_long(stream: Stream) -> None:
    await table(stream, np.ones((SHAPE[0] + 1, SHAPE[1])))


async def another_message(stream: Stream) -> None:
    await stream.send(Part(0))


async def cut_off(stream: Stream) -> None:
    await table(stream, np.ones(SHAPE))
    stream.close()


async def silent_before_done(stream: Stream) -> None:
    await table(stream, np.ones(SHAPE))
    await stream.receive(max_payload=BYTES, timeout_s=10.0)
    await stream.receive(timeout_s=10.0)


WRONG = (wrong_shape, not_a_number, enormous_values, too_short, too_long, another_message)
UNFINISHED = (cut_off, silent_before_done)
Trick = Callable[[Stream], Awaitable[None]]


async def test_a_hostile_partner_leaves_the_table_untouched(tmp_path: Path) -> None:
    """In either role: asked by us, and asking us. A partner is done with before it says so, or not at all."""
    async with members(2, tmp_path) as joined:
        (one,), hostile = await nodes_of(joined[:1]), joined[1]
        before_VD = one.table_VD.copy()
        tricks = iter(WRONG + UNFINISHED)

        async def answer(stream: Stream) -> None:
            await stream.expect(TableOffer)
            await next(tricks)(stream)

        await hostile.streams.serve(PURPOSE, answer)
        for trick in WRONG + UNFINISHED:
            assert await one.exchange(hostile) is None, trick.__name__
            assert np.array_equal(one.table_VD, before_VD), trick.__name__
        for trick in WRONG:
            await offer_by_hand(hostile, one.member, trick)
            async with one.gossip._busy:  # it has finished with us
                assert np.array_equal(one.table_VD, before_VD), trick.__name__
        assert one.gossip.exchanges == 0


async def offer_by_hand(hostile: Member, target: Member, trick: Trick) -> None:
    async with hostile.streams.open(target.peer_id, PURPOSE) as stream:
        await stream.send(TableOffer(*SHAPE))
        await stream.expect(TableOffer, max_payload=BYTES)
        await trick(stream)
        with pytest.raises(PeerError, match="connection lost"):  # no Done
            await stream.receive()
