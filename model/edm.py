"""Preconditioning of EDM (Karras et al. 2022, arXiv 2206.00364, table 1, column "Ours").

σ may have any shape; every function keeps it. σ_data is the standard deviation of clean data.
"""

from __future__ import annotations

import torch
from torch import Tensor


def c_in(sigma: Tensor, sigma_data: float) -> Tensor:
    """Scale of the network's input: 1/√(σ² + σ_data²)."""
    return torch.rsqrt(sigma.square() + sigma_data**2)


def c_skip(sigma: Tensor, sigma_data: float) -> Tensor:
    """Share of the noisy input that passes unchanged: σ_data²/(σ² + σ_data²)."""
    return sigma_data**2 / (sigma.square() + sigma_data**2)


def c_out(sigma: Tensor, sigma_data: float) -> Tensor:
    """Scale of the network's output: σ σ_data/√(σ² + σ_data²)."""
    return sigma * sigma_data * torch.rsqrt(sigma.square() + sigma_data**2)


def c_noise(sigma: Tensor) -> Tensor:
    """What the network is told about the noise: ¼ ln σ."""
    return sigma.log() / 4


def weight(sigma: Tensor, sigma_data: float) -> Tensor:
    """Loss weight λ(σ) = (σ² + σ_data²)/(σ σ_data)²."""
    return (sigma.square() + sigma_data**2) / (sigma * sigma_data).square()
