"""Which block a newcomer should hold: the one that is trained least. Pure functions of the directory."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

from blocktrain.dht.directory import Holder
from blocktrain.protocol.errors import UsageError


def parse_block(text: str, blocks: int) -> int | None:
    """The value of `--block`: a number, or None for `auto`. Raises: UsageError."""
    if text == "auto":
        return None
    if not text.isdecimal() or len(text) > 9 or int(text) >= blocks:
        raise UsageError(f"--block {text[:40]!r}: this run has blocks 0 to {blocks - 1}; or give auto")
    return int(text)


def choose_block(
    holders: Mapping[int, Sequence[Holder]], rng: random.Random, kept: Collection[int] = ()
) -> tuple[int, str]:
    """The neediest block and the reason, in words: fewest holders, then slowest, then furthest behind.

    Of blocks with equally few holders, one that this node has kept a state of wins; other equals are
    drawn, so that newcomers who see the same directory spread.
    """

    def need(block: int) -> tuple[int, bool, float, int, float]:
        records = [h.record for h in holders[block]]
        speed = round(sum(r.tokens_per_s for r in records), -2)
        return (
            len(records),
            block not in kept,
            speed,
            max((r.round for r in records), default=0),
            rng.random(),
        )

    block = min(sorted(holders), key=need)
    counts = ", ".join(f"{b}: {len(holders[b])}" for b in sorted(holders))
    who = "nobody holds it" if not holders[block] else "it has the fewest holders, or the slowest"
    mine = ", and this node has kept its state" if block in kept else ""
    return block, f"{who}{mine} (holders of each block: {counts})"
