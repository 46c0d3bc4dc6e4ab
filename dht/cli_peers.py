"""`blocktrain-peers`: who holds what, how far and how fast, by the holders' own account."""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from blocktrain.dht.directory import Holder
from blocktrain.dht.session import visit_run
from blocktrain.protocol.command import Command, print_json, run_command
from blocktrain.protocol.options import NetworkOptions
from blocktrain.protocol.spec import RunSpec

COMMAND = Command(
    "blocktrain-peers",
    "Show who holds which block of a run, how far and how fast.",
    "blocktrain-peers --initial-peers /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo…",
)
Holders = Mapping[int, Sequence[Holder]]
"""Block → its holders; every block of the run is a key."""
_SHORT_ID = slice(8, 16)
"""Every Ed25519 peer id begins with 12D3KooW, so the characters after that are the telling ones."""
_KINDS = ("public", "private", "loopback", "dns", "relay")


@dataclass(frozen=True, kw_only=True)
class PeersOptions(NetworkOptions):
    """Which swarm to look at."""

    json: bool = False
    """Print one JSON document instead of tables."""


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_command(COMMAND, PeersOptions, run))


async def run(options: PeersOptions) -> int:
    """Visit the run, read its directory and show it."""
    async with (
        asyncio.TaskGroup() as group,
        visit_run(options.initial_peers, options.run, options.join_timeout, group) as session,
    ):
        holders = await session.directory.holders()
    if options.json:
        print_json(as_document(session.spec, holders))
    else:
        show(session.spec, holders, Console())
    return 0


def as_document(spec: RunSpec, holders: Holders) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "run": spec.name,
        "fingerprint": spec.fingerprint,
        "blocks": [
            {"block": block, "holders": [_as_fields(h) for h in holders[block]]} for block in sorted(holders)
        ],
    }


def verdict(holders: Holders) -> str:
    """One sentence: whether every block is held, by how many nodes, how far they are."""
    nodes = {h.peer_id for held in holders.values() for h in held}
    empty = [block for block in sorted(holders) if not holders[block]]
    if not nodes:
        return "degraded: nobody holds any block"
    state = f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}, {_rounds(holders)}"
    if empty:
        return f"degraded: nobody holds {_blocks(empty)} ({state})"
    covered = f"healthy: {len(holders)}/{len(holders)} blocks covered, {state}"
    single = [block for block in sorted(holders) if len(holders[block]) == 1]
    return f"{covered}; one holder only: {_blocks(single)}" if single else covered


def show(spec: RunSpec, holders: Holders, console: Console) -> None:
    """Print the verdict and a table of all holders, block by block."""
    style = "green" if all(holders.values()) else "red"
    console.print(verdict(holders), style=style, highlight=False, soft_wrap=True)
    console.print(f"run {spec.name}, fingerprint {spec.fingerprint}", highlight=False, soft_wrap=True)
    table = Table("block", box=box.SIMPLE_HEAD, show_edge=False, padding=0)  # so that 80 columns are enough
    table.add_column("holder", no_wrap=True)
    for title in ("round", "lag", "step", "tokens/s", "denoising\nCE", "age s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("version", no_wrap=True)
    table.add_column("addresses")
    for block in sorted(holders):
        newest = max((h.record.round for h in holders[block]), default=0)
        for holder in holders[block]:
            table.add_row(str(block), *_cells(holder, newest))
        if not holders[block]:
            table.add_row(str(block), "nobody", style="red")
        table.add_section()
    console.print(table)
    console.print(
        "All by the holders' own account. holder: the characters of its peer id after 12D3KooW. lag: rounds "
        "behind the block's furthest holder. denoising CE: the local training loss in nats, not the model's "
        "cross-entropy (for that: blocktrain-eval).",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def describe_addresses(addresses: Sequence[str]) -> str:
    """How many addresses there are, and of which kinds."""
    kinds = {_kind(address) for address in addresses}
    named = ", ".join(kind for kind in _KINDS if kind in kinds)
    return f"{len(addresses)}: {named}" if named else "none"


def _as_fields(holder: Holder) -> dict[str, object]:
    record = holder.record
    return {
        "peer_id": holder.peer_id,
        "addresses": list(record.addresses),
        "round": record.round,
        "step": record.step,
        "tokens_per_s": record.tokens_per_s,
        "age_s": round(holder.age_s, 1),
        "version": record.version,
        "denoising_ce": record.denoising_ce,
    }


def _cells(holder: Holder, newest: int) -> list[str]:
    record = holder.record
    return [
        holder.peer_id[_SHORT_ID],
        str(record.round),
        str(newest - record.round),
        f"{record.step:,}",
        f"{record.tokens_per_s:,.0f}",
        "-" if record.denoising_ce is None else f"{record.denoising_ce:.3f}",
        f"{holder.age_s:.0f}",
        record.version,
        describe_addresses(record.addresses),
    ]


def _kind(address: str) -> str:
    """Where an address leads. It is another peer's text and may be anything that starts with a slash."""
    if "/p2p-circuit" in address:
        return "relay"
    try:
        host = ipaddress.ip_address(address.split("/")[2])
    except (IndexError, ValueError):
        return "dns"
    if host.is_loopback:
        return "loopback"
    return "public" if host.is_global else "private"


def _rounds(holders: Holders) -> str:
    """The round that the blocks are at, each as far as its furthest holder."""
    newest = [max(h.record.round for h in held) for held in holders.values() if held]
    low, high = min(newest), max(newest)
    return f"round {high}" if low == high else f"rounds {low} to {high}"


def _blocks(blocks: Sequence[int]) -> str:
    if len(blocks) == 1:
        return f"block {blocks[0]}"
    return f"blocks {', '.join(map(str, blocks[:-1]))} and {blocks[-1]}"


if __name__ == "__main__":
    main()
