"""Honest evaluation: the composed model's cross-entropy on text that it is shown once, left to right.

Shapes: N = windows, B = windows in a batch, T = positions, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blocktrain.model.composition import LocalModel, compose_all, parse_readout

Progress = Callable[[int, int], None]
"""Called with the windows done and all windows, after every batch."""

TOKENS_PER_BATCH = 4096
"""Bounds the memory for logits, whatever the context."""


@torch.inference_mode()
def honest_ce(
    model: LocalModel,
    windows_NT1: Tensor,
    readouts: Sequence[str],
    generator: torch.Generator,
    on_progress: Progress | None = None,
) -> dict[str, float]:
    """Cross-entropy in nats per token (bytes: per byte) of every readout, by its name.

    `windows_NT1` holds N ≥ 1 sequences of T + 1 tokens (uint8 or int64): the model sees the first T
    and its prediction at each is compared here, outside the composition, with the token after it.

    Raises:
        UsageError: a readout does not exist.
    """
    assert len(windows_NT1) > 0, "nothing to evaluate on"
    spec, device = model.spec, model.tables[0].device
    parsed = [parse_readout(text, spec.model.blocks) for text in readouts]
    targets, total = model.targets, len(windows_NT1)
    nats = torch.zeros(len(parsed), dtype=torch.float64)
    size = max(1, TOKENS_PER_BATCH // (windows_NT1.shape[1] - 1))
    for start in range(0, total, size):
        batch_BT1 = windows_NT1[start : start + size].to(device, torch.int64)
        x_BT, y_BT1 = batch_BT1[:, :-1], batch_BT1[:, 1:, None]
        answers = compose_all(model.denoise, targets, x_BT, parsed, generator, spec)
        for i, log_probs_BTV in enumerate(answers):
            nats[i] -= log_probs_BTV.gather(-1, y_BT1).sum(dtype=torch.float64).cpu()
        if on_progress is not None:
            on_progress(min(start + size, total), total)
    tokens = total * (windows_NT1.shape[1] - 1)
    return dict(zip(readouts, (nats / tokens).tolist(), strict=True))
