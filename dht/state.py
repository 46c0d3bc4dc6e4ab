"""Getting a block's current state from its holders: a manifest with sizes and digests, then chunks.

Replaces hivemind's `load_state_from_peers`, which takes a cut-off download for a whole one. A chunk is
used only when its digest fits; a donor that fails is named and replaced, and what was verified is kept
as long as the next donor offers the same bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from blocktrain.dht.directory import Holder
from blocktrain.dht.streams import Stream, Streams
from blocktrain.protocol.errors import PeerError, TransferError
from blocktrain.protocol.messages import Chunk, ChunkRequest, Manifest, StateRequest
from blocktrain.protocol.tensors import digest

log = logging.getLogger(__name__)
CHUNK_BYTES = 1_048_576
MAX_CHUNK_BYTES = 2**24
MAX_CHUNKS = 1_400
STATE_IDLE_S = 60.0
MAX_UPLOADS = 4
"""Downloads that a donor serves at once; more are refused, so that it keeps training."""
MAX_UPLOADS_PER_PEER = 2


@dataclass(frozen=True, slots=True)
class State:
    """What a holder gives away: safetensors bytes, and the anchor that they belong to."""

    data: bytes
    round: int
    anchor: str


Progress = Callable[[int, int], None]
"""Called with the bytes that are verified and the bytes in all."""
Provider = Callable[[str], Awaitable[State]]
"""Gives the current `block` or `table` state."""


def purpose(block: int) -> str:
    """The stream on which holders of a block give its state away."""
    return f"state-{block}"


def make_manifest(state: State) -> Manifest:
    """Sizes and digests of a state."""
    chunk = CHUNK_BYTES
    while len(state.data) > chunk * MAX_CHUNKS:
        chunk *= 2
    assert chunk <= MAX_CHUNK_BYTES
    view = memoryview(state.data)
    digests = "".join(digest(view[i : i + chunk]) for i in range(0, len(view), chunk))
    return Manifest(state.round, state.anchor, len(view), chunk, digests)


class StateServer:
    """A holder's side: serves its state on request."""

    def __init__(self, streams: Streams, block: int, provider: Provider) -> None:
        self._streams, self._block, self._provider = streams, block, provider
        self._uploads: Counter[str] = Counter()

    async def start(self) -> None:
        """Serve from now on."""
        await self._streams.serve(purpose(self._block), self._serve)

    async def _serve(self, stream: Stream) -> None:
        request, _ = await stream.expect(StateRequest)
        peer, busy = stream.peer_id, self._uploads.total()
        if busy >= MAX_UPLOADS or self._uploads[peer] >= MAX_UPLOADS_PER_PEER:
            await stream.refuse(f"busy with {busy} other downloads")
            return
        self._uploads[peer] += 1
        try:
            state = await self._provider(request.what)
            manifest = await asyncio.to_thread(make_manifest, state)
            await stream.send(manifest)
            view, chunks = memoryview(state.data), len(manifest.digests) // 32
            while True:
                wanted, _ = await stream.expect(ChunkRequest, timeout_s=STATE_IDLE_S)
                if wanted.index >= chunks:
                    raise PeerError(stream.peer_id, f"asked for chunk {wanted.index} of {chunks}")
                start = wanted.index * manifest.chunk
                await stream.send(Chunk(wanted.index), view[start : start + manifest.chunk])
        finally:
            self._uploads[peer] -= 1
            self._uploads += Counter()  # forget peers at zero


class Download:
    """A joiner's side: fetches one state from whichever donors work."""

    def __init__(self, streams: Streams, block: int, what: str, max_bytes: int) -> None:
        self._streams, self._block, self._what, self._max_bytes = streams, block, what, max_bytes
        self._manifest: Manifest | None = None
        self._data = bytearray()
        self._verified: set[int] = set()

    async def run(
        self, donors: Sequence[Holder], progress: Progress = lambda done, total: None
    ) -> tuple[State, str]:
        """The state, and the donor that completed it; donors are tried in the order given.

        Raises:
            TransferError: no donor could complete it; the message says what each one did.
        """
        failures = []
        for donor in donors:
            try:
                await self._fetch(donor, progress)
            except PeerError as error:
                log.warning("state of block %d: %s", self._block, error)
                failures.append(str(error))
                continue
            assert self._manifest is not None
            state = State(bytes(self._data), self._manifest.round, self._manifest.anchor)
            return state, donor.peer_id
        why = "; ".join(failures) or "there is none"
        raise TransferError(f"no holder of block {self._block} gave its {self._what} state: {why}")

    async def _fetch(self, donor: Holder, progress: Progress) -> None:
        async with self._streams.open(donor.peer_id, purpose(self._block), donor.record.addresses) as stream:
            await stream.send(StateRequest(self._what))
            manifest, _ = await stream.expect(Manifest, timeout_s=STATE_IDLE_S)
            self._adopt(manifest, donor.peer_id)
            chunks = len(manifest.digests) // 32
            for index in range(chunks):
                if index not in self._verified:
                    await self._fetch_chunk(stream, manifest, index)
                progress(min(len(self._verified) * manifest.chunk, manifest.size), manifest.size)

    async def _fetch_chunk(self, stream: Stream, manifest: Manifest, index: int) -> None:
        await stream.send(ChunkRequest(index))
        start = index * manifest.chunk
        length = min(manifest.chunk, manifest.size - start)
        chunk, payload = await stream.expect(Chunk, max_payload=length)
        if chunk.index != index or len(payload) != length:
            raise PeerError(
                stream.peer_id, f"sent {len(payload)} bytes of chunk {chunk.index}, not {length} of {index}"
            )
        if digest(payload) != manifest.digests[32 * index : 32 * index + 32]:
            raise PeerError(stream.peer_id, f"sent a chunk {index} that does not fit its digest")
        self._data[start : start + length] = payload
        self._verified.add(index)

    def _adopt(self, manifest: Manifest, donor: str) -> None:
        """Take over a manifest; what is verified stays if the bytes are the same. Raises: PeerError."""
        if manifest.size > self._max_bytes:
            raise PeerError(
                donor, f"offers {manifest.size} bytes where at most {self._max_bytes} can be right"
            )
        if len(manifest.digests) != 32 * -(-manifest.size // manifest.chunk):
            raise PeerError(donor, "sent a manifest whose digests don't fit its size")
        if manifest != self._manifest:
            self._manifest = manifest
            self._verified.clear()
            self._data = bytearray(manifest.size)
