"""Why a node doesn't train at the moment, if it doesn't. A pause outlives a membership."""

from __future__ import annotations

import asyncio
import datetime
import re
from dataclasses import dataclass

from blocktrain.protocol.errors import UsageError

ASKED = "asked to"
QUIET = "quiet hours"
LOOK_S = 20.0
"""The clock is looked at so often: it may be set, and the machine may sleep."""
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


class Pauses:
    """The reasons to pause. `awake` is set while there is none; `changed` whenever that changes."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self.awake, self.changed = asyncio.Event(), asyncio.Event()
        self.awake.set()

    @property
    def reasons(self) -> list[str]:
        """In words, sorted; empty: the node trains."""
        return sorted(self._reasons)

    def begin(self, reason: str) -> None:
        """Pause for this reason, too."""
        self._reasons.add(reason)
        self._update()

    def end(self, reason: str) -> None:
        """This reason is over."""
        self._reasons.discard(reason)
        self._update()

    def _update(self) -> None:
        if self.awake.is_set() == bool(self._reasons):
            self.changed.set()
        (self.awake.clear if self._reasons else self.awake.set)()


@dataclass(frozen=True, slots=True)
class QuietHours:
    """A time of day, by the machine's clock, in which a node doesn't train. May go past midnight."""

    begin: datetime.time
    end: datetime.time

    def holds(self, now: datetime.time) -> bool:
        """Whether it is now."""
        if self.begin < self.end:
            return self.begin <= now < self.end
        return now >= self.begin or now < self.end


def parse_quiet_hours(text: str) -> QuietHours | None:
    """The value of `--quiet-hours`; None if it is empty. Raises: UsageError."""
    if not text:
        return None
    found = _HOURS.fullmatch(text)
    if found is None:
        raise UsageError(f"--quiet-hours {text[:40]!r}: expected HH:MM-HH:MM, for example 08:00-18:00")
    hours = [int(part) for part in found.groups()]
    begin, end = datetime.time(hours[0], hours[1]), datetime.time(hours[2], hours[3])
    if begin == end:
        raise UsageError(f"--quiet-hours {text}: begins when it ends; leave it out, or give two times")
    return QuietHours(begin, end)


async def heed_quiet_hours(hours: QuietHours, pauses: Pauses) -> None:
    """Pause in the quiet hours, day by day, for ever."""
    while True:
        if hours.holds(datetime.datetime.now().astimezone().time()):
            pauses.begin(QUIET)
        else:
            pauses.end(QUIET)
        await asyncio.sleep(LOOK_S)
