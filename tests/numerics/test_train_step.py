"""A local step is torch's AdamW on the drawn loss, reproducible, and harmless when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.model.bands import noise_bands
from blocktrain.model.initial import initial_block, initial_table, target_rows
from blocktrain.model.objective import denoising_loss, draw_noise
from blocktrain.model.optim import learning_rate, make_optimizer
from blocktrain.model.train_step import Learner, StepResult, train_step
from blocktrain.protocol.spec import OptimizerSpec, RunSpec

MakeSpec = Callable[..., RunSpec]
GOLDEN = Path(__file__).with_name("golden.json")
CPU = torch.device("cpu")


def batches(count: int, size: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(21)
    return [torch.randint(97, 105, (size, 17), generator=generator, dtype=torch.uint8) for _ in range(count)]


def train(spec: RunSpec, steps: int, index: int = 1) -> tuple[Learner, list[StepResult]]:
    learner, generator = Learner.initial(spec, index, CPU), torch.Generator().manual_seed(22)
    return learner, [train_step(learner, w, i, generator) for i, w in enumerate(batches(steps))]


@pytest.mark.parametrize("clip", [0.0, 0.05], ids=["unclipped", "clipped"])
def test_steps_equal_torchs_adamw_driven_by_hand(make_spec: MakeSpec, clip: float) -> None:
    spec = make_spec(optimizer={"grad_clip": clip, "warmup_steps": 3, "weight_decay": 0.1})
    learner, results = train(spec, steps=6)
    opt, band = spec.optimizer, noise_bands(spec.noise, 3)[1]
    block, table = initial_block(spec, 1), initial_table(spec).requires_grad_()
    parameters = [*block.parameters(), table]
    decayed = [p for p in block.parameters() if p.ndim == 2]
    plain = [p for p in block.parameters() if p.ndim == 1] + [table]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        betas=(opt.beta1, opt.beta2), eps=opt.eps, foreach=False, fused=False,
    )  # fmt: skip
    target = torch.empty(0)

    def net(x: torch.Tensor, z: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = block(x, z, sigma, table, target)
        return logits

    generator = torch.Generator().manual_seed(22)
    for i, windows in enumerate(batches(6)):
        x, y = windows.long()[:, :-1], windows.long()[:, 1:]
        target = target_rows(spec, table)
        drawn = draw_noise(spec.noise, band, (*x.shape, spec.model.d_model), generator)
        losses = denoising_loss(net, x, y, target, drawn)
        adamw.zero_grad()
        losses.loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm()
        assert norm.item() == pytest.approx(results[i].grad_norm, rel=1e-4)
        for p in parameters:
            if p.grad is not None and clip and norm > clip:
                p.grad *= clip / norm
        for group in adamw.param_groups:
            group["lr"] = opt.lr * min(1, (i + 1) / 3)
        adamw.step()
    for mine, by_hand in zip(learner.parameters, parameters, strict=True):
        assert torch.allclose(mine, by_hand, atol=2e-5), "a parameter drifted"


def test_the_same_seed_twice_is_bit_identical(make_spec: MakeSpec) -> None:
    (first, results1), (second, results2) = (train(make_spec(), steps=5) for _ in range(2))
    assert results1 == results2
    assert all(torch.equal(a, b) for a, b in zip(first.parameters, second.parameters, strict=True))


def test_training_learns_block_and_table(make_spec: MakeSpec) -> None:
    """Eight byte values out of 256: the denoising CE must fall towards ln 8 = 2.08."""
    spec = make_spec(optimizer={"lr": 1e-2, "warmup_steps": 0})
    learner, results = train(spec, steps=40)
    assert results[-1].denoising_ce < 2.5 < 4 < results[0].denoising_ce
    assert not torch.equal(learner.table_VD, initial_table(spec))


@pytest.mark.parametrize("where", ["block", "table"])
def test_a_step_that_is_not_finite_changes_nothing_and_says_so(make_spec: MakeSpec, where: str) -> None:
    learner, _ = train(make_spec(), steps=2)
    with torch.no_grad():
        (learner.block.out_bias if where == "block" else learner.table_VD[97])[0] = float("nan")
    before = [p.detach().clone() for p in learner.parameters]
    moments = [s["exp_avg"].clone() for s in learner.optimizer.state.values()]
    result = train_step(learner, batches(1)[0], 2, torch.Generator().manual_seed(0))
    assert not result.applied
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, learner.parameters, strict=True)
    )
    after = [s["exp_avg"] for s in learner.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    assert all(p.grad is None for p in learner.parameters)


def test_everything_is_optimised_once_and_only_matrices_of_the_block_decay(make_spec: MakeSpec) -> None:
    learner = Learner.initial(make_spec(), 0, CPU)
    groups = make_optimizer(learner.spec.optimizer, learner.block, learner.table_VD).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decay.keys() == {id(p) for p in learner.parameters}
    for name, p in learner.block.named_parameters():
        assert decay[id(p)] == (
            0 if "bias" in name or name == "gain" else learner.spec.optimizer.weight_decay
        )
    assert decay[id(learner.table_VD)] == 0


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", {0: 0.25, 3: 1, 4: 1, 104: 1, 999: 1}),
        ("cosine", {0: 0.25, 3: 1, 4: 1, 54: 0.55, 104: 0.1, 999: 0.1}),
    ],
)
def test_learning_rate_warms_up_then_holds_or_falls_to_a_tenth(
    schedule: str, rates: dict[int, float]
) -> None:
    opt = OptimizerSpec(lr=1.0, warmup_steps=4, total_steps=104, schedule=schedule)
    assert {step: learning_rate(opt, step) for step in rates} == pytest.approx(rates)


def test_evaluation_before_training_does_not_get_in_its_way(make_spec: MakeSpec) -> None:
    """Rows made inside torch's inference mode can't be trained on, so the cached ones must not be."""
    spec = make_spec(seed=12345, model={"target": "frozen"})
    with torch.inference_mode():
        target_rows(spec, initial_table(spec))
    assert all(result.applied for result in train(spec, steps=2)[1])


def processor() -> str:
    """The processor's name on Linux: maths libraries choose their kernels by it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def golden_losses(make_spec: MakeSpec) -> dict[str, list[float]]:
    heads = {h: make_spec(model={"head": h}) for h in ("bayes", "plain", "edm")}
    paper = make_spec(model={"target": "frozen"}, noise={"weighting": "edm", "null_fraction": 0.0})
    return {
        name: [r.loss for r in train(spec, steps=12)[1]] for name, spec in {**heads, "paper": paper}.items()
    }


def test_losses_of_seeded_runs_equal_the_recorded_ones(
    make_spec: MakeSpec, request: pytest.FixtureRequest
) -> None:
    """Bit for bit on the recorded torch, processor and instruction set; within rounding elsewhere."""
    capability = torch.backends.cpu.get_cpu_capability()
    here: dict[str, Any] = {"torch": torch.__version__, "processor": processor(), "instructions": capability}
    losses = golden_losses(make_spec)
    if request.config.getoption("--golden-record", default=False):
        GOLDEN.write_text(json.dumps(here | {"losses": losses}, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    exactly = here.items() <= golden.items()
    assert losses.keys() == golden["losses"].keys()
    for name, values in losses.items():
        expected = golden["losses"][name]
        assert values == (expected if exactly else pytest.approx(expected, abs=1e-4)), name
