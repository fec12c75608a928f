# SPDX-License-Identifier: Apache-2.0
"""Report a backward of plain tensors alone, beside lazy batches

What is computed from plain noise (a generator's images) has no lazy tensor in it, and runs on the
whole batch. The report and a warning say so, and what to do.
"""

from __future__ import annotations

import dis
import logging
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

from koila.basics import config, lines
from koila.memory import budget
from koila.messages.words import size
from koila.random import plain
from koila.reporting import reports

_logger = logging.getLogger("koila")
_LEAST = 2**18  # bytes: less is not reported
_MOST_NODES = 10_000
#: By line of a backward: bytes of results on the whole batch, and where noise may be drawn.
_known: dict[str, tuple[int, str]] = {}


def note(roots: Iterable[Any]) -> None:
    """Note a backward of plain tensors, and report it if it takes much memory."""
    line = lines.user_line()
    n_rows = reports.note_plain(line)
    if n_rows < 2 or config.get("chunks") == 1:
        return
    is_new = line not in _known
    if is_new:
        _known[line] = _bytes_of(roots, n_rows), _draws_in(lines.user_frame())
    n_bytes, drawn = _known[line]
    is_free = config.get("chunks") is None and config.get("memory_limit") is None
    if n_bytes < _LEAST or (is_free and budget.is_ample(n_bytes)):
        return
    why = (
        f"nothing in it is lazy: {size(n_bytes)} of results with {n_rows} samples were made on the "
        f"whole batch; where they are made of noise{drawn}, make that lazy, koila.lazy(noise), or "
        "run the script with python -m koila"
    )
    reports.note_left("backward()", line, why)
    if is_new:
        _logger.warning("backward() (%s): %s", line, why)


def _bytes_of(roots: Iterable[Any], n_rows: int) -> int:
    """Return the bytes of the results in a graph whose dim 0 has `n_rows` entries."""
    waiting = [root.grad_fn for root in roots if getattr(root, "grad_fn", None) is not None]
    seen, n_bytes = set(waiting), 0
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        for made in node._input_metadata:
            if getattr(made, "is_cpp_nested_tensor", False):
                continue  # it has no shape
            shape = torch.Size(made.shape)
            if len(shape) > 0 and shape[0] == n_rows:
                n_bytes += shape.numel() * made.dtype.itemsize
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
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
