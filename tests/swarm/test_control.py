"""The socket by which a node that runs is told to pause, to go on, and to say how it is."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path

import pytest

from blocktrain.node import control as module
from blocktrain.node.control import SOCKET, Now, control, serve_control
from blocktrain.node.options import NodeOptions
from blocktrain.node.pauses import Pauses
from blocktrain.protocol.errors import HomeError, UsageError


def asking(home: Path, action: str, *, json: bool = False) -> NodeOptions:
    return NodeOptions(action=action, home=str(home), json=json)


def now_in(home: Path) -> Now:
    home.mkdir(parents=True, exist_ok=True)
    return Now(home, "12D3KooWme", Pauses())


async def test_pause_resume_and_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = now_in(tmp_path)
    async with serve_control(now):
        assert stat.S_IMODE((tmp_path / SOCKET).stat().st_mode) == 0o600
        assert await control(asking(tmp_path, "pause")) == 0
        assert not now.pauses.awake.is_set()
        assert await control(asking(tmp_path, "pause")) == 0
        assert await control(asking(tmp_path, "status")) == 0
        assert await control(asking(tmp_path, "resume")) == 0
        assert now.pauses.awake.is_set()
        assert await control(asking(tmp_path, "status", json=True)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[1] == f"{tmp_path}: paused: asked to"
    assert any(line.split() == ["phase", "joining"] for line in lines)
    assert lines[-2] == f"{tmp_path}: training goes on"
    assert '"paused": []' in lines[-1]
    assert not (tmp_path / SOCKET).exists()


@pytest.mark.parametrize(
    "request_bytes",
    [b"", b"\n", b"hello\n", b'{"do": 1}\n', b"[" * 4000 + b"\n", b"x" * 200_000, b"\xff\xfe\n", b'"stop"\n'],
)
async def test_nonsense_does_no_harm(tmp_path: Path, request_bytes: bytes) -> None:
    now = now_in(tmp_path)
    async with serve_control(now):
        reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET)
        writer.write(request_bytes)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        assert await control(asking(tmp_path, "status")) == 0
    assert now.pauses.awake.is_set()


async def test_one_that_says_nothing_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.1)
    async with serve_control(now_in(tmp_path)):
        reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_what_a_killed_node_left_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / SOCKET))
    with pytest.raises(HomeError, match="no node runs in"):
        await control(asking(tmp_path, "status"))
    async with serve_control(now_in(tmp_path)):
        assert await control(asking(tmp_path, "status")) == 0


async def test_a_long_path_works(tmp_path: Path) -> None:
    home = tmp_path / ("long-" * 30)
    async with serve_control(now_in(home)):
        assert await control(asking(home, "pause")) == 0
    assert not (home / SOCKET).exists()


async def test_without_a_home_the_only_node_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    homes = [tmp_path / ".blocktrain" / f"node-{n}" for n in (1, 2)]
    with pytest.raises(HomeError, match=r"no node runs in ~/\.blocktrain"):
        await control(NodeOptions(action="status"))
    async with serve_control(now_in(homes[0])):
        assert await control(NodeOptions(action="pause")) == 0
        assert str(homes[0]) in capsys.readouterr().out
        async with serve_control(now_in(homes[1])):
            with pytest.raises(UsageError, match=r"node-1, .*node-2"):
                await control(NodeOptions(action="pause"))


async def test_an_answer_that_makes_no_sense_is_one_line(tmp_path: Path) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"[1, 2]\n")
        writer.close()

    async with await asyncio.start_unix_server(babble, tmp_path / SOCKET):
        with pytest.raises(HomeError, match="answered nonsense"):
            await control(asking(tmp_path, "status"))
