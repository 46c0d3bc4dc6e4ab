"""Donors of block 0 for the tests of state downloads: honest ones, and ones that do something else."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from blocktrain.dht.directory import Holder
from blocktrain.dht.donor import StateServer, purpose
from blocktrain.dht.manifest import State, Subject, make_manifest
from blocktrain.dht.streams import Stream
from blocktrain.dht.swarm import dht_time
from blocktrain.protocol.errors import PeerError
from blocktrain.protocol.messages import Load, Manifest, StateRequest
from tests.swarm.members import Member

DATA = bytes(range(256)) * 14_000
"""Six chunks and a bit."""
STATE = State(DATA, 3, "a" * 32)
LARGE = State(DATA * 6, 7, "b" * 32)
LIMIT = 2 * len(DATA)
Trick = Callable[[Stream, Manifest], Awaitable[None]]
"""What a donor by hand does once it was asked for its state; the manifest is honest, and signed by it."""


async def give(member: Member, state: State = STATE) -> StateServer:
    """Make a member an honest donor of block 0."""

    async def provide(what: str) -> State:
        return state if what == "block" else dataclasses.replace(state, data=b"table")

    server = StateServer(member.streams, 0, provide)
    await server.start()
    return server


async def give_by_hand(member: Member, *tricks: Trick, state: State = STATE) -> None:
    """Make a member a donor that does something else, each time the next."""
    left = iter(tricks)

    async def serve(stream: Stream) -> None:
        await stream.expect(StateRequest)
        await stream.send(Load(0, full=False))
        await next(left)(stream, signed_manifest(member, state))
        with contextlib.suppress(PeerError):  # hanging up could overtake what was sent
            while True:
                await stream.receive()

    await member.streams.serve(purpose(0), serve)


def signed_manifest(member: Member, state: State = STATE, what: str = "block") -> Manifest:
    """What this member would say of a state if it were honest."""
    return make_manifest(state, Subject(member.streams.fingerprint, 0, what), member.swarm.identity)


async def child_holder(known: Mapping[str, Any], joiner: Member) -> Holder:
    """A member in another process, as others would find it in the directory."""
    record = await joiner.record(addresses=tuple(known["addresses"]))
    return Holder(known["peer_id"], record, dht_time() + 30)
