"""Reasons to pause, and the quiet hours."""

from __future__ import annotations

import asyncio
import datetime

import pytest

from blocktrain.node.pauses import ASKED, QUIET, Pauses, QuietHours, heed_quiet_hours, parse_quiet_hours
from blocktrain.protocol.errors import UsageError


@pytest.mark.parametrize(
    ("text", "now", "quiet"),
    [
        ("08:00-18:00", "07:59", False),
        ("08:00-18:00", "08:00", True),
        ("08:00-18:00", "17:59", True),
        ("08:00-18:00", "18:00", False),
        ("22:30-07:00", "22:29", False),
        ("22:30-07:00", "22:30", True),
        ("22:30-07:00", "00:00", True),
        ("22:30-07:00", "06:59", True),
        ("22:30-07:00", "07:00", False),
    ],
)
def test_quiet_hours_hold_from_their_begin_to_before_their_end(text: str, now: str, quiet: bool) -> None:
    hours = parse_quiet_hours(text)
    assert hours is not None
    assert hours.holds(datetime.time.fromisoformat(now)) is quiet


def test_no_quiet_hours_are_none() -> None:
    assert parse_quiet_hours("") is None


@pytest.mark.parametrize("text", ["8-18", "08:00", "24:00-01:00", "08:60-09:00", "08:00-9:00", "08:00-08:00"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--quiet-hours"):
        parse_quiet_hours(text)


def test_a_node_wakes_when_no_reason_is_left() -> None:
    pauses = Pauses()
    pauses.begin(QUIET)
    pauses.begin(ASKED)
    assert pauses.reasons == [ASKED, QUIET]
    pauses.end(QUIET)
    assert not pauses.awake.is_set()
    pauses.end(ASKED)
    assert pauses.awake.is_set()


def test_changed_tells_of_pauses_that_begin_and_end_and_of_nothing_else() -> None:
    pauses, seen = Pauses(), []
    steps = [(pauses.begin, ASKED), (pauses.begin, QUIET), (pauses.end, ASKED), (pauses.end, QUIET)]
    for step, reason in [*steps, (pauses.end, QUIET)]:
        step(reason)
        seen.append(pauses.changed.is_set())
        pauses.changed.clear()
    assert seen == [True, False, False, True, False]


@pytest.mark.parametrize("minutes", [-60, 60])
def test_the_machine_s_clock_decides(minutes: int) -> None:
    begin = datetime.datetime.now().astimezone() + datetime.timedelta(minutes=minutes, seconds=-60)
    hours = QuietHours(begin.time(), (begin + datetime.timedelta(minutes=90)).time())
    pauses = Pauses()

    async def look_once() -> None:
        heeding = asyncio.create_task(heed_quiet_hours(hours, pauses))
        await asyncio.sleep(0)
        heeding.cancel()

    asyncio.run(look_once())
    assert pauses.reasons == ([QUIET] if minutes < 0 else [])
