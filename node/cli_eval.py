"""`blocktrain-eval`: honest cross-entropy of a whole model, from a swarm or from an exported folder."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.table import Table

from blocktrain.dht.session import visit_run
from blocktrain.model import ngrams
from blocktrain.model.composition import MAX_DRAWS, LocalModel, parse_readout
from blocktrain.model.evaluate import Progress, honest_ce
from blocktrain.model.sampler import sample_bytes
from blocktrain.model.text import Bytes, Text, evaluation_windows, open_text, split
from blocktrain.node.collect import CollectedModel, collect_model
from blocktrain.node.export import load_export, typed_path
from blocktrain.node.preflight import pick_device, set_threads
from blocktrain.node.progress import count_bar
from blocktrain.protocol.command import Command, print_json, run_command
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.options import NetworkOptions

COMMAND = Command(
    "blocktrain-eval",
    "Measure the honest cross-entropy of a run's whole model, beside that of n-gram models.",
    "blocktrain-eval --initial-peers /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo… --data my.txt",
)


@dataclass(frozen=True, kw_only=True)
class EvalOptions(NetworkOptions):
    """Which model to evaluate, on what, and how."""

    model: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""
    """Evaluate this exported model, offline, instead of downloading one."""
    data: Annotated[str, tyro.conf.arg(metavar="PATH")] = ""
    """Text, split as nodes split it: its held-out part is evaluated, n-grams are fitted on the rest."""
    bytes: int = 65_536
    """How many bytes to predict, at most (but at least one context)."""
    readout: Annotated[tuple[str, ...], tyro.conf.arg(metavar="READOUT …")] = ()
    """ensemble, euler-zero, euler-noise, euler-noise:M or block:i, repeatable; by default all of them."""
    draws: Annotated[int, tyro.conf.arg(metavar="M")] = 8
    """Noise draws whose probabilities euler-noise:M averages, where no readout is named."""
    device: Annotated[str, tyro.conf.arg(metavar="auto|cpu|cuda|mps")] = "auto"
    """Where to compute."""
    threads: int = 0
    """Processor cores to compute with; 0: all of them."""
    seed: int = 0
    """Picks the windows of the text, the noise and the sample."""
    sample: Annotated[int, tyro.conf.arg(metavar="BYTES")] = 0
    """Let the ensemble go on writing from the held-out text for this many bytes, and show that."""
    json: bool = False
    """Print one JSON document instead of a table."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results, in nats per byte."""

    ce: dict[str, float]
    """By the name of the readout."""
    baselines: dict[str, float]
    """Of uniform, unigram, bigram and trigram models of the training part."""
    windows: int
    bytes: int
    """Bytes that were predicted, in all windows together."""


class _Stopped(Exception):
    """The command was interrupted."""


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_command(COMMAND, EvalOptions, run))


async def run(options: EvalOptions) -> int:
    """Get the model, evaluate it, show the result."""
    _check(options)
    device = pick_device(options.device)
    set_threads(options.threads)
    text = open_text(options.data)
    collected = await _get_model(options, device)
    model = collected.model
    readouts = choose_readouts(options.readout, options.draws, model.spec.model.blocks)
    train, heldout = split(text, model.spec.model.context)
    windows = evaluation_windows(heldout, model.spec.model.context, options.bytes, options.seed)
    sample = await asyncio.to_thread(write_sample, model, windows[0], options.sample, options.seed)
    with count_bar("windows") as bar:
        result = await evaluate_in_thread(model, train, windows, readouts, options.seed, bar)
    if options.json:
        document = as_document(result, collected)
        print_json(document | {"sample": sample} if options.sample else document)
    else:
        console = Console()
        show(result, collected, options.data, console)
        if options.sample:
            console.print(f"\nA sample of {options.sample} bytes:\n{sample}", markup=False, highlight=False)
    return 0


def choose_readouts(wanted: Sequence[str], draws: int, blocks: int) -> list[str]:
    """The readouts that are wanted, once each, or all there are. Raises: UsageError."""
    several = [f"euler-noise:{draws}"] if draws > 1 else []
    everything = ["ensemble", "euler-zero", "euler-noise", *several, *(f"block:{i}" for i in range(blocks))]
    readouts = list(dict.fromkeys(wanted or everything))
    for readout in readouts:
        parse_readout(readout, blocks)
    return readouts


def evaluate(
    model: LocalModel, train: Text, windows: Bytes, readouts: Sequence[str], seed: int, progress: Progress
) -> Evaluation:
    """Evaluate on windows (N, T + 1) of held-out text. The result for a readout depends on no other one."""
    windows_NT1 = torch.from_numpy(windows)
    quiet = [readout for readout in readouts if not readout.startswith("euler-noise")]
    groups = [group for group in (quiet, *([r] for r in readouts if r not in quiet)) if group]
    ce: dict[str, float] = {}
    for i, group in enumerate(groups):
        generator = torch.Generator().manual_seed(seed)

        def report(done: int, total: int, before: int = i) -> None:
            progress(before * total + done, len(groups) * total)

        ce |= honest_ce(model, windows_NT1, group, generator, report)
    baselines = ngrams.fit(train).cross_entropy(windows)
    ordered = {readout: ce[readout] for readout in readouts}
    return Evaluation(ordered, baselines, len(windows), len(windows) * (windows.shape[1] - 1))


async def evaluate_in_thread(
    model: LocalModel, train: Text, windows: Bytes, readouts: Sequence[str], seed: int, progress: Progress
) -> Evaluation:
    """`evaluate` beside the event loop. When cancelled, it ends before the next answer of a block.

    The model is fit for nothing else afterwards.
    """
    stopping = threading.Event()

    def stop_if_asked(*_: object) -> None:
        if stopping.is_set():
            raise _Stopped

    for block in model.blocks:
        block.register_forward_pre_hook(stop_if_asked)
    try:
        return await asyncio.to_thread(evaluate, model, train, windows, readouts, seed, progress)
    except asyncio.CancelledError:
        stopping.set()
        raise


def write_sample(model: LocalModel, window_T1: Bytes, length: int, seed: int) -> str:
    """So many bytes that the ensemble writes after a window of held-out text, shown as UTF-8."""
    generator = torch.Generator().manual_seed(seed)
    return sample_bytes(model, window_T1.tobytes(), length, generator).decode(errors="replace")


def as_document(result: Evaluation, collected: CollectedModel) -> dict[str, object]:
    """What `--json` prints. A readout that is not finite, or a block that was not asked for, is null."""
    finite = {name: value if math.isfinite(value) else None for name, value in result.ce.items()}
    blocks = [finite.pop(f"block:{i}", None) for i in range(len(collected.rounds))]
    return {
        "ce": {**finite, "blocks": blocks},
        "baselines": result.baselines,
        "bytes_evaluated": result.bytes,
        "round": list(collected.rounds),
    }


def show(result: Evaluation, collected: CollectedModel, data: str, console: Console) -> None:
    """Print a table of all readouts and baselines, and what they were measured on."""
    spec = collected.model.spec
    best = min(result.ce, key=lambda name: (math.isnan(result.ce[name]), result.ce[name]))
    table = Table("cross-entropy", title=f"run {spec.name}")
    table.add_column("nats/byte", justify="right")
    table.add_column("bits/byte", justify="right")
    table.add_column("")
    for name, nats in result.ce.items():
        mark = "best readout" if name == best else ""
        table.add_row(name, *_both(nats), mark, style="bold" if mark else None)
    table.add_section()
    for name, nats in result.baselines.items():
        table.add_row(name, *_both(nats), "baseline", style="dim")
    console.print(table)
    rounds = ", ".join(f"block {block}: {number}" for block, number in enumerate(collected.rounds))
    context = spec.model.context
    for line in (
        (
            f"Measured on {result.bytes:,} bytes in {result.windows:,} windows from the held-out part of "
            f"{data}; each byte is predicted from the up to {context} bytes before it in its window."
        ),
        (
            "Nodes that were given this same text did not train on that part; what others trained on is not "
            "known here. Baselines: n-gram models fitted on the other part, scored on the same windows."
        ),
        f"Rounds averaged so far: {rounds}.",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _check(options: EvalOptions) -> None:
    """Refuse what can't work before anything is downloaded. Raises: UsageError."""
    if not options.data:
        raise UsageError("--data is missing: name a file, a folder or a glob of text to evaluate on")
    if options.model and options.initial_peers:
        raise UsageError("--model and --initial-peers exclude each other: give the one to evaluate")
    if not options.model and not options.initial_peers:
        raise UsageError(
            "--initial-peers is missing: paste the line that blocktrain-bootstrap or a node printed, "
            "or give --model with the folder of an exported model"
        )
    for name, value, low, high in (
        ("bytes", options.bytes, 1, 2**62),
        ("draws", options.draws, 1, MAX_DRAWS),
        ("seed", options.seed, 0, 2**63 - 1),
        ("sample", options.sample, 0, 100_000),
    ):
        if not low <= value <= high:
            raise UsageError(f"--{name} {value}: must be from {low} to {high}")


async def _get_model(options: EvalOptions, device: torch.device) -> CollectedModel:
    if options.model:
        return load_export(typed_path(options.model), device)
    async with (
        asyncio.TaskGroup() as group,
        visit_run(options.initial_peers, options.run, options.join_timeout, group) as session,
    ):
        return await collect_model(session, device)


def _both(nats: float) -> tuple[str, str]:
    return f"{nats:.4f}", f"{nats / math.log(2):.4f}"


if __name__ == "__main__":
    main()
