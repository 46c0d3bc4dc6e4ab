"""How a long-running command is asked to stop, and how it is made to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator

from blocktrain.protocol.command import INTERRUPTED

log = logging.getLogger(__name__)


class Stop:
    """What the first SIGINT or SIGTERM does: until work begins it cancels, then it asks the node to leave."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._preparing = asyncio.current_task()

    def prepare(self) -> None:
        """From now on a signal cancels the calling task, as there is nothing yet that could leave."""
        self._preparing = asyncio.current_task()

    def work_begins(self) -> None:
        """From now on the node leaves in its own way."""
        self._preparing = None

    def on_signal(self) -> None:
        """Ask once; the second time end the process, and the kernel ends its children."""
        if self.asked.is_set():
            os._exit(INTERRUPTED)
        log.info("stopping; once more to stop at once")
        self.asked.set()
        if self._preparing is not None:
            self._preparing.cancel()


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Route SIGINT and SIGTERM to a `Stop`."""
    stop, loop = Stop(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.on_signal)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
