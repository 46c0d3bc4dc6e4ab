"""`blocktrain-eval` and `blocktrain-export`, as far as they go without a swarm."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blocktrain.model.text import evaluation_windows, open_text, split
from blocktrain.node import cli_eval, cli_export
from blocktrain.node.export import save_export
from blocktrain.protocol.command import run_command
from tests.unit.exports import make_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export of `make_model()`."""
    save_export(tmp_path / "model", make_model())
    return tmp_path / "model"


@pytest.fixture
def process_settings() -> Iterator[None]:
    """A command sets up logging and threads for its whole process; put both back."""
    handlers, threads = logging.root.handlers[:], torch.get_num_threads()
    yield
    logging.root.handlers[:] = handlers
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = ["the", "state", "of", "the", "union", "is", "strong", "and", "at", "peace"]
    picks = np.random.default_rng(1).integers(0, len(words), 6000)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(words[i] for i in picks))
    return path


def evaluate(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = run_command(
        cli_eval.COMMAND,
        cli_eval.EvalOptions,
        cli_eval.run,
        [*arguments, "--threads", "1", "--device", "cpu"],
    )
    return code, *capsys.readouterr()


@pytest.mark.usefixtures("process_settings")
def test_an_export_is_evaluated_offline_with_the_promised_document(
    folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", str(folder), "--data", str(text), "--bytes", "800", "--draws", "3", "--json")
    code, out, _ = evaluate(*arguments, capsys=capsys)
    document: dict[str, Any] = json.loads(out)
    assert code == 0
    assert list(document) == ["ce", "baselines", "bytes_evaluated", "round"]
    assert list(document["ce"]) == ["ensemble", "euler-zero", "euler-noise", "euler-noise:3", "blocks"]
    assert (document["bytes_evaluated"], document["round"]) == (800, [4, 5])
    baselines = document["baselines"]
    assert list(baselines) == ["uniform", "unigram", "bigram", "trigram"]
    assert baselines["uniform"] == math.log(256) > baselines["unigram"] > baselines["bigram"]
    # Untrained blocks know nothing, and say nearly that.
    assert document["ce"]["blocks"] == pytest.approx([math.log(256)] * 2, abs=0.2)
    assert evaluate(*arguments, capsys=capsys)[1] == out


@pytest.mark.usefixtures("process_settings")
def test_a_readout_has_the_same_value_alone_as_among_others_and_depends_on_the_seed(
    folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ce(*arguments: str) -> dict[str, Any]:
        source = ("--model", str(folder), "--data", str(text), "--bytes", "320", "--json")
        values: dict[str, Any] = json.loads(evaluate(*source, *arguments, capsys=capsys)[1])["ce"]
        return values

    everything = ce()
    alone = ce("--readout", "euler-noise:8", "--readout", "block:1")
    assert alone == {"euler-noise:8": everything["euler-noise:8"], "blocks": [None, everything["blocks"][1]]}
    assert ce("--readout", "euler-noise:8", "--seed", "1") != ce("--readout", "euler-noise:8")


@pytest.mark.usefixtures("process_settings")
def test_people_get_a_table_with_the_best_readout_marked_and_what_was_measured(
    folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ("--model", str(folder), "--data", str(text), "--bytes", "320", "--readout", "ensemble")
    code, out, _ = evaluate(*source, capsys=capsys)
    rows = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
    assert code == 0
    assert list(rows) == ["ensemble", "uniform", "unigram", "bigram", "trigram"]
    assert "best readout" in rows["ensemble"]
    assert rows["uniform"].split()[3:6:2] == ["5.5452", "8.0000"]
    assert f"320 bytes in 20 windows from the held-out part of {text}" in out
    assert "block 0: 4, block 1: 5" in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model", "MODEL"], 2, "--data is missing"),
        (["--data", "TEXT"], 2, "--initial-peers is missing"),
        (
            ["--data", "TEXT", "--model", "MODEL", "--initial-peers", "/ip4/1.1.1.1/tcp/1"],
            2,
            "exclude each other",
        ),
        (["--data", "TEXT", "--model", "MODEL", "--bytes", "0"], 2, "--bytes 0"),
        (["--data", "TEXT", "--model", "MODEL", "--draws", "9999"], 2, "--draws 9999"),
        (["--data", "TEXT", "--model", "MODEL", "--seed", "-1"], 2, "--seed -1"),
        (["--data", "TEXT", "--model", "MODEL", "--readout", "block:2"], 2, "block:2"),
        (["--data", "TEXT", "--model", "MODEL/nothing"], 2, "no such folder"),
        (["--data", "MODEL/config.json", "--model", "."], 1, "config.json: is missing"),
        (["--data", "TEXT", "--initial-peers", "nonsense"], 2, "not a multiaddr"),
    ],
)
@pytest.mark.usefixtures("process_settings")
def test_bad_usage_is_one_line_on_stderr_and_nothing_on_stdout(
    folder: Path, text: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    filled = [a.replace("MODEL", str(folder)).replace("TEXT", str(text)) for a in arguments]
    got, out, error = evaluate(*filled, capsys=capsys)
    assert (got, out) == (code, "")
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json"], "--out is missing"),
        (["--out", "FOLDER/new"], "--initial-peers is missing"),
        (["--out", "FOLDER"], "'text.txt', which no export does"),
    ],
)
@pytest.mark.usefixtures("process_settings", "text")
def test_an_export_that_can_not_work_is_refused_before_joining(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    filled = [a.replace("FOLDER", str(tmp_path)) for a in arguments]
    code = run_command(cli_export.COMMAND, cli_export.ExportOptions, cli_export.run, filled)
    out, error = capsys.readouterr()
    assert (code, out) == (2, "")
    assert words in error
    assert error.count("\n") == 1


def test_an_evaluation_that_is_cancelled_ends_at_once(text: Path) -> None:
    model, answers, draws = make_model().model, 0, 1024
    train, heldout = split(open_text(str(text)), 16)
    windows = evaluation_windows(heldout, 16, 16, seed=0)

    async def cancel_at_the_first_answer() -> None:
        begun, loop = asyncio.Event(), asyncio.get_running_loop()

        def count(*_: object) -> None:
            nonlocal answers
            answers += 1
            loop.call_soon_threadsafe(begun.set)

        model.blocks[0].register_forward_pre_hook(count)
        readouts = [f"euler-noise:{draws}"]
        work = cli_eval.evaluate_in_thread(model, train, windows, readouts, 0, lambda done, total: None)
        task = asyncio.ensure_future(work)
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_at_the_first_answer())  # waits for the thread
    assert 0 < answers < draws
