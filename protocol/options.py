"""Options that commands of several folders share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from blocktrain.protocol.command import CommonOptions


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(CommonOptions):
    """How to reach a swarm."""

    initial_peers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MULTIADDR …")] = ()
    """Members of the swarm: repeated, or separated by commas, spaces or lines, or @FILE."""
    run: Annotated[str, tyro.conf.arg(metavar="NAME|FINGERPRINT")] = ""
    """Which run, if the swarm has several."""
    join_timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 30.0
    """Give up when no initial peer has answered by then; 0: never."""
