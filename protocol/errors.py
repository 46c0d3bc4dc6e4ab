"""The one exception tree of the project.

Whatever a peer sends, a file holds or a user types is turned into one of these; nothing else may
leave the code that reads it. `exit_code` is what a command returns when the error reaches it.
"""

from __future__ import annotations


class BlocktrainError(Exception):
    """Base of all errors that this project raises on purpose. The message is one line."""

    exit_code = 1


class UsageError(BlocktrainError):
    """The caller gave something unusable. The message names the part and the fix; nothing was changed."""

    exit_code = 2


class SpecError(UsageError):
    """A run specification is not usable. The message names the field."""


class AddressError(UsageError):
    """A multiaddr can't be used. The message quotes it and says why."""


class DataError(UsageError):
    """A training text can't be used: missing, empty, too short or unreadable."""


class HomeError(BlocktrainError):
    """The home folder or a file in it can't be created, read or written."""


class IdentityInUse(BlocktrainError):
    """Another node has the same identity. Give this one another, or stop that one; waiting won't help."""


class CheckpointError(BlocktrainError):
    """A checkpoint or an exported model is damaged, foreign or too new. Try the one before."""


class WireError(BlocktrainError):
    """Bytes from the network or from a file don't decode to what was promised. Drop them."""


class RecordError(WireError):
    """A DHT record is malformed, oversized, expired, or not signed by its owner."""


class TensorError(WireError):
    """Encoded tensors have the wrong names, shapes, dtype or size, or hold NaN or infinity."""


class MessageError(WireError):
    """A message between nodes is malformed or over its limit."""


class NetworkError(BlocktrainError):
    """Something outside this process failed. Usually worth another try later."""


class DaemonError(NetworkError):
    """The libp2p daemon did not start or died. The message holds its own last words."""


class JoinError(NetworkError):
    """No initial peer let us into a swarm. The message says what each of them answered."""


class RunNotFound(JoinError):
    """A swarm let us in, but does not have the run, or not yet. Check its name, or publish it."""


class PeerError(NetworkError):
    """One peer did not answer, answered nonsense or refused. Try another one."""

    def __init__(self, peer_id: str, reason: str) -> None:
        super().__init__(f"peer {peer_id[:16]}: {reason}" if peer_id else reason)
        self.peer_id = peer_id
        self.reason = reason


class RoundAborted(NetworkError):
    """An averaging round ended without a commit; the local parameters are untouched. Train on.

    `culprits` are the peers that kept it from committing, as far as this node can tell.
    """

    def __init__(self, reason: str, culprits: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.culprits = culprits


class TransferError(NetworkError):
    """A state download could not be completed from any of its donors."""
