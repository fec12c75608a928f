# SPDX-License-Identifier: Apache-2.0
"""Random numbers: who asks the generator finds it where eager has it, and what drew stays drawn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from chunked import split

CHUNKS = [None, 1, 2, 3, 6]


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
    with split(chunks), warnings.catch_warnings():
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


def drawn_in_a_barrier(x: Tensor, w: Tensor) -> Tensor:
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
        drawn_in_a_barrier,
        noised,
    ],
)
def test_a_live_run_draws_what_was_read(
    model: Callable[[Tensor, Tensor], Tensor], chunks: int | None
) -> None:
    """create_graph makes the program live after its numbers were read in chunks."""
    w = torch.linspace(-1, 2, 20, dtype=torch.float64).view(5, 4).requires_grad_()
    with split(chunks, partly="create_graph"):
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
