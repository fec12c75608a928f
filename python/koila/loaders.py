# SPDX-License-Identifier: Apache-2.0
"""Make the batches of data loaders lazy: of one that is passed to `koila.lazy`, or of all loaders.

The loader keeps its workers, sampler, pinned memory and length. Its batches are made lazy in the
process that trains, as the last step.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from koila import _core
from koila.recording.flush import flush_no_grad

#: A function that makes a batch lazy; called with the batch and, if known, its number of rows.
Make = Callable[[Any, int | None], Any]


class Counts:
    """Counts of the batches of loaders."""

    n_batches = 0
    n_plain = 0  # batches in which no tensor has rows


class _Thread(threading.local):
    is_fetching = False
    batch = -1, 0  # axis and number of rows of the last batch, until its loader is exhausted


counts = Counts()
_thread = _Thread()
_make_all: Make | None = None
_next_batch: Any = _BaseDataLoaderIter.__next__


def row_dims(tensors: Iterable[torch.Tensor], n_rows: int | None) -> list[int | None]:
    """Return the dim of the rows of each tensor of a batch; None: it is the same for all rows.

    Rows are in dim 0, or in dim 1, if that is as long as the batch. This decides which tensors are
    cut, and so how much memory is saved; a wrong guess makes no wrong number.

    Args:
        tensors: the tensors of one batch.
        n_rows: the number of rows of the batch, or of a full batch; None: it is not known.

    Examples:
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
        # The most frequent size; of several such sizes the first one.
        n_rows = collections.Counter(fitting).most_common(1)[0][0] if fitting else 0
    return [
        None if n_rows not in shape[:2] or n_rows == 0 else shape.index(n_rows) for shape in shapes
    ]


def is_loader(obj: object) -> bool:
    """Return whether an object is an iterable of batches, and not a batch itself."""
    if isinstance(obj, DataLoader | Iterator):
        return True
    is_batch = isinstance(obj, torch.Tensor | torch.nn.Module | Sequence | Mapping | Set | type)
    is_batch = is_batch or dataclasses.is_dataclass(obj) or hasattr(obj, "__getitem__")
    return isinstance(obj, Iterable) and not is_batch


def note_batch(axis: int, n_rows: int) -> None:
    """Note the batch that a loader has just returned, by its axis and its number of rows."""
    _thread.batch = axis, n_rows


def last_batch() -> tuple[int, int]:
    """Return the axis and the rows of the batch that a loader returned last; 0 rows: there is none,
    or the loader has been exhausted since. What is drawn then is no noise for its samples."""
    return _thread.batch


def _run_what_is_watched() -> None:
    """Run pending calls that read memory of another library, which the next batch may fill."""
    if _core.notes().get("watched"):
        flush_no_grad("the next batch")


def _fetched(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches, after running what fetching each of them may spoil."""
    while True:
        _run_what_is_watched()
        try:
            batch = next(batches)
        except StopIteration:
            note_batch(-1, 0)
            return
        yield batch


class _Lazily:
    """Wraps an iterable of batches and makes each batch lazy; other attributes are forwarded."""

    def __init__(self, batches: Any, make: Make) -> None:
        self._batches, self._make = batches, make

    def __iter__(self) -> Iterator[Any]:
        return (self._make(batch, None) for batch in _fetched(iter(self._batches)))

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class _Collate:
    """A loader's collate_fn, which marks the loader as one whose batches are made lazy. Frameworks
    (accelerate, Lightning) make new loaders from the parts of the user's, and keep this part."""

    def __init__(self, collate: Callable[[Any], Any], make: Make) -> None:
        self.collate, self.make = collate, make

    def __call__(self, rows: Any) -> Any:
        return self.collate(rows)

    def __getattr__(self, name: str) -> Any:
        if name == "collate":  # not set yet, while a worker unpickles this object
            raise AttributeError(name)
        return getattr(self.collate, name)


def _own_class(kind: type, make: Make) -> type:
    """Return a subclass of a loader's class whose batches are lazy."""

    class Lazy(kind):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return (make(batch, self.batch_size) for batch in _fetched(super().__iter__()))

    Lazy.__name__, Lazy.__qualname__, Lazy.__module__ = (
        kind.__name__,
        kind.__qualname__,
        kind.__module__,
    )
    return Lazy


def lazy_loader(loader: Any, make: Make) -> Any:
    """Return a loader with the same batches, which `make` makes lazy. A DataLoader is copied,
    another iterable is wrapped."""
    if isinstance(loader, Iterator):
        return iter(_Lazily(loader, make))
    if not isinstance(loader, DataLoader):
        return _Lazily(loader, make)
    made: Any = copy.copy(loader)
    if type(loader).__iter__ is not DataLoader.__iter__:  # it iterates over another loader
        # Set it past accelerate's loaders, whose `__class__` is a property.
        vars(object)["__class__"].__set__(made, _own_class(type(loader), make))
        return made
    _watch()
    made.collate_fn = _Collate(getattr(loader.collate_fn, "collate", loader.collate_fn), make)
    return made


def is_fetching() -> bool:
    """Return whether this thread is fetching a batch, or this process is a loader's worker."""
    return _thread.is_fetching or get_worker_info() is not None


def _n_rows(batches: Any) -> int | None:
    """Return the number of rows of the batch that an iterator has just returned; None: unknown."""
    sampler = batches._index_sampler
    n_full: int | None = getattr(sampler, "batch_size", None)
    if type(sampler) is BatchSampler and not sampler.drop_last and n_full is not None:
        with contextlib.suppress(TypeError):  # the sampler may have no length
            n_left = len(sampler.sampler) - n_full * (batches._num_yielded - 1)  # type: ignore[arg-type]
            return min(n_full, n_left) if n_left > 0 else n_full
    return n_full


def _next(self: Any) -> Any:
    if get_worker_info() is None:
        _run_what_is_watched()
    was_fetching, _thread.is_fetching = _thread.is_fetching, True
    try:
        batch = _next_batch(self)
    except StopIteration:
        note_batch(-1, 0)
        raise
    finally:
        _thread.is_fetching = was_fetching
    marked = self._collate_fn if isinstance(self._collate_fn, _Collate) else None
    make = _make_all if marked is None else marked.make
    if make is None or get_worker_info() is not None:
        return batch
    counts.n_batches += 1
    return make(batch, _n_rows(self))


def _watch() -> None:
    iterators: Any = _BaseDataLoaderIter
    iterators.__next__ = _next


def make_all_lazy(make: Make | None) -> None:
    """From now on make the batches of all loaders lazy, including existing ones. None: only those
    of loaders that `lazy_loader` has returned."""
    global _make_all
    _make_all = make
    _watch()
