# SPDX-License-Identifier: Apache-2.0
"""What is known of the calls and values of a staged program, and of the runs that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from koila import _core
from koila.basics.rows import Place

ROWS, REDUCE, ONCE = range(3)
_DATA = vars(torch._C.TensorBase)["data"]
#: In the order of KlReduce: reductions.def.
REDUCTION_NAMES = [name for name, *_ in _core.parts_table() if name]


class Node(NamedTuple):
    """One recorded call, as the core staged it."""

    id: int
    stage: int
    late_stage: int | None
    mode: int
    reduce: int
    axis: int
    first_out: int
    n_outs: int
    is_random: bool
    writes: int
    leaf_writes: int
    is_data: bool
    is_open: bool  # made by sizes alone: of its inputs no number is read
    is_for_chunks: bool  # only chunks run it: live, the call after it does that itself
    region: int  # the body of a checkpoint that it is a call of; 0: of none
    is_kept: bool  # backward goes through it, and reads what it saves
    imports: tuple[int, ...]

    @property
    def outs(self) -> range:
        return range(self.first_out, self.first_out + self.n_outs)


def is_data(func: Callable[..., Any]) -> bool:
    """Whether a recorded function is x.data."""
    return getattr(func, "__self__", None) is _DATA


#: What users know by another name than that of its row.
_KNOWN_AS = {"gradient_of": "autograd.grad", "batch_moments": "batch_norm"}


def name_of_node(node: Node) -> str:
    """What a call is called in messages: its row, or torch's name."""
    return name_of_call(node.id)


def name_of_call(i: int) -> str:
    """The same, of the call of this number."""
    func, row, *_ = _core.node(i)
    own = str(getattr(func, "__name__", "call"))
    name = str(row or own)
    return _KNOWN_AS.get(own) or _KNOWN_AS.get(name, name)


def where_of_node(node: Node) -> str:
    """The line that recorded a call: "model.py:40"."""
    call, _, line = _core.node(node.id)[3].partition(", ")
    return str(line or call)


class Import(NamedTuple):
    """A value as something reads it: whole, or by rows at a place."""

    value: int
    place: Place | None
    is_range: bool


class Made(NamedTuple):
    """What a program has to do with a value."""

    node: Node | None  # that makes it; None for a leaf
    is_leaf: bool
    needs_gradient: bool
    is_kept: bool  # it must be there whole at the end, for the wanted ones to be had from it


class Amounts(NamedTuple):
    """Bytes of a program, for all rows; views share theirs."""

    made: int  # by its calls
    once: int  # of these, by calls that run once
    entered: int  # of rows that enter it
    given: int  # of what enters it whole
    n_once: int


class Info(NamedTuple):
    """What is known of a value."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    place: Place | None
    rows: int
    real: torch.Tensor | None
    result: torch.Tensor | None
    storage: int
    base: int  # the value of the whole storage, after all writes
    view: tuple[int, int, int] | None  # the node that took it, its output, what it views
    device: torch.device
    strides: tuple[int, ...] | None  # None: they are not known
    is_uncertain: bool  # other memory may be the same

    @classmethod
    def of(cls, value: int) -> Info:
        """Of the value of this number on the thread's tape."""
        return cls(*_core.value(value))


@dataclass
class Run:
    """The nodes of one stage and axis in the order they run."""

    index: int  # the core's
    stage: int
    axis: int
    segment: int = 0  # of its body
    nodes: list[int] = field(default_factory=list)
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # of reductions
    imports: list[int] = field(default_factory=list)  # what is read from outside
    exports: list[int] = field(default_factory=list)  # values that leave it
    inner: list[int] = field(default_factory=list)  # of these, for other segments of its body alone
    combined: list[Node] = field(default_factory=list)  # their partials become values here
    shadows: list[int] = field(default_factory=list)  # imports of which only sizes are read
    has_gradient: bool = False
    is_body: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_body = self.stage % 2 == 1
