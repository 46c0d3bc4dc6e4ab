"""The first peers that a newcomer meets: whichever of its initial peers, or of those it remembers, answer."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import get_dht_time

from blocktrain.dht.contacts import Contacts
from blocktrain.dht.dial import BACKOFF, DIAL_TIMEOUT_S, dial
from blocktrain.protocol.addresses import peer_id_of
from blocktrain.protocol.errors import JoinError, PeerError

log = logging.getLogger(__name__)
STRAGGLERS_S = 2.0
"""When one peer has answered, the others have so long to answer, too."""
SAY_AGAIN_S = 300.0
"""A reason that stays the same is logged again after so long."""
NO_DHT = "answers libp2p but not the DHT"
_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)


@dataclass
class Reasons:
    """Address → why it does not answer; a reason is logged when it is new, and every few minutes."""

    latest: dict[str, str] = field(default_factory=dict)
    _said: dict[str, float] = field(default_factory=dict)

    def note(self, address: str, reason: str) -> None:
        """Take down why an address did not answer this time."""
        if reason == BACKOFF:  # tells less than the reason before
            reason = self.latest.get(address, reason)
        now = time.monotonic()
        if reason != self.latest.get(address) or now > self._said[address] + SAY_AGAIN_S:
            self._said[address] = now
            log.warning("peer %s: %s", address, reason)
        self.latest[address] = reason


@dataclass(frozen=True, slots=True)
class Answers:
    """What came of dialling peers. For the addresses that answered, seconds that our clock is ahead."""

    offsets: Mapping[str, float] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    """For those that did not: why."""


async def meet_first(
    p2p: P2P, initial: Sequence[str], contacts: Contacts | None, timeout_s: float, *, begin: bool
) -> Answers:
    """Dial all initial peers at once, then the remembered ones, again and again until some answer.

    None answer only if there is nobody to wait for: no initial peer is given, or `begin` is set.

    Raises:
        JoinError: nobody has answered within `timeout_s` (0: no limit); names each initial peer's reason.
    """
    known = {peer_id_of(address) for address in initial}
    remembered = [] if contacts is None else [a for p, a in contacts.peers.items() if p not in known]
    reasons, started, said = Reasons(), time.monotonic(), -math.inf
    for attempt in itertools.count():
        answers = await _greet_all(p2p, [(address,) for address in initial], reasons)
        if not answers.offsets and remembered:
            log.log(logging.DEBUG if attempt else logging.INFO, "trying %d remembered peers", len(remembered))
            others = await _greet_all(p2p, remembered, None)
            answers = Answers(others.offsets, {**answers.reasons, **others.reasons})
        if answers.offsets or begin or not initial:
            return answers
        pause = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)] * random.uniform(0.7, 1.3)
        if timeout_s and time.monotonic() + pause - started > timeout_s:
            listed = "; ".join(f"{address}: {reason}" for address, reason in reasons.latest.items())
            others_too = f", nor any of {len(remembered)} remembered ones" if remembered else ""
            raise JoinError(f"no initial peer could be reached{others_too} ({listed})")
        if time.monotonic() > said + SAY_AGAIN_S:
            said = time.monotonic()
            log.warning("no peer has answered yet; trying again and again")
        await asyncio.sleep(pause)
    raise AssertionError


async def _greet_all(p2p: P2P, peers: Sequence[Sequence[str]], noted: Reasons | None) -> Answers:
    """Greet peers, each given by its addresses, at once. A peer goes by the first of its addresses."""
    tasks = {asyncio.create_task(_greet(p2p, addresses)): addresses[0] for addresses in peers}
    try:
        waiting = set(tasks)
        while waiting and not any(isinstance(task.result(), float) for task in tasks if task.done()):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waiting:
            await asyncio.wait(waiting, timeout=STRAGGLERS_S)
        found = {a: t.result() if t.done() else "no answer yet" for t, a in tasks.items()}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    reasons = {address: answer for address, answer in found.items() if isinstance(answer, str)}
    if noted is not None:
        for address, reason in reasons.items():
            noted.note(address, reason)
    return Answers({a: answer for a, answer in found.items() if isinstance(answer, float)}, reasons)


async def greet_each(p2p: P2P, addresses: Sequence[str]) -> dict[str, float | str]:
    """Each address → seconds that our clock is ahead of the peer there, or why it does not answer."""
    answers = await asyncio.gather(*(_greet(p2p, (address,)) for address in addresses))
    return dict(zip(addresses, answers, strict=True))


async def _greet(p2p: P2P, addresses: Sequence[str]) -> float | str:
    """Connect to a peer and ask its DHT for the time: seconds that our clock is ahead, or why it fails."""
    peer_id = peer_id_of(addresses[0])
    try:
        await dial(p2p, peer_id, addresses)
    except PeerError as error:
        return error.reason
    asked = get_dht_time()
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            answer = await p2p.call_protobuf_handler(
                PeerID.from_base58(peer_id),
                "DHTProtocol.rpc_ping",
                dht_pb2.PingRequest(validate=False),
                dht_pb2.PingResponse,
            )
    except Exception as error:  # noqa: BLE001  hivemind raises whatever its RPC layer raises
        return f"{NO_DHT}: {' '.join(str(error).split())[:200] or type(error).__name__}"
    return float((asked + get_dht_time()) / 2 - answer.dht_time)
