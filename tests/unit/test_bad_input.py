"""What a user gives that is unusable in itself is refused in one line, and nothing is started or changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.bad_input import fill, prepared_inputs, refuse, run_line


@pytest.fixture
def inputs(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The prepared files, with a peer that nobody will dial."""
    with prepared_inputs(tmp_path) as names:
        yield names | {"DEAD": f"/ip4/127.0.0.1/tcp/9/p2p/{names['PEER']}"}


LOCAL = [
    # The text
    ("node --initial-peers DEAD", "--data is missing: name a file"),
    ("eval --initial-peers DEAD", "--data is missing: name a file"),
    *(
        (f"{command} --data {data}", words)
        for command in ("node --initial-peers DEAD --home HOME", "eval --model MODEL", "swarm --home HOME")
        for data, words in (
            ("ABSENT", "ABSENT: no such file or folder; check the path"),
            ("EMPTY", "EMPTY: the file is empty; give a text"),
            ("FOLDER", "FOLDER: the folder holds no files"),
            ("FOLDER/*.txt", "FOLDER/*.txt: the pattern matches no files"),
            ("/proc/self/mem", "/proc/self/mem: can't be read: Input/output error"),
            ("POINTER", "POINTER: a git-lfs pointer, not the text itself"),
        )
    ),
    ("eval --model MODEL --data SHORT", "SHORT: too short: 40 bytes"),
    ("swarm --data SHORT --home HOME", "SHORT: too short: 40 bytes"),
    # Addresses
    ("node --data TEXT", "--initial-peers is missing"),
    *(
        (f"{command} {address}", words)
        for command in (
            "node --data TEXT --home HOME --initial-peers", "eval --data TEXT --initial-peers",
            "bootstrap --home HOME --initial-peers",
        )
        for address, words in (
            ("nonsense", "'nonsense': not a multiaddr; expected e.g."),
            ("http://127.0.0.1:4001", "not a multiaddr"),
            ("/ip4/127.0.0.1/tcp", "'/ip4/127.0.0.1/tcp'"),
            ("/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWcut", "cut short or mistyped; copy the whole line"),
            ("/ip4/127.0.0.1/tcp/4001", "must end in /p2p/PEER_ID"),
            ("/unix/tmp/socket", "/unix can't be dialled"),
            ("/ip4/127.0.0.1/tcp/0/p2p/PEER", "port 0 can't be dialled"),
            ("@ABSENT", "ABSENT': can't be read: No such file"),
        )
    ),
    ("node --data TEXT --initial-peers DEAD --home HOME --listen nonsense", "'nonsense': not a multiaddr"),
    ("bootstrap --home HOME --listen /ip4/127.0.0.1/tcp/0/p2p/PEER", "an address to listen on has no /p2p"),
    ("bootstrap --home HOME --announce nonsense", "'nonsense': not a multiaddr"),
    # Numbers and devices
    *(
        (f"node --data TEXT --initial-peers DEAD --home HOME {option}", words)
        for option, words in (
            ("--threads -1", "--threads -1: this machine has"), ("--threads many", "--threads"),
            ("--device cuda", "--device cuda: torch finds no such device"), ("--device x", "--device 'x'"),
            ("--rounds -1", "--rounds -1: must be from 0"), ("--wait-for 0", "--wait-for 0: must be from 1"),
            ("--record-ttl 0.5", "--record-ttl 0.5: must be from 3 to 600"),
            ("--record-ttl nan", "--record-ttl nan: must be from 3 to 600"),
            ("--join-timeout -1", "--join-timeout -1.0: must be from 0"), ("--unheard-of", "--unheard-of"),
        )
    ),
    *(
        (f"swarm --data TEXT --home HOME {option}", words)
        for option, words in (
            ("--nodes 0", "--nodes 0: give 1 to 256"), ("--nodes 2", "--nodes 2: 3 blocks need as many"),
            ("--rounds 0", "--rounds 0: give at least 1"), ("--seed -1", "seed: must be at least 0, got -1"),
            ("--blocks 65", "model.blocks: must be at most 64"),
            ("--steps-per-round -1", "rounds.steps: must be at least 1, got -1"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("line", "words"), LOCAL, ids=[line for line, _ in LOCAL])
def test_input_that_is_unusable_in_itself_is_refused_before_anything_is_started(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    inputs: dict[str, str],
    line: str,
    words: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, error, logs = refuse(capsys, fill(line, inputs))
    assert (code, logs) == (2, [])
    assert (words if "PEER_ID" in words else fill(words, inputs)) in error


@pytest.mark.parametrize("command", ["bootstrap --publish", "swarm --data TEXT --run"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "run.toml: can't be read: No such file"),
        (b"name = ", "run.toml: not valid TOML"),
        (b"\xff\xfe", "run.toml: not UTF-8 text"),
        (b"seed = 1", "run.toml: name: missing"),
        (b"name = 'x'\n[model]\nbloks = 2", "model.bloks: unknown field (did you mean blocks?)"),
        (b"name = 'x'\nprotocol = 99", "run.toml: protocol: newer than 1"),
        (b"name = 'x'\n[noise]\nsigma_min = 1.0\nsigma_max = 1.0000000000000002", "noise.sigma_max: "),
        (b"name = 'x'\n[noise]\np_mean = -20\np_std = 0.01", "noise.p_mean: no probability"),
    ],
)
def test_a_run_file_that_can_not_be_trained_is_refused_with_its_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], inputs: dict[str, str],
    command: str, content: bytes | None, words: str,
) -> None:  # fmt: skip
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    code, error, logs = refuse(capsys, fill(f"{command} {path} --home HOME", inputs))
    assert (code, logs) == (2, [])
    assert words in error


def test_crlf_and_bytes_that_are_not_utf8_are_text(
    capsys: pytest.CaptureFixture[str], inputs: dict[str, str]
) -> None:
    line = "eval --model MODEL --data TEXT --bytes 64 --threads 1 --device cpu --readout ensemble --json"
    code, out, errors = run_line(capsys, fill(line, inputs))
    assert (code, errors) == (0, [])
    assert '"ensemble"' in out
