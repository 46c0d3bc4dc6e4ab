"""Command lines that can't work, run in this process on prepared files, for two files of tests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from blocktrain.bootstrap import cli as bootstrap
from blocktrain.bootstrap import cli_swarm as swarm
from blocktrain.node import cli as node
from blocktrain.node import cli_eval as evaluate
from blocktrain.node.export import save_export
from blocktrain.node.options import NodeOptions
from blocktrain.protocol.command import run_command
from blocktrain.protocol.identity import Identity, load_or_create_identity
from tests.unit.exports import make_model

COMMANDS: dict[str, Any] = {
    "node": (node.COMMAND, NodeOptions, node.run),
    "eval": (evaluate.COMMAND, evaluate.EvalOptions, evaluate.run),
    "swarm": (swarm.COMMAND, swarm.SwarmOptions, swarm.run),
    "bootstrap": (bootstrap.COMMAND, bootstrap.BootstrapOptions, bootstrap.run),
}
PEER = Identity.generate().peer_id
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
CRLF = b"one line\r\nand \xff\xfe another\r\n" * 300
TIMEOUT_S = 20.0


@contextlib.contextmanager
def prepared_inputs(folder: Path) -> Iterator[dict[str, str]]:
    """What words in capitals stand for; afterwards no file has changed and no process is left."""
    handlers, threads = logging.root.handlers[:], torch.get_num_threads()
    home = folder / "home"
    save_export(folder / "MODEL", make_model())
    load_or_create_identity(home / "identity.key")
    (home / "small" / "block-0").mkdir(parents=True)
    (home / "small" / "block-0" / "00000007.safetensors").write_bytes(b"precious")
    (folder / "FOLDER").mkdir()
    content = {"EMPTY": b"", "TEXT": CRLF, "SHORT": CRLF[:40], "POINTER": POINTER}
    for name, data in content.items():
        (folder / name).write_bytes(data)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    family = set(psutil.Process().children(recursive=True))
    names = {name: str(folder / name) for name in ("FOLDER", "MODEL", "ABSENT", *content)}
    try:
        yield names | {"HOME": str(home), "PEER": PEER}
    finally:
        logging.root.handlers[:] = handlers
        torch.set_num_threads(threads)
    assert all(path.read_bytes() == data for path, data in before.items())
    assert set(psutil.Process().children(recursive=True)) <= family


def fill(text: str, inputs: dict[str, str]) -> str:
    """The text with words in capitals replaced by what they stand for."""
    for name, value in inputs.items():
        text = text.replace(name, value)
    return text


def run_line(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, list[str]]:
    """Exit code, stdout and the lines of stderr of a command line , in bounded time."""
    name, *arguments = line.split()
    command, options, run = COMMANDS[name]

    async def bounded(given: Any) -> int:
        async with asyncio.timeout(TIMEOUT_S):
            ended: int = await run(given)
        return ended

    code = run_command(command, options, bounded, arguments)
    out, err = capsys.readouterr()
    return code, out, err.splitlines()


def refuse(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, list[str]]:
    """Exit code, the one line that says why, and what was logged before that, of a command that fails."""
    code, out, (*logs, last) = run_line(capsys, line)
    assert out == ""
    assert last.startswith(f"blocktrain-{line.split()[0]}: error: ")
    assert not any("error: " in log or "Traceback" in log for log in logs)
    return code, last, logs
