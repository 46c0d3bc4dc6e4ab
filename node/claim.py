"""Taking a block without a coordinator: say which, look whether others said the same, give way if so."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from blocktrain.dht.directory import Holder
from blocktrain.dht.session import Session
from blocktrain.dht.swarm import dht_time
from blocktrain.node.placement import choose_block
from blocktrain.protocol.command import program_version
from blocktrain.protocol.errors import NetworkError, RecordError
from blocktrain.protocol.records import MAX_ADDRESSES, PeerRecord

log = logging.getLogger(__name__)
SETTLE_S = 1.0
"""Newcomers that start together see each other's claims within this time."""
MAX_LOOKS = 20
NO_ANCHOR = "0" * 32
Choice = tuple[int, str]
"""A block, and in words why this one."""


@contextlib.asynccontextmanager
async def claim_block(
    session: Session, decided: Choice | None, kept: Collection[int], rng: random.Random
) -> AsyncIterator[Choice]:
    """A block, and the reason in words; it stays claimed until the end of the `async with`.

    Unless that is decided already, it is the neediest, of equals one that this node has `kept` a state
    of. Of newcomers that crowd on one block, the one with the greatest peer id goes to a needier one,
    until nobody would be better placed elsewhere.

    Raises:
        NetworkError: the DHT hangs.
    """
    block, reason = await look_for_block(session, decided, kept, rng)
    if decided is None:
        block, reason = await _settle(session, block, reason, kept, rng)
    renewing = session.swarm.group.create_task(_renew(session, block), name="claim")
    try:
        yield block, reason
    except BaseException:
        with contextlib.suppress(NetworkError, TimeoutError):
            async with asyncio.timeout(2):
                await _publish(session, block, leaving=True)
        raise
    finally:
        renewing.cancel()


def crowded(holders: Mapping[int, Sequence[Holder]], block: int) -> bool:
    """Whether a block has two holders more than another, and one of them has not begun yet."""
    fewest = min(len(there) for there in holders.values())
    return len(holders[block]) - fewest >= 2 and any(h.record.joining for h in holders[block])


def crowded_out(holders: Mapping[int, Sequence[Holder]], block: int, me: str) -> bool:
    """Whether this newcomer is the one that has to leave its block for one with two holders fewer."""
    newcomers = [h.peer_id for h in holders[block] if h.record.joining]
    return crowded(holders, block) and me == max(newcomers)


async def look_for_block(
    session: Session, decided: Choice | None, kept: Collection[int], rng: random.Random
) -> Choice:
    """The block that is decided on, or the one that seems the neediest now. Claims nothing.

    Raises:
        NetworkError: the DHT hangs.
    """
    if decided is not None:
        return decided
    return choose_block(await session.directory.holders(joining=True), rng, kept)


async def _settle(
    session: Session, block: int, reason: str, kept: Collection[int], rng: random.Random
) -> Choice:
    me = session.swarm.peer_id
    for _ in range(MAX_LOOKS):
        await _publish(session, block)
        await asyncio.sleep(SETTLE_S * rng.uniform(0.8, 1.2))
        holders = await session.directory.holders(joining=True)
        if not crowded(holders, block):
            break
        if not crowded_out(holders, block, me):
            continue  # somebody else has to go first; then look again
        await _publish(session, block, leaving=True)
        others = {b: [h for h in there if h.peer_id != me] for b, there in holders.items()}
        log.info("others have come to block %d at the same time; choosing again", block)
        block, reason = choose_block(others, rng, kept)
    return block, reason


async def _renew(session: Session, block: int) -> None:
    while True:
        try:
            await _publish(session, block)
        except (NetworkError, RecordError) as error:
            log.warning("could not say that this node takes block %d: %s", block, error)
        await asyncio.sleep(session.directory.ttl_s / 3)


async def _publish(session: Session, block: int, *, leaving: bool = False) -> None:
    await session.directory.publish(
        PeerRecord(
            block=block,
            round=0,
            step=0,
            tokens_per_s=0.0,
            denoising_ce=None,
            anchor=NO_ANCHOR,
            addresses=(await session.swarm.addresses())[:MAX_ADDRESSES],
            version=program_version(),
            time=dht_time(),
            joining=True,
            leaving=leaving,
        )
    )
