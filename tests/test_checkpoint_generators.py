# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with preserve_rng_state=False: what draws nothing runs in chunks, what draws is left
to torch, whose second run draws other numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from allocations import Allocations
from koila.running import checkpoint_bodies
from oracle import Lazy, assert_seen, eager, is_whole

Body = Callable[[Any], Any]


class Block(nn.Module):
    """A user's layer, which draws while it trains if `p` is set."""

    def __init__(self, n: int, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.inner, self.p_drop = nn.LayerNorm(n), nn.Linear(n, n), p

    def forward(self, x: Any) -> Any:
        h = self.inner(self.norm(x)).tanh()
        return x + (F.dropout(h, self.p_drop) if self.p_drop and self.training else h)


class Attention(nn.Module):
    def __init__(self, n: int, p: float = 0.0) -> None:
        super().__init__()
        self.all, self.dropout = nn.Linear(n, 3 * n), p

    def forward(self, x: Any) -> Any:
        parts = [part.unflatten(-1, (2, -1)) for part in self.all(x).chunk(3, -1)]
        p = self.dropout if self.training else 0.0
        return x + F.scaled_dot_product_attention(*parts, dropout_p=p).flatten(-2)


def step(lazy: Lazy, make: Callable[[], nn.Module], use_reentrant: bool) -> list[Any]:
    torch.manual_seed(3)
    layers = nn.ModuleList([make(), make()]).double()
    head = nn.Linear(8, 1).double()
    x = lazy(torch.randn(7, 8, dtype=torch.float64).requires_grad_())
    h = x * 2
    words = {"use_reentrant": use_reentrant, "preserve_rng_state": False}
    for layer in layers:
        h = checkpoint(layer, h, **words)
    loss = head(h).square().mean()
    loss.backward()
    gradients = [p.grad for p in (*layers.parameters(), *head.parameters())]
    return [loss.detach() + 0, *gradients, torch.rand(3)]


def plain(n: int = 8) -> list[Callable[[], nn.Module]]:
    return [
        lambda: Block(n),
        lambda: Attention(n),
        lambda: nn.Sequential(nn.Linear(n, n), nn.Dropout(0.5), nn.ReLU()).eval(),
        lambda: nn.Sequential(nn.Linear(n, n), nn.Dropout(0.0), nn.BatchNorm1d(n)),
        lambda: nn.TransformerEncoderLayer(n, 2, n, dropout=0.0),
    ]


def drawing(n: int = 8) -> list[Callable[[], nn.Module]]:
    return [
        lambda: Block(n, 0.5),
        lambda: Attention(n, 0.5),
        lambda: nn.Sequential(nn.Linear(n, n), nn.Dropout(0.5), nn.ReLU()),
        lambda: nn.Sequential(nn.Linear(n, n), nn.Dropout1d(0.5), Block(n)),
        lambda: nn.TransformerEncoderLayer(n, 2, n, dropout=0.5),
    ]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("make", range(5))
def test_what_draws_nothing_is_recorded(
    make: int, use_reentrant: bool, chunks: int, caplog: pytest.LogCaptureFixture
) -> None:
    want = step(eager, plain()[make], use_reentrant)
    with koila.config(chunks=chunks):
        got = step(koila.lazy, plain()[make], use_reentrant)
    assert_seen(got, want, "values and gradients", exact_bits=is_whole(chunks))
    assert koila.report().n_chunks == chunks
    assert not any(ran.whole for ran in koila.report().programs if chunks > 1)
    assert not caplog.records


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("make", range(5))
def test_what_draws_is_left_to_torch(make: int, use_reentrant: bool, chunks: int) -> None:
    """The gradient is of the numbers that the second run draws."""
    want = step(eager, drawing()[make], use_reentrant)
    with koila.config(chunks=chunks):
        got = step(koila.lazy, drawing()[make], use_reentrant)
    assert_seen(got, want, "values and gradients", exact_bits=is_whole(chunks))


def hidden(x: Any) -> Any:
    """Draw in a way that is not seen before it runs."""
    return getattr(F, "".join(("drop", "out")))(x, 0.5)


def hidden_plain(x: Any) -> Any:
    return x * getattr(torch, "".join(("ra", "nd")))(8, dtype=torch.float64)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("body", [hidden, hidden_plain])
def test_a_draw_that_comes_as_a_surprise_is_refused(body: Body, use_reentrant: bool) -> None:
    with koila.config(chunks=3):
        h = koila.lazy(torch.ones(7, 8, dtype=torch.float64).requires_grad_()) * 2
        with pytest.raises(koila.KoilaError, match="draws random numbers with preserve_rng_state"):
            checkpoint(body, h, use_reentrant=use_reentrant, preserve_rng_state=False)
        kept = checkpoint(body, h, use_reentrant=use_reentrant)  # its numbers are drawn once
        kept.sum().backward()


def test_the_reason_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with koila.config(chunks=3), caplog.at_level(logging.WARNING, "koila"):
        h = koila.lazy(torch.ones(7, 8).requires_grad_()) * 2
        checkpoint(nn.Dropout(0.5), h, use_reentrant=False, preserve_rng_state=False)
    assert "preserve_rng_state=False draws other random numbers in backward" in caplog.text


def test_what_seems_to_draw() -> None:
    seems = checkpoint_bodies.seems_to_draw
    assert [any(map(seems, make().modules())) for make in plain()] == [False] * 5
    assert [any(map(seems, make().modules())) for make in drawing()] == [True] * 5
    found = checkpoint_bodies.reached_by
    assert "dropout" in found([lambda x: F.dropout(x, 0.1)]).words
    assert "dropout_p" in found([_attends]).words
    assert not checkpoint_bodies.draws(found([lambda x: x.tanh() * 2]).words)


def peak(lazy: Lazy, is_preserving: bool) -> int:
    torch.manual_seed(0)
    layers = nn.ModuleList([Block(64) for _ in range(4)])
    x = torch.randn(4096, 64)
    memory = Allocations()
    memory.count(x, layers.state_dict())
    with memory:
        pass
    with memory:
        h = lazy(x).requires_grad_()
        for layer in layers:
            h = checkpoint(layer, h, use_reentrant=False, preserve_rng_state=is_preserving)
        h.square().mean().backward()
    return memory.peak


@pytest.mark.parametrize("is_preserving", [True, False])
def test_it_takes_less_memory(is_preserving: bool) -> None:
    whole = peak(eager, is_preserving)
    with koila.config(chunks=8):
        assert peak(koila.lazy, is_preserving) < 0.6 * whole


def _attends(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
