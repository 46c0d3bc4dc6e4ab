"""Names under which things are found: DHT keys and stream protocols.

All of them hold the protocol's version; all but the list of runs hold the run's fingerprint, so nodes
of different runs never read each other's records and never open a stream to each other.
"""

from __future__ import annotations

import hashlib

from blocktrain.protocol.spec import PROTOCOL_VERSION

_ROOT = f"blocktrain/{PROTOCOL_VERSION}"

RUNS = f"{_ROOT}/runs"
"""Signed announcements of the runs that can be joined here; the subkey is the announcer."""


DIAL_BACK = f"/{_ROOT}/dial-back"
"""libp2p protocol on which a node asks a peer whether it can be reached from outside."""


def holders(fingerprint: str, block: int) -> str:
    """Signed records of the nodes that hold a block; the subkey is the holder."""
    return f"{_ROOT}/{fingerprint}/block/{block}"


def specification(fingerprint: str) -> str:
    """The canonical run specification. The key is made from its content, so it can't be forged."""
    return f"{_ROOT}/spec/{fingerprint}"


def specification_of(content: bytes) -> str:
    """The only key under which this content may stand."""
    return specification(hashlib.sha256(content).hexdigest()[:32])


def stream(fingerprint: str, purpose: str) -> str:
    """The libp2p protocol name of one purpose of one run."""
    return f"/{_ROOT}/{fingerprint}/{purpose}"
