"""Running sums and their kin along the batch by rows: each chunk goes on where the last one ended.

Recorded are two calls, as for batch normalization (norms.py): what chunks start from, a reduction
that only chunks need, and the scan, which whole is torch's own call. A chunk leaves its total; of
all totals the joint makes a start for each chunk, one after the other along the dim of the scan,
and each chunk is given its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from koila import _core
from koila.norms import wide


class Scan(NamedTuple):
    """One kind of running sum."""

    run: Callable[..., Tensor]  # torch's own call
    total: Callable[[Tensor, int], Tensor]  # its last entry; keeps the dim
    nothing: float  # what the first chunk starts from
    go_on: Callable[[Tensor, Tensor], Tensor]  # from a start, what was found without it


def _add(start: Tensor, found: Tensor) -> Tensor:
    return found.add_(start)  # the sum keeps nothing for its backward


def _add_exponentials(start: Tensor, found: Tensor) -> Tensor:
    is_nothing = start == -math.inf  # beside which -inf has no gradient
    both = torch.logaddexp(torch.where(is_nothing, 0.0, start), found)
    return torch.where(is_nothing, found, both)


SCANS = {
    "cumsum": Scan(torch.cumsum, lambda x, dim: x.sum(dim, True, dtype=x.dtype), 0.0, _add),
    "cumprod": Scan(torch.cumprod, lambda x, dim: x.prod(dim, True, dtype=x.dtype), 1.0, torch.mul),
    "logcumsumexp": Scan(
        torch.logcumsumexp,
        lambda x, dim: x.logsumexp(dim, keepdim=True),
        -math.inf,
        _add_exponentials,
    ),
}


def starts_of(scan: Scan, totals: list[Tensor], dim: int) -> Tensor:
    """What each chunk starts from."""
    first = torch.full_like(totals[0], scan.nothing)
    if len(totals) == 1:
        return first
    # torch adds up integers in int64: those of fewer bits wrap around in the same way afterwards.
    sums = scan.run(torch.cat(totals[:-1], dim), dim).to(first.dtype)
    return torch.cat([first, sums], dim)


def _make(name: str, scan: Scan) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def starts(x: Tensor, dim: list[int], *, keepdim: bool, dtype: torch.dtype) -> Tensor:
        """It is called in chunks alone, where its parts are made by `scan.total`."""
        raise NotImplementedError

    def goes_on(
        x: Tensor, dim: int, *, dtype: torch.dtype | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """Whole, where nothing was summed up, torch's own call."""
        if starts is None:
            return scan.run(x, dim) if dtype is None else scan.run(x, dim, dtype=dtype)
        return scan.go_on(starts, scan.run(x.to(starts.dtype), dim)).to(_made_in(x, dtype))

    goes_on.__name__ = name
    return starts, goes_on


_CONTINUOUS = frozenset(
    getattr(torch, name)
    for name in "float16 bfloat16 float32 float64 complex32 complex64 complex128".split()
)


def _made_in(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the result: torch adds up integers in int64."""
    return dtype or (x.dtype if x.dtype in _CONTINUOUS else torch.int64)


_MADE = {name: _make(name, scan) for name, scan in SCANS.items()}
#: By the function that is recorded: of what all chunks start from, and of the scan.
STARTS = {starts: SCANS[name] for name, (starts, _) in _MADE.items()}
CALLS = {goes_on: name for name, (_, goes_on) in _MADE.items()}


def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a scan along the rows as two calls."""
    words = dict(zip(("input", "dim"), args, strict=False), **kwargs)
    x, dtype = words.pop("input", None), words.pop("dtype", None)
    dim = words.pop("dim", words.pop("axis", None))
    if type(x) is not _core.LazyTensor or not isinstance(dim, int) or words:
        return NotImplemented
    starts, goes_on = _MADE[func.__name__]
    call: Any = handle_torch_function
    begun = call(starts, (x,), x, [dim], keepdim=True, dtype=wide(_made_in(x, dtype)))
    if not _core.set_for_chunks(begun):
        return NotImplemented
    own = {} if dtype is None else {"dtype": dtype}
    return call(goes_on, (x,), x, dim, **own, starts=begun)


def run_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What cannot be recorded after all is torch's own call, and runs at once."""
    return _core.live(func, args, {**kwargs, "starts": None}, False)
