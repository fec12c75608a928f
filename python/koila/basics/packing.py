# SPDX-License-Identifier: Apache-2.0
"""In which order a packed sequence stores the steps of its rows."""

from __future__ import annotations

import torch
from torch import Tensor


def invert(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


def keys_of(lengths: Tensor, order: Tensor | None) -> Tensor:
    """Return a number for each row, larger for rows that come first in the packed sequence. So any
    rows can be packed in the order that they have there, also those of one length. `order`: the
    rows in the order of the packed sequence; None: they are in that order."""
    n_rows = lengths.numel()
    ranks = torch.arange(n_rows) if order is None else invert(order)
    return lengths * n_rows + (n_rows - 1 - ranks)


def of_keys(keys: Tensor, n_all: int) -> tuple[Tensor, Tensor | None]:
    """Return the lengths of rows, and their order as in `keys_of`, from their keys, which were made
    for `n_all` rows."""
    order = keys.argsort(descending=True) if bool((keys.diff() > 0).any()) else None
    return keys // n_all, order


def steps_of(lengths: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of rows that have each step, and the step and row of each entry of the
    packed data. The longest rows come first; `order` sorts them so, if they are not."""
    lengths = lengths if order is None else lengths[order]
    is_there = lengths > torch.arange(int(lengths[0]))[:, None]
    steps, at = (part.clone() for part in is_there.nonzero(as_tuple=True))
    return is_there.sum(1), steps, at if order is None else order[at]
