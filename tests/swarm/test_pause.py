"""What a pause does to a node: a round is finished, state saved, a record tells; and its limit of memory."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blocktrain.dht.averager import Commit, Snapshot
from blocktrain.node import checkpoint, service
from blocktrain.node.control import Now
from blocktrain.node.events import EventLog
from blocktrain.node.pauses import ASKED
from blocktrain.node.service import Limits, Node
from blocktrain.node.trainer import TrainingThread
from blocktrain.node.work import Work
from blocktrain.protocol.errors import HomeError
from blocktrain.protocol.messages import Join
from blocktrain.protocol.records import PeerRecord
from tests.swarm.members import Member, members, until
from tests.swarm.test_collect import SPEC, session_of
from tests.unit.trainers import STEPS, make_trainer, train

pytestmark = pytest.mark.slow
LONG_TTL_S = 300.0
"""A record that is renewed within a test is so because of news, not because its time has come."""


@contextlib.contextmanager
def node_of(member: Member, folder: Path, limits: Limits) -> Iterator[tuple[Node, io.StringIO]]:
    """A node that holds block 0, not yet run, and what it will write as events."""
    folder.mkdir()
    with contextlib.closing(TrainingThread()) as thread:
        trainer, events = make_trainer(folder, SPEC, 0, member.peer_id), io.StringIO()
        session = session_of(member, LONG_TTL_S)
        work = Work(session, trainer, thread, folder / "kept", EventLog(events))
        yield Node(work, limits), events


@contextlib.asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for node in nodes:
            group.create_task(node.run(stop))
        yield
        stop.set()


def written(events: io.StringIO, name: str) -> list[dict[str, Any]]:
    return [e for e in map(json.loads, events.getvalue().splitlines()) if e["event"] == name]


async def record_of(node: Node, seen_by: Member, wanted: Callable[[PeerRecord], bool]) -> PeerRecord:
    """The node's record in the directory, once it is as wanted."""
    while True:
        for holder in (await session_of(seen_by).directory.holders())[0]:
            if holder.peer_id == node.work.me and wanted(holder.record):
                return holder.record
        await asyncio.sleep(0.05)


async def test_a_round_in_progress_is_finished_then_the_node_stands_still_until_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        here, there = await stack.enter_async_context(members(2, tmp_path, SPEC))
        paused, events = stack.enter_context(node_of(here, tmp_path / "a", Limits(nodes=2)))
        other, _ = stack.enter_context(node_of(there, tmp_path / "b", Limits(nodes=2)))
        work, average = paused.work, paused._rounds.averager.average

        async def pause_within(
            join: Join, deadline: float, take_snapshot: Callable[[], Awaitable[Snapshot]]
        ) -> Commit:
            async def begun() -> Snapshot:
                work.pauses.begin(ASKED)
                return await take_snapshot()

            return await average(join, deadline, begun)

        monkeypatch.setattr(paused._rounds.averager, "average", pause_within)
        async with running(paused, other):
            await until(lambda: work.rounds["committed"] and written(events, "paused"))
            monkeypatch.undo()
            record = await record_of(paused, there, lambda r: r.resting and r.round > 0)
            assert record.tokens_per_s == 0
            step, alone = work.trainer.progress.step, other.work.rounds["solo"]
            await until(lambda: other.work.rounds["solo"] >= alone + 3)
            assert work.trainer.progress.step == step == record.step
            assert work.rounds == {"committed": 1}
            work.pauses.end(ASKED)
            await record_of(paused, there, lambda r: not r.resting)
            await until(lambda: work.rounds["committed"] > 1)
            assert work.rounds["resynced"] >= 1  # it had fallen three rounds behind
    assert len(written(events, "resumed")) == 1


async def test_what_was_learned_since_the_last_round_is_saved_when_a_pause_begins(tmp_path: Path) -> None:
    """Nobody commits here, so there is no other reason to save."""
    async with contextlib.AsyncExitStack() as stack:
        (me,) = await stack.enter_async_context(members(1, tmp_path, SPEC))
        node, events = stack.enter_context(node_of(me, tmp_path / "a", Limits()))
        work = node.work
        node._rounds.run = asyncio.Event().wait  # type: ignore[method-assign, assignment]
        async with running(node):
            await until(lambda: work.trainer.progress.step >= 1)
            assert not checkpoint.has_any(work.folder)
            work.pauses.begin(ASKED)
            await until(lambda: written(events, "paused"))
            assert checkpoint.has_any(work.folder)
            (event,) = written(events, "paused")
            assert (event["paused"], event["tokens_per_s"]) == ([ASKED], 0)
            assert event["step"] == work.trainer.progress.step
            await record_of(node, me, lambda r: r.resting)


async def test_a_round_that_is_due_waits_for_the_end_of_the_pause(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        (me,) = await stack.enter_async_context(members(1, tmp_path, SPEC))
        node, _ = stack.enter_context(node_of(me, tmp_path / "a", Limits(rounds=1)))
        work, tried = node.work, asyncio.Event()
        train(work.trainer, STEPS)

        async def attempt() -> None:
            tried.set()
            work.trainer.round = 1

        node._rounds._once = attempt  # type: ignore[method-assign]
        work.pauses.begin(ASKED)
        running_rounds = asyncio.create_task(node._rounds.run())
        for _ in range(10):  # without a pause, the first of these is enough
            await asyncio.sleep(0)
        assert not tried.is_set()
        work.pauses.end(ASKED)
        await running_rounds
        assert tried.is_set()


async def test_a_node_that_has_finished_stays_so_through_a_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with contextlib.AsyncExitStack() as stack:
        (me,) = await stack.enter_async_context(members(1, tmp_path, SPEC))
        node, events = stack.enter_context(node_of(me, tmp_path / "a", Limits(rounds=1)))
        now = Now(tmp_path, me.peer_id, node.work.pauses, "training", node.work)
        async with running(node):
            await until(lambda: written(events, "finished"))
            assert now.status()["phase"] == "finished"
            assert now.answer("pause")["phase"] == "paused"
            await until(lambda: written(events, "paused"))
            assert now.answer("resume")["phase"] == "finished"
            await until(lambda: written(events, "resumed"))
            assert "training goes on" not in caplog.text
            assert (await record_of(node, me, lambda r: r.round == 1)).resting
            assert now.status()["addresses"] == list(await me.swarm.addresses())


async def test_a_node_that_comes_to_take_too_much_memory_leaves_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State saved, record withdrawn, one line that says what it takes and what it may."""
    async with contextlib.AsyncExitStack() as stack:
        (me,) = await stack.enter_async_context(members(1, tmp_path, SPEC))
        monkeypatch.setattr(service, "MEMORY_LOOK_S", 1.0)
        node, events = stack.enter_context(node_of(me, tmp_path / "a", Limits(memory_mb=1)))
        with pytest.raises(ExceptionGroup) as failure:
            await node.run(asyncio.Event())
        (error,) = failure.value.exceptions
        assert isinstance(error, HomeError)
        assert "MB of memory, --max-memory is 1;" in str(error)
        assert checkpoint.has_any(node.work.folder)
        assert len(written(events, "stopped")) == 1
        assert not (await session_of(me).directory.holders())[0]
