# SPDX-License-Identifier: Apache-2.0
"""Record an in-place write to a tensor that has its number already:
`out = torch.zeros_like(h); ...nonzero(); out.index_add_(0, index, h)`, or
`outputs = torch.zeros(n, 8, 4); outputs[:, 0] = h`.

If no other tensor has its memory, a recorded call copies the number, and the write goes to the
copy. So the values that are written stay recorded; if the write ran at once, they would be computed
for the whole batch. If the tensor is plain and only one name of the script holds it, that name gets
the lazy copy: nobody can tell that it is another tensor.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import sys
import types
import weakref
from typing import Any, NamedTuple, cast

import torch

from koila import _core
from koila.basics import holders, lines
from koila.basics.table import Args, Func, Handler, Words
from koila.planning import planner
from koila.staged import meta

#: References to an argument while koila asks for their number: `args`, and two of the question.
_N_ASKED = 3

_LOADS = "LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME"
_METHODS = "LOAD_METHOD", "LOAD_ATTR"
_CALLS = "CALL", "CALL_KW", "CALL_FUNCTION_EX"


class _Target(NamedTuple):
    """How an instruction gets the tensor that it writes.

    Attributes:
        load: the instruction that loads it from a name; "" if a call has just returned it.
        names: the names that this loads.
        method: the method that writes it; "" for an operator or an index.
        is_whole: whether `name += ...` writes all of it.
    """

    load: str
    names: tuple[str, ...]
    method: str
    is_whole: bool


def _is_private(real: torch.Tensor) -> bool:
    """Return whether no other tensor has the memory of this one."""
    if torch.is_inference_mode_enabled() or real.is_inference():
        return False  # of an inference tensor the copy would be one too
    return not holders.is_shared(real)


def _is_own(lazy: Any) -> bool:
    """Return whether a lazy has its number, without a gradient, in memory of its own."""
    real = _core.real(lazy)
    if type(real) is not torch.Tensor or _core.is_input(lazy):
        return False
    if real.requires_grad or not _is_private(real):
        return False
    del real  # release the reference before all are counted
    return _core.is_held_by(lazy, 0)


def take_copy(lazy: Any) -> bool:
    """Record that a lazy with its number becomes a copy of it, so that a write can be recorded.
    Return whether it became one: nothing else has its memory, and the program may be split."""
    if planner.is_whole() or not _is_own(lazy):
        return False
    _core.swap(lazy, _core.like(cast(torch.Tensor, _core.real(lazy)), lazy).clone())
    return True


def _begin(op: dis.Instruction) -> tuple[int | None, int | None]:
    """Return the line and the column at which the expression of an instruction begins."""
    return (op.positions.lineno, op.positions.col_offset) if op.positions else (None, None)


@functools.lru_cache(1024)
def _target(code: types.CodeType, offset: int) -> _Target | None:
    """Return how the instruction at an offset gets what it writes; None if that is not known.

    What an operator, an index or a method writes is the expression at its beginning: `out` in
    `out += h`, in `out[:, t] = h` and in `out.add_(h)`.
    """
    ops = list(dis.get_instructions(code))
    at = next(i for i, op in enumerate(ops) if op.offset == offset)
    last, begin, method = ops[at], _begin(ops[at]), ""
    is_whole = last.opname == "BINARY_OP" and last.argrepr.endswith("=")
    starts = *_LOADS, *_METHODS, *_CALLS, "BINARY_SUBSCR"
    same = [op for op in ops[:at] if _begin(op) == begin and op.opname.startswith(starts)]
    if None in begin or not same:
        return None
    if last.opname in ("PRECALL", *_CALLS):
        if same[-1].opname not in _METHODS:
            return None
        method = same.pop().argval
    elif not is_whole and last.opname not in ("STORE_SUBSCR", "STORE_SLICE"):
        return None
    if same and same[-1].opname in _CALLS:
        return _Target("", (), method, is_whole)
    if not same or not same[-1].opname.startswith(_LOADS):
        return None
    names = same[-1].argval
    names = (names,) if isinstance(names, str) else names  # or the instruction loads two names
    return _Target(same[-1].opname, names, method, is_whole)


def _takes_gradient(args: Args, kwargs: Words) -> bool:
    """Return whether a gradient flows through what a call writes."""
    return torch.is_grad_enabled() and any(
        type(one) is _core.LazyTensor and one.requires_grad for one in meta.leaves((args, kwargs))
    )


def _has_waiting_rows(x: torch.Tensor, args: Args, kwargs: Words) -> bool:
    """Return whether a call writes a pending value with as many rows as `x`. A write to `x` itself
    would compute it now, and backward() would run all that it was computed from once more."""
    for one in meta.leaves((args, kwargs)) if torch.is_grad_enabled() else ():
        if type(one) is _core.LazyTensor and _core.is_pending_here(one):
            value = _core.id(one)
            place = None if value is None else _core.value(value)[3]
            if place is not None and x.shape[place[1] : place[1] + 1] == one.shape[place[1] :][:1]:
                return True
    return False


def _has_gradient_of_its_own(x: torch.Tensor) -> bool:
    """Return whether a copy of x that is written has other gradients than x would have.

    If not, backward goes through the copy to the calls that made x. Torch refuses to write a leaf,
    gives the gradient of x to x and to its hooks, and does not see writes under no_grad().
    """
    if not x.requires_grad:
        return x.grad is not None
    return x.is_leaf or x.retains_grad or bool(x._backward_hooks) or not torch.is_grad_enabled()


def _is_replaceable(x: Any) -> bool:
    """Return whether nobody would notice that a lazy tensor takes the place of a plain one. That no
    other name refers to it is checked elsewhere."""
    return (
        _is_private(x)
        and x._use_count() == 1  # no graph has saved it
        and x.untyped_storage().resizable()  # it is not the memory of a NumPy array
        and not (x.device.type == "cpu" and x.is_shared())  # with other processes
        and not _has_gradient_of_its_own(x)
        and not x.__dict__  # attributes that a lazy tensor would not have
        and not weakref.getweakrefcount(x)
    )


def _may_replace(func: Func, args: Args, kwargs: Words, frame: types.FrameType) -> _Target | None:
    """Return how `frame` gets the plain tensor that its call writes, if one name at most holds it,
    and a lazy copy may take its place."""
    if frame.f_code.co_filename.startswith(lines.INSIDE):
        return None
    target = _target(frame.f_code, frame.f_lasti)
    if target is None or target.method not in ("", func.__name__):
        return None
    # The interpreter holds what an instruction reads, or borrows it from the name.
    n_held = (target.load != "") + ("BORROW" not in target.load)
    if not _core.is_held_by(args[0], _N_ASKED + n_held) or not _is_replaceable(args[0]):
        return None
    # Other writes to a part of a plain tensor cost less than a copy of it.
    is_worth_it = (
        target.is_whole
        or target.load == ""
        or _takes_gradient(args[1:], kwargs)
        or _has_waiting_rows(args[0], args[1:], kwargs)
    )
    return target if is_worth_it else None


class _Names:
    """The names that a frame's instructions load, while it is entered.

    Before CPython 3.13 they are a copy, which Python keeps until the frame ends. It is emptied, so
    that it holds no tensor, unless the script has it from locals().
    """

    def __init__(self, frame: types.FrameType, load: str) -> None:
        self._frame, self._is_fast = frame, load.startswith("LOAD_FAST")
        is_module = load.startswith("LOAD_NAME") and frame.f_locals is frame.f_globals
        self._is_global = is_module or load.startswith("LOAD_GLOBAL")

    def __enter__(self) -> _Names:
        self._values = self._frame.f_globals if self._is_global else {}
        if self._is_fast:
            self._values = self._frame.f_locals
        return self

    def __exit__(self, *_: object) -> None:
        is_copy = self._is_fast and sys.version_info < (3, 13)
        if is_copy and sys.getrefcount(self._values) <= 3:  # of the frame, of this, of the question
            self._values.clear()

    def of(self, x: torch.Tensor, names: tuple[str, ...]) -> str | None:
        """Return the one of `names` that holds x."""
        return next((name for name in names if self._values.get(name) is x), None)

    def give(self, name: str, value: torch.Tensor) -> None:
        """Let a name hold a value."""
        self._values[name] = value
        if self._is_fast and sys.version_info < (3, 13):
            to_fast = ctypes.pythonapi.PyFrame_LocalsToFast
            to_fast(ctypes.py_object(self._frame), ctypes.c_int(0))


def _write_copy(
    func: Func, args: Args, kwargs: Words, frame: types.FrameType, target: _Target
) -> Any:
    """Write a lazy copy of the first argument, and give it to the name that holds the argument."""
    names = _Names(frame, target.load)
    with names:
        name = names.of(args[0], target.names)
    if target.load and name is None:
        return NotImplemented
    x = _core.input(args[0], -1, 0, 0).clone()
    result = func(x, *args[1:], **kwargs)
    if name is not None:
        with names:  # once more: the call may have run hooks that gave names other values
            names.give(name, x)
    return result


def instead(handler: Handler | None) -> Handler:
    """Return what is tried if a call that writes its first argument cannot be recorded."""

    def record(func: Func, args: Args, kwargs: Words) -> Any:
        kind = type(args[0]) if args and not planner.is_whole() else None
        result = NotImplemented
        if kind is torch.Tensor:
            frame = sys._getframe(1)
            target = _may_replace(func, args, kwargs, frame)
            if target is not None:
                result = _write_copy(func, args, kwargs, frame, target)
        elif kind is _core.LazyTensor and take_copy(args[0]):
            result = func(*args, **kwargs)
        if result is NotImplemented and handler is not None:
            return handler(func, args, kwargs)
        return result

    return record
