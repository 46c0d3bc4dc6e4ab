"""Who a node is: an Ed25519 key whose public half *is* the libp2p peer id.

libp2p writes keys as a protobuf of (key type, data) and makes the peer id of an Ed25519 key from the
identity multihash of its public form (libp2p specs, "Peer Ids and Keys"). So a peer id alone is
enough to verify what its owner signed, and nobody can sign for a peer id that isn't theirs.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from blocktrain.protocol.errors import HomeError, RecordError

SIGNATURE_BYTES = 64
_PRIVATE_PREFIX = bytes.fromhex("08011240")  # protobuf: key type 1 (Ed25519), 64 bytes of data
_PEER_PREFIX = bytes.fromhex("002408011220")  # identity multihash of 36 bytes: type 1, 32 bytes of data
_PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")  # what the prefix and 32 bytes make in base58


@dataclass(frozen=True)
class Identity:
    """A node's private key. `peer_id` is its public name, in base58."""

    key: Ed25519PrivateKey
    peer_id: str

    @classmethod
    def generate(cls) -> Identity:
        """Make a new identity from the operating system's randomness."""
        return cls._of(Ed25519PrivateKey.generate())

    @classmethod
    def _of(cls, key: Ed25519PrivateKey) -> Identity:
        return cls(key, base58.b58encode(_PEER_PREFIX + _public_bytes(key)).decode())

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """Parse a libp2p private key file. Raises: HomeError."""
        if len(data) != 68 or not data.startswith(_PRIVATE_PREFIX):
            raise HomeError("not an Ed25519 libp2p private key")
        identity = cls._of(Ed25519PrivateKey.from_private_bytes(data[4:36]))
        if data[36:] != _public_bytes(identity.key):
            raise HomeError("the two halves of the key don't belong together")
        return identity

    def to_bytes(self) -> bytes:
        """The key as libp2p's daemon reads it."""
        raw = self.key.private_bytes(
            serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
        )
        return _PRIVATE_PREFIX + raw + _public_bytes(self.key)

    def sign(self, message: bytes) -> bytes:
        """64 bytes that only the owner of `peer_id` can make for this message."""
        return self.key.sign(message)


def verify(peer_id: str, message: bytes, signature: bytes) -> None:
    """Check that the owner of `peer_id` signed `message`.

    Raises:
        RecordError: the signature is wrong, or the peer id is not an Ed25519 one.
    """
    # Before decoding: base58 takes quadratic time, and its decoder tolerates white space at the end.
    raw = base58.b58decode(peer_id) if _PEER_ID.fullmatch(peer_id) else b""
    if len(raw) != 38 or not raw.startswith(_PEER_PREFIX):
        raise RecordError(f"{peer_id[:60]!r} is not the peer id of an Ed25519 key")
    try:
        Ed25519PublicKey.from_public_bytes(raw[6:]).verify(signature, message)
    except InvalidSignature:
        raise RecordError(f"not signed by {peer_id}") from None


def load_or_create_identity(path: Path) -> Identity:
    """Read the identity kept at `path`, or make one and keep it there, readable by its owner alone.

    Raises:
        HomeError: the file can't be read or written, or holds something else.
    """
    return _load(path) or _create(path)


@contextlib.contextmanager
def throwaway_identity() -> Iterator[tuple[Identity, Path]]:
    """A new identity, and the file that holds it meanwhile for the daemon to read.

    Raises:
        HomeError: no temporary file can be made.
    """
    identity = Identity.generate()
    try:
        file = tempfile.NamedTemporaryFile(prefix="blocktrain-visitor-")  # noqa: SIM115 - mode 0600
        file.write(identity.to_bytes())
        file.flush()
    except OSError as error:
        raise HomeError(f"{tempfile.gettempdir()}: can't be written: {error.strerror}; set TMPDIR") from None
    with file:
        yield identity, Path(file.name)


def _load(path: Path) -> Identity | None:
    try:
        return Identity.from_bytes(path.read_bytes())
    except FileNotFoundError:
        return None
    except HomeError as error:
        raise HomeError(f"{path}: {error}; move it away to get a new identity") from None
    except OSError as error:
        raise HomeError(f"{path}: can't be read: {error.strerror}") from None


def _create(path: Path) -> Identity:
    identity = Identity.generate()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.") as file:  # mode 0600
            file.write(identity.to_bytes())
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                # Unlike a rename, a link never replaces a key that another process just made.
                path.hardlink_to(file.name)
                return identity
    except OSError as error:
        raise HomeError(f"{path}: can't be written: {error.strerror}; choose another --home") from None
    made_by_another = _load(path)
    if made_by_another is None:
        raise HomeError(f"{path}: a link that leads nowhere; remove it")
    return made_by_another


def _public_bytes(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
