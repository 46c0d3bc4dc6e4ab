"""Messages on streams between nodes: a frame is a small JSON header and a payload of raw bytes.

    4 bytes: length of the header · 8 bytes: length of the payload (both big-endian) · header · payload

The reader states how long a payload it is ready for before it reads one; nothing larger is allocated.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

from blocktrain.protocol.errors import MessageError
from blocktrain.protocol.records import ADDRESS, MAX_ADDRESSES
from blocktrain.protocol.schema import bounded, from_mapping

PREFIX = struct.Struct(">IQ")
MAX_HEADER_BYTES = 524_288
"""Room for a `Begin` with the addresses of MAX_GROUP members, each at most those of a peer record."""
MAX_GROUP = 64
"""Most holders in one averaging group."""

T = TypeVar("T")
_HEX32 = r"[0-9a-f]{32}"
_PEER_ID = r"[1-9A-HJ-NP-Za-km-z]{1,128}"
_REASON = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]*"
"""One line: the reasons of others end up in this node's errors and logs."""


@dataclass(frozen=True, slots=True)
class Join:
    """A holder asks another to be in its next averaging round."""

    round: int = bounded(low=0, high=2**53 - 1)
    """Rounds behind the sender's anchor."""
    anchor: str = bounded(pattern=_HEX32)
    samples: int = bounded(low=0, high=2**53)
    """Sequences trained on since the last commit; its weight in the average before clamping."""


@dataclass(frozen=True, slots=True)
class Member:
    """One holder of a group, with the weight that its parameters get."""

    peer_id: str = bounded(pattern=_PEER_ID)
    weight: float = bounded(low=1e-3, high=4.0)
    addresses: tuple[str, ...] = bounded((), high=MAX_ADDRESSES, pattern=ADDRESS)


@dataclass(frozen=True, slots=True)
class Begin:
    """The leader's answer to everyone who joined: who averages what."""

    group: str = bounded(pattern=_HEX32)
    round: int = bounded(low=1, high=2**53)
    """Rounds behind the anchor that this round commits."""
    members: tuple[Member, ...] = bounded(low=2, high=MAX_GROUP)
    relative: bool = bounded()
    """All members have the same anchor, so differences to it are sent; otherwise whole parameters."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """Not leading now; the sender thinks that `leader` is."""

    leader: str = bounded(pattern=_PEER_ID)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Still alive, the group is not complete yet."""

    joined: int = bounded(low=0, high=MAX_GROUP)
    deadline: float = bounded(low=0, high=1e12)
    """DHT time at which the sender begins the round at the latest; 0: not known yet."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The request can't be served; `reason` says why."""

    reason: str = bounded(high=500, pattern=_REASON)


@dataclass(frozen=True, slots=True)
class Abort:
    """The sender gives the round up; `culprit` is who kept it from finishing, if it can tell."""

    reason: str = bounded(high=500, pattern=_REASON)
    culprit: str = bounded("", pattern=f"({_PEER_ID})?")


@dataclass(frozen=True, slots=True)
class Exchange:
    """Opens the exchange of parts with one other member of a group."""

    group: str = bounded(pattern=_HEX32)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the vector; the payload is its values."""

    index: int = bounded(low=0, high=2**31)


@dataclass(frozen=True, slots=True)
class TableOffer:
    """A node offers to average embedding tables pairwise; once both agree, the payload is its table."""

    rows: int = bounded(low=1, high=1_000_000)
    columns: int = bounded(low=1, high=65_536)


@dataclass(frozen=True, slots=True)
class Done:
    """The sender has committed, or is about to; the exchange is over."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Asks a holder how busy it is with giving its state away."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a donor is: the answer to a `LoadRequest`, and the first one to a `StateRequest`."""

    uploads: int = bounded(low=0, high=2**16)
    """Downloads that it serves now."""
    full: bool = bounded()
    """It takes no more from the peer that asked; come back later."""


@dataclass(frozen=True, slots=True)
class StateRequest:
    """Asks for the manifest of a holder's current state: its block's anchor, or its embedding table."""

    what: str = bounded(choices=("block", "table"))


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a state download consists of: safetensors bytes, cut into chunks."""

    round: int = bounded(low=0, high=2**53)
    anchor: str = bounded(pattern=_HEX32)
    size: int = bounded(low=1, high=2**38)
    """Bytes in all."""
    chunk: int = bounded(low=4096, high=2**24)
    """Bytes in each chunk but the last."""
    digests: str = bounded(pattern=r"([0-9a-f]{32})+", high=32 * 1_500)
    """For each chunk, the first 128 bits of its SHA-256 in hexadecimal."""
    signature: str = bounded(pattern=r"[0-9a-f]{128}")
    """The donor's, over the other fields and what the download is of, in hexadecimal."""


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """Asks for one chunk of the state whose manifest came before on the same stream."""

    index: int = bounded(low=0, high=2**20)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk; the payload is its bytes."""

    index: int = bounded(low=0, high=2**20)


Message = (
    Join | Begin | Redirect | Waiting | Refused | Abort | Exchange | Part | TableOffer | Done
    | LoadRequest | Load | StateRequest | Manifest | ChunkRequest | Chunk
)  # fmt: skip
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Message)}


def encode(message: Message, payload_bytes: int = 0) -> bytes:
    """Prefix and header of a frame; the payload is to follow."""
    fields = {"kind": type(message).__name__, **dataclasses.asdict(message)}
    header = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    assert len(header) <= MAX_HEADER_BYTES
    return PREFIX.pack(len(header), payload_bytes) + header


def decode_prefix(prefix: bytes, max_payload: int) -> tuple[int, int]:
    """Lengths of the header and of the payload. Raises: MessageError if either is outside its limits."""
    header, payload = PREFIX.unpack(prefix)
    if not 2 <= header <= MAX_HEADER_BYTES:
        raise MessageError(f"header of {header} bytes is outside 2…{MAX_HEADER_BYTES}")
    if payload > max_payload:
        raise MessageError(f"payload of {payload} bytes where at most {max_payload} were expected")
    return header, payload


def decode(header: bytes) -> Any:
    """The message in a frame's header. Raises: MessageError."""
    try:
        data = json.loads(header)
    except (ValueError, RecursionError):
        raise MessageError("header is not valid JSON") from None
    if not isinstance(data, dict):
        raise MessageError("header is not a table")
    name = data.pop("kind", None)
    if not isinstance(name, str) or name not in KINDS:
        raise MessageError("unknown kind of message")
    return from_mapping(KINDS[name], data, error=MessageError)
