"""The file of remembered peers, and the digest that tells a copied home from a restart."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from blocktrain.dht import contacts as module
from blocktrain.dht.contacts import MAX_CONTACT_ADDRESSES, MAX_CONTACTS, Contacts
from blocktrain.dht.directory import Holder
from blocktrain.dht.duplicates import place_of, refuse_twin
from blocktrain.protocol.addresses import parse_addresses
from blocktrain.protocol.errors import HomeError, IdentityInUse, RecordError
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.records import PeerRecord, parse_record

PEERS = [Identity.generate().peer_id for _ in range(MAX_CONTACTS + 3)]
PLACES = "0" * 16, "f" * 16


def address(index: int, host: str = "/ip4/203.0.113.7") -> str:
    return f"{host}/tcp/{4001 + index}/p2p/{PEERS[index]}"


def suggest(contacts: Contacts, *indices: int) -> None:
    for index in indices:
        contacts.suggest(PEERS[index], [address(index)])


def save(contacts: Contacts) -> None:
    asyncio.run(contacts.save())


def record(time: float, place: str) -> PeerRecord:
    return PeerRecord(0, 0, 0, 1.0, None, "0" * 32, (address(0),), "1", time, place=place)


def test_the_file_is_read_again_in_the_same_order_and_serves_as_initial_peers(tmp_path: Path) -> None:
    path = tmp_path / "peers.txt"
    contacts = Contacts(path)
    suggest(contacts, 0, 1, 2)
    save(contacts)
    assert parse_addresses([f"@{path}"]) == tuple(address(index) for index in (2, 1, 0))
    assert Contacts(path).peers == contacts.peers
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_written_only_when_it_would_change(tmp_path: Path) -> None:
    path = tmp_path / "peers.txt"
    save(Contacts(path))
    assert not path.exists()
    suggest(contacts := Contacts(path), 0, 1)
    save(contacts)
    before = path.stat().st_ino
    suggest(contacts, 1, 0)
    save(contacts)
    assert path.stat().st_ino == before
    contacts.suggest(PEERS[0], [address(0, "/ip4/198.51.100.1")])
    save(contacts)
    assert path.stat().st_ino != before
    assert Contacts(path).peers[PEERS[0]] == (address(0, "/ip4/198.51.100.1"),)


def test_lines_that_are_no_addresses_cost_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "peers.txt"
    path.write_bytes(b"# a comment\n\xff\xfe\x00\n/ip4/1.2.3.4/tcp/1\n" + address(0).encode() + b"\nhello\n")
    assert Contacts(path).peers == {PEERS[0]: (address(0),)}
    (warning,) = caplog.records
    assert "3 of its lines are ignored; the first: " in warning.getMessage()


@pytest.mark.parametrize("content", [b"", b"\x00" * 200_000, b"/" * 200_000])
def test_no_content_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "peers.txt").write_bytes(content)
    assert not Contacts(tmp_path / "peers.txt").peers


def test_a_file_that_cannot_be_read_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "peers.txt").mkdir()
    assert not Contacts(tmp_path / "peers.txt").peers
    assert "can't be read: Is a directory" in caplog.text


def test_a_full_disk_is_one_warning_and_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "peers.txt"
    suggest(contacts := Contacts(path), 0)
    save(contacts)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        suggest(contacts, 1)
        save(contacts)
        save(contacts)
        assert [r.levelno for r in caplog.records] == [logging.WARNING]
        assert "No space left on device; peers are not remembered" in caplog.text
        assert list(Contacts(path).peers) == [PEERS[0]]
        assert list(tmp_path.iterdir()) == [path]
    save(contacts)
    assert list(Contacts(path).peers) == [PEERS[1], PEERS[0]]


def test_a_full_list_takes_a_new_peer_only_for_one_that_nothing_is_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suggest(contacts := Contacts(tmp_path / "peers.txt"), *range(MAX_CONTACTS), MAX_CONTACTS)
    assert set(contacts.peers) == set(PEERS[:MAX_CONTACTS])
    save(contacts)
    suggest(again := Contacts(tmp_path / "peers.txt"), *range(1, MAX_CONTACTS + 1))
    assert set(again.peers) == set(PEERS[1 : MAX_CONTACTS + 1])
    monkeypatch.setattr(module, "CONTACT_STALE_S", 0.0)
    suggest(again, 2, MAX_CONTACTS + 1)
    assert PEERS[1] not in again.peers
    assert next(iter(again.peers)) == PEERS[MAX_CONTACTS + 1]


def test_the_useful_addresses_are_kept_and_peers_behind_relays_are_not(tmp_path: Path) -> None:
    hosts = (
        "/ip4/127.0.0.1",
        "/ip4/10.0.0.1",
        "/ip6/::1",
        "/ip4/45.1.2.3",
        "/dns4/host.example",
        "/ip4/10.0.0.2",
    )
    contacts = Contacts(tmp_path / "peers.txt")
    contacts.suggest(PEERS[0], [*(address(0, host) for host in hosts), "/ip4/45.1.2.3/tcp/1", "garbage"])
    contacts.suggest(PEERS[1], [address(1), f"{address(0)}/p2p-circuit/p2p/{PEERS[1]}"])
    contacts.suggest(PEERS[2], [address(0)])
    expected = [address(0, host) for host in (hosts[3], hosts[4], hosts[1], hosts[5])]
    assert contacts.peers == {PEERS[0]: tuple(expected[:MAX_CONTACT_ADDRESSES])}


def test_a_place_is_the_same_after_a_restart_and_another_for_a_copy(tmp_path: Path) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    home.mkdir()
    shutil.copytree(home, copy)
    place = place_of(home, PEERS[0])
    assert place == place_of(home, PEERS[0])
    assert len({place, place_of(copy, PEERS[0]), place_of(home, PEERS[1])}) == 3
    assert parse_record(PeerRecord, _payload(place)).place == place
    with pytest.raises(HomeError, match="can't be read: No such file"):
        place_of(tmp_path / "none", PEERS[0])


@pytest.mark.parametrize("place", ["0" * 15, "0" * 17, "G" * 16, "0" * 16 + "\n"])
def test_a_place_of_another_form_is_refused(place: str) -> None:
    with pytest.raises(RecordError, match="place"):
        parse_record(PeerRecord, _payload(place))


def test_only_a_newer_record_from_elsewhere_shows_a_twin() -> None:
    def look(time: float, place: str, owner: str = PEERS[0]) -> None:
        refuse_twin([Holder(owner, record(time, place), time + 30)], PEERS[0], PLACES[0], since=100.0)

    look(101.0, PLACES[0])
    look(100.0, PLACES[1])
    look(101.0, PLACES[1], owner=PEERS[1])
    with pytest.raises(IdentityInUse, match=f"identity {PEERS[0]} is already in use at {address(0)}: every"):
        look(101.0, PLACES[1])


def _payload(place: str) -> bytes:
    return json.dumps(dataclasses.asdict(record(1.0, place))).encode()
