# SPDX-License-Identifier: Apache-2.0
"""What a program is, and the batches that programs are run on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from programs_losses import N_STEPS, randn
from programs_text import N_TOKENS

#: How a program draws. WHOLE: noise of the batch's size, drawn when recorded. IN_ORDER: dropout, of
#: rows that are outermost in memory. ANY: inside a fused operator, or where they are not.
WHOLE, IN_ORDER, ANY = "whole", "in order", "any"


@dataclasses.dataclass(frozen=True)
class Program:
    """One forward and one loss over one batch.

    `dims` says where each tensor of the batch holds the rows, None that it is not made lazy.
    `barrier` is the reason why more than one forward may be needed, `draws` how it draws, and
    `baked` the only size of the batch that the code is written for. `whole` says why it cannot be
    cut, and `partly` why some of its layers cannot, see `chunked.split`.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int, Generator], tuple[Any, ...]]
    step: Callable[..., Tensor]
    dims: tuple[int | None, ...] | int = 0
    barrier: str = ""
    draws: str = ""
    baked: int | None = None
    whole: str = ""
    partly: str = ""

    def build(self, seed: int) -> nn.Module:
        """Return the model with its first weights, in float64."""
        torch.manual_seed(seed)
        return self.model().double()

    def dims_of(self, batch: list[Any]) -> tuple[int | None, ...]:
        """Return the dim of the rows of each tensor of a batch."""
        return self.dims if isinstance(self.dims, tuple) else (self.dims,) * len(batch)

    def rows(self, n_rows: int) -> int:
        """Return the size of the batch to use where `n_rows` would do."""
        return self.baked or n_rows


# Batches ----------------------------------------------------------------------------------------


def vectors(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """Six numbers for each row."""
    return (randn(generator, n_rows, 6),)


def images(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """A small image for each row."""
    return (randn(generator, n_rows, 3, 8, 8),)


def table_rows(n_rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Three categories and four numbers for each row."""
    kinds = [torch.randint(0, n, (n_rows,), generator=generator) for n in (4, 7, 2)]
    return torch.stack(kinds, dim=1), randn(generator, n_rows, 4)


def sentences(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """Tokens as (B, T)."""
    return (torch.randint(0, N_TOKENS, (n_rows, N_STEPS), generator=generator),)


def sentences_time_major(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """Tokens as (T, B), as a transposed view of (B, T)."""
    return (sentences(n_rows, generator)[0].t(),)


def padded(n_rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Tokens as (B, T), and True where there is only padding."""
    (ids,) = sentences(n_rows, generator)
    lengths = torch.randint(1, N_STEPS + 1, (n_rows, 1), generator=generator)
    padding = torch.arange(N_STEPS) >= lengths
    return ids.masked_fill(padding, 0), padding


def padded_time_major(n_rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """The same with the tokens as (T, B)."""
    ids, padding = padded(n_rows, generator)
    return ids.t().contiguous(), padding
