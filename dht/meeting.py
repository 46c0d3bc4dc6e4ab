"""Staying acquainted: initial peers and a few remembered ones are looked up again and again.

So swarms that were begun from the same peers find each other, and a network cut or a peer's restart is
over as soon as it ends, without anybody's doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID

from blocktrain.dht.contacts import Contacts
from blocktrain.dht.dial import dial
from blocktrain.dht.greeting import NO_DHT
from blocktrain.protocol.addresses import peer_id_of
from blocktrain.protocol.errors import PeerError

log = logging.getLogger(__name__)
MEET_EVERY_S = 15.0
MAX_MEET = 4
"""Peers that are dialled at one look."""
MAX_PAUSE_S = 300.0
"""A remembered peer that does not answer is tried less and less often, but at least so often."""
MAX_PAUSE_INITIAL_S = 60.0
"""The same for an initial peer, and for all while no other member is known."""


@dataclass
class _Try:
    """The last vain attempt to meet a peer, on the monotonic clock, and the pause after it, seconds."""

    at: float
    pause: float


class Meetings:
    """Keeps initial and remembered peers in the routing table of our DHT node, as long as they answer."""

    def __init__(
        self, p2p: P2P, dht: DHTNode, initial: Mapping[str, Sequence[str]], contacts: Contacts | None
    ) -> None:
        self._p2p, self._dht = p2p, dht
        self._initial, self._contacts = dict(initial), contacts
        self._tries: dict[str, _Try] = {}
        self._lost = False

    async def keep(self) -> None:
        """Look after the acquaintance with them, for ever."""
        while True:
            await self.refresh()
            await asyncio.sleep(MEET_EVERY_S * random.uniform(0.8, 1.2))

    async def refresh(self) -> None:
        """Dial those that our DHT does not know, a few at a time; save what is to be remembered."""
        remembered = {} if self._contacts is None else self._contacts.peers
        table = self._dht.protocol.routing_table
        alone = not table.uid_to_peer_id
        wanted = {**self._initial, **remembered, **self._initial}
        missing = {p: a for p, a in wanted.items() if table.get(peer_id=PeerID.from_base58(p)) is None}
        due = sorted((p for p in missing if self._is_due(p, alone=alone)), key=self._last_try)[:MAX_MEET]
        answers = await asyncio.gather(*(self._meet(peer, missing[peer]) for peer in due))
        failures = {p: reason for p, reason in zip(due, answers, strict=True) if reason is not None}
        for peer in due:
            self._note(peer, failed=peer in failures)
        self._tell(met=len(due) - len(failures), failures=failures)
        if self._contacts is not None:
            for peer in wanted.keys() - missing.keys():
                if peer in remembered:
                    self._contacts.heard_of(peer)
                else:
                    self._contacts.suggest(peer, self._initial[peer])
            await self._contacts.save()

    def _is_due(self, peer: str, *, alone: bool) -> bool:
        last = self._tries.get(peer)
        limit = MAX_PAUSE_INITIAL_S if alone or peer in self._initial else MAX_PAUSE_S
        return last is None or time.monotonic() >= last.at + min(last.pause, limit)

    def _last_try(self, peer: str) -> float:
        return self._tries[peer].at if peer in self._tries else -math.inf

    async def _meet(self, peer: str, addresses: Sequence[str]) -> str | None:
        """Connect, and have our DHT nodes take each other down; why it failed, or None."""
        try:
            await dial(self._p2p, peer, addresses)
        except PeerError as error:
            return error.reason
        found = PeerID.from_base58(peer)
        if await self._dht.protocol.call_ping(found) is None:
            return NO_DHT
        self._dht.blacklist.register_success(found)  # or it is passed over, longer after each failure
        return None

    def _note(self, peer: str, *, failed: bool) -> None:
        last = self._tries.pop(peer, None)
        if failed:
            # A look comes at least 0.8 of the usual pause after the last one.
            pause = 0.8 * MEET_EVERY_S if last is None else 2 * last.pause
            self._tries[peer] = _Try(time.monotonic(), min(pause, MAX_PAUSE_S))

    def _tell(self, met: int, failures: Mapping[str, str]) -> None:
        """Say when the last peer is lost, and when any is back."""
        count = max(met, len(self._dht.protocol.routing_table.uid_to_peer_id))
        if self._lost and count:
            self._dht.blacklist.clear()  # it was us who were cut off, so nobody is to be passed over for it
            log.info("met %d %s again", count, "peer" if count == 1 else "peers")
        elif met:
            log.debug("met %d more peers", met)
        elif failures and not count and not self._lost:
            reasons = "; ".join(f"{peer[:16]}: {reason}" for peer, reason in failures.items())
            log.warning("no peer answers: %s; trying again every %.0f s", reasons, MEET_EVERY_S)
            self._lost = True
        self._lost = self._lost and not count


@contextlib.asynccontextmanager
async def keep_meeting(
    p2p: P2P,
    dht: DHTNode,
    initial: Sequence[str],
    contacts: Contacts | None,
    group: asyncio.TaskGroup,
) -> AsyncIterator[None]:
    """Stay acquainted with initial and remembered peers while the block runs."""
    by_peer: dict[str, list[str]] = {}
    for address in initial:
        by_peer.setdefault(peer_id_of(address), []).append(address)
    keeper = group.create_task(Meetings(p2p, dht, by_peer, contacts).keep(), name="meetings")
    try:
        yield
    finally:
        keeper.cancel()
        if contacts is not None:
            await contacts.save()
