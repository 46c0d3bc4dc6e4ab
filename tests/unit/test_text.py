"""Texts are joined, split and cut into windows as promised, and too short ones are refused."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from blocktrain.model.text import (
    HOLDOUT,
    MAX_MAPS,
    MIN_DOCUMENTS,
    BatchStream,
    Piece,
    Text,
    evaluation_windows,
    open_text,
    split,
)
from blocktrain.protocol.errors import DataError


def write(folder: Path, *documents: bytes) -> Text:
    """A folder with one file for each document, opened."""
    for index, data in enumerate(documents):
        (folder / f"{index:04}.txt").write_bytes(data)
    return open_text(str(folder))


def content(text: Text) -> bytes:
    return text.read(0, len(text)).tobytes()


def places(text: Text) -> set[tuple[Path, int]]:
    """Every byte of a text as its file and position there."""
    return {(piece.path, at) for piece in text.pieces for at in range(piece.start, piece.stop)}


# Reading


@pytest.mark.slow
@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=6), st.data())
def test_windows_are_slices_of_the_joined_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: list[bytes], data: st.DataObject
) -> None:
    text, joined = write(tmp_path_factory.mktemp("text"), *documents), b"".join(documents)
    length = data.draw(st.integers(1, len(joined)))
    starts = data.draw(st.lists(st.integers(0, len(joined) - length), min_size=1, max_size=4))
    rows = text.windows(starts, length)
    assert [row.tobytes() for row in rows] == [joined[start : start + length] for start in starts]


def test_more_files_than_a_process_may_open_can_be_read(tmp_path: Path) -> None:
    documents = [b"%04d" % index for index in range(MAX_MAPS + 100)]
    text = write(tmp_path, *documents)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + MAX_MAPS + 10, hard))
    try:
        assert content(text) == b"".join(documents)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_that_vanishes_or_shrinks_before_it_is_read_is_named(tmp_path: Path) -> None:
    text = write(tmp_path, b"first", b"second", b"third")
    (tmp_path / "0000.txt").unlink()
    (tmp_path / "0001.txt").write_bytes(b"sec")
    (tmp_path / "0002.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"0000\.txt: can't be read: No such file"):
        text.read(0, 5)
    with pytest.raises(DataError, match=r"0001\.txt: became shorter while in use"):
        text.read(5, 6)
    with pytest.raises(DataError, match=r"0002\.txt: can't be read"):
        text.read(11, 5)


# Splitting


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(2, 16))
def test_the_parts_of_a_split_never_overlap(sizes: list[int], context: int) -> None:
    text = Text("text", [Piece(Path(str(index)), 0, size) for index, size in enumerate(sizes)])
    try:
        train, heldout = split(text, context)
    except DataError:
        reject()
    assert not places(train) & places(heldout)
    assert places(train) | places(heldout) <= places(text)
    assert min(len(train), len(heldout)) >= context + 1
    assert split(text, context)[0].pieces == train.pieces


@pytest.mark.parametrize("count", [MIN_DOCUMENTS, MIN_DOCUMENTS + 1, 100])
def test_of_many_documents_every_twelfth_is_held_out_whole(count: int) -> None:
    text = Text("text", [Piece(Path(str(index)), 0, 50) for index in range(count)])
    train, heldout = split(text, 8)
    assert heldout.pieces == text.pieces[::HOLDOUT]
    assert places(train) | places(heldout) == places(text)


def test_of_few_documents_the_last_twelfth_of_each_is_held_out_behind_a_gap() -> None:
    sizes, context = (1200, 2400, 12_000), 16
    text = Text("text", [Piece(Path(str(size)), 0, size) for size in sizes])
    train, heldout = split(text, context)
    assert [(piece.start, piece.stop) for piece in heldout.pieces] == [
        (1100, 1200),
        (2200, 2400),
        (11_000, 12_000),
    ]
    assert [(piece.start, piece.stop) for piece in train.pieces] == [(0, 1084), (0, 2184), (0, 10_984)]


def test_a_short_text_holds_out_one_whole_window_or_is_refused() -> None:
    context, enough = 16, 17 + 16 + 17
    train, heldout = split(Text("my.txt", [Piece(Path("my.txt"), 0, enough)]), context)
    assert (len(train), len(heldout)) == (17, 17)
    with pytest.raises(
        DataError, match=r"^my.txt: too short: 49 bytes leave 16 for training, .* smaller model.context"
    ):
        split(Text("my.txt", [Piece(Path("my.txt"), 0, enough - 1)]), context)


def test_many_documents_that_leave_too_little_for_evaluation_are_refused() -> None:
    text = Text("notes", [Piece(Path(str(index)), 0, 4) for index in range(MIN_DOCUMENTS)])
    with pytest.raises(DataError, match=r"^notes: too short: 96 bytes leave 8 for evaluation"):
        split(text, 16)


# Batches


def stream(
    text: Text, *, seed: int = 0, peer_id: str = "Qm", batch_size: int = 4, context: int = 8
) -> BatchStream:
    return BatchStream(text, context=context, batch_size=batch_size, seed=seed, peer_id=peer_id)


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """5,000 random bytes in three documents."""
    data = np.random.default_rng(0).bytes(5000)
    return write(tmp_path_factory.mktemp("prose"), data[:100], data[100:2000], data[2000:])


def test_a_batch_is_windows_of_one_byte_more_than_the_context(prose: Text) -> None:
    windows_BT1 = stream(prose).batch(0)
    assert windows_BT1.shape == (4, 9)
    assert windows_BT1.dtype == torch.uint8
    for window_T1 in windows_BT1:
        assert bytes(window_T1.tolist()) in content(prose)


@pytest.mark.slow
@given(step=st.integers(0, 2**63), seed=st.integers(0, 2**63 - 1), peer_id=st.text("Qm12", max_size=8))
def test_a_batch_is_a_function_of_seed_peer_and_step(prose: Text, step: int, seed: int, peer_id: str) -> None:
    first = stream(prose, seed=seed, peer_id=peer_id)
    second = stream(prose, seed=seed, peer_id=peer_id)
    for earlier in range(3):
        second.batch(earlier)
    assert torch.equal(first.batch(step), second.batch(step))


def test_resuming_gives_the_batches_of_an_uninterrupted_run(prose: Text) -> None:
    whole = stream(prose)
    batches = [whole.batch(step) for step in range(10)]
    resumed = stream(prose)
    assert all(torch.equal(resumed.batch(step), batches[step]) for step in range(6, 10))
    assert len({tuple(batch.flatten().tolist()) for batch in batches}) == 10


def test_peers_and_seeds_have_streams_of_their_own(prose: Text) -> None:
    streams = [stream(prose), stream(prose, peer_id="Qn"), stream(prose, seed=1)]
    batches = {tuple(each.batch(5).flatten().tolist()) for each in streams}
    assert len(batches) == 3


def test_the_stream_is_the_same_on_every_machine(tmp_path: Path) -> None:
    text = write(tmp_path, bytes(range(256)))
    assert stream(text, seed=7, peer_id="QmPeer", context=2).batch(3)[:, 0].tolist() == [54, 217, 175, 214]


def test_every_window_is_drawn_equally_often(tmp_path: Path) -> None:
    text = write(tmp_path, bytes(range(7)), bytes(range(7, 18)))
    starts_B = stream(text, batch_size=10_000).batch(0)[:, 0]
    counts = torch.bincount(starts_B)
    assert counts.numel() == 10
    assert (counts - 1000).abs().max() < 5 * 30  # five standard deviations of a binomial(10,000, 0.1)


def test_documents_shorter_than_a_window_are_used(tmp_path: Path) -> None:
    text = write(tmp_path, *(bytes([index]) * 3 for index in range(20)))
    windows = stream(text, batch_size=200).batch(0)
    assert set(windows.flatten().tolist()) == set(range(20))


def test_batches_hold_no_byte_that_is_held_out(tmp_path: Path) -> None:
    train, heldout = split(write(tmp_path, *(bytes(1100) + b"x" * 100 for _ in range(3))), 8)
    assert set(content(heldout)) == {ord("x")}
    assert not stream(train, batch_size=5000).batch(0).any()


def test_a_text_without_a_whole_window_is_refused(tmp_path: Path) -> None:
    text = write(tmp_path, b"12345678")
    with pytest.raises(
        DataError, match=r"8 bytes are fewer than one window of context \+ 1 = 9; use a longer text"
    ):
        stream(text)
    with pytest.raises(DataError, match="8 bytes are fewer than one window"):
        evaluation_windows(text, 8, 100, 0)


# Evaluation windows


@pytest.fixture(scope="module")
def positions(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Big-endian 16-bit numbers 0, 1, 2 …, so that a window of even length tells where it lies."""
    data = np.arange(5000, dtype=">u2").tobytes()
    return write(tmp_path_factory.mktemp("positions"), data[:3001], data[3001:])


@given(half=st.integers(1, 100), max_bytes=st.integers(0, 20_000), seed=st.integers(0, 2**63 - 1))
def test_evaluation_windows_never_overlap(positions: Text, half: int, max_bytes: int, seed: int) -> None:
    context = 2 * half - 1
    windows = evaluation_windows(positions, context, max_bytes, seed)
    numbers = windows.view(">u2")
    assert windows.shape[1] == context + 1
    assert np.unique(numbers).size == numbers.size
    assert len(windows) == min(10_000 // (context + 1), max(1, max_bytes // context))
    assert np.array_equal(windows, evaluation_windows(positions, context, max_bytes, seed))


def test_evaluation_windows_are_spread_evenly_and_chosen_by_the_seed(positions: Text) -> None:
    windows = evaluation_windows(positions, 9, 90, 0)
    assert (windows.view(">u2")[:, 0] // 500).tolist() == list(range(10))
    assert not np.array_equal(windows, evaluation_windows(positions, 9, 90, 1))
