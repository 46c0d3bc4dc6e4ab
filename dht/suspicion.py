"""Who spoilt a round lately. Each node keeps its own opinion; nobody can talk it into one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from blocktrain.dht.swarm import dht_time

SUSPECT_S = 2.0
"""A holder that spoilt a round is in none that this node begins or joins for this long …"""
MAX_SUSPECT_S = 300.0
"""… and twice as long each time it does so again before a round with it was committed, up to this."""


class Suspicions:
    """Peers to be left out for a while."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._offences: Counter[str] = Counter()

    def blame(self, peers: Iterable[str]) -> None:
        """They spoilt a round."""
        for peer in peers:
            self._offences[peer] += 1
            span_s = SUSPECT_S * 2 ** min(self._offences[peer] - 1, 10)
            self._until[peer] = dht_time() + min(span_s, MAX_SUSPECT_S)

    def forgive(self, peers: Iterable[str]) -> None:
        """A round with them was committed."""
        for peer in peers:
            self._until.pop(peer, None)
            del self._offences[peer]

    def __contains__(self, peer: str) -> bool:
        """Whether a peer is left out now."""
        return self._until.get(peer, 0.0) >= dht_time()

    def first_end_s(self, peers: Iterable[str]) -> float:
        """Seconds until the first of these peers is not left out any more."""
        return max(0.0, min((self._until.get(peer, 0.0) for peer in peers), default=0.0) - dht_time())
