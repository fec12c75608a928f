# SPDX-License-Identifier: Apache-2.0
"""The function in C that sets an attribute of tensors is replaced, and nothing else of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from koila import _core
from koila.patches import install

pytestmark = pytest.mark.sanitize


def test_the_descriptors_are_torchs() -> None:
    """Who asks for the attribute finds what torch made, and sets plain tensors as before."""
    parameter = nn.Parameter(torch.ones(3))
    descriptor: Any = torch.Tensor.grad
    assert descriptor is vars(torch._C.TensorBase)["grad"]
    gradient = torch.ones(3)
    descriptor.__set__(parameter, gradient)
    assert parameter.grad is gradient
    parameter.grad = None
    assert parameter.grad is None
    del parameter.grad


def test_torchs_own_way_comes_back() -> None:
    """Whatever is set twice, or given back twice, ends as it began."""
    descriptor: Any = vars(torch._C.TensorBase)["requires_grad"]
    put: list[Any] = []
    assert not _core.set_attribute_by(descriptor, None)
    for _ in range(3):
        assert _core.set_attribute_by(descriptor, lambda *given: put.append(given))
    lazy = _core.input(torch.ones(3), 0, _core.new_axis(), 3)
    tensor = torch.ones(3)
    descriptor.__set__(tensor, lazy)
    assert put == [(tensor, lazy)]
    assert _core.set_attribute_by(descriptor, None)
    assert not _core.set_attribute_by(descriptor, None)
    with pytest.raises(RuntimeError, match="must be a bool"):
        descriptor.__set__(tensor, 3)


def test_what_is_raised_where_it_is_put_is_raised() -> None:
    descriptor: Any = vars(torch._C.TensorBase)["requires_grad"]

    def put(tensor: torch.Tensor, lazy: Any) -> None:
        raise KeyError("no")

    assert _core.set_attribute_by(descriptor, put)
    try:
        with pytest.raises(KeyError):
            descriptor.__set__(torch.ones(3), _core.input(torch.ones(3), 0, _core.new_axis(), 3))
    finally:
        _core.set_attribute_by(descriptor, None)


def test_only_what_can_be_set() -> None:
    with pytest.raises(TypeError):
        _core.set_attribute_by(torch.Tensor.add, None)  # type: ignore[arg-type]
    assert not _core.set_attribute_by(vars(torch._C.TensorBase)["shape"], print)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


taken = Tripled.apply


def test_a_class_method_that_was_taken_is_replaced_too() -> None:
    descriptor = vars(torch._C._FunctionBase)["apply"]
    x, seen = torch.ones(3, requires_grad=True), list[Any]()
    install.uninstall()
    try:
        own = _core.call_class_method_by(descriptor, lambda *given: seen.append(given))
        assert taken(x) is None and Tripled.apply(x) is None
        assert [given[:2] for given in seen] == [(Tripled, (x,))] * 2
        assert own.__get__(None, Tripled)(x).grad_fn is not None
        _core.call_class_method_by(descriptor, None)
        assert taken(x).equal(x * 3) and len(seen) == 2
    finally:
        install.install()
