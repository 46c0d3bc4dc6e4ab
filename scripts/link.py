"""Make .links/blocktrain/<folder>, a symlink to each package folder, for mypy and import-linter.

Both find modules by path and know nothing of setuptools' `package-dir`. Safe to run again.
"""

from __future__ import annotations

import tomllib
from pathlib import Path


def package_folders(root: Path) -> list[str]:
    """Names of the folders that pyproject.toml under `root` lists as subpackages of blocktrain."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    packages: list[str] = project["tool"]["setuptools"]["packages"]
    return [name.removeprefix("blocktrain.") for name in packages]


def link(root: Path) -> Path:
    """Bring root/.links/blocktrain in line with the list of packages; return its path."""
    links = root / ".links" / "blocktrain"
    links.mkdir(parents=True, exist_ok=True)
    wanted = {name: Path("..", "..", name) for name in package_folders(root)}
    for entry in links.iterdir():
        if wanted.get(entry.name) != (entry.readlink() if entry.is_symlink() else None):
            entry.unlink()
    for name, target in wanted.items():
        if not (links / name).is_symlink():
            (links / name).symlink_to(target, target_is_directory=True)
    return links


if __name__ == "__main__":
    link(Path(__file__).resolve().parent.parent)
