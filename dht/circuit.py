"""Relaying between peers that can't reach each other, and finding out whether others can reach us.

p2pd has a relay of its own, but always with libp2p's default limits: a circuit ends after 128 KiB or two
minutes, whatever `-relayDataLimit` says (its `EnableRelayV2` replaces the configured relay with one of
default limits). So this one takes over the relay protocol of our daemon. To the peers' daemons it is a
circuit relay v2 like any other, and as it announces no limit, they use its circuits like connections.

It needs no reservations: who is connected to a relay can be reached through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import Iterable
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.proto import p2pd_pb2

from blocktrain.dht.bandwidth import Traffic
from blocktrain.dht.dial import TRANSPORT_ERRORS, ask
from blocktrain.protocol import circuit, keys
from blocktrain.protocol.addresses import parse_address
from blocktrain.protocol.circuit import HopMessage, StopMessage
from blocktrain.protocol.errors import AddressError

log = logging.getLogger(__name__)
MAX_CIRCUITS = 128
MAX_CIRCUITS_PER_PEER = 16
CIRCUIT_TIMEOUT_S = 10.0
RESERVED_S = 3600
_PIECE_BYTES = 65_536
RELAYED = "relayed"
"""The purpose under which relayed bytes are counted."""
Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter


async def connected(p2p: P2P) -> dict[str, list[str]]:
    """Peers that we have a connection to that isn't relayed itself, with their ends of these connections."""
    found: dict[str, list[str]] = {}
    for peer in await p2p.list_peers():
        for address in map(str, peer.addrs):
            if "/p2p-circuit" not in address:
                found.setdefault(peer.peer_id.to_base58(), []).append(address)
    return found


class Relay:
    """Joins two peers' streams, within this node's limits. `relayed_bytes` counts what went through."""

    def __init__(self, p2p: P2P, traffic: Traffic) -> None:
        self._p2p, self._traffic = p2p, traffic
        self._pairs: list[tuple[str, str]] = []
        self.relayed_bytes = 0

    async def start(self) -> None:
        """Serve circuits until the daemon ends."""
        await self._p2p.add_binary_stream_handler(circuit.HOP, self._on_hop)

    async def _on_hop(self, info: StreamInfo, reader: Reader, writer: Writer) -> None:
        source = info.peer_id.to_base58()
        try:
            async with asyncio.timeout(CIRCUIT_TIMEOUT_S):
                request = await _receive(reader, HopMessage)
            if request.type == circuit.RESERVE:
                await _send(writer, _granted())
            else:
                await self._relay(source, request, reader, writer)
        except (TimeoutError, DecodeError, ValueError, *TRANSPORT_ERRORS) as error:
            log.debug("relaying for %s: %s", source, error)
        finally:
            _close(writer)

    async def _relay(self, source: str, request: Any, reader: Reader, writer: Writer) -> None:
        pair = source, PeerID(request.peer.id).to_base58()
        if len(self._pairs) >= MAX_CIRCUITS or self._busy(*pair):
            await _send(writer, HopMessage(type=circuit.HOP_STATUS, status=circuit.RESOURCE_LIMIT_EXCEEDED))
            return
        self._pairs.append(pair)  # before anything is awaited, or many at once would all find room
        try:
            async with asyncio.timeout(CIRCUIT_TIMEOUT_S):
                status, target = await self._connect(source, request)
                await _send(writer, HopMessage(type=circuit.HOP_STATUS, status=status))
            if target is not None:
                await self._splice(pair, (reader, writer), target)
        finally:
            self._pairs.remove(pair)

    async def _connect(self, source: str, request: Any) -> tuple[int, tuple[Reader, Writer] | None]:
        """The circuit protocol's status, and the stream to the target if it is OK."""
        if request.type != circuit.CONNECT:
            return circuit.UNEXPECTED, None
        target = PeerID(request.peer.id)
        if target.to_base58() not in await connected(self._p2p):
            return circuit.NO_RESERVATION, None
        wanted = p2pd_pb2.StreamOpenRequest(peer=target.to_bytes(), proto=[circuit.STOP])
        try:
            reader, writer = await ask(
                self._p2p, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=wanted)
            )
        except TRANSPORT_ERRORS:
            return circuit.CONNECTION_FAILED, None
        try:
            offer = StopMessage(type=circuit.STOP_CONNECT)
            offer.peer.id = PeerID.from_base58(source).to_bytes()
            await _send(writer, offer)
            answer = await _receive(reader, StopMessage)
            if answer.status == circuit.OK:
                return circuit.OK, (reader, writer)
        except BaseException:
            _close(writer)
            raise
        _close(writer)
        return circuit.CONNECTION_FAILED, None

    def _busy(self, *peers: str) -> bool:
        """Whether one of them is at an end of too many circuits."""
        return any(sum(peer in pair for pair in self._pairs) >= MAX_CIRCUITS_PER_PEER for peer in peers)

    async def _splice(
        self, pair: tuple[str, str], near: tuple[Reader, Writer], far: tuple[Reader, Writer]
    ) -> None:
        """Pass bytes both ways until either side ends."""
        begin, before = time.monotonic(), self.relayed_bytes
        log.info("relaying between %s and %s", *pair)
        pumps = [asyncio.create_task(self._pump(a[0], b[1])) for a, b in ((near, far), (far, near))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            _close(far[1])
            passed = (self.relayed_bytes - before) / 1e6
            log.info("relayed %.1f MB in %.0f s for %s", passed, time.monotonic() - begin, pair[0])

    async def _pump(self, reader: Reader, writer: Writer) -> None:
        with contextlib.suppress(*TRANSPORT_ERRORS):
            while data := await reader.read(_PIECE_BYTES):
                await self._traffic.download.take(len(data))
                await self._traffic.upload.take(len(data))
                writer.write(data)
                await writer.drain()
                self.relayed_bytes += len(data)
                self._traffic.meter["received", RELAYED] += len(data)
                self._traffic.meter["sent", RELAYED] += len(data)


class DialBack:
    """Tells peers whether their ports can be reached from here, at the address that we see them under."""

    def __init__(self, p2p: P2P) -> None:
        self._p2p = p2p

    async def start(self) -> None:
        """Answer until the daemon ends."""
        await self._p2p.add_binary_stream_handler(keys.DIAL_BACK, self._on_request)

    async def _on_request(self, info: StreamInfo, reader: Reader, writer: Writer) -> None:
        try:
            async with asyncio.timeout(CIRCUIT_TIMEOUT_S):
                port = int.from_bytes(await reader.readexactly(2), "big")
                answer = ""
                for address in (await connected(self._p2p)).get(info.peer_id.to_base58(), ()):
                    _, family, host, *_ = address.split("/")
                    if family in ("ip4", "ip6") and await _speaks_libp2p(host, port):
                        answer = f"/{family}/{host}/tcp/{port}"
                writer.write(answer.encode() + b"\n")
                await writer.drain()
        except (TimeoutError, *TRANSPORT_ERRORS) as error:
            log.debug("dialling back to %s: %s", info.peer_id.to_base58(), error)
        finally:
            _close(writer)


async def address_from_outside(p2p: P2P, peer_id: str, ports: Iterable[int]) -> str | None:
    """Where a peer reaches us with a connection of its own; empty: nowhere; None: it does not say."""
    wanted = p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(peer_id).to_bytes(), proto=[keys.DIAL_BACK])
    answer: str | None = None
    for port in ports:
        try:
            async with asyncio.timeout(CIRCUIT_TIMEOUT_S):
                reader, writer = await ask(
                    p2p, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=wanted)
                )
                try:
                    writer.write(port.to_bytes(2, "big"))
                    line = await reader.readline()
                finally:
                    _close(writer)
        except (TimeoutError, ValueError, *TRANSPORT_ERRORS):
            continue
        if line == b"\n":
            answer = answer or ""
        elif _is_ours(told := line.decode(errors="replace").strip(), port):
            answer = answer or told
    return answer


def _is_ours(address: str, port: int) -> bool:
    """Whether an answer has the form that it must have: nothing else is told to others as our address."""
    try:
        _, family, host, protocol, number = parse_address(address, listening=True).split("/")
        ipaddress.ip_address(host)
    except (AddressError, ValueError):
        return False
    return family in ("ip4", "ip6") and protocol == "tcp" and number == str(port)


async def _speaks_libp2p(host: str, port: int) -> bool:
    """Whether a libp2p node answers there. Each side begins with the same line (multistream-select)."""
    hello = b"\x13/multistream/1.0.0\n"
    try:
        async with asyncio.timeout(3.0):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(hello)
                return await reader.readexactly(len(hello)) == hello
            finally:
                _close(writer)
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        return False


def _granted() -> Any:
    answer = HopMessage(type=circuit.HOP_STATUS, status=circuit.OK)
    answer.reservation.expire = int(time.time()) + RESERVED_S
    return answer


async def _send(writer: Writer, message: Any) -> None:
    data, length = message.SerializeToString(), bytearray()
    left = len(data)
    while left > 127:
        length.append(left & 127 | 128)
        left >>= 7
    writer.write(bytes(length) + bytes([left]) + data)
    await writer.drain()


async def _receive(reader: Reader, kind: Any) -> Any:
    """Raises: DecodeError: not such a message, or too long a one."""
    length = 0
    for shift in (0, 7):
        (byte,) = await reader.readexactly(1)
        length |= (byte & 127) << shift
        if byte < 128:
            break
    else:
        raise DecodeError("too long")
    if length > circuit.MAX_MESSAGE_BYTES:
        raise DecodeError("too long")
    return kind.FromString(await reader.readexactly(length))


def _close(writer: Writer) -> None:
    with contextlib.suppress(*TRANSPORT_ERRORS):
        writer.close()
