"""A block's parameters as one float32 vector on the CPU, which is what rounds and anchors are made of.

N: number of parameters of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from blocktrain.protocol.tensors import digest


class ParameterVector:
    """The layout of a module's parameters in a vector: in order of their names."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = dict(sorted(module.named_parameters()))
        """The parameters themselves, by name."""
        self.size = sum(p.numel() for p in self.parameters.values())

    def _spans(self) -> Iterator[tuple[str, Tensor, int, int]]:
        start = 0
        for name, parameter in self.parameters.items():
            yield name, parameter, start, start + parameter.numel()
            start += parameter.numel()

    @torch.no_grad()
    def read(self) -> np.ndarray:
        """A copy of all parameters, (N,)."""
        values_N = np.empty(self.size, np.float32)
        target = torch.from_numpy(values_N)
        for _, parameter, start, stop in self._spans():
            target[start:stop].copy_(parameter.reshape(-1))
        return values_N

    @torch.no_grad()
    def write(self, values_N: np.ndarray) -> None:
        """Set all parameters."""
        source = torch.from_numpy(values_N)
        for _, parameter, start, stop in self._spans():
            parameter.copy_(source[start:stop].view(parameter.shape))

    @torch.no_grad()
    def add(self, difference_N: np.ndarray) -> None:
        """Add a difference to all parameters."""
        source = torch.from_numpy(difference_N)
        for _, parameter, start, stop in self._spans():
            parameter.add_(source[start:stop].view(parameter.shape).to(parameter.device))

    def named(self, values_N: np.ndarray) -> dict[str, Tensor]:
        """Views of a vector under the parameters' names and shapes."""
        source = torch.from_numpy(values_N)
        return {name: source[start:stop].view(p.shape) for name, p, start, stop in self._spans()}

    def join(self, tensors: dict[str, Tensor]) -> np.ndarray:
        """The vector of tensors that have the parameters' names and shapes, (N,)."""
        values_N = np.empty(self.size, np.float32)
        target = torch.from_numpy(values_N)
        for name, _, start, stop in self._spans():
            target[start:stop].copy_(tensors[name].reshape(-1))
        return values_N


def anchor_digest(values_N: np.ndarray) -> str:
    """The name of an anchor: 32 hexadecimal digits of the SHA-256 of its float32 values."""
    return digest(np.ascontiguousarray(values_N, "<f4").data.cast("B"))
