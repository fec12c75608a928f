# SPDX-License-Identifier: Apache-2.0
"""The function in C behind an attribute or a method of torch's is replaced, and nothing else."""

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
    assert not _core.replace(descriptor, None)
    for _ in range(3):
        assert _core.replace(descriptor, lambda *given: put.append(given))
    lazy = _core.input(torch.ones(3), 0, _core.new_axis(), 3)
    tensor = torch.ones(3)
    descriptor.__set__(tensor, lazy)
    assert put == [(tensor, lazy)]
    assert _core.replace(descriptor, None)
    assert not _core.replace(descriptor, None)
    with pytest.raises(RuntimeError, match="must be a bool"):
        descriptor.__set__(tensor, 3)


def test_what_is_raised_where_it_is_put_is_raised() -> None:
    descriptor: Any = vars(torch._C.TensorBase)["requires_grad"]

    def put(tensor: torch.Tensor, lazy: Any) -> None:
        raise KeyError("no")

    assert _core.replace(descriptor, put)
    try:
        with pytest.raises(KeyError):
            descriptor.__set__(torch.ones(3), _core.input(torch.ones(3), 0, _core.new_axis(), 3))
    finally:
        _core.replace(descriptor, None)


def test_only_what_can_be_set() -> None:
    assert _core.replace(torch.Tensor.softmax, None) is None
    assert _core.replace(vars(torch._C.TensorBase)["shape"], print) is None
    assert _core.replace(torch.add, print) is None  # CPython finds it by its C function
    assert _core.replace(print, print) is None


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
        own = _core.replace(descriptor, lambda *given: seen.append(given))
        assert taken(x) is None and Tripled.apply(x) is None
        assert [given[:2] for given in seen] == [(Tripled, (x,))] * 2
        assert own.__get__(None, Tripled)(x).grad_fn is not None
        _core.replace(descriptor, None)
        assert taken(x).equal(x * 3) and len(seen) == 2
    finally:
        install.install()


def test_what_comes_before_a_write_of_plain_torch() -> None:
    """It runs where calls may still read the tensor, and what it returns runs after the method."""
    taken: Any = torch.Tensor.mul_
    descriptor: Any = vars(torch._C.TensorBase)["mul_"]
    seen: list[Any] = []

    def before(tensor: torch.Tensor) -> Any:
        seen.append(tensor.tolist())
        return lambda: seen.append(tensor.tolist())

    install.uninstall()
    try:
        x, lazy = torch.ones(2), _core.input(torch.ones(2), 0, _core.new_axis(), 2)
        own = _core.replace(descriptor, before, True)
        assert torch.Tensor.mul_ is descriptor is taken
        x.mul_(2)  # nothing waits
        pending = lazy.exp()
        lazy.clone().mul_(2)
        own(x, 2)
        assert not seen
        taken(x, other=2)
        x.mul_(2)
        assert seen == [[4.0, 4.0], [8.0, 8.0], [8.0, 8.0], [16.0, 16.0]]
        assert pending.tolist() == torch.ones(2).exp().tolist()
        x.mul_(2)
        assert (
            len(seen) == 4
            and _core.replace(descriptor, None)
            and not _core.replace(descriptor, None)
        )
    finally:
        install.install()


def test_what_is_raised_before_or_after_a_write_is_raised() -> None:
    descriptor: Any = vars(torch._C.TensorBase)["neg_"]

    def fail(*_: Any) -> None:
        raise KeyError("no")

    install.uninstall()
    try:
        pending = _core.input(torch.ones(2), 0, _core.new_axis(), 2).exp()
        x = torch.ones(2)
        for before, written in ((fail, 1.0), (lambda _: fail, -1.0)):
            assert _core.replace(descriptor, before, True)
            with pytest.raises(KeyError):
                x.neg_()
            assert x.tolist() == [written] * 2
        del pending
    finally:
        _core.replace(descriptor, None)
        install.install()


class Before(torch.Tensor):
    pass


def test_what_comes_before_an_item_is_set() -> None:
    """It runs for tensors of every class, those made later too."""

    class After(torch.Tensor):
        pass

    seen: list[Any] = []
    install.uninstall()
    try:
        pending = _core.input(torch.ones(2), 0, _core.new_axis(), 2).exp()
        tensors = [torch.ones(2).as_subclass(kind) for kind in (torch.Tensor, Before, After)]
        tensors.append(nn.Parameter(torch.ones(2), requires_grad=False))
        assert _core.before_set_item(lambda t: seen.append(t) or (lambda: seen.append(t.tolist())))
        for tensor in tensors:
            tensor[0] = 3
            tensor[:1] += 0
            assert seen[0] is tensor and [3.0, 1.0] in (one for one in seen if type(one) is list)
            seen.clear()
        with pytest.raises(IndexError):
            tensors[0][5] = 1
        with pytest.raises(TypeError, match="does not support deleting"):
            del tensors[0][0]
        assert len(seen) == 1 and pending.tolist() == torch.ones(2).exp().tolist()
        tensors[0][0] = 4
        assert len(seen) == 1 and _core.before_set_item(None)
    finally:
        install.install()
