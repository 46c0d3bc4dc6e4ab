"""A block starts as specified, is causal, and its Bayes head is Bayes' rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from blocktrain.model import edm
from blocktrain.model.block import Block
from blocktrain.model.composition import LocalModel
from blocktrain.model.initial import initial_block, initial_table, target_rows
from blocktrain.model.layers import rope_angles, rotate
from blocktrain.protocol.spec import RunSpec

MakeSpec = Callable[..., RunSpec]
MakeModel = Callable[[RunSpec], LocalModel]


def inputs(spec: RunSpec, positions: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x_BT = torch.randint(0, 256, (4, positions), generator=generator)
    z_BTD = torch.randn(4, positions, spec.model.d_model, generator=generator)
    return x_BT, z_BTD, torch.tensor([1.0, 1.5, 3.0, 9.0])


@pytest.mark.parametrize("width", [16, 64])
def test_bayes_head_is_bayes_rule_for_a_known_prior(make_spec: MakeSpec, width: int) -> None:
    """The exact posterior of y given z = e_y + σ ε, by Gaussian likelihoods over a vocabulary of eight."""
    spec = make_spec(model={"d_model": width, "target": "frozen"})
    block, table_VD = initial_block(spec, 0), initial_table(spec)
    target_VD = target_rows(spec, table_VD)
    prior_V = torch.zeros(256, dtype=torch.float64)
    prior_V[:8] = torch.tensor([8, 7, 6, 5, 4, 3, 2, 1], dtype=torch.float64) / 36
    with torch.no_grad():
        block.out.zero_()
        block.out_bias.copy_(prior_V.log().clamp(min=-80))
    x_BT, z_BTD, sigma_B = inputs(spec)
    answer_BTV = block(x_BT, z_BTD, sigma_B, table_VD, target_VD).softmax(dim=-1)
    distance_BTV = (z_BTD.double()[:, :, None] - target_VD.double()).square().sum(dim=-1)
    posterior_BTV = prior_V * torch.exp(-distance_BTV / (2 * sigma_B.double()[:, None, None].square()))
    posterior_BTV /= posterior_BTV.sum(dim=-1, keepdim=True)
    assert torch.allclose(answer_BTV.double(), posterior_BTV, atol=1e-6)


def test_at_the_start_z_enters_by_bayes_rule_alone(make_spec: MakeSpec) -> None:
    spec = make_spec()
    block, table_VD = initial_block(spec, 0), initial_table(spec)
    target_VD = target_rows(spec, table_VD)
    x_BT, z_BTD, sigma_B = inputs(spec)
    blind_BTV = block(x_BT, torch.zeros_like(z_BTD), sigma_B, table_VD, target_VD)
    seeing_BTV = block(x_BT, z_BTD, sigma_B, table_VD, target_VD)
    evidence_BTV = z_BTD @ target_VD.T / sigma_B[:, None, None].square()
    assert torch.allclose(seeing_BTV - blind_BTV, evidence_BTV, atol=1e-5)


def test_plain_head_ignores_z_at_the_start(make_spec: MakeSpec) -> None:
    spec = make_spec(model={"head": "plain"})
    block, table_VD = initial_block(spec, 0), initial_table(spec)
    x_BT, z_BTD, sigma_B = inputs(spec)
    target_VD = target_rows(spec, table_VD)
    answers = [block(x_BT, z, sigma_B, table_VD, target_VD) for z in (z_BTD, torch.zeros_like(z_BTD))]
    assert torch.equal(*answers)


def test_edm_head_reads_the_preconditioned_denoiser(make_spec: MakeSpec) -> None:
    spec = make_spec(model={"head": "edm"})
    block, table_VD = initial_block(spec, 0), initial_table(spec)
    x_BT, z_BTD, sigma_B = inputs(spec)
    sigma_B11, data = sigma_B[:, None, None], spec.noise.sigma_data
    features_BTD = F.layer_norm(table_VD[x_BT], (spec.model.d_model,))
    d_BTD = edm.c_skip(sigma_B11, data) * z_BTD + edm.c_out(sigma_B11, data) * features_BTD
    answer_BTV = block(x_BT, z_BTD, sigma_B, table_VD, target_rows(spec, table_VD))
    assert torch.allclose(answer_BTV, d_BTD @ block.out.T, atol=1e-5)


def test_initial_state_follows_seed_and_index_but_no_global_state(make_spec: MakeSpec) -> None:
    def flat(block: Block) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in block.parameters()])

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, table = flat(initial_block(make_spec(), 0)), initial_table(make_spec())
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, flat(initial_block(make_spec(), 0)))
    assert torch.equal(table, initial_table(make_spec()))
    assert not torch.equal(first, flat(initial_block(make_spec(), 1)))
    assert not torch.equal(first, flat(initial_block(make_spec(seed=8), 0)))
    assert not torch.equal(table, initial_table(make_spec(seed=8)))


def test_initial_scales_are_the_recipes(make_spec: MakeSpec) -> None:
    spec = make_spec(model={"d_model": 128})
    block, table_VD = initial_block(spec, 0), initial_table(spec)
    state = block.state_dict()
    for name in ("layers.0.attention_out", "layers.0.mlp_out", "out"):
        assert state[name].std().item() == pytest.approx(0.02, rel=0.02)
    assert table_VD.std().item() == pytest.approx(0.5, rel=0.02)
    ada = {"layers.0.ada", "layers.0.ada_bias"}
    zero = {"noisy_in", "out_bias", "condition_in_bias", "condition_out_bias"} | ada
    assert {name for name, value in state.items() if not value.any()} == zero
    assert state["gain"].item() == 1


@pytest.mark.parametrize("target", ["shared", "frozen"])
def test_target_rows_have_unit_norm_and_frozen_ones_ignore_the_table(
    make_spec: MakeSpec, target: str
) -> None:
    spec = make_spec(model={"target": target})
    table_VD = initial_table(spec)
    rows_VD = target_rows(spec, table_VD)
    assert torch.allclose(rows_VD.norm(dim=-1), torch.ones(256), atol=1e-6)
    moved_VD = target_rows(spec, table_VD + torch.ones_like(table_VD))
    assert torch.equal(moved_VD, rows_VD) == (target == "frozen")


@pytest.mark.parametrize("head", ["bayes", "plain", "edm"])
def test_logits_depend_on_no_later_byte_and_no_later_noise(
    make_spec: MakeSpec, make_random_model: MakeModel, head: str
) -> None:
    spec = make_spec(model={"head": head})
    model = make_random_model(spec)
    x_BT, z_BTD, sigma_B = inputs(spec)
    changed_x, changed_z = x_BT.clone(), z_BTD.clone()
    changed_x[:, 8:] = (changed_x[:, 8:] + 1) % 256
    changed_z[:, 8:] += 1
    before, after = (model.denoise(0, x, z, sigma_B) for x, z in ((x_BT, z_BTD), (changed_x, changed_z)))
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-5)
    assert (before[:, 8:] - after[:, 8:]).abs().amax(dim=-1).min() > 1e-3


def test_rotary_scores_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, generator=generator).expand(1, 16, 1, 1, 8) for _ in range(2))
    cos, sin = rope_angles(16, 8)
    scores = torch.einsum("tk,sk->ts", rotate(q, cos, sin)[0, :, 0, 0], rotate(k, cos, sin)[0, :, 0, 0])
    for distance in range(-15, 16):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)
    assert scores.diagonal(1)[0] != scores.diagonal(-1)[0]


def test_a_short_text_gets_the_same_logits_as_the_start_of_a_long_one(
    make_spec: MakeSpec, make_random_model: MakeModel
) -> None:
    spec = make_spec()
    model = make_random_model(spec)
    x_BT, z_BTD, sigma_B = inputs(spec)
    whole = model.denoise(1, x_BT, z_BTD, sigma_B)
    assert torch.allclose(model.denoise(1, x_BT[:, :5], z_BTD[:, :5], sigma_B), whole[:, :5], atol=1e-5)
