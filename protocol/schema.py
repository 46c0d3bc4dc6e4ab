"""Plain mappings (TOML, JSON) to frozen dataclasses, strictly.

Unknown fields, missing fields, wrong types and values out of bounds raise the error class that the
caller names, with a message that begins with the field's path.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from blocktrain.protocol.errors import BlocktrainError

T = TypeVar("T")


def bounded(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    pattern: str | None = None,
) -> Any:
    """A dataclass field whose value must lie in [low, high], be one of `choices` or match `pattern`.

    For strings and tuples, low and high bound the length; a tuple's choices and pattern hold for each item.
    """
    metadata = {"low": low, "high": high, "choices": choices, "pattern": pattern}
    return dataclasses.field(default=default, metadata=metadata)


def from_mapping(cls: type[T], data: object, *, error: type[BlocktrainError], path: str = "") -> T:
    """Build the dataclass `cls` from a mapping; nested dataclasses from nested mappings.

    Raises:
        error: for anything that does not fit, with the field's dotted path in the message.
    """
    if not isinstance(data, Mapping):
        raise error(f"{path or 'the document'}: expected a table of fields, got {_kind(data)}")
    hints = _hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for name in data:
        if name not in fields:
            raise error(f"{_join(path, name)}: unknown field{_suggest(name, fields)}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        where = _join(path, name)
        if name in data:
            values[name] = _convert(hints[name], data[name], field, error, where)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise error(f"{where}: missing")
    return cls(**values)


_resolved: dict[type[Any], dict[str, Any]] = {}


def _hints(cls: type[Any]) -> dict[str, Any]:
    """Remembered, because resolving annotations takes longer than checking a message against them."""
    if cls not in _resolved:
        _resolved[cls] = typing.get_type_hints(cls)
    return _resolved[cls]


def _convert(hint: Any, value: object, field: Any, error: type[BlocktrainError], where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_mapping(typing.cast("type[Any]", hint), value, error=error, path=where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        if value is None and type(None) in args:
            return None
        hint = next(a for a in args if a is not type(None))
        return _convert(hint, value, field, error, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise error(f"{where}: expected a list, got {_kind(value)}")
        _check_bounds(len(value), field, error, where, "length ")
        item = bounded(choices=field.metadata.get("choices"), pattern=field.metadata.get("pattern"))
        return tuple(_convert(args[0], v, item, error, f"{where}[{i}]") for i, v in enumerate(value))
    value = _scalar(hint, value, error, where)
    if isinstance(value, str):
        _check_bounds(len(value), field, error, where, "length ")
        _check_text(value, field, error, where)
    elif not isinstance(value, bool):
        _check_bounds(typing.cast(float, value), field, error, where, "")
    return value


def _scalar(hint: Any, value: object, error: type[BlocktrainError], where: str) -> object:
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise error(f"{where}: must be a finite number, got {_digits(value)}") from None
        if not math.isfinite(value):
            raise error(f"{where}: must be a finite number, got {value}")
        return value + 0.0  # -0.0 becomes 0.0, so that equal values are written alike
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint in (str, bool) and isinstance(value, hint):
        return value
    raise error(f"{where}: expected {_NAMES[hint]}, got {_kind(value)}")


def _check_bounds(size: float, field: Any, error: type[BlocktrainError], where: str, what: str) -> None:
    low, high = field.metadata.get("low"), field.metadata.get("high")
    if low is not None and size < low:
        raise error(f"{where}: {what}must be at least {low}, got {_digits(size)}")
    if high is not None and size > high:
        raise error(f"{where}: {what}must be at most {high}, got {_digits(size)}")


def _check_text(value: str, field: Any, error: type[BlocktrainError], where: str) -> None:
    choices, pattern = field.metadata.get("choices"), field.metadata.get("pattern")
    if choices is not None and value not in choices:
        raise error(f"{where}: must be one of {', '.join(choices)}, got {value[:40]!r}")
    if pattern is not None and re.fullmatch(pattern, value) is None:
        raise error(f"{where}: {value[:40]!r} does not match {pattern}")


_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _kind(value: object) -> str:
    for kind, name in ((bool, "a truth value"), (int, "a whole number"), (float, "a number")):
        if isinstance(value, kind):
            return f"{name} ({_digits(value)})"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if value is None:
        return "nothing"
    names = {"dict": "a table", "list": "a list"}
    return names.get(type(value).__name__, type(value).__name__)


def _digits(value: float) -> str:
    """A number for a message. Python won't print integers of thousands of digits, which TOML may hold."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return str(value)


def _join(path: str, name: object) -> str:
    shown = str(name)[:40]
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", shown):
        shown = repr(shown)  # a line break would forge a second line of log
    return f"{path}.{shown}" if path else shown


def _suggest(name: object, fields: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(str(name)[:40], list(fields), n=1)
    return f" (did you mean {close[0]}?)" if close else f" (known: {', '.join(fields)})"
