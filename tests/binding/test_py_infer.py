# SPDX-License-Identifier: Apache-2.0
"""infer(): the rules asked from Python, about any call and any batch."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch

import koila
from binding_kit import in_a_child
from koila import _core
from samples_kit import f, i

ROWS0 = (0, 0, 1, 1)
core: Any = _core


# infer --------------------------------------------------------------------------------------------


def test_statuses() -> None:
    x = f(4, 3)
    assert core.infer("relu", (x,)) == core.infer("relu", (x,), None, None, None)
    assert core.infer("relu", (x,))["status"] == "OK"
    assert core.infer("relu", (3,)) == {"status": "DECLINED"}
    assert core.infer("add", (x, f(5)))["status"] == "ILLEGAL"
    assert core.infer("sum", (x, 7))["status"] == "ILLEGAL"
    assert core.infer("relu", (x, x))["text"] == "does not bind"


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("relu",),
        ("relu", [f(4)]),
        (3, (f(4),)),
        ("relu", (f(4),), {}, 3),
        ("relu", (f(4),), {}, None, 3),
        ("relu", (f(4),), {}, None, ["many"]),
    ],
)
def test_wrong_arguments(args: Any) -> None:
    with pytest.raises(TypeError):
        core.infer(*args)


def test_no_such_row() -> None:
    with pytest.raises(KeyError, match="no row for nothing"):
        core.infer("nothing", ())


@pytest.mark.parametrize(
    "place",
    [(0, 2, 1, 1), (0, -1, 1, 1), (-1, 0, 1, 1), (16, 0, 1, 1), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0)],
)
def test_places_that_are_none(place: Any) -> None:
    with pytest.raises(ValueError, match=r"a place is \(axis, dim, outer, inner\)"):
        core.infer("relu", (f(4, 3),), {}, [place])


def test_rows_follow_from_the_places_or_are_given() -> None:
    """A size of 12 holds 4 rows of 3, or as many as one says."""
    x = f(12, 2)
    merged = core.infer("view", (x, 4, 3, 2), {}, [(0, 0, 1, 3)])
    assert merged["outs"][0][4] == ROWS0
    assert core.infer("view", (x, 4, 3, 2), {}, [(0, 0, 1, 3)], [4]) == merged
    other = core.infer("view", (x, 4, 3, 2), {}, [(0, 0, 3, 1)], [4])
    assert other["mode"] == "ONCE"
    two = core.infer("add", (f(4, 3), f(4, 3)), {}, [ROWS0, (1, 0, 1, 1)])
    assert two["mode"] == "ONCE" and "batch" in two["reason"]


def test_places_may_be_fewer_than_the_inputs() -> None:
    x = f(4, 3)
    assert core.infer("add", (x, f(3)), {}, [ROWS0])["in_places"] == [ROWS0, None]
    assert core.infer("add", (x, 2), {}, [ROWS0, ROWS0, ROWS0])["in_places"] == [ROWS0]


def test_inference_sees_what_is_in_force() -> None:
    x = f(4, 3)
    assert core.infer("relu", (x,))["outs"][0][3] is True
    with torch.no_grad():
        assert core.infer("relu", (x,))["outs"][0][3] is False
    with torch.autocast("cpu", torch.bfloat16):
        made = core.infer("matmul", (f(4, 3, dtype=torch.float32), f(3, 2, dtype=torch.float32)))
    assert made["outs"][0][0] == "bfloat16"
    before = torch.get_default_dtype()
    try:
        for dtype, name in ((torch.float64, "float64"), (torch.float32, "float32")):
            torch.set_default_dtype(dtype)
            assert core.infer("true_divide", (i(4), 2))["outs"][0][0] == name
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("index", "is_range"),
    [
        (torch.arange(4), True),
        (torch.arange(4)[:, None], True),
        (torch.arange(4).flip(0), False),
        (torch.arange(1, 5) % 4, False),
        (torch.arange(4, dtype=torch.int32), False),
    ],
)
def test_an_index_is_looked_at(index: torch.Tensor, is_range: bool) -> None:
    said = core.infer("__getitem__", (f(4, 5), (index, i(4))), {}, [ROWS0, None, None])
    assert (said["mode"] == "ROWS") == (is_range and index.dim() == 1) or index.dim() == 2
    assert said["inputs"][1][2] == (is_range and said["mode"] == "ROWS")


def test_an_index_that_counts_on_in_its_rows_does_not_count_them() -> None:
    said = core.infer("__getitem__", (f(8, 5), torch.arange(8).view(4, 2)), {}, [ROWS0])
    assert said["mode"] == "ONCE"


def test_tensors_that_have_no_meta_are_declined() -> None:
    for x in (
        torch.zeros((1,) * 9),
        f(4, 3).to_sparse(),
        torch.zeros(2, dtype=torch.float8_e5m2),
    ):
        assert core.infer("relu", (x,))["status"] == "DECLINED"
    many = [f(1) for _ in range(65)]
    assert core.infer("cat", (many,))["status"] == "DECLINED"
    assert core.infer("cat", (many[:64],))["status"] == "OK"


def test_another_device() -> None:
    def work() -> None:
        x = f(4, 3).to("meta")
        assert core.infer("relu", (x,))["status"] == "OK"
        assert core.infer("to", (f(4, 3), "meta"), {})["status"] == "OK"
        assert core.infer("add", (x, f(4, 3)))["status"] != "OK"

    assert core.infer("to", (f(4, 3), "xla"), {})["status"] == "DECLINED"
    in_a_child(work)


def test_nothing_is_kept_between_calls() -> None:
    x, y, rows = f(4, 3), f(4, 2), torch.arange(4)
    calls: list[tuple[Any, ...]] = [
        ("cat", ([x, y],), {"dim": 1}, [ROWS0, ROWS0]),
        ("relu", (x, y)),
        ("add", (x, y)),
        ("__getitem__", (x, (rows, i(4))), {}, [ROWS0]),
    ]
    held = [x, y, rows]

    def ask() -> None:
        for call in calls:
            core.infer(*call)
        with pytest.raises(ValueError):
            core.infer("relu", (x,), {}, [(0, 9, 1, 1)])

    ask()
    gc.collect()
    before = [*map(sys.getrefcount, held), core.n_blocks()]
    for _ in range(20):
        ask()
    gc.collect()
    assert [*map(sys.getrefcount, held), core.n_blocks()] == before
    assert not koila._core.has_draw(False)


def test_memory_that_runs_out() -> None:
    """At whatever request: MemoryError, and nothing is leaked."""
    x = [f(4, 1) for _ in range(40)]
    blocks = core.n_blocks()
    n_failed = 0
    for n in range(1000):
        core.fail_alloc_after(n)
        try:
            said = core.infer("split", (f(4, 100), [1] * 100, 1), {}, [ROWS0])
            more = core.infer("cat", (x, 1), {}, [ROWS0] * 40)
        except MemoryError:
            n_failed += 1
            continue
        finally:
            core.fail_alloc_after(-1)
            assert core.n_blocks() == blocks
        if said["status"] == more["status"] == "OK":
            break
        assert "ERROR_MEMORY" in (said["status"], more["status"])
    assert n_failed > 3
