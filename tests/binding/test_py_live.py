# SPDX-License-Identifier: Apache-2.0
"""One-chunk replay, and calls that run at once: in order, once, held to what was promised."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import koila
from binding_kit import batch, in_a_thread, is_pending, op, pending
from chunked import split
from koila import _core


class Ran(TorchDispatchMode):
    """Keeps the names of what runs."""

    sees_koila = True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names += [name] if name != "detach" else []  # what autograd keeps of a result
        return func(*args, **(kwargs or {}))


def weight() -> Tensor:
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


# Replay -------------------------------------------------------------------------------------------


def test_calls_run_in_their_order_and_once() -> None:
    x, w = koila.lazy(batch()), weight()
    first = (x * w).exp()
    second = first.tanh()
    with Ran() as ran:
        _core.force(second)
        assert ran.names == ["mul", "exp", "tanh"]
        third = second.sin() + first
        _core.force(third)
        assert ran.names == ["mul", "exp", "tanh", "sin", "add"]
        for lazy in (first, second, third):
            lazy.tolist()
        assert ran.names[5:].count("exp") == 0


def test_what_nobody_can_reach_runs_too_in_its_turn() -> None:
    """It may write, or raise; eager ran it as well."""
    x = koila.lazy(batch()) * weight()
    x.exp()
    kept = x.sin()
    with Ran() as ran:
        _core.force(kept)
    assert ran.names == ["mul", "exp", "sin"]


def test_values_die_with_their_last_reader() -> None:
    """Of a chain without gradient no more than two are there at once."""
    there: list[weakref.ref[Tensor]] = []
    most = 0

    def step(x: Tensor) -> Tensor:
        nonlocal most
        made = x * 2
        if x.device.type != "meta":
            there.append(weakref.ref(made))
            most = max(most, sum(ref() is not None for ref in there))
        return made

    with op(step) as recorded:
        x = koila.lazy(batch())
        for _ in range(10):
            x = recorded(x)
        assert _core.force(x).tolist() == (batch() * 2**10).tolist()
    assert len(there) == 10
    assert most == 2


def test_a_program_cannot_be_read_while_it_runs() -> None:
    made: list[Tensor] = []

    def peek(x: Tensor) -> Tensor:
        if x.device.type != "meta":
            made[1].tolist()
        return x * 2

    with op(peek) as recorded:
        made.append(recorded(koila.lazy(batch()) * weight()))
        made.append(made[0] * 3)
        with pytest.raises(koila.KoilaError, match="while the program that makes it is running"):
            _core.force(made[1])  # type: ignore[arg-type]
    assert not _core.is_busy()


def test_calls_made_while_a_program_runs_are_run() -> None:
    """A function that is called in a replay may use koila itself."""
    inside = koila.lazy(batch() + 1)

    def use(x: Tensor) -> Tensor:
        return x * 2 if x.device.type == "meta" else x * 2 + (inside * 1).sum().item()

    with op(use) as recorded:
        made = recorded(koila.lazy(batch()))
        assert made.tolist() == (batch() * 2 + (batch() + 1).sum()).tolist()


def test_another_thread_waits_for_nobody() -> None:
    """A value that is read in another thread than its own is run there."""
    lazy = pending()
    assert in_a_thread(lambda: lazy.tolist()) == (batch() * 2).tolist()
    assert not is_pending(lazy)


def test_a_tape_outlives_its_thread() -> None:
    kept: list[Tensor] = []
    thread = threading.Thread(target=lambda: kept.append(pending().exp()))
    thread.start()
    thread.join()
    assert is_pending(kept[0])
    assert (kept[0] + 1).tolist() == ((batch() * 2).exp() + 1).tolist()


# Calls that run at once ---------------------------------------------------------------------------


def live(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _core.live(func, args, kwargs, False)


def test_an_argument_that_comes_back_is_the_same_object() -> None:
    x, y, plain = koila.lazy(batch()), pending(), batch()
    assert live(lambda a, b: a, x, y) is x
    assert live(lambda a, b: b.add_(1), x, y) is y
    assert y.tolist() == (batch() * 2 + 1).tolist()
    assert live(lambda a, b: b, x, plain) is plain
    assert live(lambda a, **words: words["b"][0], x, b=[plain]) is plain
    back, other, same = live(lambda a, b: (b, a * 1, a), x, plain)
    assert back is plain and same is x
    assert koila.is_lazy(other)


def place_of(lazy: Any) -> Any:
    """Where a call reads the rows of a live value."""
    made = lazy * 1
    place = _core.value(_core.node(0)[5][0])[3]
    del made
    _core.forget()
    return place and place[1:]


@pytest.mark.parametrize(
    ("func", "place"),
    [
        (lambda x: x * 2, (0, 1, 1)),
        (lambda x: x[:3], None),
        (lambda x: x.sum(), None),
        (lambda x: x.t(), None),
        (lambda x: x[None], None),
        (lambda x: x[0][None].expand(4, 3) * 1, (0, 1, 1)),
    ],
)
def test_rows_are_found_again_by_their_number(func: Any, place: Any) -> None:
    """Cutting what is there whole is right along any dim; the dim of the rows is of use."""
    assert place_of(live(func, koila.lazy(batch().requires_grad_()))) == place


def test_a_batch_of_other_rows_is_another() -> None:
    two = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    x, y = koila.lazy(batch()), koila.lazy(two)
    made = live(lambda a, b: b * 2, x, y)
    together = made + y
    with split(2):
        assert together.tolist() == [[3.0] * 3] * 2
    assert place_of(live(lambda a, b: b * 2, x, y)) == (0, 1, 1)


def test_more_lazies_than_are_looked_at() -> None:
    """Results are then new lazies, and have no rows; they are right."""
    lazies = [koila.lazy(batch()) for _ in range(70)]
    made = live(lambda *parts: torch.stack(parts).sum(0), *lazies)
    assert made.tolist() == torch.stack([batch()] * 70).sum(0).tolist()
    assert live(lambda *parts: parts[69], *lazies).tolist() == batch().tolist()


def test_what_holds_no_tensor_is_given_back_itself() -> None:
    for result in (torch.Size([1, 2]), [1, "two"], {"a": 3}, None, 2.5):
        assert live(lambda x, r=result: r, koila.lazy(batch())) is result


def test_lazies_among_the_results_stay_lazy() -> None:
    x, y = koila.lazy(batch(), batch())
    other = y * 2
    made = live(lambda x: [other, x], x)
    assert made[0] is other and is_pending(other)


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_call_that_raises_has_torchs_words(is_plain: bool) -> None:
    lazy = pending()
    with pytest.raises(RuntimeError, match="must match the size") as lazily:
        _core.live(torch.add, (lazy, torch.ones(5)), None, is_plain)
    with pytest.raises(RuntimeError) as eagerly:
        torch.add(batch(), torch.ones(5))
    assert str(lazily.value) == str(eagerly.value)
    assert lazy.tolist() == (batch() * 2).tolist()


def test_results_have_their_graphs() -> None:
    w = weight()
    made = live(lambda a, b: a * b, koila.lazy(batch()), w)
    assert made.requires_grad and not is_pending(made)
    (made.exp().sum() + made.sum()).backward()
    assert w.grad is not None
    torch.testing.assert_close(w.grad, (batch() * batch().exp() + batch()).sum(0))


def test_a_number_that_is_read_needs_no_graph() -> None:
    """item() and its kin run in chunks where the program can; a call with graphs does not."""
    x, w = koila.lazy(batch()), weight()
    with split(2):
        loss: Any = (x * w).sum()
        loss.item()
        assert _core.real(loss) is None and _core.value(_core.id(loss))[6] is not None
        live(lambda t: t * 1, loss)
        assert _core.real(loss) is not None
