"""Run files and bytes from the network: a run, or one line that says what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol.errors import SpecError
from blocktrain.protocol.spec import MAX_SPEC_BYTES, RunSpec

DEFAULT = RunSpec.from_mapping({"name": "demo"})
HUGE = "0x" + "f" * 5000


def check_line(message: str) -> None:
    """An error's message is one line that can't garble a terminal."""
    assert message.isprintable()
    assert len(message) < 400


def toml_refusal(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        RunSpec.from_toml(text)
    check_line(str(caught.value))
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["name = ", "= 1", "name = 'a'\nname = 'b'", "\x00", "[" * 3000, "a = " + "[" * 3000, "x = 1-2", "\ud800",
     "seed = " + "9" * 5000, "name = 'a'\nseed = " + HUGE, "name = 1979-05-27", "[model]\nname = 1"],
)  # fmt: skip
def test_bad_toml_is_one_line(text: str) -> None:
    toml_refusal(text)


def test_a_number_of_thousands_of_digits_names_its_field() -> None:
    assert toml_refusal(f'name = "a"\nseed = {HUGE}') == (
        "seed: must be at most 9223372036854775807, got a number of 20000 bits"
    )
    assert toml_refusal(f"name = {HUGE}").startswith("name: expected a text")
    assert toml_refusal(f'name = "a"\nprotocol = {HUGE}').startswith("protocol: newer than 1")


@given(st.text(max_size=200))
def test_any_text_is_a_run_or_a_spec_error(text: str) -> None:
    try:
        RunSpec.from_toml(text)
    except SpecError as error:
        check_line(str(error))


@given(
    st.binary(max_size=200)
    | st.sampled_from([b"[" * 16_000, b'{"a":' * 3000, b"1" * 16_000, b"NaN", b"\xff\xfe{"])
)
def test_any_bytes_from_the_network_are_a_run_or_a_spec_error(data: bytes) -> None:
    with pytest.raises(SpecError):
        RunSpec.from_canonical(data)


def test_an_oversized_specification_is_not_parsed() -> None:
    with pytest.raises(SpecError, match="larger than 16384 bytes"):
        RunSpec.from_canonical(DEFAULT.canonical() + b" " * MAX_SPEC_BYTES)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe", "not UTF-8 text; a run file is TOML"),
        (b'name = "demo"\n' + b"# filler\n" * 2000, "larger than 16384 bytes"),
        # Cut to 16,385 bytes this is fewer characters than the limit: it must not be read in part.
        (b'name = "demo"\n' + "# é\n".encode() * 4000 + b"[model]\nblocks = 9\n", "larger than 16384 bytes"),
        (b"", "name: missing"),
        (b"name = 3", "name: expected a text"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        RunSpec.from_file(path)
    assert str(caught.value).startswith(f"{path}: {told}")


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path, told in ((tmp_path / "no.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(SpecError, match=f"can't be read: {told}"):
            RunSpec.from_file(path)


def test_an_endless_file_is_refused_without_being_read(tmp_path: Path) -> None:
    (tmp_path / "endless.toml").symlink_to("/dev/zero")
    with pytest.raises(SpecError, match="larger than"):
        RunSpec.from_file(tmp_path / "endless.toml")


def test_line_ends_and_byte_order_mark_of_windows_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b'\xef\xbb\xbfname = "demo"\r\n[model]\r\nblocks = 3\r\n')
    assert RunSpec.from_file(path) == DEFAULT


def test_a_run_written_as_a_file_is_the_same_run() -> None:
    spec = RunSpec.from_toml('name = "x-1"\n[optimizer]\neps = 1e-16\nlr = 3\n[model]\nhead = "edm"\n')
    assert RunSpec.from_toml(spec.to_toml()) == spec
    assert RunSpec.from_toml(spec.to_toml()).fingerprint == spec.fingerprint
