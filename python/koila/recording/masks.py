# SPDX-License-Identifier: Apache-2.0
"""Record calls with a mask by reading the mask: then the shape of the result is known, and the
other inputs can still be cut into chunks."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function

from koila import _core
from koila.basics import config
from koila.basics.enter import call_with_lazies
from koila.basics.table import Args, Func, Words, words_of
from koila.recording import written
from koila.reporting import reports
from koila.running import arrays

LazyTensor = _core.LazyTensor


def _mask_as_indices(item: Any) -> tuple[Any, ...] | None:
    """Read a mask and return the indices where it is True; None if `item` is no mask."""
    if not isinstance(item, Tensor) or item.dtype is not torch.bool or item.dim() == 0:
        return None
    made = _read_number(item).nonzero(as_tuple=True)
    arrays.note_made_of(item, made)
    return made


def _read_number(tensor: Tensor) -> Tensor:
    with reports.Asking("getitem()"):
        return _core.read(tensor) if type(tensor) is LazyTensor else tensor


def select(func: Func, args: Args, kwargs: Words) -> Any:
    """Record x[mask]. If the mask chooses equally many entries in each row, the result has the rows
    of x. Otherwise the call is recorded with the indices of the mask, as torch computes it."""
    if len(args) != 2 or kwargs or config.is_one_chunk():
        return NotImplemented
    items = args[1] if isinstance(args[1], tuple) else (args[1],)
    n_each = _n_each(args[0], items[0]) if len(items) == 1 else None
    if n_each is not None:
        return select_masked(args[0], _read_number(items[0]), n_each)
    at = 0
    indices: list[Any] = []
    for item in items:
        found = None
        if isinstance(item, Tensor):
            if args[0].shape[at : at + item.dim()] != item.shape and item.dtype is torch.bool:
                return NotImplemented  # torch raises its own error
            found = _mask_as_indices(item)
        elif item is Ellipsis or item is None or not isinstance(item, slice | int):
            return NotImplemented
        at += 1 if found is None else len(found)
        indices += [item] if found is None else found
    if len(indices) == len(items) and all(a is b for a, b in zip(indices, items, strict=True)):
        return NotImplemented
    return args[0][tuple(indices)]


def _n_each(x: Any, mask: Any) -> int | None:
    """Return how many entries a mask chooses in each entry of dim 0; None: 0, or unequal."""
    if not isinstance(x, Tensor) or not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        return None
    if mask.dim() < 2 or mask.shape != x.shape[: mask.dim()] or mask.numel() == 0:
        return None
    counts = _read_number(mask).flatten(1).sum(1)
    return int(counts[0]) or None if bool((counts == counts[0]).all()) else None


def select_masked(x: Tensor, mask: Tensor, n_each: int) -> Any:
    """Return x[mask], with `n_each` entries of each entry of dim 0."""
    if has_torch_function((x, mask)):
        return call_with_lazies(select_masked, (x, mask), x, mask, n_each)
    return x[mask]


def masked_select(func: Func, args: Args, kwargs: Words) -> Any:
    """Record masked_select() as `select` does."""
    words = words_of(("input", "mask"), args, kwargs)
    if words.keys() != {"input", "mask"} or config.is_one_chunk():
        return NotImplemented
    x, mask = words["input"], words["mask"]
    if mask.dtype is not torch.bool or mask.dim() == 0:
        return NotImplemented
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return select(func, (x.expand(shape), mask.expand(shape)), {})


# Writes through a mask ----------------------------------------------------------------------------


def masked_scatter(func: Func, args: Args, kwargs: Words) -> Any:
    """Record x.masked_scatter(mask, source) by rows.

    If each row gets equally many entries of the source, these are cut with the rows. Otherwise each
    row looks its entries up in the whole source.
    """
    names = "input", "mask", "source"
    words = words_of(names, args, kwargs)
    if words.keys() != set(names) or config.is_one_chunk():
        return NotImplemented
    if not all(isinstance(word, Tensor) for word in words.values()):
        return NotImplemented
    return _scatter(*(words[name] for name in names))


def _scatter(x: Tensor, mask: Tensor, source: Tensor) -> Any:
    is_fit = mask.dim() == x.dim() and mask.dtype is torch.bool and source.dtype == x.dtype
    if not is_fit or x.numel() == 0:
        return NotImplemented
    fits = all(m in (1, n) for m, n in zip(mask.shape, x.shape, strict=True))
    lender = next((of for of in (x, mask) if _goes_by_rows(of, x.shape[0])), None)
    if lender is None or not fits:
        return NotImplemented
    chosen_rows = _read_number(mask).expand(x.shape)
    is_of_vectors = x.dim() > 1 and bool((chosen_rows == chosen_rows[..., :1]).all())
    width = x.shape[-1] if is_of_vectors else 1
    chosen = (chosen_rows[..., 0] if is_of_vectors else chosen_rows).reshape(x.shape[0], -1)
    n_chosen = chosen.sum(1)
    n_written = int(n_chosen.sum()) * width
    if n_written == 0:
        # Nothing is written; the source gets a gradient of zeros, as in eager mode.
        value = source.sum(dtype=x.dtype) if source.requires_grad else 0
        return x.masked_fill(_core.like(chosen_rows, lender), value)
    if n_written > source.numel() or source.numel() % width:
        return NotImplemented  # torch raises its own error
    rows = x.reshape(*chosen.shape, width)
    if n_written == source.numel() and bool((n_chosen == n_chosen[0]).all()):
        at = chosen.nonzero()[:, 1].view(x.shape[0], -1, 1)
        of_rows = source.reshape(x.shape[0], at.shape[1], width)
        made = rows.scatter(1, _core.like(at, lender).expand_as(of_rows), of_rows)
    else:
        number = (chosen.flatten().cumsum(0) - 1).clamp_(0).view(chosen.shape)
        found = F.embedding(_core.like(number, lender), source.reshape(-1, width))
        made = torch.where(_core.like(chosen[..., None], lender), found, rows)
    return made.reshape(x.shape)


def assign(func: Func, args: Args, kwargs: Words) -> Any:
    """Record x[mask] = source, with one entry of the source where the mask is True, by rows."""
    if len(args) != 3 or type(args[0]) is not LazyTensor or kwargs or config.is_one_chunk():
        return NotImplemented
    x, mask, source = args
    if isinstance(mask, tuple) and len(mask) == 1:
        (mask,) = mask
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.dim() == 0:
        return NotImplemented
    is_fit = isinstance(source, Tensor) and source.dim() == x.dim() - mask.dim() + 1
    if not is_fit or x.shape != mask.shape + source.shape[1:]:
        return NotImplemented
    if not _goes_by_rows(x, x.shape[0]):
        return NotImplemented  # a value with rows cannot be written into one without
    number = _read_number(mask)
    if int(number.sum()) != source.shape[0]:
        return NotImplemented
    written.take_copy(x)  # the read may have computed x: the write goes to what is recorded next
    of_all = number.reshape(mask.shape + (1,) * (x.dim() - mask.dim())).expand_as(x)
    made = _scatter(x, of_all, source)
    if made is NotImplemented:
        return made
    x.copy_(made)
    return None


def _goes_by_rows(x: Tensor, n_rows: int) -> TypeGuard[LazyTensor]:
    return type(x) is LazyTensor and _core.rows_dim(x) == 0 and x.shape[0] == n_rows
