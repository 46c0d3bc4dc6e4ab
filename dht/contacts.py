"""The peers that a node remembers from one start to the next: `peers.txt` in its home folder.

The file has the form of `--initial-peers @FILE`, so that it can be handed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from blocktrain.dht.dial import leads_to
from blocktrain.protocol.addresses import parse_address, peer_id_of
from blocktrain.protocol.errors import AddressError

log = logging.getLogger(__name__)
FILE_NAME = "peers.txt"
MAX_CONTACTS = 32
MAX_CONTACT_ADDRESSES = 4
CONTACT_STALE_S = 600.0
"""A peer that nothing was heard of for so long makes room for another."""
MAX_CONTACTS_BYTES = 131_072
_HEADER = """\
# Peers that this node has met, the newest first; tried when no initial peer answers. Rewritten by the node.
# Hand it on: blocktrain-node --initial-peers @peers.txt
"""


class Contacts:
    """Peers worth remembering, and the file that keeps them. A file that can't be used is a warning.

    Only peers that serve the DHT are kept, as nobody can join through another.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._peers = _load(path)
        self._saved = dict(self._peers)
        self._seen = dict.fromkeys(self._peers, -math.inf)
        self._told: dict[str, tuple[str, ...]] = {}
        self._complaint = ""
        self._writing = threading.Lock()

    @property
    def peers(self) -> dict[str, tuple[str, ...]]:
        """Peer id → addresses, the newest peer first."""
        return dict(reversed(self._peers.items()))

    def suggest(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Remember a peer that is here now, by its own account of its addresses, if there is room."""
        now = time.monotonic()
        if peer_id not in self._peers and len(self._peers) >= MAX_CONTACTS:
            oldest = min(self._seen, key=lambda peer: self._seen[peer])
            if now < self._seen[oldest] + CONTACT_STALE_S:
                return
        else:
            oldest = ""
        if self._told.get(peer_id) != tuple(addresses):  # parsing them at every look would cost too much
            kept = _worth_keeping(peer_id, addresses)
            if not kept:
                return
            if oldest:
                self._forget(oldest)
            self._peers[peer_id], self._told[peer_id] = kept, tuple(addresses)
        self._seen[peer_id] = now

    def heard_of(self, peer_id: str) -> None:
        """A peer is here now; that counts if it is remembered already."""
        if peer_id in self._peers:
            self._seen[peer_id] = time.monotonic()

    def _forget(self, peer_id: str) -> None:
        del self._peers[peer_id], self._seen[peer_id]
        self._told.pop(peer_id, None)

    async def save(self) -> None:
        """Write the file if it would change. A disk that is full is a warning, given once."""
        wanted = dict(self._peers)
        if wanted == self._saved:
            return
        lines = (address for addresses in reversed(wanted.values()) for address in addresses)
        try:
            await asyncio.to_thread(self._write, _HEADER + "".join(f"{line}\n" for line in lines))
        except OSError as error:
            reason = error.strerror or str(error)
            if reason != self._complaint:
                log.warning("%s: can't be written: %s; peers are not remembered", self._path, reason)
            self._complaint = reason
        else:
            self._saved, self._complaint = wanted, ""

    def _write(self, text: str) -> None:
        scratch = self._path.with_name(f"{self._path.name}.new")
        with self._writing:  # the thread of a save that was cancelled may still be at it
            try:
                with scratch.open("w", encoding="ascii") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                scratch.replace(self._path)
            except OSError:
                with contextlib.suppress(OSError):
                    scratch.unlink()
                raise


def _load(path: Path) -> dict[str, tuple[str, ...]]:
    """What the file holds, the oldest peer first. Whatever can't be used is passed over with one warning."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONTACTS_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return {}
    except OSError as error:
        log.warning("%s: can't be read: %s; no peer is remembered", path, error.strerror)
        return {}
    found: dict[str, list[str]] = {}
    useless: list[AddressError] = []
    for line in text.splitlines():
        for word in [] if line.lstrip().startswith("#") else re.findall(r"[^,\s]+", line):
            try:
                address = parse_address(word)
                found.setdefault(peer_id_of(address), []).append(address)
            except AddressError as error:
                useless.append(error)
    if useless:
        log.warning("%s: %d of its lines are ignored; the first: %s", path, len(useless), useless[0])
    kept = [(peer, tuple(addresses[:MAX_CONTACT_ADDRESSES])) for peer, addresses in found.items()]
    return dict(reversed(kept[:MAX_CONTACTS]))


def _worth_keeping(peer_id: str, addresses: Sequence[str]) -> tuple[str, ...]:
    """The most useful of a peer's addresses; none if it is reached through relays: it serves no DHT then."""
    if any("/p2p-circuit" in address for address in addresses):
        return ()
    usable = [address for address in addresses if leads_to(peer_id, address)]
    return tuple(sorted(usable, key=_rank)[:MAX_CONTACT_ADDRESSES])


def _rank(address: str) -> int:
    """Public addresses and names first, then those of a local network, then this machine's own."""
    try:
        host = ipaddress.ip_address(address.split("/")[2])
    except ValueError:
        return 0
    return 2 if host.is_loopback else 0 if host.is_global else 1
