"""The seed peer: a DHT member with a lasting address that holds no model. Any node can take its place."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from blocktrain.dht.directory import SPEC_TTL_S, publish_run
from blocktrain.dht.swarm import Swarm
from blocktrain.protocol.errors import HomeError, NetworkError
from blocktrain.protocol.spec import RunSpec

log = logging.getLogger(__name__)
_PORT_FILE = "port"
_ANY_PORT = "/tcp/0"


def with_last_port(home: Path, listen: tuple[str, ...]) -> tuple[str, ...]:
    """`listen` with ports that are left to the system (0) replaced by the one that it chose last time."""
    try:
        port = (home / _PORT_FILE).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return listen
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return listen
    return tuple(a.removesuffix("0") + port if a.endswith(_ANY_PORT) else a for a in listen)


def remember_port(home: Path, addresses: tuple[str, ...]) -> None:
    """Keep the TCP port of these addresses, so that they survive a restart. Raises: HomeError."""
    port = next((a.split("/tcp/")[1].split("/")[0] for a in addresses if "/tcp/" in a), None)
    try:
        if port is not None:
            (home / _PORT_FILE).write_text(port + "\n")
    except OSError as error:
        raise HomeError(f"{home / _PORT_FILE}: can't be written: {error.strerror}") from None


async def keep_published(swarm: Swarm, spec: RunSpec) -> None:
    """Store a run's specification again and again, well before it expires."""
    while True:
        await asyncio.sleep(SPEC_TTL_S / 4)
        try:
            await publish_run(swarm, spec)
        except NetworkError as error:
            log.warning("could not renew the run's specification: %s", error)
