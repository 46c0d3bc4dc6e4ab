"""Staying in a swarm: when the network, the daemon or the machine fails, join again.

A membership that breaks is left as a whole and begun anew: there is no half-dead connection, file or
belief that could outlive the fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from blocktrain.dht.clock import watch_clock
from blocktrain.protocol.command import first_known
from blocktrain.protocol.errors import NetworkError
from blocktrain.protocol.stop import Stop

log = logging.getLogger(__name__)
T = TypeVar("T")
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
STEADY_S = 120.0
"""After a membership that lasted so long, the next fault counts as the first again."""


async def stay_joined(
    join: Callable[[asyncio.TaskGroup], AbstractAsyncContextManager[T]],
    work: Callable[[T], Awaitable[None]],
    stop: Stop,
    note: Callable[[str], None],
) -> None:
    """Join and work, and again after each fault that ends a membership, until `work` returns or `stop`.

    `note` is told the reason before each new try.

    Raises:
        BlocktrainError: joining failed the first time, or for a reason that joining again can't mend.
    """
    joined, pause_s = False, FIRST_PAUSE_S
    while not stop.asked.is_set():
        stop.prepare()
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group, join(group) as member:
                joined = True
                watch = group.create_task(watch_clock(), name="clock")
                try:
                    await work(member)
                finally:
                    watch.cancel()
            return
        except BaseExceptionGroup as failure:
            reason = first_known(failure)
            if not joined or not isinstance(reason, NetworkError):
                raise
            log.debug("the membership ended", exc_info=failure)
        if time.monotonic() - began > STEADY_S:
            pause_s = FIRST_PAUSE_S
        log.warning("%s; joining again in %.0f s", reason, pause_s)
        note(str(reason))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s * random.uniform(0.7, 1.3)):
                await stop.asked.wait()
        pause_s = min(MAX_PAUSE_S, 2 * pause_s)
