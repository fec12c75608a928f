# SPDX-License-Identifier: Apache-2.0
"""largest_batch(): how many samples fit, from the plan of a step that is recorded and never run."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from koila import _core
from koila.basics.config import config, settings
from koila.lazy import lazy, map_tensors, map_with_dims
from koila.messages.words import count, size, sizes
from koila.planning import fitting, limits, refusals
from koila.recording.backwards import refused
from koila.staged.program import Program
from koila.verify import restored_buffers

_MUST = (
    "largest_batch: the step must return the loss, and neither call backward() nor read a number"
)


@dataclass(frozen=True)
class LargestBatch:
    """How many samples of a batch fit into memory. It prints as a sentence.

    Attributes:
        whole: the largest batch that runs whole, as without koila; 0: not even two samples do.
        in_chunks: the largest batch that runs in 16 chunks at most.
        most: the largest batch that was tried. If a result equals it, more samples may fit.
        bytes_allowed: bytes that a step may take, including the batch, beyond what is in use now
            and what optimizers that have not stepped yet will take for their state.
        bytes_least: bytes that two samples need at least, if not even two fit; else 0.
    """

    whole: int
    in_chunks: int
    most: int
    bytes_allowed: float
    bytes_least: float = 0.0

    def __str__(self) -> str:
        def samples(n: int) -> str:
            return count(n, "sample") + (" and more" if n == self.most else "")

        if self.in_chunks == 0:
            left, least = sizes(self.bytes_allowed, self.bytes_least)
            return f"with {left} left for it, not even 2 samples fit: they need at least {least}"
        return (
            f"with {size(self.bytes_allowed)} left for it: {samples(self.whole)} fit whole, "
            f"{samples(self.in_chunks)} in at most {limits.FEW_CHUNKS} chunks"
        )

    __repr__ = __str__


def largest_batch(
    step: Callable[..., Tensor],
    *inputs: Any,
    batch: Any = 0,
    memory_limit: int | float | str | None = None,
    most: int = 2**16,
) -> LargestBatch:
    """Find how many samples a batch may have, whole and in chunks. The step is recorded, never run.

    The buffers of modules that `step` names (such as a norm's count of batches) are restored.

    Args:
        step: takes what `inputs` are and returns the loss, without calling backward(). It must not
            read a number.
        inputs: a batch of any size: tensors, or containers of them, as `lazy` takes.
        batch: the dim of the samples, as for `lazy`. A 0-dim tensor, or one marked None, is the
            same for all samples.
        memory_limit: as for `config`; None: the current setting.
        most: the largest batch to try.

    Raises:
        TypeError: the batch is lazy.
        ValueError: the batch has no samples, or the step calls backward(), reads a number or
            returns no lazy loss.

    Examples:
        >>> import torch, koila
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 1))
        >>> found = koila.largest_batch(
        ...     lambda x: model(x).mean(), torch.ones(8, 64), memory_limit="16MiB"
        ... )
        >>> 1000 < found.whole < found.in_chunks
        True
    """
    tensors = list[Tensor]()
    sizes: list[int] = []  # the numbers of samples
    map_tensors(tensors.append, inputs)
    if any(type(tensor) is _core.LazyTensor for tensor in tensors):
        raise TypeError(
            "largest_batch: give the batch as plain tensors: it makes lazy batches of other sizes"
        )

    def look(tensor: Tensor, dim: int | None) -> None:
        if dim is not None:
            sizes.append(tensor.size(dim))

    map_with_dims(look, inputs, batch)
    if not all(sizes or [0]):
        raise ValueError("largest_batch: give the tensors of a batch, which must have samples")
    limit = settings().memory_limit if memory_limit is None else memory_limit
    found: list[LargestBatch | BaseException] = []

    def search() -> None:
        try:
            with (
                config(chunks=None, memory_limit=limit),
                torch.random.fork_rng(),
                restored_buffers(step),
                refused(f"{_MUST}: it calls backward()"),
            ):
                found.append(_search(step, inputs, batch, most))
        except BaseException as error:
            found.append(error.with_traceback(None))

    # Each thread has a program of its own: in a new thread the user's is left alone.
    thread = threading.Thread(target=search, name="koila: largest batch")
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _of_size(inputs: tuple[Any, ...], batch: Any, n_rows: int, made: list[Tensor]) -> Any:
    """Return the inputs with `n_rows` samples, which share the memory of the first one, and append
    the tensors with samples to `made`."""

    def of_rows(tensor: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = n_rows
        made.append(tensor.detach().narrow(dim, 0, 1).expand(shape))
        return made[-1]

    return map_with_dims(of_rows, inputs, batch)


def _search(
    step: Callable[..., Tensor], inputs: tuple[Any, ...], batch: Any, most: int
) -> LargestBatch:
    tried: dict[int, _Tried] = {}

    def at(n_rows: int) -> _Tried:
        if n_rows not in tried:
            tried[n_rows] = _try(step, inputs, batch, n_rows)
        return tried[n_rows]

    def largest(fits: Callable[[int], bool]) -> int:
        if not fits(2):  # not 1: a normalization over the batch refuses a single row
            return 0
        low, high = 2, 4
        while high <= most and fits(high):
            low, high = high, 2 * high
        if high > most:
            return most if fits(most) else _between(low, most, fits)
        return _between(low, high, fits)

    def is_in_few_chunks(n_rows: int) -> bool:
        return at(n_rows).n_chunks <= limits.FEW_CHUNKS

    whole = largest(lambda n_rows: at(n_rows).is_whole)
    in_chunks = max(whole, largest(is_in_few_chunks))
    # A larger batch may need fewer chunks: what does not fit as it is runs in another way.
    low = n_rows = in_chunks
    while (
        n_rows and (n_rows := math.ceil(_STEP * n_rows)) <= most and at(n_rows).n_chunks < math.inf
    ):
        low = n_rows if is_in_few_chunks(n_rows) else low
    if low > in_chunks:
        in_chunks = _between(low, min(math.ceil(_STEP * low), most + 1), is_in_few_chunks)
    smallest = at(2)
    return LargestBatch(whole, in_chunks, most, smallest.left, smallest.least)


#: Batches that are larger by this factor are tried where the number of chunks may fall again.
_STEP = 1.1


def _between(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, given that `low` does and `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _Tried(NamedTuple):
    """A batch of some size."""

    is_whole: bool  # it fits whole
    n_chunks: float  # the chunks in which it fits; inf: it does not
    left: float  # bytes for the step and the batch
    least: float  # bytes that the step and the batch need at least; 0 if they fit


def _try(step: Callable[..., Tensor], inputs: tuple[Any, ...], batch: Any, n_rows: int) -> _Tried:
    """Record a step of a batch of `n_rows`, and fit it into the memory that is left."""
    tensors: list[Tensor] = []
    given = lazy(*_of_size(inputs, batch, n_rows, tensors), batch=batch)
    n_bytes = sum(tensor.nbytes for tensor in tensors)
    loss: Tensor | None = None
    try:
        loss = step(*(given if len(inputs) > 1 else (given,)))
        if type(loss) is not _core.LazyTensor or _core.real(loss) is not None:
            is_run = type(loss) is _core.LazyTensor
            what = "has run" if is_run else f"is of type {type(loss).__name__}"
            raise ValueError(f"{_MUST}: what it returned {what}")
        program = Program([loss])
        _, coming, stepping = refusals.before(program)
        left = max(0.0, limits.allowed_for(program) - coming)
        if stepping > left - n_bytes:
            return _Tried(False, math.inf, left, stepping + n_bytes)
        made = fitting.Trial(program, True).fit(left - n_bytes)
        if isinstance(made, limits.Needs):
            return _Tried(False, math.inf, left, made.n_bytes + n_bytes)
        return _Tried(made.is_whole, made.n_chunks, left, 0.0)
    finally:
        loss = None
        _core.forget()
