# SPDX-License-Identifier: Apache-2.0
"""A write in place of what was made by the program, and has its number because something was read
meanwhile: `out = torch.zeros_like(h); ...nonzero(); out.index_add_(0, index, h)`.

Nobody else has that memory, so the number is copied by a recorded call and the copy is written:
what goes into it stays recorded. Run at once, the write would make the whole program run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from koila import _core
from koila.planning import planner
from koila.running import cross

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def _is_own(lazy: Any) -> bool:
    """Whether a lazy has its number, and all of its memory to itself."""
    real = _core.real(lazy)
    if type(real) is not torch.Tensor or _core.is_input(lazy) or real.requires_grad:
        return False
    if torch.is_inference_mode_enabled():  # the copy would be of that kind
        return False
    is_private = not real.is_inference() and not cross.is_shared(real)
    del real  # it would hold it too
    return is_private and _core.keep_lazy(lazy)


def instead(handler: Handler | None) -> Handler:
    """What is tried where a call that writes its first argument cannot be recorded."""

    def record(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else None
        if type(x) is not _core.LazyTensor or planner.is_whole() or not _is_own(x):
            return NotImplemented if handler is None else handler(func, args, kwargs)
        copy = x.clone()
        _core.swap(x, copy)
        return func(*args, **kwargs)

    return record
