# SPDX-License-Identifier: Apache-2.0
"""What calls take that have no row in the op table: torch is asked, on meta tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from predictions import predicted_and_taken

ROWS, WIDTH, GROUPS = 2048, 48, 50


def _reduced(h: Tensor, reduce: str) -> Tensor:
    group = (torch.arange(len(h)) % GROUPS)[:, None].expand_as(h)
    zeros = torch.zeros(GROUPS, h.shape[1], dtype=h.dtype)
    return zeros.scatter_reduce(0, group, h, reduce, include_self=False)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "scatter_reduce mean": lambda h: _reduced(h, "mean"),
    "scatter_reduce prod": lambda h: _reduced(h, "prod"),
    "renorm": lambda h: h.renorm(2, 0, 1.0),
    "quantile": lambda h: h.quantile(0.3, dim=1),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_takes_what_is_predicted(name: str) -> None:
    """With its backward: what is kept for that, and what a formula makes on its way."""
    predicted, taken = predicted_and_taken(CALLS[name], ROWS, WIDTH, torch.float64)
    share = predicted / taken
    assert 0.9 <= share <= 1.5, f"{share:.2f} of {taken} bytes"
