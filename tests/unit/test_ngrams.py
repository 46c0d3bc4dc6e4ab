"""The n-gram baselines are Witten-Bell models, and score what a trained model is scored on."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.model import ngrams
from blocktrain.model.ngrams import NGrams, fit
from blocktrain.model.text import open_text

A, B, Z = b"abz"


def fit_bytes(folder: Path, data: bytes) -> NGrams:
    (folder / "text").write_bytes(data)
    return fit(open_text(str(folder / "text")))


def trigram(model: NGrams, w: int, x: int, y: int) -> float:
    return float(model.trigram(*(np.array([byte]) for byte in (w, x, y)))[0])


def test_a_toy_agrees_with_witten_bell_by_hand(tmp_path: Path) -> None:
    """In abaab: a 3, b 2; ab 2, ba 1, aa 1; aba, baa, aab 1 each."""
    model = fit_bytes(tmp_path, b"abaab")
    a, b, z = (3 + 2 / 256) / 7, (2 + 2 / 256) / 7, (2 / 256) / 7
    assert model.unigram_V[[A, B, Z]] == pytest.approx([a, b, z])
    a_a, b_a = (1 + 2 * a) / 5, (2 + 2 * b) / 5
    a_b, b_b = (1 + a) / 2, b / 2
    assert model.bigram_VV[A, [A, B, Z]] == pytest.approx([a_a, b_a, 2 * z / 5])
    assert model.bigram_VV[B, [A, B, Z]] == pytest.approx([a_b, b_b, z / 2])
    assert model.bigram_VV[Z, [A, B, Z]] == pytest.approx([a, b, z])
    assert trigram(model, A, B, A) == pytest.approx((1 + a_b) / 2)
    assert trigram(model, A, B, B) == pytest.approx(b_b / 2)
    assert trigram(model, A, A, B) == pytest.approx((1 + b_a) / 2)
    assert trigram(model, B, B, A) == pytest.approx(a_b)
    assert trigram(model, A, Z, A) == pytest.approx(a)


@pytest.mark.slow
@given(
    data=st.lists(st.sampled_from(b"ab\0\xff"), min_size=3, max_size=60).map(bytes),
    w=st.integers(0, 255),
    x=st.integers(0, 255),
)
def test_probabilities_sum_to_one(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, w: int, x: int
) -> None:
    model = fit_bytes(tmp_path_factory.mktemp("text"), data)
    assert model.unigram_V.sum() == pytest.approx(1)
    assert model.bigram_VV.sum(axis=1) == pytest.approx(np.ones(256))
    for pair in ((w, x), (data[0], data[1]), (data[0], x)):
        p_V = model.trigram(np.full(256, pair[0]), np.full(256, pair[1]), np.arange(256))
        assert p_V.min() > 0
        assert p_V.sum() == pytest.approx(1)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 39])
def test_counting_in_chunks_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    data = b"the cat sat on the mat, then the cat ran"
    whole = fit_bytes(tmp_path, data)
    monkeypatch.setattr(ngrams, "_CHUNK", chunk)
    pieces = fit_bytes(tmp_path, data)
    for name in NGrams.__slots__:
        assert np.array_equal(getattr(whole, name), getattr(pieces, name)), name


def test_cross_entropy_is_the_mean_over_the_targets_of_each_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngrams, "_ROWS", 2)
    model = fit_bytes(tmp_path, b"the cat sat on the mat, then the cat ran")
    rows = (b"the cat", b"hat on ", b"zzz\x00\xff x")
    sums = [0.0, 0.0, 0.0]
    for row in rows:
        for t in range(1, len(row)):
            x, y = row[t - 1], row[t]
            sums[0] -= math.log(model.unigram_V[y])
            sums[1] -= math.log(model.bigram_VV[x, y])
            # Before the window nothing is known, so its first target has a bigram's context.
            sums[2] -= math.log(trigram(model, row[t - 2], x, y) if t > 1 else model.bigram_VV[x, y])
    scores = model.cross_entropy(np.array([list(row) for row in rows], np.uint8))
    means = [total / 18 for total in sums]
    assert list(scores) == ["uniform", "unigram", "bigram", "trigram"]
    assert list(scores.values()) == pytest.approx([math.log(256), *means])


def test_a_target_with_one_byte_of_context_is_scored_by_the_bigram(tmp_path: Path) -> None:
    model = fit_bytes(tmp_path, b"abaab")
    scores = model.cross_entropy(np.array([[A, B], [B, A]], np.uint8))
    assert scores["trigram"] == scores["bigram"]
