"""Noticing that the machine has slept: whatever the node believed about its peers then is out of date."""

from __future__ import annotations

import asyncio
import time

from blocktrain.protocol.errors import NetworkError

TICK_S = 1.0
JUMP_S = 15.0
"""Others forget a silent node after a few such times; a busy machine does not hold a tick up so long."""


async def watch_clock() -> None:
    """Run until the machine or the process was stopped for a while, or its clock was set.

    Raises:
        NetworkError: says for how long.
    """
    while True:
        before = time.time()
        await asyncio.sleep(TICK_S)
        jump = time.time() - before - TICK_S
        if jump > JUMP_S:
            raise NetworkError(f"this node was stopped for {jump:.0f} s (was the machine asleep?)")
        if jump < -JUMP_S:
            raise NetworkError(f"this machine's clock was put back by {-jump:.0f} s")
