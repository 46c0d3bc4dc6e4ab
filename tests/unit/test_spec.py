"""The run specification: what it refuses and how it says so, its canonical form, its fingerprint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol import keys
from blocktrain.protocol.errors import SpecError
from blocktrain.protocol.spec import PROTOCOL_VERSION, RunSpec

DEFAULT = RunSpec.from_mapping({"name": "demo"})
OTHER_TEXT = {
    "model.head": "edm",
    "model.target": "frozen",
    "noise.weighting": "edm",
    "optimizer.schedule": "cosine",
    "rounds.wire": "fp32",
    "gossip.wire": "fp16",
    "name": "other",
}


def leaves(mapping: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        where = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            yield from leaves(value, where)
        else:
            yield where, value


LEAVES = dict(leaves(DEFAULT.to_mapping()))


def check_line(message: str) -> None:
    """An error's message is one line that can't garble a terminal."""
    assert message.isprintable()
    assert len(message) < 400


def with_field(path: str, value: object) -> dict[str, Any]:
    """The default specification's mapping with one field set."""
    data = DEFAULT.to_mapping()
    table = data
    *tables, name = path.split(".")
    for part in tables:
        table = table[part]
    table[name] = value
    return data


def refusal(data: object) -> str:
    with pytest.raises(SpecError) as caught:
        RunSpec.from_mapping(data)
    check_line(str(caught.value))
    return str(caught.value)


def test_the_fingerprint_of_a_known_run_never_changes() -> None:
    # A change here means that released nodes can't meet newer ones: raise PROTOCOL_VERSION with it.
    assert DEFAULT.fingerprint == "244c34dacebb8ed0ee4b4b2149232cd9"


def test_order_defaults_and_spelling_of_numbers_do_not_matter() -> None:
    spelled = (
        'seed = 0\nname = "demo"\n[optimizer]\nweight_decay = 1e-2\ngrad_clip = 1\n[noise]\ngamma = 0.10\n'
    )
    assert RunSpec.from_toml(spelled).canonical() == DEFAULT.canonical()
    minus_zero = RunSpec.from_toml('name = "demo"\n[optimizer]\nweight_decay = -0.0\n')
    assert (
        minus_zero.canonical()
        == RunSpec.from_toml('name = "demo"\n[optimizer]\nweight_decay = 0\n').canonical()
    )


def test_the_canonical_form_is_sorted_json_and_comes_back() -> None:
    data = json.loads(DEFAULT.canonical())
    assert json.dumps(data, sort_keys=True, separators=(",", ":")).encode() == DEFAULT.canonical()
    assert RunSpec.from_canonical(DEFAULT.canonical()) == DEFAULT
    assert RunSpec.from_mapping(DEFAULT.to_mapping()) == DEFAULT


@pytest.mark.parametrize("path", [p for p in LEAVES if p not in ("protocol", "model.vocabulary")])
def test_every_field_changes_the_fingerprint(path: str) -> None:
    value = LEAVES[path]
    if isinstance(value, str):
        other: object = OTHER_TEXT[path]
    else:
        other = value / 2 if isinstance(value, float) else value * 2 or 1
    changed = RunSpec.from_mapping(with_field(path, other))
    assert changed.fingerprint != DEFAULT.fingerprint
    assert RunSpec.from_canonical(changed.canonical()) == changed


def test_the_protocol_version_changes_the_fingerprint() -> None:
    assert dataclasses.replace(DEFAULT, protocol=PROTOCOL_VERSION + 1).fingerprint != DEFAULT.fingerprint


def test_every_key_of_a_run_holds_its_fingerprint_and_content_has_one_key() -> None:
    fingerprint = DEFAULT.fingerprint
    names = [keys.holders(fingerprint, 0), keys.holders(fingerprint, 1), keys.stream(fingerprint, "join-0")]
    names.append(keys.specification(fingerprint))
    assert len(set(names)) == len(names)
    assert all(fingerprint in name for name in names)
    assert keys.specification_of(DEFAULT.canonical()) == keys.specification(fingerprint)
    assert keys.specification_of(DEFAULT.canonical() + b" ") != keys.specification(fingerprint)


@pytest.mark.parametrize("path", LEAVES)
def test_a_wrong_type_anywhere_names_the_field(path: str) -> None:
    wrong: list[object] = [{}, [], None, True, 7 if isinstance(LEAVES[path], str) else "7"]
    for value in wrong:
        assert refusal(with_field(path, value)).startswith(f"{path}: ")


@pytest.mark.parametrize("path", [p for p, v in LEAVES.items() if not isinstance(v, str)])
def test_a_number_that_is_not_sane_names_the_field(path: str) -> None:
    for value in (float("nan"), float("inf"), -float("inf"), -(10**4000), 10**4000, 16**5000, -1e300):
        assert refusal(with_field(path, value)).startswith(f"{path}: ")


@pytest.mark.parametrize("path", ["", "model.", "noise.", "optimizer.", "rounds.", "gossip."])
def test_an_unknown_field_is_named_with_the_nearest_known_one(path: str) -> None:
    assert refusal(with_field(f"{path}sead", 1)).startswith(f"{path}sead: unknown field")
    assert refusal(with_field("model.d_modell", 8)) == "model.d_modell: unknown field (did you mean d_model?)"


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("model.heads", 3, "model.d_model: 128 is not a multiple of 2 × model.heads (6)"),
        ("noise.sigma_min", 10.0, "noise.sigma_min: 10 must be below noise.sigma_max (10)"),
        ("model.layers", 257, "model.layers: must be at most 256, got 257"),
        ("model.blocks", 0, "model.blocks: must be at least 1, got 0"),
        (
            "model.d_model",
            16_384,
            "model.layers: a block of about 9.7 billion parameters is over the limit of 4",
        ),
        (
            "optimizer.warmup_steps",
            100_001,
            "optimizer.warmup_steps: 100001 must not exceed optimizer.total_steps",
        ),
        ("name", "../up", "name: '../up' does not match"),
        ("name", ".hidden", "name: '.hidden' does not match"),
        ("name", "a\n", "name: 'a\\n' does not match"),
        ("name", "a" * 65, "name: length must be at most 64, got 65"),
        ("seed", 2**63, "seed: must be at most 9223372036854775807, got 9223372036854775808"),
        ("protocol", 2, "protocol: newer than 1, the version spoken here; update blocktrain"),
        ("protocol", 0, "protocol: older than 1"),
        ("protocol", 1.0, "protocol: expected a whole number, got a number (1.0)"),
    ],
)
def test_impossible_values_are_refused_with_the_way_out(path: str, value: object, told: str) -> None:
    assert refusal(with_field(path, value)).startswith(told)


def test_a_later_version_is_told_before_the_fields_that_only_it_knows() -> None:
    assert "update blocktrain" in refusal({"protocol": 2, "name": "demo", "shards": 4})


def test_the_name_is_required() -> None:
    assert refusal({}) == "name: missing"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(list(LEAVES)), json_values)
def test_any_json_value_in_any_field_is_valid_or_a_spec_error(path: str, value: object) -> None:
    data = json.dumps(with_field(path, value)).encode()
    try:
        spec = RunSpec.from_canonical(data)
    except SpecError as error:
        check_line(str(error))
    else:
        assert RunSpec.from_canonical(spec.canonical()) == spec
