"""Signed, bounded, expiring records: what nodes say about themselves in the DHT.

A record is `signature (64 bytes) || canonical JSON`. The signature covers the key, the owner's peer
id and the expiry too, so a record can't be moved, extended or passed off as another peer's.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass
from typing import TypeVar

from blocktrain.protocol.errors import RecordError
from blocktrain.protocol.identity import SIGNATURE_BYTES, Identity, verify
from blocktrain.protocol.schema import bounded, from_mapping
from blocktrain.protocol.spec import RUN_NAME

MAX_RECORD_BYTES = 4096
MAX_TTL_S = 600.0
"""A record that claims to live longer is refused, so a key can't be squatted."""
CLOCK_TOLERANCE_S = 3.0
"""How far the clocks of two nodes may differ (hivemind's own limit)."""
MAX_ADDRESSES = 12
ADDRESS = r"/[!-~]{1,511}"
"""Regular expression of what may be an address: nothing that could garble a terminal or a log."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """What a holder says about itself. Everything is its own claim; nothing is trusted for safety."""

    block: int = bounded(low=0, high=63)
    round: int = bounded(low=0, high=2**53 - 1)
    """Rounds that its anchor has behind it."""
    step: int = bounded(low=0, high=2**53)
    """Local steps so far."""
    tokens_per_s: float = bounded(low=0, high=1e12)
    denoising_ce: float | None = bounded(low=0, high=1e6)
    """Mean of its local loss lately, nats. Not the model's cross-entropy: z is made from y."""
    anchor: str = bounded(pattern=r"[0-9a-f]{32}")
    """Hash of its block's parameters after its last committed round."""
    addresses: tuple[str, ...] = bounded(high=MAX_ADDRESSES, pattern=ADDRESS)
    version: str = bounded(low=1, high=32, pattern=r"[A-Za-z0-9.+!_-]+")
    time: float = bounded(low=0, high=1e12)
    """DHT time at which it was written, seconds."""
    joining: bool = False
    """It has chosen this block and is getting its state: it counts for those who choose, not in rounds."""
    resting: bool = False
    """It has trained enough: it serves its state, and takes no part in rounds."""
    leaving: bool = False
    """The holder is gone: the record only hides the one before."""
    place: str = bounded("", pattern=r"([0-9a-f]{16})?")
    """Where its home folder is, as a digest: tells a node's restart from a second node of its identity."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """An announcement that a run can be joined here."""

    name: str = bounded(low=1, high=64, pattern=RUN_NAME)
    fingerprint: str = bounded(pattern=r"[0-9a-f]{32}")


def seal(identity: Identity, key: bytes, expires: float, record: PeerRecord | RunRecord) -> bytes:
    """Encode and sign a record for one DHT key (in the DHT's own digested form).

    Raises:
        RecordError: it would be too large, or others would refuse it.
    """
    fields = dataclasses.asdict(from_mapping(type(record), dataclasses.asdict(record), error=RecordError))
    payload = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    if SIGNATURE_BYTES + len(payload) > MAX_RECORD_BYTES:
        raise RecordError(
            f"record of {SIGNATURE_BYTES + len(payload)} bytes is over the limit of {MAX_RECORD_BYTES}"
        )
    return identity.sign(_signed(key, identity.peer_id, expires, payload)) + payload


def unseal(kind: type[T], value: object, *, key: bytes, peer_id: object, expires: float) -> T:
    """Check the signature and the fields of a record that was stored under `key` and `peer_id`.

    Raises:
        RecordError: whatever is wrong with it.
    """
    return parse_record(kind, check_signature(value, key=key, peer_id=peer_id, expires=expires))


def parse_record(kind: type[T], payload: bytes) -> T:
    """The record in a payload whose signature was checked. Raises: RecordError."""
    try:
        data = json.loads(payload)
    except (ValueError, RecursionError):
        raise RecordError("record is not valid JSON") from None
    return from_mapping(kind, data, error=RecordError)


def check_signature(value: object, *, key: bytes, peer_id: object, expires: float) -> bytes:
    """The payload of a record, once its size and its owner's signature are right. Raises: RecordError."""
    if not isinstance(value, bytes) or not isinstance(peer_id, str) or not peer_id.isascii():
        raise RecordError("not a signed record")
    if not SIGNATURE_BYTES < len(value) <= MAX_RECORD_BYTES:
        raise RecordError(f"record of {len(value)} bytes; the limit is {MAX_RECORD_BYTES}")
    payload = value[SIGNATURE_BYTES:]
    verify(peer_id, _signed(key, peer_id, expires, payload), value[:SIGNATURE_BYTES])
    return payload


def check_expiry(expires: float, now: float) -> None:
    """Refuse records that are over or claim to live too long. Raises: RecordError."""
    if not now - CLOCK_TOLERANCE_S <= expires <= now + MAX_TTL_S + CLOCK_TOLERANCE_S:
        raise RecordError(f"expiry {expires - now:+.0f} s from now is outside 0…{MAX_TTL_S:.0f} s")


def _signed(key: bytes, peer_id: str, expires: float, payload: bytes) -> bytes:
    parts = (b"blocktrain record", key, peer_id.encode(), struct.pack(">d", expires), payload)
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)
