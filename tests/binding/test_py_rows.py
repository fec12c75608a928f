# SPDX-License-Identifier: Apache-2.0
"""Calls that have a row: what the recorder makes of what the row infers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from binding_kit import batch, is_pending
from chunked import split
from koila import _core
from koila.staged.program import Program

core: Any = _core


def weight() -> Tensor:
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


def reason(node: int) -> Any:
    """Why a call runs once; None where it is cut."""
    return core.node(node)[2]


def place(lazy: Any) -> Any:
    """Where the rows of a pending value are."""
    number = core.hook(lazy, False)
    found = core.value(number)[3]
    return found and found[1:]


def in_chunks(lazy: Any, **reason: str) -> Any:
    with split(2, **reason):
        return lazy.tolist()


def assert_products(found: list[Any], wanted: Tensor) -> None:
    """Sums of products: of fewer rows some libraries add them up in another order."""
    got = torch.tensor(found, dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


# Batches that meet --------------------------------------------------------------------------------


def test_batches_of_equal_size_that_meet_are_one() -> None:
    """What was made of each before they met, too."""
    x, y = koila.lazy(batch()), koila.lazy(batch() + 1)
    w = weight()
    both = x * w + (y * w).exp()
    assert [reason(i) for i in range(4)] == [None] * 4
    loss = both.sum()
    with split(2):
        assert len(Program([loss]).axes) == 1
        loss.backward()
    grad = batch() + (batch() + 1) * (batch() + 1).exp()
    torch.testing.assert_close(w.grad, grad.sum(0), rtol=1e-10, atol=1e-12)
    assert both.tolist() == (batch() + (batch() + 1).exp()).tolist()


def test_three_batches_meet_in_any_order() -> None:
    parts = [koila.lazy(batch() + i) for i in range(3)]
    first = parts[2] * parts[1]
    second = parts[0] * first
    third = torch.cat([*parts, second], 1)
    assert [reason(i) for i in range(3)] == [None] * 3
    plain = [batch() + i for i in range(3)]
    assert in_chunks(third) == torch.cat([*plain, plain[0] * (plain[2] * plain[1])], 1).tolist()


def test_batches_that_meet_across() -> None:
    """Rows against rows: what one row needs is all of the other, which is gathered."""
    x, y = koila.lazy(batch()), koila.lazy(batch() + 1)
    across = x @ y.t()
    assert reason(1) is None
    after = x + 1
    assert reason(2) is None
    assert_products(in_chunks(across), batch() @ (batch() + 1).t())
    assert after.tolist() == (batch() + 1).tolist()


def test_batches_of_other_sizes_stay_two() -> None:
    x, y = koila.lazy(batch()), koila.lazy(batch()[:1])
    both = x + y
    assert reason(0) is None, "the other batch is gathered"
    assert in_chunks(both) == (batch() + batch()[:1]).tolist()


# What is cut, and what is not ---------------------------------------------------------------------


def test_one_tensor_in_two_roles() -> None:
    """By rows, and whole. By name a slot could not tell which of the two is meant."""
    x = koila.lazy(torch.arange(16.0, dtype=torch.float64).view(4, 4) / 7)
    plain = torch.arange(16.0, dtype=torch.float64).view(4, 4) / 9
    both = torch.addmm(plain, x, plain)
    assert reason(0) is None
    wanted = torch.addmm(plain, torch.arange(16.0, dtype=torch.float64).view(4, 4) / 7, plain)
    assert_products(in_chunks(both), wanted)
    both = torch.addmm(mat2=plain, mat1=x, input=plain)
    assert "given twice" in reason(0)
    assert_products(in_chunks(both, whole="given twice"), wanted)


TWICE: dict[str, Callable[[Any, Any], Any]] = {
    "addcmul": lambda x, w: torch.addcmul(x, w, w),
    "where": lambda x, w: torch.where(x > 1, w, w),
    "stack": lambda x, w: torch.stack([x, w.expand(4, 3), w.expand(4, 3)], 1),
    "layer_norm": lambda x, w: F.layer_norm(x, (3,), w, w),
    "once": lambda x, w: x.sort(0).values.addcmul(w, w),
    "no row": lambda x, w: torch.block_diag(x, w, w),
}


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", TWICE)
def test_one_tensor_twice_in_one_role(name: str, chunks: int) -> None:
    """It is met for the first time, and must be one value at once."""

    def run(x: Any) -> Any:
        w = weight()
        made = TWICE[name](x, w)
        made.pow(2).sum().backward()
        return made.tolist(), w.grad

    whole = "it has no row" if name == "no row" else ""
    with split(chunks, whole=whole):
        made, grad = run(koila.lazy(batch()))
    wanted, wanted_grad = run(batch())
    torch.testing.assert_close(made, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-10, atol=1e-12)


def test_rows_are_found_again_after_a_call_that_runs_once() -> None:
    w = weight()
    lazy = torch.sort(koila.lazy(batch()) * w, 0).values
    assert reason(1) is not None
    assert place(lazy) == (0, 1, 1)
    after = lazy * 2
    assert reason(2) is None
    with split(2):
        after.pow(2).sum().backward()
    eager = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (torch.sort(batch() * eager, 0).values * 2).pow(2).sum().backward()
    torch.testing.assert_close(w.grad, eager.grad, rtol=1e-10, atol=1e-12)


def test_rows_that_are_taken_are_a_batch_of_their_own() -> None:
    lazy = koila.lazy(batch()) * weight()
    taken = lazy[1:3]
    assert reason(1) is not None
    after = taken.exp()
    assert place(taken) == place(after) == (0, 1, 1)
    assert sorted(Program([after]).axes.values()) == [2, 4]
    assert in_chunks(lazy) == batch().tolist()


def test_parts_of_one_size_that_meet_are_one_batch() -> None:
    lazy = koila.lazy(batch())
    added = lazy[:2] + lazy[2:]
    assert reason(2) is None
    assert in_chunks(added) == (batch()[:2] + batch()[2:]).tolist()


@pytest.mark.parametrize("n", [1, 40, 65, 130])
def test_any_number_of_inputs(n: int) -> None:
    x = koila.lazy(batch())
    parts = [x * i for i in range(n)]
    joined = torch.cat(parts, 1)
    assert reason(n) is None
    assert in_chunks(joined) == torch.cat([batch() * i for i in range(n)], 1).tolist()


# What makes no node -------------------------------------------------------------------------------


def test_a_call_that_changes_nothing_gives_its_argument_back() -> None:
    lazy = koila.lazy(batch()) * 2
    plain = torch.ones(4, 3, dtype=torch.float64)
    assert lazy.contiguous() is lazy
    assert lazy.to(torch.float64) is lazy
    assert F.dropout(lazy, 0.5, training=False) is lazy
    back = torch.broadcast_tensors(lazy, plain)
    assert back[0] is lazy and back[1] is plain
    with pytest.raises(IndexError):
        core.node(1)
    assert lazy.tolist() == (batch() * 2).tolist()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, o: x.tanh(out=o),
        lambda x, o: torch.mul(x, 2, out=o),
        lambda x, o: torch.cat([x, x], out=o),
    ],
)
def test_a_row_that_declines_runs_at_once(call: Any) -> None:
    plain, eager = (torch.empty(0, dtype=torch.float64) for _ in range(2))
    if "tanh" in call.__code__.co_names:
        call = lambda x, o: torch.tanh(x, out=o)  # noqa: E731
    made = call(koila.lazy(batch()) * 1, plain)
    call(batch(), eager)
    assert plain.tolist() == eager.tolist()
    assert made is plain


def test_what_is_declined_leaves_no_references() -> None:
    x = koila.lazy(batch()) * 1
    plain, keyword = torch.ones(3, dtype=torch.float64), object()
    before = sys.getrefcount(keyword)
    for _ in range(10):
        with pytest.raises(TypeError):
            torch.mul(x, plain, nothing=keyword)  # type: ignore[call-overload]
        with pytest.raises(RuntimeError):
            torch.mul(x, torch.ones(7))
    assert sys.getrefcount(keyword) == before
    assert x.tolist() == batch().tolist()


# Writes -------------------------------------------------------------------------------------------


def test_what_a_program_made_is_written_in_it() -> None:
    x = koila.lazy(batch())
    made = x * 2
    view = made[:, 1:]
    assert view.mul_(3) is view
    assert is_pending(made) and is_pending(view)
    wanted = batch() * 2
    wanted[:, 1:].mul_(3)
    assert in_chunks(made) == wanted.tolist()
    assert view.tolist() == wanted[:, 1:].tolist()


def test_the_users_own_memory_is_written_at_once() -> None:
    plain = torch.zeros(4, 3, dtype=torch.float64)
    x = koila.lazy(batch())
    plain.add_(x * 2)
    assert plain.tolist() == (batch() * 2).tolist()
    own = batch()
    koila.lazy(own).mul_(3)
    assert own.tolist() == (batch() * 3).tolist()
    shared = batch()
    view = koila.lazy(shared)[:, 0]
    view.zero_()
    assert shared[:, 0].tolist() == [0.0] * 4


def test_what_may_be_the_users_memory_is_written_at_once() -> None:
    """reshape and contiguous share memory, or do not: as the layout has it."""
    for plain in (batch(), batch().t().contiguous().t()):
        own, eager = plain.clone(), plain.clone()
        koila.lazy(own).reshape(12).zero_()
        eager.reshape(12).zero_()
        assert own.tolist() == eager.tolist()


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("is_moved", [True, False])
def test_what_may_share_memory_is_written_as_the_layout_has_it(is_moved: bool, chunks: int) -> None:
    def write(x: Tensor) -> Any:
        made = x * 2
        flat = (made.t() if is_moved else made).reshape(12)
        flat.zero_()
        return made.tolist(), flat.tolist()

    with split(chunks):
        assert write(koila.lazy(batch())) == write(batch())


def test_statistics_are_written_when_they_are_asked_for() -> None:
    norm = torch.nn.BatchNorm1d(3).double()
    out = norm(koila.lazy(batch()))
    assert norm.running_mean is not None
    with torch._C.DisableTorchFunctionSubclass():  # what is in memory
        assert norm.running_mean.tolist() == [0.0] * 3
    assert is_pending(out)
    wanted = torch.nn.BatchNorm1d(3).double()
    wanted(batch())
    assert wanted.running_mean is not None
    assert norm.running_mean.tolist() == wanted.running_mean.tolist()
    assert not is_pending(out)


# An index that counts the rows --------------------------------------------------------------------


def test_an_index_is_looked_at_in_every_recording() -> None:
    """One that counts the rows today may be a permutation tomorrow."""
    rows, labels = torch.arange(4), torch.tensor([0, 2, 1, 1])
    for step in range(3):
        x = koila.lazy(batch())
        chosen = x[rows, labels]
        assert (reason(0) is None) == (step != 1)
        whole = "a permutation of the rows" if step == 1 else ""
        assert in_chunks(chosen, whole=whole) == batch()[rows, labels].tolist()
        rows.copy_(torch.tensor([1, 0, 3, 2]) if step == 0 else torch.arange(4))


def test_a_lazy_index_is_not_read() -> None:
    x, labels = koila.lazy(batch(), torch.tensor([0, 2, 1, 1]))
    index = labels * 1
    chosen = x[torch.arange(4), index]
    assert is_pending(index) and is_pending(chosen)
    assert in_chunks(chosen) == batch()[torch.arange(4), torch.tensor([0, 2, 1, 1])].tolist()


# Calls like one before, which are not inferred again ----------------------------------------------

INTS, BITS = torch.arange(12).view(4, 3), torch.arange(12).view(4, 3) % 2 == 0
LARGE = torch.arange(2400.0).view(4, 600)
COUNTED, MIXED = torch.arange(4), torch.tensor([2, 0, 3, 1])

#: Two calls that differ in little, and what they are given.
LITTLE: dict[str, tuple[Tensor, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "an int": (batch(), lambda x: x.sum(0), lambda x: x.sum(1)),
    "an int that is made anew": (
        LARGE,
        lambda x: x.narrow(1, 0, int("300")),
        lambda x: x.narrow(1, 0, int("301")),
    ),
    "a float": (INTS, lambda x: x * 2, lambda x: x * 2.0),
    "a bool": (BITS, lambda x: x * 1, lambda x: x * True),
    "a slice": (batch(), lambda x: x[:, :1], lambda x: x[:, :2]),
    "a step": (batch(), lambda x: x[:, ::2], lambda x: x[:, ::1]),
    "a tuple": (batch(), lambda x: x.sum((1,)), lambda x: x.sum((0, 1))),
    "a dtype": (batch(), lambda x: x.to(torch.float64), lambda x: x.to(torch.float16)),
    "a text": (
        batch(),
        lambda x: torch.einsum("ij->i", x),
        lambda x: torch.einsum("ij->j", x),
    ),
    "a keyword": (
        batch(),
        lambda x: torch.sum(x, dim=1),
        lambda x: torch.sum(x, dtype=torch.float64),
    ),
    "a length": (batch(), lambda x: torch.cat([x, x]), lambda x: torch.cat([x, x, x])),
    "a tensor": (batch(), lambda x: x + x, lambda x: x + (x * 2)),
    "an order": (
        batch(),
        lambda x: torch.sub(input=x, other=x * 3),
        lambda x: torch.sub(other=x, input=x * 3),
    ),
    "its numbers": (batch(), lambda x: x[COUNTED[:4]], lambda x: x[MIXED[:4]]),
    "a gradient": (batch(), lambda x: x * x, lambda x: x * x.detach().requires_grad_()),
    "strides": (batch(), lambda x: x[:3] + 1, lambda x: x[:3].t() + 1),
    "a layout": (
        LARGE.view(4, 6, 10, 10),
        lambda x: torch.clone(x, memory_format=torch.contiguous_format),
        lambda x: torch.clone(x, memory_format=torch.channels_last),
    ),
}


def described(value: Any) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.stride(), value.requires_grad


@pytest.mark.parametrize("what", LITTLE)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_calls_that_differ_in_little_are_told_apart(what: str, is_swapped: bool) -> None:
    plain, *calls = LITTLE[what]
    for call in [*calls, *calls][is_swapped:]:
        x = koila.lazy(plain)
        got, wanted = [call(x), call(x)], call(plain)
        assert all(described(value) == described(wanted) for value in got)
        for value in got:
            assert_products(value.tolist(), wanted.detach().double())
        with koila.config(chunks=2):
            assert_products(call(koila.lazy(plain)).tolist(), wanted.detach().double())


def test_calls_are_told_apart_by_what_surrounds_them() -> None:
    x, ints, w = koila.lazy(batch().float()), koila.lazy(INTS), weight().float()
    w.retain_grad()
    assert (x * w).requires_grad and (x * w).requires_grad
    with torch.no_grad():
        assert not (x * w).requires_grad
    with torch.autocast("cpu"):
        assert (x @ w).dtype == torch.bfloat16
    assert (x @ w).dtype == torch.float32
    assert (ints * 0.5).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (ints * 0.5).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_calls_are_told_apart_by_where_the_rows_are() -> None:
    square, w = torch.arange(16.0).view(4, 4), torch.ones(4, requires_grad=True)
    for dim in (0, 1, 0, 1):
        value = koila.lazy(square, batch=dim) * w
        assert place(value) == (dim, 1, 1)
        assert value.tolist() == square.tolist()
