"""The arithmetic of one averaging round: who owns which part, and the weighted mean of a part.

Pure functions and a small accumulator; the network is in exchange.py. Reduce-scatter, then all-gather:
each of n members owns 1/n of the vector, receives that share from the others, and returns its mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

import numpy as np

from blocktrain.protocol.errors import TensorError

PART_VALUES = 262_144
"""Values in a part: 512 KiB as fp16, where libp2p streams are fastest."""
MAX_WEIGHT_RATIO = 4.0
"""No member counts for more than this many times the group's median."""
MIN_WEIGHT = 1e-3
"""Nor for less than this share of it, so that one immense claim makes nobody's weight vanish."""
MAX_ABSOLUTE = 1e4
"""No sound parameter or difference is larger; a part that holds one is refused."""


@dataclass(frozen=True, slots=True)
class PartSpan:
    """Values [start, stop) of the vector, averaged by `owner`."""

    index: int
    start: int
    stop: int
    owner: str


def plan_parts(size: int, members: Sequence[str]) -> tuple[PartSpan, ...]:
    """Share `size` values among the members, in their order, in parts of at most PART_VALUES."""
    assert size >= 1
    assert members
    spans: list[PartSpan] = []
    for rank, owner in enumerate(members):
        start, end = size * rank // len(members), size * (rank + 1) // len(members)
        for low in range(start, end, PART_VALUES):
            spans.append(PartSpan(len(spans), low, min(low + PART_VALUES, end), owner))
    return tuple(spans)


def clamp_weights(samples: Mapping[str, int]) -> dict[str, float]:
    """Weight of each member: its samples since the last commit in units of the group's median, clamped.

    With an even number of members the lower median counts: of two, the one that claims less, so the other
    can't outweigh it by more than MAX_WEIGHT_RATIO.
    """
    floor = {peer: max(1, count) for peer, count in samples.items()}
    median = median_low(floor.values())
    return {peer: min(max(count / median, MIN_WEIGHT), MAX_WEIGHT_RATIO) for peer, count in floor.items()}


def check_part(values_N: np.ndarray) -> np.ndarray:
    """Refuse values that no sound peer sends. Raises: TensorError."""
    greatest = float(np.max(np.abs(values_N), initial=0.0))
    if not greatest <= MAX_ABSOLUTE:
        raise TensorError(f"part holds a value of {greatest:g}; the limit is {MAX_ABSOLUTE:g}")
    return values_N


@dataclass
class Accumulator:
    """Collects one part from every member and gives their weighted mean, independent of arrival order."""

    weights: Mapping[str, float]
    parts: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, sender: str, values_N: np.ndarray) -> np.ndarray | None:
        """Add a member's part (N float32 values); the last one gives the mean, the others None."""
        assert sender in self.weights
        assert sender not in self.parts
        self.parts[sender] = values_N
        if len(self.parts) < len(self.weights):
            return None
        sum_N = np.zeros(values_N.shape, dtype=np.float64)  # so that the mean of equal values is that value
        total = 0.0
        for peer in sorted(self.parts):
            sum_N += self.weights[peer] * self.parts[peer].astype(np.float64)
            total += self.weights[peer]
        self.parts.clear()
        return (sum_N / total).astype(np.float32)
