"""A local swarm's result for people: tables, a sample, and what to type next."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from blocktrain.bootstrap.local import LocalSwarmConfig


def print_report(console: Console, result: dict[str, Any], config: LocalSwarmConfig) -> None:
    """Print everything that `result` holds."""
    rounds = result["rounds"]
    console.print(
        f"\n[bold]{result['nodes']} nodes trained {result['blocks']} blocks[/bold] "
        f"in {result['seconds']:.0f} s: {result['tokens']:,} tokens, {result['tokens_per_s']:,.0f} a second,"
        f" {rounds['committed']} rounds committed, {rounds['aborted']} aborted."
    )
    console.print(_quality(result))
    console.print(_cost(result))
    console.print("\n[bold]A sample[/bold], 200 bytes written by the ensemble:")
    console.print(escape(result["sample"]), highlight=False)
    console.print(_next_steps(result, config), highlight=False, soft_wrap=True)


def _quality(result: dict[str, Any]) -> Table:
    table = Table(
        title="Honest cross-entropy on held-out text, nats per byte (lower is better)", title_justify="left"
    )
    table.add_column("predictor")
    table.add_column("nats/byte", justify="right")
    ce = result["ce"]
    rows = {f"{name} model of the same text": value for name, value in result["baselines"].items()}
    rows |= {f"block {i} alone": value for i, value in enumerate(ce["blocks"])}
    rows |= {f"all blocks, {name}": value for name, value in ce.items() if name != "blocks"}
    best = min(rows.values())
    for name, value in rows.items():
        style = "bold green" if value == best else ""
        table.add_row(name, f"{value:.3f}", style=style)
    return table


def _cost(result: dict[str, Any]) -> Table:
    table = Table(title="What it took", title_justify="left", show_header=False)
    divergence = max(result["divergence"])
    table.add_row("sent by all nodes, a trained token", f"{result['bytes_per_token']:.2f} bytes")
    table.add_row("greatest memory of a node process", f"{max(result['peak_rss_mb']):,.0f} MB")
    table.add_row("greatest difference between holders' last anchors", f"{divergence:.2g}")
    losses = ", ".join("-" if ce is None else f"{ce:.3f}" for ce in result["denoising_ce"])
    table.add_row("denoising CE of each block (sees noisy targets: not a measure of the model)", losses)
    return table


def _next_steps(result: dict[str, Any], config: LocalSwarmConfig) -> str:
    address, home = result["address"], config.home
    return f"""
The swarm has ended; it is kept in {home}. To go on with it, each in a shell of its own (node-0, node-1, …):
  blocktrain-bootstrap --home {home}/seed --publish {home}/run.toml --listen /ip4/127.0.0.1/tcp/0
  blocktrain-node --home {home}/node-0 --initial-peers {address} --data {config.data}
To join it with your own text, and to look at it:
  blocktrain-node --initial-peers {address} --data my.txt
  blocktrain-peers --initial-peers {address}
To train a swarm like this one on your own text:
  blocktrain-swarm --nodes 6 --rounds 20 --data my.txt"""
