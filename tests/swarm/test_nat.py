"""Nodes behind two different NATs and a seed with an open address, in network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from blocktrain.protocol.spec import RunSpec
from tests.swarm.nat_topology import SEED_IP, Topology, available, nat_topology

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not available(), reason="needs root, ip and nft"),
]
SPEC = RunSpec.from_mapping(
    {
        "name": "nat",
        "model": {"d_model": 32, "heads": 2, "blocks": 1, "layers": 1, "context": 32},
        "optimizer": {"batch": 8, "warmup_steps": 5},
        "rounds": {"steps": 40, "deadline_s": 10.0, "timeout_s": 15.0, "wire": "fp32"},
    }
)
PORT = 4001
PATIENCE_S = 60.0


@dataclass(eq=False)
class Process:
    """One of our commands inside a namespace, with the JSON lines that it prints."""

    popen: subprocess.Popen[str]
    events: list[dict[str, Any]] = field(default_factory=list)
    reader: threading.Thread | None = None

    def rounds_of(self, members: int, result: str = "committed") -> int:
        """How many rounds of a group of this size have ended this way."""
        rounds = (e for e in self.events if e.get("event") == "round" and e["result"] == result)
        return sum(e["members"] == members for e in rounds)

    def stop(self, *, kill: bool = False) -> None:
        """End it, politely or not, and wait."""
        self.popen.kill() if kill else self.popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout=15)
        self.popen.kill()
        self.popen.wait()
        if self.reader is not None:
            self.reader.join()


class Lab:
    """The namespaces and what runs in them."""

    def __init__(self, topology: Topology, folder: Path) -> None:
        self.topology, self.folder = topology, folder
        self.processes: list[Process] = []
        self._news: queue.Queue[None] = queue.Queue()
        (folder / "run.toml").write_text(SPEC.to_toml())
        (folder / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog at night. " * 2000)

    def start(self, namespace: str, module: str, arguments: Sequence[str]) -> Process:
        """Start a command of ours; its log goes to a file in the folder."""
        command = self.topology.inside(namespace, [sys.executable, "-m", f"blocktrain.{module}", *arguments])
        with (self.folder / f"log-{len(self.processes)}").open("w") as log:
            process = Process(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True))
        self.processes.append(process)
        process.reader = threading.Thread(target=self._follow, args=(process,), daemon=True)
        process.reader.start()
        return process

    def seed(self) -> tuple[Process, str]:
        """A seed with an open address, the same one each time; and its multiaddr."""
        listen = ("--listen", f"/ip4/0.0.0.0/tcp/{PORT}", "--home", str(self.folder / "seed"))
        seed = self.start(
            self.topology.seed,
            "bootstrap.cli",
            ["--publish", str(self.folder / "run.toml"), "--json", *listen],
        )
        self.until(lambda: bool(seed.events))
        (address,) = [a for a in seed.events[0]["addresses"] if SEED_IP in a]
        return seed, address

    def node(self, namespace: str, name: str, seed: str, wait_for: int, port: int = PORT) -> Process:
        """A node that holds the only block."""
        arguments = [
            *("--initial-peers", seed, "--data", str(self.folder / "text.txt"), "--block", "0"),
            *("--home", str(self.folder / name), "--listen", f"/ip4/0.0.0.0/tcp/{port}", "--events", "-"),
            *("--threads", "1", "--record-ttl", "10", "--wait-for", str(wait_for)),
        ]
        return self.start(namespace, "node.cli", arguments)

    def line(self, router: str, *, up: bool) -> None:
        """Plug a router's outer cable in, or pull it."""
        cable = ["ip", "link", "set", "wan", "up" if up else "down"]
        subprocess.run(self.topology.inside(router, cable), check=True)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to be true, looked at after each line that any process prints."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, [p.events[-1:] for p in self.processes]
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=left)

    def _follow(self, process: Process) -> None:
        assert process.popen.stdout is not None
        with process.popen.stdout as lines:
            for line in lines:
                process.events.append(json.loads(line))
                self._news.put(None)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """The namespaces; all processes in them end before they do."""
    with nat_topology() as topology:
        lab = Lab(topology, tmp_path)
        try:
            yield lab
        finally:
            for process in reversed(lab.processes):
                process.stop()


def test_two_nodes_behind_two_nats_commit_rounds_and_show_how_they_are_reached(lab: Lab) -> None:
    """Groups of two through the seed; each announces a circuit; the seed killed and back: groups again."""
    seed, address = lab.seed()
    one, two = (
        lab.node(namespace, f"node-{namespace[-1]}", address, wait_for=2)
        for namespace in (lab.topology.host_a, lab.topology.host_b)
    )
    lab.until(lambda: one.rounds_of(2) >= 3 and two.rounds_of(2) >= 3)
    peers = ["-m", "blocktrain.dht.cli_peers", "--initial-peers", address, "--json"]
    shown = subprocess.run(
        lab.topology.inside(lab.topology.host_b, [sys.executable, *peers]),
        capture_output=True, text=True, timeout=60, check=True, env=os.environ,
    )  # fmt: skip
    (block,) = json.loads(shown.stdout)["blocks"]
    assert len(block["holders"]) == 2
    for holder in block["holders"]:
        assert f"{address}/p2p-circuit/p2p/{holder['peer_id']}" in holder["addresses"]
    seed.stop(kill=True)
    lab.seed()
    before = one.rounds_of(2)
    lab.until(lambda: one.rounds_of(2) >= before + 2)


def test_any_reachable_node_relays_when_the_seed_is_gone(lab: Lab) -> None:
    """A third node with an open address takes the killed seed's place, as relay and in the DHT."""
    seed, address = lab.seed()
    open_node = lab.node(lab.topology.seed, "open", address, wait_for=3, port=PORT + 1)
    one, two = (
        lab.node(namespace, f"node-{namespace[-1]}", address, wait_for=3)
        for namespace in (lab.topology.host_a, lab.topology.host_b)
    )
    lab.until(lambda: all(node.rounds_of(3) >= 2 for node in (open_node, one, two)))
    seed.stop(kill=True)
    before = [node.rounds_of(3) for node in (one, two)]
    rounds = [node.rounds_of for node in (one, two)]
    lab.until(lambda: all(of(3) >= was + 3 for of, was in zip(rounds, before, strict=True)))


def test_a_node_that_is_cut_off_from_everyone_trains_on_and_comes_back_by_itself(lab: Lab) -> None:
    """Its router loses the line until both have gone on alone; then they commit together again."""
    _, address = lab.seed()
    one, two = (
        lab.node(namespace, f"node-{namespace[-1]}", address, wait_for=2)
        for namespace in (lab.topology.host_a, lab.topology.host_b)
    )
    lab.until(lambda: one.rounds_of(2) >= 2 and two.rounds_of(2) >= 2)
    lab.line(lab.topology.nat_a, up=False)
    alone = [node.rounds_of(1, "solo") for node in (one, two)]
    lab.until(lambda: one.rounds_of(1, "solo") > alone[0] and two.rounds_of(1, "solo") > alone[1])
    lab.line(lab.topology.nat_a, up=True)
    before = [node.rounds_of(2) for node in (one, two)]
    lab.until(lambda: one.rounds_of(2) >= before[0] + 2 and two.rounds_of(2) >= before[1] + 2)
