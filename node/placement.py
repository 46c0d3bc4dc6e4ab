"""Which block a newcomer should hold: the one that is trained least. Pure functions of the directory."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from blocktrain.dht.directory import Holder
from blocktrain.protocol.errors import UsageError


def parse_block(text: str, blocks: int) -> int | None:
    """The value of `--block`: a number, or None for `auto`. Raises: UsageError."""
    if text == "auto":
        return None
    if not text.isdecimal() or len(text) > 9 or int(text) >= blocks:
        raise UsageError(f"--block {text[:40]!r}: this run has blocks 0 to {blocks - 1}; or give auto")
    return int(text)


def choose_block(holders: Mapping[int, Sequence[Holder]], rng: random.Random) -> tuple[int, str]:
    """The neediest block and the reason, in words: fewest holders, then slowest, then furthest behind.

    Equals are drawn, so that newcomers who see the same directory spread.
    """

    def need(block: int) -> tuple[int, float, int, float]:
        records = [h.record for h in holders[block]]
        speed = sum(r.tokens_per_s for r in records)
        return len(records), round(speed, -2), max((r.round for r in records), default=0), rng.random()

    block = min(sorted(holders), key=need)
    count = len(holders[block])
    counts = ", ".join(f"{b}: {len(holders[b])}" for b in sorted(holders))
    who = "nobody holds it" if count == 0 else "it has the fewest holders, or the slowest"
    return block, f"{who} (holders of each block: {counts})"
