"""Fetching the chunks of one state from several donors at once."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection

from blocktrain.dht.manifest import chunk_bytes, chunk_count, chunk_digest
from blocktrain.dht.streams import Stream
from blocktrain.protocol.errors import PeerError
from blocktrain.protocol.messages import Chunk, ChunkRequest, Manifest
from blocktrain.protocol.tensors import digest

CHUNKS_AHEAD = 4
"""Chunks that are asked of one donor ahead of what has arrived, so that latency does not bound the rate."""
MAX_FETCHERS = 2
"""Donors that may be asked for the same chunk at once."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are verified and the bytes in all."""


class Board:
    """The state that a manifest promises: what of it is verified, and who fetches what of the rest.

    A donor that has nothing left to do fetches what another one has not delivered yet; so a slow or
    frozen donor holds nobody up as long as there is another.
    """

    def __init__(self, manifest: Manifest, progress: Progress) -> None:
        self.manifest = manifest
        self.data = bytearray(manifest.size)
        self.verified_bytes = 0
        self._untaken = deque(range(chunk_count(manifest)))
        self._fetchers: Counter[int] = Counter()
        """By chunk that is asked for and not verified, in the order of asking."""
        self._returned = asyncio.Event()
        self._progress = progress

    @property
    def complete(self) -> bool:
        """Every chunk is verified."""
        return self.verified_bytes == self.manifest.size

    def take(self, own: Collection[int]) -> int | None:
        """A chunk to fetch for someone who already fetches `own`; None: there is nothing to do for now."""
        index = self._untaken.popleft() if self._untaken else None
        if index is None and not own:
            index = next((i for i, count in self._fetchers.items() if count < MAX_FETCHERS), None)
        if index is not None:
            self._fetchers[index] += 1
        return index

    def put(self, index: int, payload: bytes) -> None:
        """Keep a chunk whose digest fits; one that came from another donor first changes nothing."""
        if index in self._fetchers:
            del self._fetchers[index]
            start = index * self.manifest.chunk
            self.data[start : start + len(payload)] = payload
            self.verified_bytes += len(payload)
            self._progress(self.verified_bytes, self.manifest.size)

    def give_back(self, taken: Collection[int]) -> None:
        """Leave what one donor was asked for and did not deliver to the others."""
        for index in taken:
            if index in self._fetchers:
                self._fetchers[index] -= 1
                if not self._fetchers[index]:
                    del self._fetchers[index]
                    self._untaken.appendleft(index)
        self._returned.set()

    async def returned(self) -> None:
        """Wait until someone gives something back."""
        self._returned.clear()
        await self._returned.wait()


async def fetch_chunks(stream: Stream, board: Board) -> None:
    """Fetch chunks from one donor, beside others on the same board, until the board is complete.

    One chunk is hashed in a thread while the next arrives. What fails its digest is never kept.

    Raises:
        PeerError: the donor failed; what it was asked for is left to others.
    """
    taken: list[int] = []  # asked for or being hashed
    asked: deque[int] = deque()
    hashing: asyncio.Task[None] | None = None
    try:
        while not board.complete:
            await _ask_ahead(stream, board, taken, asked)
            if asked:
                payload = await _receive_chunk(stream, board.manifest, asked[0])
                if hashing is not None:
                    await hashing
                hashing = asyncio.create_task(_verify(stream, board, taken, asked.popleft(), payload))
            elif hashing is not None:
                await hashing
                hashing = None
            else:
                await board.returned()
    except PeerError:
        if hashing is not None:
            await hashing  # a lie is what it is blamed for, not that it then hung up
        if not board.complete:
            raise
    finally:
        if hashing is not None:
            hashing.cancel()
            await asyncio.gather(hashing, return_exceptions=True)
        board.give_back(taken)


async def _ask_ahead(stream: Stream, board: Board, taken: list[int], asked: deque[int]) -> None:
    while len(asked) < CHUNKS_AHEAD and (index := board.take(taken)) is not None:
        taken.append(index)
        asked.append(index)
        await stream.send(ChunkRequest(index))


async def _receive_chunk(stream: Stream, manifest: Manifest, index: int) -> bytes:
    length = chunk_bytes(manifest, index)
    chunk, payload = await stream.expect(Chunk, max_payload=length)
    if chunk.index != index or len(payload) != length:
        raise PeerError(
            stream.peer_id, f"sent {len(payload)} bytes of chunk {chunk.index}, not {length} of {index}"
        )
    return payload


async def _verify(stream: Stream, board: Board, taken: list[int], index: int, payload: bytes) -> None:
    if await asyncio.to_thread(digest, payload) != chunk_digest(board.manifest, index):
        raise PeerError(stream.peer_id, f"sent a chunk {index} that does not fit its digest")
    taken.remove(index)
    board.put(index, payload)
