"""Random numbers: no two chunks draw the same, what was drawn once is drawn again, and who asks the
generator finds it where eager has it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from oracle import assert_close

CHUNKS = [None, 1, 2, 3, 6]
Draw = Callable[[Tensor], Tensor]

#: How often these draw depends on numbers: on stand-ins they would draw less, or raise.
BY_VALUE: dict[str, Draw] = {
    "poisson": torch.poisson,
    "multinomial": lambda x: torch.multinomial(x, 4, replacement=True),
    "rrelu": lambda x: F.rrelu(-x, training=True),
}


@pytest.mark.parametrize("name", BY_VALUE)
def test_chunks_draw_numbers_of_their_own(name: str) -> None:
    x = torch.full((12, 8), 5.0, dtype=torch.float64)
    before = torch.get_rng_state()
    with koila.config(chunks=4):
        drawn = BY_VALUE[name](koila.lazy(x) * 1.0).tolist()
    chunks = [str(drawn[i : i + 3]) for i in range(0, 12, 3)]
    assert len(set(chunks)) == 4
    assert not torch.equal(torch.get_rng_state(), before)


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
    with koila.config(chunks=3):
        got = step(IN_ORDER[name], ASK[ask], koila.lazy)
    for a, b, what in zip(got, want, ("loss", "gradient", "next"), strict=True):
        assert_close(a, b, what)


def numbers() -> Tensor:
    return torch.linspace(-1, 1, 30, dtype=torch.float64).view(6, 5).clone()


def seeded(seed: int, draw: Callable[[], Any]) -> Any:
    torch.manual_seed(seed)
    return draw()


# The generator asked and set while draws wait -----------------------------------------------------


def seed_between(x: Tensor) -> Any:
    one = F.dropout(x, 0.5)
    torch.manual_seed(7)
    return one, F.dropout(x, 0.5)


def seed_by_method(x: Tensor) -> Any:
    one = F.dropout(x, 0.5)
    torch.default_generator.manual_seed(7)
    return one, F.dropout(x, 0.5)


def restore(x: Tensor) -> Any:
    state = torch.get_rng_state()
    torch.manual_seed(7)
    one = F.dropout(x, 0.5)
    torch.set_rng_state(state)
    return one, F.dropout(x, 0.5)


def keep_and_go_back(x: Tensor) -> Any:
    one = F.dropout(x, 0.5)
    state = torch.get_rng_state()
    two = F.dropout(x, 0.5)
    torch.set_rng_state(state)
    return one, two, F.dropout(x, 0.5)


def fork(x: Tensor) -> Any:
    one = F.dropout(x, 0.5)
    with torch.random.fork_rng():
        two = F.dropout(x, 0.5)
    return one, two, F.dropout(x, 0.5)


def dead_draw(x: Tensor) -> Any:
    F.dropout(x, 0.5)
    return torch.get_rng_state(), F.dropout(x, 0.5)


def clone(x: Tensor) -> Any:
    one = F.dropout(x, 0.5)
    other = torch.default_generator.clone_state()
    return one, torch.rand(3, generator=other), F.dropout(x, 0.5)


TOUCHES = [seed_between, seed_by_method, restore, keep_and_go_back, fork, dead_draw, clone]


def run(program: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    results = [torch.as_tensor(result) for result in program(x)]
    return [torch.as_tensor(r.tolist()) for r in (*results, torch.get_rng_state())]


@pytest.mark.parametrize("program", TOUCHES)
def test_generator_touched_while_draws_wait(program: Callable[[Tensor], Any]) -> None:
    """What was recorded before has drawn, as in eager: the same numbers, and nothing to warn of."""
    wanted = run(program, numbers())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(program, koila.lazy(numbers()))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_seed_parts_the_draws(chunks: int | None) -> None:
    """In chunks too, what is drawn before a seed is not changed by it, and what follows is its."""
    with koila.config(chunks=chunks), warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = [
            seeded(seed, lambda: F.dropout(koila.lazy(numbers()), 0.5).tolist()) for seed in (3, 7)
        ]
        end = torch.get_rng_state()
        torch.manual_seed(3)
        one, two = seed_between(koila.lazy(numbers()))
        assert [one.tolist(), two.tolist()] == alone
        assert torch.equal(torch.get_rng_state(), end)


# What drew in chunks, run live --------------------------------------------------------------------


def dropped(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(x @ w, 0.5)


def dropped_in_place(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(x @ w, 0.5, inplace=True)


def dropped_in_a_view(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    F.dropout(h[:, 1:3], 0.5, inplace=True)
    return h


def dropped_by_columns(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout((x @ w).t(), 0.5).t()


def drawn_twice(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(F.dropout(x @ w, 0.3), 0.3)


def drawn_in_a_joint(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w) * F.dropout((x @ w).mean(0), 0.5)


def noised(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    return h + torch.normal(h.detach(), 1.0)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(
    "model",
    [
        dropped,
        dropped_in_place,
        dropped_in_a_view,
        dropped_by_columns,
        drawn_twice,
        drawn_in_a_joint,
        noised,
    ],
)
def test_a_live_run_draws_what_was_read(
    model: Callable[[Tensor, Tensor], Tensor], chunks: int | None
) -> None:
    """create_graph makes the program live after its numbers were read in chunks."""
    w = torch.linspace(-1, 2, 20, dtype=torch.float64).view(5, 4).requires_grad_()
    with koila.config(chunks=chunks):
        torch.manual_seed(3)
        y = model(koila.lazy(numbers()), w)
        read = y.tolist()
        state = torch.get_rng_state()
        loss = y.pow(2).sum()
        (gradient,) = torch.autograd.grad(loss, w, create_graph=True)
        live = koila._core.force(y) if koila.is_lazy(y) else y
        torch.testing.assert_close(
            live.detach(), torch.tensor(read, dtype=live.dtype), rtol=1e-10, atol=1e-10
        )
        assert torch.equal(torch.get_rng_state(), state), "it drew once more"

        torch.manual_seed(3)
        model(koila.lazy(numbers()), w).pow(2).sum().backward()
        torch.testing.assert_close(gradient.detach(), w.grad, rtol=1e-10, atol=1e-10)
