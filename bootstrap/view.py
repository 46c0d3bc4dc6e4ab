"""A local swarm at work, on the terminal: a table that is redrawn, or a line now and then in a log file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from blocktrain.bootstrap.local import LocalNode, LocalSwarm
from blocktrain.bootstrap.result import count_rounds, known_mean

LINE_EVERY_S = 10.0


class SwarmView:
    """Shows a swarm's progress on stderr. Call `update` at every event."""

    def __init__(self, rounds: int, live: Live | None, console: Console) -> None:
        self._rounds, self._live, self._console = rounds, live, console
        self._started = time.monotonic()
        self._said = 0.0

    def update(self, swarm: LocalSwarm) -> None:
        """Draw the present state."""
        if self._live is not None:
            self._live.update(self._table(swarm))
        elif time.monotonic() - self._said > LINE_EVERY_S:
            self._said = time.monotonic()
            self._console.print(self._line(swarm), highlight=False, soft_wrap=True)

    def _table(self, swarm: LocalSwarm) -> Group:
        table = Table(title=f"run {swarm.config.spec.name} · seed {swarm.address}", title_justify="left")
        columns = (
            "block",
            "holders",
            "round",
            "step",
            "denoising CE",
            "tokens/s",
            "committed",
            "aborted",
            "sent",
        )
        for name in columns:
            table.add_column(name, justify="right")
        for block in range(swarm.config.spec.model.blocks):
            table.add_row(*_block_row(block, [n for n in swarm.nodes if n.block == block]))
        done = _rounds_done(swarm)
        bar = ProgressBar(total=max(self._rounds, 1), completed=min(done, self._rounds), width=40)
        return Group(table, Text(f"rounds {done} of {self._rounds} · {self._times(done)}"), bar)

    def _line(self, swarm: LocalSwarm) -> str:
        rounds, done = count_rounds(swarm.nodes), _rounds_done(swarm)
        ces = [
            known_mean([n.status.get("denoising_ce") for n in swarm.nodes if n.block == b])
            for b in _blocks(swarm)
        ]
        shown = ", ".join("-" if ce is None else f"{ce:.3f}" for ce in ces)
        return (
            f"round {done} of {self._rounds}: {rounds['committed']} committed, {rounds['aborted']} aborted; "
            f"denoising CE by block {shown}; {_speed(swarm.nodes):,.0f} tokens/s; {self._times(done)}"
        )

    def _times(self, done: int) -> str:
        elapsed = time.monotonic() - self._started
        if not 0 < done < self._rounds:
            return f"{elapsed:.0f} s"
        return f"{elapsed:.0f} s, about {elapsed / done * (self._rounds - done):.0f} s to go"


@contextlib.contextmanager
def show_swarm(rounds: int) -> Iterator[SwarmView]:
    """A view on stderr: live on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield SwarmView(rounds, None, console)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield SwarmView(rounds, live, console)


def _block_row(block: int, nodes: list[LocalNode]) -> list[str]:
    rounds, ce = count_rounds(nodes), known_mean([n.status.get("denoising_ce") for n in nodes])
    sent = sum(sum(n.status.get("bytes_sent", {}).values()) for n in nodes)
    return [
        str(block),
        str(sum(n.process.returncode is None for n in nodes)),
        str(max((n.status.get("round", 0) for n in nodes), default=0)),
        str(sum(n.status.get("step", 0) for n in nodes)),
        "-" if ce is None else f"{ce:.3f}",
        f"{_speed(nodes):,.0f}",
        str(rounds["committed"]),
        str(rounds["aborted"]),
        f"{sent / 1e6:.1f} MB",
    ]


def _rounds_done(swarm: LocalSwarm) -> int:
    return min((n.status.get("round", 0) for n in swarm.nodes), default=0)


def _blocks(swarm: LocalSwarm) -> range:
    return range(swarm.config.spec.model.blocks)


def _speed(nodes: list[LocalNode]) -> float:
    return float(sum(n.status.get("tokens_per_s", 0.0) for n in nodes if n.process.returncode is None))
