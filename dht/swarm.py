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
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import get_dht_time

from blocktrain.dht.daemon import DaemonConfig, run_daemon
from blocktrain.dht.validator import RecordValidator
from blocktrain.protocol.addresses import peer_id_of
from blocktrain.protocol.errors import JoinError, NetworkError, PeerError
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.records import CLOCK_TOLERANCE_S

log = logging.getLogger(__name__)
DIAL_TIMEOUT_S = 8.0
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
    _dialled: set[str] = field(default_factory=set)

    @property
    def peer_id(self) -> str:
        """This node's peer id, base58."""
        return self.identity.peer_id

    async def addresses(self) -> tuple[str, ...]:
        """Multiaddrs at which others may reach this node, with its peer id; loopback ones last."""
        found = [str(a) for a in await self.p2p.get_visible_maddrs(latest=True)]
        return tuple(sorted(found, key=lambda a: ("/127." in a or "/ip6/::1/" in a, a)))

    async def connect(self, peer_id: str, addresses: Sequence[str] = ()) -> None:
        """Make sure that the daemon knows how to reach a peer. Raises: PeerError."""
        if peer_id in self._dialled or not addresses:
            return
        await dial(self.p2p, peer_id, addresses)
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
        reached = await _dial_until_one_answers(p2p, identity.peer_id, config)
        dht = await DHTNode.create(
            p2p=p2p,
            initial_peers=reached or None,
            client_mode=config.client_mode,
            record_validator=validator,
            ensure_bootstrap_success=False,
            cache_locally=False,  # a directory must not show what was true a while ago
            cache_nearest=0,
        )
        try:
            for address in reached[:1]:
                await _check_clock(dht, peer_id_of(address))
            yield Swarm(identity, p2p, dht, validator, group)
        finally:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(2):
                    await dht.shutdown()


async def dial(p2p: P2P, peer_id: str, addresses: Sequence[str]) -> None:
    """Connect the daemon to a peer at any of its addresses. Raises: PeerError, with libp2p's reason."""
    suffix = f"/p2p/{peer_id}"
    targets = [Multiaddr(address.removesuffix(suffix)) for address in addresses]
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            await p2p._client.connect(PeerID.from_base58(peer_id), targets)
    except TimeoutError:
        raise PeerError(
            peer_id, f"no answer within {DIAL_TIMEOUT_S:.0f} s at {', '.join(addresses)[:200]}"
        ) from None
    except (P2PDaemonError, OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise PeerError(peer_id, _dial_reason(str(error))) from None


async def _dial_until_one_answers(p2p: P2P, own_id: str, config: JoinConfig) -> list[str]:
    """The initial peers that answered; tried again with growing pauses until one does."""
    wanted = [a for a in config.initial_peers if peer_id_of(a) != own_id]
    started = time.monotonic()
    for attempt in range(10**9):
        results = await asyncio.gather(*(_try_dial(p2p, address) for address in wanted))
        reached = [address for address, failure in zip(wanted, results, strict=True) if failure is None]
        failures = [
            f"{address}: {failure}" for address, failure in zip(wanted, results, strict=True) if failure
        ]
        for failure in failures:
            log.warning("initial peer %s", failure)
        if reached or not wanted:
            return reached
        pause = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)] * random.uniform(0.7, 1.3)
        if config.timeout_s and time.monotonic() + pause - started > config.timeout_s:
            raise JoinError(f"no initial peer could be reached ({'; '.join(failures)})")
        log.warning("no initial peer answered; trying again in %.0f s", pause)
        await asyncio.sleep(pause)
    raise AssertionError


async def _try_dial(p2p: P2P, address: str) -> str | None:
    try:
        await dial(p2p, peer_id_of(address), [address])
        return None
    except PeerError as error:
        return error.reason


async def _check_clock(dht: DHTNode, peer_id: str) -> None:
    """Compare clocks with one peer. Raises: JoinError when they are too far apart to train together."""
    asked = dht_time()
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            request = dht_pb2.PingRequest(peer=dht.protocol.node_info, validate=False)
            answer = await dht.protocol.get_stub(PeerID.from_base58(peer_id)).rpc_ping(request)
    except Exception as error:  # noqa: BLE001  hivemind raises whatever its RPC layer raises
        raise JoinError(f"peer {peer_id} answers libp2p but not the DHT: {str(error)[:200]}") from None
    offset = (asked + dht_time()) / 2 - answer.dht_time
    if abs(offset) > CLOCK_TOLERANCE_S:
        raise JoinError(
            f"your clock is {offset:+.1f} s off the swarm's; set it (for example `timedatectl set-ntp true`)"
        )


def _dial_reason(text: str) -> str:
    """The telling part of libp2p's dial errors, which run over many lines."""
    flat = " ".join(text.replace("Connect failed. msg=", "").split())
    for sign, meaning in (
        ("connection refused", "connection refused: nothing listens there"),
        ("peer id mismatch", "another peer answers at this address: its peer id is not the one given"),
        ("no route to host", "no route to this host"),
        ("network is unreachable", "this network can't be reached from here"),
        ("i/o timeout", "no answer (wrong address, or a firewall drops it)"),
        ("deadline exceeded", "no answer (wrong address, or a firewall drops it)"),
        ("no such host", "the host name can't be resolved"),
    ):
        if sign in flat:
            return meaning
    return flat[:200]
