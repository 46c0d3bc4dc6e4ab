"""What passes over a node's streams: counted by direction and purpose, and held to limits."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

MBIT = 125_000
"""Bytes of a megabit."""
BURST_S = 0.1
"""What was not used for so long may be made up for; longer silences don't allow for a flood."""
PIECE_BYTES = 131_072
"""Larger payloads go in pieces: streams take turns, and a slow peer shows progress piece by piece."""


class Limiter:
    """Lets through so many bytes a second, in the order of asking; any number if the rate is 0."""

    def __init__(self, bytes_per_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock, self._free_at = clock, clock()

    def reserve(self, count: int) -> float:
        """Take `count` bytes from what is allowed; how many seconds to wait before they may pass."""
        if not self.bytes_per_s:
            return 0.0
        now = self._clock()
        start = max(self._free_at, now - BURST_S)
        self._free_at = start + count / self.bytes_per_s
        return max(0.0, self._free_at - now)

    async def take(self, count: int) -> None:
        """Wait until `count` bytes may pass."""
        pause_s = self.reserve(count)
        if pause_s:
            await asyncio.sleep(pause_s)


@dataclass(frozen=True)
class Traffic:
    """One node's traffic: what it was, and what it may be."""

    upload: Limiter = field(default_factory=Limiter)
    download: Limiter = field(default_factory=Limiter)
    meter: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes by direction (`sent`, `received`) and purpose."""

    @classmethod
    def limited(cls, upload_mbit: float, download_mbit: float) -> Traffic:
        """With limits in Mbit/s; 0: none."""
        return cls(Limiter(upload_mbit * MBIT), Limiter(download_mbit * MBIT))


def pieces(payload: bytes | memoryview) -> Iterator[memoryview]:
    """The payload in pieces, without copying it."""
    view = memoryview(payload).cast("B")
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def piece_sizes(total: int) -> Iterator[int]:
    """The sizes of the pieces of a payload of so many bytes."""
    for start in range(0, total, PIECE_BYTES):
        yield min(PIECE_BYTES, total - start)
