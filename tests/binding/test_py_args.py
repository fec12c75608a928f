# SPDX-License-Identifier: Apache-2.0
"""Binding: the ways Python lets one write a call, and where each argument is found again."""

from __future__ import annotations

import sys
from typing import Any

import numpy
import pytest
import torch

from koila import _core
from samples_kit import f, i

ROWS0 = (0, 0, 1, 1)


def shape_of(row: str, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    said = _core.infer(row, args, kwargs)
    assert said["status"] == "OK", said
    shape: tuple[int, ...] = said["outs"][0][1]
    return shape


x = f(4, 3, 2)


@pytest.mark.sanitize
@pytest.mark.parametrize(
    "row, args, kwargs",
    [
        ("sum", (x, 1), {}),
        ("sum", (x,), {"dim": 1}),
        ("sum", (x,), {"axis": 1}),
        ("sum", (x, (1,)), {"keepdims": False}),
        ("sum", (x, [-2]), {"dtype": None}),
        ("sum", (), {"input": x, "dim": 1}),
        ("sum", (), {"a": x, "axis": (1,)}),
        ("sum", (x, numpy.int64(1)), {}),
        ("sum", (x,), {"dim": [numpy.int32(1)], "keepdim": False}),
        ("mean", (x, torch.Size([1])), {}),
    ],
)
def test_a_reduction_written_in_many_ways(row: str, args: Any, kwargs: Any) -> None:
    assert shape_of(row, *args, **kwargs) == (4, 2)


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((x, 12, 2), {}),
        ((x, (12, 2)), {}),
        ((x, [12, 2]), {}),
        ((x, torch.Size([12, 2])), {}),
        ((x, numpy.int64(12), 2), {}),
        ((x, -1, 2), {}),
        ((x,), {"size": (12, 2)}),
        ((x,), {"shape": (12, 2)}),
    ],
)
def test_sizes_gathered_or_in_a_tuple(args: Any, kwargs: Any) -> None:
    assert shape_of("view", *args, **kwargs) == (12, 2)


def test_numpy_names_of_operands() -> None:
    assert shape_of("add", x1=f(4, 3), x2=f(3)) == (4, 3)
    assert shape_of("add", x=f(4, 3), other=f(3)) == (4, 3)


@pytest.mark.parametrize(
    "row, args, kwargs",
    [
        ("add", (x, x, x), {}),
        ("add", (x,), {}),
        ("add", (x, x), {"input": x}),
        ("add", (x, x), {"beta": 1}),
        ("relu", (), {}),
        ("relu", (3,), {}),
        ("relu", ("x",), {}),
        ("relu", (None,), {}),
        ("sum", (x, object()), {}),
        ("sum", (x, 1.5), {}),
        ("sum", (x, 2**70), {}),
        ("sum", (x, numpy.uint64(2**63)), {}),
        ("sum", (x, numpy.float64(1)), {}),
        ("sum", (x,), {"dim": 1, "axis": 1}),
        ("add", (x, x), {"out": x}),
        ("view", (x, 12, 2**70), {}),
        ("view", (x, *[1] * 9, 24), {}),
        ("view", (), {"size": (12, 2)}),
        ("expand", (x, [4, 3, numpy.uint64(2**63)]), {}),
        ("sum", (x, [1, None]), {}),
        ("view", (x, 12, "a"), {}),
        ("view", (x, [[12, 2]]), {}),
        ("cat", ([x, 3],), {}),
        ("cat", ([],), {}),
        ("cat", (3,), {}),
        ("cat", ([None, x],), {}),
    ],
)
def test_what_does_not_fit_is_declined(row: str, args: Any, kwargs: Any) -> None:
    assert _core.infer(row, args, kwargs)["status"] == "DECLINED"


class Hooks(int):
    """A number whose methods are the user's: none of them is asked."""

    def __index__(self) -> int:
        raise AssertionError("binding ran user code")

    __int__ = __float__ = __bool__ = __index__


class Thing:
    """No number, though it can say one."""

    def __index__(self) -> int:
        raise AssertionError("binding ran user code")

    __int__ = __float__ = __len__ = __bool__ = __index__


def test_no_user_code_is_run() -> None:
    assert shape_of("sum", x, Hooks(1)) == (4, 2)
    assert shape_of("view", x, Hooks(12), Hooks(2)) == (12, 2)
    for thing in (Thing(), [Thing()], (1, Thing())):
        assert _core.infer("sum", (x, thing), {})["status"] == "DECLINED"
    assert _core.infer("__getitem__", (x, slice(Thing(), None)), {})["status"] == "DECLINED"


def test_no_tensor_is_read_for_a_number() -> None:
    """A tensor has an __index__, which would be a read: it is a tensor all the same."""
    assert _core.infer("sum", (x, torch.tensor(1)), {})["status"] == "DECLINED"
    assert _core.infer("view", (x, torch.tensor(12), 2), {})["status"] == "DECLINED"
    said = _core.infer("__getitem__", (x, slice(None, torch.tensor(2))), {})
    assert said["status"] == "DECLINED"


def test_out_that_is_none_is_no_out() -> None:
    args = f(4, 2), f(4, 3), f(3, 2)
    assert shape_of("addmm", *args, out=None) == (4, 2)
    assert _core.infer("addmm", args, {"out": args[0]})["status"] == "DECLINED"


def test_inputs_are_found_where_they_stand() -> None:
    said = _core.infer("cat", ([f(4, 3), f(4, 2)],), {"dim": 1})
    assert [(where, entry) for where, entry, _ in said["inputs"]] == [(0, 0), (0, 1)]
    said = _core.infer("add", (f(4, 3),), {"alpha": 2, "other": f(3)})
    assert [(where, entry) for where, entry, _ in said["inputs"]] == [(0, None), ("other", None)]
    said = _core.infer("__getitem__", (f(4, 5), (slice(None), i(2))), {})
    assert [(where, entry) for where, entry, _ in said["inputs"]] == [(0, None), (1, 1)]
    said = _core.infer("__getitem__", (f(4, 5), i(2)), {})
    assert [(where, entry) for where, entry, _ in said["inputs"]] == [(0, None), (1, None)]


@pytest.mark.parametrize(
    "args, kwargs, rewrite",
    [
        ((f(4, 6), 4, 2, 3), {}, (1, None, None, 1)),
        ((f(3, 4, 2), 3, 4, 1, 2), {}, (2, None, None, 1)),
        ((f(3, 4, 2), (3, 4, 1, 2)), {}, (1, 1, None, 1)),
        ((f(3, 4, 2),), {"size": [3, 4, 1, 2]}, ("size", 1, None, 1)),
        ((f(4, 6), 24), {}, (1, None, None, 6)),
    ],
)
def test_rewrites_point_into_the_call(args: Any, kwargs: Any, rewrite: Any) -> None:
    place = (0, args[0].shape.index(4), 1, 1)
    said = _core.infer("view", args, kwargs, [place])
    assert said["rewrites"] == [rewrite]


def test_long_lists_and_many_tensors() -> None:
    many = [f(4, 1) for _ in range(50)]
    said = _core.infer("cat", (many, 1), {}, [ROWS0] * 50)
    assert said["outs"][0][1] == (4, 50)
    assert said["in_places"] == [ROWS0] * 50
    said = _core.infer("split", (f(4, 100), [1] * 100, 1), {}, [ROWS0])
    assert len(said["outs"]) == 100
    assert {out[4] for out in said["outs"]} == {ROWS0}


def test_many_words_and_positions() -> None:
    """More than the fixed buffers hold: in a spread, in an index, in a list, as floats."""
    assert shape_of("repeat", f(4, 1), *[1] * 6, 5, 2) == (1, 1, 1, 1, 1, 1, 20, 2)
    assert shape_of("__getitem__", x, (None,) * 5 + (slice(None),) * 3) == (1, 1, 1, 1, 1, 4, 3, 2)
    said = _core.infer("__getitem__", (x, (None,) * 20), {})
    assert said["status"] != "OK"
    assert len(_core.infer("split", (f(4, 100), [1] * 100), {"dim": 1})["outs"]) == 100


def test_bools_are_no_sizes() -> None:
    assert _core.infer("std", (x, True), {})["outs"][0][1] == ()
    assert _core.infer("std", (x, 1), {})["outs"][0][1] == (4, 2)


def test_devices_by_name() -> None:
    for device in ("cpu", torch.device("cpu")):
        assert _core.infer("to", (x, device), {})["alias"] == ("SAME", 0)
        assert _core.infer("zeros_like", (x,), {"device": device})["status"] == "OK"
    assert _core.infer("to", (x, "cuda:7"), {})["status"] == "DECLINED"


def test_unknown_row() -> None:
    with pytest.raises(KeyError):
        _core.infer("no_such_row", (), {})


def test_nothing_leaks_when_a_call_is_bound() -> None:
    tensor = f(4, 3)
    index = (slice(None), i(2))
    _core.infer("__getitem__", (tensor, index), {}, [ROWS0, None])
    before = sys.getrefcount(tensor), sys.getrefcount(index)
    for _ in range(50):
        _core.infer("__getitem__", (tensor, index), {}, [ROWS0, None])
        _core.infer("add", (tensor, object()), {})
        _core.infer("view", (tensor, 5, -1), {})
    assert (sys.getrefcount(tensor), sys.getrefcount(index)) == before
