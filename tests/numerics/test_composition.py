"""Composition equals a loop written by hand, and names of readouts are checked."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from blocktrain.model.bands import noise_bands
from blocktrain.model.composition import LocalModel, Readout, compose, compose_all, parse_readout
from blocktrain.model.evaluate import honest_ce
from blocktrain.protocol.errors import UsageError
from blocktrain.protocol.spec import RunSpec

MakeSpec = Callable[..., RunSpec]
MakeModel = Callable[[RunSpec], LocalModel]


@pytest.fixture
def model(make_spec: MakeSpec, make_random_model: MakeModel) -> LocalModel:
    return make_random_model(make_spec())


@pytest.fixture
def x_BT() -> torch.Tensor:
    return torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(4))


def read(model: LocalModel, x_BT: torch.Tensor, text: str, seed: int = 0) -> torch.Tensor:
    readout = parse_readout(text, model.spec.model.blocks)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        return compose(model.denoise, model.targets, x_BT, readout, generator, model.spec)


@torch.no_grad()
def sweep_by_hand(model: LocalModel, x_BT: torch.Tensor, z_BTD: torch.Tensor) -> torch.Tensor:
    """Three blocks, three steps of Euler's method, written out."""
    s0, s1, s2 = (band.top for band in noise_bands(model.spec.noise, 3))
    ones_B = torch.ones(len(x_BT))
    p0_BTV = model.denoise(0, x_BT, z_BTD, s0 * ones_B).softmax(-1)
    z_BTD = z_BTD + (s1 - s0) * (z_BTD - p0_BTV @ model.targets[0]) / s0
    p1_BTV = model.denoise(1, x_BT, z_BTD, s1 * ones_B).softmax(-1)
    z_BTD = z_BTD + (s2 - s1) * (z_BTD - p1_BTV @ model.targets[1]) / s1
    return model.denoise(2, x_BT, z_BTD, s2 * ones_B).softmax(-1)


def start(model: LocalModel, x_BT: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return model.spec.noise.sigma_max * torch.randn(
        *x_BT.shape, model.spec.model.d_model, generator=generator
    )


def test_euler_from_zero_equals_the_loop_by_hand(model: LocalModel, x_BT: torch.Tensor) -> None:
    by_hand = sweep_by_hand(model, x_BT, torch.zeros(*x_BT.shape, model.spec.model.d_model))
    assert torch.allclose(read(model, x_BT, "euler-zero").exp(), by_hand, atol=1e-5)


def test_euler_from_noise_equals_the_loop_by_hand(model: LocalModel, x_BT: torch.Tensor) -> None:
    z_BTD = start(model, x_BT, torch.Generator().manual_seed(9))
    by_hand = sweep_by_hand(model, x_BT, z_BTD)
    assert torch.allclose(read(model, x_BT, "euler-noise", seed=9).exp(), by_hand, atol=1e-5)


def test_several_draws_give_their_mean_probability(model: LocalModel, x_BT: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(9)
    draws = [sweep_by_hand(model, x_BT, start(model, x_BT, generator)) for _ in range(3)]
    mean_BTV = torch.stack(draws).mean(dim=0)
    assert torch.allclose(read(model, x_BT, "euler-noise:3", seed=9).exp(), mean_BTV, atol=1e-5)


@torch.no_grad()
def test_ensemble_is_the_normalised_mean_of_the_blocks_alone(model: LocalModel, x_BT: torch.Tensor) -> None:
    null_BTD, alone = torch.zeros(*x_BT.shape, model.spec.model.d_model), []
    for i, band in enumerate(noise_bands(model.spec.noise, 3)):
        log_probs_BTV = model.denoise(i, x_BT, null_BTD, torch.full((len(x_BT),), band.top)).log_softmax(-1)
        assert torch.allclose(read(model, x_BT, f"block:{i}"), log_probs_BTV, atol=1e-5)
        alone.append(log_probs_BTV)
    mean_BTV = torch.stack(alone).mean(dim=0).exp()
    mean_BTV /= mean_BTV.sum(dim=-1, keepdim=True)
    assert torch.allclose(read(model, x_BT, "ensemble").exp(), mean_BTV, atol=1e-6)


@pytest.mark.parametrize("text", ["ensemble", "euler-zero", "euler-noise", "euler-noise:4", "block:1"])
def test_every_readout_is_a_distribution(model: LocalModel, x_BT: torch.Tensor, text: str) -> None:
    total_BT = read(model, x_BT, text).exp().sum(dim=-1)
    assert torch.allclose(total_BT, torch.ones_like(total_BT), atol=1e-5)


def test_blocks_alone_are_asked_once_for_all_readouts(model: LocalModel, x_BT: torch.Tensor) -> None:
    asked: list[int] = []

    def counting(block: int, x: torch.Tensor, z: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        asked.append(block)
        return model.denoise(block, x, z, sigma)

    readouts = [parse_readout(text, 3) for text in ("ensemble", "block:0", "block:1", "block:2")]
    compose_all(counting, model.targets, x_BT, readouts, torch.Generator(), model.spec)
    assert sorted(asked) == [0, 1, 2]


def test_honest_ce_is_the_mean_surprise_over_batches(
    make_spec: MakeSpec, make_random_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blocktrain.model.evaluate.TOKENS_PER_BATCH", 32)
    model, seen = make_random_model(make_spec()), []
    windows_NT1 = torch.randint(0, 256, (5, 17), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    ce = honest_ce(
        model, windows_NT1, ["ensemble", "block:2"], torch.Generator(), lambda *at: seen.append(at)
    )
    x_BT, y_BT = windows_NT1.long()[:, :-1], windows_NT1.long()[:, 1:]
    for text in ("ensemble", "block:2"):
        surprise_BT = -read(model, x_BT, text).gather(-1, y_BT[..., None])
        assert ce[text] == pytest.approx(surprise_BT.mean().item(), abs=1e-5)
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_one_block_is_a_model_too(
    make_spec: MakeSpec, make_random_model: MakeModel, x_BT: torch.Tensor
) -> None:
    model = make_random_model(make_spec(model={"blocks": 1}))
    alone = read(model, x_BT, "block:0")
    assert torch.allclose(read(model, x_BT, "ensemble"), alone, atol=1e-5)
    assert torch.allclose(read(model, x_BT, "euler-zero"), alone, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "readout"),
    [
        ("ensemble", Readout("ensemble")),
        ("euler-zero", Readout("euler-zero")),
        ("euler-noise", Readout("euler-noise", 1)),
        ("euler-noise:8", Readout("euler-noise", 8)),
        ("block:2", Readout("block", 2)),
    ],
)
def test_readouts_are_read(text: str, readout: Readout) -> None:
    assert parse_readout(text, blocks=3) == readout


NO_READOUTS = ["", "euler", "ensemble:2", "block", "block:3", "block:-1", "block:x", "block:1\n"]
NO_READOUTS += ["euler-noise:0", "euler-noise:9999", "euler-noise:" + "9" * 5000]


@pytest.mark.parametrize("text", NO_READOUTS, ids=lambda text: repr(text[:16]))
def test_other_readouts_are_one_line_usage_errors(text: str) -> None:
    with pytest.raises(UsageError, match=r"^readout ") as caught:
        parse_readout(text, blocks=3)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_log_mean_of_equal_draws_is_the_draw(model: LocalModel, x_BT: torch.Tensor) -> None:
    """A denoiser that ignores z gives every draw the same answer, so M must not matter."""

    def blind(block: int, x: torch.Tensor, z: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*x.shape, 256)

    (answer,) = compose_all(
        blind, model.targets, x_BT, [Readout("euler-noise", 5)], torch.Generator(), model.spec
    )
    assert torch.allclose(answer, torch.full_like(answer, -math.log(256)), atol=1e-6)
