"""The README's session by hand: on one machine, and between two network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from blocktrain.protocol.spec import RunSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
can_make_namespaces = os.geteuid() == 0 and shutil.which("ip") is not None
BIN = Path(sys.executable).parent


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run of two small blocks."""
    spec = RunSpec.from_mapping(
        {
            "name": "by-hand",
            "model": {"d_model": 32, "heads": 2, "blocks": 2, "layers": 1, "context": 32},
            "optimizer": {"batch": 8, "warmup_steps": 5},
            "rounds": {"steps": 20, "deadline_s": 10.0, "timeout_s": 15.0},
        }
    )
    path = tmp_path / "run.toml"
    path.write_text(spec.to_toml())
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Windows line ends, and bytes that are not UTF-8: text is bytes here."""
    path = tmp_path / "my.txt"
    path.write_bytes(b"The quick brown fox.\r\nJumps over the lazy dog \xff\xfe!\r\n" * 1500)
    return path


class Shell:
    """Where commands run: this machine, or one of its network namespaces."""

    def __init__(self, host: str, prefix: Sequence[str] = ()) -> None:
        self.listen, self._prefix = f"/ip4/{host}/tcp/0", prefix
        self._running: list[subprocess.Popen[str]] = []

    def start(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a command that goes on until it is stopped."""
        process = subprocess.Popen(
            [*self._prefix, str(BIN / command), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            stderr=subprocess.DEVNULL,
        )
        self._running.append(process)
        return process

    def call(self, command: str, *arguments: str) -> Any:
        """Run a command to its end and read its document."""
        process = subprocess.run(
            [*self._prefix, str(BIN / command), *arguments],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)

    def stop(self) -> list[int]:
        """Ctrl-C everything, and wait for each to end by itself; their exit codes."""
        for process in self._running:
            process.send_signal(signal.SIGINT)
        codes = [process.wait(timeout=20) for process in self._running]
        for process in self._running:
            assert process.stdout is not None
            process.stdout.close()
        return codes


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[Shell, Shell]]:
    """Two hosts joined by a wire, neither of which sees the other's loopback."""
    names = [f"bt{side}{os.getpid()}" for side in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for number, name in enumerate(names, 1):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        shells = [Shell(f"10.77.0.{i}", ("ip", "netns", "exec", name)) for i, name in enumerate(names, 1)]
        yield shells[0], shells[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def session(one: Shell, two: Shell, run_file: Path, text: Path, folder: Path) -> None:
    """A seed and two nodes in the first shell, two nodes in the second; then look, evaluate and export."""
    seed = one.start("blocktrain-bootstrap", "--publish", str(run_file), "--listen", one.listen, "--json",
                     "--home", str(folder / "seed"))  # fmt: skip
    assert seed.stdout is not None
    address = json.loads(seed.stdout.readline())["addresses"][0]
    nodes = []
    for index, shell in enumerate((one, two, one, two)):
        arguments = [
            "--initial-peers",
            address,
            "--data",
            str(text),
            "--listen",
            shell.listen,
            "--threads",
            "1",
        ]
        arguments += ["--home", str(folder / f"node-{index}"), "--events", "-"]
        node = shell.start("blocktrain-node", *arguments)
        nodes.append(node)
    for node in nodes:
        wait_for(node, lambda e: e["event"] == "round" and e["result"] == "committed" and e["members"] == 2)
    peers = two.call("blocktrain-peers", "--initial-peers", address, "--json")
    assert [len(block["holders"]) for block in peers["blocks"]] == [2, 2]
    assert all(h["round"] >= 1 for block in peers["blocks"] for h in block["holders"])
    evaluated = two.call("blocktrain-eval", "--initial-peers", address, "--data", str(text), "--json")
    assert evaluated["ce"]["ensemble"] < evaluated["baselines"]["uniform"]
    one.call("blocktrain-export", "--initial-peers", address, "--out", str(folder / "model"), "--json")
    offline = one.call("blocktrain-eval", "--model", str(folder / "model"), "--data", str(text), "--json")
    assert offline["ce"]["ensemble"] < offline["baselines"]["uniform"]


def wait_for(node: subprocess.Popen[str], wanted: Any) -> None:
    """Read a node's events up to the first that is wanted."""
    assert node.stdout is not None
    for line in node.stdout:
        if wanted(json.loads(line)):
            return
    raise AssertionError("the node ended")


def test_in_separate_shells(tmp_path: Path, run_file: Path, text: Path) -> None:
    """All on loopback."""
    shell = Shell("127.0.0.1")
    try:
        session(shell, shell, run_file, text, tmp_path)
    finally:
        codes = shell.stop()
    assert not any(codes)


@pytest.mark.skipif(not can_make_namespaces, reason="needs root and iproute2")
def test_between_two_network_namespaces(tmp_path: Path, run_file: Path, text: Path) -> None:
    """Two hosts with a wire between them."""
    with two_namespaces() as (one, two):
        try:
            session(one, two, run_file, text, tmp_path)
        finally:
            codes = one.stop() + two.stop()
        assert not any(codes)
