"""Every kind of damage to an exported model is one line that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from blocktrain.node.export import CONFIG, FORMAT, load_export, save_export
from blocktrain.node.tensor_file import read_tensors, write_tensors
from blocktrain.protocol.errors import CheckpointError, UsageError
from tests.unit.exports import CPU, make_model

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export of `make_model()`."""
    save_export(tmp_path / "model", make_model())
    return tmp_path / "model"


def rewrite(path: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / CONFIG).read_bytes()) | changes
    (folder / CONFIG).write_text(json.dumps(config))


def edit_tensors(path: Path, *, changes: dict[str, str] | None = None, drop: str = "", into: int = 1) -> None:
    """Write a block's file anew, with a hash that fits, but other metadata or without a tensor."""
    tensors, metadata = read_tensors(path, FORMAT)
    tensors.pop(drop, None)
    write_tensors(path, tensors, metadata | (changes or {}), into)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flip_last_bit(data: bytearray) -> None:
    data[-1] ^= 1


BLOCK = "block-1.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "block cut short": (
        lambda f: rewrite(f / BLOCK, lambda d: d.__delitem__(slice(-9, None))),
        BLOCK,
        "damaged",
    ),
    "block of a few bytes": (lambda f: (f / BLOCK).write_bytes(b"abc"), BLOCK, "too short"),
    "block empty": (lambda f: (f / BLOCK).write_bytes(b""), BLOCK, "too short"),
    "block with a flipped bit": (lambda f: rewrite(f / BLOCK, flip_last_bit), BLOCK, "does not fit its hash"),
    "block missing": (lambda f: (f / BLOCK).unlink(), BLOCK, "can't be read: No such file"),
    "block a git-lfs pointer": (lambda f: (f / BLOCK).write_bytes(LFS), BLOCK, "git lfs pull"),
    "block a folder": (
        lambda f: replace_by_folder(f / BLOCK),
        BLOCK,
        "can't be read: Is a dir",
    ),
    "block of a later format": (lambda f: edit_tensors(f / BLOCK, into=2), BLOCK, "update blocktrain"),
    "block of another run": (
        lambda f: edit_tensors(f / BLOCK, changes={"fingerprint": "0" * 32}),
        BLOCK,
        "another run",
    ),
    "blocks swapped": (
        lambda f: (f / BLOCK).write_bytes((f / "block-0.safetensors").read_bytes()),
        BLOCK,
        "block 0",
    ),
    "block of another round": (
        lambda f: edit_tensors(f / BLOCK, changes={"round": "6"}),
        BLOCK,
        "holds block 1 of round 6",
    ),
    "block without its table": (lambda f: edit_tensors(f / BLOCK, drop="table"), BLOCK, "'table' is missing"),
    "config missing": (lambda f: (f / CONFIG).unlink(), CONFIG, "is missing"),
    "config a git-lfs pointer": (lambda f: (f / CONFIG).write_bytes(LFS), CONFIG, "git lfs pull"),
    "config cut short": (
        lambda f: rewrite(f / CONFIG, lambda d: d.__delitem__(slice(40, None))),
        CONFIG,
        "JSON",
    ),
    "config of another program": (
        lambda f: (f / CONFIG).write_text('{"model_type": "x"}'),
        CONFIG,
        "no format",
    ),
    "config huge": (lambda f: (f / CONFIG).write_bytes(b" " * 200_000), CONFIG, "not the configuration"),
    "config of a later format": (lambda f: edit_config(f, format=2), CONFIG, "update blocktrain"),
    "config with a nonsense format": (lambda f: edit_config(f, format="x"), CONFIG, "damaged"),
    "config with another seed": (
        lambda f: edit_config(f, run=make_model(seed=4).model.spec.to_mapping()),
        CONFIG,
        "does not fit its fingerprint",
    ),
    "config with an impossible run": (lambda f: edit_config(f, run={"name": ""}), CONFIG, "run: name"),
    "config with a missing round": (lambda f: edit_config(f, rounds=[4]), CONFIG, "1 of them for 2 blocks"),
    "config with text for rounds": (lambda f: edit_config(f, rounds="45"), CONFIG, "rounds: expected a list"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line_that_names_the_file(folder: Path, kind: str) -> None:
    damage, name, words = DAMAGE[kind]
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load_export(folder, CPU)
    message = str(caught.value)
    assert message.startswith(str(folder / name))
    assert words in message
    assert "\n" not in message


def test_a_safetensors_file_of_another_program_is_refused(folder: Path) -> None:
    save_file({"table": torch.ones(2, dtype=torch.bfloat16)}, folder / BLOCK, {"format": "pt"})
    with pytest.raises(CheckpointError, match="not a file of blocktrain"):
        load_export(folder, CPU)


def test_a_folder_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        load_export(tmp_path / "model", CPU)
