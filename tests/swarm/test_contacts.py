"""Meeting again: remembered peers, split swarms, restarted seeds, copied identities, kinds of address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hivemind.p2p import P2P

from blocktrain.dht import greeting, meeting
from blocktrain.dht.contacts import Contacts
from blocktrain.dht.daemon import DaemonConfig
from blocktrain.dht.dial import dial
from blocktrain.dht.directory import Directory
from blocktrain.dht.duplicates import refuse_taken_identity
from blocktrain.dht.swarm import JoinConfig, Swarm, dht_time, join_swarm
from blocktrain.protocol.errors import DaemonError, IdentityInUse, JoinError, PeerError
from blocktrain.protocol.identity import load_or_create_identity
from blocktrain.protocol.records import PeerRecord
from tests.swarm.members import LOOPBACK, SPEC, daemons, members, until
from tests.swarm.test_join import nobody_listens

pytestmark = pytest.mark.slow
HERE, ELSEWHERE = "0" * 16, "f" * 16


@contextlib.asynccontextmanager
async def joined(
    key: Path, peers: Sequence[str] = (), listen: Sequence[str] = (LOOPBACK,), **config: Any
) -> AsyncIterator[Swarm]:
    """A member whose identity is in the file `key`. A daemon that was killed meanwhile is no error."""
    identity = load_or_create_identity(key)
    settings = JoinConfig(DaemonConfig(key, tuple(listen)), tuple(peers), timeout_s=3.0, **config)
    errors: list[BaseException] = []
    try:
        async with asyncio.TaskGroup() as group, join_swarm(identity, settings, group) as swarm:
            yield swarm
    except* DaemonError as found:
        errors += [e for e in found.exceptions if "was killed by signal 9" not in str(e)]
    except* (IdentityInUse, JoinError) as found:
        errors += found.exceptions
    if errors:
        raise errors[0]


def known(swarm: Swarm) -> set[str]:
    """Peers in its routing table."""
    return {peer.to_base58() for peer in swarm.dht.protocol.routing_table.peer_id_to_uid}


def own_port(folder: Path, name: str) -> tuple[str, str]:
    """Where a member of that name is to listen, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"
    return listen, f"{listen}/p2p/{load_or_create_identity(folder / name).peer_id}"


async def record_of(swarm: Swarm, place: str) -> PeerRecord:
    addresses = await swarm.addresses()
    return PeerRecord(0, 0, 0, 1.0, None, "0" * 32, addresses, "0.1.0", dht_time(), place=place)


async def test_peers_met_before_are_tried_when_no_initial_peer_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the directory are remembered, too, not only the one that it joined by."""
    dead = nobody_listens()
    async with members(2, tmp_path) as (seed, holder):
        assert await holder.directory.publish(await holder.record())
        async with joined(
            tmp_path / "node", await seed.swarm.addresses(), contacts=Contacts(tmp_path / "peers.txt")
        ) as swarm:
            await Directory(swarm, SPEC).holders()
        seed.kill()
        await until(lambda: len(daemons()) == 1)
        with caplog.at_level(logging.INFO):
            async with joined(tmp_path / "node", [dead], contacts=Contacts(tmp_path / "peers.txt")) as swarm:
                assert known(swarm) == {holder.peer_id}
                assert swarm.answers.reasons[dead] == "connection refused: nothing listens there"
    assert f"peer {dead}: connection refused: nothing listens there" in caplog.text
    assert "trying 2 remembered peers" in caplog.text


async def test_with_no_initial_peer_remembered_ones_are_tried_but_not_waited_for(tmp_path: Path) -> None:
    contacts = Contacts(tmp_path / "peers.txt")
    contacts.suggest((dead := nobody_listens()).rpartition("/")[2], [dead])
    async with joined(tmp_path / "seed", contacts=contacts) as swarm:
        assert known(swarm) == set()


async def test_two_swarms_that_were_split_become_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two seeds know of each other, but come up while the network between them is cut."""
    caplog.set_level(logging.INFO)
    cut, blocked = True, set[str]()

    async def dial_unless_cut(p2p: P2P, peer_id: str, addresses: Sequence[str]) -> None:
        if cut and peer_id in blocked:
            raise PeerError(peer_id, "cut")
        await dial(p2p, peer_id, addresses)

    for module in (greeting, meeting):
        monkeypatch.setattr(module, "dial", dial_unless_cut)
    monkeypatch.setattr(meeting, "MEET_EVERY_S", 0.1)
    (listen_a, a), (listen_b, b) = own_port(tmp_path, "a"), own_port(tmp_path, "b")
    blocked |= {address.rpartition("/")[2] for address in (a, b)}
    async with (
        joined(tmp_path / "a", [a, b], [listen_a], begin=True) as seed_a,
        joined(tmp_path / "b", [a, b], [listen_b], begin=True) as seed_b,
        members(1, tmp_path) as (lone,),
    ):
        assert known(seed_a) == known(seed_b) == set()
        assert await Directory(seed_a, SPEC).publish(await record_of(seed_a, HERE))
        directory = Directory(seed_b, SPEC)
        assert not (await directory.holders())[0]
        cut = False
        while not (await directory.holders())[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert known(seed_a) == {seed_b.peer_id}
        assert known(seed_b) == {seed_a.peer_id}
        assert known(lone.swarm) == set()
        await until(lambda: "met 1 peer again" in caplog.text)
    assert caplog.text.count("no peer answers: ") == 2
    assert ": cut; trying again every 0 s" in caplog.text


async def test_a_seed_that_was_killed_and_restarted_is_met_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "MEET_EVERY_S", 0.2)
    caplog.set_level(logging.INFO)
    listen, address = own_port(tmp_path, "seed")
    async with contextlib.AsyncExitStack() as stack:
        async with joined(tmp_path / "seed", listen=[listen]):
            (daemon,) = daemons()
            node = await stack.enter_async_context(joined(tmp_path / "node", [address]))
            daemon.kill()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        while "no peer answers: " not in caplog.text:
            await node.get(["anything"])  # finds that the seed is gone
            await asyncio.sleep(0.05)
        assert known(node) == set()
        async with joined(tmp_path / "seed", listen=[listen]) as seed:
            await until(lambda: known(node) == {seed.peer_id} and known(seed) == {node.peer_id})
            await until(lambda: "met 1 peer again" in caplog.text)
    assert caplog.text.count("no peer answers: ") == 1


async def test_an_identity_that_answers_at_its_own_address_is_refused(tmp_path: Path) -> None:
    """As when a seed's home is copied with its list of seeds. Another peer at that address does no harm."""
    (listen, address), (_, stranger) = own_port(tmp_path, "one"), own_port(tmp_path, "two")
    shutil.copy(tmp_path / "one", tmp_path / "copy")
    async with joined(tmp_path / "one", [address], [listen]):
        with pytest.raises(IdentityInUse) as caught:
            async with joined(tmp_path / "copy", [address]):
                pass
        wrong = f"{listen}/p2p/{stranger.rpartition('/')[2]}"
        async with joined(tmp_path / "two", [wrong, address]) as swarm:
            assert len(known(swarm)) == 1
    assert str(caught.value).endswith(
        f"is already in use at {address}: every node needs its own; "
        "start with another --home, or remove identity.key to get a new one"
    )


async def test_a_copied_identity_is_refused_while_its_record_is_renewed(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path / "one")
    shutil.copy(tmp_path / "one", tmp_path / "copy")
    async with members(1, tmp_path / "seed") as (seed,):
        peers = await seed.swarm.addresses()
        async with joined(tmp_path / "one", peers) as one, joined(tmp_path / "copy", peers) as copy:
            first, second = Directory(one, SPEC, ttl_s=3.0), Directory(copy, SPEC)
            await refuse_taken_identity(second, ELSEWHERE)
            assert await first.publish(await record_of(one, HERE))
            await refuse_taken_identity(second, HERE)
            looking = asyncio.create_task(refuse_taken_identity(second, ELSEWHERE))
            while not looking.done():
                await first.publish(await record_of(one, HERE))
                await asyncio.sleep(0.1)
            with pytest.raises(IdentityInUse, match="is already in use at /ip4/127"):
                await looking


async def test_a_record_of_a_dead_node_in_another_place_only_delays(tmp_path: Path) -> None:
    async with members(2, tmp_path) as (seed, node):
        directory = Directory(node.swarm, SPEC, ttl_s=1.0)
        assert await directory.publish(await record_of(node.swarm, HERE))
        assert (await seed.directory.holders())[0]
        await refuse_taken_identity(directory, ELSEWHERE)
        assert not (await seed.directory.holders())[0]


async def test_every_kind_of_address_lets_a_member_in(tmp_path: Path) -> None:
    listen = LOOPBACK, "/ip6/::1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"
    async with joined(tmp_path / "seed", listen=listen) as seed:
        addresses = await seed.addresses()
        (tcp,) = [a for a in addresses if a.startswith("/ip4/127.0.0.1/tcp/")]
        addresses += tuple(
            tcp.replace("/ip4/127.0.0.1", host) for host in ("/dns4/localhost", "/dns/localhost")
        )
        assert len(addresses) == 5

        async def join(index: int, address: str) -> set[str]:
            async with joined(tmp_path / f"by-{index}", [address]) as swarm:
                return known(swarm)

        found = await asyncio.gather(*(join(index, address) for index, address in enumerate(addresses)))
        assert all(seed.peer_id in peers for peers in found)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
async def test_names_are_resolved_dnsaddr_included(tmp_path: Path) -> None:
    """With a name server of our own, in namespaces where it is the only one."""
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--mount", "--net", sys.executable, "-m", "tests.swarm.dns_names", str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    process._transport.close()  # type: ignore[attr-defined]
    assert process.returncode == 0
    found = json.loads(out)
    assert len(found) == 4
    assert all(found.values()), found
