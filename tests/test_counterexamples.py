# SPDX-License-Identifier: Apache-2.0
"""Programs that break a naive splitter by how rows are split and joined again: one test each.

Those about where the rows are in memory and beside what are in `test_counterexamples_rows.py`,
those about state in `test_counterexamples_state.py` and `test_counterexamples_unseen.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from oracle import (
    Lazy,
    assert_gradient_of_loss,
    assert_reproducible,
    assert_same,
    assert_same_story,
    chunk_sizes,
    gradients,
    split,
)
from programs import BARRIER, ONE_PASS
from programs_vision import DropoutMlp
from stories import N_ROWS, make

pytestmark = pytest.mark.sanitize

DOUBLE = torch.float64
each_split = pytest.mark.parametrize("chunks", [2, 3, 7, N_ROWS])


def leaf(*shape: int) -> Tensor:
    """Return a leaf that wants its gradient, from the global generator."""
    return torch.randn(*shape, dtype=DOUBLE, requires_grad=True)


# Draws ------------------------------------------------------------------------------------------


@each_split
def test_info_nce_with_two_dropouts(chunks: int) -> None:
    """InfoNCE with two dropouts: the second pass sees the masks of the first."""
    (program,) = (program for program in BARRIER if program.name == "info_nce_dropout")
    assert_same(program, N_ROWS, chunks=chunks)
    assert_reproducible(program, N_ROWS, chunks=chunks)
    assert_gradient_of_loss(program, N_ROWS, chunks=chunks)


@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 7, N_ROWS])
def test_plain_draw_after_a_recorded_one(chunks: int | None) -> None:
    """A plain randn between a recorded dropout and its replay: eager's numbers."""

    def story(lazy: Lazy) -> Any:
        model, x, y = DropoutMlp().double(), *make()[1:]
        x, y = lazy(x, y)
        out = model(x)
        noise = torch.randn(len(x), 5, dtype=DOUBLE)
        loss = F.cross_entropy(out + noise, y)
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 7, N_ROWS])
def test_diffusion(chunks: int | None) -> None:
    """noise = randn_like(x); t = randint(...): drawn when recorded, so eager's own bits."""
    for name in ("diffusion", "vae", "gan_generator"):
        (program,) = (program for program in ONE_PASS if program.name == name)
        assert_same(program, N_ROWS, chunks=chunks)


# What looks linear ------------------------------------------------------------------------------


@each_split
def test_detached_mean_is_no_constant(chunks: int) -> None:
    """a.mean() * b.mean().detach(): the gradient needs the value of b's mean."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        out = model(x)
        loss = F.cross_entropy(out, y) * (out**2).mean().detach()
        loss = loss + out.mean() * out.data.std()
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


@pytest.mark.parametrize("level", [0.5, 1.0, 1.6, 3.0])
@each_split
def test_flooding(chunks: int, level: float) -> None:
    """(loss - b).abs(): the sign is that of the value, not of a placeholder."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        loss = (F.cross_entropy(model(x), y) - level).abs() + level
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_mask_from_the_logits(chunks: int) -> None:
    """FixMatch: sum / mask.sum() with a mask that the model's values make."""

    def story(lazy: Lazy) -> Any:
        model, x, _ = make()
        x = lazy(x)
        out = model(x)
        confidence, label = out.detach().softmax(-1).max(-1)
        mask = confidence.ge(confidence.median()).to(out.dtype)
        losses = F.cross_entropy(model(x + 0.1), label, reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_loss_multiplied_after_it_was_read(chunks: int) -> None:
    """.item(), then loss * 65536 in half precision: no gradient may have been kept from before."""

    def story(lazy: Lazy) -> Any:
        model, x, _ = make(torch.float16)
        x = lazy(x)
        loss = (model(x).float() * 1e-3).pow(2).mean()
        read = loss.item()
        (loss * 65536.0).backward()
        return read, gradients(model)

    assert_same_story(story, chunks, tolerance=1e-2)


# Reductions -------------------------------------------------------------------------------------

TIED = [0.0, 3.0, 1.0, 3.0, 2.0, 3.0, 1.0, 0.0, 3.0, 2.0, 1.0]

EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda h: h.amax(0),
    "amin": lambda h: (-h).amin(dim=0),
    "max": lambda h: h.max(),
    "max_dim": lambda h: h.max(dim=0).values,
    "max_all": lambda h: torch.amax(h),
    "inf_norm": lambda h: h.norm(float("inf")),
    "inf_norm_dim": lambda h: torch.linalg.vector_norm(h, float("inf"), dim=0),
    "min_norm": lambda h: torch.linalg.vector_norm(h + 1, -float("inf")),
    "minimum": lambda h: torch.minimum(h.amax(0), h.amax(0) * 1.0),
    "median": lambda h: h.median(dim=0).values,
    "argmax": lambda h: h[h.argmax(dim=0), torch.arange(h.shape[1])],
    "sort": lambda h: h.sort(dim=0, stable=True).values[:4],
    "topk": lambda h: h.topk(3, dim=0).values,
    "cummax": lambda h: h.cummax(dim=0).values,
    "quantile": lambda h: h.quantile(0.8, dim=0),
    "kthvalue": lambda h: h.kthvalue(4, dim=0).values,
    "logcumsumexp": lambda h: h.logcumsumexp(dim=0),
    "cumprod": lambda h: (h + 0.5).cumprod(dim=0),
}


@pytest.mark.parametrize("name", EXTREMES)
@each_split
def test_extremes_with_ties(chunks: int, name: str) -> None:
    """amax, max and norms share the gradient among ties, wherever the chunks end."""

    def story(lazy: Lazy) -> Any:
        weight = leaf(1, 4)
        x = torch.tensor(TIED, dtype=DOUBLE)[:, None].expand(-1, 4).clone()
        x.requires_grad_()
        h = lazy(x) * (weight * 0 + 1)
        out = EXTREMES[name](h)
        (out * torch.linspace(1, 2, out.numel(), dtype=DOUBLE).view(out.shape)).sum().backward()
        return out, x.grad, weight.grad

    assert_same_story(story, chunks)


@pytest.mark.parametrize("infinite", [[0], [0, 1, 2, 3], [5, 10], list(range(N_ROWS))])
@each_split
def test_logsumexp_of_nothing(chunks: int, infinite: list[int]) -> None:
    """A chunk whose rows are all -inf adds nothing, and has no NaN for a gradient."""

    def story(lazy: Lazy) -> Any:
        x = torch.randn(N_ROWS, 3, dtype=DOUBLE)
        x[infinite] = float("-inf")
        x.requires_grad_()
        h = lazy(x) + 0.0
        out = h.logsumexp(dim=0)
        out.sum().backward()
        return out, x.grad

    assert_same_story(story, chunks)


MOMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "std": lambda h: h.std(0),
    "std_biased": lambda h: h.std(0, correction=0),
    "var": lambda h: h.var(dim=0),
    "var_all": lambda h: h.var(),
    "var_mean": lambda h: torch.stack(torch.var_mean(h, dim=0, correction=0)),
    "std_mean": lambda h: torch.stack(torch.std_mean(h)),
    "var_correction": lambda h: h.var(0, correction=2, keepdim=True),
    "norm": lambda h: h.norm(dim=0),
    "frobenius": lambda h: h.norm(),
    "cov": lambda h: torch.cov(h.T),
    "corrcoef": lambda h: torch.corrcoef(h.T),
    "nansum": lambda h: h.nansum(0),
    "nanmean": lambda h: torch.where(h > 0.1, h, torch.nan).nanmean(0),
}


@pytest.mark.parametrize("shift", [0.0, 1e4])
@pytest.mark.parametrize("name", MOMENTS)
@each_split
def test_moments(chunks: int, name: str, shift: float) -> None:
    """std and var of chunks of one row, and far from zero, are those of the batch."""

    def story(lazy: Lazy) -> Any:
        weight = leaf(6, 3)
        x = lazy(torch.randn(N_ROWS, 6, dtype=DOUBLE))
        out = MOMENTS[name](x @ weight + shift)
        (out * torch.linspace(1, 2, out.numel(), dtype=DOUBLE).view(out.shape)).sum().backward()
        return out, weight.grad

    partly = "it has no row, and what it makes no rows" if name in ("cov", "corrcoef") else ""
    assert_same_story(story, chunks, tolerance=1e-10 if shift == 0 else 1e-8, partly=partly)


def test_moments_of_one_row() -> None:
    """The std of a batch of one row is eager's NaN, and koila's too."""

    def story(lazy: Lazy) -> Any:
        weight = leaf(6, 3)
        out = (lazy(torch.randn(1, 6, dtype=DOUBLE)) @ weight).var(0, correction=0)
        out.sum().backward()
        return out, weight.grad

    for chunks in (1, 3):
        assert_same_story(story, chunks, exact_bits=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each_split
def test_low_precision_mean(chunks: int, dtype: torch.dtype) -> None:
    """The mean of many halves is 100, where the sum of half of them is no number any more."""

    def story(lazy: Lazy) -> Any:
        x = torch.full((2200, 3), 100.0, dtype=dtype).requires_grad_()
        loss = lazy(x).mean()
        loss.backward()
        return loss, x.grad

    assert_same_story(story, chunks, tolerance=torch.finfo(dtype).eps)


@pytest.mark.parametrize("chunks", [2, 7, 64])
def test_many_chunks_of_bfloat16(chunks: int) -> None:
    """bfloat16 parameters over 64 chunks are as near to the truth as over one."""
    torch.manual_seed(0)
    weight = torch.randn(8, 8).bfloat16()
    x = torch.randn(512, 8).bfloat16()

    def gradient(dtype: torch.dtype, lazy: Lazy) -> Tensor:
        parameter = weight.to(dtype, copy=True).requires_grad_()
        (lazy(x.to(dtype)) @ parameter).tanh().pow(2).sum().backward()
        assert parameter.grad is not None
        return parameter.grad.double()

    def error(found: Tensor) -> float:
        return float((found - truth).norm() / truth.norm())

    truth = gradient(torch.float64, lambda *objs: objs[0])
    eager_error = error(gradient(torch.bfloat16, lambda *objs: objs[0]))
    with split(chunks):
        assert error(gradient(torch.bfloat16, koila.lazy)) <= 1.5 * eager_error


@pytest.mark.parametrize("valid", [[], [0], [3], [0, 1, 2], [10], list(range(N_ROWS))])
@pytest.mark.parametrize("options", [{}, {"weight": True}, {"label_smoothing": 0.2}], ids=str)
@each_split
def test_ignored_labels(chunks: int, options: dict[str, Any], valid: list[int]) -> None:
    """Where a chunk has no valid label nothing is NaN; where the batch has none, eager is NaN."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        kept = torch.full_like(y, -100)
        kept[valid] = y[valid]
        how = options | ({"weight": torch.arange(5.0, dtype=DOUBLE)} if "weight" in options else {})
        x, kept = lazy(x, kept)
        loss = F.cross_entropy(model(x), kept, **how)
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


PARTIALS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda h: h.sum(0),
    "mean": lambda h: h.mean((0, 1)),
    "prod": lambda h: h.prod(dim=0),
    "prod_with_zeros": lambda h: (h * (h > 0)).prod(dim=0),
    "two_norm": lambda h: h.norm(2, dim=0),
    "one_norm": lambda h: torch.linalg.vector_norm(h, 1),
    "any": lambda h: torch.where((h > 2).any(), h.sum(), h.mean()),
    "all": lambda h: torch.where((h < 9).all(dim=0), h.sum(0), h.mean(0)),
    "count": lambda h: h.sum() / (h > 0).sum(),
    "count_nonzero": lambda h: h.mean() * torch.count_nonzero(h > 0),
    "mean_of_mean": lambda h: h.mean(1).mean(),
    "keepdim": lambda h: (h - 1).sum(dim=0, keepdim=True).mean(),
    "squeezed": lambda h: h[:, :1].squeeze().sum(),
    "einsum": lambda h: torch.einsum("bi,bj->ij", h, h),
    "matmul": lambda h: h.T @ h,
    "bilinear": lambda h: (h.unsqueeze(2) * h.unsqueeze(1)).sum(0),
}


@pytest.mark.parametrize("name", PARTIALS)
@each_split
def test_partial_reductions(chunks: int, name: str) -> None:
    """Sums, products, norms, any and all over the batch, from those over the chunks."""

    def story(lazy: Lazy) -> Any:
        weight = leaf(6, 3)
        x = lazy(torch.randn(N_ROWS, 6, dtype=DOUBLE))
        out = PARTIALS[name](x @ weight)
        out.pow(2).sum().sqrt().backward()
        return out, weight.grad

    assert_same_story(story, chunks)


def test_tied_rows_are_enough() -> None:
    """The ties above do fall unevenly in some chunks: the counterexample is one."""
    counts = set()
    for sizes in (chunk_sizes(N_ROWS, n) for n in (2, 3, 7)):
        ends = list(itertools.accumulate(sizes, initial=0))
        counts |= {TIED[a:b].count(3.0) for a, b in itertools.pairwise(ends) if 3.0 in TIED[a:b]}
    assert len(counts) > 1


# Hooks -------------------------------------------------------------------------------------------


@each_split
def test_hook_on_an_activation(chunks: int) -> None:
    """h.register_hook(lambda g: g / g.norm()): the norm is of the gradient of all rows."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        calls = []
        h = model.body(x)
        h.register_hook(lambda g: calls.append(tuple(g.shape)) or g / g.norm())
        mean = h.mean()
        mean.register_hook(lambda g: calls.append(tuple(g.shape)) or g * 3)
        (F.cross_entropy(model.head(h), y) + mean).backward()
        return calls, gradients(model)

    assert_same_story(story, chunks)
