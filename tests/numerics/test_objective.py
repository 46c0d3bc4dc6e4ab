"""The loss is the recipe's: z = e_y + σ ε, null evidence, weights of mean 1."""

from __future__ import annotations

import pytest
import torch

from blocktrain.model import edm
from blocktrain.model.bands import noise_bands
from blocktrain.model.objective import DrawnNoise, denoising_loss, draw_noise, mean_edm_weight, noisy_targets
from blocktrain.protocol.spec import NoiseSpec

BATCH, POSITIONS, WIDTH = 6, 5, 8


def draw(noise: NoiseSpec, seed: int = 0, batch: int = BATCH, block: int = 1) -> DrawnNoise:
    generator = torch.Generator().manual_seed(seed)
    return draw_noise(noise, noise_bands(noise, 3)[block], (batch, POSITIONS, WIDTH), generator)


def test_z_is_target_plus_scaled_noise_and_zero_without_evidence() -> None:
    drawn = draw(NoiseSpec(null_fraction=0.5))
    target_VD = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(1))
    y_BT = torch.arange(BATCH * POSITIONS).view(BATCH, POSITIONS) % 10
    z_BTD = noisy_targets(y_BT, target_VD, drawn)
    for b in range(BATCH):
        expected = torch.zeros(POSITIONS, WIDTH)
        if not drawn.null_B[b]:
            expected = target_VD[y_BT[b]] + drawn.sigma_B[b] * drawn.eps_BTD[b]
        assert torch.allclose(z_BTD[b], expected)


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.5, 3), (1.0, 6)])
def test_null_evidence_takes_its_share_at_the_bands_top(fraction: float, count: int) -> None:
    noise = NoiseSpec(null_fraction=fraction)
    drawn, band = draw(noise), noise_bands(noise, 3)[1]
    assert drawn.null_B.sum() == count
    assert torch.allclose(drawn.sigma_B[drawn.null_B], torch.tensor(band.top))
    noisy_B = drawn.sigma_B[~drawn.null_B]
    assert ((noisy_B >= band.low) & (noisy_B <= band.high)).all()


def test_a_fractional_share_is_met_on_average() -> None:
    counts = [draw(NoiseSpec(null_fraction=0.3), seed, batch=1).null_B.sum().item() for seed in range(400)]
    assert sum(counts) / 400 == pytest.approx(0.3, abs=0.06)


def test_uniform_weighting_gives_the_plain_cross_entropy() -> None:
    logits_BTV = torch.randn(BATCH, POSITIONS, 10, generator=torch.Generator().manual_seed(2))
    y_BT = torch.arange(BATCH * POSITIONS).view(BATCH, POSITIONS) % 10
    losses = denoising_loss(lambda x, z, s: logits_BTV, y_BT, y_BT, torch.zeros(10, WIDTH), draw(NoiseSpec()))
    by_hand = -logits_BTV.log_softmax(-1).gather(-1, y_BT[..., None]).mean()
    assert torch.allclose(losses.loss, by_hand)
    assert torch.allclose(losses.denoising_ce, by_hand)


def test_edm_weighting_weighs_sequences_but_not_the_shown_value() -> None:
    noise = NoiseSpec(weighting="edm", null_fraction=0, sigma_min=0.1)
    drawn, band = draw(noise, block=2), noise_bands(noise, 3)[2]
    logits_BTV = torch.randn(BATCH, POSITIONS, 10, generator=torch.Generator().manual_seed(2))
    y_BT = torch.arange(BATCH * POSITIONS).view(BATCH, POSITIONS) % 10
    losses = denoising_loss(lambda x, z, s: logits_BTV, y_BT, y_BT, torch.zeros(10, WIDTH), drawn)
    ce_B = -logits_BTV.log_softmax(-1).gather(-1, y_BT[..., None]).mean(dim=(1, 2))
    weight_B = edm.weight(drawn.sigma_B, noise.sigma_data) / mean_edm_weight(noise, band)
    assert weight_B.std() > 0.1
    assert torch.allclose(losses.loss, (weight_B * ce_B).mean())
    assert torch.allclose(losses.denoising_ce, ce_B.mean())


def test_edm_weights_have_mean_one_in_the_band() -> None:
    noise = NoiseSpec(weighting="edm", null_fraction=0, sigma_min=0.1)
    assert draw(noise, batch=20_000, block=2).weight_B.mean().item() == pytest.approx(1, abs=0.01)
