"""What the parts of a node share: session, trainer, folder, events, and what is known of the others."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from blocktrain.dht.directory import Holder
from blocktrain.dht.session import Session
from blocktrain.node import checkpoint
from blocktrain.node.events import EventLog
from blocktrain.node.pauses import Pauses
from blocktrain.node.trainer import Trainer, TrainingThread
from blocktrain.node.usage import memory_mb
from blocktrain.protocol.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass
class Work:
    """One node at work. `rounds` and `gossips` count what came of them."""

    session: Session
    trainer: Trainer
    thread: TrainingThread
    folder: Path
    """Where checkpoints go."""
    events: EventLog
    pauses: Pauses = field(default_factory=Pauses)
    rng: random.Random = field(init=False)
    rounds: Counter[str] = field(default_factory=Counter)
    gossips: int = 0
    resting: bool = False
    """Trained enough; from now on only serving."""
    _saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    known: dict[int, tuple[Holder, ...]] = field(default_factory=dict)
    """Block → holders, when the directory was read last."""
    stepped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after each slice of training."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the record in the directory is out of date."""

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.session.spec.seed} {self.me}")

    @property
    def me(self) -> str:
        """This node's peer id."""
        return self.session.swarm.peer_id

    @property
    def block(self) -> int:
        """The block that this node holds."""
        return self.trainer.learner.index

    @property
    def tokens_per_s(self) -> float:
        """How fast it trains now, smoothed; 0 while it is paused."""
        return 0.0 if self.pauses.reasons else round(self.trainer.progress.tokens_per_s, 1)

    async def look(self) -> tuple[Holder, ...]:
        """Read the directory; the other holders of our block. Raises: NetworkError."""
        self.known = await self.session.directory.holders()
        return tuple(h for h in self.known[self.block] if h.peer_id != self.me)

    def others(self) -> list[Holder]:
        """All other nodes of the run, as last read."""
        return [h for h in itertools.chain(*self.known.values()) if h.peer_id != self.me]

    async def save(self) -> bool:
        """Write a checkpoint; a full disk is a warning, not the end. Whether it was written.

        One that has begun is written to its end even if the caller is cancelled: the next must not
        write into the same file meanwhile.
        """
        return await asyncio.shield(asyncio.ensure_future(self._save()))

    async def _save(self) -> bool:
        async with self._saving:
            captured = await self.thread.call(checkpoint.capture, self.trainer)
            try:
                await asyncio.to_thread(checkpoint.save, self.folder, captured)
            except CheckpointError as error:
                log.warning("checkpoint not saved, training goes on: %s", error)
                return False
            return True

    def progress(self) -> str:
        """Step, loss and speed for a log line."""
        progress = self.trainer.progress
        ce = "-" if progress.denoising_ce is None else f"{progress.denoising_ce:.3f}"
        return f"step {progress.step}, denoising CE {ce}, {progress.tokens_per_s:,.0f} tokens/s"

    def status(self, *, memory: bool = True) -> dict[str, object]:
        """Everything that can be counted, for an event; memory takes some milliseconds to find out."""
        progress = self.trainer.progress
        sent: Counter[str] = Counter()
        for (way, purpose), count in self.session.streams.meter.items():
            if way == "sent":
                sent[purpose.partition("-")[0]] += count
        used = dict(zip(("rss_mb", "peak_rss_mb"), memory_mb(), strict=True)) if memory else {}
        return {
            "block": self.block,
            "round": self.trainer.round,
            "anchor": self.trainer.anchor,
            "step": progress.step,
            "tokens": progress.tokens,
            "tokens_per_s": self.tokens_per_s,
            "denoising_ce": progress.denoising_ce,
            "skipped_steps": progress.skipped,
            "paused": self.pauses.reasons,
            "rounds": dict(self.rounds),
            "gossips": self.gossips,
            "bytes_sent": dict(sent),
            **used,
        }
