"""One residual denoising block: what a node trains.

A block predicts the next token y at every position from the text x and a noisy embedding
z = e_y + σ ε. Three heads turn its features into logits:

- `plain`: W_o LN(h) + b.
- `bayes`: that plus g·(z Eᵀ)/σ². For unit-norm targets, log p(z | y) = z·e_y/σ² + const, so with
  g = 1 the sum is Bayes' rule exactly, and the network only has to learn log p(y | x).
- `edm`: W_o D + b with D = c_skip z + c_out LN(h), the preconditioned denoiser (EDM, equation 7).

Shapes: B = sequences, T = positions, D = d_model, V = vocabulary, J = half a head's width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.model import edm
from blocktrain.model.layers import Layer, layer_norm, rope_angles, zeros
from blocktrain.protocol.spec import ModelSpec

NOISE_FREQUENCIES = 16


class Block(nn.Module):
    """Layers, noise condition and output head of one block, all parameters zero until loaded or initialised.

    The embedding table is no parameter of the block: all blocks share it, and it travels on its own.
    """

    cos_T11J: Tensor
    sin_T11J: Tensor
    frequencies: Tensor

    def __init__(self, model: ModelSpec, sigma_data: float) -> None:
        """Allocate for the given shape; σ_data is that of the run's noise."""
        super().__init__()
        self.model, self.sigma_data = model, sigma_data
        width, vocabulary = model.d_model, model.vocabulary_size
        self.condition_in = zeros(width, 2 * NOISE_FREQUENCIES)
        self.condition_in_bias = zeros(width)
        self.condition_out = zeros(width, width)
        self.condition_out_bias = zeros(width)
        self.noisy_in = zeros(width, width)
        self.layers = nn.ModuleList(Layer(width, model.heads) for _ in range(model.layers))
        self.out = zeros(vocabulary, width)
        self.out_bias = zeros(vocabulary)
        if model.head == "bayes":
            self.gain = zeros(1)
        cos, sin = rope_angles(model.context, width // model.heads)
        self.register_buffer("cos_T11J", cos, persistent=False)
        self.register_buffer("sin_T11J", sin, persistent=False)
        frequencies = torch.exp(torch.linspace(0, 4, NOISE_FREQUENCIES))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(
        self, x_BT: Tensor, z_BTD: Tensor, sigma_B: Tensor, table_VD: Tensor, target_VD: Tensor
    ) -> Tensor:
        """Logits_BTV (float32) of the next token at every position; T may be up to the context.

        `table_VD` embeds x; `target_VD` holds the unit-norm rows that z was made from.
        """
        positions = x_BT.shape[1]
        assert positions <= self.model.context, f"{positions} positions, context {self.model.context}"
        cos, sin = self.cos_T11J[:positions], self.sin_T11J[:positions]
        sigma_B11 = sigma_B[:, None, None]
        scaled_BTD = z_BTD * edm.c_in(sigma_B11, self.sigma_data)
        h_BTD = F.embedding(x_BT, table_VD) + F.linear(scaled_BTD, self.noisy_in)
        c_BD = self._condition(sigma_B)
        for layer in self.layers:
            h_BTD = layer(h_BTD, c_BD, cos, sin)
        return self._head(layer_norm(h_BTD), z_BTD, sigma_B11, target_VD)

    def _condition(self, sigma_B: Tensor) -> Tensor:
        """c = SiLU(W₂ SiLU(W₁ φ(c_noise))), φ = cos and sin at 16 frequencies exp(0 … 4)."""
        angle_BF = edm.c_noise(sigma_B)[:, None] * self.frequencies
        phi_BF = torch.cat((angle_BF.cos(), angle_BF.sin()), dim=-1)
        hidden_BD = F.silu(F.linear(phi_BF, self.condition_in, self.condition_in_bias))
        return F.silu(F.linear(hidden_BD, self.condition_out, self.condition_out_bias))

    def _head(self, f_BTD: Tensor, z_BTD: Tensor, sigma_B11: Tensor, target_VD: Tensor) -> Tensor:
        if self.model.head == "edm":
            skip, out = (c(sigma_B11, self.sigma_data) for c in (edm.c_skip, edm.c_out))
            f_BTD = skip * z_BTD + out * f_BTD
        logits_BTV = F.linear(f_BTD, self.out, self.out_bias)
        if self.model.head == "bayes":
            logits_BTV = logits_BTV + F.linear(z_BTD * (self.gain / sigma_B11.square()), target_VD)
        return logits_BTV.float()
