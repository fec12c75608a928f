"""Random numbers: no two chunks draw the same, and what was drawn once is drawn again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from chunked import split
from oracle import assert_close

pytestmark = pytest.mark.sanitize

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
    with split(4):
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
    partly = "create_graph" if ask == "create_graph" else ""
    with split(3, partly=partly):
        got = step(IN_ORDER[name], ASK[ask], koila.lazy)
    for a, b, what in zip(got, want, ("loss", "gradient", "next"), strict=True):
        assert_close(a, b, what)
