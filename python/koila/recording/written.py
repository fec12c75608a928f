# SPDX-License-Identifier: Apache-2.0
"""Record an in-place write to a tensor that has its number already:
`out = torch.zeros_like(h); ...nonzero(); out.index_add_(0, index, h)`, or
`total = torch.zeros(n); total += h.sum(1)`.

If no other tensor has its memory, a recorded call copies the number, and the write goes to the
copy. So the values that are written stay recorded; if the write ran at once, they would be computed
for the whole batch.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch

from koila import _core
from koila.basics import holders, lines
from koila.planning import planner

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: References to the tensor of `name += ...` while koila asks for their number: of the name, of the
#: arguments, of the question, and of the interpreter, unless it borrows that of the name.
_N_OWN = 4 if sys.version_info >= (3, 14) else 5


def _is_private(real: torch.Tensor) -> bool:
    """Return whether no other tensor has the memory of one that has no gradient."""
    if real.requires_grad or torch.is_inference_mode_enabled() or real.is_inference():
        return False  # of an inference tensor the copy would be one too
    return not holders.is_shared(real)


def _is_own(lazy: Any) -> bool:
    """Return whether a lazy has its number, in memory that no other tensor has."""
    real = _core.real(lazy)
    if type(real) is not torch.Tensor or _core.is_input(lazy) or not _is_private(real):
        return False
    del real  # release the reference before all are counted
    return _core.is_held_by(lazy, 0)


def _assigned(op: dis.Instruction) -> tuple[str, ...]:
    """Return the names that an instruction assigns."""
    names = op.argval if op.opname.startswith("STORE") else ()  # or also one that it loads
    return (names,) if isinstance(names, str) else names


def _lines(op: dis.Instruction) -> range:
    """Return the lines of an instruction; none if the interpreter does not know them."""
    first, last = (op.positions.lineno, op.positions.end_lineno) if op.positions else (None, None)
    return range(0) if first is None or last is None else range(first, last + 1)


@functools.lru_cache(1024)
def _name_written(code: types.CodeType, offset: int) -> tuple[str, str]:
    """If `name += ...` runs at an instruction, return how its result is stored, and the name; ""
    if not, or if the same lines assign that name once more."""
    ops = [op for op in dis.get_instructions(code) if op.opname != "EXTENDED_ARG"]
    at = next(i for i, op in enumerate(ops) if op.offset == offset)
    if ops[at].opname != "BINARY_OP" or not ops[at].argrepr.endswith("="):
        return "", ""
    how, (name, *_) = ops[at + 1].opname, _assigned(ops[at + 1]) or ("",)
    lines = _lines(ops[at])
    n_times = sum(not {*lines}.isdisjoint(_lines(op)) for op in ops if name in _assigned(op))
    return (how, name) if n_times == 1 else ("", "")


def _is_replaced(args: tuple[Any, ...], frame: types.FrameType) -> bool:
    """Return whether `frame` runs `name += ...` on a plain tensor that only the name holds. Then
    nobody can tell whether the name gets the same tensor or another."""
    if frame.f_code.co_filename.startswith(lines.INSIDE) or not _core.is_held_by(args[0], _N_OWN):
        return False
    x, (how, name) = args[0], _name_written(frame.f_code, frame.f_lasti)
    is_global = how == "STORE_GLOBAL" or (
        how == "STORE_NAME" and frame.f_locals is frame.f_globals  # of a module
    )
    return (
        (frame.f_globals.get(name) is x if is_global else how.startswith("STORE_FAST"))
        and _is_private(x)
        and x._use_count() == 1  # no graph has saved it
        and x.untyped_storage().resizable()  # the memory of an array is not
        and not (x.device.type == "cpu" and x.is_shared())  # with other processes
        and x.grad is None
        and not x.__dict__
        and not weakref.getweakrefcount(x)
    )


def instead(handler: Handler | None) -> Handler:
    """Return what is tried if a call that writes its first argument cannot be recorded."""

    def record(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = type(args[0]) if args and not planner.is_whole() else None
        if kind is torch.Tensor and _is_replaced(args, sys._getframe(1)):
            x = _core.input(args[0], -1, 0, 0).clone()
        elif kind is _core.LazyTensor and _is_own(args[0]):
            x, real = args[0], cast(torch.Tensor, _core.real(args[0]))
            _core.swap(x, _core.like(real, x).clone())
        else:
            return NotImplemented if handler is None else handler(func, args, kwargs)
        return func(x, *args[1:], **kwargs)

    return record
