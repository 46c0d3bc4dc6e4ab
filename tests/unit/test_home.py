"""A home belongs to one process at a time, is free again when that one has ended, and says who has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktrain.protocol.errors import HomeError
from blocktrain.protocol.home import hold_home

HOLD = """
import sys
from blocktrain.protocol.home import hold_home
with hold_home(sys.argv[1], "node"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own folder, in which the default homes are."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds `home`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "home")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_home_is_made_with_the_folders_above_it_and_stays(tmp_path: Path) -> None:
    with hold_home(str(tmp_path / "a" / "b"), "node") as home:
        assert home == tmp_path / "a" / "b"
        (home / "kept").write_text("x")
    with hold_home(str(home), "node") as again:
        assert (again / "kept").read_text() == "x"


def test_the_second_holder_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with hold_home(str(tmp_path), "node"):
        with pytest.raises(HomeError) as caught, hold_home(str(tmp_path), "node"):
            raise AssertionError
        assert str(caught.value) == f"{tmp_path} is in use by process {os.getpid()}; give another --home"
        with pytest.raises(HomeError, match=f"process {os.getpid()};"), hold_home(str(tmp_path), "node"):
            raise AssertionError  # the failed attempt took nothing away


def test_a_home_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), hold_home(str(tmp_path), "node"):
        raise ZeroDivisionError
    with hold_home(str(tmp_path), "node"):
        pass


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    home = tmp_path / "home"
    with pytest.raises(HomeError, match=f"in use by process {other.pid};"), hold_home(str(home), "node"):
        raise AssertionError
    other.send_signal(signal.SIGKILL)
    other.wait(timeout=10)
    assert (home / "lock").read_text() == str(other.pid)
    with hold_home(str(home), "node"):
        assert (home / "lock").read_text() == str(os.getpid())


def test_by_default_the_first_free_folder_is_taken(user: Path) -> None:
    with hold_home("", "node") as first, hold_home("", "node") as second, hold_home("", "seed") as seed:
        names = [folder.relative_to(user / ".blocktrain").name for folder in (first, second, seed)]
        assert names == ["node-1", "node-2", "seed-1"]
    with hold_home("", "node") as again:
        assert again == first


def test_a_leading_tilde_is_the_users_folder(user: Path) -> None:
    with hold_home("~/here", "node") as home:
        assert home == user / "here"


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ("FILE", "FILE: can't be written: File exists; choose another --home"),
        ("FILE/below", "FILE/below: can't be written: Not a directory; choose another --home"),
        ("~nobody-of-this-name/x", "there is no such user here; choose another --home"),
        ("/proc/self/x", "/proc/self/x: can't be written: No such file or directory"),
    ],
)
def test_a_home_that_can_not_be_written_is_named(tmp_path: Path, chosen: str, words: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with (
        pytest.raises(HomeError) as caught,
        hold_home(chosen.replace("FILE", str(file)), "node"),
    ):
        raise AssertionError
    assert words.replace("FILE", str(file)) in str(caught.value)
    assert file.read_text() == "mine"
