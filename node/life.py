"""A node's life: join, hold a block, get its state, train it; join again when something has failed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from blocktrain.dht.bandwidth import Traffic
from blocktrain.dht.contacts import FILE_NAME, Contacts
from blocktrain.dht.daemon import DaemonConfig, check_port
from blocktrain.dht.duplicates import place_of, refuse_taken_identity
from blocktrain.dht.membership import stay_joined
from blocktrain.dht.session import Session, open_session
from blocktrain.dht.swarm import JoinConfig
from blocktrain.model.bands import noise_bands
from blocktrain.model.text import BatchStream, Text, split
from blocktrain.model.train_step import Learner
from blocktrain.node import checkpoint
from blocktrain.node.acquire import acquire_state
from blocktrain.node.claim import Choice, claim_block
from blocktrain.node.control import Now
from blocktrain.node.events import EventLog
from blocktrain.node.options import NodeOptions
from blocktrain.node.placement import parse_block
from blocktrain.node.preflight import (
    check_room,
    count_parameters,
    describe_model,
    describe_text,
    estimate_needs,
    pick_device,
)
from blocktrain.node.service import Limits, Node
from blocktrain.node.trainer import Trainer, TrainingThread
from blocktrain.node.work import Work
from blocktrain.protocol.errors import DaemonError
from blocktrain.protocol.home import remember_port, with_last_port
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.spec import RunSpec
from blocktrain.protocol.stop import Stop

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setting:
    """What stays the same through a node's life."""

    options: NodeOptions
    daemon: DaemonConfig
    peers: tuple[str, ...]
    home: Path
    identity: Identity
    text: Text
    events: EventLog
    stop: Stop
    now: Now


async def live(setting: Setting) -> None:
    """Be a member and train until stopped; after each fault, go on from the state that was saved.

    Raises:
        BlocktrainError: joining failed the first time, or something that joining again can't mend.
    """
    await stay_joined(
        functools.partial(_join, setting),
        functools.partial(_work, setting),
        setting.stop,
        lambda reason: setting.events.write("rejoining", reason=reason),
    )


def _join(setting: Setting, group: asyncio.TaskGroup) -> contextlib.AbstractAsyncContextManager[Session]:
    options = setting.options
    daemon = dataclasses.replace(setting.daemon, listen=_last_listen(setting.home, setting.daemon.listen))
    config = JoinConfig(
        daemon,
        setting.peers,
        options.join_timeout,
        contacts=Contacts(setting.home / FILE_NAME),
        traffic=Traffic.limited(options.max_upload, options.max_download),
        place=place_of(setting.home, setting.identity.peer_id),
    )
    return open_session(setting.identity, config, options.run, group, options.record_ttl)


def _last_listen(home: Path, listen: tuple[str, ...]) -> tuple[str, ...]:
    """Where to listen: at the port of last time, which others remember, unless it is taken by now."""
    last = with_last_port(home, listen)
    try:
        for address in last:
            check_port(address)
    except DaemonError:
        return listen
    return last


async def _work(setting: Setting, session: Session) -> None:
    """Check what is needed, say what will be done and why, then do it until stopped."""
    spec, options, stop = session.spec, setting.options, setting.stop
    remember_port(setting.home, await session.swarm.addresses())
    await refuse_taken_identity(session.directory, session.swarm.place)
    noise_bands(spec.noise, spec.model.blocks)  # a specification that leaves no noise to train on ends here
    train, heldout = split(setting.text, spec.model.context)
    decided = decided_block(options, spec)
    log.info("run %s (fingerprint %s): %s", spec.name, spec.fingerprint, describe_model(spec.model))
    log.info("reachable at %s", " ".join(await session.swarm.addresses()))
    log.info("text %s: %s", setting.text.name, describe_text(train, heldout))
    parameters = count_parameters(spec)
    room = check_room(estimate_needs(spec, parameters), setting.home, options.max_memory)
    device, threads = pick_device(options.device), torch.get_num_threads()
    log.info("device %s, %d thread(s), %s parameters; memory %s", device, threads, f"{parameters:,}", room)
    checkpoints = checkpoints_of(setting.home, spec)
    limits = Limits(
        *(options.rounds, options.wait_for, options.max_memory),
        may_move=decided is None and not options.rounds,
    )
    with contextlib.closing(TrainingThread(options.nice)) as thread:
        while not stop.asked.is_set():
            stop.prepare()
            make = functools.partial(_make_trainer, session, device, train)
            setting.now.phase = "taking a block and getting its state"
            work = await _take_block(session, setting, decided, checkpoints, thread, make)
            stop.work_begins()
            setting.now.phase, setting.now.work = "training", work
            try:
                block = await Node(work, limits).run(stop.asked)
            finally:
                setting.now.phase, setting.now.work = "joining", None
            if block is None:
                return
            decided = block, "it needs this node more than the one before"


async def _take_block(
    session: Session,
    setting: Setting,
    decided: Choice | None,
    checkpoints: Path,
    thread: TrainingThread,
    make: Callable[[int], Trainer],
) -> Work:
    """Claim a block and get its state."""
    kept = kept_blocks(checkpoints, session.spec)
    async with claim_block(session, decided, kept, random.Random()) as (block, reason):
        log.info("block %d: %s", block, reason)
        trainer = await thread.call(make, block)
        folder = checkpoints / f"block-{block}"
        origin = await acquire_state(session, trainer, thread, folder)
    log.info("state from %s", origin)
    setting.events.write(
        "started",
        peer_id=session.swarm.peer_id,
        block=block,
        round=trainer.round,
        tokens=trainer.progress.tokens,
        parameters=sum(p.numel() for p in trainer.learner.parameters),
        addresses=await session.swarm.addresses(),
        origin=origin,
    )
    return Work(session, trainer, thread, folder, setting.events, setting.now.pauses)


def decided_block(options: NodeOptions, spec: RunSpec) -> Choice | None:
    """The block that `--block` asks for; None: choose one. Raises: UsageError."""
    asked = parse_block(options.block, spec.model.blocks)
    return None if asked is None else (asked, "asked for with --block")


def checkpoints_of(home: Path, spec: RunSpec) -> Path:
    """The folder in a node's home that belongs to a run."""
    return home / f"{spec.name}-{spec.fingerprint[:12]}"


def kept_blocks(checkpoints: Path, spec: RunSpec) -> list[int]:
    """Blocks that this node has checkpoints of, in its folder for the run."""
    return [b for b in range(spec.model.blocks) if checkpoint.has_any(checkpoints / f"block-{b}")]


def _make_trainer(session: Session, device: torch.device, train: Text, block: int) -> Trainer:
    spec, peer_id = session.spec, session.swarm.peer_id
    stream = BatchStream(
        train, context=spec.model.context, batch_size=spec.optimizer.batch, seed=spec.seed, peer_id=peer_id
    )
    return Trainer(Learner.initial(spec, block, device), stream, peer_id)
