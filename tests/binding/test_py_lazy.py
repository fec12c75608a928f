# SPDX-License-Identifier: Apache-2.0
"""The Value that a LazyTensor holds: which value it is, and who keeps what alive."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch

import koila
from binding_kit import batch, in_a_thread, live, pending
from chunked import split
from koila import _core

LazyTensor: Any = _core.LazyTensor


def test_a_lazy_that_was_written_is_the_same_object() -> None:
    lazy = pending()
    shape = lazy.shape
    assert lazy.unsqueeze(0).shape == (1, *shape)
    assert lazy.add_(1) is lazy
    assert lazy.shape == shape
    assert lazy.t_() is lazy
    assert lazy.shape == (3, 4)
    assert lazy.tolist() == (batch() * 2 + 1).t().tolist()


def test_an_input_whose_dims_are_moved() -> None:
    """Its rows are no more where lazy() found them."""
    lazy = koila.lazy(batch())
    lazy.t_()
    assert lazy.shape == (3, 4)
    with split(2, whole="its rows are not found again"):
        assert (lazy * 2).sum(0).tolist() == (batch().t() * 2).sum(0).tolist()


# Who keeps what alive -----------------------------------------------------------------------------


def test_a_dropped_lazy_leaves_its_real_tensor_alone() -> None:
    x = batch()
    before = sys.getrefcount(x)
    lazy = koila.lazy(x)
    assert sys.getrefcount(x) > before
    del lazy
    assert sys.getrefcount(x) == before


def test_a_number_nobody_wants_is_let_go() -> None:
    """A live value dies with its lazy, though others of its program live."""
    x = koila.lazy(batch())
    first = x * 2
    second = first + 1
    _core.force(second)
    real = weakref.ref(_core.force(first))
    del first
    assert real() is None
    assert second.tolist() == (batch() * 2 + 1).tolist()


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x * 2, lambda x: live(x * 2)])
def test_cycles_are_collected(make: Any) -> None:
    lazy: Any = make(koila.lazy(batch()))
    lazy.mine = [lazy]
    watch = weakref.ref(lazy)
    del lazy
    gc.collect()
    assert watch() is None
    _core.forget()


def test_a_cycle_through_the_real_tensor_is_collected() -> None:
    x: Any = batch()
    x.mine = koila.lazy(x)
    watch = weakref.ref(x.mine)
    del x
    gc.collect()
    assert watch() is None


def test_a_cycle_through_the_tape_is_collected() -> None:
    """A tensor that a call reads has the call's result as an attribute."""

    def work() -> Any:
        w: Any = torch.ones(3, dtype=torch.float64)
        w.mine = koila.lazy(batch()) * w
        return weakref.ref(w)

    watch = in_a_thread(work)
    gc.collect()
    assert watch() is None


def test_a_collection_at_any_time() -> None:
    """Values, tapes and lazies are traversed in whatever state they are."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(1)
    try:
        with split(2):
            w = torch.ones(3, dtype=torch.float64, requires_grad=True)
            lazy = (koila.lazy(batch()) * w).exp()
            lazy.sum().item()
            lazy.sum().backward()
            lazy.detach().add_(1).tolist()
    finally:
        gc.set_threshold(*thresholds)
    assert w.grad is not None
    torch.testing.assert_close(w.grad, (batch() * batch().exp()).sum(0))
