"""Two nodes of one identity: the second is refused, because others would take them for one.

That happens when a home folder, a virtual machine or a container image is copied with the key in it. The
home's lock keeps two processes out of one folder; here it is about copies of the folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blocktrain.dht.daemon import DaemonConfig, run_daemon
from blocktrain.dht.dial import dial
from blocktrain.protocol.addresses import peer_id_of
from blocktrain.protocol.errors import HomeError, IdentityInUse, PeerError
from blocktrain.protocol.identity import throwaway_identity
from blocktrain.protocol.records import CLOCK_TOLERANCE_S, MAX_TTL_S

if TYPE_CHECKING:
    from hivemind.p2p import P2P

    from blocktrain.dht.directory import Directory, Holder

log = logging.getLogger(__name__)
TWIN_TIMEOUT_S = 3.0
"""So long our own address is tried; where a router does not lead it back, nobody answers."""
TWIN_LOOK_S = 0.5
_MACHINE_IDS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


def place_of(home: Path, peer_id: str) -> str:
    """A digest of the machine and the folder: a restart gives the same, a copy of the folder another.

    It holds the peer id, too, so that it tells nobody which identities live on the same machine.

    Raises:
        HomeError: the folder can't be looked at.
    """
    try:
        status = home.stat()
    except OSError as error:
        raise HomeError(f"{home}: can't be read: {error.strerror}; choose another --home") from None
    parts = (peer_id, _machine_id(), socket.gethostname(), str(status.st_dev), str(status.st_ino))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


async def refuse_answering_twin(peer_id: str, initial_peers: Sequence[str], group: asyncio.TaskGroup) -> None:
    """Look who answers at the initial peers' addresses that carry our own peer id; usually nobody does.

    To be called before our own daemon runs; a daemon of another identity asks.

    Raises:
        IdentityInUse: a node with our identity does.
        DaemonError, HomeError: that daemon did not start.
    """
    own = [address for address in initial_peers if peer_id_of(address) == peer_id]
    if not own:
        return
    with throwaway_identity() as (_, key_file):
        async with run_daemon(DaemonConfig(key_file), group) as p2p:
            answering = await asyncio.gather(*(_answers(p2p, address) for address in own))
    for address, answers in zip(own, answering, strict=True):
        if answers:
            raise _in_use(peer_id, address)


async def _answers(p2p: P2P, address: str) -> bool:
    """Whether the peer that an address names is there: the handshake proves that it has the key."""
    try:
        async with asyncio.timeout(TWIN_TIMEOUT_S):
            await dial(p2p, peer_id_of(address), [address])
    except (TimeoutError, PeerError):
        return False
    return True


async def refuse_taken_identity(directory: Directory, place: str) -> None:
    """Look for a live record of our own identity from another place, before we write one ourselves.

    Such a record may be left over from a node that was killed before its home was moved here. So it is
    watched until it should have been renewed; the home's lock proves that no other node is in this place.

    Raises:
        IdentityInUse: it is renewed.
        NetworkError: the DHT hangs.
    """
    me = directory.swarm.peer_id
    left = _elsewhere(await directory.holders(joining=True), me, place)
    if not left:
        return
    newest = max(holder.record.time for holder in left)
    wait_s = CLOCK_TOLERANCE_S + max(_ttl_s(holder) for holder in left) / 3
    log.info("a record of this identity is from another place; waiting up to %.0f s for its renewal", wait_s)
    until = asyncio.get_running_loop().time() + wait_s
    while left and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(TWIN_LOOK_S)
        left = _elsewhere(await directory.holders(joining=True), me, place)
        refuse_twin(left, me, place, newest)


def refuse_twin(holders: Iterable[Holder], peer_id: str, place: str, since: float) -> None:
    """Look for a record of our own identity that was written elsewhere after the DHT time `since`.

    Raises:
        IdentityInUse: there is one.
    """
    for holder in holders:
        if holder.peer_id == peer_id and holder.record.place != place and holder.record.time > since:
            raise _in_use(peer_id, next(iter(holder.record.addresses), "an address that it does not tell"))


def _elsewhere(holders: Mapping[int, Iterable[Holder]], peer_id: str, place: str) -> list[Holder]:
    found = itertools.chain(*holders.values())
    return [h for h in found if h.peer_id == peer_id and h.record.place != place]


def _ttl_s(holder: Holder) -> float:
    return min(max(holder.expires - holder.record.time, 0.0), MAX_TTL_S)


def _machine_id() -> str:
    for path in _MACHINE_IDS:
        try:
            return path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            continue
    return ""


def _in_use(peer_id: str, address: str) -> IdentityInUse:
    return IdentityInUse(
        f"identity {peer_id} is already in use at {address}: every node needs its own; "
        "start with another --home, or remove identity.key to get a new one"
    )
