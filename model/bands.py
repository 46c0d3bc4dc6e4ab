"""Noise levels: which σ each block trains on, and the nodes of a sweep.

ln σ ~ N(P_mean, P_std²) truncated to [σ_min, σ_max] (EDM, Karras et al. 2022, arXiv 2206.00364,
table 1, truncated), cut into B bands of equal probability mass, each widened by γ of its
log-width on both sides (DiffusionBlocks, Shing et al. 2025, arXiv 2506.14202).

Shapes: B = sequences in a batch.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktrain.protocol.errors import SpecError
from blocktrain.protocol.spec import NoiseSpec


@dataclass(frozen=True, slots=True)
class Band:
    """One block's share of the noise levels. All four are σ: low ≤ bottom < top ≤ high."""

    bottom: float
    """Lower edge; together the [bottom, top] of all blocks tile [σ_min, σ_max]."""
    top: float
    """Upper edge: where a sweep enters the block, and the condition at which it is read out at z = 0."""
    low: float
    """Least σ that the block trains on: `bottom`, widened and clamped to σ_min."""
    high: float
    """Greatest σ that the block trains on: `top`, widened and clamped to σ_max."""


@functools.lru_cache(maxsize=16)
def noise_bands(noise: NoiseSpec, blocks: int) -> tuple[Band, ...]:
    """The bands of blocks 0 … B − 1 in the order of a sweep: block 0 has the highest.

    Raises:
        SpecError: the lognormal leaves no usable probability in [σ_min, σ_max], or a band is empty.
    """
    nodes = sweep_nodes(noise, blocks)
    bands = []
    for top, bottom in itertools.pairwise(nodes):
        widening = (top / bottom) ** noise.gamma
        low, high = max(noise.sigma_min, bottom / widening), min(noise.sigma_max, top * widening)
        bands.append(Band(bottom=bottom, top=top, low=low, high=high))
    return tuple(bands)


def sweep_nodes(noise: NoiseSpec, blocks: int) -> tuple[float, ...]:
    """The B + 1 Euler nodes σ_max = σ_0 > … > σ_B = σ_min; block b goes from node b to node b + 1.

    Raises:
        SpecError: as `noise_bands`.
    """
    share = torch.linspace(1, 0, blocks + 1, dtype=torch.float64)
    inner = _quantile(noise, noise.sigma_min, noise.sigma_max, share)[1:-1].tolist()
    nodes = (noise.sigma_max, *inner, noise.sigma_min)
    if not all(upper > lower for upper, lower in itertools.pairwise(nodes)):
        raise SpecError(f"noise.sigma_max: [sigma_min, sigma_max] is too narrow for {blocks} bands; widen it")
    return nodes


def sample_sigma(band: Band, noise: NoiseSpec, n: int, generator: torch.Generator) -> Tensor:
    """Draw σ_B, n values of the lognormal truncated to [band.low, band.high], by its inverse CDF.

    Drawn and returned on the generator's device, as float32.
    """
    u_B = torch.rand(n, dtype=torch.float64, device=generator.device, generator=generator)
    return _quantile(noise, band.low, band.high, u_B).float()


def band_quantiles(band: Band, noise: NoiseSpec, n: int) -> Tensor:
    """The (i + ½)/n quantiles of what `sample_sigma` draws, float64 (n,), for means over the band."""
    return _quantile(noise, band.low, band.high, (torch.arange(n, dtype=torch.float64) + 0.5) / n)


def _quantile(noise: NoiseSpec, low: float, high: float, share: Tensor) -> Tensor:
    """σ below which a `share` in [0, 1] of the lognormal truncated to [low, high] lies (float64)."""
    # Above the mean the CDF is close to 1 and loses digits, so work with the other tail there.
    side = -1.0 if math.log(low) > noise.p_mean else 1.0
    c_low, c_high = (_normal_cdf(side * (math.log(s) - noise.p_mean) / noise.p_std) for s in (low, high))
    if not abs(c_high - c_low) > 1e-290:
        raise SpecError("noise.p_mean: no probability in [sigma_min, sigma_max]; move it or raise p_std")
    x = side * torch.special.ndtri(c_low + share * (c_high - c_low))
    return torch.exp(noise.p_mean + noise.p_std * x).clamp(low, high)


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
