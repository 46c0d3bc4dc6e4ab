"""What a local swarm achieved is counted from its nodes' events as the contract says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blocktrain.bootstrap.local import LocalNode
from blocktrain.bootstrap.result import Evaluation, compose_result, count_rounds, training_seconds
from blocktrain.protocol.spec import RunSpec

SPEC = RunSpec.from_mapping({"name": "small", "model": {"blocks": 2}})
CE = {"ensemble": 1.0, "euler-zero": 1.1, "euler-noise": 1.2, "blocks": [1.3, 1.4]}
DONE = Evaluation(CE, {"uniform": 5.545}, "text", [0.0, 0.5])


class Process:
    """A process of which nothing is asked here."""

    returncode: int | None = None


def node(index: int, block: int, *rounds: tuple[str, int], **status: Any) -> LocalNode:
    """A node whose rounds ended in these ways; the number is that of its anchor after the event."""
    base = {"time": 20.0, "tokens": 100, "bytes_sent": {"round": 30, "gossip": 5}, "denoising_ce": 2.0}
    made = LocalNode(index, block, Process(), Path("log"), base | {"peak_rss_mb": 300.0} | status)  # type: ignore[arg-type]
    made.events = [{"event": "started", "time": 10.0 + index}]
    made.events += [{"event": "round", "result": result, "round": number} for result, number in rounds]
    return made


def test_a_round_counts_once_however_many_committed_it() -> None:
    nodes = [
        node(0, 0, ("committed", 1), ("committed", 2)),
        node(1, 0, ("committed", 1)),
        node(2, 1, ("committed", 1)),
    ]
    assert count_rounds(nodes) == {"committed": 3, "aborted": 0, "solo": 0}


def test_a_failed_attempt_counts_once_for_all_its_members_and_beside_the_commit_that_follows() -> None:
    nodes = [
        node(0, 0, ("aborted", 0), ("aborted", 0), ("committed", 1)),
        node(1, 0, ("aborted", 0), ("committed", 1)),
    ]
    assert count_rounds(nodes) == {"committed": 1, "aborted": 2, "solo": 0}


def test_rounds_of_different_blocks_are_different_and_lone_rounds_are_not_commits() -> None:
    nodes = [node(0, 0, ("aborted", 4), ("solo", 5)), node(1, 1, ("aborted", 4), ("resynced", 6))]
    assert count_rounds(nodes) == {"committed": 0, "aborted": 2, "solo": 1}


def test_training_lasts_from_the_last_start_to_the_last_finish() -> None:
    assert training_seconds([node(0, 0, time=30.5), node(1, 0), node(2, 1)]) == 30.5 - 12.0
    assert training_seconds([node(0, 0, time=10.0)]) > 0


def test_the_document_has_everything_that_the_contract_names() -> None:
    nodes = [node(0, 0, ("committed", 1)), node(1, 1, denoising_ce=None, tokens=300)]
    document = compose_result(SPEC, nodes, 8.0, DONE)
    assert json.loads(json.dumps(document, allow_nan=False)) == {
        "run": "small",
        "fingerprint": SPEC.fingerprint,
        "nodes": 2,
        "blocks": 2,
        "seconds": 8.0,
        "tokens": 400,
        "tokens_per_s": 50.0,
        "rounds": {"committed": 1, "aborted": 0, "solo": 0},
        "bytes_sent": 70,
        "bytes_per_token": 0.175,
        "ce": CE,
        "denoising_ce": [2.0, None],
        "baselines": {"uniform": 5.545},
        "divergence": [0.0, 0.5],
        "peak_rss_mb": [300.0, 300.0],
        "sample": "text",
    }


def test_a_swarm_that_trained_nothing_is_no_division_by_zero() -> None:
    document = compose_result(SPEC, [node(0, 0, tokens=0, bytes_sent={}), node(1, 1, tokens=0)], 1.0, DONE)
    assert (document["tokens"], document["bytes_per_token"]) == (0, 35.0)


@pytest.mark.parametrize("block", [0, 1])
def test_the_local_loss_of_a_block_is_the_mean_over_its_holders(block: int) -> None:
    nodes = [node(i, i % 2, denoising_ce=float(i)) for i in range(4)]
    assert compose_result(SPEC, nodes, 1.0, DONE)["denoising_ce"][block] == 1.0 + block
