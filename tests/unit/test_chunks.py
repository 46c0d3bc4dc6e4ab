"""The bookkeeping of downloads: manifests can't be passed off, and every chunk arrives whoever fails."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.dht.chunks import MAX_FETCHERS, Board
from blocktrain.dht.manifest import (
    MAX_CHUNKS,
    State,
    Subject,
    check_manifest,
    chunk_bytes,
    chunk_count,
    make_manifest,
    same_bytes,
)
from blocktrain.protocol.errors import PeerError
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.messages import Manifest

ME, OTHER = Identity.generate(), Identity.generate()
SUBJECT = Subject("f" * 32, 0, "block")
STATE = State(bytes(range(256)) * 6_000, 3, "a" * 32)
MANIFEST = make_manifest(STATE, SUBJECT, ME)
SMALL = Manifest(3, "a" * 32, 4096 * 6 + 100, 4096, "0" * 32 * 7, "0" * 128)


def test_a_manifest_is_accepted_from_its_signer_for_its_subject_alone() -> None:
    check_manifest(MANIFEST, SUBJECT, ME.peer_id, len(STATE.data))
    with pytest.raises(PeerError, match="wrong signature"):
        check_manifest(MANIFEST, SUBJECT, OTHER.peer_id, len(STATE.data))


@pytest.mark.parametrize("change", [{"fingerprint": "e" * 32}, {"block": 1}, {"what": "table"}])
def test_a_manifest_of_something_else_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PeerError, match="wrong signature"):
        check_manifest(MANIFEST, dataclasses.replace(SUBJECT, **change), ME.peer_id, len(STATE.data))


@pytest.mark.parametrize(
    "change",
    [
        {"round": 4},
        {"anchor": "b" * 32},
        {"size": MANIFEST.size - 1},
        {"chunk": MANIFEST.chunk + 1},
        {"digests": MANIFEST.digests[::-1]},
        {"signature": "0" * 128},
    ],
)
def test_every_field_of_a_manifest_is_signed(change: dict[str, Any]) -> None:
    with pytest.raises(PeerError, match="wrong signature"):
        check_manifest(dataclasses.replace(MANIFEST, **change), SUBJECT, ME.peer_id, len(STATE.data))


def test_donors_of_the_same_bytes_agree_but_for_their_signatures() -> None:
    other = make_manifest(STATE, SUBJECT, OTHER)
    assert other != MANIFEST
    assert same_bytes(other, MANIFEST)
    assert not same_bytes(dataclasses.replace(other, round=4), MANIFEST)


def test_large_states_get_larger_chunks_not_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktrain.dht.manifest.CHUNK_BYTES", 4096)
    manifest = make_manifest(State(bytes(4096 * MAX_CHUNKS + 1), 3, "a" * 32), SUBJECT, ME)
    assert manifest.chunk == 2 * 4096
    assert chunk_count(manifest) == MAX_CHUNKS // 2 + 1


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["take", "put", "fail"])), max_size=60))
def test_whatever_donors_do_each_chunk_is_kept_once_and_none_is_lost(
    actions: list[tuple[int, str]],
) -> None:
    reports: list[int] = []
    board = Board(SMALL, lambda done, total: reports.append(done))
    taken: list[list[int]] = [[], [], []]

    def act(donor: int, action: str) -> None:
        own = taken[donor]
        if action == "take" and (index := board.take(own)) is not None:
            assert index not in own
            own.append(index)
            assert sum(index in others for others in taken) <= MAX_FETCHERS
        elif action == "put" and own:
            index = own.pop(0)
            board.put(index, bytes([index + 1]) * chunk_bytes(SMALL, index))
        elif action == "fail":
            board.give_back(own)
            own.clear()

    for donor, action in actions:
        act(donor, action)
    for donor in (1, 2):
        act(donor, "fail")
    while not board.complete:  # donor 0 alone can always finish
        before = board.verified_bytes, len(taken[0])
        act(0, "put" if taken[0] else "take")
        assert (board.verified_bytes, len(taken[0])) != before
    assert board.data == b"".join(bytes([i + 1]) * chunk_bytes(SMALL, i) for i in range(7))
    assert board.take(()) is None
    assert reports == sorted(set(reports))
    assert reports[-1] == SMALL.size
