"""Check that every command and option which README.md and docs/ show exists in the real --help.

Read are fenced code blocks and inline code. In a shell line, the options after a `blocktrain-…`
command have to be that command's. Inline code that is an option alone (`--home`) has to be an option
of some command; another tool's option is written with the tool's name in front.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = re.compile(r"(?:\S*/)?(blocktrain-[a-z0-9-]+)")
OPTION = re.compile(r"--[a-z][a-z0-9-]*")
FENCE = re.compile(r"\s*(```+|~~~+)")
INLINE = re.compile(r"`([^`]+)`")
SEPARATORS = {"|", "||", "&", "&&", ";", "(", ")"}


@dataclass(frozen=True)
class Mention:
    """Something shown in a document: a command with its options, or (command "") an option alone."""

    line: int
    command: str
    options: tuple[str, ...]


class HelpError(Exception):
    """A command's --help can't be had. The message is one line that says why."""


def mentions(markdown: str) -> Iterator[Mention]:
    """Yield every command and lone option in the document's code, with its line number (from 1)."""
    for number, code, fenced in _code(markdown):
        words = _words(code)
        if not fenced and words and OPTION.match(words[0]):
            yield Mention(number, "", tuple(_options(words)))
        while words:
            end = next((i for i, word in enumerate(words) if word in SEPARATORS), len(words))
            part, words = words[:end], words[end + 1 :]
            names = [(i, m[1]) for i, word in enumerate(part) if (m := COMMAND.fullmatch(word))]
            if names:
                yield Mention(number, names[0][1], tuple(_options(part[names[0][0] :])))


def problems(markdown: str, commands: set[str], options_of: Callable[[str], set[str]]) -> Iterator[str]:
    """Yield `LINE: what is wrong` for each mention that the commands don't bear out.

    `options_of` gives the options of a command, or raises HelpError.
    """
    for mention in mentions(markdown):
        if mention.command and mention.command not in commands:
            yield f"{mention.line}: {mention.command} is no command of this project"
            continue
        try:
            asked = {mention.command} if mention.command else commands
            known = set().union(*(options_of(name) for name in sorted(asked)))
        except HelpError as error:
            yield f"{mention.line}: {error}"
            continue
        for option in mention.options:
            if option not in known:
                yield f"{mention.line}: {mention.command or 'the project'} has no option {option}"


def _code(markdown: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line number, code, is it from a fenced block), with continued lines joined."""
    fence, start, pending = "", 0, ""
    for number, line in enumerate(markdown.splitlines(), start=1):
        mark = FENCE.match(line)
        if mark and (not fence or line.strip() == fence):
            fence = "" if fence else mark[1]
        elif fence:
            start = start if pending else number
            pending += line.removesuffix("\\")
            if not line.endswith("\\"):
                yield start, pending, True
                pending = ""
        else:
            yield from ((number, code, False) for code in INLINE.findall(line))


def _words(code: str) -> list[str]:
    lexer = shlex.shlex(code, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # an apostrophe in what a command prints is no quotation mark
        return code.split()


def _options(words: list[str]) -> Iterator[str]:
    return (match[0] for word in words if (match := OPTION.match(word.lstrip("["))))


@functools.cache
def help_options(command: str) -> set[str]:
    """The options that `command --help` lists, run from the entry in pyproject.toml.

    Raises:
        HelpError: it can't be imported, fails, or takes over two minutes.
    """
    module, function = _scripts()[command].split(":")
    code = f"import sys; from {module} import {function} as main; sys.argv[0] = {command!r}; sys.exit(main())"
    wide = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, "--help"],
            cwd=ROOT,
            env=wide,
            capture_output=True,
            text=True,
            timeout=120,
        )
    except subprocess.TimeoutExpired as error:
        raise HelpError(f"{command} --help took over {error.timeout} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise HelpError(f"{command} --help failed with exit code {done.returncode}: {last}")
    return set(OPTION.findall(done.stdout))


@functools.cache
def _scripts() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    scripts: dict[str, str] = project["project"]["scripts"]
    return scripts


def main() -> int:
    """Print every problem as `FILE:LINE: what is wrong`; return 1 if there is any."""
    found = 0
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for problem in problems(path.read_text(encoding="utf-8"), set(_scripts()), help_options):
            print(f"{path.relative_to(ROOT)}:{problem}", file=sys.stderr)
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
