# SPDX-License-Identifier: Apache-2.0
"""Writes through tensors that share memory but no version counter: x.data that was taken before a
call reads x, and parameters whose data were set to parts of another tensor."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.utils.checkpoint import checkpoint

import koila
from koila import _core
from koila.running import recomputed
from koila.staged import aliases
from oracle import assert_like, eager
from test_checkpoint_functions import cubed

N_ROWS = 7
FLAT = (
    "flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])\n"
    "vector_to_parameters(flat, net.parameters())\n"
)
#: The alias is written between the record of a call and its run: eager has read the old numbers.
WRITTEN = (
    "d = w.data; l = (net(x) * w).sum(); d.zero_()",
    "d = w.data[1:]; l = (net(x) * w).sum(); d.mul_(3)",
    "d = w.data; e = d.view(-1); del d; l = (net(x) * w).sum(); e.mul_(3)",
    "d = w.data.data; l = (net(x) * w).sum(); d.mul_(3)",
    "d = net.weight.data; l = net(x).sum().detach(); d.mul_(3)",
    "d = [p.data for p in net.parameters()]; l = net(x).sum()\nfor p in d: p.clamp_(-0.1, 0.1)",
    FLAT + "l = net(x).sum(); flat.mul_(2)",
    FLAT + "l = net(x).sum(); flat[:3] = 0",
    "d = w.clone(); w.data = d; l = (net(x) * w).sum(); d.mul_(2)",
    "d = norm.running_mean.data; norm.eval(); l = norm(net(x)).sum(); d.add_(1)",
    "d = w.data; l = checkpoint(lambda a: (a * w).sin(), net(x), use_reentrant=False).sum()\n"
    "d.add_(1)",
    "d = X.data; l = net(x).sum(); d.mul_(2)",
    # Other ways to write than methods of the alias: of these, torch counts the writes to it alone.
    "d = copy.copy(X); l = net(x).sum(); torch._foreach_mul_([d], 2.0)",
    "l = net(x).sum(); d = copy.copy(X); torch._foreach_mul_([d], 2.0)",
    "l = net(x).sum(); d = copy.copy(x); torch.add(d, 1, out=d)",
    "c = torch.ones(4).double(); d = torch.empty(0).double().set_(c); l = (net(x) * c).sum()\n"
    "torch.add(d, 1, out=d)",
    "c = torch.ones(4).double(); l = (net(x) * c).sum(); d = torch.empty(0).double().set_(c)\n"
    "torch._foreach_mul_([d], 2.0)",
)
#: Nothing is written that a call has yet to read.
AS_BEFORE = (
    "d = w.data; l = (net(x) * w).sum()",
    "d = copy.copy(x); c = copy.copy(X); l = net(x).sum(); d.clone()",
    "d = copy.copy(X); torch._foreach_mul_([d], 2.0); l = net(x).sum()",
    "d = w.data; d.mul_(2); l = (net(x) * w).sum()",
    "w.data.mul_(2); l = (net(x) * w).sum()",
    "d = w.data; l = (net(x) * w).sum(); l.item(); d.clone()",
    FLAT + "l = net(x).sum()",
    FLAT + "flat.mul_(2); l = net(x).sum()",
    "d = norm.running_mean.data; l = norm(net(x)).pow(3).sum()",
    "d = norm.running_mean.data; l = norm(net(x)).pow(3).sum() + norm(net(x * 2)).pow(3).sum()",
    "d = net.weight.data\nfor _ in range(2):\n    l = net(x).pow(2).mean(); l.backward()\n"
    "    d.sub_(0.1 * net.weight.grad)\nl = net(x).pow(2).mean()",
)


def run(text: str, lazy: Any, chunks: int | None) -> list[Tensor]:
    torch.manual_seed(0)
    net, norm = nn.Linear(6, 4).double(), nn.BatchNorm1d(4).double()
    data = torch.randn(N_ROWS, 6).double()
    names: dict[str, Any] = {
        **{
            "torch": torch,
            "copy": copy,
            "checkpoint": checkpoint,
            "vector_to_parameters": vector_to_parameters,
        },
        **{"net": net, "norm": norm, "X": data, "x": lazy(data)},
        "w": torch.ones(4).double().requires_grad_(),
    }
    with koila.config(chunks=chunks):
        exec(text, names)
        if names["l"].requires_grad:
            names["l"].backward()
    found = [torch.tensor(names["l"].item()).double(), norm.running_mean, norm.running_var]
    found += [p.grad for p in (*net.parameters(), names["w"])]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("text", WRITTEN + AS_BEFORE)
def test_an_alias_that_is_older_than_the_call(text: str) -> None:
    want = run(text, eager, None)
    for chunks in (None, 1, 2, 3, N_ROWS):
        try:
            got = run(text, koila.lazy, chunks)
        except (koila.StaleError, koila.KoilaError) as error:
            assert text in WRITTEN
            assert "written" in str(error) or "changed in place" in str(error)
            continue
        assert_like(got, want)


def test_an_alias_that_is_gone_costs_nothing() -> None:
    x, w = koila.lazy(torch.ones(N_ROWS, 4)), torch.ones(4)
    w.data.mul_(2)
    gc.collect()
    assert w.untyped_storage()._cdata not in aliases.by_storage
    total = (x * w).sum()
    assert "watched" not in _core.notes()
    alias = w.data
    assert aliases.is_shared(w)
    total += (x * w.clone().data).sum()
    del alias
    gc.collect()
    assert not aliases.is_shared(w)
    assert total.item() == 2 * 2 * N_ROWS * 4


def test_data_that_is_set_again() -> None:
    """Modules and optimizers do this: net.double(), net.to(), optimizer.step()."""
    net = nn.Linear(3, 2)
    for _ in range(2):
        for p in net.parameters():
            p.data = p.data * 2
            p.data = p.data.view(p.shape)
    net.double().float()
    x = koila.lazy(torch.ones(N_ROWS, 3))
    net(x).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.tolist() == [[N_ROWS] * 3] * 2


def test_data_of_a_tensor_that_has_no_memory() -> None:
    sparse = torch.eye(3).to_sparse()
    kept = [sparse.data, torch.empty(3, device="meta").data, torch.empty(0).data]
    x = koila.lazy(torch.ones(N_ROWS, 3))
    assert torch.sparse.mm(sparse, (x * 2).T).sum().item() == 2 * N_ROWS * 3
    assert len(kept) == 3


@pytest.mark.parametrize("chunks", [1, 2])
def test_data_of_a_sparse_tensor_beside_a_part(chunks: int) -> None:
    """While a part waits for its backward, koila watches the tensors that it handed out: someone
    may write them through their .data."""
    weight = torch.ones(3, 3, requires_grad=True)
    with koila.config(chunks=chunks):
        h = koila.lazy(torch.ones(N_ROWS, 3)) @ weight
        loss = (cubed(h) + h).sum()
        data = torch.eye(3).to_sparse().data
        assert data.is_sparse and h.detach().data.sum().item() == N_ROWS * 9
        loss.backward()
    assert weight.grad is not None and weight.grad.sum().item() == N_ROWS * 9 * 28


def test_data_of_a_sparse_tensor_beside_a_checkpoint() -> None:
    """A checkpoint that ran on the whole batch waits for its backward: someone may write what its
    function reads through .data."""
    weight = torch.ones(3, 3, requires_grad=True)
    with koila.config(chunks=2):
        h = koila.lazy(torch.ones(N_ROWS, 3)) @ weight
        made = checkpoint(lambda a: a * a, h, use_reentrant=False)
        h.data.clamp_(-9, 9)
        pairs = made.t() @ made  # not sample by sample
        gradient = torch.autograd.grad(pairs.sum(), made, create_graph=True)[0]
        assert len(recomputed.alive) > 0
        assert torch.eye(3).to_sparse().data.is_sparse
        gradient.sum().backward()
    assert weight.grad is not None and weight.grad.sum().item() == N_ROWS * 9 * 36
