"""State downloads from several donors at once: shared work, and no donor that can hold the others up."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from blocktrain.dht import state as module
from blocktrain.dht.chunks import CHUNKS_AHEAD
from blocktrain.dht.donor import StateServer, purpose
from blocktrain.dht.manifest import CHUNK_BYTES, State, chunk_bytes
from blocktrain.dht.state import Download
from blocktrain.dht.streams import Stream
from blocktrain.protocol.errors import PeerError, TransferError
from blocktrain.protocol.messages import Chunk, ChunkRequest, Load, Manifest, StateRequest
from tests.swarm.giving import DATA, LARGE, LIMIT, STATE, Trick, child_holder, give, give_by_hand
from tests.swarm.members import child, members

pytestmark = pytest.mark.slow
OTHER = State(DATA[::-1], 3, "c" * 32)
PATIENT_S = 100.0
"""Longer than a test may take: where it has to pass, nobody has waited for a silent donor."""


def honest(state: State, before_first: Callable[[], object] = lambda: None) -> Trick:
    """A donor by hand that serves what it is asked for, after a coroutine before its first chunk."""

    async def serve(stream: Stream, manifest: Manifest) -> None:
        await stream.send(manifest)
        wanted, _ = await stream.expect(ChunkRequest)
        waited = before_first()
        if waited is not None:
            await waited  # type: ignore[misc]
        while True:
            start = wanted.index * manifest.chunk
            data = memoryview(state.data)[start : start + chunk_bytes(manifest, wanted.index)]
            await stream.send(Chunk(wanted.index), data)
            wanted, _ = await stream.expect(ChunkRequest)

    return serve


async def test_donors_of_the_same_bytes_share_the_work(tmp_path: Path) -> None:
    async with members(4, tmp_path) as (*donors, joiner):
        together = asyncio.Barrier(3)  # passed only when all three are asked for chunks
        for donor in donors:
            await give_by_hand(donor, honest(LARGE, together.wait), state=LARGE)
        holders = [await donor.holder() for donor in donors]
        found, _ = await Download(joiner.streams, 0, "block", len(LARGE.data)).run(holders)
        assert found == LARGE
        sent = [donor.streams.meter["sent", purpose(0)] for donor in donors]
        assert min(sent) >= CHUNK_BYTES
        # At the end an idle donor is asked for what others have not delivered yet: at most their windows.
        twice = len(donors) * CHUNKS_AHEAD + 1
        assert (
            joiner.streams.bytes("received") < len(LARGE.data) + twice * CHUNK_BYTES < 1.5 * len(LARGE.data)
        )


async def test_a_donor_that_takes_requests_and_says_nothing_holds_nobody_up(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def say_nothing(stream: Stream, manifest: Manifest) -> None:
        await stream.send(manifest)
        await stream.expect(ChunkRequest)
        asked.set()

    async with members(3, tmp_path) as (silent, donor, joiner):
        silent.streams.idle_s = joiner.streams.idle_s = PATIENT_S
        await give_by_hand(silent, say_nothing)
        await give_by_hand(donor, honest(STATE, asked.wait))
        donors = [await silent.holder(), await donor.holder()]
        found, origin = await Download(joiner.streams, 0, "block", LIMIT).run(donors)
        assert (found, origin) == (STATE, donor.peer_id)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_donor_process_that_is_killed_or_frozen_in_the_middle_is_replaced(
    tmp_path: Path, blow: signal.Signals
) -> None:
    async with members(2, tmp_path) as (donor, joiner):
        peers = await joiner.swarm.addresses()
        async with child("donor", tmp_path / "victim", peers) as (process, known):
            victim = await child_holder(known, joiner)
            first = dataclasses.replace(victim, record=dataclasses.replace(victim.record, round=1))
            reports: list[int] = []

            def progress(done: int, total: int) -> None:
                if not reports:
                    os.kill(process.pid, blow)
                reports.append(done)

            await give(donor, LARGE)
            download = Download(joiner.streams, 0, "block", len(LARGE.data))
            found, origin = await download.run([first, await donor.holder()], progress)
        assert found == LARGE
        assert origin == donor.peer_id
        assert reports == sorted(set(reports))  # nothing that was verified was given up
        assert donor.streams.bytes("sent") < len(LARGE.data)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lone_donor_that_is_killed_or_frozen_is_named_in_bounded_time(
    tmp_path: Path, blow: signal.Signals
) -> None:
    reason = {signal.SIGKILL: "connection lost", signal.SIGSTOP: "silent for 2 s"}[blow]
    async with members(1, tmp_path) as (joiner,):
        async with child("donor", tmp_path, await joiner.swarm.addresses()) as (process, known):
            donor = await child_holder(known, joiner)
            download = Download(joiner.streams, 0, "block", len(LARGE.data))
            with pytest.raises(TransferError, match=reason) as caught:
                await download.run([donor], lambda done, total: os.kill(process.pid, blow))
        assert donor.peer_id[:16] in str(caught.value)


async def test_a_liar_that_was_believed_first_gives_way_to_a_donor_of_other_bytes(tmp_path: Path) -> None:
    believed = asyncio.Event()

    async def lie_later(stream: Stream, manifest: Manifest) -> None:
        await stream.send(manifest)
        await stream.expect(ChunkRequest)
        believed.set()
        await stream.send(Chunk(0), memoryview(OTHER.data)[:CHUNK_BYTES])
        await stream.send(Chunk(1), bytes(CHUNK_BYTES))

    async def give_when_believed(what: str) -> State:
        await believed.wait()
        return STATE

    async with members(3, tmp_path) as (liar, donor, joiner):
        await give_by_hand(liar, lie_later, state=OTHER)
        await StateServer(donor.streams, 0, give_when_believed).start()
        download = Download(joiner.streams, 0, "block", LIMIT)
        found, origin = await download.run([await liar.holder(), await donor.holder()])
        assert (found, origin) == (STATE, donor.peer_id)
        assert download.signers == [donor.peer_id]
        assert "sent a chunk 1 that does not fit" in download._failures[liar.peer_id]


async def test_the_least_busy_donors_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DONORS_AT_ONCE", 2)
    async with members(4, tmp_path) as (*donors, joiner), contextlib.AsyncExitStack() as stack:
        for donor in donors:
            await give(donor)
        busy = donors[0]
        held = await stack.enter_async_context(joiner.streams.open(busy.peer_id, purpose(0)))
        await held.send(StateRequest("block"))
        assert await held.expect(Load) == (Load(0, full=False), b"")
        await held.expect(Manifest)
        before = busy.streams.bytes("sent")
        holders = [await donor.holder() for donor in donors]
        found, _ = await Download(joiner.streams, 0, "block", LIMIT).run(holders)
        assert found == STATE
        assert busy.streams.bytes("sent") - before < 200  # it said how busy it is, no more


async def test_joiners_at_the_same_time_get_one_offer_that_is_made_once(tmp_path: Path) -> None:
    made: list[str] = []

    async def provide(what: str) -> State:
        made.append(what)
        return STATE

    async with members(4, tmp_path) as (donor, *joiners):
        await StateServer(donor.streams, 0, provide).start()
        donors = [await donor.holder()]
        found = await asyncio.gather(
            *(Download(joiner.streams, 0, "block", LIMIT).run(donors) for joiner in joiners)
        )
        assert [state for state, _ in found] == [STATE] * 3
        assert made == ["block"]


async def test_a_donor_whose_provider_fails_once_offers_again(tmp_path: Path) -> None:
    failures = iter([PeerError("", "not now")])

    async def provide(what: str) -> State:
        for failure in failures:
            raise failure
        return STATE

    async with members(2, tmp_path) as (donor, joiner):
        await StateServer(donor.streams, 0, provide).start()
        donors = [await donor.holder()]
        with pytest.raises(TransferError, match="connection lost"):
            await Download(joiner.streams, 0, "block", LIMIT).run(donors)
        assert (await Download(joiner.streams, 0, "block", LIMIT).run(donors))[0] == STATE
