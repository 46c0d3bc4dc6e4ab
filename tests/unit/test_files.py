"""The files of a text are found as promised, and unusable ones are refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blocktrain.model.text import Text, open_text
from blocktrain.protocol.errors import DataError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def content(text: Text) -> bytes:
    return text.read(0, len(text)).tobytes()


def test_bytes_are_kept_as_they_are(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbfone\r\ntwo\r\n\xff\xfe\x00\x80 not UTF-8"
    (tmp_path / "a.txt").write_bytes(data)
    assert content(open_text(str(tmp_path / "a.txt"))) == data


def test_a_folder_is_read_recursively_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c", ".hidden", ".git/config", "c/.keep"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    text = open_text(str(tmp_path))
    assert content(text) == b"<a/b/c><a/z.txt><b.txt>"
    assert len(text.pieces) == 3


def test_a_glob_matches_files_in_any_folder(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c.md", "folder.txt/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    assert content(open_text(f"{tmp_path}/**/*.txt")) == b"<a/z.txt><b.txt>"


def test_a_file_whose_name_looks_like_a_glob_is_opened(tmp_path: Path) -> None:
    (tmp_path / "[draft].txt").write_text("draft")
    (tmp_path / "d.txt").write_text("other")
    assert content(open_text(str(tmp_path / "[draft].txt"))) == b"draft"


def test_the_home_folder_may_be_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("home")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert content(open_text("~/a.txt")) == b"home"
    assert content(open_text("~/*.txt")) == b"home"


def test_empty_files_and_dangling_links_among_others_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, data in (("a", b""), ("b", b"one"), ("c", b""), ("d", b"two")):
        (tmp_path / name).write_bytes(data)
    assert content(open_text(str(tmp_path))) == b"onetwo"


def test_a_file_reached_twice_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("same")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "c").hardlink_to(tmp_path / "a")
    text = open_text(str(tmp_path))
    assert [piece.path.name for piece in text.pieces] == ["a"]


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


def _files(**files: bytes) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return str(folder)

    return make


UNUSABLE: dict[str, tuple[Callable[[Path], str], str]] = {
    "missing": (lambda folder: f"{folder}/no.txt", "no.txt: no such file or folder; check the path"),
    "empty file": (lambda folder: _files(a=b"")(folder) + "/a", "/a: the file is empty; give a text"),
    "only empty files": (_files(a=b"", b=b""), "all 2 files are empty; give a text"),
    "folder without files": (str, "the folder holds no files"),
    "only hidden files": (_files(**{".a": b"text"}), "(hidden ones don't count); add some"),
    "glob without match": (lambda folder: f"{folder}/*.txt", "*.txt: the pattern matches no files; check it"),
    "pipe": (_pipe, "/pipe: not a file, a folder or a glob"),
    "below a file": (lambda folder: _files(a=b"x")(folder) + "/a/b", "Not a directory; check the path"),
    "no path": (lambda _: "", "path of the text: not a file, a folder or a glob"),
    "null character": (lambda _: "a\0b", "'a\\x00b': can't be read"),
    "name too long": (lambda folder: f"{folder}/{'a' * 300}", "can't be read: File name too long"),
    "git-lfs pointer": (
        _files(a=b"text", b=POINTER),
        "/b: a git-lfs pointer, not the text itself; run `git lfs pull`",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_path_is_refused_in_one_line_that_names_it(case: str, tmp_path: Path) -> None:
    make, message = UNUSABLE[case]
    with pytest.raises(DataError) as caught:
        open_text(make(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


# Permissions are played by the calls that meet them: root, as in a container, may read everything.


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str = "r") -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    (tmp_path / "secret.txt").touch()
    with pytest.raises(DataError, match=r"secret\.txt: can't be read: Permission denied; check"):
        open_text(str(tmp_path))


def test_an_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: str) -> Iterator[os.DirEntry[str]]:
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    (tmp_path / "secret").mkdir()
    with pytest.raises(DataError, match=r"secret: can't be read: Permission denied; check"):
        open_text(str(tmp_path))
