# SPDX-License-Identifier: Apache-2.0
"""The tape: leaves by identity, any number of values, one for each thread, and how it ends."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import koila
from binding_kit import batch, in_a_thread, is_pending, pending
from chunked import split
from koila import _core
from koila.staged import aliases

core: Any = _core


def weight() -> Tensor:
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


# Leaves -------------------------------------------------------------------------------------------


def test_a_tensor_is_one_leaf() -> None:
    x, w = koila.lazy(batch()), weight()
    first = x * w
    (leaf,) = core.leaves_of(w)
    second = first * w
    assert core.leaves_of(w) == [leaf]
    assert core.node(0)[5][1] == core.node(1)[5][1] == leaf
    second.sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, (batch() * 2).sum(0))


def test_an_alias_is_a_leaf_of_its_own() -> None:
    x, w = koila.lazy(batch()), weight()
    made = x * w * w.detach() * w.view(3)
    leaves = {core.node(i)[5][1] for i in range(3)}
    assert len(leaves) == 3
    made.sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, (batch() * 2).sum(0))


def test_thousands_of_leaves_are_found_again() -> None:
    x = koila.lazy(torch.ones(2, dtype=torch.float64))
    plain = [torch.full((2,), float(i), dtype=torch.float64) for i in range(3000)]
    made = x
    for tensor in plain:
        made = made + tensor
    leaves = [core.leaves_of(tensor) for tensor in plain]
    assert len({leaf for (leaf,) in leaves}) == 3000
    again = made
    for tensor in plain[::100]:
        again = again - tensor
    assert [core.leaves_of(tensor) for tensor in plain] == leaves
    wanted = 1 + sum(range(3000)) - sum(range(0, 3000, 100))
    assert again.tolist() == [float(wanted)] * 2


def test_a_tensor_where_another_died_is_another() -> None:
    """A tape keeps its leaves; when it is over, their addresses are anybody's."""
    x = koila.lazy(batch())
    for i in range(200):
        plain = torch.full((3,), float(i), dtype=torch.float64)
        assert (x * plain).tolist() == (batch() * float(i)).tolist()
        del plain


def test_a_leaf_is_met_again_as_it_is_now() -> None:
    """When all that read it is done it may have changed: its value, sizes, layout and flag."""
    x, plain = koila.lazy(batch()), torch.ones(3, dtype=torch.float64)
    kept = (x * weight()).exp()
    for change in (
        lambda: plain.mul_(2),
        lambda: plain.requires_grad_(),
        lambda: plain.requires_grad_(False).resize_(1),
        lambda: plain.resize_(4, 3).fill_(5),
    ):
        change()
        made = x * plain
        assert made.requires_grad == plain.requires_grad
        assert made.tolist() == (batch() * plain).tolist()
    assert kept.tolist() == batch().exp().tolist()


def test_a_leaf_is_what_it_was_at_each_call() -> None:
    """Its flag is switched between two calls that both wait."""
    x, w = koila.lazy(batch()), weight()
    first = x * w
    w.requires_grad_(False)
    second = x * w
    assert (first.requires_grad, second.requires_grad) == (True, False)
    assert core.node(0)[5][1] != core.node(1)[5][1]
    w.requires_grad_()
    (first + second).sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, batch().sum(0))


# Growth -------------------------------------------------------------------------------------------


def test_a_hundred_thousand_values() -> None:
    x = koila.lazy(torch.zeros(2, dtype=torch.float64))
    made = x
    for _ in range(100_000):
        made = made + 1
    assert is_pending(made)
    assert core.value(100_000)[1] == (2,)
    assert made.tolist() == [100_000.0] * 2
    with pytest.raises(IndexError):
        core.value(0)


def test_hundreds_of_batches() -> None:
    parts = [koila.lazy(torch.full((i % 7 + 1, 2), float(i))) for i in range(300)]
    sums = [(part * weight()[:2].float()).sum() for part in parts]
    with split(3):
        found = [total.item() for total in sums]
    assert found == [float(i * (i % 7 + 1) * 2) for i in range(300)]


# Threads ------------------------------------------------------------------------------------------


def test_each_thread_has_a_tape() -> None:
    w = weight()
    here = koila.lazy(batch()) * w
    assert core.leaves_of(w)
    assert in_a_thread(lambda: core.leaves_of(w)) == []

    def record() -> Any:
        there = koila.lazy(batch()) * w
        first = core.node(0)[0], core.leaves_of(w)
        core.forget()
        return first, there

    (_, leaf), there = in_a_thread(record)
    assert leaf == core.leaves_of(w)
    assert here.tolist() == batch().tolist()
    with pytest.raises(koila.KoilaError):
        there.tolist()


def test_threads_do_not_meet() -> None:
    def work(number: int) -> list[Any]:
        w = torch.full((3,), float(number), dtype=torch.float64, requires_grad=True)
        for i in range(30):
            x = koila.lazy(batch())
            loss = (x * w).exp().sum() + i
            if i % 3 == 0:
                loss.item()
            loss.backward()
        assert w.grad is not None
        return w.grad.tolist()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(8)))
    for number, grad in enumerate(found):
        wanted = 30 * (batch() * (batch() * number).exp()).sum(0)
        torch.testing.assert_close(torch.tensor(grad, dtype=torch.float64), wanted)


def test_a_thread_leaves_nothing_behind() -> None:
    before = core.n_blocks()
    watch: list[weakref.ref[Any]] = []

    def work() -> None:
        w = weight()
        watch.append(weakref.ref(w))
        (koila.lazy(batch()) * w).exp()

    for _ in range(20):
        in_a_thread(work)
    gc.collect()
    assert core.n_blocks() == before
    assert [ref() for ref in watch] == [None] * 20


def test_a_value_outlives_its_thread_and_is_dropped() -> None:
    kept: list[Tensor] = []
    threads = [threading.Thread(target=lambda: kept.append(pending())) for _ in range(10)]
    for thread in threads:
        thread.start()
        thread.join()
    assert kept[0].tolist() == (batch() * 2).tolist()
    assert all(map(is_pending, kept[1:]))
    before = core.n_blocks()
    kept.clear()
    assert core.n_blocks() < before


# The end ------------------------------------------------------------------------------------------


def test_forgotten_values_have_none() -> None:
    x = koila.lazy(batch())
    known, waiting = x * weight(), x * 3
    with split(2):
        waiting.tolist()
    core.forget()
    core.forget()
    assert waiting.tolist() == (batch() * 3).tolist()
    assert (x * 2).tolist() == (batch() * 2).tolist(), "inputs stay"
    other = x.tanh()
    core.forget()
    for lazy in (other,):
        with pytest.raises(koila.KoilaError, match="has no value"):
            lazy.tolist()
        with pytest.raises(koila.KoilaError, match="has no value"):
            lazy + 1
    del known


class Recorder:
    """Records when it dies: with what it was part of."""

    def __init__(self, made: list[Tensor]) -> None:
        self.made = made

    def __del__(self) -> None:
        self.made.append(pending().exp())


def test_what_dies_with_a_tape_may_record() -> None:
    """Everything is off the tape before the user's code runs."""
    made: list[Tensor] = []
    x = koila.lazy(batch())
    for _ in range(5):
        plain: Any = torch.ones(3, dtype=torch.float64)
        plain.note = Recorder(made)
        lazy = x * plain
        del plain
        assert lazy.tolist() == batch().tolist()
    assert len(made) == 5
    for found in made:
        assert found.tolist() == (batch() * 2).exp().tolist()
    plain = torch.ones(3, dtype=torch.float64)
    plain.note = Recorder(made)
    lazy = x * plain
    del plain
    core.forget()
    assert len(made) == 6
    assert made[5].tolist() == (batch() * 2).exp().tolist()


def test_two_threads_attach_a_lazy_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread enters it as a leaf, Python code runs, and so may another thread."""
    memory = batch()
    shared = memory.data  # a leaf whose memory is shared is noted, in Python
    lazy, made = koila.lazy(memory), list[Any]()
    is_shared = aliases.is_shared

    def look(tensor: torch.Tensor) -> bool:
        monkeypatch.setattr(aliases, "is_shared", is_shared)
        made.append(in_a_thread(lambda: lazy * 2))
        return is_shared(tensor)

    monkeypatch.setattr(aliases, "is_shared", look)
    other = lazy * 3
    assert len(made) == 1
    assert other.tolist() == (batch() * 3).tolist()
    assert made[0].tolist() == (batch() * 2).tolist()
    assert lazy.tolist() == batch().tolist()
    assert shared.data_ptr() == memory.data_ptr()
