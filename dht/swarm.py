"""Membership in a swarm: the libp2p daemon, hivemind's DHT on it, and connections to peers.

The DHT node runs inside our own event loop, not in a forked process as `hivemind.DHT` does: no pipes
that fill up, no futures that never resolve, no orphans (docs/decisions/0001-in-process-dht.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PDaemonError
from hivemind.utils.timed_storage import get_dht_time

from blocktrain.dht.bandwidth import Traffic
from blocktrain.dht.circuit import DialBack, Relay
from blocktrain.dht.contacts import Contacts
from blocktrain.dht.daemon import DaemonConfig, run_daemon
from blocktrain.dht.dial import dial, leads_to, own_addresses
from blocktrain.dht.duplicates import refuse_answering_twin
from blocktrain.dht.greeting import Answers, meet_first
from blocktrain.dht.meeting import keep_meeting
from blocktrain.dht.relays import Relays, keep_relays, outside_address
from blocktrain.dht.validator import RecordValidator
from blocktrain.protocol.addresses import peer_id_of
from blocktrain.protocol.errors import JoinError, NetworkError
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.records import CLOCK_TOLERANCE_S

log = logging.getLogger(__name__)
DHT_TIMEOUT_S = 15.0


def dht_time() -> float:
    """Seconds on the clock that the whole swarm shares (weakly synchronised Unix time)."""
    return float(get_dht_time())


@dataclass(frozen=True, slots=True)
class JoinConfig:
    """How to become a member of a swarm."""

    daemon: DaemonConfig
    initial_peers: tuple[str, ...] = ()
    """Multiaddrs of members; empty: begin a new swarm."""
    timeout_s: float = 30.0
    """Give up when none of the initial peers has let us in by then; 0: never."""
    client_mode: bool = False
    """Take part without serving DHT requests, for short visits."""
    contacts: Contacts | None = None
    """Peers met before, tried when no initial peer answers; peers that are met are added."""
    traffic: Traffic = field(default_factory=Traffic)
    """Counts and limits what this node sends and receives."""
    place: str = ""
    """Where the node's home is, as a digest (see duplicates.py); empty for visitors."""
    begin: bool = False
    """When nobody answers, begin without them, as a seed does; they are met once they come up."""


@dataclass(frozen=True)
class Swarm:
    """A live membership. Make it with `join_swarm`."""

    identity: Identity
    p2p: P2P
    dht: DHTNode
    validator: RecordValidator
    group: asyncio.TaskGroup
    """The process's task group: whatever runs in the background runs in it."""
    relays: Relays | None = None
    """Peers through which others reach this node; None if they reach it without."""
    outside: str = ""
    """The address at which a peer has reached this node with a connection of its own."""
    contacts: Contacts | None = None
    """The peers that this node remembers, if it does."""
    answers: Answers = field(default_factory=Answers)
    """What the initial peers answered when it joined."""
    place: str = ""
    """Where its home is, as a digest; it goes into its records."""
    _dialled: set[str] = field(default_factory=set)

    @property
    def peer_id(self) -> str:
        """This node's peer id, base58."""
        return self.identity.peer_id

    async def addresses(self) -> tuple[str, ...]:
        """Multiaddrs at which others may reach this node, with its peer id; loopback ones last.

        Raises:
            NetworkError: the daemon does not answer.
        """
        try:
            found = await own_addresses(self.p2p)
        except (OSError, asyncio.IncompleteReadError, P2PDaemonError) as error:
            raise NetworkError(f"the libp2p daemon does not tell our addresses: {error}") from None
        found += [f"{self.outside}/p2p/{self.peer_id}"] if self.outside else []
        found += self.relays.addresses(self.peer_id) if self.relays else ()
        return tuple(sorted(set(found), key=lambda a: ("/127." in a or "/ip6/::1/" in a, a)))

    async def connect(self, peer_id: str, addresses: Sequence[str] = ()) -> None:
        """Make sure that the daemon knows how to reach a peer, by its own account of its addresses.

        Those that can't be dialled are passed over; without any, it may still be connected to us.

        Raises:
            PeerError: it answers at none of them.
        """
        usable = [a for a in addresses if leads_to(peer_id, a)]
        if peer_id in self._dialled or not usable:
            return
        await dial(self.p2p, peer_id, usable)
        self._dialled.add(peer_id)

    def forget_connection(self, peer_id: str) -> None:
        """Dial this peer anew next time."""
        self._dialled.discard(peer_id)

    async def store(self, key: str, value: bytes, expires: float, subkey: str | None = None) -> bool:
        """Put a value into the DHT. False: nobody took it. Raises: NetworkError when the DHT hangs."""
        try:
            async with asyncio.timeout(DHT_TIMEOUT_S):
                return bool(await self.dht.store(key, value, expires, subkey=subkey))
        except TimeoutError:
            raise NetworkError(f"the DHT did not take a record within {DHT_TIMEOUT_S:.0f} s") from None

    async def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """The latest values under several keys; None where there is none. Raises: NetworkError."""
        try:
            async with asyncio.timeout(DHT_TIMEOUT_S):
                found = await self.dht.get_many(keys, sufficient_expiration_time=float("inf"))
        except TimeoutError:
            raise NetworkError(f"the DHT did not answer within {DHT_TIMEOUT_S:.0f} s") from None
        return {key: None if item is None else item.value for key, item in found.items()}


@contextlib.asynccontextmanager
async def join_swarm(
    identity: Identity, config: JoinConfig, group: asyncio.TaskGroup
) -> AsyncIterator[Swarm]:
    """Start the daemon, connect to whichever initial peers answer, join their DHT; leave at the end.

    Raises:
        DaemonError: the daemon did not start.
        IdentityInUse: another node answers under this identity at one of the initial peers' addresses.
        JoinError: no initial peer let us in; the message holds each one's answer. Or our clock is off.
    """
    await refuse_answering_twin(identity.peer_id, config.initial_peers, group)
    initial = [a for a in config.initial_peers if peer_id_of(a) != identity.peer_id]
    async with run_daemon(config.daemon, group) as p2p:
        validator = RecordValidator()
        await Relay(p2p, config.traffic).start()
        await DialBack(p2p).start()
        answers = await meet_first(p2p, initial, config.contacts, config.timeout_s, begin=config.begin)
        _check_clock(answers)
        reached = list(answers.offsets)
        taken_at_its_word = config.client_mode or bool(config.daemon.announce)
        outside = None if taken_at_its_word else await outside_address(p2p, reached)
        dht = await DHTNode.create(
            p2p=p2p,
            initial_peers=[f"/p2p/{peer_id_of(address)}" for address in reached] or None,
            client_mode=config.client_mode or outside == "",
            record_validator=validator,
            ensure_bootstrap_success=False,
            cache_locally=False,  # a directory must not show what was true a while ago
            cache_nearest=0,
        )
        relayed = outside == ""
        candidates = tuple(dict.fromkeys([*config.initial_peers, *reached]))
        try:
            async with (
                keep_relays(p2p, dht, candidates, relayed, group) as relays,
                keep_meeting(p2p, dht, initial, config.contacts, group),
            ):
                yield Swarm(
                    *(identity, p2p, dht, validator, group, relays, outside or ""),
                    contacts=config.contacts,
                    answers=answers,
                    place=config.place,
                )
        finally:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(2):
                    await dht.shutdown()


def _check_clock(answers: Answers) -> None:
    """Compare clocks with those who let us in; one of them with a wrong clock keeps nobody out.

    Raises:
        JoinError: our clock is too far off to train together.
    """
    offset = median_low(answers.offsets.values()) if answers.offsets else 0.0
    if abs(offset) > CLOCK_TOLERANCE_S:
        raise JoinError(
            f"your clock is {offset:+.1f} s off the swarm's; set it (for example `timedatectl set-ntp true`)"
        )
