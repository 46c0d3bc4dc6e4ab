"""Rounds with a hostile member or leader: it is named within seconds, and nothing of it is used."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from blocktrain.dht import exchange, rendezvous, streams
from blocktrain.dht.exchange import EXCHANGE
from blocktrain.dht.streams import Stream
from blocktrain.dht.suspicion import Suspicions
from blocktrain.dht.swarm import dht_time
from blocktrain.protocol.errors import PeerError, RoundAborted
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.messages import (
    PREFIX,
    Abort,
    Begin,
    Exchange,
    Join,
    Message,
    Part,
    Redirect,
    Waiting,
)
from blocktrain.protocol.messages import Member as Listed
from tests.swarm.members import (
    ANCHOR,
    HolderOfBlock,
    Member,
    hold_block,
    members,
    outcome,
    round_of,
)

pytestmark = pytest.mark.slow
SIZE = 10_007


Trick = Callable[[Stream, int, int], Awaitable[None]]
"""Sends something in place of a part that has this index and so many values."""


async def short(stream: Stream, index: int, size: int) -> None:
    await stream.send(Part(index), bytes(4 * size - 4))


async def not_a_number(stream: Stream, index: int, size: int) -> None:
    await stream.send(Part(index), np.full(size, np.nan, "<f4").tobytes())


async def infinite(stream: Stream, index: int, size: int) -> None:
    await stream.send(Part(index), np.full(size, -np.inf, "<f4").tobytes())


async def enormous_values(stream: Stream, index: int, size: int) -> None:
    await stream.send(Part(index), np.full(size, 1e30, "<f4").tobytes())


async def another_part(stream: Stream, index: int, size: int) -> None:
    await stream.send(Part(index + 1), bytes(4 * size))


async def claim_a_terabyte(stream: Stream, index: int, size: int) -> None:
    header = b'{"kind":"Part","index":0}'
    stream._writer.write(PREFIX.pack(len(header), 2**40) + header)


async def nothing(stream: Stream, index: int, size: int) -> None:
    pass


async def accuse(stream: Stream, index: int, size: int) -> None:
    await stream.send(Abort("it was you", stream.peer_id))


TRICKS = (short, not_a_number, infinite, enormous_values, another_part, claim_a_terabyte, nothing, accuse)


async def join_by_hand(hostile: Member, holders: list[HolderOfBlock]) -> asyncio.Task[Begin]:
    """Make the hostile member a follower of whichever of them leads; its `Begin` when it comes."""

    async def follow(leader: str) -> Begin:
        async with hostile.streams.open(leader, "join-0") as stream:
            await stream.send(Join(0, ANCHOR, 100))
            while True:
                answer, _ = await stream.receive()
                if isinstance(answer, Redirect):
                    return await follow(answer.leader)
                if isinstance(answer, Begin):
                    return answer
                followed.set()

    followed = asyncio.Event()
    for holder in holders:
        others = [h for h in (await holder.member.directory.holders())[0] if h.peer_id != hostile.peer_id]
        holder.averager.rendezvous.note_holders(others)
    begun = asyncio.create_task(follow(holders[0].member.peer_id))
    await followed.wait()
    return begun


async def test_a_member_that_sends_anything_but_its_part_is_named_within_seconds(tmp_path: Path) -> None:
    """One wrong-shaped part blocks hivemind's whole round until its timeout (fault 4)."""
    async with members(3, tmp_path) as joined:
        holders, hostile = await hold_block(joined[:2], SIZE), joined[2]
        before = psutil.Process().memory_info().rss
        for trick in TRICKS:
            begun = await join_by_hand(hostile, holders)
            started = time.monotonic()
            rounds = [asyncio.create_task(outcome(holder)) for holder in holders]
            begin = await begun
            peers = [m.peer_id for m in begin.members]
            assert hostile.peer_id in peers
            victim = holders[0].member.peer_id
            share = exchange.ExchangePlan(begin, victim, SIZE, "fp32").spans()[peers.index(victim)]
            async with hostile.streams.open(victim, EXCHANGE) as stream:
                await stream.send(Exchange(begin.group))
                await trick(stream, share.index, share.stop - share.start)
                found = await asyncio.gather(*rounds)
            for error in found:
                assert isinstance(error, RoundAborted), trick.__name__
                assert error.culprits == (hostile.peer_id,), trick.__name__
            assert time.monotonic() - started < 8, trick.__name__
            for holder in holders:
                holder.averager.rendezvous.suspicions.forgive([hostile.peer_id])
        assert psutil.Process().memory_info().rss - before < 50e6
        (commit, *_) = await round_of(holders)
        assert len(commit.members) == 2


async def test_who_spoilt_a_round_is_not_taken_into_the_next(tmp_path: Path) -> None:
    async with members(3, tmp_path) as joined:
        holders, hostile = await hold_block(joined[:2], SIZE), joined[2]
        for holder in holders:
            holder.averager.rendezvous.suspicions.blame([hostile.peer_id])
        begun = await join_by_hand(hostile, holders)
        (commit, *_) = await round_of(holders)
        assert hostile.peer_id not in commit.members
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)


async def test_a_leader_with_a_wrong_list_number_or_word_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(streams, "OPEN_TIMEOUT_S", 1.0)
    async with members(2, tmp_path) as joined:
        (me,), hostile = await hold_block(joined[:1], 10), joined[1]
        us = sorted((me.member.peer_id, hostile.peer_id))
        stranger = Identity.generate().peer_id

        def begin(*peers: str, number: int = 1, relative: bool = True) -> Begin:
            return Begin("0" * 32, number, tuple(Listed(peer, 1.0) for peer in peers), relative)

        words: list[Message] = [
            begin(*sorted((me.member.peer_id, stranger))),
            begin(*sorted((hostile.peer_id, stranger))),
            begin(*us, us[1]),
            begin(*us[::-1]),
            begin(*us, number=2),
            begin(*us, number=2**53),
            Part(0),
            Redirect("1" * 128),
            Redirect(stranger),
        ]
        left = iter(words)

        async def lead(stream: Stream) -> None:
            await stream.expect(Join)
            await stream.send(Waiting(1, dht_time()))
            await stream.send(next(left))
            await stream.receive(timeout_s=10.0)

        await hostile.streams.serve("join-0", lead)
        point = me.averager.rendezvous
        monkeypatch.setattr(point, "_leader", lambda: point.others[0] if point.others else point._me)
        for word in words:
            point.suspicions = Suspicions()
            point.note_holders([await hostile.holder()])
            with pytest.raises(RoundAborted, match="no other holder came in time"):
                await point.gather(me.join, dht_time() + 5)
            assert any(peer in point.suspicions for peer in (hostile.peer_id, stranger, "1" * 128)), word
        with pytest.raises(PeerError):
            point._checked(hostile.peer_id, dataclasses.replace(me.join, round=1), begin(*us))
