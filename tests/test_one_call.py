# SPDX-License-Identifier: Apache-2.0
"""One call that was not recorded made a whole program run at once: each, between two layers, is.

A case is a function of a step `h` (12 rows) on the way from the batch to the loss. It gives eager's
loss and gradients in any number of chunks, and no product is computed before backward() is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from oracle import FlopCounter, assert_bits, assert_close, eager, plain, split
from outcome import weights

N_ROWS = 12

WEIGHT = weights((6, 4), torch.float64) - 1
BOUNDS = torch.tensor([-0.4, 0.1, 0.3], dtype=torch.float64)
EMPTY = torch.tensor([])
NOTHING = torch.zeros(N_ROWS, 6, dtype=torch.bool)
LABELS = torch.arange(N_ROWS) * 5 % 6
SIGNS = torch.where(torch.arange(N_ROWS) % 3 > 1, 1, -1)


def log_likelihoods(h: Tensor) -> Tensor:
    """Return 4 steps of 6 classes, in rows of dim 1."""
    return h.log_softmax(1)[None].expand(4, -1, -1).contiguous()


def lengths(size: int) -> Tensor:
    """Return the lengths of all rows, as int32."""
    return torch.full((N_ROWS,), size, dtype=torch.int32)


def assigned(h: Tensor, index: Any) -> Tensor:
    """Return a copy with zeros at an index."""
    copy = h.clone()
    copy[index] = 0.0
    return copy


def assigned_where(h: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """Return a copy with values where a mask is True."""
    copy = h.clone()
    copy[mask] = value
    return copy


def written(h: Tensor, into: Tensor, value: Any, *index: Tensor) -> Tensor:
    """Return zeros into which rows are written, at an index or else at their largest entries."""
    into[index or (torch.arange(N_ROWS), h.argmax(1))] = value
    return into


#: name: the call
CASES: dict[str, Callable[[Tensor], Any]] = {
    "addmm": lambda h: torch.addmm(WEIGHT[0], h, WEIGHT),
    "atleast_1d": lambda h: torch.atleast_1d(h[:, 0], h),
    "atleast_2d": lambda h: torch.atleast_2d(h[:, 0]),
    "atleast_3d": lambda h: torch.atleast_3d(h),
    "broadcast_to": lambda h: torch.broadcast_to(h[:, None], (N_ROWS, 2, 6)),
    "broadcast_to, a method": lambda h: h[:, None].broadcast_to(N_ROWS, 2, 6),
    "bucketize": lambda h: WEIGHT.mean(0)[torch.bucketize(h.amax(1), BOUNDS)],
    "bucketize from the right": lambda h: torch.bucketize(h, BOUNDS, right=True) * h,
    "bucketize as int32": lambda h: torch.bucketize(h, BOUNDS, out_int32=True),
    "bucketize a mean": lambda h: torch.bucketize(h.mean(), BOUNDS),
    "cat, a key cache that is empty": lambda h: torch.cat([EMPTY, h.unflatten(1, (2, 3))], -2),
    "concat with an empty": lambda h: torch.concat([h, torch.tensor([], dtype=h.dtype), h], 1),
    "concatenate with an empty": lambda h: torch.concatenate((EMPTY, h), dim=1),
    "cat with an empty along the rows": lambda h: torch.cat([EMPTY, h]),
    "column_stack": lambda h: torch.column_stack([h, h[:, 0]]),
    "no rows, by an empty range": lambda h: torch.cat([h, h[range(0)]]),
    "no rows, by an empty list": lambda h: torch.cat([h, h[[]]]) + h[:, []].sum(),
    "nothing assigned, by an empty range": lambda h: assigned(h, range(0)),
    "nothing assigned, by an empty list": lambda h: assigned(h, (slice(None), [])),
    "is_complex of a value whose strides are not known": lambda h: (
        h if torch.special.i0(h).is_complex() else h * torch.special.i0(h).element_size()
    ),
    "ctc_loss with int32": lambda h: F.ctc_loss(
        log_likelihoods(h), torch.ones(N_ROWS, 2, dtype=torch.int32), lengths(4), lengths(2)
    ),
    "ctc_loss with targets in one line": lambda h: F.ctc_loss(
        log_likelihoods(h), LABELS, lengths(4), torch.arange(N_ROWS) % 3, zero_infinity=True
    ),
    "diff": lambda h: torch.diff(h, 2),
    "diff with more": lambda h: h.diff(prepend=h[:, :1], append=h[:, :2]),
    "diff of a mask": lambda h: torch.diff(h > 0.2) * h[:, 1:],
    "dsplit": lambda h: h.unflatten(1, (1, 6)).dsplit([1, 4]),
    "dstack": lambda h: torch.dstack([h, h]),
    "einsum of one": lambda h: torch.einsum("bi->ib", h),
    "einsum of one, of a diagonal": lambda h: torch.einsum("bii->b", h[:, :4].unflatten(1, (2, 2))),
    "einsum of one, summed": lambda h: torch.einsum("bij->bj", h.unflatten(1, (2, 3))),
    "einsum of one, without result": lambda h: torch.einsum("ba", h),
    "fill_diagonal_": lambda h: (h * 1).fill_diagonal_(0.5),
    "fill_diagonal_ that begins again": lambda h: (h * 1).fill_diagonal_(-float("inf"), True).exp(),
    "fliplr": lambda h: torch.fliplr(h),
    "flipud": lambda h: torch.flipud(h.T),
    "gather of nothing": lambda h: h.gather(1, h[:, :0].long()).sum(1) + h[:, 0],
    "hsplit": lambda h: torch.hsplit(h, 2),
    "hstack": lambda h: torch.hstack([h, h]),
    "hstack of values whose strides are not known": lambda h: torch.hstack(
        [torch.special.i0(h.T).T, h, WEIGHT.new_ones(N_ROWS, 1)]
    ),
    "imag": lambda h: torch.view_as_complex(h.unflatten(1, (3, 2))).imag,
    "index_put": lambda h: torch.index_put(
        h, (torch.arange(N_ROWS), h.argmax(1)), EMPTY.new_zeros(()).double()
    ),
    "index_put_": lambda h: (h * 1).index_put_(
        (torch.arange(N_ROWS), LABELS), EMPTY.new_ones(()).double()
    ),
    "labels as codes": lambda h: written(h, torch.zeros(N_ROWS, 6), 1),
    "labels as codes, by several": lambda h: written(
        h, torch.zeros(N_ROWS, 6), 1, torch.arange(N_ROWS)[:, None], h.topk(2).indices
    ),
    "entries of each row": lambda h: written(h, h.new_zeros(N_ROWS, 6, 6), h),
    "entries of each row, of columns": lambda h: written(
        h, h.new_zeros(6, N_ROWS), h[:, 0], h.argmax(1), torch.arange(N_ROWS)
    ),
    "entries of each row, at plain indices": lambda h: written(
        h, h.new_zeros(N_ROWS, N_ROWS), h[:, 0], torch.arange(N_ROWS), LABELS
    ),
    "linalg.norm": lambda h: torch.linalg.norm(h, dim=1),
    "linalg.norm of all": lambda h: torch.linalg.norm(h),
    "linalg.norm of an order": lambda h: torch.linalg.norm(h, 1, 1, keepdim=True),
    "margin_ranking_loss with ints": lambda h: F.margin_ranking_loss(h[:, 0], h[:, 1], SIGNS),
    "mm": lambda h: torch.mm(h, WEIGHT),
    "nothing assigned, by a mask": lambda h: assigned_where(h, NOTHING, h[NOTHING]),
    "nothing assigned, by a mask of rows": lambda h: assigned_where(
        h, NOTHING[:, 0], h[NOTHING[:, 0]] * 2
    ),
    "nothing scattered": lambda h: h.masked_scatter(NOTHING, h.detach()),
    "nothing scattered, of values with a gradient": lambda h: h.masked_scatter(NOTHING, h.flip(1)),
    "numpy index": lambda h: h[:, np.array([0, 2])],
    "numpy mask": lambda h: h[:, np.array([True, False, True, False, True, False])],
    "range index": lambda h: h[:, range(0, 6, 2)],
    "range index, a label of each row": lambda h: h[range(h.shape[0]), LABELS],
    "range index, assigned": lambda h: assigned(h, (range(N_ROWS), LABELS)),
    "repeat_interleave": lambda h: h.repeat_interleave(2, 1, output_size=12),
    "repeat_interleave of rows": lambda h: torch.repeat_interleave(
        h, 2, dim=0, output_size=2 * N_ROWS
    ),
    "isfinite": lambda h: torch.isfinite(h / (h > -0.5)),
    "movedim": lambda h: h.unflatten(1, (2, 3)).movedim((0, 2), (1, 0)),
    "nanmean": lambda h: torch.where(h > 0.1, h, torch.nan).nanmean(0),
    "outer": lambda h: torch.outer(h[:, 0], WEIGHT[:, 0]),
    "rfft": lambda h: torch.fft.rfft(h, 8).abs(),
    "rfft2, and back": lambda h: torch.fft.irfft2(torch.fft.rfft2(h.unflatten(1, (2, 3)))),
    "tensordot": lambda h: torch.tensordot(h.unflatten(1, (2, 3)), WEIGHT[:3], 1),
    "tensordot of values whose strides are not known": lambda h: torch.tensordot(
        torch.fft.fft(h.unflatten(1, (2, 3)).mT, dim=1).real, WEIGHT[:2], 1
    ),
    "tensordot over two dims": lambda h: torch.tensordot(
        h.unflatten(1, (2, 3)).mT, WEIGHT.view(3, 2, -1), 2
    ),
    "take_along_dim": lambda h: torch.take_along_dim(h, h.argsort(1)[:, :2], 1),
    "tile": lambda h: h.tile(2),
    "trapezoid": lambda h: torch.trapezoid(h.square(), h, dim=1),
    "tensor_split": lambda h: h.tensor_split(4, 1),
    "tensor_split at": lambda h: torch.tensor_split(h, (2, 3), dim=1),
    "to_dense": lambda h: h.to_dense(),
    "to_dense of a dtype": lambda h: h.to_dense(torch.float32),
    "vsplit": lambda h: torch.vsplit(h, [3, 7]),
    "vstack": lambda h: torch.vstack([h, h]),
}


def step(call: Callable[[Tensor], Any], lazy: Callable[..., Any]) -> tuple[list[Tensor], int]:
    """Return the loss and the gradients of a step, and the flops before its backward()."""
    first = weights((5, 6), torch.float64).clone().requires_grad_()
    second = (weights((6,), torch.float64).cumsum(0) / 7).requires_grad_()
    counter = FlopCounter()
    with counter:
        h = (lazy(weights((N_ROWS, 5), torch.float64) - 1) @ first).tanh() * second
        result = call(h)
        parts = result if isinstance(result, tuple | list) else [result]
        loss = h.square().mean()
        for part in parts:
            part = torch.view_as_real(part) if part.is_complex() else part
            loss = loss + (part.double() + 0.3).square().mean()
        n_flops = counter.flops
    loss.backward()
    assert first.grad is not None and second.grad is not None
    return [loss.detach(), first.grad, second.grad], n_flops


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("name", CASES)
def test_is_recorded(name: str, chunks: int) -> None:
    """It has eager's numbers, and the program is cut."""
    wanted, _ = step(CASES[name], eager)
    with split(chunks):
        got, n_flops = step(CASES[name], koila.lazy)
    report = koila.report()
    assert n_flops == 0 or chunks == 1, "the layer before it ran at once"
    assert report is not None and report.n_chunks == chunks
    for number, (value, want) in enumerate(zip(got, wanted, strict=True)):
        compare = assert_bits if chunks == 1 else assert_close
        compare(plain(value), want, f"number {number}")


@pytest.mark.parametrize("chunks", [1, 3])
def test_is_recorded_in_inference_mode(chunks: int) -> None:
    """ATen's calls are seen there, too."""
    x = weights((N_ROWS, 4), torch.float64)
    with split(chunks), torch.inference_mode():
        parts = torch.hstack([koila.lazy(x), torch.ones(N_ROWS, 1)]).diff().hsplit(2)
        assert all(type(part) is koila.LazyTensor for part in parts)
        got = [plain(part) for part in parts]
        report = koila.report()
        assert report is not None and report.n_chunks == chunks
        wanted = torch.hstack([x, torch.ones(N_ROWS, 1)]).diff().hsplit(2)
    for part, want in zip(got, wanted, strict=True):
        assert_bits(part, want, "a part")


#: Cases of which nothing runs on the whole batch begin so.
BEGINNINGS = "nothing scattered", "bucketize", "gather of", "index_put", "labels as", "entries of"
BY_ROWS = [name for name in CASES if name.startswith(BEGINNINGS) and "mean" not in name]


@pytest.mark.parametrize("name", BY_ROWS)
def test_runs_by_rows(name: str) -> None:
    """No call of it runs on the whole batch."""
    with split(3):
        step(CASES[name], koila.lazy)
    report = koila.report()
    assert report is not None and report.n_chunks == 3
    assert [one for program in report.programs for one in program.whole] == []


#: What autocast casts before ATen composes it: calls on values in bfloat16.
CAST_FIRST: dict[str, Callable[[Tensor], Tensor]] = {
    "linalg_vecdot": lambda h: torch.linalg.vecdot(h, h),
    "margin_ranking_loss": lambda h: F.margin_ranking_loss(
        h[:, 0], h[:, 1], SIGNS.long(), reduction="none"
    ),
    "rfft": lambda h: torch.fft.rfft(h).abs(),
    "polar": lambda h: torch.polar(h.abs(), h).real,
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", CAST_FIRST)
def test_what_autocast_casts_before_it_is_composed(name: str, chunks: int) -> None:
    def run(lazy: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = CAST_FIRST[name](layer(lazy(torch.randn(len(SIGNS), 4))))
        made.pow(2).sum().backward()
        assert layer.weight.grad is not None
        return made.detach() * 1, layer.weight.grad

    with koila.config(chunks=chunks):
        made, gradient = run(koila.lazy)
    wanted, wanted_gradient = run(lambda x: x)
    assert made.dtype == wanted.dtype
    torch.testing.assert_close(made, wanted)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=0.05, atol=0.05)
