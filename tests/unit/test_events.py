"""Events are JSON lines for programs, whoever reads them and wherever they go."""

from __future__ import annotations

import io
import json
import os
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
