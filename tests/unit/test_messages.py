"""Frames between nodes: bounded before they are read, checked before they are used."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol.errors import MessageError
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.messages import (
    KINDS,
    MAX_GROUP,
    MAX_HEADER_BYTES,
    PREFIX,
    Abort,
    Begin,
    Chunk,
    ChunkRequest,
    Done,
    Exchange,
    Join,
    Load,
    LoadRequest,
    Manifest,
    Member,
    Message,
    Part,
    Redirect,
    Refused,
    StateRequest,
    TableOffer,
    Waiting,
    decode,
    decode_prefix,
    encode,
)
from blocktrain.protocol.records import MAX_ADDRESSES

PEERS = [Identity.generate().peer_id for _ in range(2)]
HEX = "0123456789abcdef" * 2
SIGNATURE = HEX * 4
MESSAGES: list[Message] = [
    Join(3, HEX, 320),
    Begin(HEX, 4, (Member(PEERS[0], 1.0, ("/ip4/203.0.113.7/tcp/1",)), Member(PEERS[1], 0.5)), relative=True),
    Redirect(PEERS[0]),
    Waiting(2, 1.8e9),
    Refused("busy; λ × 2"),
    Abort("silent for 30 s", PEERS[1]),
    Abort("no idea whose fault"),
    Exchange(HEX),
    Part(7),
    TableOffer(256, 128),
    Done(),
    LoadRequest(),
    Load(3, full=True),
    StateRequest("table"),
    Manifest(3, HEX, 5000, 4096, HEX * 2, SIGNATURE),
    ChunkRequest(1),
    Chunk(1),
]


def check_line(message: str) -> None:
    """An error's message is one line that can't garble a terminal."""
    assert message.isprintable()
    assert len(message) < 400


def header_of(message: Message) -> bytes:
    return encode(message)[PREFIX.size :]


def refusal(header: bytes) -> str:
    with pytest.raises(MessageError) as caught:
        decode(header)
    check_line(str(caught.value))
    return str(caught.value)


def test_every_kind_of_message_is_tried_here() -> None:
    assert {type(m) for m in MESSAGES} == set(KINDS.values()) == set(typing.get_args(Message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_comes_back_with_its_lengths(message: Message) -> None:
    frame = encode(message, payload_bytes=1_000)
    header_bytes, payload_bytes = decode_prefix(frame[: PREFIX.size], max_payload=1_000)
    assert (len(frame), payload_bytes) == (PREFIX.size + header_bytes, 1_000)
    assert decode(frame[PREFIX.size :]) == message


def test_the_largest_group_with_the_longest_records_fits_into_a_frame() -> None:
    address = f"/ip4/203.0.113.7/tcp/40001/p2p/{PEERS[0]}/p2p-circuit/p2p/{PEERS[1]}".ljust(320, "x")
    members = tuple(Member(PEERS[0], 1 / 3, (address,) * MAX_ADDRESSES) for _ in range(MAX_GROUP))
    begin = Begin(HEX, 2**53, members, relative=False)
    header_bytes, _ = decode_prefix(encode(begin)[: PREFIX.size], 0)
    assert 200_000 < header_bytes <= MAX_HEADER_BYTES
    assert decode(header_of(begin)) == begin


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_claimed_lengths_pass_only_within_what_the_reader_is_ready_for(
    header: int, payload: int, limit: int
) -> None:
    prefix = PREFIX.pack(header, payload)
    if 2 <= header <= MAX_HEADER_BYTES and payload <= limit:
        assert decode_prefix(prefix, limit) == (header, payload)
    else:
        with pytest.raises(MessageError):
            decode_prefix(prefix, limit)


def test_a_payload_nobody_asked_for_is_refused() -> None:
    with pytest.raises(MessageError, match="payload of 1 bytes where at most 0"):
        decode_prefix(PREFIX.pack(10, 1), 0)


hostile = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(header: bytes) -> None:
    refusal(header)


@pytest.mark.parametrize(
    "header",
    [
        *(b"", b"{}", b"[]", b"null", b"\xff\xfe{\x00}\x00", b"[" * 60_000),
        *(
            b'{"kind":null}',
            b'{"kind":["Join"]}',
            b'{"kind":{}}',
            b'{"kind":"Member"}',
            b'{"kind":"Nothing"}',
        ),
        *(b'{"kind":' + b"[" * 900 + b"]" * 900 + b"}", b'{"kind":' + b"9" * 5_000 + b"}"),
        *(b'{"kind":"Part"}', b'{"kind":"Done","extra":1}', b'{"kind":"Part","index":"\\ud800"}'),
        *(b'{"kind":"Part","index":NaN}', b'{"kind":"Part","index":1e999}'),
        b'{"kind":"Part","index":' + b"9" * 4_000 + b"}",
    ],
    ids=lambda header: header[:30].decode("latin1"),
)
def test_hostile_headers_are_one_line_of_our_error(header: bytes) -> None:
    refusal(header)


@given(st.sampled_from(MESSAGES), st.data())
def test_any_value_in_any_field_is_valid_or_our_error(message: Message, data: st.DataObject) -> None:
    fields: dict[str, Any] = json.loads(header_of(message))
    fields[data.draw(st.sampled_from([*fields, "extra"]))] = data.draw(hostile)
    try:
        decoded = decode(json.dumps(fields).encode())
    except MessageError as error:
        check_line(str(error))
    else:
        assert decode(header_of(decoded)) == decoded


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (Join(3, HEX, 320), "anchor", HEX.upper()),
        (Join(3, HEX, 320), "samples", 2**53 + 1),
        (Redirect(PEERS[0]), "leader", "../etc"),
        (Refused("no"), "reason", "a\nforged line of log"),
        (Abort("no"), "reason", "\x1b[2J"),
        (Abort("no"), "reason", "x" * 501),
        (Abort("no"), "culprit", "x\n"),
        (Manifest(3, HEX, 5000, 4096, HEX, SIGNATURE), "digests", HEX + "0"),
        (Manifest(3, HEX, 5000, 4096, HEX, SIGNATURE), "digests", HEX * 1_501),
        (Manifest(3, HEX, 5000, 4096, HEX, SIGNATURE), "chunk", 1),
        (Manifest(3, HEX, 5000, 4096, HEX, SIGNATURE), "size", 2**60),
        (Manifest(3, HEX, 5000, 4096, HEX, SIGNATURE), "signature", ""),
        (Load(3, full=False), "uploads", -1),
        (TableOffer(1, 1), "rows", 0),
        (StateRequest("block"), "what", "identity"),
    ],
)
def test_values_outside_their_bounds_name_the_field(message: Message, field: str, value: object) -> None:
    fields = json.loads(header_of(message)) | {field: value}
    assert refusal(json.dumps(fields).encode()).startswith(f"{field}: ")


@pytest.mark.parametrize("weight", [0, -2, 1e12, float("nan"), float("inf"), True, "1"])
def test_weights_that_would_spoil_a_mean_are_refused(weight: object) -> None:
    begin = json.loads(header_of(MESSAGES[1]))
    begin["members"][1]["weight"] = weight
    assert refusal(json.dumps(begin).encode()).startswith("members[1].weight: ")


def test_a_group_has_two_members_at_least_and_a_limited_number_at_most() -> None:
    begin = json.loads(header_of(MESSAGES[1]))
    for count in (0, 1, MAX_GROUP + 1, 5_000):
        members = [dataclasses.asdict(Member(PEERS[0], 1.0))] * count
        assert refusal(json.dumps(begin | {"members": members}).encode()).startswith("members: length")
