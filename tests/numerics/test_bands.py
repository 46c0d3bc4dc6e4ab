"""Noise bands tile the range, have equal mass, and are sampled as defined."""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.model.bands import Band, band_quantiles, noise_bands, sample_sigma, sweep_nodes
from blocktrain.protocol.errors import SpecError
from blocktrain.protocol.spec import NoiseSpec


def mass(noise: NoiseSpec, low: float, high: float) -> float:
    """Probability of [low, high] under the lognormal, by the standard library."""
    normal = NormalDist(noise.p_mean, noise.p_std)
    return normal.cdf(math.log(high)) - normal.cdf(math.log(low))


def test_three_bands_have_the_recipes_edges_and_block_0_the_highest() -> None:
    bands = noise_bands(NoiseSpec(), 3)
    assert [band.top for band in bands] == pytest.approx([10, 2.071, 1.344], abs=5e-4)
    assert [band.bottom for band in bands] == pytest.approx([2.071, 1.344, 1], abs=5e-4)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(1, 12),
    low=st.floats(0.05, 2),
    ratio=st.floats(1.5, 100),
    p_mean=st.floats(-2, 2),
    gamma=st.floats(0, 1),
)
def test_bands_tile_with_equal_mass_and_widen_within_the_range(
    blocks: int, low: float, ratio: float, p_mean: float, gamma: float
) -> None:
    noise = NoiseSpec(sigma_min=low, sigma_max=low * ratio, p_mean=p_mean, gamma=gamma)
    bands = noise_bands(noise, blocks)
    assert bands[0].top == noise.sigma_max
    assert bands[-1].bottom == noise.sigma_min
    assert all(upper.bottom == lower.top for upper, lower in itertools.pairwise(bands))
    share = mass(noise, noise.sigma_min, noise.sigma_max) / blocks
    for band in bands:
        assert mass(noise, band.bottom, band.top) == pytest.approx(share, rel=1e-5, abs=1e-12)
        assert noise.sigma_min <= band.low <= band.bottom < band.top <= band.high <= noise.sigma_max


def test_a_band_widens_by_gamma_of_its_log_width() -> None:
    noise = NoiseSpec(gamma=0.1)
    middle = noise_bands(noise, 3)[1]
    width = math.log(middle.top / middle.bottom)
    assert math.log(middle.bottom / middle.low) == pytest.approx(0.1 * width)
    assert math.log(middle.high / middle.top) == pytest.approx(0.1 * width)


def test_sweep_nodes_are_the_descending_edges_of_the_bands() -> None:
    nodes, bands = sweep_nodes(NoiseSpec(), 5), noise_bands(NoiseSpec(), 5)
    assert nodes == (*(band.top for band in bands), bands[-1].bottom)
    assert list(nodes) == sorted(nodes, reverse=True)


def test_samples_follow_the_truncated_lognormal() -> None:
    noise = NoiseSpec()
    band = noise_bands(noise, 3)[0]
    sigma_B = sample_sigma(band, noise, 20_000, torch.Generator().manual_seed(0)).sort().values
    assert band.low <= sigma_B[0]
    assert sigma_B[-1] <= band.high
    total = mass(noise, band.low, band.high)
    cdf = [mass(noise, band.low, s) / total for s in sigma_B[999::1000].tolist()]
    assert cdf == pytest.approx([(i + 1) / 20 for i in range(20)], abs=0.015)
    median = band_quantiles(band, noise, 1).item()
    assert mass(noise, band.low, median) == pytest.approx(total / 2)


def test_far_tails_keep_their_digits() -> None:
    """Fifteen standard deviations above the mean the CDF itself is 1 to double precision."""
    noise = NoiseSpec(sigma_min=math.exp(1.5), sigma_max=math.exp(1.6), p_mean=0, p_std=0.1)
    (_, cut, _) = sweep_nodes(noise, 2)
    upper = [math.erfc(math.log(s) / 0.1 / math.sqrt(2)) for s in (noise.sigma_min, cut, noise.sigma_max)]
    assert upper[0] - upper[1] == pytest.approx(upper[1] - upper[2], rel=1e-6)


@pytest.mark.parametrize(
    "noise",
    [NoiseSpec(p_mean=-20, p_std=0.01), NoiseSpec(sigma_min=1, sigma_max=math.nextafter(1, 2))],
    ids=["no-mass", "no-width"],
)
def test_a_range_without_room_for_bands_is_a_spec_error(noise: NoiseSpec) -> None:
    with pytest.raises(SpecError, match=r"^noise\.(p_mean|sigma_max): "):
        noise_bands(noise, 3)


def test_equal_generators_give_equal_sigmas() -> None:
    band = Band(bottom=1, top=2, low=1, high=2)
    first, second = (sample_sigma(band, NoiseSpec(), 8, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
