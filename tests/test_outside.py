# SPDX-License-Identifier: Apache-2.0
"""What torch's own backward takes through a graph that was there before the program."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from allocations import Allocations
from chunked import split
from koila.memory import outside
from koila.planning import left_plain
from limits import there
from oracle import eager
from test_memory_limit import Prediction


class Twice(torch.autograd.Function):
    """A custom function, with an attribute that torch's own nodes have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.variable = 2
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * ctx.variable


def graph(x: Tensor) -> Tensor:
    """Branches that meet again, a custom function, views."""
    h = Twice.apply(x)
    return (h.view(-1).reshape(h.shape) + torch.tanh(h)).exp().sum(1)


@pytest.mark.parametrize("is_there", [False, True])
def test_peak(is_there: bool) -> None:
    """Gradients on their way, and those that leaves keep, unless they have one."""
    x = torch.randn(64, 128, requires_grad=True)
    x.grad = torch.zeros_like(x) if is_there else None
    out = graph(x)
    memory = Allocations()
    with memory:
        seed = torch.ones(64)
    with memory:
        memory.mark()
        out.backward(seed, retain_graph=True)
    used = memory.peak - memory.at_marks[0]
    assert 0.9 * used <= outside.peak([graph(x)]) <= 2 * used


def test_a_weight_that_is_used_often_has_one_gradient() -> None:
    """As in a recurrent net that is written as a loop."""
    weight, x = torch.randn(256, 256, requires_grad=True), torch.randn(4, 256)

    def unroll() -> Tensor:
        h = x
        for _ in range(12):
            h = (h @ weight).tanh()
        return h.sum(1)

    out = unroll()
    memory = Allocations()
    with memory:
        seed = torch.ones(4)
    with memory:
        memory.mark()
        out.backward(seed)
    used = memory.peak - memory.at_marks[0]
    weight.grad = None
    assert used <= outside.peak([unroll()]) <= 1.1 * used


def test_what_formulas_hold_counts() -> None:
    """The gradient of a cosine is made of a sine, and that turned over."""
    x = torch.randn(64, 128, requires_grad=True)
    out, memory = x.tanh().cos(), Allocations()
    with memory:
        seed = torch.ones(64, 128)
    with memory:
        memory.mark()
        out.backward(seed, retain_graph=True)
    used = memory.peak - memory.at_marks[0]
    x.grad = None
    assert used <= outside.peak([x.tanh().cos()]) <= 1.1 * used


def test_nothing_is_taken_without_a_graph() -> None:
    assert outside.peak([]) == outside.peak([torch.ones(2, requires_grad=True)]) == 0


def test_what_goes_on_after_the_chunks_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features made plainly, by a wide layer, enter with their graph."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 16))
    head, x, y = nn.Linear(16, 5), torch.randn(256, 16), torch.randint(5, (256,))
    memory = Allocations()
    memory.count(list(plain.parameters()), list(head.parameters()), x, y)
    prediction = Prediction(memory, monkeypatch)
    with split(4):
        with memory:
            loss = F.cross_entropy(head(koila.lazy(plain(x))), koila.lazy(y))
        with memory:
            loss.backward()
    assert plain[0].weight.grad is not None
    assert 0.95 * memory.peak <= prediction.n_bytes <= 1.35 * memory.peak, (
        f"{prediction.n_bytes:.0f} bytes were predicted, {memory.peak} used"
    )


def test_a_gradient_is_gone_when_the_graph_outside_goes_on() -> None:
    """As for torch, which lets each tensor go when its backward has run."""
    came: list[weakref.ref[Tensor]] = []
    is_there: list[bool] = []

    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            is_there.append(came[0]() is not None)
            return gradients[0]

    class Second(First):
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            came.append(weakref.ref(gradients[0]))
            return 2 * gradients[0]

    first: Any = First
    second: Any = Second
    x = torch.randn(12, 3, requires_grad=True)
    with split(4):
        koila.lazy(second.apply(first.apply(x))).sort(0).values.sin().sum().backward()
    assert is_there == [False]
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


@pytest.mark.parametrize("is_plain_first", [False, True])
def test_weights_with_a_plain_graph_too_have_one_gradient(is_plain_first: bool) -> None:
    """Those of the chunks wait for what the plain graph gives, which is added to them."""

    def peak(lazy: Any) -> int:
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.Tanh())]
        model, x, z = nn.Sequential(*layers), torch.randn(64, 256), torch.randn(64, 256)
        memory = Allocations()
        with memory:
            x = lazy(x)
            batches = (z, x) if is_plain_first else (x, z)
            loss = sum(model(batch).square().mean() for batch in batches)
        with memory:
            loss.backward()  # type: ignore[union-attr]
        return memory.peak

    most = peak(eager)
    with split(4):
        assert peak(koila.lazy) <= 1.02 * most


def nested_of(h: Tensor, layout: torch.layout) -> Tensor:
    """Two sequences of 512 steps."""
    if layout == torch.strided:
        return torch.nested.as_nested_tensor([h[:300], h[300:]])
    return torch.nested.nested_tensor_from_jagged(h, torch.tensor([0, 300, 512]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_graph_of_a_nested_tensor_under_a_limit(layout: torch.layout) -> None:
    """torch's nodes do not know how large a nested tensor is."""

    def gradient(lazy: Any) -> Tensor:
        weight = torch.linspace(-1, 1, 64, dtype=torch.float64).requires_grad_()
        h = lazy(torch.linspace(-1, 1, 2**15, dtype=torch.float64).view(512, 64)) * weight
        out = (nested_of(h, layout) * 2).to_padded_tensor(0.0)
        (out.sin().sum() + h.sin().sum()).backward()
        assert weight.grad is not None
        return weight.grad

    with koila.config(memory_limit=there() + 2**22):
        made = gradient(koila.lazy)
    torch.testing.assert_close(made, gradient(eager), rtol=1e-10, atol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensor_that_takes_most_of_a_limit(layout: torch.layout) -> None:
    parts = [torch.ones(2**16, 8), torch.ones(2**17, 8)]
    held = torch.nested.as_nested_tensor(parts, layout=layout)
    x, weight = torch.ones(512, 8), torch.ones(8, requires_grad=True)
    with koila.config(memory_limit=2**20), pytest.raises(koila.MemoryLimitError):
        (koila.lazy(x) * weight).sin().sum().backward()
    assert held.is_nested


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_plain_backward_of_a_nested_tensor_beside_a_batch(
    layout: torch.layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch with as many samples as the nested tensor has."""
    monkeypatch.setattr(left_plain, "_by_line", {})
    h, x = torch.ones(512, 64).requires_grad_(), koila.lazy(torch.ones(2, 64))
    with koila.config(chunks=2):
        assert x.mean().item() == 1.0
        out = (nested_of(h, layout) * 2).to_padded_tensor(0.0)
        out.sum().backward()
    assert h.grad is not None and torch.equal(h.grad, torch.full_like(h, 2.0))
