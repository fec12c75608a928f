# SPDX-License-Identifier: Apache-2.0
"""A model that goes on from what another made without gradients: by rows, as from a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from allocations import Allocations
from chunked import split
from oracle import eager

N_ROWS = 11
Head = Callable[[nn.ModuleDict, Tensor, Tensor], Tensor]


def written(m: nn.ModuleDict, h: Tensor, x: Tensor) -> Tensor:
    """What waits has read it as it was; a view of it shows what is written, and it the view's."""
    before, view = (h * 3).sin(), h[:, 0]
    h.add_(1)
    seen = m["head"](h.clone()) + view.mean()
    view.zero_()
    return (seen + m["head"](h) * before[:, :1, :1]).mean() + view.sum()


def written_later(m: nn.ModuleDict, h: Tensor, x: Tensor) -> Tensor:
    """By the batch's own rows, when it is on the tape again."""
    made = m["head"](h.clone())
    h[:, 0] = x[:, 0, :6]
    h.mul_(x[..., :1])
    return (made * m["head"](h)).mean()


def selected(m: nn.ModuleDict, h: Tensor, x: Tensor) -> Tensor:
    """A mask of its numbers, as of any."""
    return m["head"](h[h > 0.1][:6]).mean() + m["head"](h * (h > 0)).mean()


HEADS: dict[str, tuple[str, Head]] = {
    "linear": ("", lambda m, h, x: m["head"](h).sin().mean()),
    "cheap": ("", lambda m, h, x: m["head"](F.relu(h + 1)).sin().mean()),
    "of a view": ("", lambda m, h, x: m["head"](h[:, 0]).sin().mean()),
    "of views": ("", lambda m, h, x: m["head"](h.transpose(1, 2).flatten(1)[:, :6]).sin().mean()),
    "times": ("", lambda m, h, x: (h * m["head"].bias).sum(2).sin().mean()),
    "a list": ("", lambda m, h, x: m["head"](torch.cat([h, h.sin()], 1)).sin().mean()),
    "dropout": ("", lambda m, h, x: m["head"](F.dropout(h, 0.5)).sin().mean()),
    "with the batch": ("", lambda m, h, x: m["head"](h + x[..., :6]).sin().mean()),
    "all rows": ("means", lambda m, h, x: m["head"](h - h.mean(0).exp()).sin().mean()),
    "written": ("views", written),
    "written later": ("views", written_later),
    "selected": ("numbers", selected),
}


def run(head: Head, lazy: Any) -> list[Tensor]:
    torch.manual_seed(0)
    m = nn.ModuleDict({"body": nn.Linear(8, 6), "head": nn.Linear(6, 6)}).double()
    x = lazy(torch.randn(N_ROWS, 3, 8).double())
    with torch.no_grad():
        h = torch.tanh(m["body"](x))
    loss = head(m, h, x)
    loss.backward()
    gradients = [p.grad for p in m["head"].parameters() if p.grad is not None]
    return [loss.detach().clone(), h.clone(), *gradients, (h * 2).mean()]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("head", HEADS)
def test_same_numbers(head: str, chunks: int) -> None:
    partly, step = HEADS[head]
    wanted = run(step, eager)
    with koila.config(chunks=chunks) if partly else split(chunks):
        got = run(step, koila.lazy)
        is_cut = any(ran.n_chunks > 1 for ran in koila.report().programs)
    assert is_cut == (chunks > 1)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, check_stride=False)


def test_the_head_takes_a_chunk() -> None:
    """Its activations are most of what there is."""
    torch.manual_seed(0)
    body, head = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 1))
    x = torch.randn(2048, 8)

    def peak(lazy: Any) -> int:
        memory = Allocations()
        with memory:
            with torch.no_grad():
                h = body(lazy(x))
            loss = head(h).square().mean()
        with memory:
            loss.backward()
        return memory.peak

    most = peak(eager)
    with split(4):
        assert peak(koila.lazy) < 0.4 * most
