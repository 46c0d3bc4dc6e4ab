"""What happens in a node, as JSON lines for programs: one object a line, `event` and `time` in each."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from blocktrain.protocol.errors import HomeError


class EventLog:
    """Writes events to a stream, or nowhere."""

    def __init__(self, stream: TextIO | _Pipe | None) -> None:
        self._stream = stream

    def write(self, event: str, **fields: object) -> None:
        """Write one event. A reader that went away, or reads too slowly, doesn't stop the node."""
        if self._stream is None:
            return
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields})
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


class _Pipe:
    """A pipe that is never waited for: while it is full, lines are lost, but none is cut."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        """Of a line that went only in part."""

    def write(self, line: str) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._rest:
                self._rest = self._rest[os.write(self._descriptor, self._rest) :]
            data = line.encode()
            self._rest = data[os.write(self._descriptor, data) :]

    def flush(self) -> None:
        pass


@contextlib.contextmanager
def open_events(target: str) -> Iterator[EventLog]:
    """The log for `--events`: nowhere, stdout (`-`), or the end of a file. Raises: HomeError."""
    if target == "-" and (descriptor := _reopened_stdout()) is not None:
        try:
            yield EventLog(_Pipe(descriptor))
        finally:
            os.close(descriptor)
        return
    if target in ("", "-"):
        yield EventLog(sys.stdout if target else None)
        return
    try:
        stream = Path(target).open("a", encoding="utf-8")  # noqa: SIM115  closed below
    except OSError as error:
        raise HomeError(f"--events {target}: can't be written: {error.strerror}") from None
    with stream:
        yield EventLog(stream)


def _reopened_stdout() -> int | None:
    """Stdout, if it is a pipe, opened once more: not waiting must not be imposed on others that share it."""
    try:
        if stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode):
            return os.open(f"/proc/self/fd/{sys.stdout.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        pass
    return None
