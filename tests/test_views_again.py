"""Views of what is written later, or through them: each sees what it sees in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from written import Programs, each_count

pytestmark = pytest.mark.sanitize

PROGRAMS = Programs()


@PROGRAMS.add
def sizes_of_another(x: Tensor, w: Tensor) -> Any:
    """What lends its sizes only is there too when the view is taken again."""
    r = x @ w
    same, wide, folded = r.view_as(x), r[:, :1].expand_as(x), r.reshape_as(x.view(-1, 2, 2))
    r.relu_()
    return same.mean(), wide, folded


@PROGRAMS.add
def sizes_of_what_is_written_too(x: Tensor, w: Tensor) -> Any:
    r = x @ w
    q = r * 2
    same, own = r.view_as(q), r.view_as(r)
    q.add_(2)
    r.add_(1)
    same.mul_(2)
    return same.mean(), own, q, r


@PROGRAMS.add
def broadcast_together(x: Tensor, z: Tensor, w: Tensor) -> Any:
    """Each output is a view of its own input."""
    r, q = x @ w, z * 2
    wide, high = torch.broadcast_tensors(r[:, :1], q[:, None, 0])
    r.relu_()
    q.mul_(3)
    return wide, high, q


@each_count
@pytest.mark.parametrize("is_read_first", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str, is_read_first: bool, chunks: int) -> None:
    PROGRAMS.check(name, chunks, is_read_first)
