"""A holder's side of state downloads: says how busy it is, then gives its state away chunk by chunk."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from blocktrain.dht.manifest import State, Subject, chunk_count, make_manifest
from blocktrain.dht.streams import Stream, Streams
from blocktrain.protocol.errors import PeerError
from blocktrain.protocol.messages import Chunk, ChunkRequest, Load, LoadRequest, Manifest, StateRequest

STATE_IDLE_S = 60.0
"""How long a manifest may take, and how long a joiner may ask for nothing."""
MAX_UPLOADS = 4
"""Downloads that a donor serves at once; others are told to come back, so that it keeps training."""
MAX_UPLOADS_PER_PEER = 2
FRESH_S = 1.0
"""Joiners that ask within this time get the same offer: making one interrupts training."""

Provider = Callable[[str], Awaitable[State]]
"""Gives the current `block` or `table` state."""


def purpose(block: int) -> str:
    """The stream on which holders of a block give its state away."""
    return f"state-{block}"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Offer:
    """A state and its manifest, kept in memory as long as someone downloads it."""

    state: State
    manifest: Manifest


class StateServer:
    """A holder's side: serves its state on request."""

    def __init__(self, streams: Streams, block: int, provider: Provider) -> None:
        self._streams, self._block, self._provider = streams, block, provider
        self._uploads: Counter[str] = Counter()
        self._fresh: dict[str, asyncio.Task[Offer]] = {}
        self._blocks: WeakValueDictionary[tuple[int, str], Offer] = WeakValueDictionary()
        self._last: Manifest | None = None
        """The latest of a block."""

    async def start(self) -> None:
        """Serve from now on."""
        await self._streams.serve(purpose(self._block), self._serve)

    async def _serve(self, stream: Stream) -> None:
        request, _ = await stream.receive()
        load = self._load(stream.peer_id)
        if isinstance(request, LoadRequest):
            await stream.send(load)
            return
        if not isinstance(request, StateRequest):
            raise PeerError(stream.peer_id, f"sent {type(request).__name__} instead of StateRequest")
        if load.full:
            await stream.send(load)
            return
        self._uploads[stream.peer_id] += 1
        try:
            await stream.send(load)
            await self._upload(stream, await self._offer(request.what))
        finally:
            self._uploads[stream.peer_id] -= 1
            self._uploads += Counter()  # forget peers at zero

    def _load(self, peer_id: str) -> Load:
        """How busy this donor is, and whether that leaves no room for another upload to this peer."""
        uploads = self._uploads.total()
        return Load(uploads, uploads >= MAX_UPLOADS or self._uploads[peer_id] >= MAX_UPLOADS_PER_PEER)

    async def _upload(self, stream: Stream, offer: Offer) -> None:
        manifest, view = offer.manifest, memoryview(offer.state.data)
        await stream.send(manifest)
        while True:
            wanted, _ = await stream.expect(ChunkRequest, timeout_s=STATE_IDLE_S)
            if wanted.index >= chunk_count(manifest):
                raise PeerError(stream.peer_id, f"asked for chunk {wanted.index} of {chunk_count(manifest)}")
            start = wanted.index * manifest.chunk
            await stream.send(Chunk(wanted.index), view[start : start + manifest.chunk])
            # With requests waiting and a fast link nothing above ever pauses, and rounds would wait.
            await asyncio.sleep(0)

    async def _offer(self, what: str) -> Offer:
        """The current offer; made once for all who ask meanwhile and shortly after."""
        making = self._fresh.get(what)
        if making is None:
            making = self._fresh[what] = asyncio.create_task(self._make(what))
            making.add_done_callback(lambda task: self._forget(what, task))
        return await asyncio.shield(making)

    def _forget(self, what: str, made: asyncio.Task[Offer]) -> None:
        failed = made.cancelled() or made.exception() is not None
        asyncio.get_running_loop().call_later(0.0 if failed else FRESH_S, self._fresh.pop, what, None)

    async def _make(self, what: str) -> Offer:
        state = await self._provider(what)
        if what == "table":
            return Offer(state, await self._sign(state, what))
        # A block's anchor determines its bytes, so neither a copy nor another pass over it is needed.
        key = state.round, state.anchor
        if self._last is None or (self._last.round, self._last.anchor) != key:
            self._last = await self._sign(state, what)
        offer = self._blocks.get(key) or Offer(state, self._last)
        self._blocks[key] = offer
        return offer

    async def _sign(self, state: State, what: str) -> Manifest:
        subject = Subject(self._streams.fingerprint, self._block, what)
        return await asyncio.to_thread(make_manifest, state, subject, self._streams.swarm.identity)
