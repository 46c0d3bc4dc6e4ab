"""A block that loses its last holder gets another one, without anybody's doing."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocktrain.bootstrap.local import LocalSwarmConfig
from blocktrain.protocol.spec import RunSpec
from tests.swarm.test_processes import in_loop, local_swarm, text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]
__all__ = ["text"]
DEADLINE_S = 6.0


def test_the_last_holder_of_a_block_is_replaced_by_a_node_of_another(tmp_path: Path, text: str) -> None:
    """Four nodes choose for themselves; then one block is left without a holder, by kill -9."""

    async def body() -> None:
        model = {"d_model": 32, "heads": 2, "blocks": 2, "layers": 1, "context": 32}
        rounds = {"steps": 10, "deadline_s": DEADLINE_S, "timeout_s": 15.0}
        spec = RunSpec.from_mapping({"name": "moving", "model": model, "rounds": rounds})
        config = LocalSwarmConfig(spec, tmp_path, text, nodes=0, record_ttl_s=6.0)
        async with local_swarm(config) as swarm:
            for _ in range(3):
                await swarm.add_node("auto")
            await swarm.until(lambda s: all(n.seen("round") for n in s.nodes), 60)
            blocks = [n.block for n in swarm.nodes]
            assert sorted(blocks) in ([0, 0, 1], [0, 1, 1])
            (alone,) = (n for n in swarm.nodes if blocks.count(n.block) == 1)
            orphan = alone.block
            await swarm.kill(alone)
            others = [n for n in swarm.nodes if n is not alone]
            await swarm.until(lambda s: any(n.block == orphan and n.seen("stopped") for n in others), 60)
            (mover,) = (n for n in others if n.block == orphan)
            await swarm.until(lambda s: mover.events[-1]["event"] == "round", 60)
            assert [e["block"] for e in mover.events if e["event"] == "started"][-2:] == [1 - orphan, orphan]
            assert mover.process.returncode is None
            assert mover.events[-1]["result"] in ("solo", "committed")

    in_loop(body)
