"""What happens in a node, as JSON lines for programs: one object a line, `event` and `time` in each."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from blocktrain.protocol.errors import HomeError


class EventLog:
    """Writes events to a stream, or nowhere."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, event: str, **fields: object) -> None:
        """Write one event. A reader that went away doesn't stop the node."""
        if self._stream is None:
            return
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields})
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


@contextlib.contextmanager
def open_events(target: str) -> Iterator[EventLog]:
    """The log for `--events`: nowhere, stdout (`-`), or the end of a file. Raises: HomeError."""
    if target in ("", "-"):
        yield EventLog(sys.stdout if target else None)
        return
    try:
        stream = Path(target).open("a", encoding="utf-8")  # noqa: SIM115  closed below
    except OSError as error:
        raise HomeError(f"--events {target}: can't be written: {error.strerror}") from None
    with stream:
        yield EventLog(stream)
