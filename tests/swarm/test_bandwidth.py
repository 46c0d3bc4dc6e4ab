"""Limits of bandwidth on real streams: what is sent and received keeps to them, and slow is not dead."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from blocktrain.dht.averager import Commit
from blocktrain.dht.bandwidth import MBIT, Traffic
from blocktrain.dht.streams import Stream, Streams
from blocktrain.protocol.messages import Chunk, Done
from tests.swarm.members import IDLE_S, Member, hold_block, members, outcome

pytestmark = pytest.mark.slow
SIZE = 1_000_000


def limited(member: Member, upload_mbit: float = 0.0, download_mbit: float = 0.0) -> Streams:
    """Streams of a member under limits of their own."""
    return Streams(
        member.swarm, member.streams.fingerprint, IDLE_S, Traffic.limited(upload_mbit, download_mbit)
    )


async def take(stream: Stream) -> None:
    """Take one chunk and say so."""
    await stream.expect(Chunk, max_payload=SIZE)
    await stream.send(Done())


async def send(streams: Streams, to: str) -> float:
    """Send a chunk; the seconds until the other side has taken it."""
    begin = time.monotonic()
    async with streams.open(to, "bulk") as stream:
        await stream.send(Chunk(0), bytes(SIZE))
        await stream.expect(Done, timeout_s=30.0)
    return time.monotonic() - begin


async def test_several_streams_share_the_upload_and_none_is_taken_for_dead(tmp_path: Path) -> None:
    async with members(2, tmp_path) as (one, two):
        await two.streams.serve("bulk", take)
        slow = limited(one, upload_mbit=5.0)
        begin = time.monotonic()
        seconds = await asyncio.gather(send(slow, two.peer_id), send(slow, two.peer_id))
        assert time.monotonic() - begin >= 0.9 * 2 * SIZE / (5 * MBIT)
        assert min(seconds) > IDLE_S  # a frame took longer than a silent peer is waited for
        assert min(seconds) > 0.8 * max(seconds)


async def test_what_is_received_too_fast_is_slowed_at_its_source(tmp_path: Path) -> None:
    async with members(2, tmp_path) as (one, two):
        slow = limited(two, download_mbit=4.0)
        await slow.serve("bulk", take)
        assert await send(one.streams, two.peer_id) >= 0.9 * SIZE / (4 * MBIT)
        assert slow.bytes("received") >= SIZE
        await slow.aclose()


async def test_a_round_with_a_member_on_a_slow_line_commits(tmp_path: Path) -> None:
    """What it sends takes longer than the patience with a silent peer."""
    async with members(2, tmp_path) as joined:
        for member in joined[:1]:
            member.streams = limited(member, upload_mbit=4.0)
        holders = await hold_block(joined, 400_000)
        begin = time.monotonic()
        found = await asyncio.gather(*(outcome(holder) for holder in holders))
        assert [type(one) for one in found] == [Commit] * 2, found
        assert time.monotonic() - begin > 1.4 * IDLE_S
        await joined[0].streams.aclose()


async def test_a_peer_that_stops_in_the_middle_of_a_frame_is_still_noticed_soon(tmp_path: Path) -> None:
    async with members(2, tmp_path) as (one, two):
        stopped = asyncio.Event()

        async def stall(stream: Stream) -> None:
            stopped.set()
            await asyncio.sleep(30)

        await two.streams.serve("stall", stall)
        begin = time.monotonic()
        with pytest.raises(Exception, match="took nothing for 2 s"):
            async with one.streams.open(two.peer_id, "stall") as stream:
                await stream.send(Chunk(0), bytes(2**26))
        assert stopped.is_set()
        assert time.monotonic() - begin < 5 * IDLE_S
