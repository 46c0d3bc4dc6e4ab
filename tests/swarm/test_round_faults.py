"""Rounds in which a member dies, freezes or stops: all the others abort it, whole, and soon."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from blocktrain.dht import exchange
from blocktrain.dht.averager import Commit
from blocktrain.dht.rendezvous import Rendezvous
from blocktrain.protocol.errors import RoundAborted
from tests.swarm.members import (
    SPEC,
    HolderOfBlock,
    Member,
    child,
    hold_block,
    members,
    outcome,
    round_of,
)

pytestmark = pytest.mark.slow
SIZE = 10_007


async def test_a_member_killed_in_the_exchange_aborts_it_for_all_and_the_rest_commit_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hivemind calls such a round a success and fills the gaps with zeros (faults 3 and 13)."""
    monkeypatch.setattr("blocktrain.dht.reduction.PART_VALUES", 100)
    async with members(4, tmp_path) as joined:
        holders = await hold_block(joined, SIZE)
        victim = holders[1]
        add = exchange.GroupExchange._add
        calls = 0

        def dying_add(self: exchange.GroupExchange, position: int, sender: str, values_N: np.ndarray) -> None:
            nonlocal calls
            calls += 1
            if calls == 40:  # some parts are through, most are not
                victim.member.kill()
            add(self, position, sender, values_N)

        monkeypatch.setattr(exchange.GroupExchange, "_add", dying_add)
        started = time.monotonic()
        survivors = [h for h in holders if h is not victim]
        *found, _ = await asyncio.gather(*(outcome(h) for h in survivors), outcome(victim))
        assert [type(f) for f in found] == [RoundAborted] * 3
        assert time.monotonic() - started < 10
        assert {c for f in found if isinstance(f, RoundAborted) for c in f.culprits} == {
            victim.member.peer_id
        }
        (commit, *_) = await round_of(survivors)
        assert commit.members == tuple(sorted(h.member.peer_id for h in survivors))
        assert np.abs(commit.mean_N - np.mean([h.values_N for h in survivors], axis=0)).max() < 1e-6


def let_lead(holders: list[HolderOfBlock], leader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever this one is a holder, it leads; else any."""
    for holder in holders:
        point = holder.averager.rendezvous

        def lead(point: Rendezvous = point) -> str:
            return leader if leader in (point._me, *point.others) else min(point._me, *point.others)

        monkeypatch.setattr(point, "_leader", lead)


@pytest.mark.parametrize("leads", [True, False])
async def test_a_frozen_member_is_blamed_within_its_time_and_not_who_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    """Nothing bounds a frozen peer in hivemind, but for the whole round's timeout (fault 5)."""
    async with members(2, tmp_path) as joined:
        role = "freeze-leading" if leads else "freeze"
        holders = await hold_block(joined, 1000)
        async with child(role, tmp_path, await joined[0].swarm.addresses()) as (_, frozen):
            let_lead(holders, frozen["peer_id"] if leads else joined[0].peer_id, monkeypatch)
            started = time.monotonic()
            found = await asyncio.gather(*(outcome(holder) for holder in holders))
            assert time.monotonic() - started < SPEC.rounds.timeout_s / 2
            if leads:  # it froze before it could tell that the round begins: they begin one without it
                assert [f.members for f in found if isinstance(f, Commit)] == [
                    tuple(sorted(peers(joined)))
                ] * 2
                return
            assert [f.culprits for f in found if isinstance(f, RoundAborted)] == [(frozen["peer_id"],)] * 2
            (commit, *_) = await round_of(holders)
            assert commit.members == tuple(sorted(peers(joined)))


def peers(joined: list[Member]) -> list[str]:
    return [member.peer_id for member in joined]


async def test_stopping_in_the_middle_of_a_round_does_not_hang(tmp_path: Path) -> None:
    """hivemind leaves the step unresolved (fault 11)."""
    async with members(2, tmp_path) as joined:
        one, two = await hold_block(joined, 10)
        reached, never = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            reached.set()
            await never.wait()

        tasks = [asyncio.create_task(one.average(on_snapshot=wait)), asyncio.create_task(outcome(two))]
        await reached.wait()
        started = time.monotonic()
        tasks[0].cancel()
        await joined[0].streams.aclose()
        joined[0].leave.set()
        aborted = await tasks[1]
        assert isinstance(aborted, RoundAborted)
        assert one.member.peer_id in two.averager.rendezvous.suspicions
        assert (await asyncio.gather(tasks[0], return_exceptions=True))[0].__class__ is asyncio.CancelledError
        assert time.monotonic() - started < 6
    assert time.monotonic() - started < 10
