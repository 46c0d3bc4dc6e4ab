"""Where a node's first state comes from: its own checkpoint, the block's holders, or the run's seed."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path

from blocktrain.dht.directory import Holder
from blocktrain.dht.session import Session
from blocktrain.node import checkpoint
from blocktrain.node.fetch import fetch_state, strip_prefix, wanted_block, wanted_table
from blocktrain.node.progress import transfer_bar
from blocktrain.node.trainer import Trainer, TrainingThread
from blocktrain.protocol.errors import TransferError

log = logging.getLogger(__name__)
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
    index = trainer.learner.index
    with transfer_bar(f"block {index}") as bar:
        wanted = wanted_block(index, trainer.vector)
        values, state, donor = await fetch_state(session, wanted, donors, bar)
    if state.round <= trainer.round:
        raise TransferError(f"peer {donor.peer_id[:16]} claimed to be ahead and gave round {state.round}")
    values_N = trainer.vector.join(strip_prefix(values))
    await thread.call(trainer.adopt, values_N, state.round)
    first = sorted(donors, key=lambda h: h.peer_id != donor.peer_id)
    await _download_table(session, trainer, thread, first)
    return f"peer {donor.peer_id[:16]}, round {state.round}"


async def _download_table(
    session: Session, trainer: Trainer, thread: TrainingThread, donors: Sequence[Holder]
) -> None:
    for donor in donors:
        try:
            with transfer_bar("embedding table") as bar:
                wanted = wanted_table(donor.record.block, trainer.learner.table_VD)
                values, _, _ = await fetch_state(session, wanted, [donor], bar)
        except TransferError as error:
            log.warning("%s", error)
        else:
            await thread.call(trainer.set_table, values["table"].numpy())
            return
    log.warning("no node gave its embedding table; gossip will bring it along")


def _resume(trainer: Trainer, folder: Path) -> str:
    """Restore the newest usable checkpoint; in the training thread. Empty: there is none."""
    found = checkpoint.restore_newest(trainer, folder)
    return "" if found is None else f"checkpoint of round {found.round}, step {found.step}, in {folder}"


def _ahead(holders: Sequence[Holder], own_round: int) -> list[Holder]:
    return sorted(
        (h for h in holders if h.record.round > own_round), key=lambda h: (-h.record.round, h.age_s)
    )
