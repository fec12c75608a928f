# SPDX-License-Identifier: Apache-2.0
"""What is contiguous() or reshape() of a value whose strides nobody knows: a view or a copy.

A write to one shows in the other as in eager, or is refused; a number lies in memory as in eager.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila

D = torch.float64
N_ROWS = 11
each_count = pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])

#: Of `q`, of 3 x 3 a row: rows of the table that do not say how their results lie.
SOURCES = {
    "pad": "F.pad(q.mT * 1, (1, 1))",
    "max_pool1d": "F.max_pool1d(q.mT, 2)",
    "interpolate": "F.interpolate(q.mT, scale_factor=2)",
    "conv1d": "F.conv1d(q.mT, torch.ones(3, 3, 2, dtype=D))",
    "roll": "torch.roll(q.mT * 1, 1, 1)",
    "svd": "torch.linalg.svd(q * 1)[0] * 2",
}
GIVERS = [
    "h.contiguous()",
    "h.mT.contiguous().mT",
    "h.reshape(h.shape)",
    "h.flatten(1)",
    "h.mT.ravel()",
]


def run(lazy: Any, lines: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(N_ROWS, 3, 3, generator=generator, dtype=D)
    w = torch.randn(3, 3, generator=generator, dtype=D).requires_grad_()
    env: dict[str, Any] = {"torch": torch, "F": F, "D": D, "q": lazy(q), "w": w}
    exec(lines, env)
    return [torch.tensor((env[name] * 1).tolist()) for name in "hg"]


def check(lines: str, chunks: int) -> None:
    with koila.config(chunks=chunks):
        got = run(koila.lazy, lines)
    for value, wanted in zip(got, run(lambda x: x, lines), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.rotated("chunks")
@each_count
@pytest.mark.parametrize("written", ["h[:2].mul_(3)", "g.mul_(3)", "g.data.mul_(3)"])
@pytest.mark.parametrize("read", ["", "h.sum().item()", "g.sum().item()"])
@pytest.mark.parametrize("give", GIVERS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_write_shows_where_it_does(
    source: str, give: str, read: str, written: str, chunks: int
) -> None:
    check(f"h = {SOURCES[source]}; g = {give}; {read}\n{written}", chunks)


@pytest.mark.rotated("chunks")
@each_count
@pytest.mark.parametrize("give", GIVERS)
@pytest.mark.parametrize("source", SOURCES)
def test_what_has_its_number_lies_as_in_eager(source: str, give: str, chunks: int) -> None:
    check(f"h = {SOURCES[source]}; h.sum().item(); g = {give}; g.mul_(3)", chunks)


SPENT = """
h = F.pad((q @ w).mT, (1, 1))
g = h.flatten(1)
(g * g).sum().backward()
"""


@pytest.mark.parametrize("written", ["h.mul_(3)", "g[0].mul_(3)", "g.zero_()", "h.copy_(h)"])
def test_after_a_backward_it_is_refused(written: str) -> None:
    lines = f"{SPENT}with torch.no_grad(): {written}"
    check(lines, 1)
    with koila.config(chunks=3), pytest.raises(koila.KoilaError, match="may share its memory"):
        run(koila.lazy, lines)


@each_count
def test_after_a_backward_it_is_read(chunks: int) -> None:
    check(f"{SPENT}g = g.detach() + 1; h = h.detach().clone().add_(1)", chunks)
