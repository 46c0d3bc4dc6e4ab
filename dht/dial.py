"""Reaching a peer: requests to our libp2p daemon, and what its failures mean."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from multiaddr import Multiaddr  # hivemind's makes wrong bytes of /p2p/PEER_ID/p2p-circuit

from blocktrain.protocol.addresses import parse_address, peer_id_of
from blocktrain.protocol.errors import AddressError, PeerError

TRANSPORT_ERRORS = (OSError, asyncio.IncompleteReadError, P2PDaemonError, RuntimeError)
"""What a stream, or the daemon, raises when its other end is gone or says no."""
DIAL_TIMEOUT_S = 8.0
BACKOFF = "not dialled again so soon after a failure"
"""The reason that libp2p gives for a few seconds instead of the one before, which tells more."""


async def ask(p2p: P2P, request: p2pd_pb2.Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send the daemon one request on a connection of its own, which is returned once it has agreed.

    hivemind's client can do this too, but leaks its connection when the daemon says no or we give up.

    Raises:
        OSError, asyncio.IncompleteReadError: the daemon is gone.
        P2PDaemonError: it says no, and why.
    """
    _, reader, writer = await _ask(p2p, request)
    return reader, writer


async def own_addresses(p2p: P2P) -> list[str]:
    """Where the daemon may be reached, with its peer id. Raises as `ask`."""
    response, _, writer = await _ask(p2p, p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
    writer.close()
    suffix = f"/p2p/{PeerID(response.identify.id).to_base58()}"
    return [f"{Multiaddr(address)}{suffix}" for address in response.identify.addrs]


async def _ask(p2p: P2P, request: Any) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await p2p._client.control.daemon_connector.open_connection()
    try:
        await write_pbmsg(writer, request)
        response = p2pd_pb2.Response()
        await read_pbmsg_safe(reader, response)
        raise_if_failed(response)
    except BaseException:
        writer.transport.abort()
        raise
    return response, reader, writer


async def dial(p2p: P2P, peer_id: str, addresses: Sequence[str]) -> None:
    """Connect the daemon to a peer at any of its addresses. Raises: PeerError, with libp2p's reason."""
    suffix = f"/p2p/{peer_id}"
    try:
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(
                peer=PeerID.from_base58(peer_id).to_bytes(),
                addrs=[Multiaddr(address.removesuffix(suffix)).to_bytes() for address in addresses],
            ),
        )
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            _, writer = await ask(p2p, request)
        writer.close()
    except TimeoutError:
        raise PeerError(
            peer_id, f"no answer within {DIAL_TIMEOUT_S:.0f} s at {', '.join(addresses)[:200]}"
        ) from None
    except (P2PDaemonError, OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise PeerError(peer_id, _dial_reason(str(error))) from None


def leads_to(peer_id: str, address: str) -> bool:
    """Whether another peer's text is an address that can be dialled, and of that peer."""
    try:
        return peer_id_of(parse_address(address)) == peer_id
    except AddressError:
        return False


def _dial_reason(text: str) -> str:
    """The telling part of libp2p's dial errors, which run over many lines."""
    flat = " ".join(text.replace("Connect failed. msg=", "").split())
    for sign, meaning in (
        ("dial backoff", BACKOFF),
        ("connection refused", "connection refused: nothing listens there"),
        ("peer id mismatch", "another peer answers at this address: its peer id is not the one given"),
        ("no route to host", "no route to this host"),
        ("network is unreachable", "this network can't be reached from here"),
        ("i/o timeout", "no answer (wrong address, or a firewall drops it)"),
        ("deadline exceeded", "no answer (wrong address, or a firewall drops it)"),
        ("no good addresses", "the host name has no address of this kind"),
        ("no such host", "the host name can't be resolved"),
    ):
        if sign in flat:
            return meaning
    return flat[:200]
