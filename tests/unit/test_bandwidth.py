"""Limits of bandwidth, as arithmetic."""

from __future__ import annotations

import pytest

from blocktrain.dht.bandwidth import BURST_S, MBIT, PIECE_BYTES, Limiter, Traffic, piece_sizes, pieces


class Clock:
    """A clock that stands still until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_limit_nothing_waits() -> None:
    assert Limiter().reserve(10**12) == 0.0


def test_what_is_asked_for_at_once_passes_one_after_the_other() -> None:
    clock = Clock()
    limiter = Limiter(1000.0, clock)
    assert [limiter.reserve(500) for _ in range(3)] == pytest.approx([0.5, 1.0, 1.5])


def test_silence_allows_for_a_short_burst_only() -> None:
    clock = Clock()
    limiter = Limiter(1000.0, clock)
    clock.now += 3600.0
    assert limiter.reserve(int(1000 * BURST_S)) == pytest.approx(0.0)
    assert limiter.reserve(1000) == pytest.approx(1.0)


def test_over_any_time_the_rate_holds() -> None:
    clock = Clock()
    limiter = Limiter(1000.0, clock)
    passed = 0
    for _ in range(200):
        clock.now += limiter.reserve(77)
        passed += 77
    assert passed / (clock.now - 100.0) == pytest.approx(1000.0, rel=0.01)


def test_a_megabit_is_a_million_bits() -> None:
    traffic = Traffic.limited(8.0, 0.0)
    assert traffic.upload.bytes_per_s == 8 * MBIT == 1_000_000
    assert traffic.download.bytes_per_s == 0.0


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_pieces_are_the_whole_in_order(size: int) -> None:
    payload = bytes(i % 251 for i in range(size))
    cut = [bytes(piece) for piece in pieces(payload)]
    assert b"".join(cut) == payload
    assert [len(piece) for piece in cut] == list(piece_sizes(size))
    assert all(len(piece) <= PIECE_BYTES for piece in cut)
