"""`blocktrain-node`: hold and train one block of a run."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys

from blocktrain.dht.contacts import FILE_NAME, Contacts
from blocktrain.dht.daemon import DaemonConfig
from blocktrain.model.text import open_text
from blocktrain.node.check import check_node
from blocktrain.node.control import Now, control, serve_control
from blocktrain.node.events import open_events
from blocktrain.node.life import Setting, live
from blocktrain.node.options import NodeOptions, check_options
from blocktrain.node.pauses import Pauses, heed_quiet_hours, parse_quiet_hours
from blocktrain.node.preflight import pick_device, set_threads
from blocktrain.protocol.addresses import parse_address, parse_addresses
from blocktrain.protocol.command import Command, run_command
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.home import hold_home
from blocktrain.protocol.identity import load_or_create_identity
from blocktrain.protocol.stop import stop_signals

log = logging.getLogger(__name__)
COMMAND = Command(
    "blocktrain-node",
    "Hold and train one block of a run, together with others.",
    "blocktrain-node --initial-peers /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo… --data my.txt",
)


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_command(COMMAND, NodeOptions, run))


async def run(options: NodeOptions) -> int:
    """Run a node until it is stopped."""
    check_options(options)
    quiet = parse_quiet_hours(options.quiet_hours)
    if options.action != "run":
        return await control(options)
    if options.check:
        return await check_node(options)
    peers = parse_addresses(options.initial_peers)
    if not options.data:
        raise UsageError("--data is missing: name a file, a folder or a glob of text to train on")
    listen = tuple(parse_address(a, listening=True) for a in options.listen)
    announce = tuple(parse_address(a, listening=True) for a in options.announce)
    text = open_text(options.data)
    pick_device(options.device)  # one that isn't here ends it before anything is joined
    set_threads(options.threads)
    with (
        hold_home(options.home, "node") as home,
        open_events(options.events) as events,
        stop_signals() as stop,
    ):
        # Without any, the peers of last time are not only a second choice: they are waited for.
        peers = peers or tuple(itertools.chain(*Contacts(home / FILE_NAME).peers.values()))
        if not peers:
            raise UsageError(
                "--initial-peers is missing: paste the line that blocktrain-bootstrap or a node printed"
            )
        identity = load_or_create_identity(home / "identity.key")
        log.info("identity %s, kept in %s", identity.peer_id, home / "identity.key")
        daemon = DaemonConfig(home / "identity.key", listen, announce)
        now = Now(home, identity.peer_id, Pauses())
        async with asyncio.TaskGroup() as group, serve_control(now):
            heeding = group.create_task(heed_quiet_hours(quiet, now.pauses)) if quiet else None
            await live(Setting(options, daemon, peers, home, identity, text, events, stop, now))
            if heeding is not None:
                heeding.cancel()
    return 0


if __name__ == "__main__":
    main()
