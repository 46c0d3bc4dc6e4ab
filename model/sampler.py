"""Writing text with the composed model, a byte at a time.

Shapes: T = positions, V = vocabulary.
"""

from __future__ import annotations

import torch

from blocktrain.model.composition import ENSEMBLE, LocalModel, Readout, compose


@torch.inference_mode()
def sample_bytes(
    model: LocalModel,
    prompt: bytes,
    length: int,
    generator: torch.Generator,
    *,
    temperature: float = 1.0,
    readout: Readout = ENSEMBLE,
) -> bytes:
    """`length` bytes that follow `prompt` (which must not be empty), drawn from the composed distribution.

    The model sees the last `context` bytes at each of them. Temperature 0 takes the likeliest byte.
    """
    assert prompt, "the model needs at least one byte to follow"
    context, device = model.spec.model.context, model.tables[0].device
    written = bytearray(prompt)
    for _ in range(length):
        x_1T = torch.tensor([list(written[-context:])], device=device)
        log_probs_V = compose(model.denoise, model.targets, x_1T, readout, generator, model.spec)[0, -1]
        if temperature > 0:
            probs_V = (log_probs_V / temperature).softmax(dim=-1).to(generator.device)
            written.append(int(torch.multinomial(probs_V, 1, generator=generator)))
        else:
            written.append(int(log_probs_V.argmax()))
    return bytes(written[len(prompt) :])
