# SPDX-License-Identifier: Apache-2.0
"""Writes of what has its number because something was read meanwhile, as in a mixture of experts:
they stay recorded where nobody else has that memory, and show where somebody has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from chunked import split

N_ROWS = 10


class Mixture(nn.Module):
    """As transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.gate, self.out = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.SiLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x).tanh()
        weights, chosen = torch.topk(F.softmax(self.gate(h), -1), 2, -1)
        final = torch.zeros_like(h)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for i in (mask.sum((-1, -2)) > 0).nonzero():
            place, row = torch.where(mask[int(i)])
            found = self.experts[int(i)](h[row]) * weights[row, place, None]
            final.index_add_(0, row, found)
        return self.out(h + final)


def step(lazy: Any) -> list[Tensor]:
    torch.manual_seed(1)
    model = Mixture().double()
    x, y = lazy(torch.randn(N_ROWS, 4, dtype=torch.float64), torch.randint(0, 2, (N_ROWS,)))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return [loss.detach()] + [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
def test_a_mixture_of_experts_is_cut(chunks: int) -> None:
    with split(chunks, rows=("linear", "softmax")):
        got = step(koila.lazy)
    for value, wanted in zip(got, step(lambda *given: given), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-14)


#: `out` has its number when the line runs; `see` is compared.
WRITES = (
    "out.add_(h); see(out.sum())",
    "v = out[:, 0]; float(v.sum()); out.add_(h); see(v.sum(), out.sum())",
    "out.add_(h); v = out[:, 0]; v.mul_(2); see(v.sum(), out.sum())",
    "a = out.numpy(); out.add_(x); see(torch.tensor(a.sum()), out.sum())",
    "s = out + h; out.add_(h); see(s.sum(), out.sum())",
    "s = (out * h).sum(); t = (out + 1).sum(); out.add_(x); see(t, out.sum())",
    "d = out.detach(); out.add_(x); see(d.sum())",
    "other = out; out += h; see(other.sum())",
    "out[:, 1] = h[:, 0]; see(out.pow(2).sum())",
    "out[1:3] = h[0]; see(out.pow(2).sum())",
    "with torch.no_grad(): out.add_(h)\nsee((out * h).sum())",
    "with torch.inference_mode(): out.add_(x)\nsee((out * h).sum())",
    "out.copy_(h); out.mul_(h); see(out.sum())",
    "out.add_(h); out.sum().item(); out.add_(h); see(out.pow(2).sum())",
    "out.zero_().add_(h); see(out.pow(2).sum())",
    "n = (out > 9).sum(); int(n); n += (x > 0).sum(); see((h * n).sum())",
    "m = out > 9; float(m.sum()); m |= h > 0; see((h * m).sum())",
)


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("text", WRITES)
def test_writes(text: str, chunks: int) -> None:
    def run(lazy: Any) -> list[Tensor]:
        torch.manual_seed(1)
        w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        seen: list[Tensor] = []
        x = lazy(torch.randn(N_ROWS, 4, dtype=torch.float64))
        h = x @ w
        env = {"torch": torch, "x": x, "h": h, "out": torch.zeros_like(h)}
        env["see"] = lambda *tensors: seen.extend(tensors)
        float(env["out"].sum())
        exec(text, env)
        loss = sum((t * (i + 1) for i, t in enumerate(seen)), h.pow(2).sum())
        loss.backward()
        return [torch.tensor(t.item()) for t in seen] + [w.grad]

    with koila.config(chunks=chunks):
        got = run(koila.lazy)
    for value, wanted in zip(got, run(lambda x: x), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)
