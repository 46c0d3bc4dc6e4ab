"""The documentation names what the code has: fields, messages, limits, errors, and files that exist."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from blocktrain.protocol import errors, messages
from blocktrain.protocol.records import PeerRecord, RunRecord
from blocktrain.protocol.spec import GossipSpec, ModelSpec, NoiseSpec, OptimizerSpec, RoundSpec, RunSpec

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SECTIONS: dict[str, type[Any]] = {
    "At the top": RunSpec,
    "[model]": ModelSpec,
    "[noise]": NoiseSpec,
    "[optimizer]": OptimizerSpec,
    "[rounds]": RoundSpec,
    "[gossip]": GossipSpec,
}
TYPES = {"str": "text", "int": "whole number", "float": "number"}
LIMITED_MODULES = [
    *(f"protocol.{name}" for name in ("addresses", "identity", "messages", "records", "spec", "tensors")),
    *(f"dht.{name}" for name in ("averager", "dial", "directory", "exchange", "gossip", "reduction")),
    *(f"dht.{name}" for name in ("rendezvous", "state", "streams", "swarm")),
    *(f"dht.{name}" for name in ("chunks", "circuit", "donor", "manifest", "relays", "suspicion")),
    *(f"dht.{name}" for name in ("bandwidth", "contacts", "duplicates", "greeting", "meeting")),
]
NOT_A_LIMIT = {"PROTOCOL_VERSION"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def section(page: str, title: str) -> str:
    """What follows a heading, up to the next of the same level or above."""
    level, rest = re.split(rf"^(#+) {re.escape(title)}$", page, maxsplit=1, flags=re.MULTILINE)[1:]
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> dict[str, list[str]]:
    """The cells after the first, by the name in the first, of all rows of tables that begin with code."""
    cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines())
    return {first[1:-1]: rest for first, *rest in cells if rest and re.fullmatch(r"\|? ?`\w+`", first)}


def toml_value(text: str) -> object:
    """What a run file that has this text as a value means."""
    return tomllib.loads(f"value = {text}")["value"]


def run_page_fields() -> list[Any]:
    """Section and field, for every field that is no section itself."""
    fields = [(title, field) for title, cls in SECTIONS.items() for field in dataclasses.fields(cls)]
    plain = [(t, f) for t, f in fields if f.default_factory is dataclasses.MISSING]
    return [pytest.param(title, field, id=f"{title}-{field.name}") for title, field in plain]


def limits() -> dict[str, float]:
    """Every public numeric constant of the modules that define what crosses the network."""
    found: dict[str, float] = {}
    for name in LIMITED_MODULES:
        module = importlib.import_module(f"blocktrain.{name}")
        for constant in re.findall(r"^([A-Z][A-Z0-9_]+)(?::.*)? = ", inspect.getsource(module), re.MULTILINE):
            if isinstance(value := getattr(module, constant), int | float) and constant not in NOT_A_LIMIT:
                found[constant] = value
    return found


@pytest.mark.parametrize(("title", "field"), run_page_fields())
def test_the_run_page_has_every_field_with_its_type_bounds_and_default(
    title: str, field: dataclasses.Field[Any]
) -> None:
    table = rows(section((DOCS / "run.md").read_text(encoding="utf-8"), title))
    kind, bounds, default, meaning = table[field.name]
    assert kind == TYPES[str(field.type)]
    if choices := field.metadata.get("choices"):
        assert re.findall(r'"([^"]+)"', bounds) == list(choices)
    elif field.metadata.get("low") is not None:
        low, high = map(toml_value, bounds.split(" … "))
        assert (low, high) == (field.metadata["low"], field.metadata["high"])
    if field.default is dataclasses.MISSING:
        assert default == "–"
    else:
        assert toml_value(default.strip("`")) == field.default
    assert meaning


def test_the_run_page_has_no_field_that_does_not_exist() -> None:
    page = (DOCS / "run.md").read_text(encoding="utf-8")
    for title, cls in SECTIONS.items():
        assert rows(section(page, title)).keys() <= {field.name for field in dataclasses.fields(cls)}


def test_the_protocol_page_has_every_message_with_its_fields() -> None:
    table = rows(section((DOCS / "protocol.md").read_text(encoding="utf-8"), "Messages"))
    assert table.keys() == messages.KINDS.keys()
    for name, kind in messages.KINDS.items():
        named = re.findall(r"`(\w+)`", table[name][0])
        assert {field.name for field in dataclasses.fields(kind)} <= set(named), name


@pytest.mark.parametrize("record", [PeerRecord, RunRecord])
def test_the_protocol_page_has_every_field_of_a_record(record: type[Any]) -> None:
    text = section((DOCS / "protocol.md").read_text(encoding="utf-8"), "Records")
    for field in dataclasses.fields(record):
        assert f"`{field.name}`" in text


def test_the_protocol_page_has_every_limit_with_its_value_and_no_other() -> None:
    table = rows(section((DOCS / "protocol.md").read_text(encoding="utf-8"), "Limits"))
    assert {name: float(cells[0]) for name, cells in table.items()} == limits()


def test_the_troubleshooting_page_names_every_class_of_error() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    classes = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, Exception)]
    assert len(classes) > 10
    for cls in classes:
        assert f"`{cls.__name__}`" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(title) for title in titles}, target


def test_the_index_leads_to_every_page() -> None:
    targets = LINK.findall((DOCS / "index.md").read_text(encoding="utf-8"))
    assert {path.name for path in DOCS.glob("*.md")} - {"index.md"} <= set(targets)


def slug(title: str) -> str:
    """The anchor that code hosts make of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
