# SPDX-License-Identifier: Apache-2.0
"""What inference must say of calls that real models make: what stays in chunks, what must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import opcalls
from koila import _core
from samples_kit import b, f, i
from test_ops import CALLABLES

ROWS0 = (0, 0, 1, 1)
rows = torch.arange(4)

# what, row, arguments, places, mode, place of the first output, rewrites
EXPECTED: list[tuple[str, str, Any, Any, str, Any, Any]] = [
    # views with the batch size written out, hidden behind -1, merged and parted
    ("B first", "view", (f(4, 6), 4, 2, 3), [ROWS0], "ROWS", ROWS0, [(1, None, None, 1)]),
    ("B in a tuple", "reshape", (f(4, 6), (4, -1)), [ROWS0], "ROWS", ROWS0, [(1, 0, None, 1)]),
    ("B behind -1", "view", (f(4, 6), -1, 3), [ROWS0], "ROWS", (0, 0, 1, 2), []),
    ("B * T", "view", (f(4, 3, 2), 12, 2), [ROWS0], "ROWS", (0, 0, 1, 3), [(1, None, None, 3)]),
    (
        "T * B",
        "view",
        (f(3, 4, 2), 12, 2),
        [(0, 1, 1, 1)],
        "ROWS",
        (0, 0, 3, 1),
        [(1, None, None, 3)],
    ),
    (
        "back from B * T",
        "view",
        (f(12, 2), 4, 3, 2),
        [(0, 0, 1, 3)],
        "ROWS",
        ROWS0,
        [(1, None, None, 1)],
    ),
    (
        "heads to the batch",
        "reshape",
        (f(4, 2, 3, 5), 8, 3, 5),
        [ROWS0],
        "ROWS",
        (0, 0, 1, 2),
        [(1, None, None, 2)],
    ),
    ("B and -1", "view", (f(4, 6), 4, -1, 2), [ROWS0], "ROWS", ROWS0, [(1, None, None, 1)]),
    ("batch cut", "view", (f(4, 6), 2, 2, 6), [ROWS0], "ONCE", None, []),
    ("batch cut across", "view", (f(4, 6), 3, 8), [ROWS0], "ONCE", None, []),
    ("flatten from 1", "flatten", (f(4, 3, 2), 1), [ROWS0], "ROWS", ROWS0, []),
    ("flatten all", "flatten", (f(4, 3, 2),), [ROWS0], "ROWS", (0, 0, 1, 6), []),
    (
        "unflatten",
        "unflatten",
        (f(8, 3), 0, (4, 2)),
        [(0, 0, 1, 2)],
        "ROWS",
        ROWS0,
        [(2, 0, None, 1)],
    ),
    (
        "one row stays first",
        "view",
        (f(1, 6), 1, 2, 3),
        [ROWS0],
        "ROWS",
        ROWS0,
        [(1, None, None, 1)],
    ),
    # dims moved
    ("transpose", "transpose", (f(4, 3, 2), 0, 1), [ROWS0], "ROWS", (0, 1, 1, 1), []),
    ("permute", "permute", (f(4, 3, 2), 1, 2, 0), [ROWS0], "ROWS", (0, 2, 1, 1), []),
    ("unsqueeze before", "unsqueeze", (f(4, 3), 0), [ROWS0], "ROWS", (0, 1, 1, 1), []),
    ("squeeze another dim", "squeeze", (f(4, 1), 1), [ROWS0], "ROWS", ROWS0, []),
    ("squeeze all", "squeeze", (f(4, 1),), [ROWS0], "ONCE", None, []),
    ("squeeze the batch", "squeeze", (f(4, 1), 0), [ROWS0], "ONCE", None, []),
    (
        "squeeze what is more than the batch",
        "squeeze",
        (f(8, 1),),
        [(0, 0, 1, 2)],
        "ROWS",
        (0, 0, 1, 2),
        [],
    ),
    ("expand", "expand", (f(4, 1), 4, 3), [ROWS0], "ROWS", ROWS0, [(1, None, None, 1)]),
    ("expand with -1", "expand", (f(4, 1), -1, 3), [ROWS0], "ROWS", ROWS0, []),
    (
        "expand in front",
        "expand",
        (f(4, 1), (2, 4, 3)),
        [ROWS0],
        "ROWS",
        (0, 1, 1, 1),
        [(1, 1, None, 1)],
    ),
    ("one row expanded", "expand", (f(1, 3), 5, 3), [ROWS0], "ONCE", None, []),
    ("a parameter expanded", "expand_as", (f(1, 3), f(4, 3)), [None, ROWS0], "ROWS", ROWS0, []),
    ("time-major merge", "flatten", (f(3, 4, 2), 0, 1), [(0, 1, 1, 1)], "ROWS", (0, 0, 3, 1), []),
    # broadcasting
    ("bias", "add", (f(4, 3), f(3)), [ROWS0, None], "ROWS", ROWS0, []),
    ("plain of batch size", "add", (f(4, 3), f(4, 3)), [ROWS0, None], "ROWS", ROWS0, []),
    ("rows against columns", "sub", (f(4, 1), f(1, 4)), [ROWS0, (0, 1, 1, 1)], "ROWS", ROWS0, []),
    ("two orders", "mul", (f(8), f(8)), [(0, 0, 1, 2), (0, 0, 2, 1)], "ONCE", None, []),
    ("one row is broadcast", "add", (f(1, 3), f(5, 3)), [ROWS0, None], "ONCE", None, []),
    ("one row beside one row", "add", (f(1, 3), f(1, 3)), [ROWS0, None], "ROWS", ROWS0, []),
    ("number", "div", (f(4, 3), 4), [ROWS0], "ROWS", ROWS0, []),
    ("mask of its own", "masked_fill", (f(4, 3), b(4, 1), 0.0), [ROWS0, None], "ROWS", ROWS0, []),
    ("write rows to a plain value", "add_", (f(4, 3), f(4, 3)), [None, ROWS0], "ROWS", ROWS0, []),
    # joining and parting
    ("cat beside", "cat", ([f(4, 3), f(4, 2)], 1), [ROWS0, ROWS0], "ROWS", ROWS0, []),
    ("cat a plain one", "cat", ([f(4, 1), f(4, 2)], 1), [None, ROWS0], "ROWS", ROWS0, []),
    ("cat the batch", "cat", ([f(4, 3), f(4, 3)],), [ROWS0, ROWS0], "ROWS", (0, 0, 2, 1), []),
    (
        "cat the batch twice",
        "cat",
        ([f(8, 3), f(4, 3)],),
        [(0, 0, 2, 1), ROWS0],
        "ROWS",
        (0, 0, 3, 1),
        [],
    ),
    ("cat the batch with a token", "cat", ([f(4, 3), f(1, 3)],), [ROWS0, None], "ONCE", None, []),
    ("stack in front", "stack", ([f(4, 3), f(4, 3)],), [ROWS0, ROWS0], "ROWS", (0, 1, 1, 1), []),
    ("chunk two halves", "chunk", (f(8, 3), 2), [(0, 0, 2, 1)], "ROWS", ROWS0, []),
    ("chunk the batch", "chunk", (f(8, 3), 2), [ROWS0], "ONCE", None, []),
    (
        "split two halves",
        "split",
        (f(8, 3), 4),
        [(0, 0, 2, 1)],
        "ROWS",
        ROWS0,
        [(1, None, None, 1)],
    ),
    (
        "split unevenly",
        "split",
        (f(12, 3), [4, 8]),
        [(0, 0, 3, 1)],
        "ROWS",
        ROWS0,
        [(1, 0, None, 1), (1, 1, None, 2)],
    ),
    ("unbind heads", "unbind", (f(3, 4, 2), 0), [(0, 1, 1, 1)], "ROWS", ROWS0, []),
    ("unbind rows", "unbind", (f(4, 2), 0), [ROWS0], "ONCE", None, []),
    ("repeat", "repeat", (f(4, 3), 2, 1), [ROWS0], "ROWS", (0, 0, 2, 1), []),
    ("repeat_interleave", "repeat_interleave", (f(4, 3), 2, 0), [ROWS0], "ROWS", (0, 0, 1, 2), []),
    ("flip rows", "flip", (f(4, 3), 0), [ROWS0], "ONCE", None, []),
    ("roll windows", "roll", (f(4, 6), 2, 1), [ROWS0], "ROWS", ROWS0, []),
    # reductions
    ("mean of features", "mean", (f(4, 3), -1), [ROWS0], "ROWS", ROWS0, []),
    ("mean of all", "mean", (f(4, 3),), [ROWS0], "REDUCE", None, []),
    ("sum of rows, kept", "sum", (f(4, 3), 0, True), [ROWS0], "REDUCE", None, []),
    ("time-major mean", "mean", (f(3, 4, 2), 0), [(0, 1, 1, 1)], "ROWS", ROWS0, []),
    ("best of classes", "max", (f(4, 3), 1), [ROWS0], "ROWS", ROWS0, []),
    ("best row", "max", (f(4, 3), 0), [ROWS0], "ONCE", None, []),
    ("largest of all", "max", (f(4, 3),), [ROWS0], "REDUCE", None, []),
    ("argmax of all", "argmax", (f(4, 3),), [ROWS0], "ONCE", None, []),
    ("order of rows", "argsort", (f(4, 3), 0), [ROWS0], "ONCE", None, []),
    ("cumsum along time", "cumsum", (f(4, 3), 1), [ROWS0], "ROWS", ROWS0, []),
    # indexing
    ("last step", "__getitem__", (f(4, 5, 3), (slice(None), -1)), [ROWS0], "ROWS", ROWS0, []),
    (
        "first B",
        "__getitem__",
        (f(4, 5), slice(None, 4)),
        [ROWS0],
        "ROWS",
        ROWS0,
        [(1, None, "stop", 1)],
    ),
    ("more than B", "__getitem__", (f(4, 5), slice(None, 512)), [ROWS0], "ROWS", ROWS0, []),
    (
        "second half",
        "__getitem__",
        (f(8, 5), slice(4, None)),
        [(0, 0, 2, 1)],
        "ROWS",
        ROWS0,
        [(1, None, "start", 1)],
    ),
    (
        "last B",
        "__getitem__",
        (f(8, 5), slice(-4, None)),
        [(0, 0, 2, 1)],
        "ROWS",
        ROWS0,
        [(1, None, "start", -1)],
    ),
    ("half the rows", "__getitem__", (f(4, 5), slice(None, 2)), [ROWS0], "ONCE", None, []),
    ("a sample", "__getitem__", (f(4, 5), 0), [ROWS0], "ONCE", None, []),
    ("new dim in front", "__getitem__", (f(4, 5), None), [ROWS0], "ROWS", (0, 1, 1, 1), []),
    ("labels", "__getitem__", (f(4, 5), (rows, i(4))), [ROWS0, None, ROWS0], "ROWS", ROWS0, []),
    (
        "plain labels",
        "__getitem__",
        (f(4, 5), (rows, i(4))),
        [ROWS0, None, None],
        "ROWS",
        ROWS0,
        [],
    ),
    (
        "mask of padding, by arange",
        "__getitem__",
        (b(4, 6), (rows[:, None, None, None], torch.arange(6))),
        [ROWS0, None, None],
        "ROWS",
        ROWS0,
        [],
    ),
    ("a table by rows", "__getitem__", (f(9, 3), i(4, 2)), [None, ROWS0], "ROWS", ROWS0, []),
    (
        "rows in another order",
        "__getitem__",
        (f(4, 5), rows.flip(0)),
        [ROWS0, None],
        "ONCE",
        None,
        [],
    ),
    (
        "columns by rows",
        "__getitem__",
        (f(4, 5), (slice(None), i(4))),
        [ROWS0, ROWS0],
        "ROWS",
        ROWS0,
        [],
    ),
    (
        "write a step",
        "__setitem__",
        (f(4, 5), (slice(None), 1), f(4)),
        [ROWS0, ROWS0],
        "ROWS",
        ROWS0,
        [],
    ),
    (
        "write a step of a plain value",
        "__setitem__",
        (f(4, 5), (slice(None), 1), f(4)),
        [None, ROWS0],
        "ROWS",
        ROWS0,
        [],
    ),
    (
        "write rows to a queue",
        "__setitem__",
        (f(9, 5), slice(0, 4), f(4, 5)),
        [None, ROWS0],
        "ONCE",
        None,
        [],
    ),
    ("gather", "gather", (f(4, 5), 1, i(4, 1)), [ROWS0, ROWS0], "ROWS", ROWS0, []),
    ("gather from plain rows", "gather", (f(4, 5), 1, i(4, 1)), [None, ROWS0], "ROWS", ROWS0, []),
    (
        "gather from more plain rows",
        "gather",
        (f(6, 5), 1, i(4, 1)),
        [None, ROWS0],
        "ONCE",
        None,
        [],
    ),
    (
        "gather with a shorter index",
        "gather",
        (f(4, 5), 1, i(1, 2)),
        [ROWS0, None],
        "ONCE",
        None,
        [],
    ),
    ("one-hot", "scatter_", (torch.zeros(4, 5), 1, i(4, 1), 1.0), [None, ROWS0], "ROWS", ROWS0, []),
    (
        "messages",
        "scatter_add",
        (torch.zeros(9, 3), 0, i(4, 3), torch.ones(4, 3)),
        [None, ROWS0, ROWS0],
        "ONCE",
        None,
        [],
    ),
    ("embed by hand", "index_select", (f(9, 3), 0, i(4)), [None, ROWS0], "ROWS", ROWS0, []),
    # nothing of the rows
    ("zeros of any size", "new_zeros", (f(4, 3), (4, 7)), [ROWS0], "ROWS", None, []),
    ("its dtype only", "type_as", (i(7, 3), f(4, 3)), [None, ROWS0], "ROWS", None, []),
    ("one gradient", "type_as", (f(7, 3), f(4, 3)), [None, ROWS0], "ONCE", None, []),
    ("two batches", "add", (f(4, 3), f(4, 3)), [ROWS0, (1, 0, 1, 1)], "ONCE", None, []),
    ("no batch", "add", (f(4, 3), f(4, 3)), [None, None], "ONCE", None, []),
]


@pytest.mark.sanitize
@pytest.mark.parametrize(
    "what, row, args, places, mode, place, rewrites", EXPECTED, ids=[e[0] for e in EXPECTED]
)
def test_expected(
    what: str, row: str, args: Any, places: Any, mode: str, place: Any, rewrites: Any
) -> None:
    said = _core.infer(row, args, {}, places)
    assert said["status"] == "OK"
    assert (said["mode"], said["outs"][0][4], said["rewrites"]) == (mode, place, rewrites)
    has_rows = any(p is not None for p in places)
    assert (said["reason"] is not None) == (mode == "ONCE" and has_rows)
    if mode == "ONCE":
        return
    given = next(p for p in places if p is not None)
    index = places.index(given)
    where, entry, _ = said["inputs"][index]
    n_rows = opcalls.Checker.input(args, {}, where, entry).shape[given[1]] // (given[2] * given[3])
    checker = opcalls.Checker()
    whole = CALLABLES[row](*opcalls.changed(args, lambda t: t.detach().clone()))
    copies = opcalls.changed(args, lambda t: t.detach().clone())
    whole = opcalls.tensors(CALLABLES[row](*copies)) or [copies[0]]
    checker.check_place(row, CALLABLES[row], args, {}, whole, places, n_rows)
    assert checker.counts[row, mode]


def test_rows_counted_from_zero_for_every_chunk() -> None:
    said = _core.infer("__getitem__", (f(4, 5), (rows, i(4))), {}, [ROWS0, None, ROWS0])
    assert [is_range for _, _, is_range in said["inputs"]] == [False, True, False]


DECLINED: list[tuple[str, Callable[[], Any], dict[str, Any]]] = [
    ("add", lambda: (f(4, 3), f(3)), {"out": torch.empty(4, 3)}),
    ("add", lambda: (f(4, 3), "x"), {}),
    ("add", lambda: (f(4, 3).to_sparse(), f(4, 3)), {}),
    ("sum", lambda: (torch.zeros((1,) * 9),), {}),
    ("relu", lambda: (torch.zeros(2, dtype=torch.float8_e5m2),), {}),
    ("__getitem__", lambda: (f(4, 5), b(4, 5)), {}),
    ("__getitem__", lambda: (f(4, 5), (b(4), 0)), {}),
    ("repeat_interleave", lambda: (f(4, 5), i(4)), {}),
    ("where", lambda: (b(4),), {}),
    ("zeros_like", lambda: (f(4),), {"requires_grad": True}),
    ("sum", lambda: (f(4, 3),), {"dim": 1, "nonsense": 2}),
]


@pytest.mark.parametrize("row, make, kwargs", DECLINED)
def test_declined(row: str, make: Callable[[], Any], kwargs: dict[str, Any]) -> None:
    assert _core.infer(row, make(), kwargs)["status"] == "DECLINED"


ILLEGAL: list[tuple[str, Callable[[], Any]]] = [
    ("add", lambda: (f(4, 3), f(4, 2))),
    ("add_", lambda: (f(3), f(4, 3))),
    ("add_", lambda: (i(4), f(4))),
    ("view", lambda: (f(4, 3), 5, -1)),
    ("view", lambda: (f(4, 3), 5, 2)),
    ("view", lambda: (f(3, 4).t(), 12)),
    ("cat", lambda: ([f(4, 3), f(5, 2)], 1)),
    ("stack", lambda: ([f(4, 3), f(4, 2)],)),
    ("permute", lambda: (f(4, 3), 0, 0)),
    ("transpose", lambda: (f(4, 3), 0, 2)),
    ("sum", lambda: (f(4, 3), 2)),
    ("sum", lambda: (f(4, 3), (1, -1))),
    ("mean", lambda: (i(4, 3),)),
    ("__getitem__", lambda: (f(4, 3), 4)),
    ("__getitem__", lambda: (f(4, 3), (0, 0, 0))),
    ("__getitem__", lambda: (f(4, 3), (i(4), i(3)))),
    ("gather", lambda: (f(4, 3), 1, i(5, 3))),
    ("narrow", lambda: (f(4, 3), 1, 2, 2)),
    ("split", lambda: (f(4, 3), [1, 1], 1)),
    ("topk", lambda: (f(4, 3), 4)),
    ("expand", lambda: (f(4, 3), 4, 4)),
    ("tril", lambda: (f(4),)),
]


@pytest.mark.parametrize("row, make", ILLEGAL)
def test_illegal_calls_are_torchs_errors_too(row: str, make: Callable[[], Any]) -> None:
    assert _core.infer(row, make(), {})["status"] == "ILLEGAL"
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        CALLABLES[row](*opcalls.changed(make(), lambda t: t.detach()))


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_attention_is_laid_out_as_by_its_kernel(kernel: SDPBackend) -> None:
    """The fused kernel lays its result out as the query; of the other nothing is said."""
    x = torch.randn(4, 3, 2, 6)
    query, key, value = (part.transpose(1, 2) for part in x.chunk(3, -1))
    with sdpa_kernel([kernel]):
        said: Any = _core.infer("scaled_dot_product_attention", (query, key, value), {})
        out = scaled_dot_product_attention(query, key, value)
    strides = said["outs"][0][2]
    assert (strides is not None) == (kernel is SDPBackend.FLASH_ATTENTION)
    assert strides in (None, out.stride())
