"""What a volunteer can set for a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from blocktrain.protocol.options import NetworkOptions


@dataclass(frozen=True, kw_only=True)
class NodeOptions(NetworkOptions):
    """How a node takes part."""

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
    rounds: int = 0
    """Stop training after this many rounds, and serve the result until stopped; 0: train until stopped."""
    wait_for: int = 1
    """Begin training once this many nodes are in the run."""
    record_ttl: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 30.0
    """How long others remember this node after it falls silent."""
    events: Annotated[str, tyro.conf.arg(metavar="FILE|-")] = ""
    """Append what happens to this file as JSON lines; -: to stdout."""
    check: bool = False
    """Only check whether this node could train, and say so."""
