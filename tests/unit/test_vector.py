"""A block's parameters and their vector hold the same values, in an order that all nodes share."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from blocktrain.node.vector import ParameterVector, anchor_digest


class Module(nn.Module):
    """Seven parameters, declared in another order than that of their names."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.arange(4.0).reshape(2, 2) + start)
        self.early = nn.Parameter(torch.arange(3.0) - start)


def test_parameters_are_in_the_order_of_their_names() -> None:
    vector = ParameterVector(Module())
    assert list(vector.parameters) == ["early", "late"]
    assert vector.size == 7
    assert vector.read().tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert vector.read().dtype == np.float32


def test_reading_gives_a_copy() -> None:
    module = Module()
    vector = ParameterVector(module)
    values_N = vector.read()
    values_N += 1
    assert module.early.tolist() == [0, 1, 2]


def test_what_is_written_is_read_and_keeps_its_shape_and_gradients() -> None:
    module = Module()
    vector, other_N = ParameterVector(module), ParameterVector(Module(start=0.1)).read()
    vector.write(other_N)
    assert np.array_equal(vector.read(), other_N)
    assert module.late.shape == (2, 2)
    assert module.late.requires_grad
    assert module.late.is_leaf


def test_adding_a_difference_moves_every_parameter_by_its_part() -> None:
    module = Module()
    vector = ParameterVector(module)
    vector.add(np.arange(7, dtype=np.float32) * 10)
    assert module.early.tolist() == [0, 11, 22]
    assert module.late.tolist() == [[30, 41], [52, 63]]


def test_named_views_and_join_are_inverse() -> None:
    vector = ParameterVector(Module())
    values_N = np.random.default_rng(0).normal(size=7).astype(np.float32)
    named = vector.named(values_N)
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == {"early": (3,), "late": (2, 2)}
    assert np.array_equal(vector.join(named), values_N)


def test_an_anchor_is_named_by_its_bits() -> None:
    values_N = np.array([1.0, 2.0], np.float32)
    name = anchor_digest(values_N)
    # SHA-256 of the bytes 0000803f 00000040; a machine of the other byte order must find the same.
    assert name == "b9c80b5adeca450753a16950c3cc655d"
    assert anchor_digest(values_N.astype(">f4")) == name
    assert anchor_digest(np.array([1.0, np.nextafter(np.float32(2), np.float32(3))], np.float32)) != name
    assert anchor_digest(np.array([0.0], np.float32)) != anchor_digest(np.array([-0.0], np.float32))
