"""Composition: the blocks' outputs become one distribution of the next token. Honest by construction.

Nothing here ever sees y: z starts as zero or as noise at σ_max, so what comes out is a function of
x and a random generator. Blocks are reached through one callable, `Denoise`, whether they live in
this process or on other machines.

Readouts:

- `ensemble`: each block alone at z = 0 estimates log p(y | x); their mean, normalised. One round trip.
- `euler-zero`, `euler-noise`, `euler-noise:M`: z starts as zero, or as σ_max ε, and takes Euler steps
  of the probability-flow ODE down the bands (EDM, arXiv 2206.00364, equation 1 with σ(t) = t); the last
  block's output counts. M draws: the mean of their probabilities.
- `block:i`: block i alone at z = 0.

Shapes: B = sequences, T = positions, D = d_model, V = vocabulary.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktrain.model.bands import noise_bands
from blocktrain.model.block import Block
from blocktrain.model.initial import target_rows
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.spec import RunSpec

Denoise = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(block, x_BT, z_BTD, sigma_B) → logits_BTV: one block's answer."""

MAX_DRAWS = 1024


@dataclass(frozen=True, slots=True)
class Readout:
    """How the blocks' outputs become one distribution. Made by `parse_readout`."""

    kind: str
    number: int = 0
    """M of `euler-noise`, i of `block`; 0 for the others."""


ENSEMBLE = Readout("ensemble")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A whole stack in this process, each block with the copy of the table it was trained with."""

    spec: RunSpec
    blocks: tuple[Block, ...]
    tables: tuple[Tensor, ...]
    """B tables of (V, D), one a block: holders' copies differ a little between gossip exchanges."""

    @property
    def targets(self) -> tuple[Tensor, ...]:
        """The target rows (V, D) that belong to each block's table."""
        return tuple(target_rows(self.spec, table_VD) for table_VD in self.tables)

    def denoise(self, block: int, x_BT: Tensor, z_BTD: Tensor, sigma_B: Tensor) -> Tensor:
        """Block `block`'s logits_BTV; satisfies `Denoise`."""
        table_VD = self.tables[block]
        target_VD = target_rows(self.spec, table_VD)
        logits_BTV: Tensor = self.blocks[block](x_BT, z_BTD, sigma_B, table_VD, target_VD)
        return logits_BTV


def parse_readout(text: str, blocks: int) -> Readout:
    """Read the name of a readout of a model of so many blocks.

    Raises:
        UsageError: there is no such readout, block or number of draws.
    """
    if text in ("ensemble", "euler-zero"):
        return Readout(text)
    full = "euler-noise:1" if text == "euler-noise" else text
    match = re.fullmatch(r"(euler-noise|block):([0-9]{1,6})", full)
    if match is None:
        known = "ensemble, euler-zero, euler-noise, euler-noise:M or block:i"
        raise UsageError(f"readout {text[:40]!r}: use {known}")
    kind, number = match[1], int(match[2])
    if kind == "block" and number >= blocks:
        raise UsageError(f"readout {text!r}: the run has blocks 0 to {blocks - 1}")
    if kind == "euler-noise" and not 1 <= number <= MAX_DRAWS:
        raise UsageError(f"readout {text!r}: the number of draws goes from 1 to {MAX_DRAWS}")
    return Readout(kind, number)


def compose(
    denoise: Denoise,
    targets: Sequence[Tensor],
    x_BT: Tensor,
    readout: Readout,
    generator: torch.Generator,
    spec: RunSpec,
) -> Tensor:
    """log_probs_BTV of the token after every position of x, by one readout.

    `targets` holds each block's target rows (V, D), into whose span its answer is averaged; the
    generator serves `euler-noise` alone.
    """
    return compose_all(denoise, targets, x_BT, (readout,), generator, spec)[0]


def compose_all(
    denoise: Denoise,
    targets: Sequence[Tensor],
    x_BT: Tensor,
    readouts: Sequence[Readout],
    generator: torch.Generator,
    spec: RunSpec,
) -> list[Tensor]:
    """As `compose`, for several readouts, which share the blocks' answers at z = 0."""
    bands = noise_bands(spec.noise, spec.model.blocks)
    null_BTD = targets[0].new_zeros(*x_BT.shape, spec.model.d_model)

    @functools.cache
    def alone(block: int) -> Tensor:
        sigma_B = null_BTD.new_full((len(x_BT),), bands[block].top)
        return denoise(block, x_BT, null_BTD, sigma_B).log_softmax(dim=-1)

    def draw(_: int) -> Tensor:
        eps_BTD = torch.randn(null_BTD.shape, generator=generator, device=generator.device)
        return euler(denoise, targets, x_BT, spec.noise.sigma_max * eps_BTD.to(null_BTD.device), spec)

    def read(readout: Readout) -> Tensor:
        if readout.kind == "block":
            return alone(readout.number)
        if readout.kind == "ensemble":
            return mean_log_probs([alone(block) for block in range(spec.model.blocks)])
        if readout.kind == "euler-zero":
            return euler(denoise, targets, x_BT, null_BTD, spec)
        # A running sum: many draws must not need many times the memory.
        return functools.reduce(torch.logaddexp, map(draw, range(readout.number))) - math.log(readout.number)

    return [read(readout) for readout in readouts]


def mean_log_probs(log_probs: Sequence[Tensor]) -> Tensor:
    """The normalised mean of several log-distributions over the last axis (a geometric mean)."""
    return torch.stack(tuple(log_probs)).mean(dim=0).log_softmax(dim=-1)


def euler(denoise: Denoise, targets: Sequence[Tensor], x_BT: Tensor, z_BTD: Tensor, spec: RunSpec) -> Tensor:
    """Take z from σ_max down all bands and return the last block's log_probs_BTV.

    At node σ of block b: D = Σ_y p(y) e_y, the posterior mean; z ← z + (σ′ − σ)(z − D)/σ.
    """
    *upper, last = noise_bands(spec.noise, spec.model.blocks)
    for block, band in enumerate(upper):
        sigma_B = z_BTD.new_full((len(x_BT),), band.top)
        d_BTD = denoise(block, x_BT, z_BTD, sigma_B).softmax(dim=-1) @ targets[block]
        z_BTD = z_BTD + (band.bottom - band.top) / band.top * (z_BTD - d_BTD)
    sigma_B = z_BTD.new_full((len(x_BT),), last.top)
    return denoise(len(upper), x_BT, z_BTD, sigma_B).log_softmax(dim=-1)
