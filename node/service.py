"""A node at work: training, rounds, gossip and its record, until it is told to stop.

Training never waits for the network: a round works on a snapshot, and its result is added to what was
learned meanwhile. Every loop survives whatever peers and the DHT do.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass

import numpy as np

from blocktrain.dht.donor import StateServer
from blocktrain.dht.gossip import TableGossip
from blocktrain.dht.manifest import State
from blocktrain.dht.swarm import dht_time
from blocktrain.node.presence import advertise, await_nodes, keep_specification, withdraw
from blocktrain.node.rebalance import Share, elect_move
from blocktrain.node.rounds import Rounds
from blocktrain.node.usage import memory_mb
from blocktrain.node.work import Work
from blocktrain.protocol.errors import HomeError, NetworkError

log = logging.getLogger(__name__)
SLICE_S = 0.2
"""Training runs in slices this long; a snapshot waits for the current one to end."""
GOSSIP_TRIES = 4
MEMORY_LOOK_S = 10.0
GOSSIP_PAUSE_S = 0.5
BALANCE_TERMS = 10
"""Blocks that nobody holds are filled in every term; speeds are evened out in every tenth."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a node begins, and when it has done enough."""

    rounds: int = 0
    """Stop training after this round; 0: never."""
    nodes: int = 1
    """Begin once this many nodes are in the run."""
    memory_mb: float = 0.0
    """Leave when the process takes more than this; 0: never."""
    may_move: bool = False
    """Go to another block when that one needs this node more."""


class Node:
    """One node of one run, holding one block."""

    def __init__(self, work: Work, limits: Limits) -> None:
        self.work, self.limits = work, limits
        self._leaving = asyncio.Event()
        self._move_to: int | None = None
        streams, wire = work.session.streams, work.session.spec.gossip.wire
        self._rounds = Rounds(work, limits.rounds)
        self._gossip = TableGossip(streams, wire, self._take_table, self._shift_table, work.rng)
        self._server = StateServer(streams, work.block, self._give_state)

    async def run(self, stop: asyncio.Event) -> int | None:
        """Serve, train and average until `stop` is set, then leave: state saved, record withdrawn.

        Or until another block needs this node more; then that block is returned.

        Raises:
            DataError: the training text can't be read any more. State is saved then, too.
        """
        work = self.work
        await self._rounds.averager.start()
        await self._gossip.start()
        await self._server.start()
        try:
            async with asyncio.TaskGroup() as group:
                loops = [
                    advertise(work),
                    keep_specification(work),
                    self._train_until_done(),
                    self._heed(stop),
                    self._heed_pauses(),
                ]
                if self.limits.memory_mb:
                    loops.append(self._watch_memory(self.limits.memory_mb))
                if self.limits.may_move:
                    loops.append(self._watch_blocks())
                tasks = [group.create_task(loop) for loop in loops]
                await self._leaving.wait()
                for task in tasks:
                    task.cancel()
        finally:
            await work.session.streams.stop_serving()
            saved = await work.save()
            await withdraw(work)
            work.events.write("stopped", **work.status())
            where = f"state saved in {work.folder}" if saved else "its state could not be saved"
            progress = work.trainer.progress
            log.info("stopped after round %d, step %d; %s", work.trainer.round, progress.step, where)
        return self._move_to

    async def _heed(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._leaving.set()

    async def _heed_pauses(self) -> None:
        """Say when training pauses and goes on; save before a pause, which may end with the machine off."""
        work, paused = self.work, False
        while True:
            if paused == work.pauses.awake.is_set():
                paused = not paused
                work.news.set()
                if paused:
                    log.info("paused: %s", ", ".join(work.pauses.reasons))
                    await work.save()
                else:
                    log.info("no longer paused" if work.resting else "training goes on")
                work.events.write("paused" if paused else "resumed", **work.status())
            work.pauses.changed.clear()
            if paused != work.pauses.awake.is_set():
                await work.pauses.changed.wait()

    async def _watch_memory(self, limit_mb: float) -> None:
        """Raises: HomeError when the process takes more than it may."""
        while True:
            await asyncio.sleep(MEMORY_LOOK_S)
            used_mb, _ = await asyncio.to_thread(memory_mb)
            if used_mb > limit_mb:
                raise HomeError(
                    f"this node takes {used_mb:,.0f} MB of memory, --max-memory is {limit_mb:,.0f}; "
                    "allow more, or choose a run with smaller blocks"
                )

    async def _watch_blocks(self) -> None:
        """At each term look whether this node is the one that has to move (see rebalance.py)."""
        work, term_s = self.work, self.work.session.spec.rounds.deadline_s
        while True:
            await asyncio.sleep(term_s - dht_time() % term_s)
            term = round(dht_time() / term_s)
            try:
                holders = await work.session.directory.holders(joining=True)
            except NetworkError as error:
                log.warning("could not see who holds what: %s", error)
                continue
            shares = {
                b: [Share(h.peer_id, h.record.tokens_per_s) for h in there if not h.record.resting]
                for b, there in holders.items()
            }
            move = elect_move(shares, term, balance=term % BALANCE_TERMS == 0)
            if move is not None and move[0] == work.me:
                log.info(
                    "moving to block %d, which needs this node more than block %d does", move[1], work.block
                )
                self._move_to = move[1]
                self._leaving.set()
                return

    async def _train_until_done(self) -> None:
        work = self.work
        await await_nodes(work, self.limits.nodes)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._train()), group.create_task(self._gossip_after_rounds())]
            await self._rounds.run()
            for task in tasks:
                task.cancel()
        work.resting = True
        work.news.set()
        work.events.write("finished", **work.status())
        log.info("finished: %d rounds; serving the result until stopped", work.trainer.round)

    async def _train(self) -> None:
        while True:
            await self.work.pauses.awake.wait()
            await self.work.thread.call(self.work.trainer.run, SLICE_S)
            self.work.stepped.set()
            self.work.events.write("steps", **self.work.status(memory=False))

    async def _gossip_after_rounds(self) -> None:
        work, every = self.work, self.work.session.spec.gossip.every_rounds
        for count in itertools.count(1):
            await self._rounds.committed.wait()
            self._rounds.committed.clear()
            if count % every == 0:
                await self._gossip_once()
                work.gossips = self._gossip.exchanges

    async def _gossip_once(self) -> None:
        work = self.work
        for _ in range(GOSSIP_TRIES):
            await asyncio.sleep(work.rng.uniform(0.0, GOSSIP_PAUSE_S))  # or all would ask each other at once
            partner = await self._gossip.exchange(work.others())
            if partner is not None:
                work.events.write("gossip", partner=partner)
                return

    async def _give_state(self, what: str) -> State:
        trainer = self.work.trainer

        def encode() -> State:
            return State(trainer.encode(what), trainer.round, trainer.anchor)

        return await self.work.thread.call(encode)

    async def _take_table(self) -> np.ndarray:
        return await self.work.thread.call(self.work.trainer.table)

    async def _shift_table(self, difference_VD: np.ndarray) -> None:
        await self.work.thread.call(self.work.trainer.shift_table, difference_VD)
