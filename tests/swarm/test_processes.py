"""Whole swarms of real processes: what a volunteer's node does among others, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import uvloop

from blocktrain.bootstrap.local import LocalNode, LocalSwarm, LocalSwarmConfig, run_local_swarm
from blocktrain.dht.clock import JUMP_S
from blocktrain.dht.session import Session, visit_run
from blocktrain.dht.state import Download
from blocktrain.model.initial import initial_table
from blocktrain.protocol.spec import RunSpec
from blocktrain.protocol.tensors import decode_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
WORDS = b"the quick brown fox jumps over the lazy dog and runs through the old forest at night. "


def small_run(name: str = "small", **rounds: object) -> RunSpec:
    """A run whose step takes a few milliseconds."""
    return RunSpec.from_mapping(
        {
            "name": name,
            "model": {"d_model": 32, "heads": 2, "blocks": 3, "layers": 1, "context": 32},
            "optimizer": {"batch": 8, "warmup_steps": 5},
            "rounds": {"steps": 10, "deadline_s": 20.0, "timeout_s": 15.0, "wire": "fp32", **rounds},
        }
    )


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A text of 80 KB with some structure to learn."""
    rng = np.random.default_rng(0)
    words = WORDS.split()
    chosen = b" ".join(words[i] for i in rng.integers(0, len(words), 16_000))
    path = tmp_path / "text.txt"
    path.write_bytes(chosen)
    return str(path)


def in_loop(body: Callable[[], Awaitable[None]], timeout_s: float = 150.0) -> None:
    """Run an async test body."""

    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await body()

    uvloop.run(bounded())


@contextlib.asynccontextmanager
async def local_swarm(config: LocalSwarmConfig) -> AsyncIterator[LocalSwarm]:
    """A swarm whose processes are all gone afterwards, their daemons too."""
    family: list[psutil.Process] = []
    async with asyncio.TaskGroup() as group:
        async with run_local_swarm(config, group) as swarm:
            family += psutil.Process().children(recursive=True)
            yield swarm
            family += psutil.Process().children(recursive=True)
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive


@contextlib.asynccontextmanager
async def visitor(swarm: LocalSwarm) -> AsyncIterator[Session]:
    """A session of this test in the swarm's run."""
    async with (
        asyncio.TaskGroup() as group,
        visit_run([swarm.address], swarm.config.spec.fingerprint, 20.0, group) as session,
    ):
        yield session


def daemons_of(node: LocalNode) -> list[psutil.Process]:
    """The children of a node process."""
    return list(psutil.Process(node.process.pid).children(recursive=True))


def command(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of our commands in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", f"blocktrain.{module}", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


async def fetch(session: Session, block: int, what: str) -> dict[str, dict[str, np.ndarray]]:
    """Every holder's anchor or table."""
    holders = (await session.directory.holders())[block]
    found = {}
    for holder in holders:
        state, _ = await Download(session.streams, block, what, 2**26).run([holder])
        tensors, _ = decode_state(state.data, max_bytes=2**26)
        found[holder.peer_id] = {name: tensor.numpy() for name, tensor in tensors.items()}
    return found


def spread(tables: Sequence[np.ndarray]) -> float:
    """Mean over entries of the standard deviation over nodes."""
    return float(np.std(np.stack(tables), axis=0).mean())


def test_holders_agree_bit_for_bit_and_tables_stay_together(tmp_path: Path, text: str) -> None:
    """3 blocks × 2 holders, fp32: every round commits, anchors are equal, tables do not drift apart."""

    async def body() -> None:
        config = LocalSwarmConfig(small_run(), tmp_path, text, nodes=6, rounds=8)
        async with local_swarm(config) as swarm:
            await swarm.until(lambda s: all(n.seen("finished") for n in s.nodes), 100)
            for block in range(3):
                anchors = {n.status["anchor"] for n in swarm.nodes if n.block == block}
                assert len(anchors) == 1
            committed = {(n.block, e["round"]) for n in swarm.nodes for e in n.rounds("committed")}
            assert len(committed) >= 0.95 * 24
            assert all(e["members"] == 2 for n in swarm.nodes for e in n.rounds("committed"))
            assert sum(n.status["gossips"] for n in swarm.nodes) >= 6
            async with visitor(swarm) as session:
                tables = []
                for block in range(3):
                    anchors_of = await fetch(session, block, "block")
                    first, second = anchors_of.values()
                    assert all(np.array_equal(first[name], second[name]) for name in first)
                    tables += [t["table"] for t in (await fetch(session, block, "table")).values()]
            began = initial_table(config.spec).numpy()
            moved = float(np.abs(np.mean(tables, axis=0) - began).mean())
            assert spread(tables) < 0.5 * moved  # without gossip it is 0.8

    in_loop(body)


def test_a_killed_node_stops_nobody_and_resumes(tmp_path: Path, text: str) -> None:
    """kill -9 in the middle: the others go on, no daemon is left, a restart catches up."""

    async def body() -> None:
        config = LocalSwarmConfig(small_run(deadline_s=5.0), tmp_path, text, nodes=6, record_ttl_s=6.0)
        async with local_swarm(config) as swarm:
            await swarm.until(lambda s: all(n.rounds("committed") for n in s.nodes), 60)
            victim = swarm.nodes[0]
            daemons = daemons_of(victim)
            assert daemons
            await swarm.kill(victim)
            _, alive = psutil.wait_procs(daemons, timeout=10)
            assert not alive
            others = swarm.nodes[1:]
            before = {n.index: n.status["round"] for n in others}
            await swarm.until(lambda s: all(n.status["round"] >= before[n.index] + 2 for n in others), 60)
            saved = victim.status["round"]
            again = await swarm.add_node(0, ("--home", str(tmp_path / "node-0")))
            await swarm.until(lambda s: again.seen("started"), 60)
            started = again.events[0]
            assert started["peer_id"] == victim.events[0]["peer_id"]
            assert started["round"] >= saved - 1
            await swarm.until(lambda s: bool(again.rounds("committed")), 60)

    in_loop(body)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_leaves_cleanly(tmp_path: Path, text: str, number: int) -> None:
    """One signal: exit 0 within 10 s, state saved, and the others see it gone within 2 s."""

    async def body() -> None:
        config = LocalSwarmConfig(small_run(), tmp_path, text, nodes=3, record_ttl_s=60.0)
        async with local_swarm(config) as swarm, visitor(swarm) as session:
            await swarm.until(lambda s: all(n.rounds("solo") for n in s.nodes), 60)
            assert len((await session.directory.holders())[1]) == 1
            begin = time.monotonic()
            await swarm.kill(swarm.nodes[1], number)
            assert time.monotonic() - begin < 10
            assert swarm.nodes[1].process.returncode == 0
            gone_by = time.monotonic() + 2
            while (await session.directory.holders())[1]:
                assert time.monotonic() < gone_by
            assert list((tmp_path / "node-1").glob("small-*/block-1/*.safetensors"))

    in_loop(body)


def test_a_node_whose_daemon_is_killed_or_that_was_stopped_for_a_while_joins_again(
    tmp_path: Path, text: str
) -> None:
    """Without a manual step: state saved, one line that says why, training goes on from there."""

    async def body() -> None:
        config = LocalSwarmConfig(small_run(), tmp_path, text, nodes=2)
        async with local_swarm(config) as swarm:
            killed, frozen = swarm.nodes
            await swarm.until(lambda s: all(n.rounds("solo") for n in s.nodes), 60)
            (daemon,) = daemons_of(killed)
            frozen.process.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            port = daemon_port(killed)
            daemon.kill()
            await swarm.until(lambda s: len(starts(killed)) == 2, 30)
            first, second = starts(killed)
            assert second["origin"].startswith(f"checkpoint of round {second['round']}")
            assert second["round"] >= first["round"] + 1
            assert second["peer_id"] == first["peer_id"]
            assert daemon_port(killed) == port
            assert "the libp2p daemon was killed by signal 9" in killed.log_file.read_text()
            await asyncio.sleep(max(0.0, stopped + JUMP_S + 2 - time.monotonic()))  # so long it has to be
            frozen.process.send_signal(signal.SIGCONT)
            await swarm.until(lambda s: len(starts(frozen)) == 2, 30)
            assert "was the machine asleep?" in frozen.log_file.read_text()
            seed = psutil.Process(swarm._seed.pid)  # type: ignore[union-attr]
            (daemon,) = seed.children()
            daemon.kill()
            async with asyncio.timeout(30):
                while not _has_another(seed, daemon):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert "the libp2p daemon was killed by signal 9" in (tmp_path / "logs" / "seed.log").read_text()
            for node in (killed, frozen):
                done = len(node.rounds("solo"))
                await swarm.until(functools.partial(_further, node, done), 30)
                assert len(daemons_of(node)) == 1

    in_loop(body)


def _has_another(parent: psutil.Process, than: psutil.Process) -> bool:
    """Whether it has started a daemon again; a killed one is a child, too, until it has been waited for."""
    return any(child != than and child.name() == "p2pd" for child in parent.children())


def _further(node: LocalNode, done: int, _: LocalSwarm) -> bool:
    return len(node.rounds("solo")) > done


def starts(node: LocalNode) -> list[dict[str, Any]]:
    """The `started` events of a node."""
    return [e for e in node.events if e["event"] == "started"]


def daemon_port(node: LocalNode) -> int:
    """Where a node's daemon listens."""
    (daemon,) = daemons_of(node)
    (port,) = {c.laddr.port for c in daemon.net_connections() if c.status == psutil.CONN_LISTEN}
    return int(port)


def test_nodes_of_two_runs_in_one_swarm_never_mix(tmp_path: Path, text: str) -> None:
    """A second run through the same seed: its nodes see only each other; newcomers must choose."""

    async def body() -> None:
        (tmp_path / "one").mkdir()
        (tmp_path / "two").mkdir()
        first = LocalSwarmConfig(small_run("one"), tmp_path / "one", text, nodes=3)
        async with local_swarm(first) as one:
            await one.until(lambda s: all(n.rounds("solo") for n in s.nodes), 60)
            second = LocalSwarmConfig(small_run("two"), tmp_path / "two", text, nodes=3)
            two = LocalSwarm(second, one._group)
            try:
                await two.start_seed(("--initial-peers", one.address))
                for block in range(3):
                    await two.add_node(block, ("--run", "two"))
                await two.until(lambda s: all(n.rounds("solo") for n in s.nodes), 60)
                process = await asyncio.to_thread(command, "dht.cli_peers", "--initial-peers", one.address)
                assert process.returncode == 1
                assert "several runs" in process.stderr
                for swarm in (one, two):
                    async with visitor(swarm) as session:
                        holders = await session.directory.holders()
                    ours = {n.events[0]["peer_id"] for n in swarm.nodes}
                    assert {h.peer_id for hs in holders.values() for h in hs} == ours
                assert not any(n.rounds("committed") for s in (one, two) for n in s.nodes)
            finally:
                await two.stop()

    in_loop(body)


def test_the_swarm_command_keeps_its_contract(tmp_path: Path, text: str) -> None:
    """One JSON document with the documented keys; honest CE falls far below that of a fresh model."""
    (tmp_path / "run.toml").write_text(small_run().to_toml())
    process = command(
        "bootstrap.cli_swarm",
        *("--nodes", "3", "--rounds", "12", "--run", str(tmp_path / "run.toml"), "--data", text),
        *("--home", str(tmp_path / "home"), "--json"),
    )
    assert process.returncode == 0, process.stderr
    document = json.loads(process.stdout)
    assert document.keys() >= {
        *(
            "run",
            "fingerprint",
            "nodes",
            "blocks",
            "seconds",
            "tokens",
            "tokens_per_s",
            "rounds",
            "bytes_sent",
        ),
        *("bytes_per_token", "ce", "denoising_ce", "baselines", "divergence", "peak_rss_mb", "sample"),
    }
    assert document["ce"].keys() >= {"ensemble", "euler-zero", "euler-noise", "blocks"}
    assert document["baselines"].keys() == {"uniform", "unigram", "bigram", "trigram"}
    assert len(document["ce"]["blocks"]) == len(document["denoising_ce"]) == len(document["divergence"]) == 3
    assert document["tokens"] >= 3 * 12 * 10 * 8 * 32
    assert document["ce"]["ensemble"] < document["baselines"]["unigram"] < document["baselines"]["uniform"]
    assert len(document["sample"].encode()) >= 200
    assert not any(psutil.Process(os.getpid()).children(recursive=True))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_survives_an_interrupted_swarm(tmp_path: Path, text: str, number: int) -> None:
    """Ctrl-C, or a kill that leaves no time to clean up: nodes, seed and daemons all end."""
    (tmp_path / "run.toml").write_text(small_run().to_toml())
    arguments = ["--nodes", "3", "--rounds", "100000", "--run", str(tmp_path / "run.toml"), "--data", text]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "blocktrain.bootstrap.cli_swarm",
            *arguments,
            "--home",
            str(tmp_path / "home"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "training" in line:
            break
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 8  # a seed and three nodes, each with its daemon
    process.send_signal(number)
    code = process.wait(timeout=20)
    process.stderr.close()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
