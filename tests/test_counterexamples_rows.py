# SPDX-License-Identifier: Apache-2.0
"""Programs that break a naive splitter by where the rows are: beside what, and in which order.

The other counterexamples of splitting are in `test_counterexamples.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from oracle import Lazy, assert_same_story, gradients
from stories import N_ROWS

pytestmark = pytest.mark.sanitize

DOUBLE = torch.float64
each_split = pytest.mark.parametrize("chunks", [2, 3, 7, N_ROWS])


def leaf(*shape: int) -> Tensor:
    """Return a leaf that wants its gradient, from the global generator."""
    return torch.randn(*shape, dtype=DOUBLE, requires_grad=True)


# Rows and what lies beside them -----------------------------------------------------------------


def gather_from_plain(x: Tensor, idx: Tensor, plain: Tensor) -> Tensor:
    """A plain table with more rows than the batch: row i of the index reads row i of it."""
    return plain.gather(1, idx) * x


def scatter_into_plain(x: Tensor, idx: Tensor, plain: Tensor) -> Tensor:
    """The same, written."""
    return plain.scatter(1, idx, x)[:N_ROWS]


def scatter_add_into_plain(x: Tensor, idx: Tensor, plain: Tensor) -> Tensor:
    """The same, added."""
    return plain.clone().scatter_add_(1, idx, x).tanh().sum(0)


def take_along(x: Tensor, idx: Tensor, plain: Tensor) -> Tensor:
    """Along the other dim the same rows belong together."""
    return torch.take_along_dim(plain[:N_ROWS], idx, dim=1) * x


def index_select_plain(x: Tensor, idx: Tensor, plain: Tensor) -> Tensor:
    """A plain table looked up by number: all its rows are for everyone."""
    return plain.index_select(0, idx[:, 0]) * x[:, :1]


def index_plain(x: Tensor, idx: Tensor, plain: Tensor) -> Tensor:
    """The same by brackets."""
    return plain[idx[:, 1]] * x[:, :1]


def batched_matmul(x: Tensor, idx: Tensor, plain: Tensor) -> Tensor:
    """A plain matrix for each row."""
    return torch.bmm(x.unsqueeze(1), plain[:N_ROWS].unsqueeze(2).expand(-1, 6, 3))


def shared_matmul(x: Tensor, idx: Tensor, plain: Tensor) -> Tensor:
    """A plain matrix of as many rows as the batch that is no batch."""
    return x.t().sum(1) @ plain[:6] + (x @ torch.ones(6, N_ROWS, dtype=DOUBLE)).sum(0)[:6]


@pytest.mark.parametrize(
    "use",
    [
        gather_from_plain,
        scatter_into_plain,
        scatter_add_into_plain,
        take_along,
        index_select_plain,
        index_plain,
        batched_matmul,
        shared_matmul,
    ],
    ids=lambda use: use.__name__,
)
@each_split
def test_plain_tensors_beside_rows(chunks: int, use: Callable[..., Tensor]) -> None:
    """plain.gather(1, lazy_idx) with more plain rows than the batch, and its kin."""

    def story(lazy: Lazy) -> Any:
        weight, plain = leaf(6, 6), leaf(N_ROWS + 5, 6)
        x = torch.randn(N_ROWS, 6, dtype=DOUBLE)
        idx = torch.randint(0, 6, (N_ROWS, 6))
        x, idx = lazy(x, idx)
        out = use(x @ weight, idx, plain)
        out.pow(2).mean().backward()
        return out, weight.grad, plain.grad

    assert_same_story(story, chunks)


@each_split
def test_lstm_states_of_each_row(chunks: int) -> None:
    """Plain first states (layers, B, H) are cut along their second dim."""

    def story(lazy: Lazy) -> Any:
        rnn = nn.LSTM(6, 4, num_layers=2, batch_first=True).double()
        x = lazy(torch.randn(N_ROWS, 5, 6, dtype=DOUBLE))
        h0, c0 = leaf(2, N_ROWS, 4), leaf(2, N_ROWS, 4)
        out, (h, c) = rnn(x, (h0, c0))
        (out.pow(2).mean() + h.sum() + c.mean()).backward()
        return out, h, c, h0.grad, c0.grad, gradients(rnn)

    assert_same_story(story, chunks)


@pytest.mark.parametrize("shape", [(N_ROWS, 1, 1, 4), (1, 1, 4, 4), (4, 4), (N_ROWS, 2, 4, 4)])
@each_split
def test_attention_masks(chunks: int, shape: tuple[int, ...]) -> None:
    """A plain mask of fused attention has rows of its own, or none."""

    def story(lazy: Lazy) -> Any:
        weight = leaf(6, 6)
        x = lazy(torch.randn(N_ROWS, 2, 4, 6, dtype=DOUBLE))
        mask = torch.randn(shape, dtype=DOUBLE)
        q = x @ weight
        out = F.scaled_dot_product_attention(q, q, x, attn_mask=mask)
        out = out + F.scaled_dot_product_attention(q, x, x, attn_mask=mask > -2)
        out.pow(2).mean().backward()
        return out, weight.grad

    assert_same_story(story, chunks)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("as_list", [True, False])
@each_split
def test_ctc_lengths(chunks: int, as_list: bool, reduction: str) -> None:
    """CTC: its lengths are a list with one entry a row, its mean divides by each of them."""

    def story(lazy: Lazy) -> Any:
        head = nn.Linear(6, 5).double()
        x = lazy(torch.randn(9, N_ROWS, 6, dtype=DOUBLE), batch=1)
        target = lazy(torch.randint(1, 5, (N_ROWS, 3)))
        of_input, of_target = [9 - i % 3 for i in range(N_ROWS)], [1 + i % 3 for i in range(N_ROWS)]
        lengths: Any = (of_input, of_target)
        if not as_list:
            lengths = lazy(torch.tensor(of_input), torch.tensor(of_target))
        log_p = head(x).log_softmax(-1)
        loss = F.ctc_loss(log_p, target, *lengths, reduction=reduction)
        loss.sum().backward()
        return loss, gradients(head)

    assert_same_story(story, chunks)


@pytest.mark.parametrize("enforce_sorted", [True, False])
@each_split
def test_packed_lengths(chunks: int, enforce_sorted: bool) -> None:
    """pack_padded_sequence: a list of lengths, and a value whose shape depends on it."""

    def story(lazy: Lazy) -> Any:
        rnn = nn.GRU(6, 4, batch_first=True).double()
        x = lazy(torch.randn(N_ROWS, 5, 6, dtype=DOUBLE))
        lengths = [5 - i * 5 // N_ROWS for i in range(N_ROWS)]
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=enforce_sorted)
        out, h = rnn(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        (padded.pow(2).mean() + h.sum()).backward()
        return padded, h, gradients(rnn)

    assert_same_story(story, chunks)


# Places -----------------------------------------------------------------------------------------

PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "interleaved times doubled": lambda h: torch.repeat_interleave(h, 2, 0) * torch.cat([h, h]),
    "repeated times doubled": lambda h: h.repeat(2, 1) * torch.cat([h, h]),
    "interleaved twice": lambda h: h.repeat_interleave(2, 0) * h.repeat_interleave(2, dim=0),
    "all differences": lambda h: (h[:, None] - h[None, :]).pow(2).mean((0, 2)),
    "all pairs": lambda h: (h[:, :, None] * h.t()[None]).tanh(),
    "rows beside themselves": lambda h: h + h.sum(1)[None].t() + h.mean(1).view(-1, 1),
    "halves": lambda h: h[: len(h) // 2] * h[len(h) // 2 : len(h) // 2 * 2],
    "neighbours": lambda h: h[1:] - h[:-1],
    "every other": lambda h: h[::2].exp(),
    "reversed": lambda h: h * h.flip(0),
    "transposed twice": lambda h: h.t().reshape(3, -1).t().exp(),
    "reshaped across": lambda h: h.reshape(3, len(h)).exp(),
    "merged and split": lambda h: h.view(-1).view(len(h), -1).exp(),
    "stacked": lambda h: torch.stack([h, h * 2], dim=0).view(2 * len(h), 3).tanh(),
    "stacked inside": lambda h: torch.stack([h, h * 2], dim=1).view(2 * len(h), 3).tanh(),
    "unfolded": lambda h: h.unfold(0, 3, 2).tanh(),
    "as strided": lambda h: torch.as_strided(h, (len(h) - 1, 2, 3), (3, 3, 1)).tanh(),
    "chunked by Python": lambda h: torch.cat([part.tanh() for part in h.split(4)]),
    "triangular": lambda h: torch.tril(h).exp(),
    "diagonal": lambda h: torch.diagonal(h) * 2,
}


@pytest.mark.parametrize("name", PLACES)
@each_split
def test_places(chunks: int, name: str) -> None:
    """repeat_interleave(x, 2) * cat([x, x]); x[:, None] - x[None, :]; rows met askew."""

    def story(lazy: Lazy) -> Any:
        weight = leaf(6, 3)
        x = lazy(torch.randn(N_ROWS, 6, dtype=DOUBLE))
        out = PLACES[name](x @ weight)
        (out * torch.linspace(1, 2, out.numel(), dtype=DOUBLE).view(out.shape)).sum().backward()
        return out, weight.grad

    partly = "it has no row, and what it makes no rows" if name == "as strided" else ""
    assert_same_story(story, chunks, partly=partly)


@each_split
def test_time_major_slice_viewed(chunks: int) -> None:
    """x[:, :2].view(-1, D) is legal of the whole, whose batch is not outermost in memory."""

    def story(lazy: Lazy) -> Any:
        weight = leaf(6, 3)
        rows_first = torch.randn(N_ROWS, 4, 6, dtype=DOUBLE)
        time_first = torch.randn(4, N_ROWS, 6, dtype=DOUBLE).transpose(0, 1)
        last = torch.randn(4, 6, N_ROWS, dtype=DOUBLE)
        a, b = lazy(rows_first, time_first)
        c = lazy(last, batch=2)
        out = (a.view(-1, 6) @ weight).sum() + (
            b.transpose(0, 1)[:2].view(-1, 6) @ weight
        ).exp().sum()
        out = out + (c.view(24, -1).t() @ weight.repeat(4, 1)).pow(2).mean()
        out = out + (c[:2].view(2 * 6, -1).t() @ weight.repeat(2, 1)).tanh().sum()
        out.backward()
        return out, weight.grad, list(b.stride()), c.is_contiguous()

    assert_same_story(story, chunks)


@each_split
def test_index_looked_at_every_time(chunks: int) -> None:
    """x[idx] from one line: an arange first, then a permutation, then the same object changed."""

    def story(lazy: Lazy) -> Any:
        weight = leaf(6, 3)
        idx = torch.arange(N_ROWS)
        seen = []
        for turn in range(4):
            x, scale = lazy(torch.randn(N_ROWS, 6, dtype=DOUBLE), torch.rand(N_ROWS, 1).double())
            if turn == 1:
                idx = torch.randperm(N_ROWS)
            elif turn == 2:
                idx.copy_(torch.arange(N_ROWS).roll(1))
            elif turn == 3:
                idx = torch.arange(N_ROWS)
            out = (x @ weight)[idx] * scale
            picked = (x @ weight)[idx, torch.arange(N_ROWS) % 3]
            (out.pow(2).mean() + picked.mean()).backward()
            seen.append([out, picked])
        return seen, weight.grad

    assert_same_story(story, chunks)


@each_split
def test_arg_max_router(chunks: int) -> None:
    """A router's choice in float32 is the same in every pass over a row."""

    def story(lazy: Lazy) -> Any:
        torch.manual_seed(3)
        router, experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        x = lazy(torch.randn(N_ROWS, 16).repeat(1, 1))
        choice = router(x).argmax(-1)
        every = torch.stack([expert(x) for expert in experts], 1)
        chosen = every[torch.arange(len(x)), choice]
        loss = chosen.pow(2).mean().sqrt() * F.one_hot(choice, 4).float().mean(0).max()
        loss.backward()
        return choice, loss, gradients(router, experts)

    assert_same_story(story, chunks, tolerance=1e-4)
