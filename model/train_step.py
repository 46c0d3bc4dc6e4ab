"""One local step of a node: loss, gradient, clipping, AdamW. Touches nothing outside its learner.

Shapes: B = sequences, T = positions, D = d_model, V = vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktrain.model.bands import noise_bands
from blocktrain.model.block import Block
from blocktrain.model.initial import initial_block, initial_table, target_rows
from blocktrain.model.objective import Losses, denoising_loss, draw_noise
from blocktrain.model.optim import learning_rate, make_optimizer
from blocktrain.protocol.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Learner:
    """What a node trains: one block and its copy of the shared table, changed in place by `train_step`."""

    spec: RunSpec
    index: int
    """Which block this is, from 0; decides the noise band."""
    block: Block
    table_VD: Tensor
    """A leaf tensor that requires gradients."""
    optimizer: torch.optim.AdamW

    @classmethod
    def initial(cls, spec: RunSpec, index: int, device: torch.device) -> Learner:
        """The learner at step 0, from the run's seed."""
        block = initial_block(spec, index).to(device)
        table_VD = initial_table(spec).to(device).requires_grad_()
        return cls(spec, index, block, table_VD, make_optimizer(spec.optimizer, block, table_VD))

    @property
    def parameters(self) -> list[Tensor]:
        """All tensors that a step changes: the block's, then the table."""
        return [*self.block.parameters(), self.table_VD]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one local step did."""

    denoising_ce: float
    """Unweighted loss in nats per token; z was made from y, so this is no measure of the model."""
    loss: float
    """The weighted loss that was differentiated."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    applied: bool
    """False: the loss or the gradient was not finite, and nothing was changed."""


def train_step(learner: Learner, windows_BT1: Tensor, step: int, generator: torch.Generator) -> StepResult:
    """Train on one batch of B sequences of T + 1 tokens (uint8 or int64).

    `step` (0 is the first) sets the learning rate; `generator` is the only randomness, so equal
    arguments give equal bits on a CPU. Noise is drawn where the generator lives.
    """
    opt = learner.spec.optimizer
    losses = _losses(learner, windows_BT1, generator)
    losses.loss.backward()  # type: ignore[no-untyped-call]
    max_norm = opt.grad_clip if opt.grad_clip > 0 else math.inf
    grad_norm = torch.nn.utils.clip_grad_norm_(learner.parameters, max_norm).item()
    loss = losses.loss.item()
    applied = math.isfinite(loss) and math.isfinite(grad_norm)
    if applied:
        for group in learner.optimizer.param_groups:
            group["lr"] = learning_rate(opt, step)
        learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return StepResult(losses.denoising_ce.item(), loss, grad_norm, applied)


def _losses(learner: Learner, windows_BT1: Tensor, generator: torch.Generator) -> Losses:
    spec, table_VD = learner.spec, learner.table_VD
    device = table_VD.device
    windows_BT1 = windows_BT1.to(device, torch.int64)
    x_BT, y_BT = windows_BT1[:, :-1], windows_BT1[:, 1:]
    band = noise_bands(spec.noise, spec.model.blocks)[learner.index]
    drawn = draw_noise(spec.noise, band, (*x_BT.shape, spec.model.d_model), generator).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        target_VD = target_rows(spec, table_VD)

        def net(x_BT: Tensor, z_BTD: Tensor, sigma_B: Tensor) -> Tensor:
            logits_BTV: Tensor = learner.block(x_BT, z_BTD, sigma_B, table_VD, target_VD)
            return logits_BTV

        return denoising_loss(net, x_BT, y_BT, target_VD, drawn)
