"""State downloads: whole and right from whichever donor works, or not at all (fault 6)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path

import psutil
import pytest

from blocktrain.dht import state as module
from blocktrain.dht.chunks import CHUNKS_AHEAD
from blocktrain.dht.donor import purpose
from blocktrain.dht.manifest import CHUNK_BYTES, chunk_bytes, chunk_count
from blocktrain.dht.state import Download
from blocktrain.dht.streams import Stream
from blocktrain.protocol.errors import PeerError, TransferError
from blocktrain.protocol.messages import Chunk, ChunkRequest, Load, Manifest, StateRequest
from tests.swarm.giving import DATA, LARGE, LIMIT, STATE, Trick, give, give_by_hand
from tests.swarm.members import Member, members, until

pytestmark = pytest.mark.slow


async def test_twenty_megabytes_arrive_intact_with_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    async with members(2, tmp_path) as (one, two):
        await give(one, LARGE)
        before = psutil.Process().memory_info().rss
        donors = [await one.holder()]
        download = Download(two.streams, 0, "block", len(LARGE.data))
        found, donor = await download.run(donors, lambda done, total: seen.append((done, total)))
        assert found == LARGE
        assert donor == one.peer_id
        assert seen[-1] == (len(LARGE.data), len(LARGE.data))
        assert seen == sorted(seen)
        assert len(seen) == -(-len(LARGE.data) // CHUNK_BYTES)
        assert psutil.Process().memory_info().rss - before < 4 * len(LARGE.data)
        table, _ = await Download(two.streams, 0, "table", 100).run(donors)
        assert table.data == b"table"


async def test_when_a_donor_dies_the_next_one_continues_with_what_is_verified(tmp_path: Path) -> None:
    async def die_after_two(stream: Stream, manifest: Manifest) -> None:
        await stream.send(manifest)
        for _ in range(CHUNKS_AHEAD):
            await stream.expect(ChunkRequest)
        for index in range(3):  # that the request after it came shows that the second was verified
            await stream.send(Chunk(index), DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
            await stream.expect(ChunkRequest)
        dying.kill()

    async with members(3, tmp_path) as (dying, donor, joiner):
        await give_by_hand(dying, die_after_two)
        await give(donor)
        record = dataclasses.replace(await dying.record(), round=1)  # so that it comes first, alone
        donors = [dataclasses.replace(await dying.holder(), record=record), await donor.holder()]
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


async def sign_nothing(stream: Stream, manifest: Manifest) -> None:
    await stream.send(dataclasses.replace(manifest, signature="0" * 128))


async def change_what_was_signed(stream: Stream, manifest: Manifest) -> None:
    await stream.send(dataclasses.replace(manifest, round=9))


async def stop_short(stream: Stream, manifest: Manifest) -> None:
    await stream.send(manifest)
    for index in range(chunk_count(manifest) - 1):
        await stream.expect(ChunkRequest)
        await stream.send(Chunk(index), DATA[index * CHUNK_BYTES :][: chunk_bytes(manifest, index)])


async def refuse(stream: Stream, manifest: Manifest) -> None:
    await stream.refuse("no")


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
    sign_nothing: "sent a manifest with a wrong signature",
    change_what_was_signed: "sent a manifest with a wrong signature",
    stop_short: "silent for 2 s",
    refuse: "refused: no",
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


async def test_a_busy_donor_says_so_and_one_peer_cannot_take_all_its_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(member: Member) -> tuple[Stream, Load]:
        stream = await stack.enter_async_context(member.streams.open(donor.peer_id, purpose(0)))
        await stream.send(StateRequest("block"))
        load, _ = await stream.expect(Load)
        if not load.full:
            await stream.expect(Manifest)
        return stream, load

    monkeypatch.setattr(module, "BUSY_PAUSES_S", (0.05,))
    async with members(4, tmp_path) as (donor, greedy, other, joiner), contextlib.AsyncExitStack() as stack:
        server = await give(donor)
        held = [(await ask(greedy))[0] for _ in range(2)]
        assert (await ask(greedy))[1] == Load(2, full=True)
        assert [(await ask(other))[1] for _ in range(2)] == [Load(2, full=False), Load(3, full=False)]
        donors = [await donor.holder()]
        with monkeypatch.context() as context:
            context.setattr(module, "BUSY_PATIENCE_S", 0.0)
            with pytest.raises(TransferError, match="busy with 4 other downloads"):
                await Download(joiner.streams, 0, "block", LIMIT).run(donors)
        download = Download(joiner.streams, 0, "block", LIMIT)
        waiting = asyncio.create_task(download.run(donors))
        await until(lambda: download._failures)
        await held[0].send(ChunkRequest(2**20))  # asks for a chunk that is none; it is thrown out
        with pytest.raises(PeerError, match="connection lost"):
            await held[0].receive()
        assert (await waiting)[0] == STATE
        assert server._uploads[greedy.peer_id] == 1
