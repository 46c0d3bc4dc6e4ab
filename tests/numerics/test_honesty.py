"""No readout knows more than the text before it: signatures, causality, and the random-byte oracle."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from blocktrain.model.bands import noise_bands
from blocktrain.model.composition import LocalModel, compose, compose_all, euler, parse_readout
from blocktrain.model.evaluate import honest_ce
from blocktrain.model.train_step import Learner, train_step
from blocktrain.protocol.spec import RunSpec

MakeSpec = Callable[..., RunSpec]
MakeModel = Callable[[RunSpec], LocalModel]
READOUTS = ["ensemble", "euler-zero", "euler-noise", "euler-noise:4", "block:0", "block:1", "block:2"]
ORACLE = 5.525
"""ln 256 − 0.02 nats: nothing honest gets below it on uniform random bytes."""


@pytest.mark.parametrize("function", [compose, compose_all, euler])
def test_composition_has_no_parameter_that_could_carry_y(function: Callable[..., object]) -> None:
    known = {"denoise", "targets", "x_BT", "z_BTD", "readout", "readouts", "generator", "spec"}
    assert set(inspect.signature(function).parameters) <= known


@pytest.mark.parametrize("head", ["bayes", "plain", "edm"])
@pytest.mark.parametrize("text", READOUTS)
def test_changing_later_bytes_moves_no_earlier_prediction(
    make_spec: MakeSpec, make_random_model: MakeModel, head: str, text: str
) -> None:
    model = make_random_model(make_spec(model={"head": head}))
    generator = torch.Generator().manual_seed(4)
    x_BT = torch.randint(0, 256, (2, 16), generator=generator)
    readout = parse_readout(text, 3)
    for i in (0, 6, 14):
        changed_BT = x_BT.clone()
        changed_BT[:, i + 1 :] = (changed_BT[:, i + 1 :] + 101) % 256
        before, after = (
            compose(model.denoise, model.targets, x, readout, torch.Generator().manual_seed(5), model.spec)
            for x in (x_BT, changed_BT)
        )
        assert torch.allclose(before[:, : i + 1], after[:, : i + 1], atol=1e-5)
        assert (before[:, i + 1 :] - after[:, i + 1 :]).abs().max() > 1e-3


@pytest.fixture(scope="module")
def trained_on_random_bytes() -> tuple[LocalModel, torch.Tensor]:
    """A tiny stack after a short training on uniform random bytes, and fresh ones to evaluate it on."""
    model = {"d_model": 32, "heads": 2, "blocks": 3, "layers": 1, "context": 32}
    optimizer = {"lr": 5e-3, "warmup_steps": 5}
    spec = RunSpec.from_mapping({"name": "oracle", "model": model, "optimizer": optimizer})
    generator = torch.Generator().manual_seed(1)
    learners = [Learner.initial(spec, i, torch.device("cpu")) for i in range(3)]
    for learner in learners:
        for step in range(150):
            windows_BT1 = torch.randint(0, 256, (16, 33), generator=generator, dtype=torch.uint8)
            assert train_step(learner, windows_BT1, step, generator).applied
    stack = LocalModel(
        spec, tuple(lr.block for lr in learners), tuple(lr.table_VD.detach() for lr in learners)
    )
    return stack, torch.randint(0, 256, (512, 33), generator=generator, dtype=torch.uint8)


@pytest.mark.slow
def test_no_honest_readout_predicts_random_bytes(
    trained_on_random_bytes: tuple[LocalModel, torch.Tensor],
) -> None:
    ce = honest_ce(*trained_on_random_bytes, READOUTS, torch.Generator().manual_seed(2))
    assert min(ce.values()) >= ORACLE, ce
    assert ce["ensemble"] < 5.7, "training went wrong: this is worse than guessing"


@pytest.mark.slow
def test_the_oracle_catches_an_evaluator_that_peeks(
    trained_on_random_bytes: tuple[LocalModel, torch.Tensor],
) -> None:
    """z made from y, as a validation loss would, at the lowest noise: the bytes seem predictable."""
    model, windows_NT1 = trained_on_random_bytes
    x_BT, y_BT = windows_NT1.long()[:, :-1], windows_NT1.long()[:, 1:]
    sigma = noise_bands(model.spec.noise, 3)[2].bottom
    e_BTD = F.embedding(y_BT, model.targets[2])
    eps_BTD = torch.randn(e_BTD.shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits_BTV = model.denoise(2, x_BT, e_BTD + sigma * eps_BTD, torch.full((len(x_BT),), sigma))
    peeking_ce = F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten()).item()
    assert peeking_ce < ORACLE - 0.25
