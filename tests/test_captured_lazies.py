# SPDX-License-Identifier: Apache-2.0
"""User code that torch's C++ calls, and that reads lazies which it did not get as arguments: the
forward and backward of custom functions, and functions that checkpoints run again in backward."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import koila
from koila import _core
from koila.recording.cut import Cut
from oracle import assert_like, eager

N_ROWS = 7

#: What the forward computes of its argument `a`, and the backward of the gradient `g`.
BODIES = {
    "a product": ("a * K", "g * K"),
    "a value that was read": ("a * READ", "g * READ"),
    "only what it captures": ("K * 2", "g * 0"),
    "a value with a gradient": ("a * H2", "g * H2"),
    "labels": ("a * y[:, None]", "g * y[:, None]"),
    "a write": ("(K * 1).mul_(a)", "(K * 1).mul_(g)"),
    "a write to an item": ("put(K, a)", "put(K, g)"),
    "out=": (
        "torch.mul(K, a, out=torch.empty(0).double())",
        "torch.mul(K, g, out=torch.empty(0).double())",
    ),
    "a Python function of torch": ("F.gelu(K) * a", "F.gelu(K) * g"),
    "two results": ("torch.frexp(K)[0] * a", "torch.frexp(K)[0] * g"),
    "sizes that depend on numbers": ("a * torch.unique(K).sum()", "g * torch.unique(K).sum()"),
    "a cast": ("a * K.type(torch.DoubleTensor)", "g * K.type(torch.DoubleTensor)"),
    "new": ("a * K.new(K)", "g * K.new(K)"),
    "a choice": ("torch.where(K > 0, a, K)", "torch.where(K > 0, g, K)"),
    "a copy": ("torch.empty_like(a).copy_(K)", "torch.empty_like(g).copy_(K)"),
    "a view": ("K.view_as(a) * 1", "g * 0"),
    "vmap": ("torch.vmap(torch.mul)(a, K)", "torch.vmap(torch.mul)(g, K)"),
    "numpy": ("a * torch.tensor(K.numpy())", "g * torch.tensor(K.numpy())"),
    "a number": ("a * K.sum().item()", "g * K.sum().item()"),
    "a draw": ("F.dropout(K) * a", "g * K"),
    "a function in it": ("Square.apply(K) * a", "g * K"),
    "the result of another": ("Square.apply(K)", "g * 0"),
    "a norm": ("norm(K) * a", "g * K"),
    "a norm of a value with a gradient": ("norm(H2) * a", "g * K"),
    "a norm of a value that was read": ("norm(READ) + a", "g * K"),
    "a write to what it captures": ("K2.mul_(2) * a", "g * K"),
    "a write to what was read": ("READ.mul_(2) * a", "g * K"),
    "a write to an item of it": ("put_in(K2, a)", "g * K"),
    "a write of it to a plain tensor": ("PLAIN.add_(K.mean(0)) * a", "g * PLAIN"),
    "an embedding with max_norm": ("F.embedding(y, TABLE, max_norm=0.5) * a", "g * K"),
    "gradients turned on": ("slope(K) * a", "g * K"),
}

WITHOUT_GRADIENT = "only what it captures", "the result of another", "out=", "a copy", "a view"
#: What only the function of a reentrant checkpoint reads gets its gradient in a pass of its own,
#: which frees a graph that others read.
TWICE = "a value with a gradient", "a norm of a value with a gradient"

#: How the forward gets to run.
KINDS = {
    "lazy argument": "Function.apply(h)",
    "plain argument": "Function.apply(WEIGHT) * h",
    "reentrant": "checkpoint(lambda a: {0}, h, use_reentrant=True)",
    "reentrant, new draws": (
        "checkpoint(lambda a: {0}, h, use_reentrant=True, preserve_rng_state=False)"
    ),
    "in a checkpoint": "checkpoint(lambda a: Function.apply(a) + a, h, use_reentrant=False)",
}

PROGRAM = """
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return {forward}
    @staticmethod
    def backward(ctx, g):
        return {backward}
WEIGHT = net.weight[:1, :4].expand(len(y), 4)
K = x[:, :4]
READ = x[:, :4] * 1
READ.numpy()
K2 = x[:, :4] * 3
PLAIN = torch.ones(4).double()
TABLE = torch.linspace(-1, 1, 16).double().view(4, 4)
H2 = net(x)
first = norm(H2)
h = F.dropout(net(x))
c = {call}
loss = c.pow(2).sum() + h.sin().sum() + F.dropout(h).sum() + first.pow(3).sum()
loss = loss + (h * K2 * READ * PLAIN * F.embedding(y, TABLE)).sum()
"""


def put(values: Tensor, a: Tensor) -> Tensor:
    made = values * 1
    made[:] = a * values
    return made


def put_in(values: Tensor, a: Tensor) -> Tensor:
    values[:, 0] = 0.5
    return values * a


def slope(values: Tensor) -> Tensor:
    """Return a gradient that is computed within a forward."""
    with torch.enable_grad():
        x = values.detach().requires_grad_()
        (found,) = torch.autograd.grad((x.sin() * values).sum(), x)
    return found


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a * a

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


#: What the programs use.
NAMES = {
    "torch": torch,
    "F": F,
    "checkpoint": checkpoint,
    "put": put,
    "put_in": put_in,
    "slope": slope,
} | {"Square": Square}


def run(program: str, lazy: Any, chunks: int | None) -> list[Tensor]:
    """Return the loss of a program, the gradients, the statistics and the generator's next draw."""
    torch.manual_seed(0)
    net = nn.Linear(6, 4).double()
    norm = nn.BatchNorm1d(4, affine=False).double()
    x, y = lazy(torch.randn(N_ROWS, 6).double(), torch.randint(0, 4, (N_ROWS,)))
    names = NAMES | {"net": net, "norm": norm, "x": x, "y": y}
    with koila.config(chunks=chunks):
        exec(program, names)
        loss: Any = names["loss"]
        loss.backward()
    names.clear()  # functions of the program refer to it, and graphs to them: nothing collects that
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    statistics = [norm.running_mean, norm.running_var]
    return [
        loss.detach() * 1,
        *grads,
        *(one for one in statistics if one is not None),
        torch.rand(3),
    ]


def compare(program: str, is_refused: bool = False) -> None:
    """Compare with eager; `is_refused`: koila may say that the function of a checkpoint writes."""
    want = run(program, eager, None)
    for chunks in (None, 1, 2, 3, N_ROWS):
        try:
            got = run(program, koila.lazy, chunks)
        except koila.KoilaError as error:
            assert is_refused
            assert "koila runs it once. Leave it out of the checkpoint" in str(error)
            continue
        assert_like(got, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", BODIES)
def test_forward_of_a_custom_function(body: str, kind: str) -> None:
    forward, backward = BODIES[body]
    if kind.startswith("reentrant") and body in (*WITHOUT_GRADIENT, *TWICE):
        pytest.skip("eager raises")
    program = PROGRAM.format(forward=forward, backward=backward, call=KINDS[kind].format(forward))
    is_writing = re.match("a write|a norm|an embedding", body) is not None
    compare(program, "checkpoint" in KINDS[kind] and is_writing)


def test_forward_that_returns_what_it_captures() -> None:
    """Autograd would note the gradient on the placeholder of the lazy."""
    program = PROGRAM.format(forward="K", backward="g", call="Function.apply(h)")
    gc.collect()
    n_before = sum(type(one) is Cut for one in gc.get_objects())
    with pytest.raises(koila.KoilaError, match=r"Function: its forward returns a lazy tensor"):
        run(program, koila.lazy, 2)
    gc.collect()
    assert sum(type(one) is Cut for one in gc.get_objects()) == n_before, (
        "of the lazy's placeholder"
    )


def test_forward_is_over_after_an_error() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            assert type(x * 2) is Tensor
            raise ValueError("in the forward")

    x = koila.lazy(torch.ones(N_ROWS, 2))
    with pytest.raises(ValueError, match="in the forward"):
        Fails.apply(torch.ones(2, requires_grad=True))
    assert type(x * 2) is koila.LazyTensor
    assert _core.set_in_function(None) is False


#: Checkpoints that are left to torch: batch norms without a weight may not be recorded in them.
RUN_AGAIN = {
    "a value with a gradient": "c = checkpoint(lambda a, b=h: norm(a) * b, h, use_reentrant=False)",
    "a value written through .data": (
        "h.data.mul_(.5); c = checkpoint(lambda a, b=h: norm(a) * b, h, use_reentrant=False)"
    ),
    "the batch": "c = checkpoint(lambda a: norm(a) * x[:, :4], h, use_reentrant=False)",
    "labels": "c = checkpoint(lambda a: F.cross_entropy(norm(a), y), h, use_reentrant=False)",
    "what a dict holds": (
        "d = {'h': h}; c = checkpoint(lambda a: norm(a) * d['h'].detach(), h, use_reentrant=False)"
    ),
    "a value written since": (
        "z = h * 1; c = checkpoint(lambda a, b=z: norm(a) * b.detach(), h, use_reentrant=False);"
        " z.mul_(2)"
    ),
    "a hook": "c = h * 2; c.register_hook(lambda g: g * x[:, :4])",
    "a hook of a weight": "c = h * 2; net.weight.register_hook(lambda g: g * x.mean())",
}


@pytest.mark.parametrize("name", RUN_AGAIN)
def test_read_in_a_backward(name: str) -> None:
    """The program of the captured lazy is running; the lazy is an input of it, or has run."""
    compare(f"h = net(x)\n{RUN_AGAIN[name]}\nloss = c.pow(2).sum() + h.sin().sum()")
