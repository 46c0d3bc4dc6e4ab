"""Framed messages on libp2p streams between nodes of one run.

The transport is authenticated: a stream's `peer_id` can't be spoofed. Whatever goes wrong on a stream
is a PeerError; whatever a peer sends that doesn't fit is too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.proto import p2pd_pb2

from blocktrain.dht.bandwidth import Traffic, piece_sizes, pieces
from blocktrain.dht.dial import TRANSPORT_ERRORS, ask
from blocktrain.dht.swarm import Swarm
from blocktrain.protocol import keys, messages
from blocktrain.protocol.errors import BlocktrainError, MessageError, PeerError
from blocktrain.protocol.messages import PREFIX, Abort, Refused

log = logging.getLogger(__name__)
OPEN_TIMEOUT_S = 10.0
IDLE_S = 20.0
"""A peer that does not send or take a frame's header, or a piece of it, within this time is given up."""
PART_S = 2.0
"""Leaving must not take long, whatever the daemon does."""
MAX_INCOMING = 256
"""Streams that are served at once; more are closed at once, so a flood costs no memory."""
MAX_PER_PEER = 32
"""Of these, how many one peer may have, so that it can't keep the others out."""

T = TypeVar("T")


class Stream:
    """One stream to one peer, its bytes counted under its purpose and held to the node's limits.

    Time limits are for each piece of a frame, so that a slow link is not taken for a dead one. Waiting for
    our own limits does not count.
    """

    def __init__(
        self,
        peer_id: str,
        purpose: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        traffic: Traffic,
        idle_s: float = IDLE_S,
    ) -> None:
        self.peer_id, self.purpose, self.idle_s = peer_id, purpose, idle_s
        self._reader, self._writer, self._traffic = reader, writer, traffic

    async def send(
        self, message: messages.Message, payload: bytes | memoryview = b"", timeout_s: float | None = None
    ) -> None:
        """Send one frame. Raises: PeerError."""
        head = messages.encode(message, len(payload))
        await self._write(memoryview(head), timeout_s or self.idle_s)
        for piece in pieces(payload):
            await self._write(piece, timeout_s or self.idle_s)

    async def receive(self, max_payload: int = 0, timeout_s: float | None = None) -> tuple[Any, bytes]:
        """Receive one frame of at most `max_payload` bytes of payload. Raises: PeerError."""
        timeout_s = timeout_s or self.idle_s
        try:
            async with asyncio.timeout(timeout_s):
                prefix = await self._reader.readexactly(PREFIX.size)
                header_bytes, payload_bytes = messages.decode_prefix(prefix, max_payload)
                message = messages.decode(await self._reader.readexactly(header_bytes))
            await self._received(PREFIX.size + header_bytes)
            taken: list[bytes] = []
            for size in piece_sizes(payload_bytes):
                async with asyncio.timeout(timeout_s):
                    taken.append(await self._reader.readexactly(size))
                await self._received(size)
        except TimeoutError:
            raise PeerError(self.peer_id, f"silent for {timeout_s:.0f} s ({self.purpose})") from None
        except MessageError as error:
            raise PeerError(self.peer_id, f"sent nonsense ({self.purpose}: {error})") from None
        except TRANSPORT_ERRORS:
            raise PeerError(self.peer_id, f"connection lost ({self.purpose})") from None
        return message, b"".join(taken)

    async def _write(self, data: memoryview, timeout_s: float) -> None:
        await self._traffic.upload.take(len(data))
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(data)
                await self._writer.drain()
        except TimeoutError:
            raise PeerError(self.peer_id, f"took nothing for {timeout_s:.0f} s ({self.purpose})") from None
        except TRANSPORT_ERRORS as error:
            raise PeerError(
                self.peer_id, f"connection lost ({self.purpose}: {error or type(error).__name__})"
            ) from None
        self._traffic.meter["sent", self.purpose] += len(data)

    async def _received(self, count: int) -> None:
        self._traffic.meter["received", self.purpose] += count
        await self._traffic.download.take(count)

    async def expect(
        self, kind: type[T], max_payload: int = 0, timeout_s: float | None = None
    ) -> tuple[T, bytes]:
        """Receive one frame that must be of this kind.

        Raises:
            PeerError: it is another kind; a refusal's reason is passed on. An abort names its culprit.
        """
        message, payload = await self.receive(max_payload, timeout_s)
        if isinstance(message, kind):
            return message, payload
        if isinstance(message, Refused):
            raise PeerError(self.peer_id, f"refused: {message.reason}")
        if isinstance(message, Abort):
            raise PeerError(message.culprit or self.peer_id, f"round given up: {message.reason}")
        raise PeerError(
            self.peer_id, f"sent {type(message).__name__} instead of {kind.__name__} ({self.purpose})"
        )

    async def refuse(self, reason: str) -> None:
        """Tell the peer, if it still listens, that its request can't be served."""
        with contextlib.suppress(PeerError):
            await self.send(Refused(reason[:500]), timeout_s=2.0)

    async def abort(self, reason: str, culprit: str = "") -> None:
        """Tell the peer, if it still listens, that the round is over for us, and whose fault it was."""
        with contextlib.suppress(PeerError):
            await self.send(Abort(reason[:500], culprit[:128]), timeout_s=2.0)

    def close(self) -> None:
        """Close at once; the other side sees the end of the stream."""
        with contextlib.suppress(*TRANSPORT_ERRORS):
            self._writer.close()


Handler = Callable[[Stream], Awaitable[None]]


class Streams:
    """Opens streams to peers of one run and serves theirs. `meter` counts bytes by direction and purpose."""

    def __init__(
        self, swarm: Swarm, fingerprint: str, idle_s: float = IDLE_S, traffic: Traffic | None = None
    ) -> None:
        self.swarm = swarm
        self.traffic = traffic or Traffic()
        self.idle_s = idle_s
        self.fingerprint = fingerprint
        self._serving: dict[asyncio.Task[Any], str] = {}
        self._closed = False
        self._names: set[str] = set()

    @property
    def meter(self) -> Counter[tuple[str, str]]:
        """Bytes by direction and purpose."""
        return self.traffic.meter

    def bytes(self, direction: str) -> int:
        """All bytes `sent` or `received` on streams so far: payloads and headers, not TLS or the DHT."""
        return sum(count for (way, _), count in self.meter.items() if way == direction)

    async def serve(self, purpose: str, handler: Handler) -> None:
        """Call `handler` for every stream that a peer opens for this purpose."""

        async def on_stream(
            info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            stream = Stream(info.peer_id.to_base58(), purpose, reader, writer, self.traffic, self.idle_s)
            task = asyncio.current_task()
            if task is None or not self._has_room(stream.peer_id):
                stream.close()
                return
            self._serving[task] = stream.peer_id
            try:
                await handler(stream)
            except asyncio.CancelledError:  # by aclose; this is the task's outermost frame
                return
            except BlocktrainError as error:
                log.debug("serving %s: %s", purpose, error)
            except Exception:
                log.exception("serving %s to %s failed", purpose, stream.peer_id)
            finally:
                del self._serving[task]
                stream.close()

        name = keys.stream(self.fingerprint, purpose)
        await self.swarm.p2p.add_binary_stream_handler(name, on_stream)
        self._names.add(name)

    async def stop_serving(self) -> None:
        """End all streams that are being served, and serve nothing until `serve` is called again."""
        with contextlib.suppress(*TRANSPORT_ERRORS, TimeoutError):  # the daemon may be gone already
            async with asyncio.timeout(PART_S):
                while self._names:
                    await self.swarm.p2p.remove_binary_stream_handler(self._names.pop())
        self._names.clear()
        await self._end_served()

    def _has_room(self, peer_id: str) -> bool:
        peers = list(self._serving.values())
        return not self._closed and len(peers) < MAX_INCOMING and peers.count(peer_id) < MAX_PER_PEER

    @contextlib.asynccontextmanager
    async def open(self, peer_id: str, purpose: str, addresses: Sequence[str] = ()) -> AsyncIterator[Stream]:
        """A stream to a peer, closed at the end of the block. Raises: PeerError when it can't be opened."""
        try:
            wanted = p2pd_pb2.StreamOpenRequest(
                peer=PeerID.from_base58(peer_id).to_bytes(), proto=[keys.stream(self.fingerprint, purpose)]
            )
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self.swarm.connect(peer_id, addresses)
                request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=wanted)
                reader, writer = await ask(self.swarm.p2p, request)
        except TimeoutError:
            self.swarm.forget_connection(peer_id)
            raise PeerError(peer_id, f"no stream within {OPEN_TIMEOUT_S:.0f} s ({purpose})") from None
        except (*TRANSPORT_ERRORS, ValueError) as error:
            self.swarm.forget_connection(peer_id)
            raise PeerError(
                peer_id, f"can't be reached ({purpose}: {' '.join(str(error).split())[:160]})"
            ) from None
        stream = Stream(peer_id, purpose, reader, writer, self.traffic, self.idle_s)
        try:
            yield stream
        finally:
            stream.close()

    async def aclose(self) -> None:
        """End all streams that are being served, and serve no more."""
        self._closed = True
        await self._end_served()

    async def _end_served(self) -> None:
        for task in tuple(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
