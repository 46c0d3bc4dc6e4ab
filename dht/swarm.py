"""Membership in a swarm: the libp2p daemon, hivemind's DHT on it, and connections to peers.

The DHT node runs inside our own event loop, not in a forked process as `hivemind.DHT` does: no pipes
that fill up, no futures that never resolve, no orphans (docs/decisions/0001-in-process-dht.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import get_dht_time

from blocktrain.dht.circuit import DialBack, Relay
from blocktrain.dht.daemon import DaemonConfig, run_daemon
from blocktrain.dht.dial import BACKOFF, DIAL_TIMEOUT_S, dial, leads_to
from blocktrain.dht.relays import Relays, keep_relays, outside_address
from blocktrain.dht.validator import RecordValidator
from blocktrain.protocol.addresses import peer_id_of
from blocktrain.protocol.errors import JoinError, NetworkError, PeerError
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.records import CLOCK_TOLERANCE_S

log = logging.getLogger(__name__)
DHT_TIMEOUT_S = 15.0
_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)


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
            found = [str(a) for a in await self.p2p.get_visible_maddrs(latest=True)]
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
        JoinError: no initial peer let us in; the message holds each one's answer.
    """
    async with run_daemon(config.daemon, group) as p2p:
        validator = RecordValidator()
        await Relay(p2p).start()
        await DialBack(p2p).start()
        reached = await _dial_until_one_answers(p2p, identity.peer_id, config)
        taken_at_its_word = config.client_mode or bool(config.daemon.announce)
        outside = None if taken_at_its_word else await outside_address(p2p, reached)
        dht = await DHTNode.create(
            p2p=p2p,
            initial_peers=reached or None,
            client_mode=config.client_mode or outside == "",
            record_validator=validator,
            ensure_bootstrap_success=False,
            cache_locally=False,  # a directory must not show what was true a while ago
            cache_nearest=0,
        )
        try:
            await _check_clock(dht, reached)
            async with keep_relays(p2p, dht, config.initial_peers, outside == "", group) as relays:
                yield Swarm(identity, p2p, dht, validator, group, relays, outside or "")
        finally:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(2):
                    await dht.shutdown()


async def _dial_until_one_answers(p2p: P2P, own_id: str, config: JoinConfig) -> list[str]:
    """The initial peers that answered; tried again with growing pauses until one does."""
    wanted = [a for a in config.initial_peers if peer_id_of(a) != own_id]
    reasons: dict[str, str] = {}
    started = time.monotonic()
    for attempt in range(10**9):
        failures = await asyncio.gather(*(_try_dial(p2p, address) for address in wanted))
        reached = [address for address, failure in zip(wanted, failures, strict=True) if failure is None]
        for address, failure in zip(wanted, failures, strict=True):
            if failure is not None:
                reasons[address] = reasons.get(address, failure) if failure == BACKOFF else failure
                log.warning("initial peer %s: %s", address, reasons[address])
        if reached or not wanted:
            return reached
        pause = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)] * random.uniform(0.7, 1.3)
        if config.timeout_s and time.monotonic() + pause - started > config.timeout_s:
            raise JoinError(f"no initial peer could be reached ({_listed(reasons)})")
        log.warning("no initial peer answered; trying again in %.0f s", pause)
        await asyncio.sleep(pause)
    raise AssertionError


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{address}: {reason}" for address, reason in reasons.items())


async def _try_dial(p2p: P2P, address: str) -> str | None:
    try:
        await dial(p2p, peer_id_of(address), [address])
        return None
    except PeerError as error:
        return error.reason


async def _check_clock(dht: DHTNode, reached: Sequence[str]) -> None:
    """Compare clocks with the initial peers; one of them with a wrong clock keeps nobody out.

    Raises:
        JoinError: none of them speaks our DHT, or our clock is too far off to train together.
    """
    answers = await asyncio.gather(*(_clock_offset(dht, peer_id_of(address)) for address in reached))
    offsets = [answer for answer in answers if isinstance(answer, float)]
    if reached and not offsets:
        raise JoinError("; ".join(str(answer) for answer in answers))
    offset = median_low(offsets) if offsets else 0.0
    if abs(offset) > CLOCK_TOLERANCE_S:
        raise JoinError(
            f"your clock is {offset:+.1f} s off the swarm's; set it (for example `timedatectl set-ntp true`)"
        )


async def _clock_offset(dht: DHTNode, peer_id: str) -> float | str:
    """Seconds that our clock is ahead of a peer's, or why it did not say."""
    asked = dht_time()
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            request = dht_pb2.PingRequest(peer=dht.protocol.node_info, validate=False)
            answer = await dht.protocol.get_stub(PeerID.from_base58(peer_id)).rpc_ping(request)
    except Exception as error:  # noqa: BLE001  hivemind raises whatever its RPC layer raises
        return f"peer {peer_id} answers libp2p but not the DHT: {str(error)[:200]}"
    return (asked + dht_time()) / 2 - float(answer.dht_time)
