"""Addresses, ports, homes and choices that turn out not to work when joining a swarm: one clear line each."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.bad_input import fill, prepared_inputs, refuse, run_line
from tests.unit.trainers import small_spec

pytestmark = pytest.mark.slow
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
JOIN = f" --listen {LOOPBACK} --threads 1 --device cpu"


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A running seed of a small run: its address, home and process."""
    folder = tmp_path_factory.mktemp("seed")
    (folder / "run.toml").write_text(small_spec().to_toml())
    arguments = ["--publish", str(folder / "run.toml"), "--listen", LOOPBACK, "--home", str(folder), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "blocktrain.bootstrap.cli", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    address = json.loads(process.stdout.readline())["addresses"][0]
    yield {"SEED": address, "HELD": str(folder), "PID": str(process.pid)}
    process.terminate()
    assert process.wait(timeout=15) == 0
    process.stdout.close()


@pytest.fixture
def inputs(tmp_path: Path, seed: dict[str, str]) -> Iterator[dict[str, str]]:
    """The prepared files, the seed, a dead peer, and a port that another program uses."""
    with socket.create_server(("127.0.0.1", 0)) as busy, prepared_inputs(tmp_path) as names:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        yield (
            names
            | seed
            | {
                "DEAD": f"/ip4/127.0.0.1/tcp/{port}/p2p/{names['PEER']}",
                "USED": f"/ip4/127.0.0.1/tcp/{busy.getsockname()[1]}",
            }
        )


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("node --data TEXT --home HOME --initial-peers DEAD --join-timeout 1" + JOIN, 1,
         "no initial peer could be reached (DEAD: connection refused: nothing listens there)"),
        ("eval --data TEXT --initial-peers DEAD --join-timeout 1", 1, "connection refused: nothing listens"),
        ("node --data TEXT --home HOME --initial-peers DEAD --listen USED", 1, "the port is in use; choose"),
        ("bootstrap --home HOME --listen USED", 1, "the port is in use; choose another --listen address"),
        ("bootstrap --home HOME --listen /ip4/203.0.113.1/tcp/0", 1, "this machine does not have that addr"),
        ("node --data TEXT --initial-peers DEAD --home HOME --listen /ip4/203.0.113.1/tcp/0", 1,
         "this machine does not have that address"),
        *(
            (f"{command} --home {home}", 1, words)
            for command in ("node --data TEXT --initial-peers DEAD", "swarm --data TEXT", "bootstrap")
            for home, words in (
                ("TEXT/below", "TEXT/below: can't be written: Not a directory; choose another --home"),
                ("TEXT", "TEXT: can't be written: File exists; choose another --home"),
                ("HELD", "HELD is in use by process PID; give another --home"),
            )
        ),
        ("node --data TEXT --initial-peers DEAD --home HOME --events FOLDER", 1, "--events FOLDER: can't be"),
        ("node --data TEXT --home HOME --initial-peers SEED --block 2" + JOIN, 2,
         "--block '2': this run has blocks 0 to 1; or give auto"),
        ("node --data TEXT --home HOME --initial-peers SEED --block first" + JOIN, 2, "--block 'first'"),
        ("node --data SHORT --home HOME --initial-peers SEED" + JOIN, 2, "SHORT: too short: 40 bytes"),
    ],
)  # fmt: skip
def test_what_can_not_work_ends_in_one_line_and_loses_nothing(
    capsys: pytest.CaptureFixture[str], inputs: dict[str, str], line: str, code: int, words: str
) -> None:
    got, error, _ = refuse(capsys, fill(line, inputs))
    assert got == code
    assert fill(words, inputs) in error


def test_a_swarm_home_in_which_something_is_in_the_way_is_named(
    capsys: pytest.CaptureFixture[str], inputs: dict[str, str]
) -> None:
    home = Path(inputs["HOME"])
    for name in ("swarm.json", "run.toml", "logs"):
        folder = home / name
        folder.mkdir() if name != "logs" else folder.write_text("mine")
        code, error, _ = refuse(capsys, fill("swarm --data TEXT --home HOME", inputs))
        assert code == 1
        assert str(folder) in error
        assert "can't be written" in error
        folder.rmdir() if name != "logs" else folder.unlink()


def test_a_check_says_that_all_is_well_and_ends(
    capsys: pytest.CaptureFixture[str], inputs: dict[str, str]
) -> None:
    line = "node --data TEXT --home HOME --initial-peers SEED --check --block 1" + JOIN
    code, out, _ = run_line(capsys, fill(line, inputs))
    assert code == 0
    told = " ".join(" ".join(out.split()).split())
    for words in (
        "identity ok 12D3KooW",
        "run ok small, fingerprint ",
        "block ok 1: asked for",
        "1 thread(s)",
        "clock ok ",
        "text for this run ok ",
    ):
        assert words in told
    assert out.splitlines()[-1] == "this node could train; leave out --check to begin"


def test_without_initial_peers_those_of_last_time_are_waited_for(
    capsys: pytest.CaptureFixture[str], inputs: dict[str, str], tmp_path: Path
) -> None:
    """A node that nobody answers must not begin a swarm of its own."""
    home = tmp_path / "remembers"
    home.mkdir()
    (home / "peers.txt").write_text(inputs["DEAD"] + "\n")
    code, error, _ = refuse(capsys, fill(f"node --data TEXT --home {home} --join-timeout 1" + JOIN, inputs))
    assert code == 1
    assert f"{inputs['DEAD']}: connection refused" in error


def checks_of(
    capsys: pytest.CaptureFixture[str], inputs: dict[str, str], line: str
) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """Exit code of a check, and by name what it has found."""
    code, out, _ = run_line(capsys, fill(line + " --check --json" + JOIN, inputs))
    document = json.loads(out)
    assert document["could_train"] == (code == 0)
    found: dict[str, list[tuple[str, str]]] = {}
    for check in document["checks"]:
        found.setdefault(check["name"], []).append((check["status"], check["detail"]))
    return code, found


def test_a_check_names_a_dead_peer_among_others_and_goes_on(
    capsys: pytest.CaptureFixture[str], inputs: dict[str, str]
) -> None:
    line = "node --data TEXT --home HOME --initial-peers DEAD SEED"
    code, found = checks_of(capsys, inputs, line)
    assert code == 0
    dead, seed = found["initial peer"]
    assert dead == ("warning", f"{inputs['DEAD']}: connection refused: nothing listens there")
    assert seed == ("ok", f"{inputs['SEED']}: answers")
    assert found["clock"][0][0] == "ok"
    assert found["block"][0][1].endswith("nobody holds it (holders of each block: 0: 0, 1: 0)")


def test_a_check_looks_at_everything_whatever_is_wrong(
    capsys: pytest.CaptureFixture[str], inputs: dict[str, str]
) -> None:
    """No data, no peer that answers, an address that is none: each has its row."""
    line = "node --data ABSENT --home HOME --initial-peers DEAD --initial-peers nonsense"
    code, found = checks_of(capsys, inputs, line)
    assert code == 1
    assert "no such file" in found["data"][0][1]
    assert [status for status, _ in found["initial peer"]] == ["failed", "failed"]
    assert "'nonsense': not a multiaddr" in found["initial peer"][0][1]
    assert found["run"] == [("unknown", "not looked at, as no peer answers")]
    assert found["identity"][0][0] == found["device"][0][0] == found["ports"][0][0] == "ok"


@pytest.mark.parametrize(
    ("extra", "name", "words"),
    [
        ("--max-memory 1", "memory and disk", "--max-memory allows 1"),
        ("--block 7", "block", "this run has blocks 0 to 1"),
        ("--run other", "run", "no run 'other' in this swarm"),
        ("--announce nonsense", "addresses to listen on", "not a multiaddr"),
        ("--home HELD", "home", "is in use by process PID"),
    ],
)
def test_a_check_fails_for_one_reason(
    capsys: pytest.CaptureFixture[str], inputs: dict[str, str], extra: str, name: str, words: str
) -> None:
    line = "node --data TEXT --home HOME --initial-peers SEED " + extra
    code, found = checks_of(capsys, inputs, line.replace("--home HOME", "") if "HELD" in extra else line)
    assert code == 1
    failed = {which: rows for which, rows in found.items() if any(status == "failed" for status, _ in rows)}
    assert list(failed) == [name]
    assert fill(words, inputs) in failed[name][0][1]


def test_what_a_user_typed_is_shown_as_it_is(
    capsys: pytest.CaptureFixture[str], inputs: dict[str, str]
) -> None:
    """Square brackets are markup to the library that draws the table, and an end without a begin an error."""
    line = "node --data [/x] --home HOME --initial-peers DEAD --check" + JOIN
    code, out, _ = run_line(capsys, fill(line, inputs))
    assert code == 1
    assert "[/x]: the pattern matches no files" in " ".join(out.split())
