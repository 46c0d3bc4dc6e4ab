"""The folder in which a node keeps its identity and checkpoints, held by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from blocktrain.protocol.errors import HomeError

DEFAULT_PARENT = Path("~/.blocktrain")
_LOCK = "lock"
_PORT_FILE = "port"
_ANY_PORT = "/tcp/0"


@contextlib.contextmanager
def hold_home(chosen: str, kind: str) -> Iterator[Path]:
    """A folder that no other process holds meanwhile, made if need be.

    That is the chosen one, or else the first free one of `~/.blocktrain/<kind>-1`, `-2`, …

    Raises:
        HomeError: it can't be made or written, or another process holds the chosen one.
    """
    if chosen:
        candidates: Iterator[Path] = iter([expand_home(Path(chosen))])
    else:
        candidates = (expand_home(DEFAULT_PARENT) / f"{kind}-{n}" for n in itertools.count(1))
    for folder in candidates:
        lock = _try_lock(folder)
        if lock is not None:
            try:
                yield folder
            finally:
                os.close(lock)  # and with it the lock; the kernel does the same after a kill
            return
    raise HomeError(
        f"{chosen} is in use by process {_holder(expand_home(Path(chosen)))}; give another --home"
    )


def with_last_port(home: Path, listen: tuple[str, ...]) -> tuple[str, ...]:
    """`listen` with ports that are left to the system (0) replaced by the one that it chose last time."""
    try:
        port = (home / _PORT_FILE).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return listen
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return listen
    return tuple(a.removesuffix("0") + port if a.endswith(_ANY_PORT) else a for a in listen)


def remember_port(home: Path, addresses: tuple[str, ...]) -> None:
    """Keep the TCP port of these addresses, so that they survive a restart. Raises: HomeError."""
    own = [a for a in addresses if "/tcp/" in a and "/p2p-circuit" not in a]
    try:
        if own:
            (home / _PORT_FILE).write_text(own[0].split("/tcp/")[1].split("/")[0] + "\n")
    except OSError as error:
        raise HomeError(f"{home / _PORT_FILE}: can't be written: {error.strerror}") from None


def expand_home(folder: Path) -> Path:
    """The folder with a leading `~` replaced. Raises: HomeError."""
    try:
        return folder.expanduser()
    except RuntimeError:
        raise HomeError(f"{folder}: there is no such user here; choose another --home") from None


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock, or None when another process does. Raises: HomeError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise HomeError(f"{folder}: can't be written: {error.strerror}; choose another --home") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise HomeError(f"{folder}: can't be written: {error.strerror}; choose another --home") from None
    return descriptor


def _holder(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / _LOCK).read_text()[:10] or "?"
    return "?"
