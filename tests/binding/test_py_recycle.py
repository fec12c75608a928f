# SPDX-License-Identifier: Apache-2.0
"""Dead lazies are used again: with nothing of what they were, and only if nobody holds them."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import koila
from binding_kit import batch, pending
from koila import _core

pytestmark = [
    pytest.mark.sanitize,
    pytest.mark.skipif(not _core.is_recycling(), reason="not on this torch"),
]

LazyTensor: Any = _core.LazyTensor
WANTED = (batch() * 2).tolist()


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """Empty the list of the dead: it holds at most 256."""
    kept = [koila.lazy(torch.ones(1)) for _ in range(300)]
    yield
    del kept


def test_a_dead_lazy_is_used_again() -> None:
    lazy = koila.lazy(batch())
    number = id(lazy)
    del lazy
    another = koila.lazy(batch() + 1)
    assert id(another) == number
    assert another.tolist() == (batch() + 1).tolist()


def test_a_weak_reference_of_cpps_expires() -> None:
    lazy = koila.lazy(batch())
    weak = torch._C._WeakTensorRef(lazy)
    assert not weak.expired()
    del lazy
    another = koila.lazy(batch())
    assert weak.expired()
    del another


def dies(prepare: Callable[[Any], Any]) -> tuple[int, Any]:
    """The id of a lazy that died after something was done with it, and what that returned."""
    lazy = koila.lazy(batch())
    kept = prepare(lazy)
    number = id(lazy)
    del lazy
    return number, kept


def test_nothing_of_it_is_left() -> None:
    deaths: list[Any] = []

    def prepare(lazy: Any) -> Any:
        lazy.note = "mine"
        return weakref.ref(lazy, deaths.append)

    number, watch = dies(prepare)
    assert watch() is None and deaths == [watch]
    lazy: Any = koila.lazy(batch() * 1)
    assert id(lazy) == number
    assert not hasattr(lazy, "note") and lazy.__dict__ == {}
    assert weakref.getweakrefcount(lazy) == 0
    assert watch() is None
    assert lazy.grad is None and not lazy.requires_grad and lazy.shape == (4, 3)


@pytest.mark.parametrize("make", [torch.tensor(2), torch.tensor(True), torch.tensor(0.5)])
def test_what_stands_for_a_number_is_used_again_as_such(make: Tensor) -> None:
    """torch's parser goes by the placeholder: an object that has one of its own keeps its kind."""
    number = id(koila.lazy(make.expand(4)).max())
    other = koila.lazy(batch())
    again = koila.lazy(make.expand(4)).max()
    assert id(again) == number != id(other)
    assert torch.full((2,), again).tolist() == [make.item()] * 2
    with pytest.raises(TypeError):
        torch.full((2,), other)


def hooked(lazy: Any) -> None:
    """A hook that torch's own object holds."""
    with torch._C.DisableTorchFunction():
        vars(torch._C.TensorBase)["_backward_hooks"].__set__(lazy, OrderedDict())


def touched(lazy: Any) -> None:
    """The dispatcher met the placeholder, and may have kept something of it."""
    with torch._C.DisableTorchFunction():
        torch.add(lazy, 1)


def in_cpp(lazy: Any) -> Any:
    """C++ holds a reference."""
    return torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(lazy)  # type: ignore[attr-defined]


@pytest.mark.parametrize("prepare", [hooked, touched, in_cpp])
def test_what_others_may_hold_is_not_used_again(prepare: Callable[[Any], Any]) -> None:
    number, kept = dies(prepare)
    made = [koila.lazy(batch()) for _ in range(20)]
    if prepare is in_cpp:
        assert number not in map(id, made)
        back = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(kept)  # type: ignore[attr-defined]
        assert id(back) == number, "torch has brought it back to life"
        assert back.tolist() == batch().tolist()
    assert all((lazy * 2).tolist() == WANTED for lazy in made)
    with torch._C.DisableTorchFunction():
        get = vars(torch._C.TensorBase)["_backward_hooks"].__get__
        assert all(get(lazy) is None for lazy in made)


def test_a_callback_may_make_lazies() -> None:
    """Clearing what hung on a lazy runs the user's code, which may take the next, or record."""
    made: list[Tensor] = []

    class Maker:
        """Makes lazies when it dies."""

        def __del__(self) -> None:
            made.extend([koila.lazy(batch()) * 2, pending()])

    def prepare(lazy: Any) -> Any:
        lazy.maker = Maker()
        return weakref.ref(lazy, lambda _: made.append(pending()))

    for _ in range(10):
        dies(prepare)
    after = [pending() for _ in range(10)]
    assert len(made) == 30
    assert len(set(map(id, made + after))) == 40
    assert all(lazy.tolist() == WANTED for lazy in made + after)


def test_a_lazy_may_come_back_to_life() -> None:
    """A finaliser cannot reach it any more; what hangs on it can be kept."""
    kept: list[Any] = []

    class Keeper:
        """Keeps itself when it dies."""

        def __del__(self) -> None:
            kept.append(self)

    def prepare(lazy: Any) -> None:
        lazy.keeper = Keeper()

    dies(prepare)
    assert len(kept) == 1
    assert pending().tolist() == WANTED


def test_lazies_in_cycles() -> None:
    for _ in range(300):
        lazy: Any = pending()
        lazy.mine = [lazy, {"a": lazy}]
    del lazy
    gc.collect()
    made = [pending() for _ in range(300)]
    assert not any(lazy.__dict__ for lazy in made)
    assert all(lazy.tolist() == WANTED for lazy in made[::30])


def test_more_than_there_is_room_for() -> None:
    for _ in range(3):
        made = [koila.lazy(batch()) for _ in range(1000)]
        assert len(set(map(id, made))) == 1000
        assert made[0].tolist() == made[-1].tolist() == batch().tolist()
        del made


def test_placeholders_of_torchs_own_making_are_not_used_again() -> None:
    for _ in range(20):
        LazyTensor.__new__(LazyTensor)
    assert pending().tolist() == WANTED


def test_threads_share_the_dead() -> None:
    def work(number: int) -> bool:
        right = True
        for i in range(200):
            lazy: Any = koila.lazy(torch.full((2, 2), float(number)))
            right &= not hasattr(lazy, "number")
            lazy.number = number
            made = [lazy * j for j in range(5)]
            right &= i % 50 != 0 or made[3].tolist() == [[3.0 * number] * 2] * 2
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


class Seen(TorchDispatchMode):
    """Keeps what is dispatched."""

    sees_koila = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_does_not_see_lazies_being_made() -> None:
    """New ones nor old ones: it would take the placeholder for a tensor of the user's."""
    with Seen() as mode:
        made = [koila.lazy(batch()) * 2 for _ in range(3)]
        seen = [func for func in mode.seen if "empty" in str(func)]
    assert seen == []
    assert all(lazy.tolist() == WANTED for lazy in made)
