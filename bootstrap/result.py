"""What a local swarm achieved, as one document: the contract of `blocktrain-swarm --json`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blocktrain.bootstrap.local import LocalNode
from blocktrain.protocol.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `blocktrain-eval --json` said about the trained swarm, and how far holders differ."""

    ce: Mapping[str, Any]
    baselines: Mapping[str, float]
    sample: str
    divergence: Sequence[float]
    """For each block, the greatest absolute difference between any two holders' last anchors."""


def count_rounds(nodes: Sequence[LocalNode]) -> dict[str, int]:
    """Rounds of all blocks: each (block, round) counts once however many holders committed it.

    An attempt that failed counts as aborted once, too, even if a later attempt committed that round.
    """
    committed = {(n.block, e["round"]) for n in nodes for e in n.rounds("committed")}
    solo = {(n.block, e["round"]) for n in nodes for e in n.rounds("solo")}
    attempts: dict[tuple[int, int], list[int]] = defaultdict(list)
    for node in nodes:
        for (block, target), count in Counter(
            (node.block, e["round"] + 1) for e in node.rounds("aborted")
        ).items():
            attempts[block, target].append(count)
    aborted = sum(max(counts) for counts in attempts.values())
    return {"committed": len(committed), "aborted": aborted, "solo": len(solo)}


def training_seconds(nodes: Sequence[LocalNode]) -> float:
    """From the first event of the last node to start, to the last to finish."""
    begin = max(e["time"] for n in nodes for e in n.events if e["event"] == "started")
    end = max(n.status["time"] for n in nodes)
    return float(max(end - begin, 1e-3))


def compose_result(
    spec: RunSpec, nodes: Sequence[LocalNode], seconds: float, done: Evaluation
) -> dict[str, Any]:
    """The whole document."""
    tokens = sum(n.status["tokens"] - n.tokens_before for n in nodes)
    sent = sum(sum(n.status["bytes_sent"].values()) for n in nodes)
    denoising = [
        known_mean(n.status["denoising_ce"] for n in nodes if n.block == b) for b in range(spec.model.blocks)
    ]
    return {
        "run": spec.name,
        "fingerprint": spec.fingerprint,
        "nodes": len(nodes),
        "blocks": spec.model.blocks,
        "seconds": round(seconds, 2),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "rounds": count_rounds(nodes),
        "bytes_sent": sent,
        "bytes_per_token": round(sent / max(tokens, 1), 3),
        "ce": dict(done.ce),
        "denoising_ce": denoising,
        "baselines": dict(done.baselines),
        "divergence": list(done.divergence),
        "peak_rss_mb": [n.status["peak_rss_mb"] for n in nodes],
        "sample": done.sample,
    }


def known_mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known, to four digits; None if there are none."""
    known = [v for v in values if v is not None]
    return round(sum(known) / len(known), 4) if known else None
