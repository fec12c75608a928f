# SPDX-License-Identifier: Apache-2.0
"""Running statistics that several calls of a program update: some of them by rows, others on what
has no rows. Updates do not commute, so they are made in the order of the calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from oracle import Lazy, eager

N_ROWS, WIDE = 5, 4
Norm = nn.BatchNorm1d | nn.InstanceNorm1d


def rows(norm: Norm, h: Tensor) -> Tensor:
    return norm(h.mean(2))


def whole(norm: Norm, h: Tensor) -> Tensor:
    """What the batch has been reduced to: prototypes, means of groups."""
    return norm(h.mean(0).T + 1)


def functional(norm: Norm, h: Tensor) -> Tensor:
    words = {p: weight * 0.5 for p, weight in norm.named_parameters()}
    out: Tensor = torch.func.functional_call(norm, words, (h.mean(0).T * 2,))
    return out


def by_name(norm: Norm, h: Tensor) -> Tensor:
    """Whole, with its arguments by name."""
    return torch.batch_norm(
        input=h.amax(0).T,
        weight=None,
        bias=None,
        running_mean=norm.running_mean,
        running_var=norm.running_var,
        training=True,
        momentum=0.3,
        eps=1e-5,
        cudnn_enabled=False,
    )


def in_checkpoint(norm: Norm, h: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda x: norm(x).tanh(), h.mean(0).T, use_reentrant=False)
    return out


def rows_in_checkpoint(norm: Norm, h: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda x: norm(x).tanh(), h.mean(2), use_reentrant=False)
    return out


def instances(norm: Norm, h: Tensor) -> Tensor:
    return F.instance_norm(h, norm.running_mean, norm.running_var, momentum=0.2)


def instances_of_what_is_whole(norm: Norm, h: Tensor) -> Tensor:
    return F.instance_norm(h.cumsum(0).flip(0), norm.running_mean, norm.running_var, momentum=0.2)


Use = Callable[[Norm, Tensor], Tensor]
USES: list[Use] = [
    rows,
    whole,
    functional,
    by_name,
    in_checkpoint,
    rows_in_checkpoint,
    instances,
    instances_of_what_is_whole,
]


def outcome(lazy: Lazy, uses: tuple[Use, ...], ends: str) -> list[Any]:
    """Statistics and gradients after calls on one norm, and a read or a backward of some."""
    torch.manual_seed(0)
    norm, first = nn.BatchNorm1d(WIDE).double(), nn.Linear(6, 6).double()
    h = first(lazy(torch.randn(N_ROWS, WIDE, 6, dtype=torch.float64))).tanh()
    found = [use(norm, h) for use in uses]
    if ends == "read":
        seen: list[Any] = [out.detach().sum().item() for out in found]
    elif ends == "statistics":
        seen = [norm.running_mean.tolist()]  # type: ignore[union-attr]
    else:
        sum((out.square() * (i + 1)).mean() for i, out in enumerate(found)).backward()
        seen = [p.grad for p in first.parameters()]
    return [*seen, norm.running_mean.clone(), norm.running_var.clone()]  # type: ignore[union-attr]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("ends", ["read", "statistics", "backward"])
@pytest.mark.parametrize(
    "uses", [*itertools.product(USES, USES)], ids=lambda p: "-".join(u.__name__ for u in p)
)
@pytest.mark.parametrize("chunks", [1, 2, 3, N_ROWS])
def test_two_calls(chunks: int, uses: tuple[Use, ...], ends: str) -> None:
    try:
        wanted = outcome(eager, uses, ends)
    except (
        RuntimeError
    ) as error:  # a call before has saved the statistics, and this one writes them
        assert "modified by an inplace operation" in str(error)
        return
    with koila.config(chunks=chunks):
        found = outcome(koila.lazy, uses, ends)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ends", ["read", "backward"])
@pytest.mark.parametrize(
    "uses", [(rows, whole, rows), (whole, rows, whole), (rows, functional, by_name)]
)
@pytest.mark.parametrize("chunks", [None, 2, N_ROWS])
def test_three_calls(chunks: int | None, uses: tuple[Use, ...], ends: str) -> None:
    wanted = outcome(eager, uses, ends)
    with koila.config(**({} if chunks is None else {"chunks": chunks})):
        found = outcome(koila.lazy, uses, ends)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
