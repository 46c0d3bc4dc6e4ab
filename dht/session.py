"""A membership in one run: the swarm, the run's specification, its directory and its streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from blocktrain.dht.directory import Directory, find_run
from blocktrain.dht.streams import Streams
from blocktrain.dht.swarm import JoinConfig, Swarm, join_swarm
from blocktrain.protocol.errors import JoinError
from blocktrain.protocol.identity import Identity
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
        streams = Streams(swarm, spec.fingerprint)
        try:
            yield Session(swarm, spec, Directory(swarm, spec, ttl_s), streams)
        finally:
            await streams.aclose()


async def _find(swarm: Swarm, run: str | None) -> RunSpec:
    """Ask a few times: a record may still be on its way when we have just joined."""
    for attempt in range(FIND_TRIES):
        try:
            return await find_run(swarm, run)
        except JoinError:
            if attempt == FIND_TRIES - 1:
                raise
            await asyncio.sleep(0.5 * 2**attempt)
    raise AssertionError
