"""The libp2p daemon (`p2pd`, shipped inside hivemind) as a child process that can't outlive us.

hivemind starts it too, but hides why it failed and leaves it running when its parent is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import hivemind.hivemind_cli
import psutil
from hivemind.p2p import P2P, P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from blocktrain.protocol.errors import DaemonError

log = logging.getLogger(__name__)
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 3.0
_FOLDER_PREFIX = "blocktrain-p2p-"
_PR_SET_PDEATHSIG = 1
_PORT_IN_USE = "the port is in use; choose another --listen address or stop the other program"
_BANNER = ("Control socket:", "Peer ID:", "Peer Addrs:", "/")
"""How the lines begin that p2pd prints when all is well."""
_LINE_BYTES = 1_048_576


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """Where the daemon listens and what it tells others."""

    identity: Path
    """libp2p private key file; it must exist."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddrs to listen on; port 0 lets the system choose."""
    announce: tuple[str, ...] = ()
    """Multiaddrs to tell others instead of those found on the interfaces."""


@contextlib.asynccontextmanager
async def run_daemon(config: DaemonConfig, group: asyncio.TaskGroup) -> AsyncIterator[P2P]:
    """Start p2pd, wait until it answers, give hivemind's client of it, stop it at the end.

    A task in `group` follows what it prints; if it dies, that task fails with DaemonError.

    Raises:
        DaemonError: it did not start; the message says why in one line.
    """
    _sweep_folders_of_the_dead()
    for address in config.listen:
        check_port(address)
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-"))
    try:
        process = await _spawn(config, folder)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        follower = group.create_task(_follow(process, ready), name="p2pd output")
        try:
            p2p = await _connect(folder, ready)
            try:
                yield p2p
            finally:
                p2p._terminate()
                control = p2p._client.control  # its tasks may have failed with the daemon; nobody else asks
                await asyncio.gather(control._read_task, control._write_task, return_exceptions=True)
        finally:
            follower.cancel()
            await asyncio.shield(_stop(process))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_port(address: str) -> None:
    """Refuse a TCP port that is taken: libp2p would share it with another daemon and hear half of the calls.

    Raises:
        DaemonError: names the address.
    """
    _, family, host, protocol, port, *_ = [*address.split("/"), "", "", "", ""]
    kinds = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}
    if protocol != "tcp" or family not in kinds or port == "0":
        return
    with socket.socket(kinds[family], socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended don't count
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise DaemonError(f"{address}: {_PORT_IN_USE}") from None


async def _spawn(config: DaemonConfig, folder: Path) -> asyncio.subprocess.Process:
    binary = Path(hivemind.hivemind_cli.__file__).parent / "p2pd"
    arguments = [
        f"-listen=/unix{folder}/daemon.sock",
        f"-id={config.identity}",
        f"-hostAddrs={','.join(config.listen)}",
        "-dhtServer=1",  # lets peers find each other's addresses by peer id
        "-b=0",  # we dial the initial peers ourselves, to know which failed and why
        "-natPortMap=0",
        "-relayService=0",  # ours has no limit of 128 KiB and two minutes (dht/circuit.py)
        f"-idleTimeout={START_TIMEOUT_S:.0f}s",
    ]
    if config.announce:
        arguments.append(f"-announceAddrs={','.join(config.announce)}")
    try:
        return await asyncio.create_subprocess_exec(
            str(binary),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LINE_BYTES,
            env=os.environ | {"GOLOG_LOG_LEVEL": "error"},
            start_new_session=True,  # Ctrl-C in the terminal is for us; we stop the daemon last
            preexec_fn=die_with_parent(),
        )
    except OSError as error:
        raise DaemonError(f"{binary} can't be run: {error.strerror}; reinstall hivemind") from None


def die_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn` after which the kernel kills the child as soon as the thread that made it ends.

    None where the system has no such thing (it is Linux's `PR_SET_PDEATHSIG`).
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def set_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return set_death_signal


async def _follow(process: asyncio.subprocess.Process, ready: asyncio.Future[None]) -> None:
    assert process.stdout is not None
    last_words: deque[str] = deque(maxlen=20)
    while line := await process.stdout.readline():
        text = line.decode(errors="replace").strip()
        if not text.startswith(_BANNER):
            last_words.append(text)
        log.debug("p2pd: %s", text)
        if text.startswith("Peer ID:") and not ready.done():
            ready.set_result(None)
    if ready.done():
        code = await process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        raise DaemonError(f"the libp2p daemon {how}: {_reason(last_words)}")
    ready.set_exception(DaemonError(f"the libp2p daemon did not start: {_reason(last_words)}"))


async def _connect(folder: Path, ready: asyncio.Future[None]) -> P2P:
    """A hivemind P2P object on our own daemon, its sockets in our own folder."""

    class HereP2P(P2P):
        _UNIX_SOCKET_PREFIX = f"/unix{folder}/"

    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await ready
            return await HereP2P.replicate(Multiaddr(f"/unix{folder}/daemon.sock"))
    except TimeoutError:
        raise DaemonError(f"the libp2p daemon did not answer within {START_TIMEOUT_S:.0f} s") from None
    except (OSError, asyncio.IncompleteReadError, P2PDaemonError) as error:
        raise DaemonError(f"the libp2p daemon can't be talked to: {str(error)[:200]}") from None


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _reason(last_words: deque[str]) -> str:
    text = " ".join(last_words)[-400:] or "it said nothing"
    if "address already in use" in text:
        return f"{_PORT_IN_USE} ({text})"
    if "cannot assign requested address" in text:
        return f"this machine does not have that address; choose another --listen address ({text})"
    return text


def _sweep_folders_of_the_dead() -> None:
    """Remove what processes that were killed could not remove themselves."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        pid = folder.name.removeprefix(_FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
