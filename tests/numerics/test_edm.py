"""EDM's preconditioning has the limits that define it."""

from __future__ import annotations

import math

import torch

from blocktrain.model import edm

DATA = 0.5
SIGMAS = torch.logspace(-4, 4, 33, dtype=torch.float64)
TINY, HUGE = torch.tensor([1e-6], dtype=torch.float64), torch.tensor([1e6], dtype=torch.float64)


def close(a: torch.Tensor, b: torch.Tensor | float) -> bool:
    return torch.allclose(a, torch.as_tensor(b, dtype=a.dtype), rtol=1e-9, atol=1e-11)


def test_without_noise_the_input_passes_and_the_network_is_ignored() -> None:
    assert close(edm.c_skip(TINY, DATA), 1 - (1e-6 / DATA) ** 2)
    assert close(edm.c_out(TINY, DATA), 1e-6)


def test_under_pure_noise_the_network_alone_speaks_at_the_datas_scale() -> None:
    assert close(edm.c_skip(HUGE, DATA), 0.0)
    assert close(edm.c_out(HUGE, DATA), DATA)


def test_the_networks_input_has_unit_variance() -> None:
    assert close(edm.c_in(SIGMAS, DATA).square() * (SIGMAS.square() + DATA**2), 1.0)


def test_the_networks_target_has_unit_variance() -> None:
    """EDM appendix B.6: c_out² = (1 − c_skip)² σ_data² + c_skip² σ²."""
    skip = edm.c_skip(SIGMAS, DATA)
    variance = (1 - skip).square() * DATA**2 + skip.square() * SIGMAS.square()
    assert torch.allclose(edm.c_out(SIGMAS, DATA).square(), variance, rtol=1e-7)


def test_the_weight_undoes_the_output_scale() -> None:
    assert close(edm.weight(SIGMAS, DATA) * edm.c_out(SIGMAS, DATA).square(), 1.0)


def test_the_weight_is_nearly_constant_over_the_default_range() -> None:
    weights = edm.weight(torch.tensor([1.0, 10.0], dtype=torch.float64), DATA)
    assert close(weights, torch.tensor([5.0, 4.01], dtype=torch.float64))


def test_the_noise_label_is_a_quarter_of_the_logarithm() -> None:
    assert close(edm.c_noise(torch.tensor([math.e**4], dtype=torch.float64)), 1.0)
