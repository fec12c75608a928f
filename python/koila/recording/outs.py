# SPDX-License-Identifier: Apache-2.0
"""Record calls with `out=` as the call without it and a copy of its result into `out`.

That is what torch does if `out` has the shape, dtype and layout of the result. In all other cases
(`out` is resized, cast to, strided, or shares memory with another argument) the call runs live.
"""

from __future__ import annotations

from typing import Any

import torch

from koila import _core
from koila.basics import table
from koila.basics.table import Args, Func, Words
from koila.staged import meta

LazyTensor = _core.LazyTensor


def _shape(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return dtype, shape and device of a contiguous tensor; None for other tensors."""
    description = _core.describe(tensor)
    if description is None or description[2] is None:
        return None
    dtype, shape, strides, _, device = description
    is_contiguous = meta.stand_in(dtype, shape, strides, False).is_contiguous()
    return (dtype, shape, device) if is_contiguous else None


def _is_apart(func: Any, targets: list[torch.Tensor], given: list[torch.Tensor]) -> bool:
    """Return whether the call reads nothing that it has written already."""
    storages = [_core.storage(target) for target in targets]
    if None in storages or len(set(storages)) < len(storages):
        return False
    # An elementwise call reads each entry before it writes it: its input may be `out` itself.
    is_entrywise = f"{func.__name__}_" in table.ROWS
    return not any(
        type(tensor) is LazyTensor
        and _core.storage(tensor) in storages
        and not (is_entrywise and any(tensor is target for target in targets))
        for tensor in given
    )


def record(func: Func, args: Args, kwargs: Words) -> Any:
    """Record a call with `out=`; NotImplemented where it has to run live."""
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    targets = meta.tensors(kwargs["out"])
    given = meta.tensors((*args, *rest.values()))
    shapes = [_shape(target) if type(target) is LazyTensor else None for target in targets]
    if None in shapes or not _is_apart(func, targets, given):
        return NotImplemented
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*targets, *given)):
        return NotImplemented  # torch raises its own error
    with torch.set_grad_enabled(False):
        result = func(*args, **rest)
        found = meta.tensors(result)
        if [_shape(tensor) for tensor in found] != shapes:
            return NotImplemented
        for target, tensor in zip(targets, found, strict=True):
            target.copy_(tensor)
    return targets[0] if isinstance(result, torch.Tensor) else type(result)(targets)
