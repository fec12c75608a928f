# SPDX-License-Identifier: Apache-2.0
"""Drop the calls at the end of a tape that have run, while calls before them are pending.

A script that keeps a prediction which it never reads, beside the model that it trains, leaves the
calls of that prediction pending. Without this, the calls of all later steps would stay behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from koila import _core

_BY_CALL = "starts", "noises", "effects", "unwritten"
_BY_CALL_AND_ROWS = "cells", "ends"
_BY_VALUE = "watched", "versions", "layouts"
#: What is noted of the step, and by the ids of tensors.
_LASTING = "read", "cut_off", "lengths"
_KNOWN = frozenset((*_BY_CALL, *_BY_CALL_AND_ROWS, *_BY_VALUE, *_LASTING))


def _drop(kept: Any, is_gone: Callable[[Any], bool]) -> None:
    for key in [key for key in kept if is_gone(key)]:
        if isinstance(kept, set):
            kept.discard(key)
        else:
            del kept[key]


def trim() -> None:
    """Drop these calls, and what is noted of them by their numbers, which later calls get."""
    notes = cast(dict[str, Any], _core.notes())
    if any(kept and name not in _KNOWN for name, kept in notes.items()):
        return
    end = _core.trim()
    if end is None:
        return
    n_calls, n_values = end
    for name, kept in notes.items():
        if name in _BY_CALL:
            _drop(kept, n_calls.__le__)
        elif name in _BY_VALUE:
            _drop(kept, n_values.__le__)
        elif name in _BY_CALL_AND_ROWS:
            _drop(kept, lambda key: key[0] >= n_calls)
