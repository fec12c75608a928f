# SPDX-License-Identifier: Apache-2.0
"""Bodies of checkpoints whose recorded calls run live, on the whole batch: backward makes them once
more, as torch's checkpoint does, so no step takes more memory than eager's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from allocations import Allocations
from koila.running import repeated
from oracle import Lazy, assert_seen, eager, tell
from stories import rows
from test_checkpoints import KINDS, PROGRAMS, ROWS, WIDTH, check, measured

Force = Callable[[Any, Any], Any]
#: What makes a program run at once, with its graph; given the last activations, and the loss.
FORCED: dict[str, Force] = {
    "one chunk": lambda out, loss: None,
    "a read": lambda out, loss: loss.item(),
    "a transform": lambda out, loss: torch.func.vmap(torch.sin)(out),
}


def step(name: str, is_reentrant: bool, lazy: Lazy, force: str) -> tuple[int, list[Tensor]]:
    """The bytes of a step at its peak, and all that it leaves."""

    def go(model: nn.Module, batch: Tensor) -> list[Tensor]:
        with koila.config(chunks=3):
            out = model(batch, is_reentrant)
            loss = out.pow(2).mean()
        with koila.config(chunks=3 if force == "a transform" else 1):
            FORCED[force](out, loss)
            loss.backward()
        return [torch.tensor(loss.item()), torch.get_rng_state().double()]

    return measured(name, is_reentrant, lazy, go)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@KINDS
@pytest.mark.parametrize("force", FORCED)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_more_than_eager(name: str, is_reentrant: bool, force: str) -> None:
    want = step(name, is_reentrant, eager, force)
    check(step(name, is_reentrant, koila.lazy, force), want)


@KINDS
def test_what_is_saved_is_enough(is_reentrant: bool) -> None:
    """The result of a body's last call, which saves what it is given, is not made again."""

    def peak(lazy: Lazy) -> int:
        wide = [nn.Linear(WIDTH, 512) for _ in range(4)]
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        memory = Allocations()
        memory.count(x, [list(layer.parameters()) for layer in wide])
        with memory:
            batch = lazy(x)
        with memory:
            with koila.config(chunks=3):
                results = (checkpoint(one, batch, use_reentrant=is_reentrant) for one in wide)
                made = [result[:, 0].sum() for result in results]
            with koila.config(chunks=1):
                torch.stack(made).sum().backward()
        return memory.peak

    assert peak(koila.lazy) <= 1.02 * peak(lambda x: x) + 2**16


def test_a_call_that_saves_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is made once more."""
    a, b = layers()
    with koila.config(chunks=3):
        loss = checkpoint(lambda x: b(x).tanh(), a(koila.lazy(rows(4))), use_reentrant=False).sum()
    make = repeated.Call.make

    def other(call: Any, env: dict[int, Tensor]) -> None:
        env.update((key, one[:2]) for key, one in env.items() if one.shape[0] == 11)
        make(call, env)

    monkeypatch.setattr(repeated.Call, "make", other)
    with live(), pytest.raises(koila.KoilaError, match="saved something else"):
        loss.backward()


Story = Callable[[Lazy, bool], Any]
STORIES: dict[str, Story] = {}


def add(story: Story) -> Story:
    STORIES[story.__name__] = story
    return story


def layers() -> tuple[nn.Linear, nn.Linear]:
    return nn.Linear(4, 4).double(), nn.Linear(4, 4).double()


def gradients(*modules: nn.Module) -> list[Any]:
    return [p.grad for module in modules for p in module.parameters()]


def live(*lazies: Any) -> contextlib.AbstractContextManager[Any]:
    """A block in which what was recorded runs at once."""
    return koila.config(chunks=1)


@add
def twice(lazy: Lazy, is_reentrant: bool) -> Any:
    """Backward goes through it again, and finds the same."""
    a, b = layers()
    h = checkpoint(
        lambda x: F.dropout(b(x).tanh(), 0.4).exp(), a(lazy(rows(4))), use_reentrant=is_reentrant
    )
    loss = h.pow(2).mean()
    with live():
        loss.backward(retain_graph=True)
        first = [one.clone() for one in gradients(a, b)]
        loss.backward()
    return loss, first, gradients(a, b)


@add
def a_draw_meanwhile(lazy: Lazy, is_reentrant: bool) -> Any:
    """Numbers of the body are drawn early, and plain ones after them."""
    a, b = layers()
    h = checkpoint(
        lambda x: F.dropout(b(x), 0.4).tanh(), a(lazy(rows(4))), use_reentrant=is_reentrant
    )
    plain = torch.rand(3)
    loss = (F.dropout(h, 0.2) * 2).tanh().sum()
    with live():
        loss.item()
        more = torch.rand(3)
        loss.backward()
    return loss, plain, more, gradients(a, b)


@add
def without_gradient(lazy: Lazy, is_reentrant: bool) -> Any:
    """A part of the body takes none."""
    a, b = layers()

    def body(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = b(x).sigmoid()
        return (a(x) * scale * b(x.detach())).tanh()

    h = checkpoint(body, a(lazy(rows(4))), use_reentrant=is_reentrant)
    with live():
        h.sum().backward()
    return h, gradients(a, b)


@add
def under_autocast(lazy: Lazy, is_reentrant: bool) -> Any:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    x = lazy(rows(4).float())
    with torch.autocast("cpu", torch.bfloat16):
        h = checkpoint(lambda x: b(x).tanh() * b(x), a(x), use_reentrant=is_reentrant)
        loss = a(h).float().square().mean()
    with live():
        loss.backward()
    return loss, gradients(a, b)


@add
def one_in_another(lazy: Lazy, is_reentrant: bool) -> Any:
    """The inner ones read what the outer one made, twice, and each other's results."""
    a, b = layers()

    def outer(x: Tensor) -> Tensor:
        h = a(x).tanh()
        first = checkpoint(lambda y: F.dropout(b(y), 0.5).exp(), h, use_reentrant=is_reentrant)
        both = checkpoint(lambda y, z: (b(y) * z).sin(), h, first, use_reentrant=is_reentrant)
        return both * first + h

    h = checkpoint(outer, a(lazy(rows(4))), use_reentrant=is_reentrant)
    with live():
        h.sum().backward()
    return h, gradients(a, b)


@add
def views_and_writes(lazy: Lazy, is_reentrant: bool) -> Any:
    """Of what the body itself made."""
    a, b = layers()

    def body(x: Tensor) -> Tensor:
        h = b(x) * 1
        part = h[:, :2]
        part.mul_(2)
        h[:, 3] = 0.5
        rest, last = h.split([3, 1], dim=1)
        return torch.cat([rest.tanh(), last, part.exp()], 1)

    h = checkpoint(body, a(lazy(rows(4))), use_reentrant=is_reentrant)
    with live():
        h.sum().backward()
    return h, gradients(a, b)


@add
def a_result_that_is_written(lazy: Lazy, is_reentrant: bool) -> Any:
    """The body's last call saves it, and makes it again."""
    a, b = layers()
    h = checkpoint(lambda x: b(x).tanh(), a(lazy(rows(4))), use_reentrant=is_reentrant)
    h += 1
    with live():
        (h * h).sum().backward()
    return h, gradients(a, b)


@add
def normalizations(lazy: Lazy, is_reentrant: bool) -> Any:
    """Both runs move the statistics; one in another is run three times."""
    a, _ = layers()
    norm, last = nn.BatchNorm1d(4, momentum=None).double(), nn.BatchNorm1d(4).double()

    def outer(x: Tensor) -> Tensor:
        h = checkpoint(lambda y: norm(a(y)).tanh(), x, use_reentrant=is_reentrant)
        return last(norm(h) * h)

    h = checkpoint(outer, a(lazy(rows(4))), use_reentrant=is_reentrant)
    with live():
        h.square().mean().backward()
    return h, gradients(a, norm, last), list(norm.buffers()), list(last.buffers())


@add
def a_gradient_with_a_graph(lazy: Lazy, is_reentrant: bool) -> Any:
    a, b = layers()
    h = checkpoint(lambda x: b(x).tanh() * x, a(lazy(rows(4))), use_reentrant=False)
    with live():
        loss = h.square().mean()
        (found,) = torch.autograd.grad(loss, [a.weight], create_graph=True)
        (loss + found.square().sum()).backward()
    return loss, found, gradients(a, b)


@add
def not_gone_through(lazy: Lazy, is_reentrant: bool) -> Any:
    """What backward does not come to is not made again: the generator stays, and so do numbers."""
    a, b = layers()
    norm = nn.BatchNorm1d(4).double()
    x = a(lazy(rows(4)))
    h = checkpoint(lambda x: norm(F.dropout(b(x), 0.5)), x, use_reentrant=is_reentrant)
    with live():
        h.sum().item()
        x.sum().backward()
    return h, gradients(a, b), list(norm.buffers()), torch.rand(2)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@KINDS
@pytest.mark.parametrize("name", STORIES)
def test_equals_eager(name: str, is_reentrant: bool) -> None:
    def story(lazy: Lazy) -> Any:
        return STORIES[name](lazy, is_reentrant)

    want, want_state = tell(story, eager)
    with koila.config(chunks=3):
        got, got_state = tell(story, koila.lazy)
    assert_seen(got, want, name, exact_bits=True)
    assert torch.equal(got_state, want_state)


@KINDS
def test_what_is_given_is_written(is_reentrant: bool) -> None:
    """By the body: it is not written twice, and what was saved before is still there."""
    data = rows(4)
    a, b = layers()
    with koila.config(chunks=3):
        given = a(koila.lazy(data)) * 1

        def body(x: Tensor) -> Tensor:
            y = b(x.exp())
            x.mul_(3)
            return y.tanh() + x

        loss = checkpoint(body, given, use_reentrant=is_reentrant).square().mean()
        with live():
            number = given.detach().clone()
            loss.backward()
    got = gradients(a, b)
    for one in (*a.parameters(), *b.parameters()):
        one.grad = None
    x = a(data) * 1
    (b(x.exp()).tanh() + x * 3).square().mean().backward()
    torch.testing.assert_close(got, gradients(a, b), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(number, x.detach() * 3)


@KINDS
@pytest.mark.parametrize("is_hidden", [False, True])
def test_what_is_given_is_written_after(is_reentrant: bool, is_hidden: bool) -> None:
    """torch's second run would read other numbers."""
    a, b = layers()
    with koila.config(chunks=3):
        given = a(koila.lazy(rows(4))) * 1
        loss = checkpoint(lambda x: b(x).tanh(), given, use_reentrant=is_reentrant).square().mean()
        with live():
            loss.item()
            with torch.no_grad():
                (given.data if is_hidden else given).mul_(2)
            with pytest.raises(koila.KoilaError, match="was written before backward"):
                loss.backward()
