"""Which node is meant when several homes are there."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from blocktrain.node.control import SOCKET, Now, control, serve_control
from blocktrain.node.options import NodeOptions
from blocktrain.node.pauses import Pauses
from blocktrain.protocol.errors import HomeError


def test_homes_of_killed_nodes_do_not_hide_the_only_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed node leaves its socket behind, and nobody listens there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    killed, runs = (tmp_path / ".blocktrain" / f"node-{n}" for n in (1, 2))
    for home in (killed, runs):
        home.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(killed / SOCKET))

    async def body() -> None:
        with pytest.raises(HomeError, match=r"no node runs in ~/\.blocktrain"):
            await control(NodeOptions(action="pause"))
        async with serve_control(Now(runs, "12D3KooWme", Pauses())):
            assert await control(NodeOptions(action="pause")) == 0

    asyncio.run(body())
    assert capsys.readouterr().out.startswith(f"{runs}: paused")
