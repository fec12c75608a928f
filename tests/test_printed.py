# SPDX-License-Identifier: Apache-2.0
"""What print() and errors show of a lazy is what they show of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Geometric, Normal

import koila
from oracle import Lazy, eager

N_ROWS = 7
SHOWN: dict[str, Callable[[Any, Any], Any]] = {
    "a loss": lambda h, y: F.cross_entropy(h, y),
    "a mean": lambda h, y: h.square().mean(),
    "a layer": lambda h, y: h,
    "an activation": lambda h, y: h.relu(),
    "rows": lambda h, y: h[:2],
    "a row": lambda h, y: h[0, 1],
    "a sum of two": lambda h, y: h + h.exp(),
    "a view": lambda h, y: h.view(-1, 1),
    "of another dtype": lambda h, y: h.float().sum(),
    "what has no gradient": lambda h, y: h.detach(),
    "labels": lambda h, y: y,
    "joined": lambda h, y: torch.cat([h, h]),
}


def data(lazy: Lazy) -> tuple[Any, Any, nn.Linear]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).double()
    x, y = lazy(torch.randn(N_ROWS, 4).double(), torch.randint(0, 3, (N_ROWS,)))
    return x, y, layer


def shown(lazy: Lazy, make: Callable[[Any, Any], Any]) -> list[str]:
    x, y, layer = data(lazy)
    made = make(layer(x), y)
    return [str(made), f"{made:.6f}" if made.dim() == 0 else f"{made}", str(made)]


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("what", SHOWN)
def test_it_names_the_node(what: str, chunks: int) -> None:
    want = shown(eager, SHOWN[what])
    with koila.config(chunks=chunks):
        got = shown(koila.lazy, SHOWN[what])
    assert got == want


def test_a_call_of_koilas_own_has_no_name() -> None:
    x, _, layer = data(koila.lazy)
    with koila.config(chunks=3):
        assert str(layer(x).softmax(0)).endswith("requires_grad=True)")


def test_a_leaf_says_that_it_requires_a_gradient() -> None:
    with koila.config(chunks=3):
        x = koila.lazy(torch.ones(7, 2)).requires_grad_()
        assert str(x) == str(torch.ones(7, 2).requires_grad_())
        assert str((x * 2).detach().requires_grad_()) == str(
            (torch.ones(7, 2) * 2).requires_grad_()
        )


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_it_changes_nothing(chunks: int) -> None:
    """Neither statistics, nor the generator, nor gradients; of a write or a draw no name is shown,
    but that a gradient is required."""

    def story(lazy: Lazy, is_printing: bool) -> list[Tensor | None]:
        x, y, layer = data(lazy)
        norm = nn.BatchNorm1d(3).double()
        hs = [layer(x)]
        for step in (norm, F.dropout, lambda h: h * 1, lambda h: h.add_(1)):
            hs.append(step(hs[-1]))
        loss = F.cross_entropy(hs[-1], y)
        if is_printing:
            assert all("grad" in str(h) for h in (*hs, loss))
        loss.backward()
        kept = norm.running_mean, norm.running_var, norm.num_batches_tracked
        return [loss.detach() + 0, *(p.grad for p in layer.parameters()), *kept, torch.rand(2)]

    want = story(eager, False)
    with koila.config(chunks=chunks):
        for is_printing in (True, False):
            torch.testing.assert_close(story(koila.lazy, is_printing), want, rtol=1e-10, atol=1e-12)


CHECKED = True  # whatever the default is: what other tests import may have changed it
BAD: list[Callable[[Any], Distribution | Tensor]] = [
    lambda h: Normal(h, h - 100, CHECKED),
    lambda h: Normal(h, 1.0, CHECKED).log_prob(h * float("nan")),
    lambda h: Categorical(torch.stack([h - 100, h + 300], 1), validate_args=CHECKED),
    lambda h: Geometric(h - 100, validate_args=CHECKED),
]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("make", BAD)
def test_an_error_of_a_distribution(make: Callable[[Any], Any], chunks: int) -> None:
    def said(lazy: Lazy) -> str:
        x, _, layer = data(lazy)
        with pytest.raises(ValueError, match="Expected") as caught:
            make(layer(x).mean(1))
        return str(caught.value)

    want = said(eager)
    with koila.config(chunks=chunks):
        assert said(koila.lazy) == want
