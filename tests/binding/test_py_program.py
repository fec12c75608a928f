# SPDX-License-Identifier: Apache-2.0
"""What the tape holds, told in numbers: the staged program, a value, a node. It changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from binding_kit import batch, in_a_thread, is_pending, pending, staged_as
from chunked import split
from koila import _core
from koila.staged.facts import ONCE, REDUCE, REDUCTION_NAMES, ROWS, Info
from koila.staged.program import Program

core: Any = _core


def weight() -> Tensor:
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


# stage --------------------------------------------------------------------------------------------


def test_nothing_is_staged_of_nothing() -> None:
    staged = staged_as([], False)
    assert staged["nodes"] == staged["roots"] == staged["wanted"] == []


@pytest.mark.parametrize("roots", [[torch.ones(2)], [None]])
def test_roots_are_lazy(roots: Any) -> None:
    with pytest.raises(TypeError, match="a root is not lazy"):
        core.stage(roots, False)
    with pytest.raises(TypeError):
        core.stage(tuple(roots), False)


def test_a_root_by_number_is_a_value() -> None:
    with pytest.raises(IndexError, match="no value 3"):
        core.stage([3], False)


def test_a_root_of_another_thread_is_refused() -> None:
    with pytest.raises(SystemError, match="of another tape"):
        core.stage([in_a_thread(pending)], False)


def told(roots: list[Any], is_no_grad_only: bool) -> dict[str, Any]:
    """What is told of a program, but for the handle, which is another object each time."""
    return {key: told for key, told in staged_as(roots, is_no_grad_only).items() if key != "handle"}


def test_a_graph_that_leads_to_no_root_is_aside() -> None:
    h = koila.lazy(batch()) * weight()
    program = Program([(h.detach() * weight()).sum()])
    (aside,) = program.aside()
    assert (
        aside[:-1] == core.facts_of(program.handle, "nodes")[0]
    )  # without the values that it makes
    assert Program([(h * h.detach()).sum()]).aside() == []


def test_a_cut_shares_the_stages() -> None:
    """It lives as long as it has to, and does not change what it is of."""
    x = koila.lazy(batch())
    loss = (x * weight()).exp().sin().mean()
    whole = staged_as([loss], False)
    cut, axes = core.cut_program(whole["handle"], 2, False)
    again, axes_again = core.cut_program(cut, 1, False)
    assert (len(axes), len(axes_again)) == (2, 1)
    bodies = [
        len([run for run in core.facts_of(one, "runs") if run[1] >= 0]) for one in (cut, again)
    ]
    assert bodies == [2, 1]
    told = {name: whole[name] for name in ("nodes", "imports", "runs", "drops")}
    del whole
    assert {name: core.facts_of(again, name) for name in told} == told
    with pytest.raises(TypeError, match="not a program"):
        core.cut_program(None, 2, False)


def test_a_part_of_a_barrier() -> None:
    """Only what a gradient goes through, and the combined reductions that are given."""
    x, w = koila.lazy(batch()), weight()
    first, second = (x * w).mean(), (x * w).exp().mean()
    loss = first * 2 + second * (x.detach().sum() + 1)
    staged = staged_as([loss], False)
    handle, last = staged["handle"], len(staged["runs"]) - 1
    _, _, _, nodes, _, _, exports, _, combined, *_ = staged["runs"][last]
    firsts = {node[0]: node[6] for node in staged["nodes"]}
    values = [firsts[node] for node in combined]
    number, some, imports, left, given = core.gradient_part(handle, last, values)
    assert (some, left, given) == (nodes, exports, combined) and number == last + 1
    number, some, more, left, given = core.gradient_part(handle, last, values[:1])
    assert (some, left, given) == (nodes, exports, combined[:1]) and number == last + 2
    assert len(more) == len(imports) + 1, "what is not given is read from outside"
    with pytest.raises(IndexError, match="no barrier 99"):
        core.gradient_part(handle, 99, [])
    with pytest.raises(IndexError, match="no barrier"):
        core.gradient_part(handle, last - 1, [])
    with pytest.raises(IndexError, match="there is no value 1000000"):
        core.gradient_part(handle, last, [10**6])
    with pytest.raises(TypeError, match="not a program"):
        core.gradient_part(None, last, [])


def test_looking_changes_nothing() -> None:
    x, w = koila.lazy(batch()), weight()
    loss = F.dropout(x * w, 0.5).pow(2).mean()
    first = told([loss], False)
    assert told([loss], False) == first
    assert told([], True) == told([], True)
    assert is_pending(loss)
    assert core.has_draw(False)


def test_modes_and_reductions() -> None:
    x, w = koila.lazy(batch()), weight()
    rows = x * w
    once = rows.sort(0).values
    losses = [rows.sum(), rows.mean(), rows.amax(), rows.logsumexp(0).sum(), once.var()]
    program = Program(losses)
    modes = {node.id: node.mode for node in program.nodes.values()}
    assert modes[0] == ROWS and modes[1] == ONCE
    names = {
        core.node(node.id)[1]: REDUCTION_NAMES[node.reduce]
        for node in program.nodes.values()
        if node.mode == REDUCE
    }
    wanted = {"sum": "SUM", "mean": "MEAN", "amax": "AMAX", "logsumexp": "LOGSUMEXP", "var": "VAR"}
    assert names == wanted
    assert all(node.reduce == 0 for node in program.nodes.values() if node.mode != REDUCE)


def test_stages_alternate() -> None:
    """Barriers are even, bodies odd; a call that needs a barrier's value is in a later body."""
    x, w = koila.lazy(batch()), weight()
    loss = (x * w - (x * w).mean()).pow(2).sum().sqrt()
    program = Program([loss])
    for node in program.nodes.values():
        assert (node.stage % 2 == 1) == (node.mode != ONCE)
    stages = {core.node(node.id)[1]: node.stage for node in program.nodes.values()}
    assert stages["mul"] < stages["sub"] == stages["pow"] < stages["sqrt"]
    assert program.last_body == stages["pow"]
    assert not program.is_tail_linear
    assert program.tail_node is not None and core.node(program.tail_node)[1] == "sqrt"
    assert Program([(x * w).mean() * 3]).is_tail_linear


def test_imports_say_how_a_value_is_read() -> None:
    x, w = koila.lazy(batch()), weight()
    plain = torch.ones(4, 3, dtype=torch.float64)
    loss = ((x * w) + plain).sum()
    program = Program([loss])
    places = {program.info(entry.value).shape: [] for entry in program.imports}  # type: ignore[var-annotated]
    for entry in program.imports:
        if program.is_leaf(entry.value):
            places[program.info(entry.value).shape].append(entry.place and entry.place[1:])
    assert places[(3,)] == [None]
    assert places[(4, 3)] == [(0, 1, 1), (0, 1, 1)]


def test_an_index_that_counts_the_rows_is_told() -> None:
    chosen = (koila.lazy(batch()) * weight())[torch.arange(4), torch.tensor([0, 2, 1, 1])]
    program = Program([chosen.sum()])
    assert [entry.is_range for entry in program.imports].count(True) == 1


def test_what_is_wanted() -> None:
    """What can be reached and waits; dead values are not, and draws are though nobody looks."""
    x, w = koila.lazy(batch()), weight()
    kept, _dead = x * w, (x * w).exp()
    del _dead
    F.dropout(x * w, 0.5)
    later = kept.sin()
    staged = staged_as([], False)
    names = {core.node(node[0])[1] for node in staged["nodes"]}
    assert names == {"mul", "dropout", "sin"}
    assert len(staged["wanted"]) == 2
    assert later.shape == (4, 3)


def test_known_only_leaves_what_has_a_gradient() -> None:
    """But for draws before those that are wanted: the order of draws is eager's."""
    x, w = koila.lazy(batch()), weight()
    _hidden = F.dropout(x * w, 0.5)
    plain = x * 2
    staged = staged_as([], True)
    assert [core.node(node[0])[1] for node in staged["nodes"]] == ["mul"]
    assert len(staged["wanted"]) == 1
    drawn = F.dropout(plain, 0.5)
    staged = staged_as([], True)
    names = [core.node(node[0])[1] for node in staged["nodes"]]
    assert names.count("dropout") == 2
    assert drawn.shape == _hidden.shape


# value --------------------------------------------------------------------------------------------


def test_value() -> None:
    x, w = koila.lazy(batch()), weight()
    made: Any = (x * w).t()
    leaf, own, out, view = (Info(*core.value(i)) for i in range(4))
    assert leaf.real is core.real(x) or leaf.real is not None
    assert own.real is w and own.requires_grad and own.place is None and own.rows == 0
    assert (out.dtype, out.shape, out.requires_grad) == (torch.float64, (4, 3), True)
    assert out.place is not None and out.place[1:] == (0, 1, 1) and out.rows == 4
    assert view.place is not None and view.place[1:] == (1, 1, 1)
    assert view.storage == out.storage != leaf.storage
    assert out.real is out.result is None
    assert out.device == torch.device("cpu")
    with split(2):
        number = core.read(made)
    assert Info(*core.value(3)).result is number


# node ---------------------------------------------------------------------------------------------


def test_node() -> None:
    x, w = koila.lazy(batch()), weight()
    first = torch.mul(x, w)
    second = first.sort(0)
    func, row, reason, where, rows, inputs, saves = core.node(0)
    assert (func, row, reason, rows, inputs) == (torch.mul, "mul", None, 4, (0, 1))
    assert where.startswith(f"call 0, {__file__}:")
    assert saves[0] == 0b01 and saves[1] == 0
    func, row, reason, where, rows, inputs, saves = core.node(1)
    assert row == "sort" and isinstance(reason, str)
    assert inputs == (2,)
    assert second.values.shape == (4, 3)


def test_the_maker_of_a_value() -> None:
    x, w = koila.lazy(batch()), weight()
    made = torch.clamp(x * w, None, torch.ones(3, dtype=torch.float64)).sort(0)
    assert core.maker_of(0) is None
    node, n_values, [first, second] = core.maker_of(2)
    assert (node, n_values) == (0, 3)
    assert first[:2] == (0, (0, 0, 1, 1)) and second[0] == 1
    assert second[1] is None and second[2] is w
    _, n_values, [only] = core.maker_of(core.id(made.values))
    assert n_values == core.id(made.indices) + 1
    clamp, _, inputs = core.maker_of(only[0])
    assert core.node(clamp)[1] == "clamp"
    assert [value for value, *_ in inputs] == [2, 3]
    with pytest.raises(IndexError, match="there is no value 99"):
        core.maker_of(99)


def test_inputs_that_are_none() -> None:
    x = koila.lazy(batch())
    made = F.linear(x, torch.ones(2, 3, dtype=torch.float64), None)
    inputs = core.node(0)[5]
    assert all(value >= 0 for value in inputs[:2])
    assert made.shape == (4, 2)
    clamped = torch.clamp(x, None, torch.ones(3, dtype=torch.float64))
    assert clamped.tolist() == batch().clamp(max=1).tolist()
