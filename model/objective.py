"""The local objective: denoise the next token's embedding.

One step takes x and the next token y at every position, draws one σ a sequence from the block's
band, makes z = e_y + σ ε with ε ~ N(0, I), and asks the block for y. A share of the sequences
(the null-evidence fraction) trains at z = 0 with σ at the band's top, the condition of the
ensemble readout.

The value is called denoising CE: z is made from y, so it says nothing about how well the composed
model predicts text.

Shapes: B = sequences, T = positions, D = d_model, V = vocabulary, N = B × T.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.model import edm
from blocktrain.model.bands import Band, band_quantiles, sample_sigma
from blocktrain.protocol.spec import NoiseSpec

Net = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_BT, z_BTD, sigma_B) → logits_BTV."""

_QUADRATURE_POINTS = 1024


@dataclass(frozen=True, slots=True)
class DrawnNoise:
    """All that is random in one step's loss, and the weights that follow from it."""

    sigma_B: Tensor
    null_B: Tensor
    """True where the sequence trains at z = 0."""
    weight_B: Tensor
    eps_BTD: Tensor

    def to(self, device: torch.device) -> DrawnNoise:
        """The same noise on another device."""
        return DrawnNoise(*(t.to(device) for t in (self.sigma_B, self.null_B, self.weight_B, self.eps_BTD)))


@dataclass(frozen=True, slots=True)
class Losses:
    """Scalars of one batch, in nats per token."""

    loss: Tensor
    """Weighted; what is differentiated."""
    denoising_ce: Tensor
    """Unweighted and detached; what is shown."""


def draw_noise(
    noise: NoiseSpec, band: Band, shape: tuple[int, int, int], generator: torch.Generator
) -> DrawnNoise:
    """Draw the noise of one batch of shape (B, T, D), on the generator's device.

    B × null_fraction sequences, rounded up or down at random, train at z = 0. They are the first of
    the batch, which is as good as any since the order of a batch carries no meaning.
    """
    batch, device = shape[0], generator.device
    sigma_B = sample_sigma(band, noise, batch, generator)
    offset = torch.rand((), generator=generator, device=device)
    null_B = torch.arange(batch, device=device) + offset < noise.null_fraction * batch
    sigma_B = torch.where(null_B, band.top, sigma_B)
    weight_B = torch.ones_like(sigma_B)
    if noise.weighting == "edm":
        weight_B = edm.weight(sigma_B, noise.sigma_data) / mean_edm_weight(noise, band)
    eps_BTD = torch.randn(shape, generator=generator, device=device)
    return DrawnNoise(sigma_B=sigma_B, null_B=null_B, weight_B=weight_B, eps_BTD=eps_BTD)


def denoising_loss(net: Net, x_BT: Tensor, y_BT: Tensor, target_VD: Tensor, drawn: DrawnNoise) -> Losses:
    """The loss of one batch under noise already drawn: mean over B of weight × mean over T of −log p(y)."""
    z_BTD = noisy_targets(y_BT, target_VD, drawn)
    logits_BTV = net(x_BT, z_BTD, drawn.sigma_B)
    ce_N = F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten(), reduction="none")
    ce_B = ce_N.view(y_BT.shape).mean(dim=1)
    return Losses(loss=(drawn.weight_B * ce_B).mean(), denoising_ce=ce_B.detach().mean())


def noisy_targets(y_BT: Tensor, target_VD: Tensor, drawn: DrawnNoise) -> Tensor:
    """z_BTD = e_y + σ ε, and 0 where the sequence trains without evidence."""
    z_BTD = torch.addcmul(F.embedding(y_BT, target_VD), drawn.sigma_B[:, None, None], drawn.eps_BTD)
    return z_BTD.masked_fill(drawn.null_B[:, None, None], 0)


@functools.lru_cache(maxsize=64)
def mean_edm_weight(noise: NoiseSpec, band: Band) -> float:
    """Mean of EDM's weight over the σ that the band trains on, by which the weight is normalised."""
    return edm.weight(band_quantiles(band, noise, _QUADRATURE_POINTS), noise.sigma_data).mean().item()
