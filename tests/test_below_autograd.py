# SPDX-License-Identifier: Apache-2.0
"""Code of the user's that torch's dispatcher calls below autograd, and that reads lazies: dispatch
modes, wrapper subclasses, and kernels of custom operators. Its results go to torch's C++."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import koila
from oracle import assert_same_in_chunks

N_ROWS = 7
_names = (f"koila_test_below_{i}" for i in itertools.count())


class Wrapper(torch.Tensor):
    """A tensor around another one, which may be lazy."""

    inner: Tensor

    @staticmethod
    def __new__(cls: Any, inner: Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))


class Scaling(TorchDispatchMode):
    """A mode that scales the results of sin by what a function returns."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale, self.n = scale, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.sin.default:
            return made
        self.n += 1
        return made * self.scale()


def op(kernel: Any, backward: Any) -> Any:
    """Return a custom operator of one tensor."""
    made = torch.library.custom_op(f"{next(_names)}::f", mutates_args=())(kernel)
    made.register_autograd(lambda ctx, g: backward(g))
    return made


def kernel(scale: Any) -> Any:
    def f(a: Tensor) -> Tensor:
        return a * scale()

    f.__annotations__ = {"a": Tensor, "return": Tensor}
    return f


PROGRAMS = {
    "a dispatch mode": (
        "k = x.abs().mean()\nwith Scaling(lambda: k) as m: w = net.weight.sin()\n"
        "l = (x @ w.T).sum(); n = m.n"
    ),
    "a mode that reads rows": (
        "k = x[:, :4] * 2; h = torch.ones(7, 4).double() * v\n"
        "with Scaling(lambda: k) as m: c = h.sin()\nl = c.pow(2).sum() + net(x).sum(); n = m.n"
    ),
    "a mode that reads a value with a gradient": (
        "k = net(x).pow(2).mean()\nwith Scaling(lambda: k) as m: w = net.weight.sin()\n"
        "l = (x @ w.T).sum() + k; n = m.n"
    ),
    "a mode that reads a number": (
        "k = net(x).pow(2).mean()\nwith Scaling(lambda: k.item()) as m: w = net.weight.sin()\n"
        "l = (x @ w.T).sum() + k; n = m.n"
    ),
    "a wrapper around rows": "l = (v.expand(7, 4) * Wrapper(x[:, :4])).sum() + net(x).sum(); n = 1",
    "a wrapper around a value": (
        "k = x[:, :4].exp(); l = (v.expand(7, 4) * Wrapper(k)).sum() + net(x).sum(); n = 1"
    ),
    "a custom operator": (
        "k = x.abs().mean(); f = op(kernel(lambda: k), lambda g: g * k)\n"
        "l = (x @ f(net.weight).T).sin().sum(); n = 1"
    ),
    "a custom operator that reads a number": (
        "k = net(x).pow(2).mean(); f = op(kernel(lambda: k.item()), lambda g: g * k.detach())\n"
        "l = k * f(torch.ones(3).double()).sum(); n = 1"
    ),
    "a custom operator with a mode": (
        "k = x.abs().mean(); f = op(kernel(lambda: k), lambda g: g * k)\n"
        "with Scaling(lambda: k * 2) as m: w = f(net.weight).sin()\nl = (x @ w.T).sum(); n = m.n"
    ),
    "inference mode": "with torch.inference_mode(): n = net(x).sum().item() > 0\nl = net(x).sum()",
}


def run(text: str, lazy: Any, chunks: int | None) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(6, 4).double()
    v = torch.linspace(-1, 1, 4).double().requires_grad_()
    names: dict[str, Any] = {
        **{"torch": torch, "Scaling": Scaling, "Wrapper": Wrapper, "op": op, "kernel": kernel},
        **{"net": net, "v": v, "x": lazy(torch.randn(N_ROWS, 6).double())},
    }
    with koila.config(chunks=chunks):
        exec(text, names)
        assert names["n"] > 0
        names["l"].backward()
    grads = [p.grad for p in (net.weight, net.bias, v) if p.grad is not None]
    return [torch.tensor(names["l"].item()).double(), *grads]


@pytest.mark.parametrize("name", PROGRAMS)
def test_code_below_autograd(name: str) -> None:
    assert_same_in_chunks(functools.partial(run, PROGRAMS[name]), N_ROWS)


def test_inference_mode_is_recorded() -> None:
    """There, too, autograd's dispatch keys are excluded, but nothing below it is running."""
    x = koila.lazy(torch.ones(N_ROWS, 3))
    with torch.inference_mode():
        y = x * 2 + 1
        assert type(y) is koila.LazyTensor
        assert koila._core.has_no_grad() or koila._core.pending_bytes(False) > 0
