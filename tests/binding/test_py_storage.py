# SPDX-License-Identifier: Apache-2.0
"""Storages that are noted weakly: which, how many bytes, and that nothing of them stays behind."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from binding_kit import pending
from koila import _core
from koila.memory import storages

pytestmark = pytest.mark.sanitize


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    storages.forget()
    yield
    storages.forget()


def noted(*objects: Any) -> int:
    _core.note_storages(list(objects))
    return _core.storage_bytes()


def test_bytes_of_what_was_noted() -> None:
    x, y = torch.zeros(100), torch.zeros(5, dtype=torch.float64)
    assert noted(x) == 400
    assert noted(x, x[3:], x.t(), None, [y], pending()) == 400
    assert noted(y) == 440
    del x
    assert _core.storage_bytes() == 40


def test_many_come_and_go() -> None:
    """The table grows and shrinks, and forgets no one that is there."""
    kept: dict[int, Tensor] = {}
    for k in range(3000):
        kept[k] = torch.zeros(k % 7 + 1)
        _core.note_storages([kept[k]])
        kept.pop(k - 500 if k % 3 else -1, None)
        if k % 97 == 0:
            assert _core.storage_bytes() == sum(t.nbytes for t in kept.values())
    assert _core.storage_bytes() == sum(t.nbytes for t in kept.values())


def test_weak_references_are_given_back() -> None:
    x = torch.zeros(100)
    storage = x.untyped_storage()
    key = storage._weak_ref()  # for as long as it is looked at
    noted(x)
    del x, storage
    assert torch.UntypedStorage._expired(key)
    assert _core.storage_bytes() == 0
    torch.UntypedStorage._free_weak_ref(key)


def test_nothing_is_held_in_memory_of_the_core() -> None:
    noted(*(torch.zeros(3) for _ in range(1000)))
    before = _core.n_blocks()
    for _ in range(20):
        noted(*(torch.zeros(3) for _ in range(1000)))
    assert _core.n_blocks() == before


def test_a_gradient_without_an_object() -> None:
    x = torch.zeros(100, requires_grad=True)
    (x * 2).sum().backward()
    assert noted(x) == 800


def test_before_a_collection_the_young_are_noted() -> None:
    _core.follow_storages(lambda others: [])
    gc.collect()
    x = torch.zeros(100)
    _core.collecting_garbage("stop", {})
    assert _core.storage_bytes() == 0
    _core.collecting_garbage("start", {})
    assert _core.storage_bytes() >= 400
    assert x.nbytes == 400


def test_ctrl_c_is_not_lost_in_a_collection() -> None:
    """Python loses what a callback of the collector raises."""

    def interrupted(others: list[Any]) -> list[Any]:
        signal.raise_signal(signal.SIGINT)
        return others

    def collect() -> None:
        others = gc.callbacks.copy()  # those in Python would get the interrupt, and lose it
        gc.callbacks[:] = [_core.collecting_garbage]
        try:
            gc.collect()
        finally:
            gc.callbacks[:] = others

    for start in (lambda: _core.collecting_garbage("start", {}), collect):
        gc.collect()
        gc.disable()  # else a collection may come before: the tensor would be young no more
        try:
            x = torch.ones(3, 3).to_sparse()  # of other tensors
            _core.follow_storages(interrupted)
            with pytest.raises(KeyboardInterrupt):
                start()
                for _ in range(100):
                    pass
            assert x.is_sparse
        finally:
            _core.follow_storages(lambda others: [])
            gc.enable()


def test_what_is_made_up_of_others() -> None:
    """Those without storage are handed over, each with what it is made up of."""
    asked: list[Any] = []
    inner = torch.zeros(100)

    def parts(others: list[Tensor]) -> list[Tensor]:
        asked.extend(others)
        return [inner]

    _core.follow_storages(parts)
    x = torch.sparse_coo_tensor(size=(3, 3), check_invariants=True)
    assert noted(x) == 400
    assert len(asked) == 1
    assert asked[0] is x


def test_an_error_in_there_is_raised() -> None:
    def parts(others: list[Tensor]) -> list[Tensor]:
        raise ValueError("no parts")

    _core.follow_storages(parts)
    with pytest.raises(ValueError, match="no parts"):
        noted(torch.sparse_coo_tensor(size=(3, 3), check_invariants=True))


def test_a_list_is_wanted() -> None:
    with pytest.raises(TypeError, match="a list"):
        _core.note_storages((torch.zeros(3),))


@pytest.mark.parametrize("n", range(3))
def test_no_memory(n: int) -> None:
    """An error, and what was known before is still."""
    xs = [torch.zeros(1) for _ in range(200)]
    noted(*xs[:3])
    _core.fail_alloc_after(n)
    try:
        noted(*xs)
    except MemoryError:
        pass
    finally:
        _core.fail_alloc_after(-1)
    assert noted(*xs) == 800


def test_files_are_settled() -> None:
    x = torch.frombuffer(bytearray(2**24), dtype=torch.uint8)
    small = torch.frombuffer(bytearray(2**10), dtype=torch.uint8)
    assert noted(x, small) == 2**24 + 2**10
    asked: list[int] = []

    def ask(address: int) -> bool:
        asked.append(address)
        return True

    def fail(address: int) -> bool:
        raise KeyError(address)

    with pytest.raises(KeyError):
        _core.settle_storages(fail)
    for _ in range(2):
        _core.settle_storages(ask)
    assert asked == [x.data_ptr()], "once"
    assert _core.storage_bytes() == 2**10
    other = torch.frombuffer(bytearray(2**24), dtype=torch.uint8)
    assert noted(other) == 2**24 + 2**10
    _core.settle_storages(lambda _: False)
    assert noted(other) == 2**24 + 2**10


def test_a_storage_in_the_place_of_one_that_died() -> None:
    """It counts, although its address was noted before."""
    for n in range(1, 200):
        kept = [torch.zeros(n) for _ in range(40)]
        assert noted(*kept) == 40 * 4 * n
        assert noted(*kept) == 40 * 4 * n
        del kept
