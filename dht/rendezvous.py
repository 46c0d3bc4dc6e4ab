"""How holders of a block find into one group at a round's deadline.

At any time one holder leads: the first in an order that is drawn anew every minute from the run, the
block and the peer ids, so no holder leads for long and everyone who sees the same directory agrees.
The others open a stream to it and wait; it begins the round as soon as every live holder has come, or
at the deadline with those who have. Training goes on meanwhile; nobody waits in its training thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from blocktrain.dht.directory import Directory, Holder
from blocktrain.dht.reduction import MAX_WEIGHT_RATIO, MIN_WEIGHT, clamp_weights
from blocktrain.dht.streams import Stream, Streams
from blocktrain.dht.suspicion import Suspicions
from blocktrain.dht.swarm import dht_time
from blocktrain.protocol.errors import NetworkError, PeerError, RoundAborted
from blocktrain.protocol.messages import MAX_GROUP, Begin, Join, Member, Redirect, Waiting
from blocktrain.protocol.records import MAX_ADDRESSES

log = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
SILENCE_S = 5.0
"""A leader that sends no heartbeat for this long is given up."""
LEADER_TERM_S = 60
GRACE_S = 5.0
"""How long after the deadline a follower still waits for the leader's word."""
ARRIVE_S = 3.0
"""Wait at least so long: at a deadline, holders whose steps are not done come a little apart."""
MAX_LEAD = 3
"""Rounds that a group's furthest member may be ahead of us; further, and we have to catch up first."""
MAX_REDIRECTS = 5
"""About one a second: two holders whose clocks differ may disagree so long about whose term it is."""
W = TypeVar("W", Begin, Redirect)


@dataclass(frozen=True)
class _Follower:
    join: Join
    begin: asyncio.Future[Begin | Redirect]


class Rendezvous:
    """One holder's part in forming the groups of its block."""

    def __init__(self, streams: Streams, directory: Directory, block: int) -> None:
        self._streams, self._directory, self._block = streams, directory, block
        self._me = streams.swarm.peer_id
        self._holders: dict[str, Holder] = {}
        self._followers: dict[str, _Follower] = {}
        self._came = asyncio.Event()
        self._following, self._staying, self._deadline = "", False, 0.0
        self.suspicions = Suspicions()
        self.purpose = f"join-{block}"

    def note_holders(self, holders: Sequence[Holder]) -> None:
        """Take over what the directory says about this block now."""
        others = (h for h in holders if h.peer_id != self._me)
        self._holders = {h.peer_id: h for h in others if not h.record.resting}

    @property
    def others(self) -> tuple[str, ...]:
        """Other live holders that are not under suspicion."""
        return tuple(p for p in self._holders if p not in self.suspicions)

    async def pause(self, seconds: float | None = None) -> None:
        """Wait so long (by default until a holder may be trusted again), or until one comes to us."""
        if seconds is None:
            seconds = self.suspicions.first_end_s(self._holders)
        self._came.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._came.wait()

    async def gather(self, join: Join, deadline: float) -> Begin:
        """Find a group, by leading or by following, until shortly after `deadline` (DHT time).

        Raises:
            RoundAborted: nobody came, the leader failed, or the deadline passed without its word.
        """
        self._deadline = deadline = max(deadline, dht_time() + ARRIVE_S)
        sent_to, redirects, redirected = "", 0, 0.0
        while True:
            leader = sent_to or self._leader()
            try:
                if leader == self._me or leader in self._waiting:  # who follows us does not lead
                    answer = await self._lead(join, deadline, stay=bool(sent_to))
                else:
                    answer = await self._follow(leader, join, deadline)
            except PeerError as error:
                self.suspicions.blame([error.peer_id])
                log.debug("leader failed: %s", error)
                if dht_time() > deadline + GRACE_S:
                    raise RoundAborted(str(error), (error.peer_id,)) from None
                sent_to = ""
                continue
            if isinstance(answer, Begin):
                return answer
            sent_to = "" if answer.leader in self.suspicions else answer.leader
            redirects = redirects + 1 if dht_time() - redirected < SILENCE_S else 1
            redirected = dht_time()
            if redirects > MAX_REDIRECTS:  # round in circles
                self.suspicions.blame([leader])
                sent_to = ""
            elif redirects > 1:
                await asyncio.sleep(HEARTBEAT_S)

    async def on_join(self, stream: Stream) -> None:
        """Serve a holder that wants to be led by us: keep it informed until the round begins."""
        join, _ = await stream.expect(Join)
        leader = self._leader_for(stream.peer_id)
        if leader != self._me:
            await stream.send(Redirect(leader))
            return
        follower = _Follower(join, asyncio.get_running_loop().create_future())
        self._followers[stream.peer_id] = follower
        self._came.set()
        gone: asyncio.Future[Any] = asyncio.ensure_future(stream.receive(timeout_s=86_400.0))
        begun: asyncio.Future[Any] = follower.begin
        try:
            while not follower.begin.done():
                waiting = Waiting(min(len(self._followers), MAX_GROUP), self._deadline)
                await stream.send(waiting, timeout_s=SILENCE_S)
                await asyncio.wait({begun, gone}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if gone.done() and not follower.begin.done():
                    return
            if not follower.begin.cancelled():
                await stream.send(follower.begin.result())
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            if self._followers.get(stream.peer_id) is follower:
                del self._followers[stream.peer_id]
                self._came.set()

    @property
    def _waiting(self) -> dict[str, _Follower]:
        """Those who follow us and were not told anything yet."""
        return {peer: f for peer, f in self._followers.items() if not f.begin.done()}

    def _leader_for(self, peer: str) -> str:
        """Whom a holder should follow that comes to us."""
        if self._following == peer:  # each has gone to the other; both must decide alike
            return min(peer, self._me)
        if self._following:
            return self._following
        leader = self._leader()
        if self._staying or leader == peer or leader in self._waiting:  # who follows us does not lead
            return self._me
        return leader

    def _leader(self) -> str:
        """The holder that leads now, in this node's view."""
        term = int(dht_time()) // LEADER_TERM_S
        text = f"{self._streams.fingerprint} {self._block} {term}"
        return min((*self.others, self._me), key=lambda p: hashlib.sha256(f"{text} {p}".encode()).digest())

    async def _lead(self, join: Join, deadline: float, *, stay: bool) -> Begin | Redirect:
        """Wait for the others, then begin; unless `stay`, give way when another holder's term comes."""
        self._staying = stay
        try:
            if (successor := await self._await_followers(deadline)) is not None:
                return self._tell(self._waiting, Redirect(successor))
        finally:
            self._staying = False
        welcome = [(peer, f.join) for peer, f in self._waiting.items() if peer not in self.suspicions]
        joins = dict(welcome[: MAX_GROUP - 1])
        if not joins:
            raise RoundAborted("no other holder came in time", self.others)
        own_addresses = (await self._streams.swarm.addresses())[:MAX_ADDRESSES]
        return self._tell(joins, self._compose({**joins, self._me: join}, own_addresses))

    async def _await_followers(self, deadline: float) -> str | None:
        """Until all other holders follow us, none is left, or the deadline; who leads now if not we."""
        while dht_time() < deadline and not (self.others and set(self.others) <= self._waiting.keys()):
            self._came.clear()
            try:
                async with asyncio.timeout(min(HEARTBEAT_S, max(0.0, deadline - dht_time()))):
                    await self._came.wait()
            except TimeoutError:
                await self._refresh()
                if not self.others and not self._waiting:
                    break
                leader = self._leader()
                if not self._staying and leader != self._me and leader not in self._waiting:
                    return leader
        return None

    def _tell(self, peers: Iterable[str], word: W) -> W:
        for peer in peers:
            follower = self._followers.get(peer)  # gone meanwhile, perhaps
            if follower is not None and not follower.begin.done():
                follower.begin.set_result(word)
        return word

    async def _refresh(self) -> None:
        try:
            self.note_holders((await self._directory.holders())[self._block])
        except NetworkError as error:
            log.debug("directory: %s", error)

    def _compose(self, joins: Mapping[str, Join], own_addresses: tuple[str, ...]) -> Begin:
        weights = clamp_weights({peer: join.samples for peer, join in joins.items()})
        members = []
        for peer in sorted(joins):
            known = self._holders.get(peer)
            addresses = own_addresses if peer == self._me else known.record.addresses if known else ()
            members.append(Member(peer, weights[peer], addresses))
        same_anchor = len({(join.anchor, join.round) for join in joins.values()}) == 1
        round_number = max(join.round for join in joins.values()) + 1
        return Begin(secrets.token_hex(16), round_number, tuple(members), same_anchor)

    async def _follow(self, leader: str, join: Join, deadline: float) -> Begin | Redirect:
        known = self._holders.get(leader)
        self._following = leader
        self._tell(self._waiting, Redirect(leader))
        try:
            async with self._streams.open(
                leader, self.purpose, known.record.addresses if known else ()
            ) as stream:
                await stream.send(join)
                # The leader may put its deadline later than ours, once: a word each second that it is later
                # still must not hold us for ever.
                latest = dht_time() + self._directory.spec.rounds.deadline_s
                while True:
                    answer, _ = await stream.receive(timeout_s=SILENCE_S)
                    if isinstance(answer, Begin):
                        return self._checked(leader, join, answer)
                    if isinstance(answer, Redirect):
                        return answer
                    if not isinstance(answer, Waiting):
                        raise PeerError(leader, f"sent {type(answer).__name__} to a follower")
                    if dht_time() > max(deadline, min(answer.deadline, latest)) + GRACE_S:
                        raise RoundAborted("the leader did not begin the round by the deadline", (leader,))
        finally:
            self._following = ""

    def _checked(self, leader: str, join: Join, begin: Begin) -> Begin:
        peers = [m.peer_id for m in begin.members]
        if self._me not in peers or leader not in peers or peers != sorted(set(peers)):
            raise PeerError(leader, "began a round with a wrong list of members")
        expected = range(join.round + 1, join.round + (2 if begin.relative else 2 + MAX_LEAD))
        if begin.round not in expected:
            raise PeerError(leader, f"began round {begin.round}, we have {join.round} behind us")
        if not all(MIN_WEIGHT <= m.weight <= MAX_WEIGHT_RATIO for m in begin.members):
            raise PeerError(leader, "began a round with a weight that the rules don't allow")
        return begin
