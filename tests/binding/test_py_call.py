# SPDX-License-Identifier: Apache-2.0
"""Calls as slots: a recorded call keeps no container of the user's, and gets equal ones again."""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import koila
from binding_kit import batch, is_pending, op, pending
from chunked import split
from koila import _core

Pair = namedtuple("Pair", "a b")


class Made(Pair):
    """A named tuple whose __new__ takes something else than its fields."""

    def __new__(cls, text: str, tensor: Tensor) -> Made:
        return super().__new__(cls, tensor, tensor)


class Items(list[Any]):
    """A list of the user's own class."""


class Three(tuple[Any, ...]):
    """A tuple of the user's own class."""


def shape_of(obj: Any) -> Any:
    """Containers with their types, None for a tensor, all else as it is."""
    if isinstance(obj, Tensor):
        return None
    if isinstance(obj, dict):
        return {key: shape_of(item) for key, item in obj.items()}
    if isinstance(obj, list | tuple):
        return type(obj), [shape_of(item) for item in obj]
    return obj


@pytest.fixture
def seen() -> list[Any]:
    return []


@pytest.fixture
def keep(seen: list[Any]) -> Any:
    """Return an op that doubles its first argument and keeps what it got."""

    def keep(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if first.device.type != "meta":
            seen.append((args, kwargs))
        return first * 2

    with op(keep) as recorded:
        yield recorded


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda x: [x, 1],
    "empty list": lambda x: [],
    "empty tuple": lambda x: (),
    "tuple": lambda x: (x, 1, "two"),
    "tuple of numbers": lambda x: (1, 2.5, None),
    "nested": lambda x: [(x, [x, {"a": (x, [])}]), [], {}],
    "dict": lambda x: {"a": x, 2: [x]},
    "size": lambda x: torch.Size([2, 3]),
    "slice": lambda x: slice(1, 2, 3),
    "list in a tuple": lambda x: (1, [2, 3]),
    "dict in a tuple": lambda x: (1, {"a": 2}),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_call_gets_what_it_was_given(name: str, keep: Any, seen: list[Any]) -> None:
    x = koila.lazy(batch())
    made = keep(x, CONTAINERS[name](x), word=CONTAINERS[name](x))
    assert is_pending(made)
    assert made.tolist() == (batch() * 2).tolist()
    ((args, kwargs),) = seen
    wanted = shape_of(CONTAINERS[name](batch()))
    assert (shape_of(args), shape_of(kwargs)) == ((tuple, [wanted]), {"word": wanted})


def test_keywords_keep_their_names_and_order(keep: Any, seen: list[Any]) -> None:
    x = koila.lazy(batch())
    made = keep(x, 1, z=x, a=2, m=[x])
    func, args, kwargs = _core.call(0)
    assert func is keep
    assert args == (None, 1)
    assert list(kwargs.items()) == [("z", None), ("a", 2), ("m", [None])]
    made.tolist()
    ((args, kwargs),) = seen
    assert args == (1,)
    assert list(kwargs) == ["z", "a", "m"]
    assert kwargs["z"].tolist() == kwargs["m"][0].tolist() == batch().tolist()


def test_more_arguments_than_fit_on_the_stack(keep: Any, seen: list[Any]) -> None:
    x = koila.lazy(batch())
    keep(x, *range(40), *[x] * 10, last=x).tolist()
    ((args, kwargs),) = seen
    assert args[:40] == tuple(range(40))
    assert [a.tolist() for a in (*args[40:], kwargs["last"])] == [batch().tolist()] * 11


@pytest.mark.parametrize("chunks", [1, 2])
def test_containers_changed_after_the_call(chunks: int, keep: Any, seen: list[Any]) -> None:
    """The list that goes on growing, whatever it stands in."""
    x = koila.lazy(batch())
    rows: list[Any] = [x, x * 2]
    inner: list[Any] = [1]
    words: dict[str, Any] = {"a": inner}
    stacked = torch.cat(rows, 1)
    made = keep(x, (2, inner), words)
    rows.append(x)
    rows[0] = x * 5
    inner.append(2)
    words["b"] = x
    with split(chunks):
        assert stacked.tolist() == torch.cat([batch(), batch() * 2], 1).tolist()
        assert made.tolist() == (batch() * 2).tolist()
    ((args, _),) = seen
    assert args == ((2, [1]), {"a": [1]})


def test_a_call_cannot_change_what_it_is_given_next_time() -> None:
    """Each run gets containers of its own: barriers and live replays may run a call twice."""
    seen: list[Any] = []

    def grow(first: Tensor, more: list[Any]) -> Tensor:
        if first.device.type != "meta":
            seen.append(len(more))
        more.append(3)
        return first * 2

    with op(grow) as recorded, split(2):
        w = torch.ones(3, dtype=torch.float64, requires_grad=True)
        more: list[Any] = [1]
        out = recorded(koila.lazy(batch()) * w, more)
        loss = out.pow(2).mean().sqrt()
        loss.item()
        loss.backward()
    assert len(seen) > 1
    assert set(seen) == {1}
    assert more == [1]


@pytest.mark.parametrize("make", [Pair, Pair._make, Made, Three, Items], ids=lambda make: str(make))
def test_containers_of_a_users_class(make: Any) -> None:
    """Recorded for torch's own functions, which take them for tuples and lists."""
    x = koila.lazy(batch())
    tensors = {Pair: lambda: Pair(x, x), Made: lambda: Made("two of", x)}
    given = tensors.get(make, lambda: make([x, x]))()
    joined = torch.cat(given)
    assert is_pending(joined)
    assert joined.tolist() == torch.cat([batch(), batch()]).tolist()


def test_results_of_torch_as_arguments() -> None:
    """torch.return_types take one sequence."""
    both = torch.aminmax(koila.lazy(batch()), dim=1)
    assert isinstance(both, torch.return_types.aminmax)  # type: ignore[attr-defined]
    stacked = torch.stack(both)
    assert is_pending(stacked)
    wanted = torch.stack(tuple(torch.aminmax(batch(), dim=1)))
    assert stacked.tolist() == wanted.tolist()


GIVEN: dict[str, Callable[[Any], Any]] = {
    "pair": lambda x: Pair(x, 3),
    "made": lambda x: Made("two of", x),
    "tuple": lambda x: Three([x, 1]),
    "list": lambda x: Items([x, 1]),
    "return type": lambda x: torch.return_types.aminmax((x, x)),  # type: ignore[attr-defined]
    "nested": lambda x: (Pair([x], {"a": x}), [Items([x])], {"b": Three([x])}),
    "slice": lambda x: slice(x[0, 0], None, 2),
    "ordered": lambda x: OrderedDict(a=x),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_call_that_runs_at_once_gets_the_same_types(name: str) -> None:
    """With real tensors in place of the lazies, and the containers of the user unchanged."""
    x = koila.lazy(batch())
    given = GIVEN[name](x)
    before = shape_of(given)
    seen: list[Any] = []

    def look(obj: Any, word: Any) -> None:
        seen.extend([obj, word])

    _core.live(look, (given,), {"word": [given]}, True)
    wanted = shape_of(GIVEN[name](batch()))
    assert not has_lazy(seen)
    assert shape_of(given) == before and has_lazy(given)
    if name == "ordered":
        wanted = dict(wanted)
    assert shape_of(seen) == (list, [wanted, (list, [wanted])])


def has_lazy(obj: Any) -> bool:
    if isinstance(obj, dict):
        return any(map(has_lazy, obj.values()))
    if isinstance(obj, slice):
        return any(map(has_lazy, (obj.start, obj.stop, obj.step)))
    return any(map(has_lazy, obj)) if isinstance(obj, list | tuple) else koila.is_lazy(obj)


def test_a_container_without_lazies_is_handed_on_itself() -> None:
    """As in eager: the function may write to it."""
    x, out, words = koila.lazy(batch()), [1], {"a": [2]}

    def write(tensor: Tensor, out: list[Any], words: dict[str, list[Any]]) -> None:
        out.append(tensor.shape)
        words["a"].append(3)

    _core.live(write, (x, out, words), None, True)
    assert out == [1, torch.Size([4, 3])]
    assert words == {"a": [2, 3]}


@pytest.mark.parametrize("make", [Pair, Three, Items])
def test_results_keep_their_type(make: Any) -> None:
    def split(x: Tensor) -> Any:
        parts = x[:2], x[2:]
        return make(*parts) if make is Pair else make(parts)

    made = _core.live(split, (koila.lazy(batch()),), None, False)
    assert type(made) is make
    assert all(map(koila.is_lazy, made))
    assert [part.tolist() for part in made] == [batch()[:2].tolist(), batch()[2:].tolist()]


def test_numpy_arrays_changed_after_the_call() -> None:
    array = numpy.arange(3)
    x = koila.lazy(batch())
    chosen, moved = (x * 2)[array], (x * 2)[(array, 0)]
    array[:] = 3
    assert chosen.tolist() == (batch() * 2)[:3].tolist()
    assert moved.tolist() == (batch() * 2)[:3, 0].tolist()


def test_a_call_that_is_not_recorded_leaves_no_slots() -> None:
    """What was flattened for it is given back: its objects, and none of the tape's."""
    x = pending()
    item = object()
    plain = batch()
    before = sys.getrefcount(item), sys.getrefcount(plain)
    for _ in range(5):
        with pytest.raises(TypeError):
            torch.cat([x, plain, item])  # type: ignore[list-item]
        with pytest.raises(RuntimeError):
            torch.cat([x, plain[:, :2]])
    assert sys.getrefcount(item) == before[0]
    assert x.tolist() == (batch() * 2).tolist()
    _core.forget()
    assert sys.getrefcount(plain) == before[1]


def test_there_is_no_such_node() -> None:
    pending()
    with pytest.raises(IndexError, match="no node 7"):
        _core.call(7)
