# SPDX-License-Identifier: Apache-2.0
"""The first step under a limit runs as later ones do: where a number is read in the midst of a
model, nobody knows yet what follows, and what ran must leave room for it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

import koila
from allocations import Allocations
from koila.planning import plans, steps
from limits import there
from oracle import Lazy, eager

N_ROWS, WIDE = 4096, 256
BATCH = N_ROWS * (4 * WIDE + 8)
Model = Callable[[Any, Tensor, Tensor], Tensor]


def compared(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m["first"](x)
    if h.mean() > -100:
        h = h * 2
    return F.cross_entropy(m["second"](h), y)


def compared_twice(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m["first"](x)
    if h.mean() > -100:
        h = h * 2
    scores = m["second"](h)
    return F.cross_entropy(scores if scores.std() > 0 else scores * 2, y)


def scaled_by_a_number(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m["first"](x)
    return F.cross_entropy(m["second"](h / h.abs().mean().item()), y)


def looked_at(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """What is read was made of what is needed, and is dropped."""
    h = m["first"](x)
    assert (h * 2).sum(1).exp()[:3].tolist()
    assert not h.square().sum().isnan()
    return F.cross_entropy(m["second"](h), y)


def validated(m: Any, x: Tensor, y: Tensor) -> Tensor:
    policy = Categorical(logits=m["second"](m["first"](x)), validate_args=True)
    return -policy.log_prob(y).mean()


def two_heads(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """A look at the first, while what the second is made of is still needed."""
    h = m["first"](x)
    scores = m["second"](h)
    if scores.max() > 1e6:
        return scores.sum()
    return F.cross_entropy(scores, y) + m["second"](h + 1).square().mean()


class Doubled(torch.autograd.Function):
    """A custom function: koila runs the calls before it, and then the function on all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def masked(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m["first"](x)
    chosen = h[:, 0] > 0
    return F.cross_entropy(m["second"](h[chosen]), y[chosen])


def chosen_by_number(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m["first"](x)
    at = (h[:, 0] > 0).nonzero().squeeze(1)
    return F.cross_entropy(m["second"](h[at]), y[at])


def custom(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m["second"](Doubled.apply(m["first"](x))), y)


def hooked(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m["first"](x)
    h.register_hook(lambda gradient: gradient * 2)
    return F.cross_entropy(m["second"](h), y)


def compiled(m: Any, x: Tensor, y: Tensor) -> Tensor:
    block = torch.compile(lambda h: h.sin(), backend="eager")
    return F.cross_entropy(m["second"](block(m["first"](x))), y)


MODELS: list[Model] = [
    compared,
    compared_twice,
    scaled_by_a_number,
    looked_at,
    validated,
    two_heads,
]


#: What cuts the program: both sides of the cut need all rows of it.
CUTS: list[Model] = [masked, chosen_by_number, custom, hooked, compiled]


def make(n_layers: int = 3) -> nn.ModuleDict:
    torch.manual_seed(0)
    layers = [layer for _ in range(n_layers) for layer in (nn.Linear(WIDE, WIDE), nn.Tanh())]
    second = [layer for _ in range(n_layers) for layer in (nn.Linear(WIDE, WIDE), nn.Tanh())]
    return nn.ModuleDict(
        {"first": nn.Sequential(*layers), "second": nn.Sequential(*second, nn.Linear(WIDE, 3))}
    )


def step(model: Model, m: Any, lazy: Lazy) -> tuple[int, list[Tensor | None]]:
    data, labels = torch.randn(N_ROWS, WIDE), torch.randint(0, 3, (N_ROWS,))
    memory = Allocations()
    x, y = lazy(data, labels)
    with memory:
        loss = model(m, x, y)
    with memory:
        loss.backward()
    return memory.peak, [p.grad for p in m.parameters()]


@pytest.mark.parametrize("share", [0.5, 0.4])
@pytest.mark.parametrize("model", MODELS)
def test_the_first_step_is_as_the_second(model: Model, share: float) -> None:
    compare(model, share, 3)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch.compile, in eager too
@pytest.mark.parametrize("share", [0.7, 0.6])
@pytest.mark.parametrize("model", CUTS)
def test_the_first_step_of_what_is_cut(model: Model, share: float) -> None:
    compare(model, share, 6)


def compare(model: Model, share: float, n_layers: int) -> None:
    """Two steps under a share of eager's peak: both keep it, with eager's gradients."""
    if model is compiled:
        step(model, make(n_layers), eager)  # what the compiler makes once
    most, wanted = step(model, make(n_layers), eager)
    m = make(n_layers)
    gc.collect()
    steps._shares.clear()
    plans.lasting.clear()
    make(n_layers)  # seeded: the same batch
    with koila.config(memory_limit=there() + BATCH + int(share * most)):
        first, gradients = step(model, m, koila.lazy)
        m.zero_grad()
        second, _ = step(model, m, koila.lazy)
    shares = first / most, second / most
    assert max(shares) <= share, f"{shares} of eager's"
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-6)
