# SPDX-License-Identifier: Apache-2.0
"""The gradient that a view retains, when the view is written: torch moves it to the new version at
once, or, if a view of the view was written, when the view is used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import koila
from oracle import Lazy, assert_seen, eager

N_ROWS = 9
MADE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "no view": lambda x, w: x @ w,
    "view": lambda x, w: (x @ w).view(N_ROWS, 2, 2).flatten(1),
    "transposed": lambda x, w: (w.T @ x.T).T,
}
INDICES: dict[str, Any] = {
    "part": (slice(None), 0),
    "steps": (slice(None), slice(None, None, 2)),
    "all": slice(None),
    "ellipsis": Ellipsis,
    "new dim": None,
    "mask": torch.tensor([True, False, False] * 3),
    "columns": (slice(None), torch.tensor([0, 2])),
}


def put(index: Any) -> Callable[[Tensor], object]:
    return lambda v: v.__setitem__(index, 0.5)


def quietly(write: Callable[[Tensor], object]) -> Callable[[Tensor], None]:
    def run(v: Tensor) -> None:
        with torch.no_grad():
            write(v)

    return run


WRITES: dict[str, Callable[[Tensor], object]] = {
    **{f"set {name}": put(index) for name, index in INDICES.items()},
    "set quietly": quietly(put(INDICES["part"])),
    "itself": lambda v: v.mul_(0.5),
    "itself quietly": quietly(lambda v: v.mul_(0.5)),
    "view of it": lambda v: v[:, 0].mul_(0.5),
    "detached": lambda v: v.detach().mul_(0.5),
}


def story(lazy: Lazy, made: str, write: str, is_used: bool) -> Any:
    torch.manual_seed(0)
    x, w = torch.randn(N_ROWS, 6).double(), torch.randn(6, 4).double().requires_grad_()
    v = MADE[made](lazy(x), w)
    v.retain_grad()
    loss = (v @ torch.randn(4, 3).double()).square().mean(1).mean()
    WRITES[write](v)
    if is_used:
        loss = loss + (v + 1).mean()
    loss.backward()
    return [v.grad, w.grad]


@pytest.mark.parametrize("is_used", [False, True], ids=["", "used"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("made", MADE)
def test_as_in_eager(made: str, write: str, is_used: bool) -> None:
    want = story(eager, made, write, is_used)
    for chunks in (None, 1, 2, 3):
        with koila.config(chunks=chunks):
            got = story(koila.lazy, made, write, is_used)
            assert (got[0] is None) == (want[0] is None), f"in {chunks} chunks"
            assert_seen(got, want, f"{chunks} chunks", exact_bits=False)
            assert koila.report().n_chunks == (chunks or 1)
