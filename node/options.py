"""What a volunteer can set for a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.options import NetworkOptions
from blocktrain.protocol.records import MAX_TTL_S

ACTIONS = ("run", "pause", "resume", "status")
MIN_TTL_S = 3.0
"""Records are renewed three times within their lifetime; more often than once a second is a burden."""


@dataclass(frozen=True, kw_only=True)
class NodeOptions(NetworkOptions):
    """How a node takes part."""

    action: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="run|pause|resume|status")] = "run"
    """Run a node; or let the one that runs with that --home pause, resume, or say how it is."""
    data: Annotated[str, tyro.conf.arg(metavar="PATH")] = ""
    """Text to train on: a file, a folder or a glob. Part of it is held out and never trained on."""
    block: Annotated[str, tyro.conf.arg(metavar="N|auto")] = "auto"
    """Which block to hold, from 0; auto: the neediest."""
    home: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""
    """Where identity and checkpoints are kept; by default the first free ~/.blocktrain/node-1, -2, …"""
    listen: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MULTIADDR …")] = ("/ip4/0.0.0.0/tcp/0",)
    """Where to listen; port 0 lets the system choose."""
    announce: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MULTIADDR …")] = ()
    """Addresses to tell others instead of this machine's own, for example behind a forwarded port."""
    device: Annotated[str, tyro.conf.arg(metavar="auto|cpu|cuda|mps")] = "auto"
    """Where to train."""
    threads: int = 0
    """Processor cores to train with; 0: all of them."""
    nice: int = 10
    """How far training stands back behind other programs, from 0 (not at all) to 19."""
    max_upload: Annotated[float, tyro.conf.arg(metavar="MBIT/S")] = 0.0
    """Send at most this much, rounds and state downloads included; 0: no limit."""
    max_download: Annotated[float, tyro.conf.arg(metavar="MBIT/S")] = 0.0
    """Receive at most this much; 0: no limit."""
    max_memory: Annotated[float, tyro.conf.arg(metavar="MB")] = 0.0
    """Don't begin if the block needs more memory, and stop if it comes to take more; 0: no limit."""
    quiet_hours: Annotated[str, tyro.conf.arg(metavar="HH:MM-HH:MM")] = ""
    """Don't train in this time of day, by this machine's clock; the state stays available to others."""
    rounds: int = 0
    """Stop training after this many rounds, and serve the result until stopped; 0: train until stopped."""
    wait_for: int = 1
    """Begin training once this many nodes are in the run."""
    record_ttl: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 30.0
    """How long others remember this node after it falls silent."""
    events: Annotated[str, tyro.conf.arg(metavar="FILE|-")] = ""
    """Append what happens to this file as JSON lines; -: to stdout."""
    check: bool = False
    """Only check whether this node could train, say what is missing, and end: 0 if it could."""
    json: bool = False
    """Print what --check or status has found as one JSON document."""
    join_timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 0.0
    """Give up when no initial peer has answered by then; 0: never."""


def check_options(options: NodeOptions) -> None:
    """Refuse values that can't work. Raises: UsageError."""
    if options.action not in ACTIONS:
        raise UsageError(f"{options.action[:40]!r}: not something a node can do; use {', '.join(ACTIONS)}")
    for name, value, low, high in (
        ("nice", options.nice, 0, 19),
        ("rounds", options.rounds, 0, 2**53),
        ("wait-for", options.wait_for, 1, 10**6),
        ("record-ttl", options.record_ttl, MIN_TTL_S, MAX_TTL_S),
        ("join-timeout", options.join_timeout, 0, 10**9),
        ("max-upload", options.max_upload, 0, 10**6),
        ("max-download", options.max_download, 0, 10**6),
        ("max-memory", options.max_memory, 0, 10**9),
    ):
        if not low <= value <= high:
            raise UsageError(f"--{name} {value}: must be from {low:g} to {high:g}")
