"""A node as a guest on somebody's machine: paused, resumed, asked how it is, and held to its limits."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from blocktrain.bootstrap.local import LocalNode, LocalSwarmConfig
from blocktrain.dht.bandwidth import BURST_S, MBIT
from blocktrain.node.control import SOCKET
from blocktrain.protocol.spec import RunSpec
from tests.swarm.test_processes import command, in_loop, local_swarm, text

__all__ = ["text"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
ONE_BLOCK = RunSpec.from_mapping(
    {
        "name": "guest",
        "model": {"d_model": 32, "heads": 2, "blocks": 1, "layers": 1, "context": 32},
        "optimizer": {"batch": 8, "warmup_steps": 5},
        "rounds": {"steps": 30, "deadline_s": 6.0, "timeout_s": 15.0, "wire": "fp32"},
    }
)
MAX_MBIT = 0.4


def tell(home: Path, action: str) -> dict[str, object]:
    done = command("node.cli", action, "--home", str(home), "--json")
    assert done.returncode == 0, done.stderr
    status: dict[str, object] = json.loads(done.stdout)
    return status


def commits(node: LocalNode, members: int) -> int:
    return sum(e["members"] == members for e in node.rounds("committed"))


def test_a_paused_node_stands_still_and_serves_while_the_other_goes_on(tmp_path: Path, text: str) -> None:
    async def body() -> None:
        config = LocalSwarmConfig(ONE_BLOCK, tmp_path, text, nodes=2)
        async with local_swarm(config) as swarm:
            one, two = swarm.nodes
            home = tmp_path / "node-0"
            await swarm.until(lambda s: commits(one, 2) >= 2 and commits(two, 2) >= 2, 60)
            status = tell(home, "status")
            assert (status["phase"], status["holders"], status["run"]) == ("training", 2, "guest")
            tell(home, "pause")
            await swarm.until(lambda s: one.seen("paused"), 20)
            alone = len(two.rounds("solo"))
            await swarm.until(lambda s: len(two.rounds("solo")) >= alone + 2, 40)
            still = tell(home, "status")
            assert (still["phase"], still["paused"]) == ("paused", ["asked to"])
            assert still["step"] == next(e["step"] for e in one.events if e["event"] == "paused")
            newcomer = await swarm.add_node(0)
            await swarm.until(lambda s: newcomer.seen("started"), 60)
            assert newcomer.events[0]["origin"].startswith("peer ")
            together = commits(one, 3)
            tell(home, "resume")
            await swarm.until(lambda s: commits(one, 3) > together, 60)
            assert one.seen("resumed")
        assert not (home / SOCKET).exists()

    in_loop(body)


def test_limits_of_the_command_line_hold(tmp_path: Path, text: str) -> None:
    """Upload below the limit over the whole life; quiet hours pause; too much memory ends it, saved."""

    async def body() -> None:
        config = LocalSwarmConfig(ONE_BLOCK, tmp_path, text, nodes=1)
        async with local_swarm(config) as swarm:
            begin = time.monotonic()
            slow = await swarm.add_node(0, ("--max-upload", str(MAX_MBIT)))
            quiet = await swarm.add_node(0, ("--quiet-hours", "00:00-23:59"))
            hungry = await swarm.add_node(0, ("--max-memory", "10"))
            hungry.expected_to_end = True
            assert await hungry.process.wait() == 1
            assert "--max-memory allows 10" in hungry.log_file.read_text()
            await swarm.until(lambda s: commits(slow, 2) >= 2 and quiet.seen("paused"), 60)
            sent = sum(slow.status["bytes_sent"].values())
            assert sent > 2 * 4 * (slow.events[0]["parameters"] - 256 * 32)
            assert sent <= MAX_MBIT * MBIT * (time.monotonic() - begin + BURST_S)
            status = tell(tmp_path / "node-2", "status")
            if status["paused"]:  # but for one minute before midnight
                assert status["paused"] == ["quiet hours"]
                assert status["step"] == 0

    in_loop(body)
