"""The seed peer: a DHT member with a lasting address that holds no model. Any node can take its place."""

from __future__ import annotations

import asyncio
import logging

from blocktrain.dht.directory import SPEC_TTL_S, publish_run
from blocktrain.dht.swarm import Swarm
from blocktrain.protocol.errors import NetworkError
from blocktrain.protocol.spec import RunSpec

log = logging.getLogger(__name__)


async def keep_published(swarm: Swarm, spec: RunSpec) -> None:
    """Store a run's specification again and again, well before it expires."""
    while True:
        await asyncio.sleep(SPEC_TTL_S / 4)
        try:
            await publish_run(swarm, spec)
        except NetworkError as error:
            log.warning("could not renew the run's specification: %s", error)
