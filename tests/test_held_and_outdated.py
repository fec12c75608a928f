# SPDX-License-Identifier: Apache-2.0
"""A value that the user merely holds, whose parameters were written since, spoils no other
backward: in eager nobody asks for it either."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import koila

F64 = torch.float64
ROWS = 11
CHUNKS = [None, 1, 2, 3, 7, ROWS]


class Nets:
    """A generator and a discriminator, whose layers have two parameters each, with optimizers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6)).to(F64)
        self.d = nn.Sequential(nn.Linear(6, 5), nn.LeakyReLU(), nn.Linear(5, 1)).to(F64)
        self.opt_d = torch.optim.SGD(self.d.parameters(), 0.1)

    def grads(self) -> list[Tensor | None]:
        return [one.grad for one in (*self.g.parameters(), *self.d.parameters())]


def step(nets: Nets) -> None:
    nets.opt_d.step()


def by_hand(nets: Nets) -> None:
    with torch.no_grad():
        for one in nets.d.parameters():
            one.mul_(0.5)


def through_data(nets: Nets) -> None:
    for one in nets.d.parameters():
        one.data.mul_(0.5)


WRITES: dict[str, Callable[[Nets], None]] = {
    "step": step,
    "by hand": by_hand,
    "data": through_data,
}


def retained(nets: Nets, z: Tensor, write: Callable[[Nets], None]) -> Any:
    fake = nets.g(z)
    penalty, loss_d = fake.pow(2).mean(), nets.d(fake).mean()
    loss_d.backward(retain_graph=True)
    write(nets)
    penalty.backward()
    return loss_d, penalty


def gan(nets: Nets, z: Tensor, write: Callable[[Nets], None]) -> Any:
    fake = nets.g(z)
    loss_d = nets.d(fake).mean()
    loss_d.backward(retain_graph=True)
    write(nets)
    loss_g = -nets.d(fake).mean()
    loss_g.backward()
    return loss_d, loss_g


def held_first(nets: Nets, z: Tensor, write: Callable[[Nets], None]) -> Any:
    """The held value is recorded before all others."""
    scores = nets.d(z.repeat(1, 2))
    fake = nets.g(z)
    penalty = fake.pow(2).mean()
    nets.d(fake.detach()).mean().backward()
    write(nets)
    penalty.backward()
    return scores.detach(), penalty


def held_by_many(nets: Nets, z: Tensor, write: Callable[[Nets], None]) -> Any:
    fake = nets.g(z)
    penalty, more = fake.pow(2).mean(), fake.abs().mean()
    scores = nets.d(fake)
    held = scores.mean(), scores.sigmoid(), nets.d(fake * 2)
    nets.d(fake.detach()).mean().backward()
    write(nets)
    penalty.backward(retain_graph=True)
    write(nets)
    more.backward()
    return [one.detach() for one in held], penalty, more


def two_heads(nets: Nets, z: Tensor, write: Callable[[Nets], None]) -> Any:
    trunk = nets.g(z)
    first, second = nets.d(trunk).mean(), trunk.sin().sum()
    first.backward(retain_graph=True)
    write(nets)
    second.backward()
    return first, second, nets.d(z.repeat(1, 2)).sum().item()


PROGRAMS = [retained, gan, held_first, held_by_many, two_heads]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_next_backward_is_eagers(program: Any, write: str, chunks: int | None) -> None:
    def run(lazy: Callable[[Tensor], Tensor]) -> list[Any]:
        nets, z = Nets(), lazy(torch.linspace(-1, 1, 3 * ROWS, dtype=F64).view(ROWS, 3))
        return [*pytree.tree_leaves(program(nets, z, WRITES[write])), *nets.grads()]

    want = run(lambda x: x)
    with koila.config(**({} if chunks is None else {"chunks": chunks})):
        got = run(lambda x: koila.lazy(x, batch=0))
        n_chunks = [one.n_chunks for one in koila.report().programs if one.n_chunks]
    for one, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-14)
    assert n_chunks and all(n == (chunks or 1) for n in n_chunks)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("write", ["step", "by hand"])
def test_a_backward_of_the_held_value_is_refused(write: str, chunks: int | None) -> None:
    """As in eager, whose graph has saved the weights."""
    nets, z = Nets(), torch.randn(ROWS, 3, dtype=F64)
    with koila.config(**({} if chunks is None else {"chunks": chunks})):
        loss_d, _ = retained(nets, koila.lazy(z, batch=0), WRITES[write])
        with pytest.raises((RuntimeError, koila.KoilaError), match=r"in place|inplace|second time"):
            loss_d.backward()


def test_each_order_of_what_is_held() -> None:
    """Whichever of the values is the part's first."""
    for order in itertools.permutations(range(3)):
        results = []
        for lazy in (lambda x: x, lambda x: koila.lazy(x, batch=0)):
            nets, z = Nets(), lazy(torch.linspace(-1, 1, 3 * ROWS, dtype=F64).view(ROWS, 3))
            fake = nets.g(z)
            makers = (
                lambda fake=fake: fake.pow(2).mean(),
                lambda fake=fake, nets=nets: nets.d(fake).mean(),
                lambda fake=fake, nets=nets: nets.d(fake * 2).sum(),
            )
            made = {which: makers[which]() for which in order}
            with koila.config(chunks=2) if lazy(z) is not z else contextlib.nullcontext():
                nets.d(fake.detach()).mean().backward()
                step(nets)
                made[0].backward()
            results.append((made[1].item(), made[2].item(), *nets.grads()))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14)
