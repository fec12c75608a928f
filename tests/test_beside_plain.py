# SPDX-License-Identifier: Apache-2.0
"""A network that runs on a lazy batch and beside it on a plain one: autograd's nodes of both run in
eager's order, so the step takes no more memory, calls hooks in the same order, and adds up
gradients in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import koila
from allocations import Allocations
from chunked import split
from koila.memory import order
from limits import there
from oracle import Lazy, assert_same_story, cut, eager
from test_never_worse import check

Batches = tuple[Tensor, Tensor]
Story = Callable[[Lazy, nn.Module, Tensor, Tensor], Tensor]
STORIES: dict[str, Story] = {}


def story(told: Story) -> Story:
    STORIES[told.__name__] = told
    return told


def real_loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.softplus(-model(x)).mean()


def fake_loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.softplus(model(x)).mean()


@story
def lazy_first(lazy: Lazy, model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return real_loss(model, lazy(real)) + fake_loss(model, fake)


@story
def plain_first(lazy: Lazy, model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    real = lazy(real)
    return fake_loss(model, fake) + real_loss(model, real)


@story
def plain_around(lazy: Lazy, model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    real = lazy(real)
    return fake_loss(model, fake[:100]) + real_loss(model, real) + fake_loss(model, fake)


@story
def two_batches(lazy: Lazy, model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    some, others = lazy(real), lazy(fake)
    return real_loss(model, some) + fake_loss(model, others) + fake_loss(model, fake)


@story
def in_turn(lazy: Lazy, model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    real = lazy(real)
    halves = [(real_loss(model, real), fake_loss(model, part)) for part in fake.split(100)]
    return torch.stack([one for pair in halves for one in pair]).sum()


@story
def many_plain_rows(lazy: Lazy, model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return fake_loss(model, real) + real_loss(model, lazy(fake))


@story
def teacher(lazy: Lazy, model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = model(fake)
    return real_loss(model, lazy(real)) + (model(fake) - wanted).square().mean()


@story
def detached(lazy: Lazy, model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """The plain batch is made from lazy rows, in an earlier run."""
    real = lazy(real)
    made = torch.tensor(torch.tanh(real.detach()[: len(fake)]).tolist(), dtype=fake.dtype)
    return real_loss(model, real) + fake_loss(model, made)


@story
def read_between(lazy: Lazy, model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """The graph of the lazy half is made by a read, after the plain half."""
    one, other = real_loss(model, lazy(real)), fake_loss(model, fake)
    return one + other if one.item() > 0 else other


def mlp(width: int = 256) -> nn.Module:
    hidden = nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.SiLU()
    return nn.Sequential(*hidden, nn.Linear(width, 1))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(512, 1),
    )


MODELS = {"mlp": mlp, "convolutions": convolutions}
#: Few rows gain nothing from chunks where gradients of large weights are shared with a plain half.
NARROW = MODELS | {"mlp": partial(mlp, 32)}


def batches(n_rows: int, dtype: torch.dtype) -> Batches:
    torch.manual_seed(0)
    return torch.randn(4 * n_rows, 64, dtype=dtype), torch.randn(n_rows, 64, dtype=dtype)


def bytes_of(told: Story, make: Callable[[], nn.Module], n_rows: int, lazy: Lazy) -> Any:
    """At most during a step, and when it is done."""
    torch.manual_seed(0)
    model, (real, fake), memory = make(), batches(n_rows, torch.float32), Allocations()
    memory.count(real, fake, list(model.parameters()), list(model.buffers()))
    with memory:
        pass
    with memory:
        told(lazy, model, real, fake).backward()
    return memory.peak, memory.left


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("told", STORIES.values(), ids=STORIES)
def test_no_more_memory_than_eager(told: Story, make: Callable[[], nn.Module]) -> None:
    with koila.config(chunks=2):
        bytes_of(told, make, 8, koila.lazy)  # what torch imports at its first call stays
    want = bytes_of(told, make, 256, eager)
    for chunks in (None, 1, 2, 7):
        with koila.config(chunks=chunks):
            check(bytes_of(told, make, 256, koila.lazy), want)


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("make", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("told", STORIES.values(), ids=STORIES)
def test_values_and_gradients(told: Story, make: Callable[[], nn.Module], chunks: int) -> None:
    """In one chunk bit for bit: sums of gradients are taken in eager's order."""

    def step(lazy: Lazy) -> Any:
        model = make().double()
        loss = told(lazy, model, *batches(3, torch.float64))
        loss.backward()
        return loss.detach() * 1, model, [p.grad for p in model.parameters()]

    assert_same_story(step, chunks)


# Several roots ------------------------------------------------------------------------------------


def of_both(one: Tensor, other: Tensor, weights: list[Tensor]) -> Any:
    torch.autograd.backward([one, other])


def of_three(one: Tensor, other: Tensor, weights: list[Tensor]) -> Any:
    torch.autograd.backward([other * 2, one, other.sin()])


def with_gradients(one: Tensor, other: Tensor, weights: list[Tensor]) -> Any:
    sent = [torch.tensor(0.5, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)]
    torch.autograd.backward([one, other], sent)


def with_inputs(one: Tensor, other: Tensor, weights: list[Tensor]) -> Any:
    torch.autograd.backward([one, other], inputs=weights[:2])


def retained(one: Tensor, other: Tensor, weights: list[Tensor]) -> Any:
    torch.autograd.backward([one, other], retain_graph=True)
    other.backward()


def gradients(one: Tensor, other: Tensor, weights: list[Tensor]) -> Any:
    return list(torch.autograd.grad([one, other], weights))


def a_weight(one: Tensor, other: Tensor, weights: list[Tensor]) -> Any:
    """A leaf is a root, too."""
    bias = weights[-1]
    torch.autograd.backward([one, bias], [None, torch.ones_like(bias)])


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 12])
@pytest.mark.parametrize(
    "differentiate",
    [of_both, of_three, with_gradients, with_inputs, retained, gradients, a_weight],
)
def test_roots_beside_a_lazy_one(differentiate: Callable[..., Any], chunks: int) -> None:
    """The lazy one runs in chunks all the same."""

    def step(lazy: Lazy) -> Any:
        model = mlp().double()
        real, fake = batches(3, torch.float64)
        one, other = real_loss(model, lazy(real)), fake_loss(model, fake)
        found = differentiate(one, other, list(model.parameters()))
        return found, one.detach() * 1, [p.grad for p in model.parameters()]

    assert_same_story(step, chunks)


@pytest.mark.parametrize("roots", [1, 2])
def test_a_root_that_raises(roots: int) -> None:
    """Nothing gets a gradient."""
    model, (real, fake) = mlp(), batches(8, torch.float32)
    with split(3):
        one, other = real_loss(model, koila.lazy(real)), fake_loss(model, fake)
        other.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            torch.autograd.backward([one, other] if roots == 2 else [one + other])
    assert all(p.grad is None for p in model.parameters())


def test_roots_beside_a_lazy_one_under_a_limit() -> None:
    def bytes_of_both(lazy: Lazy) -> int:
        torch.manual_seed(0)
        model, (real, fake), memory = mlp(), batches(256, torch.float32), Allocations()
        memory.count(real, fake, list(model.parameters()))
        with memory:
            pass
        with memory:
            losses = [real_loss(model, lazy(real)), fake_loss(model, fake[:64])]
            torch.autograd.backward(losses)
        return memory.peak

    whole = bytes_of_both(eager)
    with koila.config(memory_limit=int(there() + 0.6 * whole)):
        assert bytes_of_both(koila.lazy) <= 0.7 * whole


def hooked(lazy: Lazy, told: Story) -> list[str]:
    """The order in which the engine reaches the gradients of a weight's copies, one for each call
    of a model."""
    seen: list[str] = []
    weight = torch.randn(64, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        mine, name = weight * 1.0, f"{len(x)} rows, call {len(names)}"
        names.append(name)
        if mine.requires_grad:
            mine.register_hook(lambda gradient: seen.append(name))
        return x * mine

    names: list[str] = []
    told(lazy, model, *batches(256, torch.float32)).backward()  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize("told", STORIES.values(), ids=STORIES)
def test_hooks_are_called_in_eagers_order(told: Story) -> None:
    with koila.config(chunks=1):
        assert hooked(koila.lazy, told) == hooked(eager, told)


@pytest.mark.parametrize("way", ["backward", "inputs", "grad", "a graph", "a cut"])
def test_graphs_that_are_kept_run_again(way: str) -> None:
    """Nodes have their own numbers again, so that graphs made later come in eager's order too."""

    def step(lazy: Lazy) -> Any:
        model = mlp().double()
        weights = list(model.parameters())
        real, fake = batches(3, torch.float64)
        one = real_loss(model, lazy(real))
        one = cut(one) if way == "a cut" else one
        both = one + fake_loss(model, fake)
        seen = []
        if way == "inputs":
            both.backward(inputs=weights[:2], retain_graph=True)
        elif way == "grad":
            seen += torch.autograd.grad(both, weights, retain_graph=True)
        elif way == "a graph":
            seen += torch.autograd.grad(both, weights, create_graph=True)
            (both + seen[0].square().sum()).backward()
            return [g.detach() * 1 for g in seen], model, [p.grad for p in weights]
        else:
            both.backward(retain_graph=True)
        (both + fake_loss(model, fake) * 3).backward()
        return [g.detach() * 1 for g in seen], model, [p.grad for p in weights]

    assert_same_story(step, None)


def test_lazy_calls_alone_leave_no_gaps() -> None:
    order._gaps.clear()
    with koila.config(chunks=1):
        model, (real, fake) = mlp(), batches(8, torch.float32)
        real, fake = koila.lazy(real), koila.lazy(fake)
        loss = real_loss(model, real) + fake_loss(model, fake)
        assert loss.item() > 0
        assert not order._gaps.starts


def test_gaps_are_forgotten() -> None:
    """With a backward, or where too many came without one."""
    model, (real, fake) = mlp(), batches(8, torch.float32)
    with koila.config(chunks=1):
        loss = lazy_first(koila.lazy, model, real, fake)
        assert loss.item() > 0
        assert order._gaps.starts and order._gaps.runs
        loss.backward()
        assert not order._gaps.starts and not order._gaps.runs
    for _ in range(order._N_GAPS + 1):
        order.note_gap(0, 1, 1)
    assert len(order._gaps.starts) == 1
    order._gaps.clear()


def test_no_more_in_chunks_that_were_asked_for() -> None:
    with split(3, rows=("linear",)):
        lazy_first(koila.lazy, mlp(), *batches(8, torch.float32)).backward()


def test_numbers_of_nodes_do_not_run_away() -> None:
    """Each thread has its own; calls that another thread recorded leave no gaps in this one's."""
    sequence_nr = torch._C._autograd._get_sequence_nr
    weight = torch.ones(3, requires_grad=True)
    for _ in range(100):
        weight * 2
    made: list[Tensor] = []
    before = sequence_nr()
    for _ in range(10):
        thread = threading.Thread(target=lambda: made.append(koila.lazy(torch.ones(4, 3)) * weight))
        thread.start()
        thread.join()
        weight * 2
        made.pop().sum().backward()
        old = koila.lazy(torch.ones(4, 3)) * weight
        weight * 2
        (koila.lazy(torch.ones(2, 3)) * weight).tolist()
        assert old.sum().item() == 12
    assert sequence_nr() - before < 300
