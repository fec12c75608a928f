# SPDX-License-Identifier: Apache-2.0
"""Split reductions over the batch: what each chunk computes, and how the results are combined.

A call in mode REDUCE runs on every chunk as `partial`, once for each of its parts, and `combine`
computes its value from the parts of all chunks. Both run under autograd. Parts have the
accumulation dtype, at least float32, so that sums of halves do not overflow, and many small chunks
do not round worse than a single one.

    reduction = partials.REDUCTIONS["MEAN"]
    made = [reduction.partials((0, 1), chunk) for chunk in chunks]  # as many as reductions.def says
    value = reduction.combine(list(zip(*made)), call)
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from koila.basics.rows import WIDENED
from koila.basics.table import Args, Func, Words, names_of, parse


class Call:
    """One call of a torch function: a recorded one, or the same on a chunk.

    >>> x = torch.ones(2, 3)
    >>> call = Call(torch.sum, (x, 1), {}, "input, dim=None, keepdim=False", x.dtype)
    >>> call.word("dim")
    1
    >>> call.run(dim=0)
    tensor([2., 2., 2.])
    """

    def __init__(
        self,
        func: Func,
        args: Args,
        kwargs: Words,
        signature: str,
        dtype: torch.dtype,
        start: int = 0,
        n_rows: int = 0,
        node: int = 0,
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.signature = signature  # the row's, from _core.op_table()
        self.dtype = dtype  # of the first output
        self.wide = WIDENED[dtype]  # the dtype to accumulate in
        self.start = start  # the first row of the chunk
        self.n_rows = n_rows  # the rows of the batch
        self.node = node  # its number
        self.names = names_of(signature, len(args), tuple(kwargs))
        #: The arguments, by their names in the signature.
        self.words = dict(zip(self.names, (*args, *kwargs.values()), strict=False))
        #: Returns the argument of this name, or else its second argument, or None.
        self.word: Callable[..., Any] = self.words.get

    def run(self, **changes: Any) -> torch.Tensor:
        """Call the function with some arguments replaced or added."""
        words = {**self.words, **changes}
        args = []
        for word in parse(self.signature):
            name = word.names[0]
            if not word.is_positional or name not in words:
                break
            args.append(words.pop(name))
        result: torch.Tensor = self.func(*args, **words)
        return result


def widen(value: Any) -> Any:
    """Convert tensors of a half dtype, one or in a list, to the dtype they are accumulated in."""
    if isinstance(value, torch.Tensor):
        return value.to(WIDENED[value.dtype])
    if isinstance(value, (list, tuple)):
        return type(value)(map(widen, value))
    return value


def total(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, parts)


#: Returns a number of terms as a part: without dims and on the CPU, it combines with tensors of any
#: device. torch's own function is taken at import: koila's patch of it looks for lazies.
count: Callable[[int], torch.Tensor] = functools.partial(
    torch.full, (), dtype=torch.float64, device="cpu"
)


class _Counted(threading.local):
    terms: dict[int, torch.Tensor] | None = None  # numbers of terms, by id; None: outside a block


_counted = _Counted()


@contextlib.contextmanager
def counting(terms: Iterable[torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
    """Wrap a block that combines reductions, and track which tensors are numbers of terms: of the
    parts `terms`. Yield these, and the sums made only of them, by id."""
    _counted.terms = {id(part): part for part in terms}
    try:
        yield _counted.terms
    finally:
        _counted.terms = None


def ratio(parts: list[list[torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """Divide the sum of the first part by the sum of the second."""
    above = total(parts[0])
    below = total(parts[1]).to(above.dtype)
    if _counted.terms is not None and all(id(part) in _counted.terms for part in parts[1]):
        _counted.terms[id(below)] = below
    return (above / below).to(dtype)


def dims(x: torch.Tensor, dim: Any) -> tuple[int, ...]:
    """Return the dims that an argument `dim` means: None and an empty list mean all."""
    if dim is None or dim == () or dim == []:
        return tuple(range(x.dim()))
    listed = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % max(x.dim(), 1) for d in listed) if x.dim() else ()


def n_reduced(x: torch.Tensor, over: tuple[int, ...]) -> int:
    """Return how many elements of `x` are reduced to one."""
    return math.prod(map(x.shape.__getitem__, over))


class Chunk:
    """The chunk that runs: its index, its first row, and results that all runs of a chunk share, by
    call and chunk."""

    def __init__(self) -> None:
        self.index = self.start = 0
        self.shared: dict[tuple[int, int], Any] = {}


#: Computes some parts from the arguments of a chunk.
Partials = Callable[..., tuple[torch.Tensor, ...]]


class Reduction:
    """One way to split a reduction."""

    counts: frozenset[int] = frozenset()  #: the parts that are numbers of terms, known from sizes
    is_by_chunk = False  #: the value has a slice for each chunk, and a chunk reads only its own

    def partial(self, part: int, call: Call) -> torch.Tensor:
        """Compute one part on a chunk; `call` holds the chunk's arguments."""
        raise NotImplementedError

    def partials(self, parts: Sequence[int], call: Call) -> tuple[torch.Tensor, ...]:
        """Compute several parts on a chunk."""
        return tuple(map(functools.partial(self.partial, call=call), parts))

    def prepare(self, parts: Sequence[int], call: Call, of: Chunk) -> Partials:
        """Return what computes several parts on each chunk of a recorded call; `of` tells which."""
        others = call.signature, call.dtype
        return lambda *args, **kwargs: self.partials(
            parts, Call(call.func, args, kwargs, *others, of.start, call.n_rows)
        )

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> Any:
        """Return the call's value, computed from parts[part][chunk]; tensors of `call` are None."""
        raise NotImplementedError
