"""Mappings become dataclasses strictly: every misfit is one line that begins with the field's path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.schema import bounded, from_mapping


@dataclass(frozen=True)
class Inner:
    ratio: float = bounded(0.5, low=0, high=1)


@dataclass(frozen=True)
class Outer:
    count: int = bounded(low=1, high=10)
    word: str = bounded("ab", low=1, high=4, pattern=r"[a-z]+")
    choice: str = bounded("x", choices=("x", "y"))
    flag: bool = bounded(False)
    loss: float | None = bounded(None, low=0)
    names: tuple[str, ...] = bounded((), high=2, pattern=r"[a-z]+")
    inner: Inner = field(default_factory=Inner)


def check_line(message: str) -> None:
    """An error's message is one line that can't garble a terminal."""
    assert message.isprintable()
    assert len(message) < 400


def parse(**fields: object) -> Outer:
    return from_mapping(Outer, {"count": 1, **fields}, error=UsageError)


def refusal(data: object) -> str:
    with pytest.raises(UsageError) as caught:
        from_mapping(Outer, data, error=UsageError)
    check_line(str(caught.value))
    return str(caught.value)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.dates()
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["count", "word", "choice", "flag", "loss", "names", "inner"]) | st.text(max_size=8)


@given(values | st.dictionaries(names, values))
def test_any_value_gives_a_valid_object_or_one_line_of_our_error(data: object) -> None:
    try:
        parsed = from_mapping(Outer, data, error=UsageError)
    except UsageError as error:
        check_line(str(error))
    else:
        assert 1 <= parsed.count <= 10


def test_defaults_fill_what_is_missing_and_lists_become_tuples() -> None:
    assert parse() == Outer(1)
    assert parse(names=["a", "b"], loss=None, inner={"ratio": 1}) == Outer(
        1, names=("a", "b"), inner=Inner(1.0)
    )


def test_a_whole_number_is_taken_for_a_float_and_written_like_one() -> None:
    assert repr(parse(inner={"ratio": 1}).inner.ratio) == "1.0"
    assert repr(parse(inner={"ratio": -0.0}).inner.ratio) == "0.0"


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"count": True}, "count: expected a whole number, got a truth value"),
        ({"count": 1.0}, "count: expected a whole number, got a number (1.0)"),
        ({"count": "1"}, "count: expected a whole number, got the text '1'"),
        ({"count": 0}, "count: must be at least 1, got 0"),
        ({"count": 1_000_001}, "count: must be at most 10, got 1000001"),
        ({"count": 10**400}, "count: must be at most 10, got a number of 1329 bits"),
        ({"word": ""}, "word: length must be at least 1"),
        ({"word": "abcde"}, "word: length must be at most 4"),
        ({"word": "a\nb"}, "word: 'a\\nb' does not match"),
        ({"word": "ab\n"}, "word: 'ab\\n' does not match"),
        ({"word": 16**5000}, "word: expected a text, got a whole number (a number of 20001 bits)"),
        ({"choice": "z"}, "choice: must be one of x, y"),
        ({"flag": 1}, "flag: expected true or false"),
        ({"loss": float("nan")}, "loss: must be a finite number"),
        ({"loss": 10**400}, "loss: must be a finite number"),
        ({"names": "ab"}, "names: expected a list"),
        ({"names": ["a", "b", "c"]}, "names: length must be at most 2"),
        ({"names": ["a", "\x1b[2J"]}, "names[1]: '\\x1b[2J' does not match"),
        ({"names": ["a", None]}, "names[1]: expected a text, got nothing"),
        ({"inner": []}, "inner: expected a table of fields, got a list"),
        ({"inner": {"ratio": float("inf")}}, "inner.ratio: must be a finite number"),
        ({"inner": {"ration": 1}}, "inner.ration: unknown field (did you mean ratio?)"),
        ({"forged\nline": 1}, "'forged\\nline': unknown field"),
    ],
)
def test_every_misfit_names_its_field(fields: dict[str, Any], start: str) -> None:
    assert refusal({"count": 1, **fields}).startswith(start)


def test_what_is_missing_or_no_table_is_said() -> None:
    assert refusal({}) == "count: missing"
    assert refusal([1]) == "the document: expected a table of fields, got a list"
