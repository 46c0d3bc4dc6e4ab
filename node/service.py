"""A node at work: training, rounds, gossip and its record in the directory, until it is told to stop.

Training never waits for the network: a round works on a snapshot, and its result is added to what was
learned meanwhile. Every loop survives whatever peers and the DHT do.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import resource
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from blocktrain.dht.averager import BlockAverager, Commit, Snapshot
from blocktrain.dht.directory import SPEC_TTL_S, Holder
from blocktrain.dht.gossip import TableGossip
from blocktrain.dht.session import Session
from blocktrain.dht.state import State, StateServer
from blocktrain.dht.swarm import dht_time
from blocktrain.node import checkpoint
from blocktrain.node.acquire import download_block
from blocktrain.node.events import EventLog
from blocktrain.node.trainer import Trainer, TrainingThread
from blocktrain.protocol.command import program_version
from blocktrain.protocol.errors import CheckpointError, NetworkError, RoundAborted
from blocktrain.protocol.messages import Join
from blocktrain.protocol.records import MAX_ADDRESSES, PeerRecord

log = logging.getLogger(__name__)
SLICE_S = 0.2
"""Training runs in slices this long; a snapshot waits for the current one to end."""
GOSSIP_TRIES = 4
GOSSIP_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
LEAVE_S = 3.0


@dataclass(frozen=True, slots=True)
class Limits:
    """When a node begins, and when it has done enough."""

    rounds: int = 0
    """Stop training after this round; 0: never."""
    nodes: int = 1
    """Begin once this many nodes are in the run."""


@dataclass
class Tally:
    """What happened so far, for the log and for others to see."""

    rounds: Counter[str] = field(default_factory=Counter)
    """How many rounds were committed, aborted, or made alone (`solo`)."""
    consecutive_aborts: int = 0


class Node:
    """One node of one run, holding one block."""

    def __init__(
        self, session: Session, trainer: Trainer, thread: TrainingThread, folder: Path, events: EventLog
    ) -> None:
        self.session, self.trainer, self.thread, self.folder, self.events = (
            session,
            trainer,
            thread,
            folder,
            events,
        )
        self.block = trainer.learner.index
        self.tally = Tally()
        rounds, gossip = session.spec.rounds, session.spec.gossip
        self._averager = BlockAverager(session.streams, session.directory, self.block, rounds)
        self._rng = random.Random(f"{session.spec.seed} {session.swarm.peer_id}")
        self._gossip = TableGossip(
            session.streams, gossip.wire, self._take_table, self._shift_table, self._rng
        )
        self._server = StateServer(session.streams, self.block, self._give_state)
        self._known: dict[int, tuple[Holder, ...]] = {}
        self._deadline = 0.0
        self._stepped, self._news, self._committed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self, stop: asyncio.Event, limits: Limits) -> None:
        """Serve, train and average until `stop` is set, then leave: state saved, record withdrawn.

        Raises:
            DataError: the training text can't be read any more. State is saved then, too.
        """
        await self._averager.start()
        await self._gossip.start()
        await self._server.start()
        try:
            async with asyncio.TaskGroup() as group:
                loops = [group.create_task(loop) for loop in (self._advertise(), self._republish())]
                worker = group.create_task(self._work(limits))
                await stop.wait()
                for task in (*loops, worker):
                    task.cancel()
        finally:
            await self._leave()

    async def _work(self, limits: Limits) -> None:
        await self._await_nodes(limits.nodes)
        self._deadline = dht_time() + self.session.spec.rounds.deadline_s
        async with asyncio.TaskGroup() as group:
            training = group.create_task(self._train())
            gossiping = group.create_task(self._gossip_after_rounds())
            while not limits.rounds or self.trainer.round < limits.rounds:
                await self._until_due()
                await self._round(limits)
            training.cancel()
            gossiping.cancel()
        self.events.write("finished", **self._status())
        log.info("finished: %d rounds; serving the result until stopped", self.trainer.round)

    # Training

    async def _train(self) -> None:
        while True:
            await self.thread.call(self.trainer.run, SLICE_S)
            self._stepped.set()

    async def _until_due(self) -> None:
        """Wait for the steps of a round, or for its deadline once there is something to average."""
        spec = self.session.spec
        wanted = spec.rounds.steps * spec.optimizer.batch
        while True:
            samples = self.trainer.progress.samples
            if samples >= wanted or (samples and dht_time() >= self._deadline):
                return
            self._stepped.clear()
            await self._stepped.wait()
            self.events.write("steps", **self._status())

    # Rounds

    async def _round(self, limits: Limits) -> None:
        """One round, whatever comes of it; after a failure pause a little, the longer the more there were."""
        try:
            peers = await self._look()
            if behind := self._ahead_of_us(peers, limits):
                origin = await download_block(self.session, self.trainer, self.thread, behind)
                log.info("fell behind; took the block over from %s", origin)
                return await self._after_commit("resynced", 1)
            rendezvous = self._averager.rendezvous
            rendezvous.note_holders(peers)
            if not rendezvous.others:
                return await self._solo()
            await self._average()
        except (RoundAborted, NetworkError) as error:
            self.tally.rounds["aborted"] += 1
            self.tally.consecutive_aborts += 1
            log.warning("round %d not committed: %s", self.trainer.round + 1, error)
            self.events.write("round", result="aborted", reason=str(error), **self._status())
            if dht_time() >= self._deadline:
                self._deadline = dht_time() + self.session.spec.rounds.deadline_s
            pause = min(MAX_PAUSE_S, 0.5 * 2 ** min(self.tally.consecutive_aborts - 1, 10))
            await asyncio.sleep(pause * self._rng.uniform(0.5, 1.0))

    async def _average(self) -> None:
        trainer = self.trainer
        taken: list[tuple[Snapshot, int]] = []

        async def take_snapshot() -> Snapshot:
            samples = trainer.progress.samples
            taken.append((await self.thread.call(trainer.snapshot), samples))
            return taken[-1][0]

        join = Join(trainer.round, trainer.anchor, trainer.progress.samples)
        commit = await self._averager.average(join, self._deadline, take_snapshot)
        snapshot, samples = taken[-1]
        await self.thread.call(trainer.commit, commit.mean_N, commit.round, snapshot, samples)
        log.info("%s", self._describe(commit))
        await self._after_commit("committed", len(commit.members), seconds=round(commit.seconds, 3))

    async def _solo(self) -> None:
        """Nobody else holds the block: what we have learned is its state."""
        samples = self.trainer.progress.samples
        snapshot = await self.thread.call(self.trainer.snapshot)
        await self.thread.call(
            self.trainer.commit, snapshot.values_N, self.trainer.round + 1, snapshot, samples
        )
        log.info("round %d: alone with block %d (%s)", self.trainer.round, self.block, self._progress())
        await self._after_commit("solo", 1)

    async def _after_commit(self, result: str, members: int, **fields: object) -> None:
        self.tally.rounds[result] += 1
        self.tally.consecutive_aborts = 0
        self._deadline = dht_time() + self.session.spec.rounds.deadline_s
        self._news.set()
        self._committed.set()
        self.events.write("round", result=result, members=members, **fields, **self._status())
        await self._save()

    def _ahead_of_us(self, peers: tuple[Holder, ...], limits: Limits) -> list[Holder]:
        """Holders that we can't catch up with by averaging: two rounds ahead, or already finished."""
        own = self.trainer.round
        ahead = [h for h in peers if h.record.round > own + 1 or (0 < limits.rounds <= h.record.round)]
        return sorted(ahead, key=lambda h: -h.record.round)

    # State, table, record

    async def _save(self) -> None:
        captured = await self.thread.call(checkpoint.capture, self.trainer)
        try:
            await asyncio.to_thread(checkpoint.save, self.folder, captured)
        except CheckpointError as error:
            log.warning("checkpoint not saved, training goes on: %s", error)

    async def _give_state(self, what: str) -> State:
        def encode() -> State:
            return State(self.trainer.encode(what), self.trainer.round, self.trainer.anchor)

        return await self.thread.call(encode)

    async def _take_table(self) -> np.ndarray:
        return await self.thread.call(self.trainer.table)

    async def _shift_table(self, difference_VD: np.ndarray) -> None:
        await self.thread.call(self.trainer.shift_table, difference_VD)

    async def _gossip_after_rounds(self) -> None:
        every = self.session.spec.gossip.every_rounds
        for count in itertools.count(1):
            await self._committed.wait()
            self._committed.clear()
            if count % every:
                continue
            for _ in range(GOSSIP_TRIES):
                await asyncio.sleep(
                    self._rng.uniform(0.0, GOSSIP_PAUSE_S)
                )  # or all would ask each other at once
                me = self.session.swarm.peer_id
                others = [h for h in itertools.chain(*self._known.values()) if h.peer_id != me]
                partner = await self._gossip.exchange(others)
                if partner is not None:
                    self.events.write("gossip", partner=partner)
                    break

    async def _advertise(self) -> None:
        while True:
            try:
                await self.session.directory.publish(await self._record(leaving=False))
                await self._look()
            except NetworkError as error:
                log.warning("could not renew this node's record: %s", error)
            self._news.clear()
            try:
                async with asyncio.timeout(self.session.directory.ttl_s / 3):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _republish(self) -> None:
        """Keep the run's specification in the DHT: it must not depend on whoever published it first."""
        while True:
            await asyncio.sleep(SPEC_TTL_S / 3 * self._rng.uniform(0.7, 1.0))
            try:
                await self.session.directory.publish_run()
            except NetworkError as error:
                log.warning("could not renew the run's specification: %s", error)

    async def _look(self) -> tuple[Holder, ...]:
        """Read the directory; the other holders of our block. Raises: NetworkError."""
        self._known = await self.session.directory.holders()
        me = self.session.swarm.peer_id
        return tuple(h for h in self._known[self.block] if h.peer_id != me)

    async def _await_nodes(self, count: int) -> None:
        """Begin together: wait until so many nodes, we included, are in the directory."""
        seen = -1
        while (here := sum(map(len, self._known.values()))) < count:
            if here != seen:
                log.info("waiting for %d nodes; %d are here", count, here)
                seen = here
            await asyncio.sleep(0.2)
            await self._look()

    async def _record(self, *, leaving: bool) -> PeerRecord:
        progress, trainer = self.trainer.progress, self.trainer
        return PeerRecord(
            block=self.block,
            round=trainer.round,
            step=progress.step,
            tokens_per_s=round(progress.tokens_per_s, 1),
            denoising_ce=progress.denoising_ce and round(progress.denoising_ce, 4),
            anchor=trainer.anchor,
            addresses=(await self.session.swarm.addresses())[:MAX_ADDRESSES],
            version=program_version(),
            time=dht_time(),
            leaving=leaving,
        )

    async def _leave(self) -> None:
        """Save, then tell the others; each at most a few seconds, so that stopping never hangs."""
        await self._save()
        try:
            async with asyncio.timeout(LEAVE_S):
                await self.session.directory.publish(await self._record(leaving=True))
        except TimeoutError:
            log.warning("could not withdraw this node's record: no answer within %.0f s", LEAVE_S)
        except NetworkError as error:
            log.warning("could not withdraw this node's record: %s", error)
        self.events.write("stopped", **self._status())
        log.info(
            "stopped after round %d, step %d; state saved in %s",
            self.trainer.round,
            self.trainer.progress.step,
            self.folder,
        )

    # For people and programs

    def _progress(self) -> str:
        progress = self.trainer.progress
        ce = f"{progress.denoising_ce:.3f}" if progress.denoising_ce is not None else "-"
        return f"step {progress.step}, denoising CE {ce}, {progress.tokens_per_s:,.0f} tokens/s"

    def _describe(self, commit: Commit) -> str:
        return (
            f"round {commit.round}: committed with {len(commit.members) - 1} other(s) "
            f"in {commit.seconds:.2f} s ({self._progress()})"
        )

    def _status(self) -> dict[str, object]:
        progress, meter = self.trainer.progress, self.session.streams.meter
        sent: Counter[str] = Counter()
        for (way, purpose), count in meter.items():
            if way == "sent":
                sent[purpose.partition("-")[0]] += count
        return {
            "block": self.block,
            "round": self.trainer.round,
            "anchor": self.trainer.anchor,
            "step": progress.step,
            "tokens": progress.tokens,
            "tokens_per_s": round(progress.tokens_per_s, 1),
            "denoising_ce": progress.denoising_ce,
            "skipped_steps": progress.skipped,
            "rounds": dict(self.tally.rounds),
            "gossips": self._gossip.exchanges,
            "bytes_sent": dict(sent),
            "rss_mb": round(psutil.Process(os.getpid()).memory_info().rss / 1e6, 1),
            "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, 1),
        }
