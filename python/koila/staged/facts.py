# SPDX-License-Identifier: Apache-2.0
"""Records that describe a staged program: its calls (Node), values (Info) and runs (Run)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from koila import _core
from koila.basics.rows import Place

ROWS, REDUCE, ONCE = range(3)
_DATA = vars(torch._C.TensorBase)["data"]
#: The names of the reductions, in the order of KlReduce (reductions.def).
REDUCTION_NAMES = [name for name, *_ in _core.parts_table() if name]


def parts_in(bits: int) -> tuple[int, ...]:
    """Return the numbers of the partials for which a bit is set."""
    return tuple(part for part in range(32) if bits >> part & 1)


#: The partials of each that are added up as the chunks finish; last those of calls of koila.
ADDED = [frozenset(parts_in(bits)) for *_, bits in _core.parts_table()]


class Node(NamedTuple):
    """One recorded call and its place in the staged program."""

    id: int
    stage: int
    late_stage: int | None  # the stage of the second part of a reduction that has two
    mode: int  # ROWS, REDUCE or ONCE
    reduce: int  # which reduction it is: an index into REDUCTION_NAMES
    axis: int
    first_out: int
    n_outs: int
    is_random: bool
    writes: int
    leaf_writes: int
    is_data: bool  # cheap, of inputs alone, without a gradient: any body may run it again
    is_open: bool  # it reads only the sizes of its inputs
    is_for_chunks: bool  # only a run in chunks needs it; in a live run the next call does its work
    region: int  # the number of the checkpoint whose body made this call; 0: no checkpoint
    is_kept: bool  # backward goes through it and reads the tensors that it saves
    imports: tuple[int, ...]
    outs: range  # the values that it makes


def is_data(func: Callable[..., Any]) -> bool:
    """Tell whether a recorded function is the getter of `x.data`."""
    return getattr(func, "__self__", None) is _DATA


#: Functions whose name in messages is neither that of their row nor their own.
_KNOWN_AS = {"gradient_of": "autograd.grad", "batch_moments": "batch_norm"}


def name_of_call(i: int) -> str:
    """Return the name of call `i` for messages: that of its row, or else torch's."""
    func, row, *_ = _core.node(i)
    own = str(getattr(func, "__name__", "call"))
    name = str(row or own)
    return _KNOWN_AS.get(own) or _KNOWN_AS.get(name, name)


def where_of_node(node: Node) -> str:
    """Return the line of the user's script that made a call, such as "model.py:40"."""
    call, _, line = _core.node(node.id)[3].partition(", ")
    return str(line or call)


def call_in_words(node: Node) -> str:
    """Return the name and the line of a call."""
    return f"{name_of_call(node.id)} ({where_of_node(node)})"


class Import(NamedTuple):
    """A value that a run reads and that was made outside it."""

    value: int
    place: Place | None  # where its rows are; None: each chunk reads the whole value
    is_range: bool  # each chunk reads its first entries, as many as the chunk has rows


class Amounts(NamedTuple):
    """Bytes of a program's values for the whole batch; views do not count."""

    made: int  # results of its calls
    once: int  # of these, results of calls that run once
    entered: int  # inputs with rows
    given: int  # inputs without rows, such as parameters
    n_once: int  # how many calls run once


class Info(NamedTuple):
    """The metadata of a value on the tape, and its tensors if it has any."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    place: Place | None
    rows: int
    real: torch.Tensor | None  # the tensor of a leaf
    result: torch.Tensor | None  # its number, once computed
    storage: int
    base: int  # the value that is the whole storage after all writes
    view: tuple[int, int, int] | None  # of a view: the call, which output, the value it views
    device: torch.device
    strides: tuple[int, ...] | None  # None: not known
    is_uncertain: bool  # another value may or may not share its memory

    @classmethod
    def of(cls, value: int) -> Info:
        """Return the metadata of value `value` of the current thread's tape."""
        return cls._make(_core.value(value))


class Infos(dict[int, Info]):
    """The metadata of values; a subscript is faster than a call, and `ask` faster for many."""

    def ask(self, values: Iterable[int]) -> None:
        """Ask the core for the metadata of those of the values that have none here yet."""
        missing = list(itertools.filterfalse(self.__contains__, values))
        made = map(functools.partial(tuple.__new__, Info), map(_core.value, missing))
        self.update(zip(missing, made, strict=True))

    def __missing__(self, value: int) -> Info:
        found = self[value] = tuple.__new__(Info, _core.value(value))
        return found


@dataclass
class Run:
    """Calls that run together: a barrier, or one segment of a body over one axis. A body (odd
    stage) runs once for each chunk, a barrier (even stage) once."""

    index: int  # its number in the core's program
    stage: int
    axis: int
    segment: int = 0  # which segment of its body it is
    nodes: list[int] = field(default_factory=list)  # in the order they run
    #: By the first value of a reduction: which of its partials this run computes.
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    imports: list[int] = field(default_factory=list)  # numbers of the imports that it reads
    exports: list[int] = field(default_factory=list)  # values that other runs or the user read
    inner: list[int] = field(default_factory=list)  # exports that only segments of its body read
    combined: list[int] = field(default_factory=list)  # reductions that it combines from partials
    shadows: list[int] = field(default_factory=list)  # imports of which it reads only the sizes
    has_gradient: bool = False
    made: int = 0  # the bytes that its calls make, for the whole batch; views do not count
    is_body: bool = field(init=False)
    exported: frozenset[int] = field(init=False)  # `exports`
    left: list[int] = field(init=False)  # exports that not only segments of its body read

    def __post_init__(self) -> None:
        self.is_body = self.stage % 2 == 1
        self.exported = frozenset(self.exports)
        self.left = [value for value in self.exports if value not in self.inner]


class Job(NamedTuple):
    """How `_core.run` runs the calls of a run on one chunk."""

    is_grad_off: bool  # no graph is recorded, whatever was recorded
    #: Runs a call that the core cannot: a reduction, a draw, a view of written memory.
    run_other: Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    cut: Callable[[torch.Tensor, int], torch.Tensor]  # the chunk's rows of a whole import
    cloned: set[int]  # nodes that write a clone instead
    clone: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    saved: list[Any] | None = None  # collects what autograd saves (pack_into), until settle(node)
    settle: Callable[[int], None] | None = None
    again: tuple[int, ...] | None = None  # only these values are computed again
    aside: object = None  # the tape on which the calls are recorded instead of run
    #: By call that `run_other` would run: what is called in place of its function.
    functions: Mapping[int, Callable[..., Any]] = {}


#: Makes a job from all its fields, as a tuple, without the frame that `Job(...)` enters.
make_job: Callable[[tuple[Any, ...]], Job] = functools.partial(tuple.__new__, Job)
