"""A short look at the network around a node, for its preflight: nothing is joined, nobody is told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blocktrain.dht.circuit import DialBack
from blocktrain.dht.daemon import DaemonConfig, run_daemon
from blocktrain.dht.dial import own_addresses
from blocktrain.dht.greeting import greet_each
from blocktrain.dht.relays import outside_address

RESOLVE_TIMEOUT_S = 5.0
_FAMILIES = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6, "dns": socket.AF_UNSPEC}


@dataclass(frozen=True, slots=True)
class Probe:
    """What a look at the network has found."""

    answers: Mapping[str, float | str]
    """Peer's address → seconds that our clock is ahead of its, or why it does not answer."""
    resolved: Mapping[str, str]
    """Peer's address, if it has a name in it → what the name leads to, in words."""
    listening: tuple[str, ...]
    """Multiaddrs on which our daemon listens."""
    outside: str | None
    """Where a peer has reached us; empty: nowhere; None: no peer says."""


async def probe(daemon: DaemonConfig, peers: Sequence[str], group: asyncio.TaskGroup) -> Probe:
    """Start the daemon, greet all peers at once and have those that answer dial us back.

    Raises:
        DaemonError: the daemon did not start.
    """
    async with run_daemon(daemon, group) as p2p:
        await DialBack(p2p).start()
        resolved = dict(zip(peers, await asyncio.gather(*map(_resolve, peers)), strict=True))
        answers = await greet_each(p2p, peers)
        reached = [address for address, answer in answers.items() if isinstance(answer, float)]
        listening = tuple(sorted(a.partition("/p2p/")[0] for a in await own_addresses(p2p)))
        outside = await outside_address(p2p, reached) if reached else None
    return Probe(answers, {a: text for a, text in resolved.items() if text}, listening, outside)


async def _resolve(address: str) -> str:
    """What the host name of an address leads to, in words; empty for dnsaddr, or if there is none."""
    _, kind, host, *_ = address.split("/")
    if kind not in _FAMILIES:
        return ""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await loop.getaddrinfo(host, None, family=_FAMILIES[kind], type=socket.SOCK_STREAM)
    except (TimeoutError, OSError):
        return f"the name {host} can't be resolved"
    return f"{host} is {', '.join(sorted({str(entry[4][0]) for entry in found}))}"
