"""The relay on loopback: circuits through it, what it refuses, and the dial-back check."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hivemind.p2p import P2P, PeerID
from hivemind.proto import p2pd_pb2

from blocktrain.dht import circuit as relaying
from blocktrain.dht.bandwidth import Traffic
from blocktrain.dht.circuit import Relay, address_from_outside
from blocktrain.dht.daemon import DaemonConfig, run_daemon
from blocktrain.dht.dial import ask, dial
from blocktrain.protocol import circuit
from blocktrain.protocol.addresses import peer_id_of
from blocktrain.protocol.circuit import HopMessage
from blocktrain.protocol.errors import PeerError
from blocktrain.protocol.identity import load_or_create_identity
from tests.swarm.members import members

pytestmark = pytest.mark.slow
STRANGER = "12D3KooWFszn7fgNAgwvPmVo97mKqbUXU2CqNmfHiyFxS8waHEcK"
NOWHERE = ("/ip4/127.0.0.1/tcp/1",)
PAST_THE_LIMIT = 8 * 131_072
"""p2pd's own relay ends a circuit after 131,072 bytes."""


@dataclass(frozen=True)
class Peer:
    """A libp2p daemon without a DHT of hivemind's."""

    p2p: P2P
    peer_id: str

    async def open(self, peer_id: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to a peer."""
        wanted = p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(peer_id).to_bytes(), proto=[protocol])
        return await ask(self.p2p, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=wanted))


@contextlib.asynccontextmanager
async def relay_and_two(folder: Path) -> AsyncIterator[tuple[str, Peer, Peer]]:
    """The address of a relay, and two peers that are connected to it and can't dial each other."""
    async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as stack:
        peers = []
        for name, announce in (("relay", ()), ("one", NOWHERE), ("two", NOWHERE)):
            identity = load_or_create_identity(folder / name)
            config = DaemonConfig(folder / name, ("/ip4/127.0.0.1/tcp/0",), announce)
            peers.append(Peer(await stack.enter_async_context(run_daemon(config, group)), identity.peer_id))
        relay, one, two = peers
        await Relay(relay.p2p, Traffic()).start()
        address = str((await relay.p2p.get_visible_maddrs())[0])
        for peer in (one, two):
            await dial(peer.p2p, relay.peer_id, [address])
        yield address, one, two


async def ask_relay(peer: Peer, relay: str, request: Any) -> Any:
    """What a relay answers to one request."""
    reader, writer = await peer.open(peer_id_of(relay), circuit.HOP)
    await relaying._send(writer, request)
    answer = await relaying._receive(reader, HopMessage)
    writer.close()
    return answer


async def test_a_circuit_carries_more_than_libp2ps_limit(tmp_path: Path) -> None:
    """Two peers that can't dial each other exchange 1 MiB each way through a third."""
    async with relay_and_two(tmp_path) as (relay, one, two):

        async def echo(_: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
            writer.close()

        await one.p2p.add_binary_stream_handler("echo", echo)
        await dial(two.p2p, one.peer_id, [f"{relay}/p2p-circuit/p2p/{one.peer_id}"])
        reader, writer = await two.open(one.peer_id, "echo")
        sent = bytes(range(256)) * (PAST_THE_LIMIT // 256)
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent
        writer.close()


async def test_what_a_relay_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown target, a message that is no request, and one circuit more than allowed."""
    async with relay_and_two(tmp_path) as (relay, one, two):
        request = HopMessage(type=circuit.CONNECT)
        request.peer.id = PeerID.from_base58(STRANGER).to_bytes()
        assert (await ask_relay(one, relay, request)).status == circuit.NO_RESERVATION
        assert (await ask_relay(one, relay, HopMessage(type=9))).status == circuit.UNEXPECTED
        granted = await ask_relay(one, relay, HopMessage(type=circuit.RESERVE))
        assert granted.status == circuit.OK
        assert granted.reservation.expire > 0
        monkeypatch.setattr(relaying, "MAX_CIRCUITS", 0)
        request.peer.id = PeerID.from_base58(two.peer_id).to_bytes()
        assert (await ask_relay(one, relay, request)).status == circuit.RESOURCE_LIMIT_EXCEEDED
        with pytest.raises(PeerError):
            await dial(one.p2p, two.peer_id, [f"{relay}/p2p-circuit/p2p/{two.peer_id}"])


async def test_dial_back_tells_open_ports_from_closed_ones(tmp_path: Path) -> None:
    """The port that a member listens on is found reachable; another is not; nobody answers for strangers."""
    async with members(2, tmp_path) as (one, two):
        port = int((await two.swarm.addresses())[0].split("/")[4])
        assert await address_from_outside(two.swarm.p2p, one.peer_id, [port]) == f"/ip4/127.0.0.1/tcp/{port}"
        assert await address_from_outside(two.swarm.p2p, one.peer_id, [1]) == ""
        assert await address_from_outside(two.swarm.p2p, STRANGER, [port]) is None
