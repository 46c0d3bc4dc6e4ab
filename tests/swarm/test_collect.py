"""Whole models and first states come from real holders bit for bit, and from nobody who gives other bytes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.dht.directory import Directory
from blocktrain.dht.donor import StateServer
from blocktrain.dht.manifest import State
from blocktrain.dht.session import Session
from blocktrain.model.block import Block
from blocktrain.node import acquire, checkpoint
from blocktrain.node.acquire import acquire_state, download_block
from blocktrain.node.collect import collect_model
from blocktrain.node.trainer import Trainer, TrainingThread
from blocktrain.node.vector import ParameterVector
from blocktrain.protocol.errors import TransferError
from blocktrain.protocol.tensors import decode_state, encode_state
from tests.swarm.members import Member, members
from tests.unit.trainers import make_trainer, small_spec, train

pytestmark = pytest.mark.slow
SPEC = small_spec("collected")
CPU = torch.device("cpu")
Spoil = Callable[[State], State]


def session_of(member: Member, ttl_s: float = 30.0) -> Session:
    return Session(member.swarm, SPEC, Directory(member.swarm, SPEC, ttl_s), member.streams)


async def hold(
    member: Member, folder: Path, block: int, number: int, spoil: Spoil = lambda s: s, ttl_s: float = 30.0
) -> Trainer:
    """Make a member a holder of a block at this round, with a step on top that nobody else has."""
    trainer = make_trainer(folder, SPEC, block, member.peer_id)
    train(trainer, 1)
    trainer.commit(trainer.vector.read(), number, trainer.snapshot(), 0)
    train(trainer, 1)

    async def provide(what: str) -> State:
        return spoil(State(trainer.encode(what), trainer.round, trainer.anchor))

    await StateServer(member.streams, block, provide).start()
    record = await member.record(block, round=number, anchor=trainer.anchor)
    assert await session_of(member, ttl_s).directory.publish(record)
    return trainer


@contextlib.asynccontextmanager
async def newcomer(
    member: Member, folder: Path, block: int = 0
) -> AsyncIterator[tuple[Trainer, TrainingThread]]:
    """A trainer of this member at step 0, and its thread."""
    with contextlib.closing(TrainingThread()) as thread:
        yield make_trainer(folder, SPEC, block, member.peer_id), thread


def parameters(block: Block) -> np.ndarray:
    return ParameterVector(block).read()


# A whole model


async def test_every_block_is_the_anchor_of_its_furthest_holder_with_that_holders_table(
    tmp_path: Path,
) -> None:
    async with members(4, tmp_path, SPEC) as (visitor, *hosts):
        behind, ahead = await hold(hosts[0], tmp_path, 0, 3), await hold(hosts[1], tmp_path, 0, 5)
        other = await hold(hosts[2], tmp_path, 1, 2)
        collected = await collect_model(session_of(visitor), CPU)
        assert collected.rounds == (5, 2)
        for block, table_VD, holder in zip(
            collected.model.blocks, collected.model.tables, (ahead, other), strict=True
        ):
            assert np.array_equal(parameters(block), holder.anchor_N)
            assert not np.array_equal(parameters(block), holder.vector.read())
            assert np.array_equal(table_VD.numpy(), holder.table())
        assert not np.array_equal(ahead.anchor_N, behind.anchor_N)


def other_anchor(state: State) -> State:
    return dataclasses.replace(state, anchor="f" * 32)


def other_run(state: State) -> State:
    tensors, metadata = decode_state(state.data, max_bytes=2**24)
    return dataclasses.replace(state, data=encode_state(tensors, metadata | {"fingerprint": "e" * 32}))


def with_nan(state: State) -> State:
    tensors, metadata = decode_state(state.data, max_bytes=2**24)
    for tensor in tensors.values():
        tensor.view(-1)[0] = float("nan")
    return dataclasses.replace(state, data=encode_state(tensors, metadata))


def a_tensor_short(state: State) -> State:
    tensors, metadata = decode_state(state.data, max_bytes=2**24)
    tensors.popitem()
    return dataclasses.replace(state, data=encode_state(tensors, metadata))


SPOILT: list[tuple[Spoil, str]] = [
    (other_anchor, "the block does not fit its anchor's hash"),
    (other_run, "it belongs to another run"),
    (with_nan, "holds NaN or infinity"),
    (a_tensor_short, "is missing"),
    (lambda state: dataclasses.replace(state, data=b"x" * 5000), "not a safetensors file"),
    (lambda state: dataclasses.replace(state, data=bytes(2**22)), "can be right"),
]


async def test_donors_that_give_something_else_are_named_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with members(3 + len(SPOILT), tmp_path, SPEC) as (visitor, host, other, *liars):
        honest = await hold(host, tmp_path, 0, 3)
        await hold(other, tmp_path, 1, 4)
        for number, (liar, (spoil, _)) in enumerate(zip(liars, SPOILT, strict=True)):
            await hold(liar, tmp_path, 0, 9 + number, spoil)
        collected = await collect_model(session_of(visitor), CPU)
        assert collected.rounds == (3, 4)
        assert np.array_equal(parameters(collected.model.blocks[0]), honest.anchor_N)
        for liar, (_, words) in zip(liars, SPOILT, strict=True):
            assert any(liar.peer_id[:16] in line and words in line for line in caplog.messages)


async def test_a_model_that_can_not_be_completed_says_which_block_is_missing_and_why(tmp_path: Path) -> None:
    async with members(3, tmp_path, SPEC) as (visitor, host, liar):
        await hold(host, tmp_path, 0, 3)
        with pytest.raises(TransferError, match=r"^nobody holds block 1 of run collected, .* start a node"):
            await collect_model(session_of(visitor), CPU)
        await hold(liar, tmp_path, 1, 3, other_run)
        with pytest.raises(TransferError) as caught:
            await collect_model(session_of(visitor), CPU)
        assert f"{liar.peer_id[:16]} gave an unusable block 1: it belongs to another run" in str(caught.value)


# A first state


async def test_the_first_node_of_a_run_begins_with_its_seed(tmp_path: Path) -> None:
    async with members(1, tmp_path, SPEC) as (first,), newcomer(first, tmp_path) as (trainer, thread):
        origin = await acquire_state(session_of(first), trainer, thread, tmp_path / "none")
        assert origin == "the run's seed (nobody is ahead of it)"
        assert (trainer.round, trainer.anchor) == (0, make_trainer(tmp_path, SPEC).anchor)


@pytest.mark.parametrize(("own", "theirs"), [(None, 5), (4, 5), (5, 5), (6, 5)])
async def test_the_newest_of_own_checkpoint_and_holders_state_is_taken(
    tmp_path: Path, own: int | None, theirs: int
) -> None:
    async with members(2, tmp_path, SPEC) as (first, host), newcomer(first, tmp_path) as (trainer, thread):
        holder, mine = await hold(host, tmp_path, 0, theirs), make_trainer(tmp_path, SPEC)
        if own is not None:
            train(mine, 3)
            mine.commit(mine.vector.read(), own, mine.snapshot(), 0)
            checkpoint.save(tmp_path / "kept", checkpoint.capture(mine))
        origin = await acquire_state(session_of(first), trainer, thread, tmp_path / "kept")
        if own is None or own < theirs:
            assert origin == f"peer {host.peer_id[:16]}, round {theirs}"
            assert np.array_equal(trainer.vector.read(), holder.anchor_N)
            assert np.array_equal(trainer.table(), holder.table())
        else:
            assert origin == f"checkpoint of round {own}, step 3, in {tmp_path / 'kept'}"
            assert np.array_equal(trainer.vector.read(), mine.vector.read())
            assert np.array_equal(trainer.table(), mine.table())


async def test_a_block_that_nobody_holds_begins_with_the_others_table(tmp_path: Path) -> None:
    async with members(2, tmp_path, SPEC) as (first, host), newcomer(first, tmp_path, 1) as (trainer, thread):
        holder = await hold(host, tmp_path, 0, 5)
        origin = await acquire_state(session_of(first), trainer, thread, tmp_path / "none")
        assert origin.startswith("the run's seed")
        assert np.array_equal(trainer.table(), holder.table())
        assert trainer.anchor == make_trainer(tmp_path, SPEC, 1).anchor


async def test_the_record_of_a_holder_that_was_killed_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acquire, "RETRY_S", 0.2)
    async with members(2, tmp_path, SPEC) as (first, ghost), newcomer(first, tmp_path) as (trainer, thread):
        await hold(ghost, tmp_path, 0, 5, ttl_s=4.0)
        ghost.kill()
        origin = await acquire_state(session_of(first), trainer, thread, tmp_path / "none")
        assert origin.startswith("the run's seed")
        assert "no holder of block 0 gave its block state" in caplog.text


async def test_holders_that_live_on_but_give_nothing_end_it_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquire, "RETRY_S", 0.2)
    async with members(2, tmp_path, SPEC) as (first, host), newcomer(first, tmp_path) as (trainer, thread):
        await hold(host, tmp_path, 0, 5, other_anchor)
        begin = asyncio.get_running_loop().time()
        with pytest.raises(TransferError, match=f"{host.peer_id[:16]} gave an unusable block 0"):
            await acquire_state(session_of(first, ttl_s=0.4), trainer, thread, tmp_path / "none")
        assert asyncio.get_running_loop().time() - begin > 0.8
        assert trainer.round == 0


async def test_a_node_that_fell_behind_takes_over_block_and_table_and_drops_its_steps(tmp_path: Path) -> None:
    async with members(2, tmp_path, SPEC) as (first, host), newcomer(first, tmp_path) as (trainer, thread):
        holder = await hold(host, tmp_path, 0, 5)
        train(trainer, 2)
        donors = (await session_of(first).directory.holders())[0]
        assert await download_block(session_of(first), trainer, thread, donors)
        assert np.array_equal(trainer.vector.read(), holder.anchor_N)
        assert np.array_equal(trainer.table(), holder.table())
        assert (trainer.round, trainer.anchor, trainer.progress.samples) == (5, holder.anchor, 0)
        assert trainer.progress.step == 2
