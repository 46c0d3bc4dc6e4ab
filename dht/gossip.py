"""Pairwise averaging of the shared embedding table among all nodes, whatever block they hold.

Random pairs replace their tables by the mean of both; the tables' spread shrinks by about 1/√e an
exchange and their mean stays (Boyd et al., "Randomized gossip algorithms", 2006, section III).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from blocktrain.dht.directory import Holder
from blocktrain.dht.reduction import check_part
from blocktrain.dht.streams import Stream, Streams
from blocktrain.protocol.errors import PeerError, TensorError
from blocktrain.protocol.messages import Done, TableOffer
from blocktrain.protocol.tensors import WIRE_DTYPES, decode_part, encode_part

log = logging.getLogger(__name__)
PURPOSE = "table"
MAX_TRIES = 3

TakeTable = Callable[[], Awaitable[np.ndarray]]
"""Gives a copy of the local table, float32 (V, d)."""
Shift = Callable[[np.ndarray], Awaitable[None]]
"""Adds a float32 (V, d) difference to the local table."""


class TableGossip:
    """One node's part. `start` once; `exchange` whenever a gossip is due."""

    def __init__(
        self, streams: Streams, wire: str, take: TakeTable, shift: Shift, rng: random.Random
    ) -> None:
        self._streams, self._wire, self._take, self._shift, self._rng = streams, wire, take, shift, rng
        self._busy = asyncio.Lock()
        self.exchanges = 0

    async def start(self) -> None:
        """Answer other nodes' offers from now on."""
        await self._streams.serve(PURPOSE, self._on_offer)

    async def exchange(self, others: Sequence[Holder]) -> str | None:
        """Average with one random node of `others`; the peer, or None when none of a few tried was free."""
        for partner in self._rng.sample(list(others), min(MAX_TRIES, len(others))):
            if self._busy.locked():
                return None
            async with self._busy:
                try:
                    await self._offer(partner)
                    self.exchanges += 1
                    return partner.peer_id
                except (PeerError, TensorError) as error:
                    log.debug("gossip: %s", error)
        return None

    async def _offer(self, partner: Holder) -> None:
        async with self._streams.open(partner.peer_id, PURPOSE, partner.record.addresses) as stream:
            own_VD = await self._take()
            await stream.send(TableOffer(*own_VD.shape))  # without the table: the partner may be busy
            theirs_VD = await self._receive(stream, own_VD)
            await self._send(stream, own_VD)
            await stream.expect(Done)
            await self._shift((theirs_VD - self._as_sent(own_VD)) / 2)

    async def _on_offer(self, stream: Stream) -> None:
        offer, _ = await stream.expect(TableOffer)  # first: closing on unread bytes can lose the refusal
        if self._busy.locked():
            await stream.refuse("busy with another gossip")
            return
        async with self._busy:
            own_VD = await self._take()
            self._check_shape(stream, offer, own_VD)
            await self._send(stream, own_VD)
            theirs_VD = await self._receive(stream, own_VD)
            await stream.send(Done())
            await self._shift((theirs_VD - self._as_sent(own_VD)) / 2)
            self.exchanges += 1

    async def _receive(self, stream: Stream, own_VD: np.ndarray) -> np.ndarray:
        limit = own_VD.size * WIRE_DTYPES[self._wire].itemsize
        offer, payload = await stream.expect(TableOffer, max_payload=limit)
        self._check_shape(stream, offer, own_VD)
        try:
            return check_part(decode_part(payload, own_VD.size, self._wire)).reshape(own_VD.shape)
        except TensorError as error:
            raise PeerError(stream.peer_id, str(error)) from None

    async def _send(self, stream: Stream, own_VD: np.ndarray) -> None:
        await stream.send(TableOffer(*own_VD.shape), encode_part(own_VD.reshape(-1), self._wire))

    def _check_shape(self, stream: Stream, offer: TableOffer, own_VD: np.ndarray) -> None:
        if (offer.rows, offer.columns) != own_VD.shape:
            raise PeerError(
                stream.peer_id, f"offered a table of {offer.rows} × {offer.columns}, not {own_VD.shape}"
            )

    def _as_sent(self, own_VD: np.ndarray) -> np.ndarray:
        """Our table as the partner got it, so that what we gain is exactly what it loses."""
        return decode_part(encode_part(own_VD.reshape(-1), self._wire), own_VD.size, self._wire).reshape(
            own_VD.shape
        )
