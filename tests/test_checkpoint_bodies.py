# SPDX-License-Identifier: Apache-2.0
"""Bodies of checkpoints that read, branch or run code of the user's, after calls that are recorded:
what waits is no part of what torch's hooks see, so torch's recomputation finds what it saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from oracle import Lazy, assert_same_story, assert_seen, eager, tell
from stories import each_split_further, rows
from test_bridge import Square

Body = Callable[[nn.Module, Tensor], Tensor]
BODIES: dict[str, Body] = {}


def add(body: Body) -> Body:
    BODIES[body.__name__] = body
    return body


@add
def a_number_is_read(layer: nn.Module, x: Tensor) -> Tensor:
    h: Tensor = layer(x)
    return (h * 2 if h.mean() > -100 else h).tanh()


@add
def a_custom_function(layer: nn.Module, x: Tensor) -> Tensor:
    h: Tensor = Square.apply(layer(x))  # type: ignore[no-untyped-call]
    return h.tanh()


@add
def unique(layer: nn.Module, x: Tensor) -> Tensor:
    n = len(torch.unique((x > 0).long()))
    return torch.tanh(layer(x) * n)


@add
def where(layer: nn.Module, x: Tensor) -> Tensor:
    h: Tensor = layer(x)
    (places,) = torch.where(h.detach().flatten() > 0)
    return (h * (1 + places.numel() * 0.01)).tanh()


@add
def asserted(layer: nn.Module, x: Tensor) -> Tensor:
    assert not torch.isnan(x).any()
    h: Tensor = layer(x)
    assert torch.isfinite(h).all()
    return h.tanh()


@add
def written_by_a_mask(layer: nn.Module, x: Tensor) -> Tensor:
    h: Tensor = layer(x).clone()
    h[h > 0] *= 2
    return h


@add
def dropout_after_a_read(layer: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(layer(x), 0.3) if x.sum() < 1e9 else x


@add
def one_in_another(layer: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = checkpoint(a_custom_function, layer, x * 2, use_reentrant=False)
    return made * 2


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("name", BODIES)
@each_split_further
def test_equals_eager(chunks: int | None, name: str, is_reentrant: bool) -> None:
    def story(lazy: Lazy) -> Any:
        first, layer = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        h = first(lazy(rows(4))) + 1
        for _ in range(2):
            h = checkpoint(BODIES[name], layer, h, use_reentrant=is_reentrant)
        loss = first(h).square().mean()
        loss.backward()
        return loss, h, [p.grad for p in (*first.parameters(), *layer.parameters())]

    want, want_state = tell(story, eager)
    with koila.config(chunks=chunks):
        got, got_state = tell(story, koila.lazy)
    assert_seen(got, want, name, exact_bits=False)
    assert torch.equal(got_state, want_state)


@pytest.mark.parametrize("is_reentrant", [False, True])
@each_split_further
def test_what_is_made_is_written(chunks: int | None, is_reentrant: bool) -> None:
    """The body's last call keeps it; torch makes that once more before the body's backward."""

    def story(lazy: Lazy) -> Any:
        layer = nn.Linear(4, 4).double()
        x = lazy(rows(4))
        h = checkpoint(lambda a: layer(a).tanh(), layer(x), use_reentrant=is_reentrant)
        h += x
        h[:, 0] *= 2
        loss = layer(h).square().mean()
        loss.backward()
        return loss, h, [p.grad for p in layer.parameters()]

    assert_same_story(story, chunks, exact_bits=False)


# What a body made, and is written afterwards ------------------------------------------------------


def written(lazy: Any, body: str, is_reentrant: bool) -> Tensor:
    """The gradient of a weight, where what a checkpoint's function made, and keeps, is written."""
    w = torch.linspace(-1, 1, 12).double().view(3, 4).requires_grad_()
    x = lazy(torch.linspace(-1, 1, 33).double().view(11, 3).requires_grad_())

    def block(function: Any, *args: Tensor) -> Any:
        return checkpoint(function, *args, use_reentrant=is_reentrant)

    def write(h: Tensor) -> Tensor:
        with torch.no_grad():
            h.mul_(0.5)
        return h * 1

    def make(a: Tensor) -> tuple[Tensor, Tensor]:
        h = (a @ w).tanh()
        if body == "in a body inside":
            block(write, h)
        elif body == "in a body without gradients":
            with torch.no_grad():
                block(write, h)
        elif body == "read by a body inside":
            return h, block(lambda b: (b[:, :1] + h).exp(), a)
        return h, h * h

    h, k = block(make, x)
    c = k.detach().requires_grad_() * 0 if body == "after a cut" else 0 * k
    if body == "after a cut" or body == "after a call" or body == "read by a body inside":
        write(h)
    c = Square.apply(k) + c if body == "after a call" else c  # type: ignore[no-untyped-call]
    (h.sin() + k + c).sum().backward()
    assert w.grad is not None
    return w.grad


@pytest.mark.parametrize("chunks", [2, 3, 7, 11])
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("body", ["after a cut", "after a call"])
def test_what_a_body_made_may_be_written_after_it(
    body: str, is_reentrant: bool, chunks: int
) -> None:
    """torch makes it once more: no call of the body misses it."""
    with koila.config(chunks=chunks):
        got = written(koila.lazy, body, is_reentrant)
    torch.testing.assert_close(got, written(eager, body, is_reentrant), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("chunks", [2, 3, 7, 11])
@pytest.mark.parametrize(
    "body", ["in a body inside", "in a body without gradients", "read by a body inside"]
)
def test_what_a_body_made_and_wrote_is_refused(body: str, chunks: int) -> None:
    """torch runs the write once more too, or lets a body inside read what was written: its
    gradient is of numbers that no call of the forward had."""
    with koila.config(chunks=chunks), pytest.raises(koila.KoilaError, match="checkpoint: a tensor"):
        written(koila.lazy, body, False)


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("body", ["in a body inside", "in a body without gradients"])
def test_a_reentrant_body_that_writes_what_it_keeps(body: str) -> None:
    """torch sees that, as it does where no checkpoint is."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written(eager, body, True)
    with koila.config(chunks=3), pytest.raises(RuntimeError, match="by an inplace operation"):
        written(koila.lazy, body, True)
