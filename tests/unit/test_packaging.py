"""The package lists, the layers and the tools in scripts/ agree with the tree."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from scripts.check_readme import HelpError, Mention, mentions, problems
from scripts.link import link, package_folders

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
COMMANDS: dict[str, str] = PROJECT["project"]["scripts"]


def test_every_package_folder_is_listed_and_every_listed_folder_is_there() -> None:
    folders = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    assert package_folders(ROOT) == folders


def test_the_root_holds_no_modules_that_would_be_left_out_of_the_wheel() -> None:
    assert not list(ROOT.glob("*.py"))


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_its_module_and_function(command: str) -> None:
    module, function = COMMANDS[command].split(":")
    path = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
    assert path.is_file(), f"{command}: {path.relative_to(ROOT)} is missing"
    assert re.search(rf"^def {function}\(", path.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert importlib.metadata.version("blocktrain") == PROJECT["project"]["version"]


def test_the_layers_name_every_package_once() -> None:
    layers = next(c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers")["layers"]
    named = [name for layer in layers for name in re.split(r"\s*\|\s*", layer) if not name.startswith("(")]
    assert sorted(named) == package_folders(ROOT)


def test_every_package_but_dht_is_kept_from_hivemind() -> None:
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    sources = next(c for c in contracts if c.get("forbidden_modules") == ["hivemind"])["source_modules"]
    assert sorted([*sources, "blocktrain.dht"]) == sorted(PROJECT["tool"]["setuptools"]["packages"])


def test_importing_a_package_by_its_folder_name_is_banned() -> None:
    banned = PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(package_folders(ROOT)) <= set(banned)


def test_every_requirement_is_pinned() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = set(re.findall(r"^([a-z0-9-]+)==\S+$", pins, re.MULTILINE))
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[<>=!~\[ ;]", requirement)[0] for group in groups for requirement in group}
    assert names <= pinned


def test_links_are_made_mended_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.setuptools]\npackages = ["blocktrain.one", "blocktrain.two"]'
    )
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    links = link(tmp_path)
    (links / "gone").symlink_to("../../gone")
    (links / "two").unlink()
    (links / "two").symlink_to("../../one")
    link(tmp_path)
    link(tmp_path)
    assert {path.name: path.resolve() for path in links.iterdir()} == {
        "one": tmp_path / "one",
        "two": tmp_path / "two",
    }


def test_commands_and_options_are_found_in_code_and_nowhere_else() -> None:
    text = r"""
Prose: blocktrain-prose --prose. Inline: `blocktrain-a --x=1` and `--lone` and `pytest --other`.
```
$ .venv/bin/blocktrain-b --one \
    --two <ADDRESS> | blocktrain-c --three; ls --all  # blocktrain-d --four
it's blocktrain-e
```
"""
    assert list(mentions(text)) == [
        Mention(2, "blocktrain-a", ("--x",)),
        Mention(2, "", ("--lone",)),
        Mention(4, "blocktrain-b", ("--one", "--two")),
        Mention(4, "blocktrain-c", ("--three",)),
        Mention(6, "blocktrain-e", ()),
    ]


def test_what_the_commands_do_not_bear_out_is_reported_with_its_line() -> None:
    def options_of(command: str) -> set[str]:
        if command == "blocktrain-broken":
            raise HelpError("blocktrain-broken --help failed")
        return {"--good"}

    text = "`blocktrain-a --good`\n`blocktrain-a --bad`\n`blocktrain-none`\n`blocktrain-broken`\n`--good`"
    assert list(problems(text, {"blocktrain-a", "blocktrain-broken"}, options_of)) == [
        "2: blocktrain-a has no option --bad",
        "3: blocktrain-none is no command of this project",
        "4: blocktrain-broken --help failed",
        "5: blocktrain-broken --help failed",
    ]


def test_a_lone_option_has_to_belong_to_some_command() -> None:
    found = problems("`--good` `--bad`", {"blocktrain-a"}, lambda _: {"--good"})
    assert list(found) == ["1: the project has no option --bad"]
