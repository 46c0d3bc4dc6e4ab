"""A tiny model to export, for several files of tests."""

from __future__ import annotations

import torch

from blocktrain.model.initial import initial_block, initial_table
from blocktrain.node.collect import CollectedModel, Piece, assemble
from blocktrain.protocol.spec import RunSpec

CPU = torch.device("cpu")


def make_model(seed: int = 3, rounds: tuple[int, ...] = (4, 5)) -> CollectedModel:
    """Two tiny blocks, each with its own copy of the table."""
    shape = {"d_model": 16, "heads": 2, "blocks": 2, "layers": 1, "context": 16}
    spec = RunSpec.from_mapping({"name": "tiny", "seed": seed, "model": shape})
    table_VD = initial_table(spec)
    pieces = [Piece(initial_block(spec, i), table_VD + 0.01 * i, rounds[i]) for i in range(2)]
    return assemble(spec, pieces, CPU)
