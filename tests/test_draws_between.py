# SPDX-License-Identifier: Apache-2.0
"""Plain draws between the record of a random call and its run come after it, as in eager; where
koila cannot see one, that is an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import rand as bound_before

import koila
from koila.random import plain
from oracle import Lazy, assert_same_story, assert_seen, eager, split, tell

CHUNKS = [None, 1, 2, 3, 7, 12]
ROWS = 12

Draw = Callable[[], Any]

#: What a script draws between a forward and its backward, without a lazy in it.
DRAWS: dict[str, Draw] = {
    "rand": lambda: torch.rand(3),
    "rand of no dim": lambda: torch.rand([]),
    "randn": lambda: torch.randn(17),
    "randint": lambda: torch.randint(100, (5,)),
    "randperm": lambda: torch.randperm(9),
    "rand_like": lambda: torch.rand_like(torch.ones(4)),
    "randn_like": lambda: torch.randn_like(torch.ones(4)),
    "randint_like": lambda: torch.randint_like(torch.ones(4), 9),
    "normal": lambda: torch.normal(torch.zeros(5), 1.0),
    "normal of a size": lambda: torch.normal(0.0, 1.0, (3, 4)),
    "bernoulli": lambda: torch.bernoulli(torch.full((5,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(6), 3),
    "poisson": lambda: torch.poisson(torch.full((5,), 3.0)),
    "binomial": lambda: torch.binomial(torch.full((5,), 3.0), torch.full((5,), 0.5)),
    "gamma": lambda: torch.distributions.Gamma(2.0, 1.0).sample((3,)),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(3)).sample(),
    "bernoulli_": lambda: torch.empty(5).bernoulli_(0.5),
    "cauchy_": lambda: torch.empty(5).cauchy_(),
    "exponential_": lambda: torch.empty(5).exponential_(),
    "geometric_": lambda: torch.empty(5).geometric_(0.5),
    "log_normal_": lambda: torch.empty(5).log_normal_(),
    "normal_": lambda: torch.empty(5).normal_(),
    "random_": lambda: torch.empty(5, dtype=torch.int64).random_(),
    "uniform_": lambda: torch.empty(5).uniform_(),
    "method of a plain tensor": lambda: torch.full((5,), 0.5).bernoulli(),
    "dropout": lambda: F.dropout(torch.ones(9), 0.5),
    "a dropout module": lambda: nn.Dropout(0.5)(torch.ones(9)),
    "dropout2d": lambda: F.dropout2d(torch.ones(2, 5, 2, 2), 0.5),
    "dropout in place": lambda: F.dropout(torch.ones(9), 0.5, inplace=True),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(9), 0.5, training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(torch.ones(2, 5), 0.5, training=True),
    "native_dropout": lambda: torch.native_dropout(torch.ones(9), 0.5, True),
    "rrelu": lambda: F.rrelu(-torch.ones(5), training=True),
    "rrelu_": lambda: F.rrelu_(-torch.ones(5), training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.ones(5)),
    "attention": lambda: F.scaled_dot_product_attention(
        torch.ones(2, 3, 4), torch.ones(2, 3, 4), torch.ones(2, 3, 4), dropout_p=0.5
    ),
    "a recurrent layer": lambda: nn.LSTM(2, 3, num_layers=2, dropout=0.5)(torch.ones(4, 1, 2))[0],
    "initial weights": lambda: list(nn.Linear(4, 3).parameters()),
    "nn.init": lambda: nn.init.trunc_normal_(torch.empty(5)),
    "a shuffled loader": lambda: list(
        torch.utils.data.DataLoader(torch.arange(10), batch_size=4, shuffle=True)
    ),
    "random_split": lambda: [
        list(part) for part in torch.utils.data.random_split(range(6), [2, 4])
    ],
    "svd_lowrank": lambda: torch.svd_lowrank(torch.eye(4), q=2)[1],
    "a seed": lambda: torch.manual_seed(7).initial_seed(),
    "the state": torch.get_rng_state,
}


def step(lazy: Lazy, between: Draw, is_early: bool = False) -> Any:
    """One forward, something drawn, then more of the forward or at once the backward."""
    weight = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    hidden = F.dropout(lazy(torch.randn(ROWS, 5, dtype=torch.float64)) @ weight, 0.5)
    drawn = between() if is_early else None
    loss = (F.dropout(hidden.sin(), 0.3) + hidden).pow(2).mean()
    drawn = drawn if is_early else between()
    loss.backward()
    return loss, weight.grad, drawn, torch.rand(2)


@pytest.mark.parametrize("chunks", [None, 3])
@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_a_plain_draw_comes_after(name: str, is_early: bool, chunks: int | None) -> None:
    assert_same_story(lambda lazy: step(lazy, DRAWS[name], is_early), chunks)
    assert not hasattr(torch.rand, "__wrapped__"), "torch is as it was"


# Programs -----------------------------------------------------------------------------------------


def next_batch_first(lazy: Lazy) -> Any:
    """nanoGPT's loop: the next batch is fetched between forward and backward."""
    data = torch.arange(64.0, dtype=torch.float64)
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def get_batch() -> Any:
        return lazy(torch.stack([data[i : i + 4] for i in torch.randint(60, (ROWS,))]))

    x, seen = get_batch(), []
    for _ in range(3):
        loss = F.dropout(x @ weight, 0.5).pow(2).mean()
        x = get_batch()
        loss.backward()
        seen.append(loss.item())
        with torch.no_grad():
            weight -= 1e-4 * weight.grad
    return seen, weight


def drop_layers(lazy: Lazy) -> Any:
    weight = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    hidden = lazy(torch.randn(ROWS, 5, dtype=torch.float64))
    for _ in range(6):
        if torch.rand([]) < 0.5:
            hidden = hidden + F.dropout(hidden @ weight, 0.3)
    loss = hidden.pow(2).mean()
    loss.backward()
    return loss, weight.grad


def drop_paths(lazy: Lazy) -> Any:
    weight = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    hidden = lazy(torch.randn(ROWS, 5, dtype=torch.float64))
    for _ in range(3):
        mask = hidden.new_empty((hidden.shape[0], 1)).bernoulli_(0.7)
        hidden = hidden + F.dropout(hidden @ weight, 0.3) * mask / 0.7
    loss = hidden.pow(2).mean()
    loss.backward()
    return loss, weight.grad


def sample_latents(lazy: Lazy) -> Any:
    weight = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    x = lazy(torch.randn(ROWS, 5, dtype=torch.float64))
    mean, log_var = F.dropout(x @ weight, 0.5).chunk(2, 1)
    latent = mean + torch.randn(ROWS, 3, dtype=torch.float64) * (log_var / 2).exp()
    loss = (latent.pow(2) + torch.randn_like(latent) * latent).mean()
    loss.backward()
    return loss, weight.grad


def read_and_draw(lazy: Lazy) -> Any:
    """What was settled draws at once, after what waits."""
    weight = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    x = lazy(torch.randn(ROWS, 5, dtype=torch.float64))
    hidden = F.dropout(x @ weight, 0.5)
    doubled = x * 2
    total = doubled.sum().item()
    loss = F.dropout(hidden, 0.2).sum() * total + F.dropout(doubled, 0.5).sum()
    loss.backward()
    return loss, weight.grad


def draw_on_a_parameter_after_a_dead_draw(lazy: Lazy) -> Any:
    weight = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    x = lazy(torch.randn(ROWS, 5, dtype=torch.float64))
    F.dropout(x @ weight, 0.5)
    loss = F.dropout(weight * (x * 2).sum().item(), 0.5).sum()
    loss.backward()
    return loss, weight.grad


def let_numpy_draw(lazy: Lazy) -> Any:
    """Its generator is its own."""
    np.random.seed(1)
    return step(lazy, lambda: np.random.rand(3).tolist()), np.random.rand(2).tolist()


PROGRAMS = [
    next_batch_first,
    drop_layers,
    drop_paths,
    sample_latents,
    read_and_draw,
    draw_on_a_parameter_after_a_dead_draw,
    let_numpy_draw,
]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_that_draw_in_between(program: Callable[[Lazy], Any], chunks: int | None) -> None:
    assert_same_story(program, chunks)


def test_numbers_that_were_drawn_early_are_drawn_again_live() -> None:
    """create_graph runs whole what a plain draw moved on, and what a read ran in chunks."""

    def program(lazy: Lazy) -> Any:
        weight = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
        hidden = F.dropout(lazy(torch.randn(ROWS, 5, dtype=torch.float64)) @ weight, 0.5)
        noise = torch.rand(2)
        loss = F.dropout(hidden, 0.3, inplace=True).pow(2).mean()
        value = loss.item()
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        gradient.pow(2).sum().backward()
        return value, noise, gradient, weight.grad

    for chunks in (None, 3):
        assert_same_story(program, chunks, partly="create_graph runs it whole")


# What cannot be seen ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [None, 3])
@pytest.mark.parametrize("unseen", [lambda: bound_before(3), lambda: torch.ops.aten.rand([3])])
def test_a_draw_that_cannot_be_seen_is_an_error(unseen: Draw, chunks: int | None) -> None:
    """It names both lines, nothing is lost, and asked again the program runs."""
    weight = torch.ones(5, 8, dtype=torch.float64, requires_grad=True)
    with split(chunks):
        loss = F.dropout(koila.lazy(torch.ones(ROWS, 5, dtype=torch.float64)) @ weight, 0.5).mean()
        unseen()
        state = torch.default_generator.get_state
        with pytest.raises(koila.KoilaError, match=r"test_draws_between.py:\d+.*:\d+.*lost"):
            loss.backward()
        assert weight.grad is None
        loss.backward()
    assert weight.grad is not None
    assert state().numel() > 0


def test_a_thread_that_took_the_place_of_one_that_drew() -> None:
    """The system gives its number again: it has not drawn, and an unseen draw is an error still."""
    idle = threading.Event()

    def draw() -> None:
        F.dropout(koila.lazy(torch.ones(ROWS, 5)), 0.5).sum().item()

    first = threading.Thread(target=draw)
    first.start()
    first.join()
    others = [threading.Thread(target=idle.wait) for _ in range(8)]
    for other in others:
        other.start()
    try:
        assert first.ident in [other.ident for other in others]
        loss = F.dropout(koila.lazy(torch.ones(ROWS, 5)), 0.5).mean()
        bound_before(3)
        with pytest.raises(koila.KoilaError, match="lost"):
            loss.item()
    finally:
        idle.set()
        for other in others:
            other.join()
    loss.item()


def test_another_thread_that_draws_is_no_error() -> None:
    """The generator is shared: whose numbers come first is not said there."""
    loss = F.dropout(koila.lazy(torch.ones(ROWS, 5)), 0.5).mean()
    seen: list[float] = []

    def work() -> None:
        seen.append(F.dropout(koila.lazy(torch.ones(ROWS, 5)), 0.5).sum().item())
        seen.append(torch.rand(1).item())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(seen) == 2
    assert loss.item() >= 0
    assert not hasattr(torch.rand, "__wrapped__")


def test_torch_says_what_draws() -> None:
    """All that op_db knows to draw stands in the list, or calls what does."""
    names = {(owner, name) for owner, name, _ in plain.wrappers()}
    wanted = "rand randn randint randperm normal bernoulli multinomial poisson binomial rrelu"
    assert {(torch, name) for name in wanted.split()} <= names
    assert (torch.Tensor, "random_") in names
    assert (torch.nn.functional, "scaled_dot_product_attention") in names
    assert (torch, "add") not in names


def test_a_program_that_draws_nothing_replaces_nothing() -> None:
    before = torch.rand
    loss = (koila.lazy(torch.ones(ROWS, 5)) * 2).mean()
    assert torch.rand is before
    dropped = F.dropout(koila.lazy(torch.ones(ROWS, 5)), 0.5)
    assert torch.rand is not before
    dropped.tolist()
    assert torch.rand is before
    assert loss.item() == 2


def test_the_same_numbers_told_twice() -> None:
    """Reproducible from manual_seed, with draws in between."""
    for chunks in (None, 3):
        with split(chunks):
            first = tell(drop_layers, koila.lazy)
            second = tell(drop_layers, koila.lazy)
        assert_seen(first[0], second[0], "told twice", exact_bits=True)
        assert torch.equal(first[1], tell(drop_layers, eager)[1])


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_hook_that_raises_leaves_the_draws_made(is_parameter: bool, chunks: int) -> None:
    """What is drawn after a backward that failed comes after its draws."""

    def told(lazy: Lazy) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        w = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
        h = F.dropout(lazy(torch.ones(11, 4, dtype=torch.float64)) @ w, 0.5)

        def boom(_: Tensor) -> Tensor:
            raise ValueError("boom")

        (w if is_parameter else h).register_hook(boom)
        loss = h.square().mean()
        with pytest.raises(ValueError, match="boom"):
            loss.backward()
        drawn = torch.rand(3)
        return drawn, torch.get_rng_state(), torch.as_tensor(loss.item())

    want = told(eager)
    with split(chunks):
        got = told(koila.lazy)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.allclose(got[2], want[2], rtol=1e-12)


def test_a_refused_program_draws_nothing() -> None:
    """The step can be made again, with more memory, and draws what it would have drawn."""

    def told(lazy: Lazy) -> Tensor:
        torch.manual_seed(0)
        w = torch.ones(64, 64, requires_grad=True)
        for limit in (1, None) if lazy is koila.lazy else (None,):
            loss = F.dropout(lazy(torch.ones(64, 64)) @ w, 0.5).square().mean()
            with koila.config(memory_limit=limit):
                if limit is None:
                    loss.backward()
                else:
                    with pytest.raises(koila.MemoryLimitError):
                        loss.backward()
        return torch.cat([loss.detach().reshape(1), torch.rand(3)])

    assert torch.equal(told(koila.lazy), told(eager))
    assert torch.equal(told(koila.lazy), told(eager))
