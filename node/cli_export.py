"""`blocktrain-export`: download a whole model from its swarm into a folder."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro

from blocktrain.dht.session import visit_run
from blocktrain.node.collect import collect_model
from blocktrain.node.export import check_target, save_export, typed_path
from blocktrain.protocol.command import Command, print_json, run_command
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.options import NetworkOptions

log = logging.getLogger(__name__)
COMMAND = Command(
    "blocktrain-export",
    "Download every block of a run into a folder that can be evaluated offline.",
    "blocktrain-export --initial-peers /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo… --out model/",
)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(NetworkOptions):
    """What to export, and where to."""

    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""
    """Where to write the model: a new or empty folder, or an earlier export, which is replaced."""
    json: bool = False
    """Print one JSON document about what was written."""


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_command(COMMAND, ExportOptions, run))


async def run(options: ExportOptions) -> int:
    """Collect the model and write it."""
    if not options.out:
        raise UsageError("--out is missing: name a folder to write the model to, for example --out model/")
    folder = typed_path(options.out)
    check_target(folder)
    async with (
        asyncio.TaskGroup() as group,
        visit_run(options.initial_peers, options.run, options.join_timeout, group) as session,
    ):
        collected = await collect_model(session, torch.device("cpu"))
    save_export(folder, collected)
    spec = collected.model.spec
    size = sum(path.stat().st_size for path in folder.iterdir())
    if options.json:
        print_json(
            {
                "run": spec.name,
                "fingerprint": spec.fingerprint,
                "out": str(folder.resolve()),
                "bytes": size,
                "round": list(collected.rounds),
            }
        )
        return 0
    rounds = ", ".join(f"{block}: {number}" for block, number in enumerate(collected.rounds))
    print(f"{folder}: {spec.model.blocks} blocks of run {spec.name} (rounds {rounds}), {size / 1e6:,.1f} MB")
    print(f"evaluate it offline: blocktrain-eval --model {folder} --data PATH")
    return 0


if __name__ == "__main__":
    main()
