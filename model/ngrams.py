"""Byte n-gram models, the baselines that a trained model has to beat.

Interpolated Witten-Bell smoothing (Witten & Bell 1991; in the recursive form of Chen & Goodman 1998,
section 2.4): a context h that was followed c(h) times, by T(h) different bytes, gives

    P(y | h) = (c(h y) + T(h) P(y | h')) / (c(h) + T(h))

where h' is h without its first byte; P(y | h) = P(y | h') if h was never seen. The trigram model backs
off to the bigram, the unigram and at last the uniform model.

Shapes: V = 256 byte values, N windows, T context length, K different trigrams of the training text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blocktrain.model.text import Text

V = 256
_CHUNK = 1 << 20
"""Bytes counted at a time: bounds memory, whatever the size of the text."""
_ROWS = 1 << 12
"""Windows scored at a time."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NGrams:
    """Unigram, bigram and trigram models of one text; make them with `fit`."""

    unigram_V: Floats
    """P(y)."""
    bigram_VV: Floats
    """P(y | x): a row for each context byte."""
    trigrams_K: Ints
    """The trigrams w, x, y that occur, ascending, packed as (w V + x) V + y."""
    counts_K: Ints
    """How often each occurs."""
    seen_VV: Ints
    """c(w x): how often a byte follows the pair w, x."""
    kinds_VV: Ints
    """T(w x): how many different bytes do."""

    def trigram(self, w: Ints, x: Ints, y: Ints) -> Floats:
        """P(y | w x), elementwise, for byte values of the same shape."""
        packed = (w * V + x) * V + y
        place = np.minimum(np.searchsorted(self.trigrams_K, packed), self.trigrams_K.size - 1)
        count = np.where(self.trigrams_K[place] == packed, self.counts_K[place], 0)
        return _witten_bell(count, self.seen_VV[w, x], self.kinds_VV[w, x], self.bigram_VV[x, y])

    def cross_entropy(self, windows: NDArray[np.uint8]) -> dict[str, float]:
        """Mean -ln P of the last T bytes of each window (N, T + 1), in nats per byte.

        A byte is predicted from the bytes before it in its window, as a model does it: the first
        target of a window has one byte of context, so the trigram model uses its bigram there.

        Returns:
            The keys uniform, unigram, bigram, trigram.
        """
        targets = windows.shape[0] * (windows.shape[1] - 1)
        assert targets > 0
        sums = np.zeros(3)
        for first in range(0, len(windows), _ROWS):
            rows = windows[first : first + _ROWS].astype(np.int64)
            x, y = rows[:, :-1], rows[:, 1:]
            bigram = self.bigram_VV[x, y]
            trigram = self.trigram(rows[:, :-2], rows[:, 1:-1], rows[:, 2:])
            sums[0] -= np.log(self.unigram_V[y]).sum()
            sums[1] -= np.log(bigram).sum()
            sums[2] -= np.log(bigram[:, 0]).sum() + np.log(trigram).sum()
        unigram, bigram, trigram = (sums / targets).tolist()
        return {"uniform": math.log(V), "unigram": unigram, "bigram": bigram, "trigram": trigram}


def fit(train: Text) -> NGrams:
    """Count a text's bytes, pairs and triples, and smooth them. Time is linear in the text.

    Raises:
        DataError: a file can't be read any more or was cut short.
    """
    assert len(train) >= 3
    unigrams_V, bigrams_VV = np.zeros(V, np.int64), np.zeros(V * V, np.int64)
    trigrams_K, counts_K = np.empty(0, np.int64), np.empty(0, np.int64)
    for start in range(0, len(train), _CHUNK):
        # Two bytes of the next chunk complete the pairs and triples that begin in this one.
        data = train.read(start, min(_CHUNK + 2, len(train) - start)).astype(np.int64)
        unigrams_V += np.bincount(data[:_CHUNK], minlength=V)
        pairs = data[:-1] * V + data[1:]
        bigrams_VV += np.bincount(pairs[:_CHUNK], minlength=V * V)
        found, counts = np.unique(pairs[:-1] * V + data[2:], return_counts=True)
        trigrams_K, counts_K = _merge(trigrams_K, counts_K, found, counts)
    return _smooth(unigrams_V, bigrams_VV.reshape(V, V), trigrams_K, counts_K)


def _smooth(unigrams_V: Ints, bigrams_VV: Ints, trigrams_K: Ints, counts_K: Ints) -> NGrams:
    uniform_V = np.full(V, 1 / V)
    unigram_V = _witten_bell(unigrams_V, unigrams_V.sum(), int(np.count_nonzero(unigrams_V)), uniform_V)
    bigram_VV = _witten_bell(
        bigrams_VV,
        bigrams_VV.sum(axis=1, keepdims=True),
        np.count_nonzero(bigrams_VV, axis=1, keepdims=True),
        unigram_V,
    )
    pairs_K = trigrams_K // V
    kinds_VV = np.bincount(pairs_K, minlength=V * V).reshape(V, V)
    # Sums of whole numbers in float64 are exact below 2**53.
    seen_VV = np.bincount(pairs_K, weights=counts_K, minlength=V * V).astype(np.int64).reshape(V, V)
    return NGrams(unigram_V, bigram_VV, trigrams_K, counts_K, seen_VV, kinds_VV)


def _witten_bell(count: Ints, seen: Ints | np.int64, kinds: Ints | int, lower: Floats) -> Floats:
    """(count + kinds × lower) / (seen + kinds), or `lower` where the context was never seen."""
    known = seen > 0
    return np.where(known, (count + kinds * lower) / np.where(known, seen + kinds, 1), lower)


def _merge(keys: Ints, counts: Ints, more_keys: Ints, more_counts: Ints) -> tuple[Ints, Ints]:
    """Add two sparse counts; keys are unique and ascending, before and after."""
    merged, where = np.unique(np.concatenate([keys, more_keys]), return_inverse=True)
    total = np.zeros(merged.size, np.int64)
    np.add.at(total, where, np.concatenate([counts, more_counts]))
    return merged, total
