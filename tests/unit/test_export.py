"""An exported model comes back bit for bit, and is never written half or over something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blocktrain.node import export
from blocktrain.node.collect import CollectedModel, named_parameters
from blocktrain.node.export import check_target, load_export, save_export
from blocktrain.node.tensor_file import read_tensors
from blocktrain.protocol.errors import HomeError, UsageError
from tests.unit.exports import CPU, make_model


def tensors_of(collected: CollectedModel) -> list[dict[str, torch.Tensor]]:
    model = collected.model
    return [{**named_parameters(b), "table": t} for b, t in zip(model.blocks, model.tables, strict=True)]


def same(one: CollectedModel, other: CollectedModel) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return (one.rounds, one.model.spec) == (other.rounds, other.model.spec) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export of `make_model()`."""
    save_export(tmp_path / "model", make_model())
    return tmp_path / "model"


# Round trip


def test_what_was_exported_is_loaded_bit_for_bit(folder: Path) -> None:
    assert same(load_export(folder, CPU), make_model())


def test_equal_models_give_equal_files(folder: Path, tmp_path: Path) -> None:
    save_export(tmp_path / "again", make_model())
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["block-0.safetensors", "block-1.safetensors", "config.json"]
    assert all((folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_a_blocks_file_says_whose_it_is(folder: Path) -> None:
    _, metadata = read_tensors(folder / "block-1.safetensors", export.FORMAT)
    assert metadata["fingerprint"] == make_model().model.spec.fingerprint
    assert (metadata["block"], metadata["round"], len(metadata["content"])) == ("1", "5", 64)


# Where an export may be written


def test_an_earlier_export_is_replaced_and_nothing_is_left_beside_it(folder: Path) -> None:
    later = make_model(rounds=(7, 8))
    save_export(folder, later)
    assert same(load_export(folder, CPU), later)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_new_folders_and_empty_ones_are_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        save_export(target, make_model())
        assert same(load_export(target, CPU), make_model())


def test_a_link_to_a_folder_stays_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    save_export(tmp_path / "link", make_model(rounds=(7, 8)))
    assert (tmp_path / "link").is_symlink()
    assert load_export(folder, CPU).rounds == (7, 8)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"notes.txt": b"mine"}, "'notes.txt'"),
        ({"config.json": b'{"model_type": "x"}'}, "no config.json of an export"),
        ({"config.json": b"not JSON"}, "no config.json of an export"),
        ({"block-0.safetensors": b"x"}, "no config.json of an export"),
    ],
)
def test_a_folder_with_anything_else_in_it_is_left_alone(
    tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    for name, data in files.items():
        (target / name).write_bytes(data)
    with pytest.raises(UsageError, match=words):
        save_export(target, make_model())
    assert {path.name: path.read_bytes() for path in target.iterdir()} == files
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_export_to_which_something_was_added_is_left_alone(folder: Path) -> None:
    (folder / "README.md").write_text("mine")
    with pytest.raises(UsageError, match=r"README\.md"):
        save_export(folder, make_model(rounds=(7, 8)))
    assert load_export(folder, CPU).rounds == (4, 5)


def test_a_file_or_a_path_through_a_file_is_refused_before_anything_is_downloaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        check_target(tmp_path / "file")
    with pytest.raises(HomeError, match="choose another --out"):
        check_target(tmp_path / "file" / "model")


@pytest.mark.parametrize("step", ["write_tensors", "write_synced"])
def test_a_full_disk_leaves_the_earlier_export_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, step, fail)
    with pytest.raises(HomeError, match="No space left"):
        save_export(folder, make_model(rounds=(7, 8)))
    assert same(load_export(folder, CPU), make_model())
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_rename_that_fails_puts_the_earlier_export_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fail_for_the_new_one(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(HomeError, match="Input/output error"):
        save_export(folder, make_model(rounds=(7, 8)))
    assert same(load_export(folder, CPU), make_model())
