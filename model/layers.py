"""One transformer layer: causal attention and MLP, modulated by the noise level (AdaLN-zero).

AdaLN-zero is from DiT (Peebles and Xie 2022, arXiv 2212.09748), rotary positions (RoPE) from
Su et al. 2021 (arXiv 2104.09864). Parameters start as zeros; `initial.py` fills them.

Shapes: B = sequences, T = positions, D = d_model, H = heads, K = D/H, J = K/2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def zeros(*shape: int) -> nn.Parameter:
    """A trainable float32 parameter of zeros."""
    return nn.Parameter(torch.zeros(*shape))


def layer_norm(h_BTD: Tensor) -> Tensor:
    """Normalise each position; without gain or bias, which AdaLN or the output head supply."""
    return F.layer_norm(h_BTD, h_BTD.shape[-1:])


def rope_angles(positions: int, head_width: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position × 10000^(−j/J), as (T, 1, 1, J) each, ready for `rotate`."""
    rate_J = 10_000.0 ** -(torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angle_T11J = torch.outer(torch.arange(positions, dtype=torch.float64), rate_J)[:, None, None, :]
    return angle_T11J.cos().float(), angle_T11J.sin().float()


def rotate(x_BTSHK: Tensor, cos_T11J: Tensor, sin_T11J: Tensor) -> Tensor:
    """Rotate the pairs (k, k + J) of S stacked query and key vectors by their positions' angles."""
    a, b = x_BTSHK.chunk(2, dim=-1)
    return torch.cat((a * cos_T11J - b * sin_T11J, b * cos_T11J + a * sin_T11J), dim=-1)


class Layer(nn.Module):
    """h ← h + gate·attention(AdaLN(h)); h ← h + gate·MLP(AdaLN(h)). With zero gates: the identity."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ada = zeros(6 * d_model, d_model)
        self.ada_bias = zeros(6 * d_model)
        self.qkv = zeros(3 * d_model, d_model)
        self.attention_out = zeros(d_model, d_model)
        self.mlp_in = zeros(4 * d_model, d_model)
        self.mlp_out = zeros(d_model, 4 * d_model)

    def forward(self, h_BTD: Tensor, c_BD: Tensor, cos_T11J: Tensor, sin_T11J: Tensor) -> Tensor:
        """Return the next h_BTD, given the noise condition c_BD and the angles of `rope_angles`."""
        ada_B1D = F.linear(c_BD, self.ada, self.ada_bias).unsqueeze(1).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = ada_B1D
        a_BTD = torch.addcmul(shift1, layer_norm(h_BTD), 1 + scale1)
        h_BTD = torch.addcmul(h_BTD, gate1, self._attention(a_BTD, cos_T11J, sin_T11J))
        m_BTD = torch.addcmul(shift2, layer_norm(h_BTD), 1 + scale2)
        m_BTD = F.linear(F.gelu(F.linear(m_BTD, self.mlp_in)), self.mlp_out)
        return torch.addcmul(h_BTD, gate2, m_BTD)

    def _attention(self, a_BTD: Tensor, cos_T11J: Tensor, sin_T11J: Tensor) -> Tensor:
        batch, positions, width = a_BTD.shape
        qkv_BT3HK = F.linear(a_BTD, self.qkv).view(batch, positions, 3, self.heads, -1)
        qk_BT2HK = rotate(qkv_BT3HK[:, :, :2], cos_T11J, sin_T11J).to(qkv_BT3HK.dtype)
        q_BHTK, k_BHTK = (x.transpose(1, 2) for x in qk_BT2HK.unbind(2))
        v_BHTK = qkv_BT3HK[:, :, 2].transpose(1, 2)
        o_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return F.linear(o_BHTK.transpose(1, 2).reshape(batch, positions, width), self.attention_out)
