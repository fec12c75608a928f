# SPDX-License-Identifier: Apache-2.0
"""`x[index] = value` where the rows of the index are not those of what it indexes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from written import N_ROWS, Programs, each_count

pytestmark = pytest.mark.sanitize

PROGRAMS = Programs()


@PROGRAMS.add
def a_mask_of_rows_on_columns(x: Tensor, w: Tensor) -> Any:
    """The batch is both dims of `s`, and the mask counts the one that is not cut."""
    s = ((x @ w) @ x.T).T
    s[(x > 0).any(-1)] = 0.5
    return s.mean(), s


@PROGRAMS.add
def a_mask_of_rows_on_another_dim(x: Tensor, w: Tensor) -> Any:
    s = (x @ w)[None].repeat(N_ROWS, 1, 1)
    s[(x > 0).any(-1)] = 0.5
    t = (x @ w)[None].repeat(N_ROWS, 1, 1).transpose(0, 1)
    t[(x > 0).any(-1)] = 0.25
    return s.mean(), t


@PROGRAMS.add
def a_mask_of_its_own(x: Tensor, w: Tensor) -> Any:
    """A plain mask is given whole."""
    s = (x @ w)[None].repeat(2, 1, 1)
    s[torch.tensor([True, False])] = 0.5
    return s, s.mean()


@PROGRAMS.add
def the_mask_of_the_value_itself(x: Tensor, w: Tensor) -> Any:
    s = ((x @ w) @ x.T).T
    s[s > 0] = 0.5
    s[(s > 0.2).T] = 0.3
    return s


@PROGRAMS.add
def one_entry_of_the_batch(x: Tensor, w: Tensor) -> Any:
    s = ((x @ w) @ x.T).T
    s[(x > 0).any(-1)] = x[0, 0]
    return s


@PROGRAMS.add
def other_indices(x: Tensor, labels: Tensor, w: Tensor) -> Any:
    rows = torch.arange(N_ROWS)
    made = []
    for index in ((rows, labels), (labels, rows), (slice(None), 0), (0,), (labels,)):
        s = ((x @ w) @ x.T).T
        s[index] = x[:, 0]
        made += [s, s[index]]
    return made


@PROGRAMS.add
def other_writes(x: Tensor, labels: Tensor, w: Tensor) -> Any:
    s, t, u = (((x @ w) @ x.T).T for _ in range(3))
    s.masked_fill_((x > 0).any(-1), 0.5).masked_fill_((x > 0).any(-1)[:, None], 0.25)
    t.scatter_(0, labels[None], 1.0).scatter_(1, labels[:, None], 2.0)
    u.index_fill_(0, labels, 2.0)
    u.index_add_(0, labels, x[:, :1].expand(N_ROWS, N_ROWS).contiguous())
    return s, t, u


@each_count
@pytest.mark.parametrize("is_read_first", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str, is_read_first: bool, chunks: int) -> None:
    PROGRAMS.check(name, chunks, is_read_first)
