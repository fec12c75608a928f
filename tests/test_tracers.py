# SPDX-License-Identifier: Apache-2.0
"""Functions that are traced, beside lazies: these get real tensors, as arguments and where the
function refers to a lazy. `test_not_intercepted` has torch.jit.trace."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, nop
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import koila
from oracle import Programs, assert_same_in_chunks, run_of_rows

N_ROWS = 7


def ramp(*shape: int) -> Tensor:
    return torch.linspace(0.1, 1, shape[0] * shape[1], dtype=torch.float64).view(*shape)


class Scaled(nn.Module):
    """Multiplies by a buffer, or by a tensor that it refers to."""

    def __init__(self, scale: Tensor, is_buffer: bool) -> None:
        super().__init__()
        self.scales = [scale]
        if is_buffer:
            self.register_buffer("scale", scale)

    def forward(self, a: Tensor) -> Tensor:
        return (a * (self.scale if hasattr(self, "scale") else self.scales[0])).sin()


Net = nn.Module
PROGRAMS = program = Programs()


@program
def linearize(x: Tensor, y: Tensor, net: Net) -> Any:
    out, f = torch.func.linearize(torch.sin, x)
    return out, f(ramp(N_ROWS, 6))


@program
def linearize_around_a_lazy(x: Tensor, y: Tensor, net: Net) -> Any:
    k = x[:, :4] * 2
    out, f = torch.func.linearize(lambda w: w * k.sin(), ramp(N_ROWS, 4))
    return out, f(ramp(N_ROWS, 4)), f(net(x))


@program
def linearize_with_two_primals(x: Tensor, y: Tensor, net: Net) -> Any:
    h = net(x).detach()
    out, f = torch.func.linearize(lambda a, b: {"q": a.sin() * h * b}, h, ramp(N_ROWS, 4))
    return out["q"], f(h * 2, h)["q"]


@program
def an_index(x: Tensor, y: Tensor, net: Net) -> Any:
    return make_fx(lambda a: a[y])(ramp(N_ROWS, 4))(net(x))


@program
def a_product(x: Tensor, y: Tensor, net: Net) -> Any:
    return make_fx(lambda a: a * x[:, :4])(ramp(N_ROWS, 4))(net(x)).sin()


@program
def before_autograd(x: Tensor, y: Tensor, net: Net) -> Any:
    k = x[:, :4] * 2
    return make_fx(lambda a: a * k.sin(), pre_dispatch=True)(ramp(N_ROWS, 4))(net(x))


@program
def a_layer(x: Tensor, y: Tensor, net: Net) -> Any:
    k = x[:, :4] * 2
    f = make_fx(lambda a: nn.functional.linear(a * k, net.weight.T))  # type: ignore[arg-type]
    return f(ramp(N_ROWS, 4))(net(x))


@program
def a_value_with_a_gradient(x: Tensor, y: Tensor, net: Net) -> Any:
    h = net(x)
    f = make_fx(lambda a: torch.autograd.grad((a * h).sin().sum(), a)[0])
    return f(ramp(N_ROWS, 4).requires_grad_())(ramp(N_ROWS, 4).requires_grad_())


@program
def transforms_in_it(x: Tensor, y: Tensor, net: Net) -> Any:
    k, a = x[:, :4] * 2, ramp(N_ROWS, 4)
    batched = make_fx(torch.func.vmap(lambda a: a * k.sum()))(a)
    slope = make_fx(torch.func.grad(lambda a: (a.sin() * k.sin()).sum()))(a)
    pure = make_fx(torch.func.functionalize(lambda a: (a * k).add_(k)))(a)
    return batched(net(x)), slope(net(x)), pure(net(x))


@program
def lazy_arguments(x: Tensor, y: Tensor, net: Net) -> Any:
    k = x[:, :4] * 2
    chosen = make_fx(lambda a: torch.where(k > 0, a, k))(net(x).detach())
    named = make_fx(lambda given: given["a"] * k)({"a": net(x)})
    return chosen(ramp(N_ROWS, 4)), named({"a": net(x)})


@program
def a_condition(x: Tensor, y: Tensor, net: Net) -> Any:
    k = x[:, :4] * 2
    f = make_fx(lambda a: torch.cond(a.sum() > 0, torch.sin, torch.cos, (a * k,)))
    return f(ramp(N_ROWS, 4))(net(x))


@program
def a_trace_in_a_transform(x: Tensor, y: Tensor, net: Net) -> Any:
    def f(a: Tensor) -> Any:
        return make_fx(lambda q: q * x[:, :4])(a)(a)

    return torch.func.jvp(f, (ramp(N_ROWS, 4),), (ramp(N_ROWS, 4),))


@program
def exported(x: Tensor, y: Tensor, net: Net) -> Any:
    k = x[:, :4] * 2
    parts = [
        torch.export.export(Scaled(k, is_buffer), (given,), strict=False).module()(net(x))
        for is_buffer in (False, True)
        for given in (ramp(N_ROWS, 4), net(x).detach())
    ]
    return *parts, torch.export.export(net, (x,), strict=True).module()(x)


@program
def ahead_of_time(x: Tensor, y: Tensor, net: Net) -> Any:
    return aot_function(lambda a: a.sin() * 2, fw_compiler=nop)(net(x))


@program
def symbolic(x: Tensor, y: Tensor, net: Net) -> Any:
    k = x[:, :4]
    f = torch.fx.symbolic_trace(lambda a: (k * a + torch.cat([k, a])[:N_ROWS]).sin())
    return f(net(x))


@program
def jit_trace_with_a_buffer(x: Tensor, y: Tensor, net: Net) -> Any:
    k = x[:, :4] * 2
    traced = torch.jit.trace(Scaled(k, is_buffer=True), (ramp(N_ROWS, 4),))
    pending = torch.jit.trace(Scaled(x[:, :4], is_buffer=True), (net(x),))
    return traced(net(x)), pending(ramp(N_ROWS, 4))


captured: list[Tensor] = []


@torch.jit.ignore  # type: ignore[untyped-decorator]
def times_captured(a):  # type: ignore[no-untyped-def]
    return a * captured[-1]


def scripted_body(a):  # type: ignore[no-untyped-def]
    return times_captured(a).sin() * 2


class ScriptedModule(nn.Module):
    @torch.jit.ignore  # type: ignore[untyped-decorator]
    def times(self, a):  # type: ignore[no-untyped-def]
        return a * captured[-1]

    def forward(self, a):  # type: ignore[no-untyped-def]
        return self.times(a) * 2 + a


@program
def jit_ignored_functions(x: Tensor, y: Tensor, net: Net) -> Any:
    f, module = torch.jit.script(scripted_body), torch.jit.script(ScriptedModule())
    found = []
    for k in (x[:, :4] * 2, net(x), x.mean()):
        captured[:] = [k]
        found += [f(ramp(N_ROWS, 4)), f(net(x)), module(ramp(N_ROWS, 4)), module(net(x))]
    return found


@program
def functionalized(x: Tensor, y: Tensor, net: Net) -> Any:
    f = torch.func.functionalize(lambda a: (a * x[:, :4]).add_(a))
    return f(net(x)), f(ramp(N_ROWS, 4))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's own, in eager too
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str) -> None:
    assert_same_in_chunks(functools.partial(run_of_rows, PROGRAMS[name]), N_ROWS)


@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_strict_export_around_a_lazy_is_refused(is_buffer: bool) -> None:
    module = Scaled(koila.lazy(ramp(N_ROWS, 4)) * 2, is_buffer)
    text = (
        r"torch.export \(.*test_tracers.py:\d+\) fails since the function refers to a lazy tensor"
    )
    with pytest.raises(koila.KoilaError, match=text):
        torch.export.export(module, (ramp(N_ROWS, 4),), strict=True)


def test_calls_in_a_trace_return_tensors() -> None:
    """And after it, or after an error in it, they are recorded again."""
    x = koila.lazy(torch.ones(N_ROWS, 2))

    def fails(a: Tensor) -> Tensor:
        assert type(x * 2) is Tensor
        raise ValueError("in the trace")

    with pytest.raises(ValueError, match="in the trace"):
        make_fx(fails)(torch.ones(2))
    assert type(x * 2) is koila.LazyTensor
