# SPDX-License-Identifier: Apache-2.0
"""A value that has been read, and whose call koila runs once more to compute another value.

That run computes the value again, chunk by chunk. A call that reads all rows of the value must get
the number of all rows, and not the rows of one chunk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from oracle import eager

N = 11

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda h: h[-1],
    "slice": lambda h: h[1:, :, 1:].sum(0, keepdim=True)[0],
    "narrowed": lambda h: h.narrow(0, 1, 1).squeeze(0),
    "reshaped": lambda h: h[:1].view(N, -1),
}
#: What reads all rows of `s` for each row.
READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda s: s[s.argmax(1)],
    "index_select": lambda s: s.index_select(0, s.argmax(1)),
    "gather": lambda s: s.gather(0, s.argmax(1)[:, None].expand(N, s.shape[1])),
    "take_along_dim": lambda s: torch.take_along_dim(s, s.argmax(1)[:, None], 0).expand_as(s),
    "all rows chosen": lambda s: s[(s[:, 0] > -9).nonzero().squeeze(-1)],
    "flip": lambda s: s.flip(0),
    "product": lambda s: s @ (s.T @ s),
    "centred": lambda s: s - s.mean(0),
    "softmax over rows": lambda s: s.softmax(0),
    "own rows": lambda s: s * 2,
}


def outcome(
    lazy: Any, view: Callable[[Tensor], Tensor], reader: Callable[[Tensor], Tensor], has_read: bool
) -> list[Tensor]:
    """What is seen of a program that writes a detached view, reads it, and goes on with it."""
    torch.manual_seed(0)
    first, x = nn.Linear(6, 4).double(), torch.randn(3, N, 6, dtype=torch.float64)
    x = lazy(x, batch=1)
    v = view(first(x))
    s = v.detach()
    s.clamp_(-1, 1)
    if has_read:
        float(s.sum())  # now `s` has its number; `v` has a graph, and runs again
    last = nn.Linear(s.shape[1], 4).double()
    t = last(reader(s))
    seen = [copy.deepcopy(value.detach()) for value in (s, v, t)]
    (t.square().mean() + v.square().mean()).backward()
    gradients = [weight.grad for weight in (*first.parameters(), *last.parameters())]
    return seen + [gradient for gradient in gradients if gradient is not None]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("has_read", [False, True], ids=["pending", "read"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 7, N])
def test_a_written_view_is_read_whole(
    chunks: int | None, view: str, reader: str, has_read: bool
) -> None:
    wanted = outcome(eager, VIEWS[view], READERS[reader], has_read)
    with koila.config(**({} if chunks is None else {"chunks": chunks})):
        seen = outcome(koila.lazy, VIEWS[view], READERS[reader], has_read)
    assert len(seen) == len(wanted)
    for found, number in zip(seen, wanted, strict=True):
        torch.testing.assert_close(found, number, rtol=1e-10, atol=1e-12)


PAIRS: dict[str, Callable[[Tensor], Any]] = {
    "max over rows": lambda h: h.max(0),
    "max": lambda h: h.max(1),
    "topk": lambda h: h.topk(2, 1),
    "sort": lambda h: h.sort(1),
    "sort of rows": lambda h: h.detach().sort(0),
    "var_mean over rows": lambda h: torch.var_mean(h, 0),
    "var_mean": lambda h: torch.var_mean(h, 1),
    "chunk": lambda h: h.chunk(2, 1),
}


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N])
def test_one_result_of_two_has_been_read(chunks: int, is_second: bool, pair: str) -> None:
    """The call runs again for the result that has no number yet."""

    def run(lazy: Any) -> list[Any]:
        torch.manual_seed(0)
        first, x = nn.Linear(6, 4).double(), lazy(torch.randn(N, 6, dtype=torch.float64))
        known, other = PAIRS[pair](first(x))
        if is_second:
            known, other = other, known
        seen = copy.deepcopy(known.detach())
        both = known.double()[..., :1] * other.double()[..., :1]
        loss = (other.double() * 1.5).sum() + known.double().square().mean() + both.sum()
        if loss.requires_grad:
            loss.backward()
        return [seen, copy.deepcopy(loss.detach()), first.weight.grad]

    with koila.config(chunks=chunks):
        seen = run(koila.lazy)
    for found, number in zip(seen, run(eager), strict=True):
        if number is not None:
            torch.testing.assert_close(found, number, rtol=1e-10, atol=1e-12)
