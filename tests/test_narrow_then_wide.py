# SPDX-License-Identifier: Apache-2.0
"""Without a setting, calls are recorded however little is pending: what follows may need much more.

The memory of the process is a fake: the batch fits many times, what the model makes of it does not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import koila
from koila.memory import budget

N_ROWS, WIDTH = 256, 64
MIB = 2**20


def by_mask(x: Tensor, mask: Tensor) -> Tensor:
    return x[mask]


def by_masked_select(x: Tensor, mask: Tensor) -> Tensor:
    return torch.masked_select(x, mask[:, None]).view(-1, WIDTH)


def by_masked_scatter(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_scatter(mask[:, None], x.new_ones(N_ROWS, WIDTH))


def by_write(x: Tensor, mask: Tensor) -> Tensor:
    out = x.clone()
    out[mask] = x.new_ones(int(mask.sum()), WIDTH)
    return out


def by_packing(x: Tensor, mask: Tensor) -> Tensor:
    rows = x.view(N_ROWS, 4, WIDTH // 4)
    lengths = 1 + torch.arange(N_ROWS) % 4
    packed = nn.utils.rnn.pack_padded_sequence(rows, lengths, True, enforce_sorted=False)
    padded, _ = nn.utils.rnn.pad_packed_sequence(packed, True)
    return padded.reshape(N_ROWS, WIDTH)


@pytest.mark.parametrize(
    "narrow", [by_mask, by_masked_select, by_masked_scatter, by_write, by_packing]
)
def test_a_wide_model_after_a_small_call(
    narrow: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [layer for _ in range(12) for layer in (nn.LazyLinear(512), nn.GELU())]
    model = nn.Sequential(*layers, nn.LazyLinear(1)).double()
    batch, mask = torch.randn(N_ROWS, WIDTH, dtype=torch.float64), torch.rand(N_ROWS) < 0.9

    def gradients(x: Tensor) -> list[Tensor]:
        model.zero_grad()
        model(narrow(x, mask)).pow(2).mean().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    gradients(batch)
    expected = [grad.clone() for grad in gradients(batch)]
    free = 24 * MIB  # of 30 that the whole batch needs; the batch takes 0.1
    monkeypatch.setattr(budget, "free_on_cpu", lambda: free)
    monkeypatch.setattr(budget, "_quick", (0.0, -1.0, ()))
    found = gradients(koila.lazy(batch))
    assert koila.report().n_chunks > 1
    for grad, right in zip(found, expected, strict=True):
        assert (grad - right).abs().max() <= 1e-10 * right.abs().max()
