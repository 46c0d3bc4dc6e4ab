"""AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101) and its learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blocktrain.model.block import Block
from blocktrain.protocol.spec import OptimizerSpec

_FINAL_SHARE = 0.1


def make_optimizer(opt: OptimizerSpec, block: Block, table_VD: Tensor) -> torch.optim.AdamW:
    """torch's own AdamW over a block and its table.

    Matrices of the block decay; its biases and its gain, and the table, whose rows serve as
    targets, don't. The fused step is used where torch has one.
    """
    parameters = list(block.parameters())
    matrices = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": opt.weight_decay},
        {"params": [*others, table_VD], "weight_decay": 0.0},
    ]
    fused = table_VD.device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=opt.lr, betas=(opt.beta1, opt.beta2), eps=opt.eps, fused=fused)


def learning_rate(opt: OptimizerSpec, step: int) -> float:
    """The rate of local step `step` (0 is the first).

    Rises linearly over `warmup_steps` and reaches lr in the last of them; then stays (`constant`) or
    falls by half a cosine to a tenth of lr at `total_steps`, where it stays (`cosine`).
    """
    if step < opt.warmup_steps:
        return opt.lr * (step + 1) / opt.warmup_steps
    if opt.schedule == "constant":
        return opt.lr
    span = max(1, opt.total_steps - opt.warmup_steps)
    progress = min(1.0, (step - opt.warmup_steps) / span)
    return opt.lr * (_FINAL_SHARE + (1 - _FINAL_SHARE) * (1 + math.cos(math.pi * progress)) / 2)
