"""A claim to be far ahead costs a node no more than the time it takes to find it false."""

from __future__ import annotations

import asyncio
import contextlib
import io
from pathlib import Path

import pytest

from blocktrain.dht.donor import purpose
from blocktrain.dht.streams import Stream
from blocktrain.node import rounds
from blocktrain.node.events import EventLog
from blocktrain.node.rounds import Rounds
from blocktrain.node.trainer import TrainingThread
from blocktrain.node.work import Work
from blocktrain.protocol.errors import TransferError
from tests.swarm.members import members
from tests.swarm.test_collect import SPEC, hold, session_of
from tests.unit.trainers import make_trainer, train

pytestmark = pytest.mark.slow


async def test_a_holder_that_claims_a_lead_and_shows_nothing_is_disbelieved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the request and says nothing more, for ever; afterwards it counts like any other holder."""
    monkeypatch.setattr(rounds, "CATCH_UP_S", 0.5)
    async with members(2, tmp_path, SPEC) as (me, liar):
        silence = asyncio.Event()

        async def say_nothing(stream: Stream) -> None:
            await silence.wait()

        await liar.streams.serve(purpose(0), say_nothing)
        await session_of(liar).directory.publish(await liar.record(0, round=9))
        with contextlib.closing(TrainingThread()) as thread:
            trainer = make_trainer(tmp_path, SPEC, 0, me.peer_id)
            train(trainer, 1)
            before = trainer.vector.read()
            work = Work(session_of(me), trainer, thread, tmp_path / "kept", EventLog(io.StringIO()))
            loop = Rounds(work, 0)
            with pytest.raises(TransferError):
                await loop._once()
            assert (trainer.vector.read() == before).all()
            assert loop._out_of_reach(await work.look()) == []


async def test_a_holder_that_is_far_ahead_and_shows_it_is_followed(tmp_path: Path) -> None:
    """Its block and its round are taken over, and a checkpoint is written."""
    for name in ("theirs", "mine"):
        (tmp_path / name).mkdir()
    async with members(2, tmp_path, SPEC) as (me, other):
        theirs = await hold(other, tmp_path / "theirs", 0, 9)
        with contextlib.closing(TrainingThread()) as thread:
            trainer = make_trainer(tmp_path / "mine", SPEC, 0, me.peer_id)
            train(trainer, 1)
            stream = io.StringIO()
            work = Work(session_of(me), trainer, thread, tmp_path / "kept", EventLog(stream))
            await Rounds(work, 0)._once()
            assert (trainer.round, trainer.anchor) == (9, theirs.anchor)
            assert '"resynced"' in stream.getvalue()
            assert list((tmp_path / "kept").glob("*9.safetensors"))
