"""Averaging of one block among its holders: find a group, exchange, hand back a whole result or nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from blocktrain.dht.directory import Directory
from blocktrain.dht.exchange import ARRIVAL_PATIENCE, EXCHANGE, ExchangePlan, GroupExchange
from blocktrain.dht.rendezvous import Rendezvous
from blocktrain.dht.streams import Stream, Streams
from blocktrain.protocol.errors import PeerError, RoundAborted
from blocktrain.protocol.messages import Begin, Exchange, Join
from blocktrain.protocol.spec import RoundSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A holder's state at the beginning of a round; N is the number of its block's parameters."""

    values_N: np.ndarray
    """Its parameters now, float32."""
    anchor_N: np.ndarray
    """Its parameters after its last commit, float32."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The result of a round that succeeded, the same bits for every member."""

    round: int
    mean_N: np.ndarray
    members: tuple[str, ...]
    seconds: float


class BlockAverager:
    """One holder's averaging. `start` once, then `average` for each round."""

    def __init__(self, streams: Streams, directory: Directory, block: int, rounds: RoundSpec) -> None:
        self._streams, self._rounds = streams, rounds
        self.rendezvous = Rendezvous(streams, directory, block)
        self._exchanges: dict[str, GroupExchange] = {}
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        """Serve other holders from now on."""
        await self._streams.serve(self.rendezvous.purpose, self.rendezvous.on_join)
        await self._streams.serve(EXCHANGE, self._on_exchange)

    async def average(
        self, join: Join, deadline: float, take_snapshot: Callable[[], Awaitable[Snapshot]]
    ) -> Commit:
        """Take part in one round; `take_snapshot` is called when its group is known.

        Raises:
            RoundAborted: nothing was committed; its culprits are not waited for in the next rounds.
        """
        try:
            begin = await self.rendezvous.gather(join, deadline)
            commit = await self._exchange(begin, await take_snapshot())
        except RoundAborted as error:
            self.rendezvous.suspicions.blame(p for p in error.culprits if p != self._streams.swarm.peer_id)
            raise
        self.rendezvous.suspicions.forgive(commit.members)
        return commit

    async def _exchange(self, begin: Begin, snapshot: Snapshot) -> Commit:
        started = time.monotonic()
        values_N = snapshot.values_N - snapshot.anchor_N if begin.relative else snapshot.values_N
        plan = ExchangePlan(begin, self._streams.swarm.peer_id, len(values_N), self._rounds.wire)
        exchange = GroupExchange(plan, values_N)
        await self._set(begin.group, exchange)
        try:
            mean_N = await exchange.run(self._streams, self._rounds.timeout_s)
        finally:
            await self._set(begin.group, None)
        if begin.relative:
            mean_N += snapshot.anchor_N
        members = tuple(m.peer_id for m in begin.members)
        return Commit(begin.round, mean_N, members, time.monotonic() - started)

    async def _set(self, group: str, exchange: GroupExchange | None) -> None:
        async with self._changed:
            if exchange is None:
                del self._exchanges[group]
            else:
                self._exchanges[group] = exchange
                self._changed.notify_all()

    async def _on_exchange(self, stream: Stream) -> None:
        """Serve a member; it may come before we have our snapshot, or have even heard of the group."""
        opening, _ = await stream.expect(Exchange)
        try:
            async with asyncio.timeout(ARRIVAL_PATIENCE * stream.idle_s), self._changed:
                await self._changed.wait_for(lambda: opening.group in self._exchanges)
        except TimeoutError:
            await stream.abort("not in this group")
            raise PeerError(stream.peer_id, "opened an exchange for a group that never began here") from None
        await self._exchanges[opening.group].serve(stream)
