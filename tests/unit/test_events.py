"""Events are JSON lines for programs, whoever reads them and wherever they go."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blocktrain.node.events import EventLog, open_events
from blocktrain.protocol.errors import HomeError


def test_an_event_is_one_json_line_with_its_kind_and_time() -> None:
    stream = io.StringIO()
    EventLog(stream).write("round", result="committed", reason="two\nlines", members=3)
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert abs(event.pop("time") - time.time()) < 5
    assert event == {"event": "round", "result": "committed", "reason": "two\nlines", "members": 3}


def test_events_are_appended_to_a_file_and_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "before"}\n')
    with open_events(str(path)) as events:
        events.write("one")
        assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["before", "one"]


def test_a_dash_is_stdout_and_nothing_is_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    with open_events("") as events:
        events.write("unheard")
    with open_events("-") as events:
        events.write("heard")
    out = capsys.readouterr().out
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["heard"]


def test_a_reader_that_went_away_stops_nobody() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    events = EventLog(stream)
    events.write("lost")
    events.write("not even tried")
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_file_that_was_closed_meanwhile_stops_nobody(tmp_path: Path) -> None:
    with open_events(str(tmp_path / "events.jsonl")) as events:
        pass
    events.write("late")
    assert (tmp_path / "events.jsonl").read_text() == ""


def test_a_file_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(HomeError, match=f"--events {tmp_path}: can't be written: Is a dir"):
        open_events(str(tmp_path)).__enter__()


SLOW = """
import sys
from blocktrain.node.events import open_events
with open_events("-") as events:
    for number in range(3000):
        events.write("steps", number=number, filling="x" * 500)
    print("done", file=sys.stderr, flush=True)
    sys.stdin.readline()
    events.write("last")
"""


def test_a_reader_that_does_not_read_stops_nobody_and_finds_whole_lines() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        assert process.stderr.readline() == "done\n"
        seen = [json.loads(process.stdout.readline()) for _ in range(5)]
        os.set_blocking(process.stdout.fileno(), False)
        rest = process.stdout.read()
        os.set_blocking(process.stdout.fileno(), True)
        process.stdin.write("\n")
        process.stdin.flush()
        lines = [json.loads(line) for line in (rest + process.stdout.read()).splitlines()]
    numbers = [event["number"] for event in seen + lines[:-1]]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) < 3000
    assert lines[-1]["event"] == "last"
