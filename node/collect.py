"""Collecting a whole model from a swarm: every block's anchor, with the table it was trained with.

Shapes: D = d_model, V = vocabulary.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktrain.dht.directory import Holder
from blocktrain.dht.session import Session
from blocktrain.model.block import Block
from blocktrain.model.composition import LocalModel
from blocktrain.node.fetch import BLOCK_PREFIX, Wanted, fetch_state, strip_prefix, wanted_block, wanted_table
from blocktrain.node.progress import Report, transfer_bar
from blocktrain.node.vector import ParameterVector
from blocktrain.protocol.command import first_known
from blocktrain.protocol.errors import TransferError
from blocktrain.protocol.spec import RunSpec

log = logging.getLogger(__name__)
PARALLEL = 4
"""Blocks that are downloaded at once."""


@dataclass(frozen=True, slots=True)
class CollectedModel:
    """A whole model in this process, and how far each of its blocks is."""

    model: LocalModel
    rounds: tuple[int, ...]
    """Rounds that each block's anchor has behind it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One block as its holder gave it."""

    block: Block
    table_VD: Tensor
    round: int


async def collect_model(session: Session, device: torch.device) -> CollectedModel:
    """Download every block and its table, several at once, each from its furthest holder that works.

    Raises:
        TransferError: a block has no holder, or none that gave it whole and sound; the message names it.
        NetworkError: the DHT hangs.
    """
    spec = session.spec
    holders = await session.directory.holders()
    for block in sorted(holders):
        if not holders[block]:
            raise TransferError(
                f"nobody holds block {block} of run {spec.name}, and a model needs all {spec.model.blocks}; "
                "start a node for it (see who holds what with blocktrain-peers)"
            )
    slots = asyncio.Semaphore(PARALLEL)
    with transfer_bar(f"{len(holders)} blocks") as bar:
        total = _Total(bar)

        async def collect(block: int) -> Piece:
            async with slots:
                return await _collect_block(session, block, holders[block], total)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(collect(block)) for block in sorted(holders)]
        except ExceptionGroup as errors:
            raise first_known(errors) or errors from None
    return assemble(spec, [task.result() for task in tasks], device)


def assemble(spec: RunSpec, pieces: Sequence[Piece], device: torch.device) -> CollectedModel:
    """The model made of one piece for each block, in order, on a device."""
    blocks = tuple(piece.block.to(device).eval().requires_grad_(False) for piece in pieces)
    tables = tuple(piece.table_VD.to(device) for piece in pieces)
    return CollectedModel(LocalModel(spec, blocks, tables), tuple(piece.round for piece in pieces))


def empty_table(spec: RunSpec) -> Tensor:
    """A table of this run's shape (V, D) and type, without values."""
    return torch.empty(spec.model.vocabulary_size, spec.model.d_model, device="meta")


def named_parameters(block: Block) -> dict[str, Tensor]:
    """A block's parameters under the names that they have on the network and in files."""
    return {BLOCK_PREFIX + name: parameter.detach() for name, parameter in block.named_parameters()}


def load_parameters(block: Block, tensors: Mapping[str, Tensor]) -> None:
    """Set a block's parameters from tensors of the right names and shapes."""
    block.load_state_dict(strip_prefix(tensors))


async def _collect_block(session: Session, index: int, holders: Sequence[Holder], total: _Total) -> Piece:
    spec = session.spec
    block = Block(spec.model, spec.noise.sigma_data)

    donors = sorted(holders, key=lambda h: (-h.record.round, h.age_s))
    wanted = wanted_block(index, ParameterVector(block))
    tensors, state, donor = await fetch_state(session, wanted, donors, total.part(wanted))
    load_parameters(block, tensors)
    # The copy that the block was trained with comes from the same holder, as long as it is there.
    donors.sort(key=lambda h: h.peer_id != donor.peer_id)
    wanted = wanted_table(index, empty_table(spec))
    table, _, _ = await fetch_state(session, wanted, donors, total.part(wanted))
    log.info("block %d: round %d, from peer %s", index, state.round, donor.peer_id[:16])
    return Piece(block, table["table"], state.round)


class _Total:
    """One bar for several downloads: the sum of what they report."""

    def __init__(self, bar: Report) -> None:
        self._bar = bar
        self._parts: dict[tuple[int, str], tuple[int, int]] = {}

    def part(self, wanted: Wanted) -> Report:
        """Where one of the downloads reports."""
        name = wanted.block, wanted.what

        def report(done: int, size: int) -> None:
            self._parts[name] = done, size
            self._bar(sum(d for d, _ in self._parts.values()), sum(s for _, s in self._parts.values()))

        return report
