# SPDX-License-Identifier: Apache-2.0
"""Record an in-place write to a lazy that has its number already, since something was read:
`out = torch.zeros_like(h); ...nonzero(); out.index_add_(0, index, h)`.

If no other tensor has its memory, a recorded call copies the number, and the write goes to the
copy. So the values that are written stay recorded; if the write ran at once, they would be computed
for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from koila import _core
from koila.basics import holders
from koila.planning import planner

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def _is_own(lazy: Any) -> bool:
    """Return whether a lazy has its number, in memory that no other tensor has."""
    real = _core.real(lazy)
    if type(real) is not torch.Tensor or _core.is_input(lazy) or real.requires_grad:
        return False
    if torch.is_inference_mode_enabled():  # the copy would be an inference tensor
        return False
    is_private = not real.is_inference() and not holders.is_shared(real)
    del real  # release the reference before the lazy's own count is checked
    return is_private and _core.keep_lazy(lazy)


def instead(handler: Handler | None) -> Handler:
    """Return what is tried if a call that writes its first argument cannot be recorded."""

    def record(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else None
        if type(x) is not _core.LazyTensor or planner.is_whole() or not _is_own(x):
            return NotImplemented if handler is None else handler(func, args, kwargs)
        copy = x.clone()
        _core.swap(x, copy)
        return func(*args, **kwargs)

    return record
