# SPDX-License-Identifier: Apache-2.0
"""The small functions of koila._core: what each answers, and that each looks at its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from binding_kit import batch, in_a_thread, is_pending, number_of, pending
from chunked import split
from koila import _core

core: Any = _core


def weight() -> Tensor:
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


def graph() -> Any:
    """Return a pending value that needs a gradient."""
    return koila.lazy(batch()) * weight()


WRONG: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "force": (core.force, (torch.ones(2),)),
    "real": (core.real, (torch.ones(2),)),
    "read": (core.read, (torch.ones(2),)),
    "is_input": (core.is_input, ("x",)),
    "hook": (core.hook, (torch.ones(2),)),
    "retained": (core.retained, ("x",)),
    "id": (core.id, (torch.ones(2),)),
    "is_held_by": (core.is_held_by, (3, 0)),
    "like": (core.like, (torch.ones(2), torch.ones(2))),
    "like a number": (core.like, (3, 4)),
    "input": (core.input, ([1.0], 0, 1, 2)),
    "input of no dim": (core.input, (torch.ones(2), None, 1, 2)),
    "live": (core.live, (abs, [1], None, True)),
    "call": (core.call, ("x",)),
    "refresh_leaf": (core.refresh_leaf, (None,)),
    "note_drawn": (core.note_drawn, ("x",)),
    "count_interpreters": (core.count_interpreters, (None,)),
    "set_type_attribute": (core.set_type_attribute, (3, "name", 1)),
    "set_type_attribute by number": (core.set_type_attribute, (int, 3, 1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    function, args = WRONG[name]
    with pytest.raises(TypeError):
        function(*args)


def test_no_such_node_or_value() -> None:
    lazy = pending()
    for function in (core.call, core.node, core.note_drawn):
        with pytest.raises(IndexError, match="no node 1"):
            function(1)
    with pytest.raises(IndexError, match="no value 99"):
        core.value(99)
    with pytest.raises(IndexError, match="no value 99"):
        core.deliver(99, batch(), False)
    with pytest.raises(IndexError, match="no value 99"):
        core.refresh_leaf(99)
    assert lazy.tolist() == (batch() * 2).tolist()


# Inputs -------------------------------------------------------------------------------------------


def test_batches_have_keys_of_their_own() -> None:
    keys = [core.new_axis() for _ in range(3)] + [in_a_thread(core.new_axis)]
    assert sorted(set(keys)) == keys


@pytest.mark.parametrize(("dim", "place"), [(0, (0, 1, 1)), (1, (1, 1, 1)), (-1, None)])
def test_input_has_rows_where_it_is_told(dim: int, place: Any) -> None:
    x = batch()
    lazy = core.input(x, dim, core.new_axis(), x.shape[dim])
    assert core.is_input(lazy)
    assert core.real(lazy) is core.force(lazy) is number_of(lazy) is x
    made = lazy * 2
    assert not core.is_input(made)
    _, _, _, found, rows, *_ = core.value(0)
    assert (found and found[1:]) == place
    assert rows == (x.shape[dim] if place else 0)


@pytest.mark.parametrize("is_pending", [True, False])
def test_like_has_rows_where_another_has_them(is_pending: bool) -> None:
    """So the two are cut together."""
    x = koila.lazy(batch())
    other = (x * 2).t() if is_pending else koila.lazy(batch().t(), batch=1)
    noise = torch.ones(3, 4, dtype=torch.float64)
    lazy = core.like(noise, other)
    assert core.real(lazy) is noise
    made = lazy + other
    place = core.value(core.node(1 + is_pending if is_pending else 0)[5][0])[3]
    assert place is not None and place[1:] == (1, 1, 1)
    with split(2):
        assert made.tolist() == (noise + (batch() * 2 if is_pending else batch()).t()).tolist()


# What is there ------------------------------------------------------------------------------------


def test_real_and_known_and_force() -> None:
    lazy = graph()
    assert core.real(lazy) is number_of(lazy) is None
    with split(2):
        number = core.read(lazy)
    assert core.real(lazy) is None
    assert number_of(lazy) is number and not number.requires_grad
    real = core.force(lazy)
    assert core.real(lazy) is number_of(lazy) is real and real.requires_grad
    assert real.tolist() == number.tolist() == batch().tolist()


def test_describe() -> None:
    x = batch().requires_grad_()
    wanted = (torch.float64, torch.Size([4, 3]), (3, 1), True, 0)
    assert core.describe(x) == core.describe(koila.lazy(x)) == wanted
    assert core.describe(koila.lazy(x) * 2) == wanted
    assert core.describe((koila.lazy(x) * 2).t()) == (
        *wanted[:1],
        torch.Size([3, 4]),
        (1, 3),
        True,
        0,
    )
    assert core.describe(torch.zeros((1,) * 9)) is None
    assert core.describe(batch().to_sparse()) is None
    assert core.describe(torch.zeros(2, dtype=torch.float8_e5m2)) is None


def test_describe_leaves_strides_open_where_they_are_not_known() -> None:
    made: Any = torch.linalg.svd(koila.lazy(batch()))[0]
    assert is_pending(made)
    assert core.describe(made)[2] is None
    assert made.stride() == torch.linalg.svd(batch())[0].stride()


def test_has_no_grad() -> None:
    """A value that waits, can be reached, and whose history has no gradient."""
    assert not core.has_no_grad()
    x, w = koila.lazy(batch()), weight()
    loss = x * w
    assert not core.has_no_grad()
    accuracy = (x * 2).sum()
    assert core.has_no_grad()
    del accuracy
    assert not core.has_no_grad()
    detached = loss.detach()
    assert not core.has_no_grad()
    assert is_pending(detached)


def test_has_stranded() -> None:
    """A value without a gradient waits for calls with one, whose results are gone."""
    assert not core.has_stranded()
    x, w = koila.lazy(batch()), weight()
    loss = (x * w).sum()
    hits = (loss > 0).sum()
    assert not core.has_stranded()
    del loss
    assert core.has_stranded()
    del hits
    assert not core.has_stranded()


def test_storage() -> None:
    """Memory of the tape's own has a number; the user's, and what may be, has none."""
    lazy = koila.lazy(batch())
    made = lazy * 2
    view = made[:, 0]
    number = core.storage(made)
    assert number is not None
    assert core.storage(view) == number
    assert core.storage(lazy * 2) != number
    assert core.storage(lazy) is None
    made.tolist()
    assert core.storage(koila.lazy(batch())) is None
    with pytest.raises(TypeError):
        core.storage(1)


def test_leaves_of() -> None:
    """Only what pending calls read, in the same memory."""
    w = weight()
    assert core.leaves_of(w) == []
    lazy = koila.lazy(batch()) * w
    (leaf,) = core.leaves_of(w)
    assert core.value(leaf)[5] is w
    assert core.leaves_of(w[:1]) == [leaf]
    assert core.leaves_of(weight()) == []
    core.force(lazy)
    assert core.leaves_of(w) == []


def test_pending_bytes() -> None:
    """What the calls make, views not; nothing of what has run."""
    assert core.pending_bytes(False) == 0
    x = koila.lazy(batch())
    first = x * 2
    assert core.pending_bytes(False) == 4 * 3 * 8
    first.t()
    assert core.pending_bytes(False) == 4 * 3 * 8
    second = first.sum(1)
    assert core.pending_bytes(False) == (4 * 3 + 4) * 8
    core.force(second)
    assert core.pending_bytes(False) == 0


def test_pending_bytes_are_not_of_steps_that_are_done() -> None:
    """While a call waits that shares their tape."""
    w = weight()
    waiting = koila.lazy(batch(), batch=0) * w
    n_bytes = core.pending_bytes(True)
    with koila.config(chunks=2):
        koila.lazy(batch(), batch=0).mul(w).exp().sum().backward()
    assert core.pending_bytes(True) == n_bytes > 0
    core.force(waiting)


def test_notes_live_as_long_as_the_program() -> None:
    lazy = pending()
    core.notes()["mine"] = 1
    assert core.notes() == {"mine": 1}
    assert in_a_thread(core.notes) == {}
    core.force(lazy)
    assert core.notes() == {}


def test_draws() -> None:
    assert not core.has_draw(False)
    lazy = F.dropout(koila.lazy(batch()), 0.5)
    assert core.has_draw(False)
    assert not in_a_thread(lambda: core.has_draw(False))
    lazy.tolist()
    assert not core.has_draw(False)


def test_hook() -> None:
    x, w = koila.lazy(batch()), weight()
    lazy: Any = x * w
    number = core.hook(lazy, False)
    assert core.value(number)[:3] == (torch.float64, torch.Size([4, 3]), True)
    assert core.hook(lazy) == number
    assert core.hook(x) is None, "a leaf"
    assert core.hook(x * 2) is None, "without gradient"
    assert in_a_thread(lambda: core.hook(lazy)) is None, "of another thread"
    core.force(lazy)
    assert core.hook(lazy) is None, "a tensor already"


# What it does -------------------------------------------------------------------------------------


def test_live() -> None:
    x = koila.lazy(batch())
    plain, lazy = (core.live(torch.mul, (x, 2), None, is_plain) for is_plain in (True, False))
    assert type(plain) is Tensor
    assert koila.is_lazy(lazy) and not is_pending(lazy)
    assert plain.tolist() == lazy.tolist() == (batch() * 2).tolist()
    added = core.live(torch.add, (x * 2, x), {"alpha": 3}, True)
    assert torch.equal(added, torch.add(batch() * 2, batch(), alpha=3))


def test_flush_and_close_and_forget() -> None:
    core.flush()
    assert core.close(), "nothing to reach"
    first, second = graph(), graph()
    assert not core.close()
    del second
    core.flush()
    assert core.real(first).tolist() == batch().tolist()
    assert core.close()
    third = graph()
    assert not core.close()
    core.forget()
    with pytest.raises(koila.KoilaError, match="has no value"):
        third.tolist()
    graph()
    assert core.close(), "nobody can reach it"


def test_abandoned_programs_run_when_they_are_asked_for() -> None:
    first = graph()
    core.abandon()
    second = graph()
    core.flush()
    assert core.real(second) is not None
    assert is_pending(first)
    assert first.tolist() == batch().tolist()


def test_while_a_replay_is_under_way() -> None:
    """Calls run at once, and what the replay makes cannot be read."""
    lazy, x = graph(), koila.lazy(batch())
    assert not core.is_busy()
    core.set_busy(True)
    try:
        assert core.is_busy()
        assert not in_a_thread(core.is_busy)
        made = x * 2
        assert not is_pending(made)
        assert made.tolist() == (batch() * 2).tolist()
        with pytest.raises(koila.KoilaError, match="while the program that makes it is running"):
            core.force(lazy)
    finally:
        core.set_busy(False)
    assert is_pending(lazy)
    assert lazy.tolist() == batch().tolist()


def test_leaves_are_checked_and_refreshed() -> None:
    x, scale = koila.lazy(batch()), torch.ones(3, dtype=torch.float64)
    lazy = x * scale
    core.check_leaves()
    (leaf,) = core.leaves_of(scale)
    torch.ops.aten.mul_(scale, 3)
    assert core.leaves_of(scale) == []  # what was read is gone
    core.refresh_leaf(leaf)
    assert core.leaves_of(scale) == [leaf]
    core.check_leaves()
    assert lazy.tolist() == (batch() * 3).tolist()
    lazy = x.tanh() * scale
    torch.ops.aten.mul_(scale, 3)
    core.check_leaves()
    with pytest.raises(koila.StaleError, match="mul: a tensor"):
        lazy.tolist()


def test_what_has_rows_stays_lazy_after_a_backward() -> None:
    of_rows, lazy = graph(), graph()
    of_none = graph().mean()
    core.force(lazy)
    core.force(of_none)
    core.note_backward()
    assert core.real(lazy * 2) is None, "it is recorded"
    core.flush()
    made = lazy * 2
    assert core.real(made) is None, "though nothing waits"
    assert made.tolist() == (batch() * 2).tolist()
    core.flush()
    assert core.real(lazy.detach()) is not None, "the same number, which is there"
    assert type(of_none * 2) is Tensor, "there is nothing to gain"
    assert of_rows.tolist() == batch().tolist()


def test_type_attributes() -> None:
    class Owner:
        """Asked through an instance: the cache of attributes must notice."""

        name = 1

    owner = Owner()
    assert owner.name == 1
    core.set_type_attribute(Owner, "name", 2)
    assert owner.name == 2
    generator: Any = torch._C.Generator
    with pytest.raises(TypeError):
        generator.note = 3
    core.set_type_attribute(generator, "note", 3)
    assert torch.default_generator.note == 3  # type: ignore[attr-defined]
    core.set_type_attribute(generator, "note", None)
