"""One member's side of one averaging group, over a stream to and from every other member.

Towards each other member we are a client: we send it its share of our vector part by part, and get the
means back. For each other member we are a server: the same, the other way round. A part's mean is what
its owner put on the wire, for the owner too, so all members end with the same bits.

Any failure ends the exchange for everyone: there is no partial result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blocktrain.dht.reduction import Accumulator, PartSpan, check_part, plan_parts
from blocktrain.dht.streams import Stream, Streams
from blocktrain.protocol.errors import PeerError, RoundAborted, TensorError
from blocktrain.protocol.messages import Begin, Exchange, Member, Part
from blocktrain.protocol.tensors import WIRE_DTYPES, decode_part, encode_part

log = logging.getLogger(__name__)
EXCHANGE = "exchange"
REDUCER_PATIENCE = 2.5
"""A reducer may be silent or take nothing this many times longer than a sender: it waits for the slowest."""
ARRIVAL_PATIENCE = 1.5
"""A member may take this many times longer to open its exchange: it waits for a training step to end."""
PARTING_S = 0.2
"""Between our last word and the end of a stream: closing it on unread bytes could lose the word."""
WINDOW = 4
"""Parts that one sender may be ahead of the slowest; bounds the memory of a reducer."""


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """What a group has agreed on, as one member sees it."""

    begin: Begin
    me: str
    size: int
    """Values in the vector."""
    wire: str

    @property
    def others(self) -> tuple[Member, ...]:
        """All members but this node."""
        return tuple(m for m in self.begin.members if m.peer_id != self.me)

    def spans(self) -> tuple[PartSpan, ...]:
        """All parts, in order; the members' order is that of the group's `begin`."""
        return plan_parts(self.size, [m.peer_id for m in self.begin.members])


class GroupExchange:
    """Runs one exchange. `serve` is called for each stream that a member opens to us, `run` once."""

    def __init__(self, plan: ExchangePlan, vector_N: np.ndarray) -> None:
        assert vector_N.shape == (plan.size,)
        self.plan = plan
        self.vector_N = vector_N
        self.mean_N = np.empty_like(vector_N)
        self._by_owner: dict[str, list[PartSpan]] = {m.peer_id: [] for m in plan.begin.members}
        for span in plan.spans():
            self._by_owner[span.owner].append(span)
        loop = asyncio.get_running_loop()
        weights = {m.peer_id: m.weight for m in plan.begin.members}
        self._sums = [Accumulator(weights) for _ in self._mine]
        self._means: list[asyncio.Future[bytes]] = [loop.create_future() for _ in self._mine]
        self._served: dict[str, asyncio.Future[None]] = {m.peer_id: loop.create_future() for m in plan.others}
        self._streams: list[Stream] = []
        self._arrived: set[str] = set()

    @property
    def _mine(self) -> list[PartSpan]:
        return self._by_owner[self.plan.me]

    async def run(self, streams: Streams, timeout_s: float) -> np.ndarray:
        """The weighted mean of all members' vectors, N float32 values; the same bits for every member.

        Raises:
            RoundAborted: somebody failed; names who, as far as can be told.
        """
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for member in self.plan.others:
                    group.create_task(self._contribute(streams, member))
                group.create_task(self._await_served(ARRIVAL_PATIENCE * streams.idle_s))
        except TimeoutError:
            raise await self._give_up(f"not finished after {timeout_s:.0f} s", self._late()) from None
        except BaseExceptionGroup as errors:
            first = _cause(errors)
            culprit = [first.peer_id] if isinstance(first, PeerError) and first.peer_id else []
            raise await self._give_up(str(first), culprit) from None
        finally:
            self._end()
        return self.mean_N

    async def serve(self, stream: Stream) -> None:
        """Take a member's contributions to our parts and return the means. Raises: PeerError."""
        served = self._served.get(stream.peer_id)
        if served is None or served.done():
            raise PeerError(stream.peer_id, "is not in this group, or was served already")
        self._streams.append(stream)
        self._arrived.add(stream.peer_id)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._receive_contributions(stream))
                group.create_task(_last_word_first(self._return_means(stream)))
        except BaseExceptionGroup as errors:
            first = _cause(errors)
            if not served.done():
                served.set_exception(first)
        finally:
            if not served.done():
                served.set_result(None)

    async def _receive_contributions(self, stream: Stream) -> None:
        for position, span in enumerate(self._mine):
            if position >= WINDOW:
                await asyncio.shield(self._means[position - WINDOW])
            values_N = await self._receive_part(stream, span, stream.idle_s)
            self._add(position, stream.peer_id, values_N)

    async def _receive_part(self, stream: Stream, span: PartSpan, timeout_s: float) -> np.ndarray:
        count = span.stop - span.start
        limit = count * WIRE_DTYPES[self.plan.wire].itemsize
        try:
            part, payload = await stream.expect(Part, limit, timeout_s)
        except PeerError as error:
            if error.peer_id in self._served:
                raise
            raise PeerError(stream.peer_id, error.reason) from None  # it gave up and blames us or a stranger
        if part.index != span.index:
            raise PeerError(stream.peer_id, f"sent part {part.index} where {span.index} was due")
        try:
            return check_part(decode_part(payload, count, self.plan.wire))
        except TensorError as error:
            raise PeerError(stream.peer_id, str(error)) from None

    def _add(self, position: int, sender: str, values_N: np.ndarray) -> None:
        """Once all others have sent this part, add our own and fix the mean for everybody."""
        sums, span = self._sums[position], self._mine[position]
        sums.add(sender, values_N)
        if len(sums.parts) < len(self.plan.others):
            return
        own_N = self.vector_N[span.start : span.stop]
        if self.plan.wire != "fp32":  # our own values count as if they had crossed the wire
            own_N = decode_part(encode_part(own_N, self.plan.wire), len(own_N), self.plan.wire)
        mean_N = sums.add(self.plan.me, own_N)
        assert mean_N is not None
        encoded = encode_part(mean_N, self.plan.wire)
        self.mean_N[span.start : span.stop] = decode_part(encoded, len(mean_N), self.plan.wire)
        if not self._means[position].done():
            self._means[position].set_result(encoded)

    async def _return_means(self, stream: Stream) -> None:
        for position, span in enumerate(self._mine):
            encoded = await asyncio.shield(self._means[position])
            await stream.send(Part(span.index), encoded)

    async def _contribute(self, streams: Streams, member: Member) -> None:
        async with streams.open(member.peer_id, EXCHANGE, member.addresses) as stream:
            self._streams.append(stream)
            await stream.send(Exchange(self.plan.begin.group))
            spans = self._by_owner[member.peer_id]
            async with asyncio.TaskGroup() as group:
                group.create_task(_last_word_first(self._send_parts(stream, spans)))
                group.create_task(self._take_means(stream, spans))

    async def _send_parts(self, stream: Stream, spans: Sequence[PartSpan]) -> None:
        patience_s = REDUCER_PATIENCE * stream.idle_s
        for span in spans:
            part = encode_part(self.vector_N[span.start : span.stop], self.plan.wire)
            await stream.send(Part(span.index), part, patience_s)

    async def _take_means(self, stream: Stream, spans: Sequence[PartSpan]) -> None:
        patience_s = REDUCER_PATIENCE * stream.idle_s
        for span in spans:
            self.mean_N[span.start : span.stop] = await self._receive_part(stream, span, patience_s)

    async def _await_served(self, arrival_s: float) -> None:
        for patience_s in (arrival_s, None):
            done, pending = await asyncio.wait(
                self._served.values(), timeout=patience_s, return_when=asyncio.FIRST_EXCEPTION
            )
            for future in done:
                future.result()
            absent = [peer for peer in self._served if peer not in self._arrived]
            if pending and absent:
                raise PeerError(absent[0], f"did not open its exchange within {arrival_s:.0f} s")

    def _late(self) -> list[str]:
        """Who keeps the first unfinished part of ours waiting; nobody, if that can't be told."""
        for sums, mean in zip(self._sums, self._means, strict=True):
            if not mean.done():
                return [peer for peer in self._served if peer not in sums.parts]
        return []

    async def _give_up(self, reason: str, culprits: Sequence[str]) -> RoundAborted:
        """Tell the others whose fault it was, so that they don't blame us."""
        culprit = culprits[0] if culprits else ""
        await asyncio.gather(*(s.abort(reason, culprit) for s in self._streams if s.peer_id != culprit))
        await asyncio.sleep(PARTING_S)
        return RoundAborted(reason, tuple(culprits))

    def _end(self) -> None:
        futures: list[asyncio.Future[Any]] = [*self._means, *self._served.values()]
        for future in futures:
            if not future.done():
                future.cancel()
            elif not future.cancelled():
                future.exception()  # seen; asyncio need not complain
        for stream in self._streams:
            stream.close()


async def _last_word_first(sending: Awaitable[None]) -> None:
    """Send; when that fails, let whoever reads the stream find first whom the peer blames, if anyone."""
    try:
        await sending
    except PeerError:
        await asyncio.sleep(2 * PARTING_S)
        raise


def _cause(errors: BaseExceptionGroup[BaseException]) -> PeerError | TensorError:
    """The failure to report: a peer's before one of our own that may have followed from it.

    Raises:
        BaseExceptionGroup: there is something else in it, a fault of this program.
    """
    known, other = errors.split((PeerError, TensorError))
    if other is not None:
        raise other
    assert known is not None
    leaves = list(_leaves(known))
    return next((e for e in leaves if isinstance(e, PeerError)), leaves[0])


def _leaves(errors: BaseExceptionGroup[Any]) -> Iterator[Any]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
