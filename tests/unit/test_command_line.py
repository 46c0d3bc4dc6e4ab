"""How options are read from the command line and from TOML files, and how bad ones are refused."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from blocktrain.protocol.command import Command, CommonOptions, run_command

COMMAND = Command("blocktrain-test", "Do nothing.", "blocktrain-test --size 3")


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    size: int = 1
    ratio: float = 0.5
    loud: bool = False
    names: tuple[str, ...] = ("default",)
    initial_peers: tuple[str, ...] = ()


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """A command sets up logging for its whole process; put it back."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def parse(*arguments: str) -> Options:
    """The options that the command's body gets."""
    got: list[Options] = []

    async def main(options: Options) -> int:
        got.append(options)
        return 0

    assert run_command(COMMAND, Options, main, arguments) == 0
    return got[0]


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command line is refused."""

    async def main(options: Options) -> int:
        raise AssertionError

    assert run_command(COMMAND, Options, main, arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("blocktrain-test: error: ")
    assert err.count("\n") == 1
    return err


# The command line


def test_no_arguments_give_the_defaults_and_do_not_fall_back_to_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["blocktrain-test", "--size", "7"])
    assert parse() == Options()
    seen = []

    async def main(options: Options) -> int:
        seen.append(options.size)
        return 0

    assert run_command(COMMAND, Options, main) == 0
    assert seen == [7]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--initial-peers", "a", "b", "--size", "2"],
        ["--initial-peers", "a", "--size", "2", "--initial-peers", "b"],
        ["--initial-peers=a", "--size=2", "--initial-peers=b"],
        ["--initial_peers", "a", "--initial_peers", "b", "--size", "2"],
        ["--initial-peers", "a", "--initial_peers=b", "--size", "2"],
    ],
)
def test_an_option_with_several_values_may_be_repeated(arguments: list[str]) -> None:
    options = parse(*arguments)
    assert (options.initial_peers, options.size, options.names) == (("a", "b"), 2, ("default",))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sise", "3"], "--sise"),
        (["--size", "three"], "three"),
        (["--size"], "--size"),
        (["stray"], "stray"),
        (["--config"], "--config"),
    ],
)
def test_bad_usage_is_one_line_that_names_the_option(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    line = refuse(capsys, *arguments)
    assert words in line
    assert "(see blocktrain-test --help)" in line


@pytest.mark.slow
def test_a_terminal_without_our_characters_gets_help_and_clean_errors() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "blocktrain.dht.cli_peers", *arguments],
            env=os.environ | {"PYTHONIOENCODING": "ascii"},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    shown, refused = run("--help"), run("--sise", "3")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "--join-timeout SECONDS" in shown.stdout
    expected = "blocktrain-peers: error: Unrecognized options: --sise, 3 (see blocktrain-peers --help)\n"
    assert (refused.returncode, refused.stderr) == (2, expected)


# Config files


def test_a_config_file_gives_defaults_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(
        b"\xef\xbb\xbfsize = 5\r\nratio = 2\r\nloud = true\r\nnames = ['x', 'y']\r\ninitial-peers = ['p']\r\n"
    )
    assert parse("--config", str(path)) == Options(
        config=str(path), size=5, ratio=2.0, loud=True, names=("x", "y"), initial_peers=("p",)
    )
    options = parse(f"--config={path}", "--size", "6", "--names", "z", "--no-loud")
    assert options == Options(config=str(path), size=6, ratio=2.0, names=("z",), initial_peers=("p",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("sise = 3", "sise: unknown field (did you mean size?)"),
        ("size = 'big'", "size: expected a whole number, got the text 'big'"),
        ("names = 'one'", "names: expected a list"),
        ("names = [1]", "names[0]: expected a text"),
        ("size = ", "not valid TOML"),
        ("size = " + "9" * 6000, "not valid TOML"),
        ("size = " + "[" * 5000 + "]" * 5000, "not valid TOML"),
        ("\udcff", "not valid TOML"),
    ],
)
def test_a_bad_config_file_is_named_with_what_is_wrong_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert f"--config {path}: {words}" in refuse(capsys, "--config", str(path))


def test_a_config_file_that_can_not_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no.toml: can't be read: No such file" in refuse(capsys, "--config", str(tmp_path / "no.toml"))
    assert f"{tmp_path}: can't be read: Is a directory" in refuse(capsys, "--config", str(tmp_path))
