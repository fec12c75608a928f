# SPDX-License-Identifier: Apache-2.0
"""Random layouts and random views: shapes, strides, aliases and places against torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import opcalls
from sanitizers import fewer
from test_ops import CALLABLES

CHECKER = opcalls.Checker()
many = settings(max_examples=fewer(150, 30), suppress_health_check=[HealthCheck.too_slow])


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor whose dims lie in memory in any order, with holes or repeated entries."""
    if shape is None:
        shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 0]), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 2])) for _ in shape]
    expanded = [draw(st.sampled_from([False] * 5 + [True])) for _ in shape]
    base = [1 if expanded[d] else shape[d] * steps[d] for d in order]
    x = torch.arange(math.prod(base), dtype=torch.float64).view(base)
    x = x.permute([order.index(d) for d in range(len(shape))])
    for d, step in enumerate(steps):
        x = x.expand([shape[d] if i == d else -1 for i in range(len(shape))]) if expanded[d] else x
        x = x[(slice(None),) * d + (slice(None, None, step),)] if not expanded[d] else x
    return x


@st.composite
def broadcastable(draw: st.DrawFn, n: int) -> list[torch.Tensor]:
    shape = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=4))
    found = []
    for _ in range(n):
        start = draw(st.integers(0, len(shape)))
        own = [draw(st.sampled_from([size, size, 1])) for size in shape[start:]]
        found.append(draw(tensors(shape=tuple(own))))
    return found


def check(row: str, *args: Any, **kwargs: Any) -> None:
    """Compare with torch where torch takes the call."""
    try:
        CHECKER.check(row, CALLABLES[row], args, kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return


@pytest.mark.sanitize
@many
@given(broadcastable(3))
def test_elementwise(xs: list[torch.Tensor]) -> None:
    x, y, z = xs
    check("relu", x)
    check("add", x, y)
    check("add", x, 2.0)
    check("rsub", x, y)
    check("eq", x, y)
    check("pow", x, 2)
    check("pow", x, y)
    check("lerp", x, y, z)
    check("clamp", x, y, z)
    check("where", x > 0, y, z)
    check("where", x > 0, 1.0, z)
    check("Tensor_where", y, x > 0, z)
    check("masked_fill", x, y > 0, 1.0)
    check("isinf", x)
    check("nan_to_num", x)
    check("log_sigmoid", x)


@many
@given(tensors())
def test_copies(x: torch.Tensor) -> None:
    for row in (
        "clone",
        "contiguous",
        "double",
        "float",
        "zeros_like",
        "ravel",
        "flatten",
        "detach",
    ):
        check(row, x)
    for memory_format in (torch.channels_last, torch.contiguous_format, torch.preserve_format):
        for row in ("clone", "contiguous", "float", "double", "zeros_like"):
            check(row, x, memory_format=memory_format)
    check("to", x, torch.float32, copy=True)
    check("squeeze", x)
    check("t", x)
    check("sort", x)
    check("sum", x, -1)
    check("cumsum", x, -1)
    check("flip", x, 0)
    check("repeat", x, *([2] * x.dim()))
    check("repeat_interleave", x, 2)


@many
@given(st.data())
def test_joins(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=5))
    dim = data.draw(st.integers(0, len(shape) - 1))
    parts = [data.draw(tensors(shape=tuple(shape))) for _ in range(data.draw(st.integers(1, 3)))]
    check("cat", parts, dim)
    check("stack", parts, dim)
    check("stack", parts, -1)


@many
@given(st.data())
def test_views(data: st.DataObject) -> None:
    """Sizes that torch may or may not take, of a batch that may or may not stay whole."""
    x = data.draw(tensors())
    n = x.numel()
    sizes = []
    for _ in range(data.draw(st.integers(0, 4))):
        size = data.draw(
            st.sampled_from([k for k in range(1, max(n, 1) + 1) if max(n, 1) % k == 0])
        )
        sizes.append(size)
        n //= size
    sizes.append(n)
    if data.draw(st.booleans()):
        sizes[data.draw(st.integers(0, len(sizes) - 1))] = -1
    check("view", x, sizes)
    check("reshape", x, *sizes)
    target = data.draw(tensors())
    check("view_as", x, target)
    check("expand_as", x, target)
    check("expand", x, [data.draw(st.sampled_from([-1, size, 3])) for size in x.shape])
    if x.dim() > 1:
        first, last = sorted(data.draw(st.integers(0, x.dim() - 1)) for _ in range(2))
        check("flatten", x, first, last)
        check("diagonal", x, 0, first, last)
        check("unsqueeze", x, first)
        check("squeeze", x, (first, last) if first != last else first)
        check("unbind", x, first)
        check("chunk", x, 2, last)
        check("split", x, data.draw(st.integers(1, 4)), first)
        check("unfold", x, first, 1, 2)


def bounds() -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), st.integers(-5, 5))


def index_items() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.integers(-2, 2),
        st.builds(slice, bounds(), bounds(), st.sampled_from([None, 1, 2])),
        st.none(),
        st.just(...),
        st.sampled_from([[0], [0, 1], [1, 0, 1]]),
        st.sampled_from([(), (1,), (2,), (3,), (2, 1), (2, 3), (3, 1, 1)]).flatmap(
            lambda shape: st.sampled_from(
                [
                    torch.zeros(shape, dtype=torch.int64),
                    torch.arange(math.prod(shape)).view(shape),
                    torch.ones(shape, dtype=torch.int32),
                ]
            )
        ),
    )


@pytest.mark.sanitize
@settings(max_examples=fewer(600, 150), suppress_health_check=[HealthCheck.too_slow])
@given(tensors(), st.lists(index_items(), max_size=4), st.booleans())
def test_indexing(x: torch.Tensor, items: list[Any], is_bare: bool) -> None:
    index = items[0] if is_bare and len(items) == 1 else tuple(items)
    check("__getitem__", x, index)
    target = x.clone()
    check("__setitem__", target, index, 1.0)
    try:
        taken = x[index].clone()
    except (RuntimeError, IndexError, ValueError):
        return
    check("__setitem__", target, index, taken)
    if taken.dim() > 0:
        check("__setitem__", target, index, taken[:1])
