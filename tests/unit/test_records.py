"""Signed records: they hold what their owner wrote, where it put them and as long as it said, or nothing."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol.errors import RecordError
from blocktrain.protocol.identity import SIGNATURE_BYTES, Identity
from blocktrain.protocol.records import (
    CLOCK_TOLERANCE_S,
    MAX_ADDRESSES,
    MAX_RECORD_BYTES,
    MAX_TTL_S,
    PeerRecord,
    RunRecord,
    check_expiry,
    seal,
    unseal,
)

ME, OTHER = Identity.generate(), Identity.generate()
KEY, EXPIRES, NOW = b"k" * 20, 1_800_000_030.25, 1_800_000_000.0
ADDRESSES = tuple(f"/ip4/203.0.113.{i}/tcp/4{i:04}/p2p/{ME.peer_id}" for i in range(MAX_ADDRESSES))
RECORD = PeerRecord(
    block=63,
    round=2**40,
    step=2**50,
    tokens_per_s=123456.7,
    denoising_ce=1.2345,
    anchor="0123456789abcdef" * 2,
    addresses=ADDRESSES,
    version="0.1.0.dev12+gabcdef012",
    time=NOW,
)
SEALED = seal(ME, KEY, EXPIRES, RECORD)


def signed(payload: bytes) -> bytes:
    """A record that its owner signed properly, whatever is in it."""
    parts = (b"blocktrain record", KEY, ME.peer_id.encode(), struct.pack(">d", EXPIRES), payload)
    return ME.sign(b"".join(struct.pack(">I", len(part)) + part for part in parts)) + payload


def refusal(value: object, kind: type[Any] = PeerRecord, **changes: Any) -> str:
    where: dict[str, Any] = {"key": KEY, "peer_id": ME.peer_id, "expires": EXPIRES} | changes
    with pytest.raises(RecordError) as caught:
        unseal(kind, value, **where)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_record_comes_back_as_it_was_written() -> None:
    assert unseal(PeerRecord, SEALED, key=KEY, peer_id=ME.peer_id, expires=EXPIRES) == RECORD
    run = RunRecord("demo", "f" * 32)
    assert unseal(RunRecord, seal(ME, KEY, EXPIRES, run), key=KEY, peer_id=ME.peer_id, expires=EXPIRES) == run


@given(
    block=st.integers(0, 63),
    step=st.integers(0, 2**53),
    speed=st.floats(0, 1e12),
    loss=st.none() | st.floats(0, 1e6),
    addresses=st.lists(st.from_regex(r"/[!-~]{1,60}", fullmatch=True), max_size=12),
    expires=st.floats(0, 1e12),
)
def test_any_valid_record_survives_the_round_trip(
    block: int, step: int, speed: float, loss: float | None, addresses: list[str], expires: float
) -> None:
    record = dataclasses.replace(
        RECORD, block=block, step=step, tokens_per_s=speed, denoising_ce=loss, addresses=tuple(addresses)
    )
    value = seal(ME, KEY, expires, record)
    assert unseal(PeerRecord, value, key=KEY, peer_id=ME.peer_id, expires=expires) == record


def test_a_record_with_twelve_addresses_fits_well_into_the_limit() -> None:
    assert len(RECORD.addresses) == 12
    assert len(SEALED) < 1600
    through_relays = tuple(f"{a}/p2p-circuit/p2p/{OTHER.peer_id}" for a in ADDRESSES)
    assert (
        len(seal(ME, KEY, EXPIRES, dataclasses.replace(RECORD, addresses=through_relays))) < MAX_RECORD_BYTES
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"key": b"K" * 20},
        {"key": KEY + b"\0"},
        {"key": b""},
        {"peer_id": OTHER.peer_id},
        {"expires": EXPIRES + 1},
        {"expires": math.nextafter(EXPIRES, math.inf)},
        {"expires": math.nan},
    ],
)
def test_a_record_cannot_be_moved_passed_off_or_extended(changes: dict[str, Any]) -> None:
    assert refusal(SEALED, **changes).startswith("not signed by")


def test_an_old_record_cannot_be_replayed_with_the_expiry_of_a_newer_one() -> None:
    newer = seal(ME, KEY, EXPIRES + 10, dataclasses.replace(RECORD, round=RECORD.round + 1))
    assert refusal(SEALED, expires=EXPIRES + 10).startswith("not signed by")
    assert refusal(newer, expires=EXPIRES).startswith("not signed by")
    swapped = newer[:SIGNATURE_BYTES] + SEALED[SIGNATURE_BYTES:]
    assert refusal(swapped, expires=EXPIRES + 10).startswith("not signed by")


@given(st.integers(0, len(SEALED) * 8 - 1))
def test_no_bit_can_be_flipped(bit: int) -> None:
    damaged = bytearray(SEALED)
    damaged[bit // 8] ^= 1 << bit % 8
    refusal(bytes(damaged))


@pytest.mark.parametrize("value", [None, "text", 7, [SEALED], {b"": SEALED}, bytearray(SEALED), ("a",)])
def test_values_that_are_not_bytes_are_refused(value: object) -> None:
    assert refusal(value) == "not a signed record"


@pytest.mark.parametrize("peer_id", [None, b"12D3", 7, "", "\ud800", "é", "z" * 1_000_000, ME.peer_id + "\n"])
def test_subkeys_that_are_no_peer_id_are_refused(peer_id: object) -> None:
    refusal(SEALED, peer_id=peer_id)


@pytest.mark.parametrize("length", [0, 1, SIGNATURE_BYTES, MAX_RECORD_BYTES + 1, 5_000_000])
def test_the_size_is_checked_before_the_signature(length: int) -> None:
    assert refusal(b"\0" * length) == f"record of {length} bytes; the limit is {MAX_RECORD_BYTES}"


@given(st.binary(min_size=1, max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=6), inner, max_size=2),
    max_leaves=5,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_whatever_its_owner_signs_is_a_record_or_our_error(payload: bytes) -> None:
    refusal(signed(payload))


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("block", 64, "block: must be at most 63"),
        ("block", -1, "block: must be at least 0"),
        ("block", True, "block: expected a whole number"),
        pytest.param(
            "round", 10**400, "round: must be at most 9007199254740991, got a number of 1329 bits", id="huge"
        ),
        ("step", 1.5, "step: expected a whole number"),
        ("tokens_per_s", math.nan, "tokens_per_s: must be a finite number"),
        ("tokens_per_s", math.inf, "tokens_per_s: must be a finite number"),
        ("denoising_ce", math.nan, "denoising_ce: must be a finite number"),
        ("anchor", "0" * 31, "anchor: "),
        ("addresses", ["/ip4/203.0.113.7"] * 13, "addresses: length must be at most 12"),
        ("addresses", ["/ip4/\x1b[31m"], "addresses[0]: "),
        ("addresses", ["/" + "a" * 600], "addresses[0]: "),
        ("version", "0.1\n", "version: "),
        ("version", "\x1b]0;title\x07", "version: "),
        ("leaving", 1, "leaving: expected true or false"),
        ("extra", 1, "extra: unknown field"),
    ],
)
def test_impossible_fields_are_refused_though_signed(field: str, value: object, told: str) -> None:
    fields = dataclasses.asdict(RECORD) | {"addresses": [], field: value}
    assert refusal(signed(json.dumps(fields).encode())).startswith(told)


def test_the_name_of_an_announced_run_cannot_garble_a_terminal() -> None:
    payload = json.dumps({"name": "demo\x1b[2J", "fingerprint": "f" * 32}).encode()
    assert refusal(signed(payload), kind=RunRecord).startswith("name: ")


def test_nobody_seals_what_others_would_refuse() -> None:
    for changes in ({"denoising_ce": math.nan}, {"addresses": ADDRESSES + ADDRESSES[:1]}, {"block": 64}):
        with pytest.raises(RecordError):
            seal(ME, KEY, EXPIRES, dataclasses.replace(RECORD, **changes))
    large = tuple(f"/dns4/{'a' * 400}/tcp/{i}" for i in range(MAX_ADDRESSES))
    with pytest.raises(RecordError, match="over the limit of 4096"):
        seal(ME, KEY, EXPIRES, dataclasses.replace(RECORD, addresses=large))


@pytest.mark.parametrize("offset", [-CLOCK_TOLERANCE_S, 0.0, 30.0, MAX_TTL_S, MAX_TTL_S + CLOCK_TOLERANCE_S])
def test_lifetimes_within_the_cap_pass(offset: float) -> None:
    check_expiry(NOW + offset, NOW)


@pytest.mark.parametrize(
    "expires",
    [NOW - CLOCK_TOLERANCE_S - 1, NOW + MAX_TTL_S + CLOCK_TOLERANCE_S + 1, 0.0, 1e300, math.inf, math.nan],
)
def test_lifetimes_outside_the_cap_are_refused(expires: float) -> None:
    with pytest.raises(RecordError, match="expiry"):
        check_expiry(expires, NOW)
