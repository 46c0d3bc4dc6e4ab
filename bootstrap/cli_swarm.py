"""`blocktrain-swarm`: a whole swarm of real processes on this machine, trained and evaluated."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from blocktrain.bootstrap.demo import DEMO_NODES, DEMO_SECONDS, demo_spec, rounds_for
from blocktrain.bootstrap.demo_text import sotu_text
from blocktrain.bootstrap.divergence import measure_divergence
from blocktrain.bootstrap.local import LocalSwarm, LocalSwarmConfig, run_local_swarm
from blocktrain.bootstrap.report import print_report
from blocktrain.bootstrap.result import Evaluation, compose_result, training_seconds
from blocktrain.bootstrap.view import SwarmView, show_swarm
from blocktrain.dht.daemon import die_with_parent
from blocktrain.dht.session import visit_run
from blocktrain.model.bands import noise_bands
from blocktrain.model.text import open_text, split
from blocktrain.protocol.command import Command, CommonOptions, print_json, run_command
from blocktrain.protocol.errors import HomeError, NetworkError, UsageError
from blocktrain.protocol.home import hold_home
from blocktrain.protocol.spec import RunSpec

log = logging.getLogger(__name__)
COMMAND = Command(
    "blocktrain-swarm",
    "Train a run with a swarm of real processes on this machine, and evaluate it.",
    "blocktrain-swarm --nodes 6 --blocks 3 --rounds 10 --steps-per-round 20 --data my.txt",
)
MARKER = "swarm.json"
STALL_S = 600.0
"""No node has finished a round for this long: something is wrong."""
SAMPLE_BYTES = 200
EVALUATED_BYTES = 131_072


@dataclass(frozen=True, kw_only=True)
class SwarmOptions(CommonOptions):
    """What swarm to run."""

    demo: bool = False
    """Six nodes, three blocks, the State of the Union addresses, about three minutes of training."""
    nodes: int = 6
    """Node processes; node i holds block i modulo the number of blocks."""
    blocks: int = 0
    """Blocks of the model; 0: as in the run file, or 3."""
    rounds: int = 10
    """Rounds that each block is trained for."""
    steps_per_round: int = 0
    """Local steps between rounds; 0: as in the run file, or 20."""
    run: Annotated[str, tyro.conf.arg(metavar="RUN.toml")] = ""
    """Run file; by default a small one."""
    data: Annotated[str, tyro.conf.arg(metavar="PATH")] = ""
    """Text: a file, a folder or a glob; by default the State of the Union addresses."""
    home: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""
    """Where the swarm lives; it resumes what is there. By default a new one in ~/.blocktrain/swarm-1."""
    seed: int = 0
    """Seed of the run; the run file's is used if there is one."""
    json: bool = False
    """End with one JSON document on stdout."""


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_command(COMMAND, SwarmOptions, run))


async def run(options: SwarmOptions) -> int:
    """Start the swarm, watch it, evaluate it, stop it, report."""
    text = open_text(options.data) if options.data else sotu_text()
    data = os.path.abspath(text.name)  # noqa: ASYNC240,PTH100  no I/O, and a glob has no path to resolve
    spec = _specification(options)
    if not 1 <= options.nodes <= 256:
        raise UsageError(f"--nodes {options.nodes}: give 1 to 256")
    if options.nodes < spec.model.blocks:
        raise UsageError(f"--nodes {options.nodes}: {spec.model.blocks} blocks need as many nodes at least")
    if options.rounds < 1:
        raise UsageError(f"--rounds {options.rounds}: give at least 1")
    split(text, spec.model.context)  # too short a text ends here, not in every node
    nodes = DEMO_NODES if options.demo else options.nodes
    with hold_home(options.home, "swarm") as home:
        _prepare(home, fresh=not options.home)
        rounds = (
            await asyncio.to_thread(rounds_for, spec, text, nodes, DEMO_SECONDS)
            if options.demo
            else options.rounds
        )
        config = LocalSwarmConfig(spec, home, data, nodes, rounds)
        result = await _run(config)
        if options.json:
            print_json(result)
        else:
            print_report(Console(), result, config)
    return 0


async def _run(config: LocalSwarmConfig) -> dict[str, Any]:
    log.info("starting a seed and %d nodes; homes and logs are in %s", config.nodes, config.home)
    async with asyncio.TaskGroup() as group, run_local_swarm(config, group) as swarm:
        log.info(
            "training; to look in or join from another shell: blocktrain-peers --initial-peers %s",
            swarm.address,
        )
        with show_swarm(config.rounds) as view:
            await _watch(swarm, view)
        nodes, seconds = list(swarm.nodes), training_seconds(swarm.nodes)
        before = [dict(n.status) for n in nodes]  # as training ended, without the downloads that follow
        log.info("trained for %.0f s; evaluating", seconds)
        done = await _evaluate(swarm, group)
        for node, status in zip(nodes, before, strict=True):
            node.status = status
        return {**compose_result(config.spec, nodes, seconds, done), "address": swarm.address}


async def _watch(swarm: LocalSwarm, view: SwarmView) -> None:
    """Follow the training until all nodes have finished. Raises: NetworkError if it stalls or a node dies."""
    while not all(n.seen("finished") for n in swarm.nodes):
        before = sum(len(n.events) for n in swarm.nodes)

        def progressed(now: LocalSwarm, before: int = before) -> bool:
            view.update(now)
            return sum(len(n.events) for n in now.nodes) > before

        await swarm.until(progressed, STALL_S)


async def _evaluate(swarm: LocalSwarm, group: asyncio.TaskGroup) -> Evaluation:
    arguments = ["--initial-peers", swarm.address, "--data", swarm.config.data, "--json"]
    arguments += ["--bytes", str(EVALUATED_BYTES), "--sample", str(SAMPLE_BYTES)]
    evaluated = await _run_json("blocktrain.node.cli_eval", arguments)
    async with visit_run([swarm.address], swarm.config.spec.fingerprint, 30.0, group) as session:
        divergence = await measure_divergence(session)
    return Evaluation(evaluated["ce"], evaluated["baselines"], evaluated["sample"], divergence)


async def _run_json(module: str, arguments: list[str]) -> dict[str, Any]:
    """Run one of our commands and read its document. Raises: NetworkError with its own last line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=die_with_parent(),
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if process.returncode != 0:
        lines = err.decode(errors="replace").splitlines() or ["it said nothing"]
        raise NetworkError(f"{module.rpartition('.')[2]} failed: {lines[-1]}")
    try:
        document: dict[str, Any] = json.loads(out)
    except ValueError:
        raise NetworkError(f"{module.rpartition('.')[2]} printed no JSON document") from None
    return document


def _specification(options: SwarmOptions) -> RunSpec:
    """The run file with the options that override it. Raises: SpecError."""
    spec = RunSpec.from_file(Path(options.run)) if options.run else demo_spec(options.seed)
    model, rounds = spec.model, spec.rounds
    if options.blocks:
        model = replace(model, blocks=options.blocks)
    if options.steps_per_round:
        rounds = replace(rounds, steps=options.steps_per_round)
    spec = RunSpec.from_mapping(replace(spec, model=model, rounds=rounds).to_mapping())
    noise_bands(spec.noise, spec.model.blocks)  # noise that can't be drawn ends here, not in every process
    return spec


def _prepare(home: Path, *, fresh: bool) -> None:
    """Make the home a swarm's; a default one is emptied of the swarm before, which was thrown away.

    Raises:
        HomeError: it can't be written or emptied.
    """
    marker = home / MARKER
    try:
        if fresh and marker.exists():
            for entry in home.iterdir():
                if entry.name == "seed" or entry.name.startswith(("node-", "logs")):
                    shutil.rmtree(entry)
        marker.write_text("{}\n")
    except OSError as error:
        raise HomeError(f"{error.filename}: can't be written: {error.strerror}") from None


if __name__ == "__main__":
    main()
