# SPDX-License-Identifier: Apache-2.0
"""What torch refuses for its sizes and dtypes alone is refused before the model runs, in torch's
words, and koila says nothing before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from oracle import FlopCounter

N_ROWS = 12
Mistake = Callable[[Tensor, Tensor], Any]

MISTAKES: dict[str, Mistake] = {
    "too few labels": lambda h, y: F.cross_entropy(h, y[:7]),
    "labels of two dims": lambda h, y: F.cross_entropy(h, y[:, None]),
    "labels of another dtype": lambda h, y: F.cross_entropy(h, y.int()),
    "labels of floats": lambda h, y: F.cross_entropy(h, y.float()),
    "probabilities of more classes": lambda h, y: F.cross_entropy(h, torch.zeros(12, 6)),
    "weights of fewer classes": lambda h, y: F.cross_entropy(h, y, weight=torch.ones(4)),
    "nll_loss": lambda h, y: F.nll_loss(h, y[:, None]),
    "mse_loss": lambda h, y: F.mse_loss(h, torch.zeros(12, 6)),
    "l1_loss": lambda h, y: F.l1_loss(h, torch.zeros(12, 6)),
    "smooth_l1_loss": lambda h, y: F.smooth_l1_loss(h, torch.zeros(6)),
    "with logits": lambda h, y: F.binary_cross_entropy_with_logits(h, torch.zeros(12, 6)),
    "multi_margin_loss": lambda h, y: F.multi_margin_loss(h, y[:5]),
    "multilabel_margin_loss": lambda h, y: F.multilabel_margin_loss(h, y),
    "triplets": lambda h, y: F.triplet_margin_loss(h, h, torch.zeros(12, 6)),
    "add": lambda h, y: h + torch.zeros(7),
    "matmul": lambda h, y: h @ torch.zeros(7, 7),
    "einsum": lambda h, y: torch.einsum("bc,bc->b", h, torch.zeros(12, 6)),
    "cat": lambda h, y: torch.cat([h, torch.zeros(12, 5, 1)]),
    "view": lambda h, y: h.view(7, -1),
    "column": lambda h, y: h[:, 7],
    "gather": lambda h, y: h.gather(1, y),
    "layer": lambda h, y: nn.Linear(9, 3)(h),
    "backward of rows": lambda h, y: h.backward(),
    "backward of what has no graph": lambda h, y: h.detach().sum().backward(),
    "backward of one of two": lambda h, y: torch.autograd.backward([h.sum(), h.detach().sum()]),
    "a gradient of another size": lambda h, y: h.backward(torch.ones(3)),
    "grad": lambda h, y: torch.autograd.grad(h, h),
}


def tell(mistake: Mistake, is_lazy: bool) -> tuple[str, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))
    x, y = torch.randn(N_ROWS, 8), torch.randint(0, 5, (N_ROWS,))
    if is_lazy:
        x, y = koila.lazy(x, y)
    with FlopCounter() as counter, pytest.raises(Exception) as raised:
        mistake(model(x), y)
    return f"{raised.type.__name__}: {raised.value}", counter.flops


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", MISTAKES)
def test_refused_before_the_model_runs(
    name: str, chunks: int, caplog: pytest.LogCaptureFixture
) -> None:
    want, n_eager = tell(MISTAKES[name], False)
    with caplog.at_level(logging.INFO, logger="koila"), koila.config(chunks=chunks):
        got, n_lazy = tell(MISTAKES[name], True)
    assert got == want
    assert n_eager > 0
    assert n_lazy == 0
    assert not caplog.records


@pytest.mark.parametrize("chunks", [1, 3])
def test_what_numbers_make_illegal_is_refused_when_it_runs(chunks: int) -> None:
    """A label that is no class is known only from its number."""
    said = []
    for is_lazy in (False, True):
        x, y = torch.randn(N_ROWS, 5), torch.full((N_ROWS,), 9)
        with koila.config(chunks=chunks), pytest.raises(IndexError) as raised:
            F.cross_entropy(*koila.lazy(x, y) if is_lazy else (x, y)).item()
        said.append(str(raised.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("chunks", [1, 3])
def test_what_only_some_numbers_make_illegal_is_no_mistake(chunks: int) -> None:
    """Lengths that nobody has looked at are not taken for 0, which torch refuses."""
    x, lengths = torch.randn(6, 4, 3), torch.tensor([4, 2, 3, 1, 4, 2])
    with koila.config(chunks=chunks):
        lazy, lazy_lengths = koila.lazy(x, lengths + 0)
        by_length = lazy_lengths.sort(descending=True).values
        packed = torch.nn.utils.rnn.pack_padded_sequence(lazy, by_length, batch_first=True)
        assert packed.data.shape == (16, 3)
