"""The state a run starts from, equal on every machine: a function of the run's seed alone.

Drawn on the CPU with numpy, whose streams depend neither on the processor's vector width nor on
any global state.

Shapes: D = d_model, V = vocabulary.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.model.block import Block
from blocktrain.model.layers import Layer
from blocktrain.protocol.spec import RunSpec

_BLOCK, _TABLE, _TARGET = range(3)
_OUTPUT_STD = 0.02
_TABLE_STD = 0.5


def initial_block(spec: RunSpec, index: int) -> Block:
    """Block `index` at step 0, on the CPU.

    Attention and MLP outputs and the head are N(0, 0.02²), other matrices uniform in ±1/√fan-in;
    W_z, the AdaLN maps and all biases are zero, so that every layer starts as the identity; g = 1.
    """
    assert 0 <= index < spec.model.blocks
    rng = _generator(spec.seed, _BLOCK, index)
    block = Block(spec.model, spec.noise.sigma_data)
    with torch.no_grad():
        for matrix in (block.condition_in, block.condition_out):
            _fill_uniform(matrix, rng)
        for layer in block.layers:
            assert isinstance(layer, Layer)
            for matrix in (layer.qkv, layer.mlp_in):
                _fill_uniform(matrix, rng)
            for matrix in (layer.attention_out, layer.mlp_out):
                matrix.copy_(_normal(matrix.shape, _OUTPUT_STD, rng))
        block.out.copy_(_normal(block.out.shape, _OUTPUT_STD, rng))
        if spec.model.head == "bayes":
            block.gain.fill_(1)
    return block


def initial_table(spec: RunSpec) -> Tensor:
    """The shared embedding table E at step 0: (V, D) float32 on the CPU, N(0, 0.5²)."""
    shape = (spec.model.vocabulary_size, spec.model.d_model)
    return _normal(shape, _TABLE_STD, _generator(spec.seed, _TABLE))


def target_rows(spec: RunSpec, table_VD: Tensor) -> Tensor:
    """The unit-norm rows e_y that noise is added to, (V, D) on the table's device.

    `target = "shared"`: the table's rows, normalised (differentiable). `"frozen"`: random directions
    made from the run's seed, whatever the table holds. Unit norm bounds the evidence about y in z
    to ‖e‖²/σ² = 1/σ² nats; longer rows would give the target away.
    """
    if spec.model.target == "shared":
        return F.normalize(table_VD, dim=-1)
    rows_VD = _frozen_rows(spec.seed, spec.model.vocabulary_size, spec.model.d_model)
    return rows_VD.to(table_VD.device)


@functools.lru_cache(maxsize=4)
def _frozen_rows(seed: int, vocabulary: int, width: int) -> Tensor:
    # The first caller may be an evaluation, but training needs the cached rows too.
    with torch.inference_mode(False):
        return F.normalize(_normal((vocabulary, width), 1.0, _generator(seed, _TARGET)), dim=-1)


def _generator(seed: int, purpose: int, index: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(purpose, index))))


def _normal(shape: tuple[int, ...], std: float, rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).mul_(std)


def _fill_uniform(matrix_OI: nn.Parameter, rng: np.random.Generator) -> None:
    bound = 1 / math.sqrt(matrix_OI.shape[1])
    share_OI = torch.from_numpy(rng.random(matrix_OI.shape, dtype=np.float32))
    matrix_OI.copy_(share_OI.mul_(2 * bound).sub_(bound))
