"""The identity file: made once, private, checked; signatures bind to the peer id."""

from __future__ import annotations

import multiprocessing
import os
import stat
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from hivemind.p2p import P2P, PeerID
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol.errors import HomeError, RecordError
from blocktrain.protocol.identity import Identity, load_or_create_identity, verify

ME, OTHER = Identity.generate(), Identity.generate()
MESSAGE = b"a message"


def test_the_peer_id_is_the_one_that_libp2p_derives(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path / "identity.key")
    libp2p = PeerID.from_base58(identity.peer_id)
    assert libp2p.to_base58() == identity.peer_id
    assert libp2p.to_bytes()[-32:] == (tmp_path / "identity.key").read_bytes()[-32:]


def test_the_file_is_private_and_keeps_the_identity(tmp_path: Path) -> None:
    path = tmp_path / "new" / "home" / "identity.key"
    made = load_or_create_identity(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create_identity(path).peer_id == made.peer_id
    assert [file.name for file in path.parent.iterdir()] == ["identity.key"]
    assert path.stat().st_nlink == 1


def test_the_mode_does_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        load_or_create_identity(tmp_path / "identity.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "identity.key").stat().st_mode) == 0o600


def damaged_keys() -> dict[str, bytes]:
    good = ME.to_bytes()
    return {
        "empty": b"",
        "truncated": good[:-1],
        "too long": good + b"\n",
        "one bit flipped": good[:10] + bytes([good[10] ^ 1]) + good[11:],
        "halves of two keys": good[:36] + OTHER.to_bytes()[36:],
        "text": b"-----BEGIN PRIVATE KEY-----\n",
    }


@pytest.mark.parametrize("name", damaged_keys())
def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, name: str) -> None:
    path, content = tmp_path / "identity.key", damaged_keys()[name]
    path.write_bytes(content)
    with pytest.raises(HomeError) as caught:
        load_or_create_identity(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "move it away" in str(caught.value)
    assert path.read_bytes() == content


def test_an_rsa_key_of_hivemind_is_refused_clearly(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    P2P.generate_identity(str(path))
    with pytest.raises(HomeError, match="not an Ed25519 libp2p private key; move it away"):
        load_or_create_identity(path)


def test_homes_that_cannot_be_used_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "home")
    (tmp_path / "dangling.key").symlink_to(tmp_path / "nowhere.key")
    (tmp_path / "folder").mkdir()
    before = sorted(p.name for p in tmp_path.iterdir())
    unusable = [
        "file/identity.key",
        "file/deep/identity.key",
        "folder",
        "dangling/identity.key",
        "dangling.key",
        "n" * 300,
    ]
    for path in (*(tmp_path / name for name in unusable), Path("/proc/1/nothing/identity.key")):
        with pytest.raises(HomeError) as caught:
            load_or_create_identity(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def _create_at_once(barrier: Barrier, path: Path, answers: multiprocessing.Queue[str]) -> None:
    barrier.wait(30)
    answers.put(load_or_create_identity(path).peer_id)


def test_processes_that_create_at_once_end_with_the_same_key(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(2), context.Queue()
    path = tmp_path / "home" / "identity.key"
    children = [context.Process(target=_create_at_once, args=(barrier, path, answers)) for _ in range(2)]
    for child in children:
        child.start()
    found = {answers.get(timeout=30) for _ in children}
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    assert found == {load_or_create_identity(path).peer_id}
    assert [file.name for file in path.parent.iterdir()] == ["identity.key"]


def test_a_key_that_appears_while_ours_is_made_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, generate = tmp_path / "identity.key", Identity.generate

    def generate_late() -> Identity:
        path.write_bytes(OTHER.to_bytes())
        return generate()

    monkeypatch.setattr(Identity, "generate", generate_late)
    assert load_or_create_identity(path).peer_id == OTHER.peer_id


# Signatures


def test_only_the_owner_of_the_peer_id_signs_for_it() -> None:
    verify(ME.peer_id, MESSAGE, ME.sign(MESSAGE))
    for peer_id, message, signature in (
        (OTHER.peer_id, MESSAGE, ME.sign(MESSAGE)),
        (ME.peer_id, MESSAGE + b"!", ME.sign(MESSAGE)),
        (ME.peer_id, MESSAGE, ME.sign(MESSAGE)[:-1]),
        (ME.peer_id, MESSAGE, b""),
    ):
        with pytest.raises(RecordError, match="not signed by"):
            verify(peer_id, message, signature)


@pytest.mark.parametrize(
    "peer_id",
    [
        *("", "12D3KooW", "\ud800", "é" * 52, "1" * 52, "12D3KooW" + "z" * 44),
        *(ME.peer_id[:-1], ME.peer_id + "1", ME.peer_id + "\n", " " + ME.peer_id, ME.peer_id.lower()),
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    ],
)
def test_a_name_has_one_spelling_and_others_are_refused(peer_id: str) -> None:
    with pytest.raises(RecordError, match="is not the peer id of an Ed25519 key"):
        verify(peer_id, MESSAGE, ME.sign(MESSAGE))


def test_an_immense_peer_id_is_refused_before_it_is_decoded() -> None:
    # Decoding base58 takes quadratic time: these four megabytes would take hours.
    with pytest.raises(RecordError):
        verify("z" * 4_000_000, MESSAGE, ME.sign(MESSAGE))


@given(st.text(max_size=60), st.binary(max_size=80))
def test_anything_else_is_a_record_error(peer_id: str, signature: bytes) -> None:
    for name in (peer_id, ME.peer_id):
        with pytest.raises(RecordError):
            verify(name, MESSAGE, signature)


@given(st.binary(max_size=100))
def test_any_bytes_are_no_key(data: bytes) -> None:
    with pytest.raises(HomeError):
        Identity.from_bytes(data)
    with pytest.raises(HomeError):
        Identity.from_bytes(bytes.fromhex("08011240") + data.ljust(64, b"\x01")[:64])


def test_a_key_comes_back_from_its_bytes() -> None:
    again = Identity.from_bytes(ME.to_bytes())
    assert again.peer_id == ME.peer_id
    assert again.sign(MESSAGE) == ME.sign(MESSAGE)
