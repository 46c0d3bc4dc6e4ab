"""A membership in one run: the swarm, the run's specification, its directory and its streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from blocktrain.dht.daemon import DaemonConfig
from blocktrain.dht.directory import Directory, find_run
from blocktrain.dht.streams import Streams
from blocktrain.dht.swarm import JoinConfig, Swarm, join_swarm
from blocktrain.protocol.addresses import parse_addresses
from blocktrain.protocol.errors import RunNotFound, UsageError
from blocktrain.protocol.identity import Identity, throwaway_identity
from blocktrain.protocol.spec import RunSpec

log = logging.getLogger(__name__)
FIND_TRIES = 5


@dataclass(frozen=True)
class Session:
    """What a command needs to work with a run."""

    swarm: Swarm
    spec: RunSpec
    directory: Directory
    streams: Streams


@contextlib.asynccontextmanager
async def open_session(
    identity: Identity, config: JoinConfig, run: str, group: asyncio.TaskGroup, ttl_s: float = 30.0
) -> AsyncIterator[Session]:
    """Join a swarm and find the run in it: by name, by fingerprint, or (empty) the only one.

    Raises:
        DaemonError, JoinError, SpecError: as `join_swarm` and `find_run`.
    """
    async with join_swarm(identity, config, group) as swarm:
        spec = await _find(swarm, run or None)
        streams = Streams(swarm, spec.fingerprint, traffic=config.traffic)
        try:
            yield Session(swarm, spec, Directory(swarm, spec, ttl_s), streams)
        finally:
            await streams.aclose()


@contextlib.asynccontextmanager
async def visit_run(
    initial_peers: Sequence[str], run: str, join_timeout_s: float, group: asyncio.TaskGroup
) -> AsyncIterator[Session]:
    """A session for a short look: under a throwaway identity, and without serving the DHT.

    The first three are the values of `--initial-peers`, `--run` and `--join-timeout`.

    Raises:
        UsageError, AddressError: there is no initial peer, or one that isn't an address.
        HomeError: no temporary file can be made.
        DaemonError, JoinError, SpecError: as `open_session`.
    """
    peers = parse_addresses(initial_peers)
    if not peers:
        raise UsageError(
            "--initial-peers is missing: paste the line that blocktrain-bootstrap or a node printed"
        )
    with throwaway_identity() as (identity, path):
        config = JoinConfig(DaemonConfig(path), peers, join_timeout_s, client_mode=True)
        async with open_session(identity, config, run, group) as session:
            yield session


async def _find(swarm: Swarm, run: str | None) -> RunSpec:
    """Ask a few times: a record may still be on its way when we have just joined."""
    for attempt in range(FIND_TRIES):
        try:
            return await find_run(swarm, run)
        except RunNotFound:  # a record may still be on its way
            if attempt == FIND_TRIES - 1:
                raise
            await asyncio.sleep(0.5 * 2**attempt)
    raise AssertionError
