"""Where a node's first state comes from: its own checkpoint, the block's holders, or the run's seed."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from blocktrain.dht.directory import Holder
from blocktrain.dht.session import Session
from blocktrain.dht.state import Download, State
from blocktrain.node import checkpoint
from blocktrain.node.progress import transfer_bar
from blocktrain.node.trainer import BLOCK_PREFIX, Trainer, TrainingThread
from blocktrain.node.vector import anchor_digest
from blocktrain.protocol.errors import CheckpointError, TensorError, TransferError
from blocktrain.protocol.tensors import check_state, decode_state

log = logging.getLogger(__name__)
HEADER_ROOM = 1_000_000
"""Bytes that a state may have beyond its values."""
RETRY_S = 3.0


async def acquire_state(session: Session, trainer: Trainer, thread: TrainingThread, folder: Path) -> str:
    """Give the trainer the newest state that can be had; says in words where it came from.

    Raises:
        TransferError: the block has live holders that are ahead, and none of them gave its state.
    """
    origin = await thread.call(_resume, trainer, folder)
    patience_s = 2 * session.directory.ttl_s  # a killed holder's record is gone by then
    started = asyncio.get_running_loop().time()
    while True:
        holders = await session.directory.holders()
        ahead = _ahead(holders[trainer.learner.index], trainer.round)
        if not ahead:
            break
        try:
            return await download_block(session, trainer, thread, ahead)
        except TransferError as error:
            if asyncio.get_running_loop().time() - started > patience_s:
                raise
            log.warning("%s; trying again", error)
            await asyncio.sleep(RETRY_S)
    others = [h for h in itertools.chain(*holders.values()) if h.record.round > trainer.round]
    if not origin and others:
        await _download_table(session, trainer, thread, others)
    return origin or "the run's seed (nobody is ahead of it)"


async def download_block(
    session: Session, trainer: Trainer, thread: TrainingThread, donors: Sequence[Holder]
) -> str:
    """Replace the trainer's block and table by those of the furthest donor. Raises: TransferError."""
    values, state, donor = await fetch_state(
        session, trainer.learner.index, "block", donors, _block_of(trainer)
    )
    values_N = trainer.vector.join({n.removeprefix(BLOCK_PREFIX): t for n, t in values.items()})
    if anchor_digest(values_N) != state.anchor:
        raise TransferError(f"peer {donor[:16]} gave a block that does not fit its anchor's hash")
    await thread.call(trainer.adopt, values_N, state.round)
    await _download_table(session, trainer, thread, sorted(donors, key=lambda h: h.peer_id != donor))
    return f"peer {donor[:16]}, round {state.round}"


async def _download_table(
    session: Session, trainer: Trainer, thread: TrainingThread, donors: Sequence[Holder]
) -> None:
    for donor in donors:
        try:
            values, _, _ = await fetch_state(
                session, donor.record.block, "table", [donor], _table_of(trainer)
            )
            await thread.call(trainer.set_table, values["table"].numpy())
            return
        except TransferError as error:
            log.warning("%s", error)
    log.warning("no node gave its embedding table; starting from the run's seed, gossip will bring it along")


async def fetch_state(
    session: Session, block: int, what: str, donors: Sequence[Holder], expected: dict[str, Tensor]
) -> tuple[dict[str, Tensor], State, str]:
    """Named tensors of a holder's `block` or `table`, checked against `expected`, and who gave them.

    Raises:
        TransferError: no donor gave a whole and sound state.
    """
    limit = sum(t.numel() * t.element_size() for t in expected.values()) + HEADER_ROOM
    with transfer_bar(f"{what} {block}" if what == "block" else f"table from block {block}") as bar:
        state, donor = await Download(session.streams, block, what, limit).run(donors, bar)
    try:
        tensors, metadata = decode_state(state.data, max_bytes=limit)
        check_state(tensors, expected)
    except TensorError as error:
        raise TransferError(f"peer {donor[:16]} gave an unusable {what} state: {error}") from None
    if metadata.get("fingerprint") != session.spec.fingerprint:
        raise TransferError(f"peer {donor[:16]} gave the {what} state of another run")
    return tensors, state, donor


def _resume(trainer: Trainer, folder: Path) -> str:
    """Restore the newest usable checkpoint; in the training thread. Empty: there is none."""
    found = checkpoint.load_newest(folder)
    if found is None:
        return ""
    try:
        checkpoint.restore(trainer, found)
    except CheckpointError as error:
        log.warning("checkpoint in %s skipped: %s", folder, error)
        return ""
    return f"checkpoint of round {found.round}, step {found.step}, in {folder}"


def _ahead(holders: Sequence[Holder], own_round: int) -> list[Holder]:
    return sorted(
        (h for h in holders if h.record.round > own_round), key=lambda h: (-h.record.round, h.age_s)
    )


def _block_of(trainer: Trainer) -> dict[str, Tensor]:
    return {BLOCK_PREFIX + n: t for n, t in trainer.vector.named(trainer.anchor_N).items()}


def _table_of(trainer: Trainer) -> dict[str, Tensor]:
    return {"table": torch.empty_like(trainer.learner.table_VD, device="cpu")}
