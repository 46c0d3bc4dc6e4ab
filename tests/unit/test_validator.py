"""What this node stores for others: hivemind's own records, hostile ones included, without a network."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.utils import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.dht import validator as module
from blocktrain.dht.validator import RecordValidator, key_digest
from blocktrain.protocol import keys
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.records import MAX_TTL_S, PeerRecord, RunRecord, seal
from blocktrain.protocol.spec import MAX_SPEC_BYTES, RunSpec

NOW = 1_800_000_000.0
EXPIRES = NOW + 30
ME, OTHER = Identity.generate(), Identity.generate()
SPEC = RunSpec.from_mapping({"name": "demo"})
RECORD = PeerRecord(
    block=0,
    round=1,
    step=20,
    tokens_per_s=1e3,
    denoising_ce=None,
    anchor="0" * 32,
    addresses=(),
    version="0.1.0",
    time=NOW,
)
HOLDERS = key_digest(keys.holders(SPEC.fingerprint, 0))
pack = MSGPackSerializer.dumps
NO_SUBKEY = pack(None)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "get_dht_time", lambda: NOW)


def member() -> RecordValidator:
    """The validator of a node of the run."""
    found = RecordValidator()
    found.expect_run(SPEC.fingerprint, SPEC.model.blocks)
    return found


def record(key: bytes = HOLDERS, expires: float = EXPIRES, owner: Identity = ME, **fields: Any) -> DHTRecord:
    """A record that its owner signed for this key, subkey and expiry."""
    value = seal(owner, key, expires, dataclasses.replace(RECORD, **fields))
    return DHTRecord(key, pack(owner.peer_id), pack(value), expires)


def content(data: bytes, key: bytes | None = None, expires: float = EXPIRES) -> DHTRecord:
    return DHTRecord(key or key_digest(keys.specification_of(data)), NO_SUBKEY, pack(data), expires)


def refused_for(check: str, bad: DHTRecord) -> bool:
    found = member()
    return not found.validate(bad) and found.rejected == {check: 1}


def test_the_key_digest_is_hiveminds() -> None:
    assert key_digest("x") == DHTID.generate(source="x").to_bytes()
    assert DHTProtocol.IS_REGULAR_VALUE == NO_SUBKEY


def test_honest_records_are_accepted_by_members_and_by_others() -> None:
    announced = seal(ME, key_digest(keys.RUNS), EXPIRES, RunRecord("demo", SPEC.fingerprint))
    honest = [record(), record(leaving=True), content(SPEC.canonical()), record(expires=NOW + MAX_TTL_S)]
    honest.append(DHTRecord(key_digest(keys.RUNS), pack(ME.peer_id), pack(announced), EXPIRES))
    for item in honest:
        for found in (member(), RecordValidator()):
            assert found.validate(item)
            assert not found.rejected


@pytest.mark.parametrize(
    "changes",
    [
        {"key": key_digest(keys.holders(SPEC.fingerprint, 1))},
        {"key": key_digest(keys.holders("f" * 32, 0))},
        {"key": key_digest(keys.RUNS)},
        {"key": key_digest(keys.specification(SPEC.fingerprint))},
        {"subkey": pack(OTHER.peer_id)},
        {"subkey": pack(ME.peer_id + "\n")},
        {"subkey": pack(ME.peer_id.encode())},
        {"subkey": NO_SUBKEY},
        {"subkey": b""},
        {"expiration_time": EXPIRES + 1},
        {"expiration_time": EXPIRES - 1},
        {"value": pack(b"")},
        {"value": pack("text")},
        {"value": pack(b"\0" * 200)},
        {"value": b"\xc1"},
    ],
)
def test_a_record_that_was_moved_or_changed_is_refused(changes: dict[str, Any]) -> None:
    assert refused_for("owner", dataclasses.replace(record(), **changes))


@pytest.mark.parametrize("expires", [NOW - 10, NOW + MAX_TTL_S + 10, NOW + 1e9, float("inf"), float("nan")])
def test_a_lifetime_outside_the_cap_is_refused_though_signed(expires: float) -> None:
    assert refused_for("expiry", record(expires=expires))
    assert refused_for("expiry", content(SPEC.canonical(), expires=expires))


def test_a_record_cannot_be_replayed_once_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    item = record()
    assert member().validate(item)
    monkeypatch.setattr(module, "get_dht_time", lambda: EXPIRES + 10)
    assert refused_for("expiry", item)
    assert refused_for("owner", dataclasses.replace(item, expiration_time=EXPIRES + 30))


def test_an_older_record_does_not_replace_a_newer_one_in_hiveminds_storage() -> None:
    storage, key = DHTLocalStorage(), DHTID.from_bytes(HOLDERS)
    old, new = record(expires=EXPIRES), record(expires=EXPIRES + 5, leaving=True)
    for item, stored in ((old, True), (new, True), (old, False)):
        assert member().validate(item)
        assert storage.store(key, item.value, item.expiration_time, subkey=ME.peer_id) == stored


def test_members_check_fields_and_others_pass_on_what_they_cannot_know() -> None:
    announced = seal(ME, HOLDERS, EXPIRES, RunRecord("demo", "f" * 32))
    wrong = DHTRecord(HOLDERS, pack(ME.peer_id), pack(announced), EXPIRES)
    assert refused_for("fields", wrong)
    assert RecordValidator().validate(wrong)
    runs = key_digest(keys.RUNS)
    assert refused_for("fields", record(key=runs))
    assert not RecordValidator().validate(record(key=runs))


def test_a_specification_stands_only_under_its_own_hash() -> None:
    other = RunSpec.from_mapping({"name": "other"}).canonical()
    assert refused_for("owner", content(other, key=key_digest(keys.specification(SPEC.fingerprint))))
    assert refused_for(
        "owner", content(SPEC.canonical() + b" ", key=key_digest(keys.specification(SPEC.fingerprint)))
    )
    assert refused_for("owner", content(SPEC.canonical(), key=HOLDERS))
    named = DHTRecord(key_digest(keys.specification_of(b"x")), NO_SUBKEY, pack("x"), EXPIRES)
    assert refused_for("owner", named)


def test_nobody_displaces_a_specification_with_a_signed_record() -> None:
    key = key_digest(keys.specification(SPEC.fingerprint))
    assert refused_for("owner", record(key=key, expires=NOW + MAX_TTL_S))


def test_sizes_are_checked_before_anything_is_decoded() -> None:
    assert refused_for("size", content(b"\0" * (MAX_SPEC_BYTES + 20)))
    assert refused_for("size", DHTRecord(HOLDERS, pack("z" * 4_000_000), pack(b"\0" * 100), EXPIRES))
    assert member().validate(content(b" " * MAX_SPEC_BYTES))


def test_what_is_refused_is_counted_under_few_names_whatever_is_sent() -> None:
    found = member()
    for i in range(50):
        stranger = Identity.generate()
        found.validate(dataclasses.replace(record(), subkey=pack(stranger.peer_id)))
        found.validate(dataclasses.replace(record(), value=pack(b"\0" * (100 + i))))
        found.validate(record(expires=NOW + 10_000 + i))
    assert found.rejected == {"owner": 100, "expiry": 50}


@given(
    st.binary(max_size=100), st.binary(max_size=100), st.binary(max_size=20), st.floats() | st.just(EXPIRES)
)
def test_any_bytes_are_refused_without_an_exception(
    value: bytes, subkey: bytes, key: bytes, expires: float
) -> None:
    found = member()
    for sub in (subkey, NO_SUBKEY, pack(ME.peer_id)):
        assert not found.validate(DHTRecord(HOLDERS, sub, value, EXPIRES))
        assert not found.validate(DHTRecord(key, sub, value, expires))
    assert found.rejected.total() == 6


@pytest.mark.parametrize(
    "raw",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x40",
        b"\x91" * 10_000,
        b"\xc7\x01\x50\x90",
        b"\xc7\x05\x40\xdd\xff\xff\xff\xff",
    ],
    ids=["list", "map", "bytes", "extension", "nesting", "dictionary", "tuple"],
)
def test_hostile_msgpack_is_refused_whatever_length_it_claims(raw: bytes) -> None:
    assert refused_for("owner", DHTRecord(HOLDERS, pack(ME.peer_id), raw, EXPIRES))
    assert refused_for("owner", DHTRecord(HOLDERS, NO_SUBKEY, raw, EXPIRES))
    if len(raw) <= 64:
        assert refused_for("owner", DHTRecord(HOLDERS, raw, record().value, EXPIRES))


def test_it_works_inside_hiveminds_own_chain_and_is_there_once() -> None:
    first = member()
    chain = CompositeValidator([first, RecordValidator()])
    assert chain._validators == [first]
    item = record()
    assert chain.validate(item)
    assert chain.sign_value(item) == chain.strip_value(item) == item.value
    assert json.loads(MSGPackSerializer.loads(item.value)[64:])["anchor"] == RECORD.anchor
