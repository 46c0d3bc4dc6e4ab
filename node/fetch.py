"""Fetching one named state from whichever donors give it whole and sound."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from blocktrain.dht.directory import Holder
from blocktrain.dht.manifest import State
from blocktrain.dht.session import Session
from blocktrain.dht.state import Download
from blocktrain.node.progress import Report
from blocktrain.node.vector import ParameterVector, anchor_digest
from blocktrain.protocol.errors import TensorError, TransferError
from blocktrain.protocol.spec import RunSpec
from blocktrain.protocol.tensors import check_state, decode_state

log = logging.getLogger(__name__)
BLOCK_PREFIX = "block."
"""What stands before a parameter's name on the network and in files."""
HEADER_ROOM = 1_000_000
"""Bytes that a state may have beyond its values."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to download of which block, and what it has to look like."""

    block: int
    what: str
    """`block` or `table`."""
    expected: Mapping[str, Tensor]
    check: Callable[[dict[str, Tensor], State], None] = lambda tensors, state: None
    """What else must hold. Raises: TensorError."""

    @property
    def max_bytes(self) -> int:
        """More can't be right."""
        return sum(t.numel() * t.element_size() for t in self.expected.values()) + HEADER_ROOM


def wanted_block(block: int, vector: ParameterVector) -> Wanted:
    """A block's anchor, which must fit the hash that it is advertised under."""

    def check_anchor(tensors: dict[str, Tensor], state: State) -> None:
        if anchor_digest(vector.join(strip_prefix(tensors))) != state.anchor:
            raise TensorError("the block does not fit its anchor's hash")

    return Wanted(block, "block", {BLOCK_PREFIX + n: p for n, p in vector.parameters.items()}, check_anchor)


def wanted_table(block: int, like_VD: Tensor) -> Wanted:
    """The embedding table as a holder of this block has it now."""
    return Wanted(block, "table", {"table": like_VD})


def strip_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters under the names that their module gives them."""
    return {name.removeprefix(BLOCK_PREFIX): tensor for name, tensor in tensors.items()}


async def fetch_state(
    session: Session, wanted: Wanted, donors: Sequence[Holder], report: Report
) -> tuple[dict[str, Tensor], State, Holder]:
    """Tensors of a state that is whole and sound, and a donor that had it.

    Raises:
        TransferError: there is no such donor; the message says what each one did.
    """
    unsound: list[str] = []
    while donors:
        download = Download(session.streams, wanted.block, wanted.what, wanted.max_bytes)
        try:
            state, peer_id = await download.run(donors, report)
        except TransferError as error:
            raise TransferError("; ".join([*unsound, str(error)])) from None
        donor = next(donor for donor in donors if donor.peer_id == peer_id)
        try:
            return await asyncio.to_thread(_decode, session.spec, wanted, state), state, donor
        except TensorError as error:
            names = ", ".join(signer[:16] for signer in download.signers)
            unsound.append(f"peer {names} gave an unusable {wanted.what} {wanted.block}: {error}")
            log.warning("%s", unsound[-1])
            donors = [donor for donor in donors if donor.peer_id not in download.signers]
    raise TransferError("; ".join(unsound) or f"nobody has a {wanted.what} {wanted.block} to give")


def _decode(spec: RunSpec, wanted: Wanted, state: State) -> dict[str, Tensor]:
    """The tensors in a state that has everything it has to have. Raises: TensorError."""
    tensors, metadata = decode_state(state.data, max_bytes=wanted.max_bytes)
    check_state(tensors, wanted.expected)
    if metadata.get("fingerprint") != spec.fingerprint:
        raise TensorError("it belongs to another run")
    wanted.check(tensors, state)
    return tensors
