"""When a node should move to another block. Pure functions of what the directory says.

Everybody who reads the same directory elects the same node to move, at most one for each term, so blocks
are covered again quickly and nothing flaps: no coordinator is needed, and no herd sets off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_RATIO = 2.5
"""A block is poor only if another is trained this many times faster …"""
MIN_GAIN = 1.25
"""… and the giver still is this many times faster than the taker was, once the mover has gone."""


@dataclass(frozen=True, slots=True)
class Share:
    """One holder's part in a block."""

    peer_id: str
    tokens_per_s: float


Shares = Mapping[int, Sequence[Share]]
"""Block → its live holders."""


def elect_move(shares: Shares, term: int, *, balance: bool) -> tuple[str, int] | None:
    """Who should move to which block in this term, if anybody.

    A block that nobody holds is always filled, from a block with at least two holders. With `balance`,
    a block that is trained much more slowly than another gets a node of it, too.
    """
    orphans = sorted(block for block, holders in shares.items() if not holders)
    givers = {block: holders for block, holders in shares.items() if len(holders) >= 2}
    if orphans:
        candidates = [share.peer_id for holders in givers.values() for share in holders]
        return _first(candidates, term, orphans[0])
    if not balance or not givers:
        return None
    speeds = {block: _speed(holders) for block, holders in shares.items()}
    poor = min(sorted(speeds), key=lambda b: speeds[b])
    rich = max(sorted(givers), key=lambda b: speeds[b])
    if any(share.tokens_per_s <= 0 for share in shares[poor]):  # has just come: nobody knows yet how fast
        return None
    if speeds[rich] < MIN_RATIO * speeds[poor]:
        return None
    fit = [
        share.peer_id
        for share in givers[rich]
        if speeds[rich] - max(share.tokens_per_s, 1.0) >= MIN_GAIN * speeds[poor]
    ]
    return _first(fit, term, poor)


def _speed(holders: Sequence[Share]) -> float:
    """Tokens a second of a block; a holder that has not measured its speed yet counts as one."""
    return sum(max(share.tokens_per_s, 1.0) for share in holders)


def _first(candidates: Sequence[str], term: int, block: int) -> tuple[str, int] | None:
    """The one whose hash comes first in this term, so that the same node isn't asked again and again."""
    if not candidates:
        return None
    mover = min(candidates, key=lambda peer: hashlib.sha256(f"{term} {block} {peer}".encode()).digest())
    return mover, block
