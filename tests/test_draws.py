# SPDX-License-Identifier: Apache-2.0
"""Random numbers: no two chunks draw the same, and what was drawn once is drawn again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import koila
from allocations import Allocations
from chunked import split
from oracle import Lazy, assert_close, assert_same_story, assert_seen, eager, is_whole

pytestmark = pytest.mark.sanitize

Draw = Callable[[Tensor], Tensor]

#: How often these draw depends on numbers, or on the whole of them.
BY_VALUE: dict[str, Draw] = {
    "poisson": torch.poisson,
    "multinomial": lambda x: torch.multinomial(x, 4, replacement=True),
    "multinomial, each once": lambda x: torch.multinomial(x, 4),
    "rrelu": lambda x: F.rrelu(x - 3, training=True),
    "rrelu, all negative": lambda x: F.rrelu(-x, training=True),
}


@pytest.mark.parametrize("chunks", [None, 1, 2, 4, 5, 12])
@pytest.mark.parametrize("name", BY_VALUE)
def test_draws_by_value(name: str, chunks: int | None) -> None:
    def story(lazy: Lazy) -> Any:
        weight = torch.rand(8, dtype=torch.float64, requires_grad=True)
        x = lazy(torch.rand(12, 8, dtype=torch.float64) * 5)
        hidden = F.dropout(x * weight, 0.1) + 0.1
        drawn = BY_VALUE[name](hidden)
        loss = (F.dropout(hidden, 0.3) + drawn.double().mean(1, keepdim=True)).pow(2).mean()
        loss.backward()
        return drawn.detach(), loss, weight.grad

    assert_same_story(story, chunks)


#: Elementwise draws that a program in chunks makes in eager's order.
IN_ORDER: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout_": lambda x: F.dropout(x, 0.5, inplace=True),
    "rand_like": lambda x: x * torch.rand_like(x),
    "uniform_": lambda x: x * (x * 1.0).detach().uniform_(),
}

ASK: dict[str, Callable[[Tensor], Any]] = {
    "chunks": lambda loss: loss.backward(),
    "create_graph": lambda loss: loss.backward(create_graph=True),
    "hook": lambda loss: (loss.register_hook(lambda grad: grad), loss.backward()),
}


def step(draw: Draw, ask: Callable[[Tensor], Any], enter: Callable[[Tensor], Tensor]) -> Any:
    """Read a loss, then ask for gradients; returns both, and the next random numbers."""
    torch.manual_seed(3)
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    x = enter(torch.linspace(-1, 1, 35, dtype=torch.float64).view(7, 5))
    loss = (F.dropout(draw(x * weight), 0.25) ** 2).mean()
    value = torch.tensor(loss.item(), dtype=torch.float64)
    ask(loss)
    assert weight.grad is not None
    return value, weight.grad.detach(), torch.rand(3, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("name", IN_ORDER)
@pytest.mark.parametrize("ask", ASK)
def test_a_read_and_the_gradient_after_it_have_the_same_draws(name: str, ask: str) -> None:
    """Also where the read was in chunks and the gradient must run whole."""
    want = step(IN_ORDER[name], ASK[ask], lambda x: x)
    partly = "create_graph" if ask == "create_graph" else ""
    with split(3, partly=partly):
        got = step(IN_ORDER[name], ASK[ask], koila.lazy)
    for a, b, what in zip(got, want, ("loss", "gradient", "next"), strict=True):
        assert_close(a, b, what)


# Draws that nobody looks at -----------------------------------------------------------------------


def dead_before_a_read(x: Tensor, weight: Tensor) -> Tensor:
    hidden = x @ weight
    F.dropout(hidden.sin(), 0.5)
    n = (x + 1).sum().item()
    return (F.dropout(hidden, 0.5) * n).pow(2).mean()


def dead_and_nothing_else_waits(x: Tensor, weight: Tensor) -> Tensor:
    F.dropout(x @ weight, 0.5)
    n = (x + 1).sum().item()
    return F.dropout(weight * n, 0.5).sum()


@pytest.mark.parametrize("program", [dead_before_a_read, dead_and_nothing_else_waits])
@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 7])
def test_a_dead_draw_moves_the_generator(
    program: Callable[[Tensor, Tensor], Tensor], chunks: int | None
) -> None:
    def run(enter: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(3)
        weight = torch.ones(5, 4, dtype=torch.float64, requires_grad=True)
        x = enter(torch.linspace(-1, 1, 35, dtype=torch.float64).view(7, 5))
        loss = program(x, weight)
        loss.backward()
        assert weight.grad is not None
        return [loss.detach(), weight.grad, torch.rand(3, dtype=torch.float64)]

    want = run(lambda x: x)
    with split(chunks):
        got = run(koila.lazy)
    for one, other in zip(got, want, strict=True):
        assert_close(torch.as_tensor(one.tolist(), dtype=one.dtype), other, "a dead draw")


#: Products over the rows whose results torch lays out otherwise where there is one row.
OVER_ROWS = {
    "ni,jin->ij": ((7, 4), (6, 4, 7)),
    "nkjl,jikm->jmlik": ((3, 3, 2, 4), (2, 4, 3, 3)),
    "jnmlk,j->mlj": ((2, 2, 4, 4, 3), (2,)),
    "nmlik,ilmk->kmli": ((5, 3, 2, 3, 4), (3, 2, 3, 4)),
    "njk,lkn->jkl": ((5, 4, 3), (3, 3, 5)),
    "nij,njk->ki": ((5, 4, 3), (5, 3, 4)),
}
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "dropout of what is made of it": lambda h: F.dropout(h * 2 + 1, 0.5),
    "rand_like": lambda h: torch.rand_like(h) * h,
    "bernoulli": lambda h: torch.bernoulli(h.detach().sigmoid()) * h,
    "normal": lambda h: torch.normal(h.detach(), 1.0) * h,
    "exponential_": lambda h: torch.empty_like(h).exponential_() * h,
    "gumbel_softmax": lambda h: F.gumbel_softmax(h),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "dropout of a view": lambda h: F.dropout(h.transpose(0, 1), 0.5),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("letters", OVER_ROWS)
@pytest.mark.parametrize("is_apart", [False, True])
def test_draws_for_products_over_the_rows(letters: str, draw: str, is_apart: bool) -> None:
    """A random call fills memory in its order: with one row a chunk too that is as of the whole."""
    first, second = letters.split("->")[0].split(",")
    shapes = OVER_ROWS[letters]
    n_rows = shapes[0][first.index("n")]

    def story(lazy: Any) -> list[Tensor | None]:
        torch.manual_seed(1)
        x, y = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
        if is_apart:  # its dims lie in memory in another order
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        x.requires_grad_()
        rows = lazy(x, batch=first.index("n"))
        other = lazy(y, batch=second.index("n")) if "n" in second else y
        made = DRAWS[draw](torch.einsum(letters, rows * 1, other))
        weights = torch.linspace(0.5, 2, made.numel(), dtype=torch.float64)
        (made * weights.view(made.shape)).sum().backward()
        return [made.detach() + 0, x.grad, torch.rand(2)]

    want = story(eager)
    for chunks in {2, n_rows}:
        with koila.config(chunks=chunks):
            got = story(koila.lazy)
        assert_seen(got, want, f"{letters}, {draw}", exact_bits=False)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("chunks", [None, 1, 3])
@pytest.mark.parametrize("is_preserved", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("is_grad_enabled", [True, False])
def test_checkpoints_that_draw(
    use_reentrant: bool, is_preserved: bool, is_grad_enabled: bool, chunks: int | None
) -> None:
    """Where it does not preserve the generator's state torch draws other numbers going back."""

    def story(lazy: Lazy) -> list[Tensor | None]:
        torch.manual_seed(2)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.5)).double()
        x = lazy(torch.randn(7, 4, dtype=torch.float64).requires_grad_())
        words = {"use_reentrant": use_reentrant, "preserve_rng_state": is_preserved}
        with torch.set_grad_enabled(is_grad_enabled):
            made = F.dropout(checkpoint(model, x * 2, **words), 0.5)
        if is_grad_enabled:
            made.square().sum().backward()
        return [made.detach() + 0, *(p.grad for p in model.parameters()), torch.rand(3)]

    want = story(eager)
    with koila.config(chunks=chunks):
        got = story(koila.lazy)
    assert_seen(got, want, "what it drew", exact_bits=is_whole(chunks))


@pytest.mark.parametrize("chunks", [None, 1, 3])
def test_hooks_of_parameters_draw_after_the_program(chunks: int | None) -> None:
    """A hook that adds noise to a gradient goes on where the program's draws ended."""

    def story(lazy: Lazy) -> list[Tensor | None]:
        torch.manual_seed(2)
        w = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        x = lazy(torch.randn(7, 4, dtype=torch.float64))
        w.register_hook(lambda gradient: gradient + torch.rand_like(gradient))
        F.dropout(x @ w, 0.5).square().sum().backward()
        return [w.grad, torch.rand(3)]

    want = story(eager)
    with split(chunks):
        got = story(koila.lazy)
    assert_seen(got, want, "the noise", exact_bits=is_whole(chunks))


@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like])
def test_noise_like_a_lazy_takes_its_own_memory(draw: Callable[[Tensor], Tensor]) -> None:
    """It reads only the sizes of the lazy, so nothing stands in for the numbers."""
    x, memory = torch.randn(1024, 256), Allocations()
    memory.count(x)
    with memory:
        lazy = koila.lazy(x)
    with memory:
        noise = draw(lazy)
    assert memory.left == x.nbytes + noise.nbytes
    assert memory.peak == memory.left
