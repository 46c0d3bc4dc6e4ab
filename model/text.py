"""Text as bytes: opening documents, holding a part out, and drawing windows from them.

A token is a byte, so a text needs no decoding: CRLF line ends and bytes that are not UTF-8 are kept
as they are. Files are memory-mapped and several documents are joined by reading only; a text larger
than memory is fine.

Shapes: B sequences in a batch, T context length, N windows.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from blocktrain.model.files import find_files, unreadable
from blocktrain.protocol.errors import DataError

HOLDOUT = 12
"""One part in this many is held out."""
MIN_DOCUMENTS = 2 * HOLDOUT
"""From this many documents on, whole documents are held out."""
MAX_MAPS = 128
"""Files that one text keeps mapped; each map holds a file descriptor, and processes have few."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of the file `path`: a document, or the part of it that a split left."""

    path: Path
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Text:
    """The bytes of one or more documents, addressed as one sequence of `len(text)` bytes.

    `pieces` has one entry for each document, in order; documents follow each other without a
    separator. Files are mapped when they are first read. They may grow, but must not be cut short
    while a text is in use. Safe to read from several threads.
    """

    def __init__(self, name: str, pieces: Iterable[Piece]) -> None:
        self.name = name
        """What error messages call this text."""
        self.pieces = tuple(piece for piece in pieces if len(piece))
        self._ends = list(itertools.accumulate(map(len, self.pieces)))
        self._map = functools.lru_cache(maxsize=MAX_MAPS)(_map)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, length: int) -> Bytes:
        """A copy of bytes [start, start + length). Raises: DataError if a file can't be read."""
        out = np.empty(length, np.uint8)
        self._fill(out, start)
        return out

    def windows(self, starts_N: Sequence[int], length: int) -> Bytes:
        """A copy (N, length) of the stretches that begin at `starts_N`.

        Raises:
            DataError: a file can't be read any more or was cut short.
        """
        out = np.empty((len(starts_N), length), np.uint8)
        for row, start in zip(out, starts_N, strict=True):
            self._fill(row, start)
        return out

    def _fill(self, row: Bytes, start: int) -> None:
        assert 0 <= start <= len(self) - row.size, "window outside the text"
        index = bisect.bisect_right(self._ends, start)
        done = 0
        while done < row.size:
            piece = self.pieces[index]
            first = piece.stop - (self._ends[index] - start - done)
            last = min(piece.stop, first + row.size - done)
            data = self._map(piece.path)
            if data.size < last:
                raise DataError(f"{piece.path}: became shorter while in use; restart to use what is left")
            row[done : done + last - first] = data[first:last]
            done += last - first
            index += 1


class BatchStream:
    """One node's reproducible batches: `batch(step)` is a pure function of seed, peer and step.

    Nothing is remembered between steps, so a node resumes at any of them. Windows are uniform over
    all stretches of context + 1 bytes of the joined documents. A window may therefore run from one
    document into the next. So short files are used rather than dropped, and every byte weighs the
    same; the price is a seam in T of as many windows as a document has bytes (0.3 % in the demo).
    """

    def __init__(self, text: Text, *, context: int, batch_size: int, seed: int, peer_id: str) -> None:
        """Raises: DataError if `text` is shorter than context + 1 bytes."""
        _require_window(text, context)
        self._text = text
        self._length = context + 1
        self._batch_size = batch_size
        digest = hashlib.sha256(f"blocktrain batches\0{seed}\0{peer_id}".encode()).digest()
        self._key = int.from_bytes(digest[:16], "little")

    def batch(self, step: int) -> torch.Tensor:
        """Windows (B, T + 1), uint8 on the CPU: inputs without the last column, targets without the first.

        Raises:
            DataError: a file can't be read any more or was cut short.
        """
        draws_B = _draws(self._key, step, self._batch_size)
        # The remainder favours low positions by less than len(text) / 2**64: nothing.
        starts_B = draws_B % np.uint64(len(self._text) - self._length + 1)
        return torch.from_numpy(self._text.windows(starts_B.tolist(), self._length))


def evaluation_windows(heldout: Text, context: int, max_bytes: int, seed: int) -> Bytes:
    """Windows (N, T + 1) that don't overlap, so that no target is counted twice.

    N is as large as the text and `max_bytes` targets (N × T) allow, and at least 1. The text's slots
    of T + 1 bytes are cut into N even strata, and `seed` picks one slot of each.

    Raises:
        DataError: the text is shorter than context + 1 bytes, or can't be read.
    """
    _require_window(heldout, context)
    slots = len(heldout) // (context + 1)
    count = min(slots, max(1, max_bytes // context))
    digest = hashlib.sha256(f"blocktrain evaluation\0{seed}".encode()).digest()
    draws_N = _draws(int.from_bytes(digest[:16], "little"), 0, count)
    edges = np.arange(count + 1, dtype=np.uint64) * np.uint64(slots) // np.uint64(count)
    chosen_N = edges[:-1] + draws_N % np.diff(edges)
    return heldout.windows((chosen_N * np.uint64(context + 1)).tolist(), context + 1)


def split(text: Text, context: int) -> tuple[Text, Text]:
    """The training and the held-out part; no byte is in both. A function of the documents alone.

    With at least `MIN_DOCUMENTS` documents every 12th one is held out, beginning with the first.
    With fewer, the last twelfth of each is (more if that would not make one window in all), and the
    `context` bytes before it are in neither part: no held-out text continues a training sentence.

    Raises:
        DataError: a part would be shorter than one window of context + 1 bytes.
    """
    if len(text.pieces) >= MIN_DOCUMENTS:
        heldout = list(text.pieces[::HOLDOUT])
        train = [piece for index, piece in enumerate(text.pieces) if index % HOLDOUT]
    else:
        wanted = max(len(text) // HOLDOUT, context + 1)
        pairs = [_cut(piece, wanted, len(text), context) for piece in text.pieces]
        train, heldout = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    parts = Text(f"{text.name} (training part)", train), Text(f"{text.name} (held-out part)", heldout)
    for part, use in zip(parts, ("training", "evaluation"), strict=True):
        if len(part) <= context:
            raise DataError(
                f"{text.name}: too short: {len(text)} bytes leave {len(part)} for {use}, where one window "
                f"of context + 1 takes {context + 1}; use a longer text or a smaller model.context"
            )
    return parts


def open_text(path_spec: str) -> Text:
    """Open a file, all files under a folder, or the files that a glob matches; see `find_files`.

    Raises:
        DataError: nothing there, no files, nothing but empty files, not a regular file, unreadable,
            or a git-lfs pointer in place of its content.
    """
    return Text(path_spec, (Piece(path, 0, size) for path, size in find_files(path_spec)))


def _map(path: Path) -> Bytes:
    try:
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:  # ValueError: the file was emptied after it was opened
        raise unreadable(path, error) from None


def _cut(piece: Piece, wanted: int, total: int, context: int) -> tuple[Piece, Piece]:
    """Split one document so that all documents together give at least `wanted` of `total` bytes."""
    cut = piece.stop - -(-len(piece) * wanted // total)
    cut = max(cut, piece.start)
    return Piece(piece.path, piece.start, max(piece.start, cut - context)), Piece(piece.path, cut, piece.stop)


def _draws(key: int, step: int, count: int) -> NDArray[np.uint64]:
    """Uniform 64-bit draws (count,) of a counter-based generator (Salmon et al. 2011, Philox-4x64).

    The step is the counter's second word, so steps never share a draw. Raw draws, because numpy
    promises a stable stream for bit generators only (NEP 19).
    """
    assert 0 <= step < 2**64
    return np.random.Philox(key=key, counter=step << 64).random_raw(count)


def _require_window(text: Text, context: int) -> None:
    if len(text) <= context:
        raise DataError(
            f"{text.name}: {len(text)} bytes are fewer than one window of context + 1 = {context + 1}; "
            "use a longer text or a smaller model.context"
        )
