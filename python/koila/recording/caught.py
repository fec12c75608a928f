# SPDX-License-Identifier: Apache-2.0
"""Run calls that may fail for their numbers where the script can catch the error:
`try: root = torch.linalg.cholesky(kernel)`, and with `kernel + jitter` if that fails.

A recorded call runs later, where the script does not expect its error. So if a `try` around the
call catches the error, koila reads the result at once. It stays lazy, and differentiable.
"""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch

from koila import _core
from koila.basics import lines
from koila.basics.table import Args, Func, Words
from koila.reporting import reports
from koila.staged import meta

#: Ops by name: those that raise a LinAlgError, which depends on numbers.
OPS = frozenset(
    """cholesky cholesky_inverse inverse linalg_cholesky linalg_eig linalg_eigh linalg_eigvals
    linalg_eigvalsh linalg_inv linalg_ldl_factor linalg_lstsq linalg_lu linalg_lu_factor
    linalg_matrix_power linalg_pinv linalg_solve linalg_svd linalg_svdvals linalg_tensorinv
    linalg_tensorsolve lu pinverse svd""".split()
)

#: Frames of the script that are looked at: of the function that makes the call, and of its caller.
_N_FRAMES = 2

_linalg: Any = torch.linalg
_ERROR: type[Exception] = _linalg.LinAlgError

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_NOTHING = frozenset(("PUSH_EXC_INFO", "BUILD_TUPLE", "EXTENDED_ARG", "NOP", "NOT_TAKEN"))
_Names = tuple[tuple[str, ...], ...]


@functools.lru_cache(1024)
def _caught_at(code: types.CodeType, offset: int) -> tuple[_Names | None, ...]:
    """Return the dotted names of the exceptions that each `except` around an instruction catches;
    None for one that may catch all. `with` and `finally` catch nothing."""
    ops = {op.offset: op for op in dis.get_instructions(code)}
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    found: list[_Names | None] = []
    seen: set[int] = set()
    while True:
        target = next((e.target for e in entries if e.start <= offset < e.end), None)
        if target is None or target in seen:
            return tuple(found)
        seen.add(target)
        found.extend(_clauses(ops, target))
        offset = target


def _clauses(ops: dict[int, dis.Instruction], offset: int) -> Iterator[_Names | None]:
    """Yield what each clause of the handler at an offset catches."""
    names: list[tuple[str, ...]] = []
    is_known = True
    order = sorted(ops)
    at = order.index(offset)
    while at < len(order):
        op = ops[order[at]]
        at += 1
        if op.opname in _LOADS:
            names.append((op.argval,))
        elif op.opname == "LOAD_ATTR" and names:
            names[-1] += (op.argval,)
        elif op.opname.startswith("LOAD_"):
            is_known = False  # a local name
        elif op.opname == "CHECK_EXC_MATCH":
            yield tuple(names) if is_known else None
            names, is_known = [], True
        elif op.opname.startswith("POP_JUMP"):
            at = order.index(op.argval)
        elif op.opname == "POP_TOP" and not names and is_known:
            yield None  # `except:`
            return
        elif op.opname not in _NOTHING:
            return


def _catches(names: _Names | None, frame: types.FrameType) -> bool:
    """Return whether one of the exceptions that a clause names is that of these ops."""
    if names is None:
        return True
    for first, *rest in names:
        kind = frame.f_globals.get(first, getattr(builtins, first, None))
        for name in rest:
            kind = getattr(kind, name, None)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if any(isinstance(one, type) and issubclass(_ERROR, one) for one in kinds):
            return True
    return False


def _is_caught() -> bool:
    """Return whether the script catches the error of the call that it is making."""
    return any(
        _catches(names, frame)
        for frame in itertools.islice(lines.user_frames(), _N_FRAMES)
        for names in _caught_at(frame.f_code, frame.f_lasti)
    )


class _State(threading.local):
    is_recording = False


_state = _State()


def record(func: Func, args: Args, kwargs: Words) -> Any:
    """Record a call and read its results, if a `try` would catch its error."""
    if _state.is_recording or not _is_caught():
        return NotImplemented
    _state.is_recording = True
    try:
        result = func(*args, **kwargs)
    finally:
        _state.is_recording = False
    with reports.Asking(reports.call_of(func)):
        for tensor in meta.leaves(result):
            if type(tensor) is _core.LazyTensor:
                _core.read(tensor)
    return result
