"""Records in a real DHT: they appear, change and vanish; forged ones are neither stored nor believed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID

from blocktrain.dht.directory import Directory, find_run, list_runs, publish_run
from blocktrain.dht.streams import Streams
from blocktrain.dht.swarm import dht_time
from blocktrain.dht.validator import key_digest
from blocktrain.protocol import keys
from blocktrain.protocol.errors import JoinError, PeerError
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.records import MAX_RECORD_BYTES, MAX_TTL_S, RunRecord, seal
from blocktrain.protocol.records import _signed as signed_message
from blocktrain.protocol.spec import RunSpec
from tests.swarm.members import SPEC, Member, members, raw_dht

pytestmark = pytest.mark.slow
KEY = keys.holders(SPEC.fingerprint, 0)


async def seen(member: Member, block: int = 0) -> dict[str, int]:
    """Peer id → round of the holders that a member sees."""
    return {h.peer_id: h.record.round for h in (await member.directory.holders())[block]}


async def until_seen(member: Member, wanted: dict[str, int], within_s: float) -> None:
    """Look again until the member sees just these holders."""
    async with asyncio.timeout(within_s):
        while await seen(member) != wanted:  # noqa: ASYNC110 - the DHT tells nobody about changes
            await asyncio.sleep(0.05)


async def test_records_appear_change_and_are_withdrawn(tmp_path: Path) -> None:
    async with members(3, tmp_path) as (one, two, three):
        for member in (one, two):
            assert await member.directory.publish(await member.record())
        assert await seen(three) == {one.peer_id: 0, two.peer_id: 0}
        assert await one.directory.publish(await one.record(round=1))
        for member in (one, two, three):
            assert await seen(member) == {one.peer_id: 1, two.peer_id: 0}
        await one.directory.publish(await one.record(round=1, leaving=True))
        for member in (one, two, three):
            await until_seen(member, {two.peer_id: 0}, within_s=2)
        (holder,) = (await three.directory.holders())[0]
        assert holder.record.addresses == await two.swarm.addresses()
        assert 0 <= holder.age_s < 10


async def test_a_killed_nodes_record_expires(tmp_path: Path) -> None:
    async with members(3, tmp_path) as (one, two, three):
        one.directory.ttl_s = 2.0
        await one.directory.publish(await one.record())
        await two.directory.publish(await two.record())
        assert set(await seen(three)) == {one.peer_id, two.peer_id}
        killed = time.monotonic()
        one.kill()
        await until_seen(three, {two.peer_id: 0}, within_s=8)
        assert time.monotonic() - killed < 8


async def forged(
    owner: Member, thief: Identity, template: bytes, expires: float
) -> dict[str, tuple[Any, ...]]:
    """Name of the trick → value, subkey and expiry."""
    key = key_digest(KEY)
    record = await owner.record(round=9)
    good = seal(owner.swarm.identity, key, expires, record)
    fields = json.dumps(dataclasses.asdict(record)).encode()
    sealed_elsewhere = seal(thief, key_digest(keys.RUNS), expires, record)
    far = dht_time() + 10 * MAX_TTL_S
    return {
        "unsigned": (fields, thief.peer_id, expires),
        "signed by another": (seal(thief, key, expires, record), owner.peer_id, expires),
        "moved to another subkey": (good, thief.peer_id, expires),
        "without a subkey": (good, None, expires),
        "another key's record": (sealed_elsewhere, thief.peer_id, expires),
        "expiry put off": (template, owner.peer_id, expires + 1),
        "squatting": (seal(thief, key, far, record), thief.peer_id, far),
        "oversized": (good + b" " * MAX_RECORD_BYTES, owner.peer_id, expires),
        "enormous": (bytes(3_000_000), thief.peer_id, expires),
        "no bytes": ({"round": 9}, thief.peer_id, expires),
        "a subkey that is no text": (good, 7, expires),
        "a subkey that is no peer": (good, "root", expires),
        "malformed": (_signed(thief, key, expires, b'{"block":0}'), thief.peer_id, expires),
        "no JSON": (_signed(thief, key, expires, b"\xff[[["), thief.peer_id, expires),
    }


def _signed(identity: Identity, key: bytes, expires: float, payload: bytes) -> bytes:
    return identity.sign(signed_message(key, identity.peer_id, expires, payload)) + payload


def stored(member: Member, key: str) -> set[object]:
    """Subkeys that a member keeps under a key for others."""
    item = member.swarm.dht.protocol.storage.get(DHTID.generate(source=key))
    return set(item.value.data) if item is not None and hasattr(item.value, "data") else set()


async def test_forged_records_are_refused_by_those_who_store_and_ignored_by_those_who_read(
    tmp_path: Path,
) -> None:
    """Unprotected keys can be squatted or overwritten in hivemind (faults 14, 16, 17)."""
    async with members(2, tmp_path) as (one, two), raw_dht(tmp_path, await one.swarm.addresses()) as raw:
        await one.directory.publish(await one.record(round=1))
        template = (await raw_value(raw, KEY))[one.peer_id]
        tricks = await forged(one, Identity.generate(), *template)
        for name, (value, subkey, expires) in tricks.items():
            assert not await raw.store(KEY, value, expires, subkey=subkey, exclude_self=True), name
            await raw.store(KEY, value, expires, subkey=subkey)  # now it serves it to readers itself
            for member in (one, two):
                assert await seen(member) == {one.peer_id: 1}, name
                assert stored(member, KEY) <= {one.peer_id}, name
            raw.protocol.storage.data.clear()
        assert two.swarm.validator.rejected.keys() == {"expiry", "size", "owner", "fields"}
        await one.directory.publish(await one.record(round=2))  # its owner was not locked out
        assert await seen(two) == {one.peer_id: 2}


async def raw_value(raw: DHTNode, key: str) -> dict[str, tuple[bytes, float]]:
    """What stands under a key: subkey → value and expiry."""
    found = await raw.get(key, latest=True)
    return {subkey: (item.value, item.expiration_time) for subkey, item in found.value.items()}


async def test_a_replayed_record_replaces_no_newer_one_nor_brings_back_who_left(tmp_path: Path) -> None:
    async with members(2, tmp_path) as (one, two), raw_dht(tmp_path, await one.swarm.addresses()) as raw:
        await one.directory.publish(await one.record(round=1))
        value, expires = (await raw_value(raw, KEY))[one.peer_id]
        await one.directory.publish(await one.record(round=2))
        assert not await raw.store(KEY, value, expires, subkey=one.peer_id, exclude_self=True)
        await raw.store(KEY, value, expires, subkey=one.peer_id)
        assert await seen(two) == {one.peer_id: 2}
        await one.directory.publish(await one.record(round=2, leaving=True))
        await raw.store(KEY, value, expires, subkey=one.peer_id)
        await until_seen(two, {}, within_s=2)


async def test_a_specification_stands_under_its_own_hash_and_cannot_be_replaced(tmp_path: Path) -> None:
    async with members(2, tmp_path) as (one, two), raw_dht(tmp_path, await one.swarm.addresses()) as raw:
        await publish_run(one.swarm, SPEC)
        assert await find_run(two.swarm) == SPEC
        other = dataclasses.replace(SPEC, seed=1)
        key, later = keys.specification(SPEC.fingerprint), dht_time() + MAX_TTL_S - 1
        thief = Identity.generate()
        sealed = seal(thief, key_digest(key), later, RunRecord(SPEC.name, SPEC.fingerprint))
        for value, subkey in ((other.canonical(), None), (b"{}", None), (sealed, thief.peer_id)):
            assert not await raw.store(key, value, later, subkey=subkey, exclude_self=True)
            await raw.store(key, value, later, subkey=subkey)
            assert await find_run(two.swarm, SPEC.name) == SPEC
        assert await raw.store(keys.specification(other.fingerprint), other.canonical(), later)


async def test_of_several_runs_one_must_be_chosen(tmp_path: Path) -> None:
    other = dataclasses.replace(SPEC, name="other")
    twin = dataclasses.replace(SPEC, seed=5)
    async with members(2, tmp_path) as (one, two):
        with pytest.raises(JoinError, match="no run yet; publish one: blocktrain-bootstrap"):
            await find_run(two.swarm)
        await publish_run(one.swarm, SPEC)
        await publish_run(two.swarm, other)
        assert await list_runs(one.swarm) == {SPEC.fingerprint: "tests", other.fingerprint: "other"}
        with pytest.raises(JoinError, match="several runs; choose one with --run") as caught:
            await find_run(one.swarm)
        assert f"tests ({SPEC.fingerprint[:12]})" in str(caught.value)
        assert f"other ({other.fingerprint[:12]})" in str(caught.value)
        assert await find_run(one.swarm, "other") == other
        assert await find_run(one.swarm, SPEC.fingerprint[:6]) == SPEC
        with pytest.raises(JoinError, match=r"no run 'nobody' in this swarm \(it has: .*tests"):
            await find_run(one.swarm, "nobody")
        await publish_run(two.swarm, twin)  # a node announces the run it is in
        with pytest.raises(JoinError, match="several"):
            await find_run(one.swarm, "tests")


async def test_who_announces_a_run_under_a_false_name_does_not_hide_it(tmp_path: Path) -> None:
    async with members(2, tmp_path) as (one, two):
        await publish_run(one.swarm, SPEC)
        expires = dht_time() + 100
        lie = seal(
            two.swarm.identity, key_digest(keys.RUNS), expires, RunRecord("false-name", SPEC.fingerprint)
        )
        assert await two.swarm.store(keys.RUNS, lie, expires, subkey=two.peer_id)
        assert await list_runs(two.swarm) == {SPEC.fingerprint: "tests"}
        assert await find_run(two.swarm, "tests") == SPEC


async def test_members_of_other_runs_in_the_same_swarm_never_meet(tmp_path: Path) -> None:
    other = RunSpec.from_mapping({"name": "other"})
    async with members(2, tmp_path) as (one, two):
        elsewhere = Directory(two.swarm, other)
        await one.directory.publish(await one.record())
        await elsewhere.publish(await two.record())
        assert [len(held) for held in (await elsewhere.holders()).values()] == [1, 0, 0]
        assert await seen(one) == {one.peer_id: 0}
        await one.streams.serve("test", lambda stream: asyncio.sleep(0))
        with pytest.raises(PeerError):
            async with Streams(two.swarm, other.fingerprint).open(one.peer_id, "test"):
                pass
