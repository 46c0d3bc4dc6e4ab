"""The libp2p daemon as our child: why it doesn't start, and that neither of us outlives the other."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hivemind.hivemind_cli
import psutil
import pytest

from blocktrain.dht.daemon import DaemonConfig, run_daemon
from blocktrain.protocol.errors import DaemonError
from blocktrain.protocol.identity import load_or_create_identity
from tests.swarm.members import LOOPBACK, child, daemons

pytestmark = pytest.mark.slow


@pytest.fixture
def identity(tmp_path: Path) -> Path:
    load_or_create_identity(tmp_path / "identity")
    return tmp_path / "identity"


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The daemons' folders of this test alone; short, since a socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


def folders() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("blocktrain-p2p-*"))


async def reason(config: DaemonConfig) -> str:
    """Why the daemon did not start, in one line."""
    errors: list[DaemonError] = []
    try:
        async with asyncio.TaskGroup() as group, run_daemon(config, group):
            pytest.fail("it started")
    except* DaemonError as found:
        errors += [e for e in found.exceptions if isinstance(e, DaemonError)]
    assert len({str(e) for e in errors}) == 1
    assert "\n" not in str(errors[0])
    assert not folders()
    return str(errors[0])


async def test_it_is_our_only_child_and_leaves_nothing(identity: Path) -> None:
    """hivemind's own host processes are forks, and ignore Ctrl-C (faults 8 and 19)."""
    handler = signal.getsignal(signal.SIGINT)
    async with (
        asyncio.TaskGroup() as group,
        run_daemon(DaemonConfig(identity, (LOOPBACK,)), group) as p2p,
    ):
        (daemon,) = daemons()
        assert psutil.Process().children(recursive=True) == [daemon]
        assert "/ip4/127.0.0.1/tcp/" in str(await p2p.get_visible_maddrs())
        assert len(folders()) == 1
    assert signal.getsignal(signal.SIGINT) is handler
    assert not daemon.is_running()
    assert not folders()


async def test_a_port_in_use_is_named(identity: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        assert "the port is in use; choose another --listen address" in await reason(
            DaemonConfig(identity, (listen,))
        )


async def test_a_port_of_another_daemon_is_not_shared(identity: Path, tmp_path: Path) -> None:
    """libp2p sets SO_REUSEPORT: two daemons would take turns in answering, and neither would know."""
    load_or_create_identity(tmp_path / "other")
    async with (
        asyncio.TaskGroup() as group,
        run_daemon(DaemonConfig(identity, (LOOPBACK,)), group) as p2p,
    ):
        (address,) = map(str, await p2p.get_visible_maddrs())
        listen = address.rpartition("/p2p/")[0]
        with pytest.raises(DaemonError, match=f"{listen}: the port is in use; choose another --listen"):
            async with run_daemon(DaemonConfig(tmp_path / "other", (listen,)), group):
                pytest.fail("it started")


async def test_an_address_of_another_machine_is_named(identity: Path) -> None:
    found = await reason(DaemonConfig(identity, ("/ip4/192.0.2.1/tcp/0",)))
    assert "this machine does not have that address" in found


@pytest.fixture
def damaged_identity(identity: Path) -> Path:
    identity.write_bytes(b"\x08\x01 not a key")
    return identity


async def test_a_damaged_identity_is_an_error(damaged_identity: Path) -> None:
    assert "did not start" in await reason(DaemonConfig(damaged_identity, (LOOPBACK,)))


async def test_a_missing_binary_is_an_error_that_says_what_to_do(
    identity: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hivemind.hivemind_cli, "__file__", str(tmp_path / "__init__.py"))
    found = await reason(DaemonConfig(identity, (LOOPBACK,)))
    assert re.search(r"p2pd can't be run: No such file or directory; reinstall hivemind", found)


async def test_its_death_ends_the_task_group_at_once(identity: Path) -> None:
    """With hivemind, everything hangs when a child dies (fault 10)."""
    caught: list[BaseException] = []
    try:
        async with asyncio.TaskGroup() as group, run_daemon(DaemonConfig(identity, (LOOPBACK,)), group):
            killed = time.monotonic()
            daemons()[0].kill()
            await asyncio.Event().wait()
    except* DaemonError as errors:
        caught += errors.exceptions
    assert time.monotonic() - killed < 3
    assert [str(e) for e in caught] == ["the libp2p daemon was killed by signal 9: it said nothing"]
    assert not folders()


async def test_it_dies_with_a_killed_parent_and_its_folder_is_swept_later(
    identity: Path, tmp_path: Path
) -> None:
    """hivemind's children live on and still join rounds (fault 9)."""
    async with child("idle", tmp_path) as (process, known):
        daemon = psutil.Process(known["daemon"])
        assert daemon.name() == "p2pd"
        process.kill()
        await asyncio.to_thread(psutil.wait_procs, [daemon], 5)
    assert not daemon.is_running()
    assert len(folders()) == 1
    async with asyncio.TaskGroup() as group, run_daemon(DaemonConfig(identity, (LOOPBACK,)), group):
        assert [f.name.split("-")[2] for f in folders()] == [str(os.getpid())]
