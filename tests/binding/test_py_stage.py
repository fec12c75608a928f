# SPDX-License-Identifier: Apache-2.0
"""Nodes run on a chunk: its rows where the call said the batch's, and values as it made them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from binding_kit import batch, is_pending, number_of, staged_as
from chunked import split
from koila import _core
from koila.staged import facts

core: Any = _core
CHUNKS = [2, 3, 4]


def weight() -> Tensor:
    return torch.arange(1.0, 4.0, dtype=torch.float64).requires_grad_()


def four() -> int:
    return 4


# Where the call names the number of rows, in each way that it can be written
CALLS: dict[str, Callable[[Any], Any]] = {
    "by position": lambda x: x.view(4, 3, 1),
    "times something": lambda x: x.view(12).view(four() * 3, 1),
    "in a tuple": lambda x: x.reshape((4, 1, 3)),
    "in a list": lambda x: torch.reshape(x, [4, -1]),
    "by keyword": lambda x: torch.reshape(x, shape=(4, 3, 1)),
    "expanded": lambda x: x[:, None].expand(4, 2, 3),
    "expanded in a size": lambda x: x[:, None].expand(torch.Size([4, 5, 3])),
    "a slice": lambda x: x[:4] * x[0:4],
    "a slice in an index": lambda x: x[:4, 1:],
    "a slice from the end": lambda x: torch.cat([x, x * 2])[-4:],
    "the first half": lambda x: torch.cat([x, x * 2])[:4],
    "the second half": lambda x: torch.cat([x, x * 2])[4:],
    "the second half in an index": lambda x: torch.cat([x, x * 2])[4:, :2],
    "split": lambda x: torch.cat([x, x * 2]).split(4)[1],
    "split by a list": lambda x: torch.cat([x, x * 2, x * 3]).split([4, 8])[1],
    "split by keyword": lambda x: torch.cat([x, x * 2]).split(split_size=4, dim=0)[0],
    "narrow": lambda x: torch.cat([x, x * 2]).narrow(0, 4, 4),
    "unflatten": lambda x: torch.cat([x, x * 2]).unflatten(0, (2, 4))[1],
    "repeat": lambda x: x.repeat(2, 1).view(2, 4, 3)[1],
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0).view(4, 2, 3)[:, 1],
    "heads": lambda x: x.view(4, 3, 1).transpose(1, 2).reshape(4 * 1, 3),
    "new": lambda x: x + x.new_zeros(4, 3) + torch.zeros_like(x),
}


def run(call: Callable[[Any], Any], x: Tensor) -> tuple[Any, Any]:
    w = weight()
    made = call(x * w)
    made.pow(2).sum().backward()
    return made.tolist(), w.grad


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", CALLS)
def test_the_rows_of_the_chunk_stand_where_those_of_the_batch_stood(name: str, chunks: int) -> None:
    wanted, wanted_grad = run(CALLS[name], batch())
    with split(chunks):
        made, grad = run(CALLS[name], koila.lazy(batch()))
        assert koila.report().n_chunks == chunks
    torch.testing.assert_close(made, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_rewritten_call_is_unchanged(chunks: int) -> None:
    """The sizes that the user gave, and the call on the tape, are as they were."""
    sizes = [4, -1]
    lazy = (koila.lazy(batch()) * weight()).reshape(sizes)
    with split(chunks):
        for _ in range(2):
            assert lazy.tolist() == (batch() * weight()).tolist()
            assert core.call(1)[1] == (None, [4, -1])
    assert sizes == [4, -1]


# What reads what ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", CHUNKS)
def test_whole_values_that_are_made_in_the_run_are_cut(chunks: int) -> None:
    """Made of no rows, read by rows: a mask of all rows, made on the way."""

    def program(x: Tensor) -> Any:
        w = weight()
        ramp = (w.detach()[:1] * torch.arange(4.0, dtype=torch.float64))[:, None]
        made = x * w + ramp
        made.exp().sum().backward()
        return made.tolist(), w.grad

    with split(chunks):
        made, grad = program(koila.lazy(batch()))
    torch.testing.assert_close((made, grad), program(batch()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_containers_of_several_results(chunks: int) -> None:
    def program(x: Tensor) -> Any:
        w = weight()
        h = x * w
        values, indices = h.max(1)
        one, two, three = h.unbind(1)
        first, rest = h.split([1, 2], dim=1)
        loss = (values * one + two * three).sum() + (first * rest).sum()
        loss.backward()
        return [t.tolist() for t in (values, indices, one, rest, loss)], w.grad

    with split(chunks):
        made, grad = program(koila.lazy(batch()))
    torch.testing.assert_close((made, grad), program(batch()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_values_are_let_go_when_their_last_reader_is_done(
    chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But what leaves the run stays."""
    there: list[int] = []
    original = _core.run

    def watched(handle: Any, number: Any, env: Any, *rest: Any) -> None:
        original(handle, number, env, *rest)
        there.append(sum(value is not None for value in env))

    monkeypatch.setattr(_core, "run", watched)
    with split(chunks):
        lazy = koila.lazy(batch())
        for _ in range(5):
            lazy = lazy.sin()
        wanted = batch()
        for _ in range(5):
            wanted = wanted.sin()
        assert lazy.tolist() == wanted.tolist()
    assert there.count(1) == chunks


# What goes wrong ----------------------------------------------------------------------------------


def test_a_call_that_raises_is_told_and_the_context_is_as_before() -> None:
    labels = koila.lazy(torch.tensor([0, 1, 2, 7]))
    x = koila.lazy(batch())
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.nll_loss(x, labels)
    with split(2), pytest.raises(IndexError, match="Target 7"):
        loss.tolist()
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert not core.is_busy()


@pytest.mark.parametrize("args", [(), ([], 0, [], []), (0, 0, [], [], 1, (False, 0, 0, set(), 0))])
def test_wrong_arguments(args: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        core.run(*args)
    with pytest.raises(TypeError):
        core.run_alone(*args)


def of_another_tape() -> object:
    """The handle of a longer program."""
    lazy = koila.lazy(batch()) * 2 * 3 * 4
    handle: object = core.stage([], False)[0]
    del lazy
    core.forget()
    return handle


#: What run() is given for one recorded call, and what is wrong with each.
def arguments(staged: dict[str, Any], n_values: int, n_imports: int) -> dict[str, Any]:
    """Of a whole run of the last run."""
    return {
        "program": staged["handle"],
        "run": len(staged["runs"]) - 1,
        "env": [None] * n_values,
        "imports": [batch()] * n_imports,
        "rows": -1,
    }


def run_given(given: dict[str, Any], **job: Any) -> None:
    """What of `job` is named as an argument of run() itself replaces that."""
    own = {name: job.pop(name) for name in given if name in job}
    words: dict[str, Any] = {"run_other": print, "cut": print, "cloned": set(), "clone": print}
    core.run(*(given | own).values(), facts.Job(True, **(words | {"settle": print} | job)))


MALFORMED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no program": ({"program": None}, TypeError, "not a program"),
    "no such run": ({"run": 9}, IndexError, "no run 9"),
    "a negative run": ({"run": -1}, IndexError, "number -1"),
    "a run that is no number": ({"run": "x"}, TypeError, "a number"),
    "no room": ({"env": [None]}, ValueError, "room for 2 values"),
    "no imports": ({"imports": []}, ValueError, "imports for 1"),
    "saved in no list": ({"saved": ()}, TypeError, "saved must be a list"),
    "again in a list": ({"again": [1]}, TypeError, "again a tuple"),
    "again what is no value": ({"again": (7,)}, IndexError, "there is no value 7"),
    "again what is no number": ({"again": ("x",)}, TypeError, "expected a number"),
    "aside no tape": ({"aside": 1}, TypeError, "aside must be a tape"),
}


@pytest.mark.parametrize("name", [*MALFORMED, "a program of another tape"])
def test_malformed_programs(name: str) -> None:
    """Each is an error: a run that did nothing would pass for one that did."""
    other = of_another_tape()
    of_another = {"program": other}, ValueError, "not of this tape"
    changed, error, words = MALFORMED.get(name, of_another)
    lazy = koila.lazy(batch()) * 2
    staged = staged_as([], False)
    given = arguments(staged, 2, 1)
    run_given(given)
    assert torch.equal(given["env"][1], batch() * 2)
    with pytest.raises(error, match=words):
        run_given(given, **({"env": [None, None]} | changed))
    assert lazy.tolist() == (batch() * 2).tolist()


def test_calls_are_recorded_aside() -> None:
    """On a tape that is this thread's while they are, of lazies that they are given."""
    aside = koila.lazy(batch().double())
    lazy = koila.lazy(batch()) * 2
    staged = staged_as([], False)
    tape = core.new_tape()
    given = arguments(staged, 2, 1) | {"imports": [aside]}
    run_given(given, aside=tape)
    made = given["env"][1]
    assert type(made) is core.LazyTensor and made.dtype == torch.float64
    assert not core.is_pending_here(made) and core.is_pending_here(lazy)
    assert core.held(tape, core.is_pending_here, (made,), {})
    assert torch.equal(core.read(made), batch().double() * 2)
    assert core.is_pending_here(lazy)
    assert lazy.tolist() == (batch() * 2).tolist()


def staged_chain() -> tuple[Any, dict[str, Any]]:
    """Values 0 to 3: x, 2 x, exp(2 x), and a sum of that and 2 x."""
    lazy = koila.lazy(batch()) * 2
    lazy = lazy + lazy.exp()
    staged = staged_as([], False)
    return lazy, arguments(staged, 4, 3)


def test_what_is_asked_for_again_is_made_and_stays() -> None:
    lazy, given = staged_chain()
    for again, there in ((1,), (1,)), ((2,), (2,)), ((1, 2), (1, 2)):
        env: list[Any] = [None] * 4
        run_given(given, env=env, again=again)
        assert tuple(i for i, one in enumerate(env) if one is not None) == there
        for i, want in ((1, batch() * 2), (2, (batch() * 2).exp())):
            assert i not in there or torch.equal(env[i], want)
    env = [None, batch() * 3, None, None]  # what is there is not made again
    run_given(given, env=env, again=(1, 2))
    assert torch.equal(env[1], batch() * 3)
    assert torch.equal(env[2], (batch() * 3).exp())
    assert lazy.tolist() == (batch() * 2 + (batch() * 2).exp()).tolist()


def test_who_settles_what_is_saved_is_told_the_call() -> None:
    _, given = staged_chain()
    for raises in (False, True):
        saved: list[Any] = [1, []]
        told: list[int] = []

        def settle(node: int, raises: bool = raises, told: list[int] = told) -> None:
            told.append(node)
            if raises or node == 1:
                saved.clear()  # noqa: B023
            if raises:
                raise KeyError(node)

        if raises:
            with pytest.raises(KeyError):
                run_given(given, env=[None] * 4, saved=saved, settle=settle)
        else:
            run_given(given, env=[None] * 4, saved=saved, settle=settle)
        assert told == ([0] if raises else [0, 1])


def test_a_tensor_that_is_saved_twice_has_one_cell() -> None:
    saved: list[Any] = []
    pack = core.pack_into(saved)
    x, y = torch.ones(2), torch.ones(2)
    cells = [pack(x), pack(y), pack(x)]
    assert cells == [[], [], []]
    assert cells[0] is cells[2] is not cells[1]
    of_x, cell_of_x, of_y, cell_of_y = saved
    assert of_x is x and of_y is y
    assert cell_of_x is cells[0] and cell_of_y is cells[1]
    with pytest.raises(TypeError, match="needs a list"):
        core.pack_into(())  # type: ignore[arg-type]


def test_a_node_runs_alone() -> None:
    lazy = koila.lazy(batch()) * 2
    env = [batch(), None]
    core.run_alone(0, env, -1, True, print)
    assert torch.equal(env[1], batch() * 2)
    with pytest.raises(IndexError, match="no node 7"):
        core.run_alone(7, env, -1, True, print)
    with pytest.raises(IndexError, match="no room"):
        core.run_alone(0, [], -1, True, print)
    assert lazy.tolist() == (batch() * 2).tolist()


# deliver ------------------------------------------------------------------------------------------


def test_a_number_is_delivered_for_good_or_for_now() -> None:
    """Final: the value leaves the tape with it. Else it is known, and its call stays."""
    w = weight()
    first, second = koila.lazy(batch()) * w, koila.lazy(batch()) * 3
    known, last = torch.zeros(4, 3).double(), torch.ones(4, 3).double()
    core.deliver(2, known, False)
    assert number_of(first) is known and core.real(first) is None
    number = core.hook(first, False)
    assert number == 2
    assert not is_pending(first)
    value = facts.Info(*core.value(2))
    assert value.result is known
    core.deliver(2, last, True)
    assert core.real(first) is number_of(first) is last
    assert second.tolist() == (batch() * 3).tolist()
    assert core.real(first) is last


def test_a_number_that_nobody_waits_for() -> None:
    dead = koila.lazy(batch()) * weight()
    other = koila.lazy(batch()) * weight()
    del dead
    made = batch()
    n_before = sys.getrefcount(made)
    core.deliver(2, made, True)
    core.deliver(2, made, False)
    del other
    assert sys.getrefcount(made) == n_before, "it goes with the tape"


def test_a_value_is_cut() -> None:
    """It is a leaf with that number, and the call that made it does not run any more."""
    w = weight()
    first = koila.lazy(batch()) * w
    second = first + 1
    core.cut(2, torch.ones(4, 3).double())
    with torch.no_grad():
        torch.ops.aten.mul_(w, 2)
    assert core.close()  # the write let `second` run: its gradient would end at the cut
    assert second.tolist() == torch.full((4, 3), 2.0).tolist()
    assert first.tolist() == torch.ones(4, 3).tolist()
