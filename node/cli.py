"""`blocktrain-node`: hold and train one block of a run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from blocktrain.dht.daemon import DaemonConfig
from blocktrain.dht.session import Session, open_session
from blocktrain.dht.swarm import JoinConfig
from blocktrain.model.bands import noise_bands
from blocktrain.model.text import BatchStream, Text, open_text, split
from blocktrain.model.train_step import Learner
from blocktrain.node import checkpoint
from blocktrain.node.acquire import acquire_state
from blocktrain.node.claim import Choice, claim_block, look_for_block
from blocktrain.node.events import EventLog, open_events
from blocktrain.node.options import NodeOptions, check_options
from blocktrain.node.placement import parse_block
from blocktrain.node.preflight import (
    check_room,
    count_parameters,
    describe_model,
    describe_text,
    estimate_needs,
    pick_device,
    set_threads,
)
from blocktrain.node.service import Limits, Node
from blocktrain.node.trainer import Trainer, TrainingThread
from blocktrain.node.work import Work
from blocktrain.protocol.addresses import parse_address, parse_addresses
from blocktrain.protocol.command import Command, run_command
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.home import hold_home
from blocktrain.protocol.identity import load_or_create_identity
from blocktrain.protocol.spec import RunSpec
from blocktrain.protocol.stop import Stop, stop_signals

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
    peers = parse_addresses(options.initial_peers)
    if not peers:
        raise UsageError(
            "--initial-peers is missing: paste the line that blocktrain-bootstrap or a node printed"
        )
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
        identity = load_or_create_identity(home / "identity.key")
        log.info("identity %s, kept in %s", identity.peer_id, home / "identity.key")
        daemon = DaemonConfig(home / "identity.key", listen, announce)
        config = JoinConfig(daemon, peers, options.join_timeout)
        async with (
            asyncio.TaskGroup() as group,
            open_session(identity, config, options.run, group, options.record_ttl) as session,
        ):
            await _work(session, options, home, text, events, stop)
    return 0


async def _work(
    session: Session, options: NodeOptions, home: Path, text: Text, events: EventLog, stop: Stop
) -> None:
    """Check what is needed, say what will be done and why, then do it until stopped."""
    spec = session.spec
    noise_bands(spec.noise, spec.model.blocks)  # a specification that leaves no noise to train on ends here
    train, heldout = split(text, spec.model.context)
    asked = parse_block(options.block, spec.model.blocks)
    decided = None if asked is None else (asked, "asked for with --block")
    log.info("run %s (fingerprint %s): %s", spec.name, spec.fingerprint, describe_model(spec.model))
    log.info("reachable at %s", " ".join(await session.swarm.addresses()))
    log.info("text %s: %s", text.name, describe_text(train, heldout))
    parameters = count_parameters(spec)
    room = check_room(estimate_needs(spec, parameters), home)
    device, threads = pick_device(options.device), torch.get_num_threads()
    log.info("device %s, %d thread(s), %s parameters; memory %s", device, threads, f"{parameters:,}", room)
    checkpoints = home / f"{spec.name}-{spec.fingerprint[:12]}"
    if options.check:
        choice = await look_for_block(session, decided, _kept(checkpoints, spec), random.Random())
        log.info("block %d: %s", *choice)
        log.info("everything needed is here; leave out --check to train")
        return
    limits = Limits(options.rounds, options.wait_for, may_move=asked is None and not options.rounds)
    with contextlib.closing(TrainingThread(options.nice)) as thread:
        while not stop.asked.is_set():
            stop.prepare()
            make = functools.partial(_make_trainer, session, device, train)
            work = await _take_block(session, decided, checkpoints, thread, make, events)
            stop.work_begins()
            block = await Node(work, limits).run(stop.asked)
            if block is None:
                return
            decided = block, "it needs this node more than the one before"


async def _take_block(
    session: Session,
    decided: Choice | None,
    checkpoints: Path,
    thread: TrainingThread,
    make: Callable[[int], Trainer],
    events: EventLog,
) -> Work:
    """Claim a block and get its state."""
    kept = _kept(checkpoints, session.spec)
    async with claim_block(session, decided, kept, random.Random()) as (block, reason):
        log.info("block %d: %s", block, reason)
        trainer = await thread.call(make, block)
        folder = checkpoints / f"block-{block}"
        origin = await acquire_state(session, trainer, thread, folder)
    log.info("state from %s", origin)
    events.write(
        "started",
        peer_id=session.swarm.peer_id,
        block=block,
        round=trainer.round,
        tokens=trainer.progress.tokens,
        parameters=sum(p.numel() for p in trainer.learner.parameters),
        addresses=await session.swarm.addresses(),
        origin=origin,
    )
    return Work(session, trainer, thread, folder, events)


def _kept(checkpoints: Path, spec: RunSpec) -> list[int]:
    """Blocks that this node has checkpoints of."""
    return [b for b in range(spec.model.blocks) if checkpoint.has_any(checkpoints / f"block-{b}")]


def _make_trainer(session: Session, device: torch.device, train: Text, block: int) -> Trainer:
    spec, peer_id = session.spec, session.swarm.peer_id
    stream = BatchStream(
        train, context=spec.model.context, batch_size=spec.optimizer.batch, seed=spec.seed, peer_id=peer_id
    )
    return Trainer(Learner.initial(spec, block, device), stream, peer_id)


if __name__ == "__main__":
    main()
