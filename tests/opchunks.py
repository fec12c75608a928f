# SPDX-License-Identifier: Apache-2.0
"""Calls in chunks by brute force: cut the inputs as a row says, run torch, join what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Place = tuple[int, int, int, int]  # axis, dim, outer, inner


def leaves(x: Any) -> Iterator[Any]:
    """Yield what containers hold, depth first."""
    if isinstance(x, (list, tuple)):
        for item in x:
            yield from leaves(item)
    elif isinstance(x, dict):
        for item in x.values():
            yield from leaves(item)
    else:
        yield x


def tensors(x: Any) -> list[torch.Tensor]:
    return [t for t in leaves(x) if isinstance(t, torch.Tensor)]


def like_in_memory(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Copy `part` densely, its dims in memory in the order of `whole`'s."""
    order = sorted(range(part.dim()), key=lambda d: (-whole.stride(d), d))
    dense = part.detach().permute(order).contiguous().clone()
    back = [order.index(d) for d in range(part.dim())]
    is_continuous = part.is_floating_point() or part.is_complex()
    return dense.permute(back).requires_grad_(whole.requires_grad and is_continuous)


def cut(whole: torch.Tensor, place: Place, rows: int, start: int, stop: int) -> torch.Tensor:
    """Return rows start .. stop - 1 of a value."""
    _, dim, outer, inner = place
    assert whole.shape[dim] == outer * rows * inner
    split = whole.detach().unflatten(dim, (outer, rows, inner)).narrow(dim + 1, start, stop - start)
    return like_in_memory(split.flatten(dim, dim + 2), whole)


def join(parts: Sequence[torch.Tensor], place: Place, sizes: Sequence[int]) -> torch.Tensor:
    """Put the chunks of a value together."""
    _, dim, outer, inner = place
    split = [p.unflatten(dim, (outer, n, inner)) for p, n in zip(parts, sizes, strict=True)]
    return torch.cat(split, dim + 1).flatten(dim, dim + 2)


def put(args: list[Any], kwargs: dict[str, Any], where: Any, entry: Any, change: Any) -> None:
    """Replace one argument, or one entry of it, by `change` of it."""
    place: Any = args if isinstance(where, int) else kwargs
    if entry is None:
        place[where] = change(place[where])
    else:
        items = list(place[where])
        items[entry] = change(items[entry])
        place[where] = tuple(items) if isinstance(place[where], tuple) else items


def rewritten(part: str | None, value: int) -> Callable[[Any], Any]:
    def change(old: Any) -> Any:
        if part == "start":
            return slice(value, old.stop, old.step)
        if part == "stop":
            return slice(old.start, value, old.step)
        return value

    return change


def run_chunk(
    func: Any, args: Any, kwargs: Any, said: dict[str, Any], rows: int, start: int, stop: int
) -> Any:
    """Run `func` on rows start .. stop - 1, as the row says it is to be called there."""
    new_args, new_kwargs = list(args), dict(kwargs)
    for (where, entry, is_range), place in zip(said["inputs"], said["in_places"], strict=True):

        def change(whole: Any, place: Any = place, is_range: bool = is_range) -> Any:
            if place is None:
                return whole.detach().clone()
            if is_range:
                return whole.narrow(place[1], 0, place[2] * (stop - start) * place[3])
            return cut(whole, place, rows, start, stop)

        put(new_args, new_kwargs, where, entry, change)
    for where, entry, part, scale in said["rewrites"]:
        put(new_args, new_kwargs, where, entry, rewritten(part, scale * (stop - start)))
    result = func(*new_args, **new_kwargs)
    return new_args[0] if result is None else result


def assert_same(actual: Any, expected: Any, what: str) -> None:
    is_short = expected.dtype in (torch.float16, torch.bfloat16, torch.float32)
    tolerance = 1e-2 if is_short else 1e-7
    torch.testing.assert_close(
        actual,
        expected,
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda m: f"{what}\n{m}",
    )


def combine(
    said: dict[str, Any], parts: list[torch.Tensor], sizes: list[int], kwargs: Any
) -> torch.Tensor | None:
    """Combine a REDUCE node's partial results the plain way; None: not checked here."""
    both = torch.stack(parts)
    kind = said["reduce"]
    if kind in ("SUM", "COUNT"):
        return both.sum(0)
    if kind == "MEAN":
        weights = torch.tensor(sizes, dtype=torch.float64).view(-1, *[1] * (both.dim() - 1))
        return (both * weights / sum(sizes)).sum(0).to(both.dtype)
    if kind == "PROD":
        return both.prod(0).to(both.dtype)
    if kind == "ALL":
        return both.bool().all(0).to(both.dtype)
    if kind == "ANY":
        return both.bool().any(0).to(both.dtype)
    if kind == "LOGSUMEXP":
        return both.logsumexp(0)
    return None


def partitions(rows: int) -> Iterator[list[int]]:
    """Divide the rows: one by one, and unevenly."""
    yield [1] * rows
    if rows > 2:
        yield [rows - 1, 1]
        yield [2, rows - 2] if rows > 3 else [1, 2]


def digits(size: int) -> Iterator[tuple[int, int, int]]:
    """Ways to write a size as outer * rows * inner."""
    yield 1, size, 1
    for factor in (2, 3):
        if size % factor == 0:
            yield factor, size // factor, 1
            yield 1, size // factor, factor


def assignments(inputs: Sequence[torch.Tensor]) -> Iterator[tuple[list[Place | None], int]]:
    """Yield places for the inputs: rows in a dim of one of them, others aligned with it or not."""
    seen = set()
    for number, first in enumerate(inputs[:3]):
        for dim, size in enumerate(first.shape):
            if size == 0 or size > 12:
                continue
            for outer, rows, inner in digits(size):
                for align in ("right", "left", "no"):
                    places: list[Place | None] = [None] * len(inputs)
                    places[number] = (0, dim, outer, inner)
                    for k, other in enumerate(inputs):
                        at = dim if align == "left" else dim + other.dim() - first.dim()
                        is_other = k != number and align != "no"
                        if is_other and 0 <= at < other.dim() and other.shape[at] == size:
                            places[k] = (0, at, outer, inner)
                    key = (tuple(places), rows)
                    if key not in seen:
                        seen.add(key)
                        yield places, rows
