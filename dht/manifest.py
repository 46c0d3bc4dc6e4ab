"""What a state download consists of, signed by the donor that offers it.

The signature covers what the download is of (run, block, block or table) as well as every digest, so a
donor can't deny an offer, and nobody can pass one off as an offer of something else.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from blocktrain.protocol.errors import PeerError, RecordError
from blocktrain.protocol.identity import Identity, verify
from blocktrain.protocol.messages import Manifest
from blocktrain.protocol.tensors import digest

CHUNK_BYTES = 524_288
"""Larger chunks leave the processor's cache on the way; smaller ones cost more headers and threads."""
MAX_CHUNK_BYTES = 2**24
MAX_CHUNKS = 1_400
DIGEST_CHARS = 32
_DOMAIN = "blocktrain state manifest"


@dataclass(frozen=True, slots=True)
class State:
    """What a holder gives away: safetensors bytes, and the anchor that they belong to."""

    data: bytes | bytearray
    round: int
    anchor: str


@dataclass(frozen=True, slots=True)
class Subject:
    """What a manifest is of. Both sides know it; it is signed, but not sent."""

    fingerprint: str
    block: int
    what: str
    """`block` or `table`."""


def make_manifest(state: State, subject: Subject, identity: Identity) -> Manifest:
    """Sizes and digests of a state, signed. Reads all of it: call it in a thread."""
    chunk = CHUNK_BYTES
    while len(state.data) > chunk * MAX_CHUNKS:
        chunk *= 2
    assert chunk <= MAX_CHUNK_BYTES
    view = memoryview(state.data)
    digests = "".join(digest(view[i : i + chunk]) for i in range(0, len(view), chunk))
    unsigned = Manifest(state.round, state.anchor, len(view), chunk, digests, signature="")
    return sign_manifest(unsigned, subject, identity)


def sign_manifest(manifest: Manifest, subject: Subject, identity: Identity) -> Manifest:
    """The same manifest with this identity's signature."""
    return dataclasses.replace(manifest, signature=identity.sign(_signed(manifest, subject)).hex())


def check_manifest(manifest: Manifest, subject: Subject, donor: str, max_bytes: int) -> None:
    """Check a manifest that `donor` sent. Raises: PeerError: its size, digests or signature are wrong."""
    if manifest.size > max_bytes:
        raise PeerError(donor, f"offers {manifest.size} bytes where at most {max_bytes} can be right")
    if len(manifest.digests) != DIGEST_CHARS * chunk_count(manifest):
        raise PeerError(donor, "sent a manifest whose digests don't fit its size")
    try:
        verify(donor, _signed(manifest, subject), bytes.fromhex(manifest.signature))
    except RecordError as error:
        raise PeerError(donor, f"sent a manifest with a wrong signature ({error})") from None


def same_bytes(one: Manifest, other: Manifest) -> bool:
    """Whether two donors offer the same state, cut into the same chunks."""
    return dataclasses.replace(one, signature="") == dataclasses.replace(other, signature="")


def chunk_count(manifest: Manifest) -> int:
    """Number of chunks."""
    return -(-manifest.size // manifest.chunk)


def chunk_bytes(manifest: Manifest, index: int) -> int:
    """Length of one chunk; the last may be shorter than the others."""
    return min(manifest.chunk, manifest.size - index * manifest.chunk)


def chunk_digest(manifest: Manifest, index: int) -> str:
    """The digest that one chunk must have."""
    return manifest.digests[DIGEST_CHARS * index : DIGEST_CHARS * (index + 1)]


def _signed(manifest: Manifest, subject: Subject) -> bytes:
    fields = {**dataclasses.asdict(manifest), **dataclasses.asdict(subject), "domain": _DOMAIN}
    del fields["signature"]
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
