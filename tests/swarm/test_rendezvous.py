"""How holders find into one group, whoever comes when and whoever thinks that someone leads."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path

import pytest

from blocktrain.dht import rendezvous
from blocktrain.dht.averager import Commit
from blocktrain.dht.streams import Stream
from blocktrain.dht.swarm import dht_time
from blocktrain.protocol.errors import RoundAborted
from blocktrain.protocol.messages import Join, Waiting
from blocktrain.protocol.spec import RunSpec
from tests.swarm.members import hold_block, members, outcome, until

pytestmark = pytest.mark.slow


async def test_alone_a_round_is_given_up_soon(tmp_path: Path) -> None:
    async with members(1, tmp_path) as joined:
        (holder,) = await hold_block(joined, 10)
        started = time.monotonic()
        assert isinstance(await outcome(holder), RoundAborted)
        assert time.monotonic() - started < 3


async def test_a_holder_that_does_not_come_is_waited_for_until_the_deadline_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with members(3, tmp_path) as joined:
        *present, idle = await hold_block(joined, 10)
        for holder in present:
            monkeypatch.setattr(holder.averager.rendezvous, "_leader", lambda: present[0].member.peer_id)
        started = time.monotonic()
        found = await asyncio.gather(*(outcome(holder, within_s=3.5) for holder in present))
        assert 3.2 < time.monotonic() - started < 6
        assert [idle.member.peer_id in f.members for f in found if isinstance(f, Commit)] == [False] * 2


async def test_holders_that_come_apart_before_or_at_a_deadline_that_is_over_still_meet(
    tmp_path: Path,
) -> None:
    async with members(3, tmp_path) as joined:
        holders = await hold_block(joined, 10)
        for within_s, apart_s in ((10.0, 0.7), (-1.0, 0.4)):
            tasks = []
            for holder in holders:
                tasks.append(asyncio.create_task(outcome(holder, within_s=within_s)))
                await asyncio.wait(tasks, timeout=apart_s)
            assert [type(found) for found in await asyncio.gather(*tasks)] == [Commit] * 3


async def test_rounds_commit_across_changes_of_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LEADER_TERM_S", 1)
    async with members(3, tmp_path) as joined:
        holders = await hold_block(joined, 10)
        leaders: set[str] = set()
        number = -1
        while len(leaders) < 2 or number < 5:
            number += 1
            tasks = []
            for holder in holders[number % 3 :] + holders[: number % 3]:
                holder.join = dataclasses.replace(holder.join, round=number)
                tasks.append(asyncio.create_task(outcome(holder)))
                await asyncio.wait(tasks, timeout=0.3)  # the round spans a change now and then
            assert [type(found) for found in await asyncio.gather(*tasks)] == [Commit] * 3
            leaders.add(holders[0].averager.rendezvous._leader())


async def test_followers_of_one_that_does_not_lead_any_more_are_sent_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`late` came to `old` in its term, and `old` was still training; then `new` leads."""
    async with members(3, tmp_path) as joined:
        holders = await hold_block(joined, 10)
        late, old, new = holders
        leader = {h.member.peer_id: old.member.peer_id for h in holders}
        for holder in holders:
            point = holder.averager.rendezvous
            monkeypatch.setattr(point, "_leader", lambda me=holder.member.peer_id: leader[me])
        tasks = [asyncio.create_task(outcome(late))]
        await until(lambda: late.member.peer_id in old.averager.rendezvous._followers)
        leader |= dict.fromkeys(leader, new.member.peer_id)
        tasks += [asyncio.create_task(outcome(holder)) for holder in (old, new)]
        assert [type(found) for found in await asyncio.gather(*tasks)] == [Commit] * 3


async def test_one_that_comes_when_the_leader_of_the_new_term_already_follows_the_old_one_is_led(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`new` follows `old`, then its own term begins: whoever comes now must not be sent in circles."""
    async with members(3, tmp_path) as joined:
        holders = await hold_block(joined, 10)
        old, new, late = holders
        leader = [old.member.peer_id]
        for holder in holders:
            monkeypatch.setattr(holder.averager.rendezvous, "_leader", lambda: leader[0])
        tasks = [asyncio.create_task(outcome(holder, within_s=-1.0)) for holder in (old, new)]
        await until(lambda: new.member.peer_id in old.averager.rendezvous._followers)
        leader[0] = new.member.peer_id
        tasks.append(asyncio.create_task(outcome(late, within_s=-1.0)))
        assert [type(found) for found in await asyncio.gather(*tasks)] == [Commit] * 3


@pytest.mark.parametrize("staggered", [False, True])
async def test_two_that_each_take_the_other_for_the_leader_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staggered: bool
) -> None:
    async with members(2, tmp_path) as joined:
        holders = await hold_block(joined, 10)
        for holder, other in (holders, holders[::-1]):
            point = holder.averager.rendezvous
            monkeypatch.setattr(point, "_leader", lambda it=other.member.peer_id: it)
        first = asyncio.create_task(outcome(holders[0]))
        if staggered:
            await until(lambda: holders[1].averager.rendezvous._followers)
        found = await asyncio.gather(first, outcome(holders[1]))
        assert [type(f) for f in found] == [Commit] * 2


async def test_who_leads_in_circles_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 0.05)
    async with members(3, tmp_path) as joined:
        holders = await hold_block(joined, 10)
        me, left, right = (h.averager.rendezvous for h in holders)
        monkeypatch.setattr(me, "_leader_for", lambda peer: me._me)
        for point, other in ((left, right), (right, left)):
            monkeypatch.setattr(point, "_leader_for", lambda peer, it=other._me: it)
        monkeypatch.setattr(
            me, "_leader", lambda: next((p for p in (left._me, right._me) if p not in me.suspicions), me._me)
        )
        error = await outcome(holders[0])
        assert isinstance(error, RoundAborted)
        assert left._me in me.suspicions
        assert right._me in me.suspicions


async def test_a_leader_that_vanishes_while_others_wait_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with members(3, tmp_path) as joined:
        one, two, leader = await hold_block(joined, 10)
        for holder in (one, two, leader):
            point = holder.averager.rendezvous
            first = leader.member.peer_id

            def lead(point: rendezvous.Rendezvous = point, first: str = first) -> str:
                return first if first in (point._me, *point.others) else min(point._me, *point.others)

            monkeypatch.setattr(point, "_leader", lead)
        tasks = [asyncio.create_task(outcome(holder)) for holder in (one, two)]
        await until(lambda: len(leader.averager.rendezvous._followers) == 2)
        leader.member.kill()
        found = await asyncio.gather(*tasks)
        assert [type(f) for f in found] == [Commit] * 2
        assert all(isinstance(f, Commit) and len(f.members) == 2 for f in found)


async def test_a_leader_that_puts_its_deadline_off_for_ever_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its words promises a round a little later."""
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.3)
    monkeypatch.setattr(rendezvous, "ARRIVE_S", 0.3)
    spec = RunSpec.from_mapping(
        {"name": "tests", "rounds": {"wire": "fp32", "deadline_s": 2, "timeout_s": 20}}
    )
    async with members(2, tmp_path, spec) as joined:
        (me,), hostile = await hold_block(joined[:1], 10), joined[1]

        async def lead(stream: Stream) -> None:
            await stream.expect(Join)
            while True:
                await stream.send(Waiting(1, dht_time() + 100.0))
                await asyncio.sleep(0.1)

        await hostile.streams.serve("join-0", lead)
        point = me.averager.rendezvous
        point.note_holders([await hostile.holder()])
        monkeypatch.setattr(point, "_leader", lambda: hostile.peer_id)
        started = time.monotonic()
        with pytest.raises(RoundAborted, match="did not begin the round by the deadline"):
            await point.gather(me.join, dht_time() + 0.5)
        assert time.monotonic() - started < 6
