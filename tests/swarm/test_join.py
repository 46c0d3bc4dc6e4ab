"""Becoming a member: which initial peers let us in, and what is said of those that don't."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hivemind.p2p import P2P

from blocktrain.dht import greeting
from blocktrain.dht.daemon import DaemonConfig
from blocktrain.dht.swarm import JoinConfig, join_swarm
from blocktrain.protocol.errors import JoinError, PeerError
from blocktrain.protocol.identity import Identity, load_or_create_identity
from tests.swarm.members import LOOPBACK, child, members

pytestmark = pytest.mark.slow


async def join(folder: Path, *peers: str, timeout_s: float = 0.5) -> int:
    """Join and leave; how many initial peers the DHT knows then. Raises: JoinError."""
    identity = load_or_create_identity(folder / "joiner")
    config = JoinConfig(DaemonConfig(folder / "joiner", (LOOPBACK,)), peers, timeout_s)
    known = -1
    errors: list[JoinError] = []
    try:
        async with asyncio.TaskGroup() as group, join_swarm(identity, config, group) as swarm:
            known = len(swarm.dht.protocol.routing_table.uid_to_peer_id)
    except* JoinError as found:
        errors += [e for e in found.exceptions if isinstance(e, JoinError)]
    if errors:
        raise errors[0]
    return known


def nobody_listens() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.generate().peer_id}"


async def test_every_peer_that_does_not_answer_is_named_with_its_reason(tmp_path: Path) -> None:
    refused = nobody_listens()
    async with members(1, tmp_path) as (member,):
        (address,) = await member.swarm.addresses()
        other = address.replace(member.peer_id, Identity.generate().peer_id)
        with pytest.raises(JoinError) as caught:
            await join(tmp_path, refused, other, timeout_s=2.0)  # libp2p says less when it is tried again
    assert str(caught.value).startswith("no initial peer could be reached")
    assert f"{refused}: connection refused: nothing listens there" in str(caught.value)
    assert f"{other}: another peer answers at this address" in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_one_live_peer_among_dead_ones_is_enough(tmp_path: Path) -> None:
    async with members(1, tmp_path) as (member,):
        assert await join(tmp_path, nobody_listens(), *await member.swarm.addresses()) == 1


async def test_a_peer_that_comes_up_later_is_found_by_trying_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, greet = asyncio.Event(), greeting._greet

    async def noticed(p2p: P2P, addresses: Sequence[str]) -> float | str:
        answer = await greet(p2p, addresses)
        tried.set()
        return answer

    monkeypatch.setattr(greeting, "_greet", noticed)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    late = load_or_create_identity(tmp_path / "late")
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{late.peer_id}"
    joining = asyncio.create_task(join(tmp_path, address, timeout_s=15.0))
    await tried.wait()
    config = JoinConfig(DaemonConfig(tmp_path / "late", (f"/ip4/127.0.0.1/tcp/{port}",)))
    async with asyncio.TaskGroup() as group, join_swarm(late, config, group):
        assert await joining == 1


async def test_its_own_address_is_no_initial_peer(tmp_path: Path) -> None:
    own = load_or_create_identity(tmp_path / "joiner").peer_id
    assert await join(tmp_path, f"/ip4/127.0.0.1/tcp/1/p2p/{own}") == 0


async def test_a_clock_that_is_off_is_named_but_one_wrong_peer_keeps_nobody_out(tmp_path: Path) -> None:
    async with child("idle", tmp_path, clock_offset_s=10) as (_, known):
        (fast,) = known["addresses"]
        with pytest.raises(JoinError, match=r"your clock is -(9|10)\.\d s off the swarm's; set it"):
            await join(tmp_path, fast)
        checking = ("-m", "blocktrain.node.cli", "--check", "--json", "--initial-peers", fast)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *checking, "--home", str(tmp_path / "home"), "--listen", LOOPBACK),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        process._transport.close()  # type: ignore[attr-defined]
        clock = next(check for check in json.loads(out)["checks"] if check["name"] == "clock")
        assert re.match(r"your clock is -(9|10)\.\d s off; set it", clock["detail"])
        assert (clock["status"], process.returncode) == ("failed", 1)
        async with members(2, tmp_path / "others") as joined:
            right = [(await member.swarm.addresses())[0] for member in joined]
            assert await join(tmp_path, fast, *right) >= 2


async def test_a_peer_that_does_not_speak_our_dht_is_named(tmp_path: Path) -> None:
    visitor = load_or_create_identity(tmp_path / "visitor")
    config = JoinConfig(DaemonConfig(tmp_path / "visitor", (LOOPBACK,)), client_mode=True)
    async with asyncio.TaskGroup() as group, join_swarm(visitor, config, group) as swarm:
        with pytest.raises(JoinError, match="answers libp2p but not the DHT"):
            await join(tmp_path, *await swarm.addresses())


async def test_hostile_addresses_in_a_record_are_passed_over(tmp_path: Path) -> None:
    """They are another peer's text; hivemind's own parser raises several kinds of errors on such."""
    hostile = (
        "/",
        "/ip4",
        "/ip4/1.2.3.4/tcp/99999",
        "/p2p/x",
        "/unix/etc",
        "/ip4/::1/tcp/1",
        "/tcp/\u0661",
        "x" * 9,
    )
    async with members(2, tmp_path) as (one, two):
        for address in hostile:
            await one.swarm.connect(two.peer_id, [address])  # they are connected already
        stranger = Identity.generate().peer_id
        with pytest.raises(PeerError, match="nothing listens"):
            await one.swarm.connect(
                stranger, [*hostile, nobody_listens().rpartition("/")[0] + f"/{stranger}"]
            )
