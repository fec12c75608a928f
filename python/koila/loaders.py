"""Data loaders whose batches are lazy: one that `koila.lazy` is given, or all that there are.

A loader itself stays what it is: its workers, its sampler, its pinned memory, its length. What it
hands out is made lazy in the process that trains, last of all.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

#: Makes a batch lazy: what was handed out, and how many rows a full batch has, if that is known.
Make = Callable[[Any, int | None], Any]


class Counts:
    """What loaders have handed out while all of them are lazy."""

    n_batches = 0
    n_plain = 0  # batches in which no tensor has rows


counts = Counts()
_make_all: Make | None = None
_next_batch: Any = _BaseDataLoaderIter.__next__


def row_dims(tensors: Iterable[torch.Tensor], n_rows: int | None) -> list[int | None]:
    """The dim that holds the rows of each tensor of a batch; None: it is the same for all rows.

    Rows are in dim 0, or else in dim 1, where that is as long as the batch. Which tensor is cut
    decides how much memory is saved: a wrong guess never makes a wrong number.

    Args:
        tensors: of one batch.
        n_rows: rows of a full batch; the last one may have fewer. None: that is not known.

    Example:
        >>> import torch
        >>> from koila.loaders import row_dims
        >>> row_dims([torch.ones(4, 3), torch.ones(4), torch.ones(7, 4), torch.ones(2)], 4)
        [0, 0, 1, None]
    """
    tensors = list(tensors)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    first = [shape[0] for shape in shapes if shape]
    second = [shape[1] for shape in shapes if len(shape) > 1]
    if n_rows is None or n_rows not in first + second:
        fitting = [size for size in first if n_rows is None or size <= n_rows] or first
        # The most frequent size; of several, that which was met first.
        n_rows = collections.Counter(fitting).most_common(1)[0][0] if fitting else 0
    return [
        None if n_rows not in shape[:2] or n_rows == 0 else shape.index(n_rows) for shape in shapes
    ]


def is_loader(obj: object) -> bool:
    """Whether an object hands out batches, and is none itself."""
    return isinstance(obj, DataLoader | Iterator)


class _Lazily:
    """An iterator over the batches of another, each made lazy."""

    def __init__(self, batches: Iterator[Any], make: Callable[[Any], Any]) -> None:
        self._batches, self._make = batches, make

    def __iter__(self) -> _Lazily:
        return self

    def __next__(self) -> Any:
        return self._make(next(self._batches))

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def lazy_loader(loader: Any, make: Make) -> Any:
    """The same loader, of which each batch is lazy.

    Args:
        loader: a DataLoader, of which a copy of the same type is made; or an iterator.
        make: makes a batch lazy.
    """
    if not isinstance(loader, DataLoader):
        return _Lazily(iter(loader), lambda batch: make(batch, None))
    kind = type(loader)

    class LazyLoader(kind):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Any:
            return _Lazily(super().__iter__(), lambda batch: make(batch, self.batch_size))

    LazyLoader.__name__, LazyLoader.__qualname__ = kind.__name__, kind.__qualname__
    LazyLoader.__module__, LazyLoader.__doc__ = kind.__module__, kind.__doc__
    made = copy.copy(loader)
    made.__class__ = LazyLoader
    return made


def _next(self: Any) -> Any:
    batch = _next_batch(self)
    if _make_all is None or get_worker_info() is not None:
        return batch
    counts.n_batches += 1
    return _make_all(batch, getattr(self._index_sampler, "batch_size", None))


def make_all_lazy(make: Make | None) -> None:
    """From now on make the batches of all loaders lazy, also of those that are there; None: of none
    but those that `lazy_loader` has made."""
    global _make_all
    _make_all = make
    iterators: Any = _BaseDataLoaderIter
    iterators.__next__ = _next_batch if make is None else _next
