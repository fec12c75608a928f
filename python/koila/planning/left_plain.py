# SPDX-License-Identifier: Apache-2.0
"""Report what leaves koila: lazy values in plain tensors, and a backward of plain tensors alone

What is computed from plain noise (a generator's images), or from numbers that were read of lazies,
has no lazy tensor in it, and runs on the whole batch. The report and a warning say so, and what to
do.
"""

from __future__ import annotations

import dis
import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from koila import _core
from koila.basics import config, lines
from koila.basics.engine import nodes_behind
from koila.memory import budget
from koila.messages.words import size
from koila.planning import logs, planner
from koila.random import plain
from koila.reporting import reports

_logger = logging.getLogger("koila")
_LEAST = 2**18  # bytes: less is not reported
_LEAST_READ = 2**20  # bytes: reads of fewer are not named
_MOST_NODES = 10_000
#: By line of a backward: bytes of results on the whole batch, and where noise may be drawn.
_by_line: dict[str, tuple[int, str]] = {}
#: By the line of a backward call: the lines that its warnings have named as causes; "": noise.
_reported: dict[str, set[str]] = {}


class _Left(threading.local):
    def __init__(self) -> None:
        self.batch = 0
        self.calls: dict[str, str] = {}  # by line: calls that left koila with that batch
        self.has_input = False  # one of them read an input, of which a model may be computed


_left = _Left()


def _note_exit(what: str, line: str, is_input: bool = False) -> None:
    """Remember a call that gave the user plain values of the current batch."""
    if _left.batch != reports.n_batches():
        _left.batch, _left.has_input = reports.n_batches(), False
        _left.calls.clear()
    _left.calls[line] = what
    _left.has_input |= is_input


def _calls() -> dict[str, str]:
    """Return, by line, the calls that gave the user plain values of the current batch."""
    return _left.calls if _left.batch == reports.n_batches() else {}


def note_read(what: str, lazy: _core.LazyTensor, number: torch.Tensor) -> None:
    """Note that a call, such as "numpy()", gave the user the number of a lazy tensor."""
    is_input = _core.is_input(lazy)
    if is_input or number.nbytes >= _LEAST_READ:
        _note_exit(what, lines.user_line(), is_input)


def note_left(func: Callable[..., Any], tensor: torch.Tensor, is_written: bool | None) -> None:
    """Note a large plain tensor that a call made of lazy tensors, wrote from them (`is_written`),
    or read (None). Calls on it are not recorded.

    report() lists what was made or written. It is also logged, once for each line, unless all that
    is pending fits whole.
    """
    name, line = reports.name_of(func), lines.user_line()
    _note_exit(name if is_written else reports.call_of(func), line)
    if is_written is None:
        return
    if is_written:
        made = (
            f"writes lazy values into a plain tensor of {size(tensor.nbytes)}: what is made of it "
            "is plain torch, on the whole batch; make it with torch.zeros_like(h) or "
            "h.new_zeros(...) of a lazy h, and it is recorded"
        )
    else:
        made = (
            f"makes a plain tensor of {size(tensor.nbytes)}: what it is given is computed "
            "already and has no samples of a batch"
        )
    reports.note_left(name, line, made)
    if not planner.is_whole():
        is_written = is_written and torch.is_grad_enabled()  # else there is no graph to lose
        level = logging.WARNING if is_written or tensor.requires_grad else logging.INFO
        # It says what to do, also where the log says of the line that its pending calls ran whole.
        logs.log_once(f"left {line}", "%s (%s) %s", name, line, made, level=level)
        logs.logged.add(line)


def note(roots: Iterable[Any]) -> None:
    """Note a backward of plain tensors, and report it if it takes much memory. One inside of
    another backward, as in that of a custom function, is a part of that."""
    if torch._C._current_graph_task_id() == -1:
        line = lines.user_line()
        _report(roots, line, reports.note_plain(line), "nothing in it is lazy")


def note_behind(entered: Iterable[torch.Tensor]) -> None:
    """Note the backward of a program that reads plain tensors with a graph, although an input of
    this batch has left koila: the model was computed from that."""
    if _left.has_input and _calls():
        roots = [tensor for tensor in entered if tensor.grad_fn is not None]
        if roots:
            _report(roots, lines.user_line(), reports.n_rows(), "only its last calls are lazy")


def _report(roots: Iterable[Any], line: str, n_rows: int, what: str) -> None:
    """Report the bytes of the plain graphs of `roots`, if there are many."""
    if n_rows < 2 or config.get("chunks") == 1:
        return
    if line not in _by_line:
        _by_line[line] = _bytes_of(roots, n_rows), _draws_in(lines.user_frame())
    n_bytes, drawn = _by_line[line]
    is_free = config.get("chunks") is None and config.get("memory_limit") is None
    if n_bytes < _LEAST or (is_free and budget.is_ample(n_bytes)):
        return
    why = (
        f"{what}: {size(n_bytes)} of results with {n_rows} samples were made on the whole batch; "
        f"{_advice(drawn)}"
    )
    reports.note_left("backward()", line, why)
    reported, causes = _reported.setdefault(line, set()), set(_calls())
    if drawn or not causes:
        causes.add("")
    if not causes <= reported | logs.logged:
        _logger.warning("backward() (%s): %s", line, why)
    reported |= causes


def _advice(drawn: str) -> str:
    """Return what to do about a backward of plain tensors. `drawn`: where noise may be drawn."""
    found, left = [], _calls()
    if not (left or reports.is_batch_used() or _core.pending_bytes(True)):
        found.append("koila.lazy() changes nothing in place: pass what it returns to the model")
    if not left or (drawn and not _left.has_input):
        launcher = "" if plain.is_followed() else ", or run the script with python -m koila"
        found.append(
            f"where they are made of noise{drawn}, make that lazy, koila.lazy(noise){launcher}"
        )
    if left:
        calls = ", ".join(f"{what} at {line}" for line, what in [*left.items()][-3:])
        found.append(
            f"where they are made of values that left koila ({calls}), compute with the lazy "
            "tensor itself, or make the values lazy again, koila.lazy(values)"
        )
    return "; ".join(found)


def _bytes_of(roots: Iterable[Any], n_rows: int) -> int:
    """Return the bytes of the results in a graph whose dim 0 has `n_rows` entries."""
    on_graphs, n_bytes = (root for root in roots if hasattr(root, "grad_fn")), 0
    for node in itertools.islice(nodes_behind(on_graphs), _MOST_NODES):
        for made in node._input_metadata:
            # The shape of a nested tensor is no row of numbers.
            shape = torch.Size(() if getattr(made, "is_nested_tensor", False) else made.shape)
            if len(shape) > 0 and shape[0] == n_rows:
                n_bytes += shape.numel() * made.dtype.itemsize
    return n_bytes


def _draws_in(frame: FrameType | None) -> str:
    """Return the lines of a function that draw plain noise, as text; "" if there are none."""
    if frame is None:
        return ""
    by_line: dict[int, set[str]] = {}
    for step in dis.get_instructions(frame.f_code):
        if step.positions is not None and step.positions.lineno is not None:
            by_line.setdefault(step.positions.lineno, set()).add(str(step.argval))
    found = [at for at, words in by_line.items() if words & plain.MAKERS and "lazy" not in words]
    file = lines.name_of_file(frame.f_code.co_filename)
    return f" ({', '.join(f'{file}:{at}' for at in found[:3])})" if found else ""
