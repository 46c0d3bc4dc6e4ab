"""A node's rounds: when one is due, with whom, and what to do with what comes of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from blocktrain.dht.averager import BlockAverager, Commit, Snapshot
from blocktrain.dht.directory import Holder
from blocktrain.dht.swarm import dht_time
from blocktrain.node.acquire import download_block
from blocktrain.node.work import Work
from blocktrain.protocol.errors import NetworkError, RoundAborted, TransferError
from blocktrain.protocol.messages import Join

log = logging.getLogger(__name__)
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
SAVE_S = 300.0
"""Without a commit, a checkpoint is written this often."""
CATCH_UP_S = 60.0
SLOWEST_BYTES_PER_S = 100_000
"""Catching up may take a minute, and as long as the block takes at this rate; meanwhile there is no round."""
DISBELIEF_S = 120.0
"""A holder that claims a lead and can't show it is not believed for this long."""


class Rounds:
    """Runs one round after another. `committed` is set whenever the anchor has moved."""

    def __init__(self, work: Work, last: int) -> None:
        """`last` is the round after which the node has done enough; 0: never."""
        self._work, self._last = work, last
        session = work.session
        self.averager = BlockAverager(session.streams, session.directory, work.block, session.spec.rounds)
        self.committed = asyncio.Event()
        self._deadline, self._saved = 0.0, dht_time()
        self._failures = 0
        self._disbelieved: dict[str, float] = {}

    async def run(self) -> None:
        """Until the last round is behind us."""
        self._set_deadline()
        while not self._last or self._work.trainer.round < self._last:
            await self._until_due()
            await self._work.pauses.awake.wait()
            try:
                await self._once()
            except (RoundAborted, NetworkError) as error:
                await self._after_failure(error)
            if dht_time() > self._saved + SAVE_S:  # what is learned between rounds that fail is kept, too
                await self._save()

    async def _until_due(self) -> None:
        """Wait for the steps of a round, or for its deadline once there is something to average."""
        work, spec = self._work, self._work.session.spec
        wanted = spec.rounds.steps * spec.optimizer.batch
        while True:
            samples = work.trainer.progress.samples
            if samples >= wanted or (samples and dht_time() >= self._deadline):
                return
            work.stepped.clear()
            await work.stepped.wait()

    async def _once(self) -> None:
        """One attempt. Raises: RoundAborted, NetworkError; then nothing has changed."""
        work = self._work
        peers = await work.look()
        training = [h for h in peers if not h.record.resting]
        if ahead := self._out_of_reach(peers):
            await self._catch_up(ahead)
            return
        if not training:
            await self._alone()
            return
        self.averager.rendezvous.note_holders(peers)
        if not self.averager.rendezvous.others:  # all failed lately; going on alone would part us from them
            await self.averager.rendezvous.pause()
            return
        commit, snapshot, samples = await self._average()
        await work.thread.call(work.trainer.commit, commit.mean_N, commit.round, snapshot, samples)
        others = len(commit.members) - 1
        log.info(
            "round %d: committed with %d other%s in %.2f s (%s)",
            *(commit.round, others, "" if others == 1 else "s", commit.seconds, work.progress()),
        )
        await self._after_success("committed", len(commit.members), round(commit.seconds, 3))

    async def _catch_up(self, ahead: Sequence[Holder]) -> None:
        """Take the block over from holders that are too far ahead. Raises: TransferError."""
        work = self._work
        limit_s = CATCH_UP_S + 4 * work.trainer.vector.size / SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout(limit_s):
                origin = await download_block(work.session, work.trainer, work.thread, ahead)
        except (TransferError, TimeoutError) as error:
            # Claims that nobody makes good must not keep us from averaging with the others.
            until = dht_time() + DISBELIEF_S
            self._disbelieved |= {holder.peer_id: until for holder in ahead}
            raise TransferError(
                str(error) or f"the block was not taken over within {limit_s:.0f} s"
            ) from None
        log.info("fell behind; took the block over from %s", origin)
        await self._after_success("resynced", 1)

    async def _average(self) -> tuple[Commit, Snapshot, int]:
        """A group's result, our snapshot in it, and the samples that the snapshot had behind it."""
        work, trainer = self._work, self._work.trainer
        taken: list[tuple[Snapshot, int]] = []

        async def take_snapshot() -> Snapshot:
            taken.append(await work.thread.call(self._snapshot))
            return taken[-1][0]

        join = Join(trainer.round, trainer.anchor, trainer.progress.samples)
        commit = await self.averager.average(join, self._deadline, take_snapshot)
        return commit, *taken[-1]

    def _snapshot(self) -> tuple[Snapshot, int]:
        """The parameters and the samples behind them, of the same moment; in the training thread."""
        return self._work.trainer.snapshot(), self._work.trainer.progress.samples

    async def _alone(self) -> None:
        """Nobody else holds the block: what we have learned is its state."""
        work, trainer = self._work, self._work.trainer
        snapshot, samples = await work.thread.call(self._snapshot)
        await work.thread.call(trainer.commit, snapshot.values_N, trainer.round + 1, snapshot, samples)
        log.info("round %d: alone with block %d (%s)", trainer.round, work.block, work.progress())
        await self._after_success("solo", 1)

    def _out_of_reach(self, peers: Sequence[Holder]) -> list[Holder]:
        """Holders that averaging can't catch up with: two rounds ahead, or finished."""
        own, now = self._work.trainer.round, dht_time()
        believed = [h for h in peers if self._disbelieved.get(h.peer_id, 0.0) < now]
        ahead = [h for h in believed if h.record.round > own + 1 or (0 < self._last <= h.record.round)]
        return sorted(ahead, key=lambda h: -h.record.round)

    async def _after_success(self, result: str, members: int, seconds: float = 0.0) -> None:
        work = self._work
        work.rounds[result] += 1
        self._failures = 0
        self._set_deadline()
        work.news.set()
        self.committed.set()
        work.events.write("round", result=result, members=members, seconds=seconds, **work.status())
        await self._save()

    async def _save(self) -> None:
        self._saved = dht_time()
        await self._work.save()

    async def _after_failure(self, error: Exception) -> None:
        """Pause before the next attempt, the longer the more have failed in a row."""
        work = self._work
        work.rounds["aborted"] += 1
        self._failures += 1
        log.warning("round %d not committed: %s", work.trainer.round + 1, error)
        work.events.write("round", result="aborted", reason=str(error), **work.status())
        if dht_time() >= self._deadline:
            self._set_deadline()
        pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures - 1, 10))
        await self.averager.rendezvous.pause(pause * work.rng.uniform(0.5, 1.0))

    def _set_deadline(self) -> None:
        self._deadline = dht_time() + self._work.session.spec.rounds.deadline_s
