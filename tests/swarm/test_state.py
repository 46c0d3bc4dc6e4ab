"""State downloads: whole and right from whichever donor works, or not at all (fault 6)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from blocktrain.dht import state as module
from blocktrain.dht.state import CHUNK_BYTES, Download, State, StateServer, make_manifest, purpose
from blocktrain.dht.streams import Stream
from blocktrain.protocol.errors import PeerError, TransferError
from blocktrain.protocol.messages import Chunk, ChunkRequest, Manifest, StateRequest
from tests.swarm.members import ANCHOR, Member, members

pytestmark = pytest.mark.slow
DATA = bytes(range(256)) * 14_000  # three chunks and a half
STATE = State(DATA, 3, "a" * 32)
LIMIT = 2 * len(DATA)
Trick = Callable[[Stream, Manifest], Awaitable[None]]


async def give(member: Member, state: State = STATE) -> StateServer:
    """Make a member an honest donor of block 0."""

    async def provide(what: str) -> State:
        return state if what == "block" else dataclasses.replace(state, data=b"table")

    server = StateServer(member.streams, 0, provide)
    await server.start()
    return server


async def give_by_hand(member: Member, *tricks: Trick) -> None:
    """Make a member a donor that does something else, each time the next."""
    left = iter(tricks)

    async def serve(stream: Stream) -> None:
        await stream.expect(StateRequest)
        await next(left)(stream, make_manifest(STATE))

    await member.streams.serve(purpose(0), serve)


async def test_twenty_megabytes_arrive_intact_with_progress(tmp_path: Path) -> None:
    large = State(DATA * 6, 7, ANCHOR)
    seen: list[tuple[int, int]] = []
    async with members(2, tmp_path) as (one, two):
        await give(one, large)
        before = psutil.Process().memory_info().rss
        donors = [await one.holder()]
        download = Download(two.streams, 0, "block", len(large.data))
        found, donor = await download.run(donors, lambda done, total: seen.append((done, total)))
        assert found == large
        assert donor == one.peer_id
        assert seen[-1] == (len(large.data), len(large.data))
        assert seen == sorted(seen)
        assert len(seen) == -(-len(large.data) // CHUNK_BYTES)
        assert psutil.Process().memory_info().rss - before < 4 * len(large.data)
        table, _ = await Download(two.streams, 0, "table", 100).run(donors)
        assert table.data == b"table"


async def test_when_a_donor_dies_the_next_one_continues_with_what_is_verified(tmp_path: Path) -> None:
    async def die_after_two(stream: Stream, manifest: Manifest) -> None:
        await stream.send(manifest)
        for index in range(2):
            await stream.expect(ChunkRequest)
            await stream.send(Chunk(index), DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
        await stream.expect(ChunkRequest)
        dying.kill()

    async with members(3, tmp_path) as (dying, donor, joiner):
        await give_by_hand(dying, die_after_two)
        await give(donor)
        donors = [await dying.holder(), await donor.holder()]
        found, origin = await Download(joiner.streams, 0, "block", LIMIT).run(donors)
        assert found == STATE
        assert origin == donor.peer_id
        assert donor.streams.bytes("sent") < len(DATA) - 2 * CHUNK_BYTES + 10_000


async def lie(stream: Stream, manifest: Manifest) -> None:
    await stream.send(manifest)
    await stream.expect(ChunkRequest)
    await stream.send(Chunk(0), bytes(CHUNK_BYTES))


async def send_short(stream: Stream, manifest: Manifest) -> None:
    await stream.send(manifest)
    await stream.expect(ChunkRequest)
    await stream.send(Chunk(0), DATA[: CHUNK_BYTES - 1])


async def send_long(stream: Stream, manifest: Manifest) -> None:
    await stream.send(manifest)
    await stream.expect(ChunkRequest)
    await stream.send(Chunk(0), DATA[: CHUNK_BYTES + 1])


async def send_another(stream: Stream, manifest: Manifest) -> None:
    await stream.send(manifest)
    await stream.expect(ChunkRequest)
    await stream.send(Chunk(1), DATA[:CHUNK_BYTES])


async def claim_a_terabyte(stream: Stream, manifest: Manifest) -> None:
    await stream.send(dataclasses.replace(manifest, size=2**38))


async def claim_more_than_the_format_has(stream: Stream, manifest: Manifest) -> None:
    await stream.send(dataclasses.replace(manifest, size=2**40))


async def promise_too_few_chunks(stream: Stream, manifest: Manifest) -> None:
    await stream.send(dataclasses.replace(manifest, digests=manifest.digests[:32]))


async def stall(stream: Stream, manifest: Manifest) -> None:
    await stream.send(manifest)
    await stream.receive(timeout_s=20.0)
    await stream.receive(timeout_s=20.0)


async def stall_at_once(stream: Stream, manifest: Manifest) -> None:
    await stream.receive(timeout_s=20.0)


TRICKS: dict[Trick, str] = {
    lie: "sent a chunk 0 that does not fit its digest",
    send_short: f"sent {CHUNK_BYTES - 1} bytes of chunk 0",
    send_long: f"payload of {CHUNK_BYTES + 1} bytes where at most {CHUNK_BYTES}",
    send_another: "of chunk 1, not",
    claim_a_terabyte: f"offers {2**38} bytes where at most {LIMIT} can be right",
    claim_more_than_the_format_has: "sent nonsense",
    promise_too_few_chunks: "digests don't fit its size",
    stall: "silent for 2 s",
    stall_at_once: "silent for 2 s",
}


async def test_a_donor_that_lies_or_stalls_is_named_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STATE_IDLE_S", 2.0)
    async with members(3, tmp_path) as (hostile, donor, joiner):
        await give(donor)
        bad, good = await hostile.holder(), await donor.holder()
        before = psutil.Process().memory_info().rss
        await give_by_hand(hostile, *TRICKS, lie)
        for complaint in TRICKS.values():
            with pytest.raises(TransferError, match=complaint) as caught:
                await Download(joiner.streams, 0, "block", LIMIT).run([bad])
            assert hostile.peer_id[:16] in str(caught.value)
        found, origin = await Download(joiner.streams, 0, "block", LIMIT).run([bad, good])
        assert (found, origin) == (STATE, donor.peer_id)
        assert psutil.Process().memory_info().rss - before < 100e6


async def test_when_all_donors_fail_each_ones_failure_is_listed(tmp_path: Path) -> None:
    async with members(3, tmp_path) as (hostile, absent, joiner):
        await give_by_hand(hostile, lie)
        donors = [await hostile.holder(), await absent.holder()]
        with pytest.raises(TransferError, match="no holder of block 0 gave its block state") as caught:
            await Download(joiner.streams, 0, "block", LIMIT).run(donors)
        assert all(donor.peer_id[:16] in str(caught.value) for donor in donors)
        with pytest.raises(TransferError, match="there is none"):
            await Download(joiner.streams, 0, "block", LIMIT).run([])


async def test_a_busy_donor_refuses_and_one_peer_cannot_take_all_its_uploads(tmp_path: Path) -> None:
    async def start(member: Member) -> Stream:
        stream = await stack.enter_async_context(member.streams.open(donor.peer_id, purpose(0)))
        await stream.send(StateRequest("block"))
        await stream.expect(Manifest)
        return stream

    async with members(4, tmp_path) as (donor, greedy, other, joiner), contextlib.AsyncExitStack() as stack:
        server = await give(donor)
        held = [await start(greedy), await start(greedy)]
        with pytest.raises(PeerError, match="refused: busy with 2 other downloads"):
            await start(greedy)
        held += [await start(other), await start(other)]
        with pytest.raises(TransferError, match="refused: busy with 4 other downloads"):
            await Download(joiner.streams, 0, "block", LIMIT).run([await donor.holder()])
        await held[0].send(ChunkRequest(2**20))  # asks for a chunk that is none; it is thrown out
        with pytest.raises(PeerError, match="connection lost"):
            await held[0].receive()
        found, _ = await Download(joiner.streams, 0, "block", LIMIT).run([await donor.holder()])
        assert found == STATE
        assert server._uploads[greedy.peer_id] == 1
