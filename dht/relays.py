"""The peers through which others reach this node when they can't reach it directly."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import AsyncIterator, Sequence

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID

from blocktrain.dht.circuit import address_from_outside, connected
from blocktrain.dht.dial import TRANSPORT_ERRORS, dial, leads_to
from blocktrain.protocol.addresses import peer_id_of
from blocktrain.protocol.errors import PeerError

log = logging.getLogger(__name__)
RELAYS_WANTED = 2
"""One can go while the other still serves."""
MAX_RELAY_CANDIDATES = 64
RELAY_CHECK_S = 3.0


class Relays:
    """Keeps this node connected to a few peers that can be reached from outside.

    Any peer will do: initial peers first, then whoever is in the directory with a public address.
    """

    def __init__(self, p2p: P2P, dht: DHTNode, initial_peers: Sequence[str]) -> None:
        self._p2p, self._dht = p2p, dht
        direct = [address for address in initial_peers if "/p2p-circuit" not in address]
        self._candidates = {peer_id_of(address): address for address in direct}
        self._initial = frozenset(self._candidates)
        self._now: tuple[str, ...] = ()

    def suggest(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Remember a peer that may serve, by its own account of its addresses."""
        if peer_id in self._candidates or len(self._candidates) >= MAX_RELAY_CANDIDATES:
            return
        public = next((a for a in addresses if _is_public(a) and leads_to(peer_id, a)), None)
        if public is not None:
            self._candidates[peer_id] = public

    def addresses(self, peer_id: str) -> tuple[str, ...]:
        """Where others reach this node, of that peer id, through its relays."""
        return tuple(f"{relay}/p2p-circuit/p2p/{peer_id}" for relay in self._now)

    async def keep(self) -> None:
        """Look after the connections to the relays, for ever."""
        while True:
            await self.refresh()
            await asyncio.sleep(RELAY_CHECK_S)

    async def refresh(self) -> None:
        """See which candidates we are connected to; dial others if they are too few."""
        try:
            direct = await connected(self._p2p)
        except TRANSPORT_ERRORS as error:
            log.debug("the daemon does not tell its connections: %s", error)
            return
        serving = [a for peer, a in self._candidates.items() if peer in direct]
        for peer, address in list(self._candidates.items()):
            if len(serving) < RELAYS_WANTED and peer not in direct:
                try:
                    await dial(self._p2p, peer, [address])
                    serving.append(address)
                except PeerError as error:
                    log.debug("relay candidate: %s", error)
                    self._forget(peer)
        now = tuple(serving[:RELAYS_WANTED])
        if now != self._now:
            log.info("reached through %s", ", ".join(now) or "nobody: no relay answers")
        self._now = now
        for address in now:
            await self._meet_again(PeerID.from_base58(peer_id_of(address)))

    def _forget(self, peer: str) -> None:
        """Make room for others; the initial peers stay, as they may come back."""
        if peer not in self._initial:
            del self._candidates[peer]

    async def _meet_again(self, peer: PeerID) -> None:
        """hivemind forgets a peer that did not answer once, and nobody can dial us to remind it."""
        protocol = self._dht.protocol
        if protocol.routing_table.get(peer_id=peer) is None and await protocol.call_ping(peer):
            self._dht.blacklist.register_success(peer)  # or it is passed over, longer after each failure


@contextlib.asynccontextmanager
async def keep_relays(
    p2p: P2P, dht: DHTNode, initial_peers: Sequence[str], needed: bool, group: asyncio.TaskGroup
) -> AsyncIterator[Relays | None]:
    """Stay connected to relays while the block runs, if any are needed; begin with the initial peers."""
    if not needed:
        yield None
        return
    relays = Relays(p2p, dht, initial_peers)
    await relays.refresh()
    keeper = group.create_task(relays.keep(), name="relays")
    try:
        yield relays
    finally:
        keeper.cancel()


async def outside_address(p2p: P2P, reached: Sequence[str]) -> str | None:
    """Where others reach us; empty: nowhere; None: nobody says, so we take it that they do."""
    listening = [str(a).split("/") for a in await p2p.get_visible_maddrs()]
    ports = sorted({int(steps[4]) for steps in listening if steps[3] == "tcp"})
    answers = await asyncio.gather(*(address_from_outside(p2p, peer_id_of(a), ports) for a in reached))
    return next((answer for answer in answers if answer), "" if "" in answers else None)


def _is_public(address: str) -> bool:
    """Whether an address leads to a peer directly, over the Internet."""
    steps = address.split("/")
    try:
        return "p2p-circuit" not in steps and ipaddress.ip_address(steps[2]).is_global
    except (IndexError, ValueError):
        return False
