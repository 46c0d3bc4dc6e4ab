"""What every command has in common: options, config files, one line for an error, and exit codes."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blocktrain.protocol.command import Command, CommonOptions, program_version, run_command
from blocktrain.protocol.errors import BlocktrainError, NetworkError, UsageError

COMMAND = Command("blocktrain-test", "Do nothing.", "blocktrain-test --version")
ROOT = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, list[str]] = json.loads(Path(__file__).with_name("cli_options.json").read_text())
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
SAY = """
import sys
from blocktrain.protocol.command import Command, CommonOptions, print_json, run_command
async def main(options):
    print("x" * 100_000)
    return 0
sys.exit(run_command(Command("blocktrain-test", "Say much.", "-"), CommonOptions, main, []))
"""


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """A command sets up logging for its whole process; put it back."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def fail(error: Callable[[], BaseException], *arguments: str) -> int:
    """The exit code of a command whose body raises this."""

    async def main(options: CommonOptions) -> int:
        raise error()

    return run_command(COMMAND, CommonOptions, main, arguments)


# Exit codes and errors


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_exit_code_is_what_the_body_returns(code: int) -> None:
    async def main(options: CommonOptions) -> int:
        return code

    assert run_command(COMMAND, CommonOptions, main, []) == code


def nested(*errors: Exception) -> BaseException:
    return ExceptionGroup("outer", [ExceptionGroup("inner", list(errors))])


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (lambda: NetworkError("no way"), 1, "error: no way"),
        (lambda: UsageError("bad thing"), 2, "error: bad thing"),
        (lambda: nested(UsageError("bad thing")), 2, "error: bad thing"),
        (lambda: nested(OSError("first"), NetworkError("known")), 1, "error: known"),
        (lambda: ZeroDivisionError("a\nb"), 1, "internal error: ZeroDivisionError: a b; run again with --d"),
        (lambda: nested(KeyError("k")), 1, "internal error: KeyError: 'k'; run again with --debug"),
        (KeyboardInterrupt, 130, "interrupted"),
        (asyncio.CancelledError, 130, "interrupted"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], error: Callable[[], BaseException], code: int, line: str
) -> None:
    assert fail(error) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"blocktrain-test: {line}")
    assert err.count("\n") == 1


def test_every_error_of_the_tree_has_a_documented_exit_code() -> None:
    def below(kind: type[BlocktrainError]) -> list[type[BlocktrainError]]:
        return [kind, *(deeper for child in kind.__subclasses__() for deeper in below(child))]

    assert {kind.exit_code for kind in below(BlocktrainError)} == {1, 2}
    assert all((kind.exit_code == 2) == issubclass(kind, UsageError) for kind in below(BlocktrainError))


@pytest.mark.parametrize("how", [["--debug"], ["--config", "FILE"]])
def test_debug_shows_the_traceback_however_it_is_switched_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    (tmp_path / "c.toml").write_text("debug = true\n")
    assert fail(lambda: NetworkError("no way"), *(a.replace("FILE", f"{tmp_path}/c.toml") for a in how)) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("blocktrain-test: error: no way\n")


def test_logs_go_to_stderr_and_libraries_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(options: CommonOptions) -> int:
        logging.getLogger("blocktrain.x").info("ours")
        logging.getLogger("hivemind.x").error("theirs")
        return 0

    assert run_command(COMMAND, CommonOptions, main, []) == 0
    out, err = capsys.readouterr()
    assert (out, "ours" in err, "theirs" in err) == ("", True, False)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_reader_that_went_away_is_no_internal_error(
    capsys: pytest.CaptureFixture[str], grouped: bool
) -> None:
    assert fail(lambda: nested(BrokenPipeError()) if grouped else BrokenPipeError()) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize(("target", "error"), [("closed", ""), ("full", "No space left on device")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_stdout_that_takes_nothing_gives_exit_code_1_and_no_complaint_of_python(
    target: str, error: str, unbuffered: str
) -> None:
    if target == "closed":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    try:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        process = subprocess.run(
            [sys.executable, "-c", SAY], stdout=writing, stderr=subprocess.PIPE, text=True, env=environment,
            timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert process.returncode == 1
    assert process.stderr.count("\n") == bool(error)
    assert error in process.stderr


def test_version_is_printed_and_nothing_else_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(AssertionError, "--version") == 0
    assert capsys.readouterr() == (f"blocktrain-test {program_version()}\n", "")


# All commands


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_options_are_only_added_or_removed_on_purpose(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The lists in cli_options.json are a promise to users; change them, and the changelog, with options."""
    module: Any = importlib.import_module(SCRIPTS[name].partition(":")[0])
    options = getattr(module, module.run.__annotations__["options"])
    assert run_command(module.COMMAND, options, module.run, ["--help"]) == 0
    out = capsys.readouterr().out
    shown = re.findall(r"^[│ ] (--[a-z0-9-]+)", out, re.MULTILINE)
    assert sorted(shown) == OPTIONS[name]
    assert module.COMMAND.name == name
    assert module.COMMAND.example in " ".join(out.split())


def test_no_command_is_missing_from_the_list() -> None:
    assert OPTIONS.keys() == SCRIPTS.keys()


# Logs


LOG = """
import logging, sys
from blocktrain.protocol.command import Command, CommonOptions, run_command
from blocktrain.protocol.errors import NetworkError
async def main(options):
    log = logging.getLogger("blocktrain.test")
    log.debug("not shown")
    log.info("met %d\\n\\x1b[31mpeers", 2)
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("odd")
    raise NetworkError("no way")
sys.exit(run_command(Command("blocktrain-test", "Log.", "-"), CommonOptions, main))
"""


def test_json_logs_are_one_object_a_line_errors_included() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOG, "--log-format", "json"], capture_output=True, text=True, timeout=60
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 1
    assert [(line["level"], line["message"]) for line in lines] == [
        ("INFO", "met 2\n\x1b[31mpeers"),
        ("ERROR", "odd"),
        ("CRITICAL", "error: no way"),
    ]
    assert "ZeroDivisionError" in lines[1]["traceback"]
    assert all(line["time"] > 1.7e9 for line in lines)


def test_an_unknown_log_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(COMMAND, CommonOptions, None, ["--log-format", "xml"]) == 2  # type: ignore[arg-type]
    assert "--log-format 'xml': use text or json" in capsys.readouterr().err
