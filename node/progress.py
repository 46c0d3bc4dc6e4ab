"""Progress bars on stderr for what takes long; nothing where stderr is no terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Report = Callable[[int, int], None]
"""Called with what is done and what there is in all."""


@contextlib.contextmanager
def transfer_bar(title: str) -> Iterator[Report]:
    """A bar in bytes, with rate and remaining time."""
    with _bar(title, DownloadColumn(), TransferSpeedColumn()) as report:
        yield report


@contextlib.contextmanager
def count_bar(title: str) -> Iterator[Report]:
    """A bar in things, with remaining time."""
    with _bar(title, MofNCompleteColumn()) as report:
        yield report


@contextlib.contextmanager
def _bar(title: str, *columns: ProgressColumn) -> Iterator[Report]:
    console = Console(stderr=True)
    shown = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
