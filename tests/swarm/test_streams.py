"""Streams between members: what arrives, what hostile bytes do, and who can open one at all."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from blocktrain.dht import streams as module
from blocktrain.dht.streams import Stream, Streams
from blocktrain.protocol import keys
from blocktrain.protocol.errors import PeerError
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.messages import MAX_HEADER_BYTES, PREFIX, Chunk, Done, StateRequest
from blocktrain.protocol.spec import RunSpec
from tests.swarm.members import Member, members

pytestmark = pytest.mark.slow


def framed(value: object, payload_bytes: int = 0) -> bytes:
    header = json.dumps(value).encode()
    return PREFIX.pack(len(header), payload_bytes) + header


HOSTILE = {
    "random bytes": b"\x93\x11\xfe" * 40,
    "a huge header": PREFIX.pack(2**32 - 1, 0),
    "a header just too long": PREFIX.pack(MAX_HEADER_BYTES + 1, 0),
    "an empty header": PREFIX.pack(0, 0),
    "a huge payload": framed({"kind": "Done"}, 2**60),
    "no JSON": PREFIX.pack(4, 0) + b"\xff{}[",
    "nested JSON": PREFIX.pack(100_000, 0) + b"[" * 100_000,
    "an endless number": PREFIX.pack(9_000, 0) + b"1" * 9_000,
    "JSON that is no table": framed([1, 2]),
    "an unknown kind": framed({"kind": "Exec", "code": "1"}),
    "a kind that is no text": framed({"kind": ["Done"]}),
    "unknown fields": framed({"kind": "Done", "more": 1}),
    "a wrong type": framed({"kind": "Part", "index": "0"}),
    "another kind": framed({"kind": "Done"}),
    "a refusal": framed({"kind": "Refused", "reason": "no"}),
    "a forged log line": framed({"kind": "Refused", "reason": "no\\n2026 all is well"}),
    "an end in the middle": PREFIX.pack(50, 0) + b"{",
    "nothing at all": b"",
}


async def test_twenty_megabytes_arrive_intact_and_are_counted(tmp_path: Path) -> None:
    """hivemind's pipes break above 16 KiB, its unary calls above 4 MiB (fault 1)."""
    sent = bytes(range(256)) * 80_000
    got: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def take(stream: Stream) -> None:
        assert stream.peer_id == one.peer_id
        got.set_result((await stream.expect(Chunk, max_payload=len(sent)))[1])
        await stream.send(Done())

    async with members(2, tmp_path) as (one, two):
        await two.streams.serve("test", take)
        async with one.streams.open(two.peer_id, "test") as stream:
            await stream.send(Chunk(0), sent)
            await stream.expect(Done)
        assert got.result() == sent
        assert one.streams.bytes("sent") == two.streams.bytes("received") > len(sent)


async def test_hostile_frames_raise_only_peer_errors_that_name_the_sender(tmp_path: Path) -> None:
    outcomes: asyncio.Queue[BaseException | None] = asyncio.Queue()

    async def take(stream: Stream) -> None:
        try:
            await stream.expect(Chunk, max_payload=1000, timeout_s=5.0)
        except BaseException as error:
            outcomes.put_nowait(error)
            raise

    async with members(2, tmp_path) as (one, two):
        await two.streams.serve("test", take)
        before = psutil.Process().memory_info().rss
        for name, data in HOSTILE.items():
            async with one.streams.open(two.peer_id, "test") as stream:
                stream._writer.write(data)
                if stream._writer.can_write_eof():
                    stream._writer.write_eof()
                error = await outcomes.get()
            assert type(error) is PeerError, name
            assert error.peer_id == one.peer_id, name
            assert "\n" not in str(error), name
        assert psutil.Process().memory_info().rss - before < 50e6


async def test_refusals_and_aborts_reach_the_other_side_with_their_reason(tmp_path: Path) -> None:
    culprit = Identity.generate().peer_id

    async def take(stream: Stream) -> None:
        request, _ = await stream.expect(StateRequest)
        if request.what == "block":
            await stream.refuse("busy")
        else:
            await stream.abort("it froze", culprit)

    async with members(2, tmp_path) as (one, two):
        await two.streams.serve("test", take)
        async with one.streams.open(two.peer_id, "test") as stream:
            await stream.send(StateRequest("block"))
            with pytest.raises(PeerError, match="refused: busy") as refused:
                await stream.expect(Done)
        async with one.streams.open(two.peer_id, "test") as stream:
            await stream.send(StateRequest("table"))
            with pytest.raises(PeerError, match="round given up: it froze") as aborted:
                await stream.expect(Done)
        assert (refused.value.peer_id, aborted.value.peer_id) == (two.peer_id, culprit)


async def test_a_flood_of_streams_is_bounded_and_keeps_nobody_else_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PER_PEER", 5)
    ended = asyncio.Event()

    async def take(stream: Stream) -> None:
        await stream.send(Done())
        try:
            await stream.expect(Done, timeout_s=60.0)
        finally:
            ended.set()

    async def served(member: Member) -> Stream | None:
        stream = await opened.enter_async_context(member.streams.open(target.peer_id, "test"))
        try:
            await stream.expect(Done)
        except PeerError:
            return None
        return stream

    async with members(3, tmp_path) as (target, flooder, friend), AsyncExitStack() as opened:
        await target.streams.serve("test", take)
        answers = [await served(flooder) for _ in range(9)]
        assert [stream is not None for stream in answers] == [True] * 5 + [False] * 4
        assert await served(friend)
        assert answers[0] is not None
        answers[0].close()
        await ended.wait()
        assert await served(flooder)  # room again
        await target.streams.aclose()
        assert not target.streams._serving
        assert not await served(friend)


async def test_a_handler_that_fails_costs_only_its_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def take(stream: Stream) -> None:
        request, _ = await stream.expect(StateRequest)
        if request.what == "block":
            raise ZeroDivisionError("a bug")
        await stream.send(Done())

    async with members(2, tmp_path) as (one, two):
        await two.streams.serve("test", take)
        async with one.streams.open(two.peer_id, "test") as stream:
            await stream.send(StateRequest("block"))
            with pytest.raises(PeerError, match="connection lost"):
                await stream.expect(Done)
        async with one.streams.open(two.peer_id, "test") as stream:
            await stream.send(StateRequest("table"))
            await stream.expect(Done)
    assert [r.exc_info[0] for r in caplog.records if r.levelno >= logging.ERROR and r.exc_info] == [
        ZeroDivisionError
    ]


async def test_runs_and_versions_never_meet(tmp_path: Path) -> None:
    """Protocol names hold the version and the fingerprint; hivemind's hold a class's name (fault 18)."""
    other = RunSpec.from_mapping({"name": "other"}).fingerprint
    assert keys.stream(other, "test") == f"/blocktrain/1/{other}/test"

    async def take(stream: Stream) -> None:
        await stream.send(Done())

    async with members(2, tmp_path) as (one, two):
        await two.streams.serve("test", take)
        for opener, purpose in ((Streams(one.swarm, other), "test"), (one.streams, "test2")):
            with pytest.raises(PeerError, match="can't be reached"):
                async with opener.open(two.peer_id, purpose):
                    pass


async def test_failures_to_open_a_stream_are_peer_errors_and_leak_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hivemind's client forgets its connection to the daemon when the daemon says no, or when cancelled."""
    process = psutil.Process()
    monkeypatch.setattr(module, "OPEN_TIMEOUT_S", 0.3)
    async with members(2, tmp_path) as (one, two):

        async def fail(peer_id: str) -> None:
            with pytest.raises(PeerError):
                async with one.streams.open(peer_id, "nothing"):
                    pass

        await fail(two.peer_id)
        gc.collect()
        before = process.num_fds()
        for peer_id in (two.peer_id, one.peer_id, Identity.generate().peer_id, "1", "z" * 128, "no base58"):
            for _ in range(3):
                await fail(peer_id)
        assert process.num_fds() <= before + 1


async def test_a_peer_that_takes_nothing_is_given_up(tmp_path: Path) -> None:
    """Bounded memory on our side, and an error that names it, instead of a wait without end."""
    done = asyncio.Event()

    async def deaf(stream: Stream) -> None:
        await done.wait()

    async with members(2, tmp_path) as (one, two):
        await two.streams.serve("test", deaf)
        async with one.streams.open(two.peer_id, "test") as stream:
            with pytest.raises(PeerError, match="took nothing for 1 s") as caught:
                await stream.send(Chunk(0), bytes(2**26), timeout_s=1.0)
        done.set()
    assert caught.value.peer_id == two.peer_id
