"""What a node says it needs is what it takes, and what the machine lacks is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import torch

from blocktrain.model.text import open_text, split
from blocktrain.node.preflight import (
    Needs,
    check_room,
    describe_memory,
    describe_text,
    estimate_needs,
    pick_device,
    set_threads,
)
from blocktrain.protocol.errors import HomeError, UsageError
from blocktrain.protocol.spec import RunSpec
from tests.unit.trainers import make_trainer, small_spec

ROUND = """
import json, sys
from pathlib import Path
import torch
import blocktrain.node.cli
from blocktrain.node.checkpoint import capture, save
from blocktrain.protocol.spec import RunSpec
from tests.unit.trainers import make_trainer, train

torch.set_num_threads(1)
folder = Path(sys.argv[1])
trainer = make_trainer(folder, RunSpec.from_mapping(json.loads(sys.argv[2])))
train(trainer, 2)
snapshot = trainer.snapshot()
train(trainer, 1)
trainer.commit(snapshot.values_N * 0.5, 1, snapshot, 1)
path = save(folder / "kept", capture(trainer))
# ru_maxrss would begin with that of the process that forked this one
status = Path("/proc/self/status").read_text()
peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
print(json.dumps([sum(p.numel() for p in trainer.learner.parameters), peak, path.stat().st_size]))
"""


@pytest.fixture
def threads() -> Iterator[None]:
    """Put the process's number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("model", [{}, {"d_model": 256, "context": 64, "layers": 4}])
def test_the_estimate_holds_for_a_round_and_a_checkpoint_and_is_not_far_above(
    tmp_path: Path, model: dict[str, int]
) -> None:
    spec = small_spec("small", **model)
    arguments = [str(tmp_path), json.dumps(asdict(spec))]
    process = subprocess.run(
        [sys.executable, "-c", ROUND, *arguments], cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE, text=True, timeout=60, check=True,
    )  # fmt: skip
    parameters, peak_bytes, file_bytes = json.loads(process.stdout)
    needs = estimate_needs(spec, parameters)
    assert peak_bytes < needs.memory < 2 * peak_bytes
    assert needs.disk / 3 == pytest.approx(file_bytes, rel=0.1)


def test_needs_grow_with_parameters_and_with_the_batch(tmp_path: Path) -> None:
    spec = small_spec()
    larger = RunSpec.from_mapping(asdict(replace(spec, optimizer=replace(spec.optimizer, batch=400))))
    needs = estimate_needs(spec, 1000)
    assert estimate_needs(spec, 2000).memory > needs.memory
    assert estimate_needs(larger, 1000).memory > needs.memory
    assert estimate_needs(larger, 1000).disk == needs.disk


def test_a_block_that_fits_is_described(tmp_path: Path) -> None:
    text = check_room(Needs(10, 2_000_000, 1_000_000), tmp_path)
    assert text.startswith("2 MB needed, ")
    assert "disk 1 MB of " in text


@pytest.mark.parametrize(
    ("memory", "disk", "words"),
    [
        (2**60, 1, "MB of memory, .* are free; choose a run with smaller blocks or a larger machine"),
        (1, 2**60, "MB of disk space in .*/home, .* are free; choose another --home"),
    ],
)
def test_a_block_that_does_not_fit_is_refused_with_both_figures(
    tmp_path: Path, memory: int, disk: int, words: str
) -> None:
    (tmp_path / "home").mkdir()
    with pytest.raises(HomeError, match=f"^this block needs 1,152,921,504,607 {words}"):
        check_room(Needs(10, memory, disk), tmp_path / "home")


def test_what_is_free_is_what_the_system_says(tmp_path: Path) -> None:
    free_memory, free_disk = psutil.virtual_memory().available, shutil.disk_usage(tmp_path).free
    check_room(Needs(1, free_memory // 2, free_disk // 2), tmp_path)
    with pytest.raises(HomeError, match="memory"):
        check_room(Needs(1, psutil.virtual_memory().total, 1), tmp_path)


@pytest.mark.usefixtures("threads")
def test_threads_are_those_asked_for_or_all_that_this_process_may_use() -> None:
    cores = len(os.sched_getaffinity(0))
    assert (set_threads(1), torch.get_num_threads()) == (1, 1)
    assert (set_threads(0), torch.get_num_threads()) == (cores, cores)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("wanted", [-1, 100_000])
def test_impossible_threads_are_refused(wanted: int) -> None:
    with pytest.raises(UsageError, match=f"^--threads {wanted}: this machine has .* or 0 for all"):
        set_threads(wanted)


def test_a_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == torch.device("cuda")
    assert pick_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("cuda", "--device cuda: torch finds no such device here; use --device cpu"),
        ("mps", "--device mps: torch finds no such device here; use --device cpu"),
        ("gpu", "--device 'gpu': use auto, cpu, cuda or mps"),
        ("", "--device '': use auto, cpu, cuda or mps"),
        ("cpu:x", "--device 'cpu:x': "),
    ],
)
def test_a_device_that_is_not_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, wanted: str, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UsageError) as caught:
        pick_device(wanted)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_a_text_is_described_by_both_of_its_parts(tmp_path: Path) -> None:
    make_trainer(tmp_path)
    train, heldout = split(open_text(str(tmp_path / "text.txt")), 16)
    expected = f"{len(train):,} bytes to train on, {len(heldout):,} held out (2 pieces)"
    assert describe_text(train, heldout) == expected


def test_the_parts_of_the_memory_are_the_whole() -> None:
    needs = estimate_needs(small_spec(), 1_000_000)
    numbers = [float(word) for word in describe_memory(needs).replace(",", "").split() if word[0].isdigit()]
    assert len(numbers) == 5
    assert sum(numbers) == pytest.approx(needs.memory / 1e6, abs=3)
