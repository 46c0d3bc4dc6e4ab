"""The boundary between a command and its user: options, logs, signals, exit codes.

Exit codes: 0 done · 1 failed · 2 bad usage or input · 130 interrupted. An error is one line on stderr;
a traceback only with `--debug`. Logs go to stderr, results to stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import io
import json
import logging
import os
import re
import signal
import sys
import time
import tomllib
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
import uvloop

from blocktrain.protocol.errors import BlocktrainError, UsageError
from blocktrain.protocol.schema import from_mapping

INTERRUPTED = 130
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """What every command understands."""

    config: Annotated[str, tyro.conf.arg(metavar="FILE.toml")] = ""
    """Read options from this TOML file; the command line wins."""
    log_format: Annotated[str, tyro.conf.arg(metavar="text|json")] = "text"
    """How logs on stderr are written: as text, or each line as a JSON object."""
    debug: bool = False
    """Log everything, libraries included, and show tracebacks."""
    version: bool = False
    """Print the version and exit."""


O = TypeVar("O", bound=CommonOptions)  # noqa: E741


@dataclass(frozen=True)
class Command:
    """Name, purpose and an example of a command, for its help."""

    name: str
    purpose: str
    example: str


def run_command(
    command: Command,
    options_type: type[O],
    main: Callable[[O], Awaitable[int]],
    argv: Sequence[str] | None = None,
) -> int:
    """Parse options, run `main` in uvloop's event loop, turn errors into one line and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character gets the rest
    code = _run(command, options_type, main, list(sys.argv[1:] if argv is None else argv))
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python would try again when it exits, complain, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == 0 and not isinstance(error, BrokenPipeError):
            print(f"{command.name}: error: stdout can't be written: {error.strerror}", file=sys.stderr)
        return code or 1
    return code


def _run(
    command: Command, options_type: type[O], main: Callable[[O], Awaitable[int]], arguments: list[str]
) -> int:
    debug, log_format = "--debug" in arguments, _value_of("--log-format", arguments)
    try:
        options = parse_options(command, options_type, arguments)
        log_format = options.log_format
        if log_format not in LOG_FORMATS:
            raise UsageError(f"--log-format {log_format[:40]!r}: use {' or '.join(LOG_FORMATS)}")
        if options.version:
            print(f"{command.name} {program_version()}")
            return 0
        debug = options.debug
        set_up_logging(debug, log_format)
        return uvloop.run(_cancel_on_sigterm(main(options)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        _complain(command, "interrupted", log_format)
        return INTERRUPTED
    except SystemExit as stop:  # after --help
        return int(stop.code or 0)
    except BaseException as error:  # noqa: BLE001  the last frame: nothing above could handle it
        if debug:
            traceback.print_exc()
        return _report(command, error, debug, log_format)


def _report(command: Command, error: BaseException, debug: bool, log_format: str) -> int:
    """Say in one line what went wrong; the exit code for it."""
    known, first = first_known(error), _first(error)
    if known is not None:
        _complain(command, f"error: {known}", log_format)
        return known.exit_code
    if isinstance(first, BrokenPipeError):  # whoever read stdout has gone, and knows
        return 1
    if not debug:
        what = f"{type(first).__name__}: {' '.join(str(first).split())[:300]}"
        _complain(command, f"internal error: {what}; run again with --debug", log_format)
    return 1


def _complain(command: Command, text: str, log_format: str) -> None:
    """The last line on stderr of a command that did not do its work."""
    if log_format == "json":
        text = _as_json(time.time(), "CRITICAL", command.name, text)
    else:
        text = f"{command.name}: {text}"
    print(text, file=sys.stderr)


def parse_options(command: Command, options_type: type[O], arguments: Sequence[str]) -> O:
    """Options from a command line and the TOML file that it may name.

    Raises:
        UsageError: one line that names the option.
    """
    default = options_type()
    path = _value_of("--config", arguments)
    if path:
        default = dataclasses.replace(default, **_read_config(Path(path), options_type))
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(
                options_type,
                prog=command.name,
                description=f"{command.purpose}\n\nExample:\n  {command.example}",
                args=_merge_repeated(options_type, arguments),
                default=default,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UsageError(f"{_flatten(captured.getvalue())} (see {command.name} --help)") from None


def program_version() -> str:
    """The installed version of blocktrain."""
    return importlib.metadata.version("blocktrain")


def set_up_logging(debug: bool, log_format: str = "text") -> None:
    """Logs on stderr; our own from INFO on, the libraries' from ERROR on; with `debug` everything.

    `log_format` is one of LOG_FORMATS; in `json`, each line is an object (see docs/commands.md).
    """
    names = "%(name)s " if debug else ""
    formatter = logging.Formatter(f"%(asctime)s %(levelname)s {names}%(message)s", datefmt="%H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else formatter)
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler], force=True)
    logging.getLogger("multiaddr").setLevel(logging.WARNING)
    if not debug:
        # Both report as errors what our own code handles, such as a peer that hung up.
        for name in ("hivemind", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        trace = self.formatException(record.exc_info) if record.exc_info else None
        return _as_json(record.created, record.levelname, record.name, record.getMessage(), trace)


def _as_json(when: float, level: str, logger: str, message: str, trace: str | None = None) -> str:
    line: dict[str, object] = {"time": round(when, 3), "level": level, "logger": logger, "message": message}
    return json.dumps(line | ({"traceback": trace} if trace else {}))


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document, allow_nan=False), flush=True)


def first_known(error: BaseException) -> BlocktrainError | None:
    """The first error of ours in an exception or a (nested) group of them; the rest follows from it."""
    if isinstance(error, BlocktrainError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((known for e in error.exceptions if (known := first_known(e)) is not None), None)
    return None


async def _cancel_on_sigterm(work: Awaitable[int]) -> int:
    """Let SIGTERM end a command as Ctrl-C does; commands that stop in their own way replace the handler."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _read_config(path: Path, options_type: type[O]) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--config {path}: can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # tomllib lets int() complain of too many digits
        raise UsageError(f"--config {path}: not valid TOML: {str(error)[:200]}") from None
    data = {str(name).replace("-", "_"): value for name, value in data.items()}
    try:
        options = from_mapping(options_type, data, error=UsageError)
    except UsageError as error:
        raise UsageError(f"--config {path}: {error}") from None
    return {name: getattr(options, name) for name in data}


def _value_of(option: str, arguments: Sequence[str]) -> str:
    for this, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if this == option:
            return following
        if this.startswith(f"{option}="):
            return this.partition("=")[2]
    return ""


def _merge_repeated(options_type: type[O], arguments: Sequence[str]) -> list[str]:
    """Let an option that takes several values be repeated: tyro alone would keep only the last ones."""
    several = {
        f"--{f.name.replace('_', '-')}"
        for f in dataclasses.fields(options_type)
        if isinstance(f.default, tuple)
    }
    merged: dict[str, list[str]] = {}
    rest: list[str] = []
    target = rest
    for argument in arguments:
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")  # tyro takes both
        if name in several:
            target = merged.setdefault(name, [])
            if equals:
                target.append(value)
        elif argument.startswith("--"):
            target = rest
            rest.append(argument)
        else:
            target.append(argument)
    return [*rest, *(word for name, values in merged.items() for word in (name, *values))]


def _flatten(box: str) -> str:
    """The message inside tyro's framed error: its first section, and what may have been meant."""
    box = re.sub(r"\A\s*[^\n]+\n\s*-{4,}\s*\n", "", box)  # the title, where a frame can't be drawn
    sections: list[list[str]] = [[]]
    for line in (line.strip(" │") for line in box.splitlines()):
        if re.fullmatch(r"-{4,}|─+", line):
            sections.append([])
        elif line and line[0] not in "╭╰":
            sections[-1].append(line)
    meant = [
        line.split()[0]
        for section in sections[1:]
        if section and section[0].startswith("Perhaps you meant")
        for line in section[1:]
        if line.startswith("--")
    ]
    hint = f"; did you mean {meant[0]}?" if meant else ""
    return (" ".join(sections[0])[:300] or "bad usage") + hint
