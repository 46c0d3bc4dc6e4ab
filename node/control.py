"""Speaking to a node that runs on this machine: a unix socket in its home, one JSON line each way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blocktrain.node.options import NodeOptions
from blocktrain.node.pauses import ASKED, Pauses
from blocktrain.node.work import Work
from blocktrain.protocol.command import print_json, program_version
from blocktrain.protocol.errors import HomeError, UsageError
from blocktrain.protocol.home import DEFAULT_PARENT, expand_home

log = logging.getLogger(__name__)
SOCKET = "control.sock"
MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 1_048_576
TIMEOUT_S = 5.0


@dataclass
class Now:
    """How it stands with this process. `work` is there once the node has a block and its state."""

    home: Path
    peer_id: str
    pauses: Pauses
    phase: str = "joining"
    work: Work | None = None
    since: float = field(default_factory=time.monotonic)

    def answer(self, wanted: str) -> dict[str, object]:
        """Do what is asked for, and say how it stands now."""
        if wanted == "pause":
            self.pauses.begin(ASKED)
        elif wanted == "resume":
            self.pauses.end(ASKED)
        return self.status()

    def status(self) -> dict[str, object]:
        """Everything that a user may want to know."""
        known: dict[str, object] = {
            "peer_id": self.peer_id,
            "pid": os.getpid(),
            "version": program_version(),
            "home": str(self.home),
            "uptime_s": round(time.monotonic() - self.since, 1),
            "phase": self._phase(),
            "paused": self.pauses.reasons,
        }
        if self.work is not None:
            spec, work = self.work.session.spec, self.work
            known |= {
                "run": spec.name,
                "fingerprint": spec.fingerprint,
                "holders": len(work.known.get(work.block, ())),
                "nodes": sum(map(len, work.known.values())),
                "bytes_received": work.session.streams.bytes("received"),
                "addresses": self._addresses(work),
                **work.status(),
            }
        return known

    @staticmethod
    def _addresses(work: Work) -> list[str]:
        """Those in this node's record, as the directory had it when it was read last."""
        own = (h.record.addresses for h in work.known.get(work.block, ()) if h.peer_id == work.me)
        return list(next(own, ()))

    def _phase(self) -> str:
        if self.work is None:
            return self.phase
        if self.pauses.reasons:
            return "paused"
        return "finished" if self.work.resting else self.phase


@contextlib.asynccontextmanager
async def serve_control(now: Now) -> AsyncIterator[None]:
    """Answer `pause`, `resume` and `status` while the block runs.

    Raises:
        HomeError: the socket can't be made.
    """
    path = now.home / SOCKET
    with contextlib.suppress(OSError):
        path.unlink()  # a killed node's; the home's lock proves that nobody listens there
    try:
        with _short(path) as address:
            before = os.umask(0o177)
            try:
                server = await asyncio.start_unix_server(_handler(now.answer), address)
            finally:
                os.umask(before)
    except OSError as error:
        raise HomeError(f"{path}: can't be made: {error.strerror}; choose another --home") from None
    try:
        yield
    finally:
        server.close()
        with contextlib.suppress(OSError):
            path.unlink()


def _handler(
    answer: Callable[[str], dict[str, object]],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                line = await reader.readuntil(b"\n")
                wanted = json.loads(line) if len(line) <= MAX_REQUEST_BYTES else None
                if wanted in ("pause", "resume", "status"):
                    writer.write(json.dumps(answer(wanted)).encode() + b"\n")
                    await writer.drain()
        except (TimeoutError, ValueError, RecursionError, OSError, EOFError, asyncio.LimitOverrunError):
            log.debug("a request on the control socket made no sense")
        finally:
            writer.close()

    return handle


async def control(options: NodeOptions) -> int:
    """Be `blocktrain-node pause|resume|status`.

    Raises:
        HomeError: no node runs there, or it does not answer.
        UsageError: several run here, and none was named.
    """
    home = expand_home(Path(options.home)) if options.home else await _only_running()
    status = await _ask(home, options.action)
    if options.json:
        print_json(status)
    elif options.action == "status":
        _show(status, Console())
    else:
        reasons = status["paused"]
        assert isinstance(reasons, list)
        print(f"{home}: {'paused: ' + ', '.join(reasons) if reasons else 'training goes on'}")
    return 0


async def _ask(home: Path, wanted: str) -> dict[str, object]:
    path = home / SOCKET
    try:
        with _short(path) as address:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(address, limit=MAX_ANSWER_BYTES)
                try:
                    writer.write(json.dumps(wanted).encode() + b"\n")
                    status = json.loads(await reader.readline())
                finally:
                    writer.close()
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        raise HomeError(f"no node runs in {home}; start one, or check --home") from None
    except TimeoutError:
        raise HomeError(f"the node in {home} did not answer within {TIMEOUT_S:.0f} s; is it busy?") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it answered nonsense"
        raise HomeError(f"{path}: can't speak to the node: {reason}") from None
    if not isinstance(status, dict) or not isinstance(status.get("paused"), list):
        raise HomeError(f"{path}: can't speak to the node: it answered nonsense")
    return status


async def _only_running() -> Path:
    """The home of the only node that runs in one of the usual places. Raises: HomeError, UsageError."""
    sockets = sorted(expand_home(DEFAULT_PARENT).glob(f"node-*/{SOCKET}"))
    found = [path.parent for path in sockets if await _is_live(path)]
    if not found:
        raise HomeError(f"no node runs in {DEFAULT_PARENT}; say where with --home")
    if len(found) > 1:
        raise UsageError(f"several nodes run here ({', '.join(map(str, found))}); choose one with --home")
    return found[0]


async def _is_live(path: Path) -> bool:
    """Whether somebody listens there: a killed node leaves its socket behind."""
    try:
        with _short(path) as address:
            async with asyncio.timeout(TIMEOUT_S):
                _, writer = await asyncio.open_unix_connection(address)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for the socket that is short enough: addresses of unix sockets end at 107 bytes."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _show(status: dict[str, Any], console: Console) -> None:
    """The status as a table of two columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in status.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {count:,}" for key, count in value.items()) or "none"
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "no"
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "pid":
            digits = 4 if name == "denoising_ce" else 1
            value = f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"
        table.add_row(name.replace("_", " "), "-" if value is None else str(value))
    console.print(table, highlight=False, soft_wrap=True)
