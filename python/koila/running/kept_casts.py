# SPDX-License-Identifier: Apache-2.0
"""Weights that are written within a block of torch.autocast, after they were read in it.

Torch goes on with the casts of the old numbers until the outermost block ends. A program that runs
later would cast the new ones. So while the block lasts, the `__class__` of such a weight is one
that koila takes for the user's own: calls that read it run at once, and get torch's cast. If a run
in chunks has read the weight before, torch has no cast of the old numbers: calls that need it are
refused.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from koila import _core
from koila.basics import switches, table
from koila.messages.errors import KoilaError
from koila.running.unwritten import subclass_of

#: Weights by id, in the block that is open: those that were written, and those that runs in chunks
#: have read.
_written: dict[int, weakref.ref[torch.Tensor]] = {}
_in_chunks: dict[int, weakref.ref[torch.Tensor]] = {}
_OWN = "_koila_class_before"  # an attribute of the classes made here


def is_open() -> bool:
    """Return whether this thread is in a block of autocast that keeps casts."""
    return torch.is_autocast_cache_enabled() and switches.autocast_nesting() > 0


def note_run(read: Iterable[torch.Tensor]) -> None:
    """Note that a run in chunks has read these tensors."""
    if is_open():
        _in_chunks.update((id(one), weakref.ref(one)) for one in read if _is_kept(one))


def note_written(weights: Iterable[torch.Tensor]) -> None:
    """Note that weights have been written."""
    for weight in weights if is_open() else ():
        kind = _marking(type(weight)) if _is_kept(weight) else None
        if kind is not None:
            weight.__class__ = kind
            _written[id(weight)] = weakref.ref(weight)


def after_write(
    tensor: torch.Tensor, after: Callable[[], None] | None
) -> Callable[[], None] | None:
    """Return what to call after plain torch has written a tensor: `after`, and `note_written`."""
    if not (is_open() and _is_kept(tensor)):
        return after

    def both() -> None:
        if after is not None:
            after()
        note_written((tensor,))

    return both


def forget(weights: Iterable[torch.Tensor]) -> None:
    """Give weights their own classes back, for an optimizer that looks at them."""
    for weight in weights if _written else ():
        weight.__class__ = getattr(type(weight), _OWN, type(weight))


def is_written(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was written in the block that is open."""
    return hasattr(type(tensor), _OWN)


def beginning(enter: Callable[[], int]) -> Callable[[], int]:
    """Wrap torch.autocast_increment_nesting, which is called where a block begins."""

    @functools.wraps(enter)
    def patched() -> int:
        nesting = enter()
        if nesting == 1 and not _core.is_busy():
            switches.blocks.begin(_core.pending_bytes(True) > 0)
        return nesting

    return patched


def ending(clear: Callable[[], None]) -> Callable[[], None]:
    """Wrap torch.clear_autocast_cache, which is called at the end of a block: the next cast of each
    weight is of its new numbers."""

    @functools.wraps(clear)
    def patched() -> None:
        if switches.autocast_nesting() or _core.is_busy():
            clear()
        else:
            switches.blocks.end(_core.pending_bytes(True) > 0)
        forget([one for ref in _written.values() if (one := ref()) is not None])
        _written.clear()
        _in_chunks.clear()

    return patched


def _is_kept(tensor: torch.Tensor) -> bool:
    """Return whether torch keeps the casts of a tensor: never of a view. One that was made under
    no_grad() raises on `is_leaf` once another view of its base was written."""
    if tensor._is_view() or tensor.dtype is not torch.float32:
        return False
    return tensor.is_leaf and tensor.requires_grad


@functools.cache
def _marking(kind: type) -> type | None:
    """Return the class of written weights whose own class is `kind`. Return None if that is such a
    class already, or has a `__torch_function__` of its own: then calls run at once anyway."""
    return subclass_of(kind, _torch_function, __deepcopy__=_deepcopy, **{_OWN: kind})


def _deepcopy(weight: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Copy a weight with its own class: torch has no cast of the copy."""
    marked = type(weight)
    forget((weight,))
    try:
        return copy.deepcopy(weight, memo)
    finally:
        weight.__class__ = marked


def _torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if _core.LazyTensor in types:
        return NotImplemented  # koila makes the call again, with real tensors
    words = kwargs or {}
    with torch._C.DisableTorchFunctionSubclass():
        _refuse_after_chunks(func, (*args, *words.values()))
        return func(*args, **words)


def _refuse_after_chunks(func: Any, args: tuple[Any, ...]) -> None:
    """Raise if a call needs the cast of a weight, and torch has none."""
    if not (_in_chunks and is_open() and torch._C._is_any_autocast_enabled()):
        return
    name = getattr(func, "__name__", "")
    lists = (arg for arg in args if isinstance(arg, list | tuple))
    for one in itertools.chain(args, *lists):
        is_lost = isinstance(one, torch.Tensor) and is_written(one) and id(one) in _in_chunks
        if is_lost and table.is_cast(name, one.device.type):
            raise KoilaError(
                f"{name}: a weight of shape {list(one.shape)} was written in a block of "
                "torch.autocast, after calls of the block read it in chunks. PyTorch goes on with "
                "the cast of its old numbers, which koila does not have; write it after the block, "
                "or run it whole: koila.config(chunks=1)"
            )
