"""A node's place among the others: its record, the run's specification, and leaving."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math

from blocktrain.dht.directory import SPEC_TTL_S
from blocktrain.dht.swarm import dht_time
from blocktrain.node.work import Work
from blocktrain.protocol.command import program_version
from blocktrain.protocol.errors import NetworkError, RecordError
from blocktrain.protocol.records import MAX_ADDRESSES, PeerRecord

log = logging.getLogger(__name__)
LEAVE_S = 3.0


async def advertise(work: Work) -> None:
    """Renew this node's record well before it expires, and at once when there is news."""
    while True:
        work.news.clear()
        try:
            if not await work.session.directory.publish(await _record(work, leaving=False)):
                log.warning("no node of the DHT took this node's record; trying again soon")
            await work.look()
        except (NetworkError, RecordError) as error:
            log.warning("could not renew this node's record: %s", error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(work.session.directory.ttl_s / 3):
                await work.news.wait()


async def keep_specification(work: Work) -> None:
    """Keep the run's specification in the DHT: it must not depend on whoever published it first."""
    while True:
        await asyncio.sleep(SPEC_TTL_S / 3 * work.rng.uniform(0.7, 1.0))
        try:
            await work.session.directory.publish_run()
        except NetworkError as error:
            log.warning("could not renew the run's specification: %s", error)


async def await_nodes(work: Work, count: int) -> None:
    """Begin together: wait until so many nodes, we included, are in the directory."""
    seen = -1
    while count > 1 and (here := sum(map(len, work.known.values()))) < count:
        if here != seen:
            log.info("waiting for %d nodes; %d are here", count, here)
            seen = here
        await asyncio.sleep(0.2)
        with contextlib.suppress(NetworkError):
            await work.look()


async def withdraw(work: Work) -> None:
    """Tell the others that this node is gone; gives up after a few seconds, so that stopping never hangs."""
    try:
        async with asyncio.timeout(LEAVE_S):
            await work.session.directory.publish(await _record(work, leaving=True))
    except TimeoutError:
        log.warning("could not withdraw this node's record: no answer within %.0f s", LEAVE_S)
    except (NetworkError, RecordError) as error:
        log.warning("could not withdraw this node's record: %s", error)


async def _record(work: Work, *, leaving: bool) -> PeerRecord:
    progress, trainer = work.trainer.progress, work.trainer
    ce = progress.denoising_ce
    return PeerRecord(
        block=work.block,
        round=trainer.round,
        step=progress.step,
        tokens_per_s=work.tokens_per_s,
        denoising_ce=None if ce is None or not math.isfinite(ce) else round(ce, 4),
        anchor=trainer.anchor,
        addresses=(await work.session.swarm.addresses())[:MAX_ADDRESSES],
        version=program_version(),
        time=dht_time(),
        resting=work.resting or bool(work.pauses.reasons),
        leaving=leaving,
    )
