"""Shared parts of the numerics tests: small specifications, one thread, and the flag for goldens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from blocktrain.model.block import Block
from blocktrain.model.composition import LocalModel
from blocktrain.model.initial import initial_block, initial_table
from blocktrain.protocol.spec import RunSpec

MakeSpec = Callable[..., RunSpec]
TINY = {"d_model": 32, "heads": 2, "blocks": 3, "layers": 1, "context": 16}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the flag that re-records golden.json instead of comparing with it."""
    parser.addoption("--golden-record", action="store_true", help="re-record tests/numerics/golden.json")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sums depend on how they are split among threads; one thread makes them reproducible."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_spec() -> MakeSpec:
    """A function that makes a tiny specification; keywords name sections, whose fields are overridden."""

    def make(seed: int = 7, **sections: dict[str, Any]) -> RunSpec:
        model = TINY | sections.pop("model", {})
        return RunSpec.from_mapping({"name": "tiny", "seed": seed, "model": model, **sections})

    return make


@pytest.fixture
def make_random_model() -> Callable[[RunSpec], LocalModel]:
    """A function that makes a stack with random parameters everywhere, so that every path is active."""

    def randomise(block: Block, generator: torch.Generator) -> Block:
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
        return block

    def make(spec: RunSpec) -> LocalModel:
        generator = torch.Generator().manual_seed(11)
        blocks = tuple(randomise(initial_block(spec, i), generator).eval() for i in range(spec.model.blocks))
        table_VD = initial_table(spec)
        shifts = (0.05 * torch.randn(table_VD.shape, generator=generator) for _ in blocks)
        return LocalModel(spec, blocks, tuple(table_VD + shift for shift in shifts))

    return make
