# SPDX-License-Identifier: Apache-2.0
"""partials.py: what chunks compute and how it is joined, against torch on the whole batch.

Values and gradients, for one chunk, for uneven chunks and for chunks of one row. In float64 they
agree to rounding; half types to what their own rounding allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import koila
from koila import _core
from koila.reductions import norms, sums
from koila.reductions.partials import REDUCTIONS
from koila.reductions.reduction import Call, Reduction
from koila.staged.program import Program
from opcalls import N_PARTS

inf, nan = torch.inf, torch.nan
SIGNATURES = {row["name"]: row["call"] for row in _core.op_table()}
nn, flat = torch._C._nn, torch._C._VariableFunctions
norm = torch._C._linalg.linalg_vector_norm


def splits(rows: int) -> Iterator[list[int]]:
    yield [rows]
    yield [1] * rows
    if rows > 2:
        yield [1, rows - 1]
        yield [rows - 2, 2]


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def plain(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64)


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def copied(args: tuple[Any, ...]) -> list[Any]:
    return [
        a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
        for a in args
    ]


def gradients(outs: tuple[torch.Tensor, ...], args: list[Any]) -> list[torch.Tensor | None]:
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    if not leaves:
        return []
    weights = [torch.linspace(1, 2, o.numel(), dtype=o.dtype).view(o.shape) for o in outs]
    return list(torch.autograd.grad(outs, leaves, weights, allow_unused=True))


def run_chunks(
    kind: str,
    call: Call,
    args: list[Any],
    dims: dict[int, int],
    sizes: list[int],
) -> tuple[torch.Tensor, ...]:
    """Run `call` on chunks of the arguments numbered in `dims`, cut at those dims."""
    reduction = REDUCTIONS[kind]
    chunks = []
    start = 0
    for n in sizes:
        parts = [a.narrow(dims[k], start, n) if k in dims else a for k, a in enumerate(args)]
        chunks.append(Call(call.func, tuple(parts), call.kwargs, call.signature, call.dtype))
        start += n
    by_chunk = [reduction.partials(range(N_PARTS[kind]), chunk) for chunk in chunks]
    partials = [list(of_all) for of_all in zip(*by_chunk, strict=True)]
    return as_tuple(reduction.combine(partials, call))


def check(
    kind: str,
    row: str,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    dims: dict[int, int] | None = None,
    tolerance: float = 1e-12,
) -> None:
    kwargs, dims = kwargs or {}, dims or {0: 0}
    whole = copied(args)
    expected = as_tuple(func(*whole, **kwargs))
    expected_grads = gradients(expected, whole)
    first = next(iter(dims))
    call = Call(func, args, kwargs, SIGNATURES[row], expected[0].dtype)
    for sizes in splits(args[first].shape[dims[first]]):
        mine = copied(args)
        got = run_chunks(kind, call, mine, dims, sizes)
        same(got, expected, tolerance)
        same(gradients(got, mine), expected_grads, tolerance)


def same(actual: Any, expected: Any, tolerance: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        if (a is None) != (b is None):
            assert not (a if a is not None else b).any()
        elif a is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


OVER = [{}, {"dim": 0}, {"dim": (0, 2)}, {"dim": 0, "keepdim": True}, {"dim": [-3, 1]}]


@pytest.mark.parametrize("over", OVER, ids=str)
def test_sum_and_mean(over: dict[str, Any]) -> None:
    check("SUM", "sum", torch.sum, (f(7, 3, 4),), over)
    check("SUM", "nansum", torch.nansum, (f(7, 3, 4),), over)
    check("MEAN", "mean", torch.mean, (f(7, 3, 4),), over)


def test_words_of_numpy_and_of_methods() -> None:
    check("SUM", "sum", torch.Tensor.sum, (f(7, 3),), {"axis": 0, "keepdims": True})
    check("MEAN", "mean", torch.Tensor.mean, (f(7, 3), 0, True))
    check("MEAN", "mean", torch.mean, (torch.arange(7),), {"dtype": torch.float64})


@pytest.mark.parametrize("over", OVER, ids=str)
@pytest.mark.parametrize("correction", [{}, {"correction": 0}, {"correction": 2.5}], ids=str)
def test_var(over: dict[str, Any], correction: dict[str, Any]) -> None:
    for name in ("var", "std", "var_mean", "std_mean"):
        check("VAR", name, getattr(torch, name), (f(7, 3, 4),), {**over, **correction})


def test_var_of_few_rows_and_of_equal_ones() -> None:
    check("VAR", "var", torch.var, (f(1, 3),), {"dim": 1})
    check("VAR", "std", torch.std, (torch.ones_like(f(5, 3)).requires_grad_(),), {"dim": 0})
    check("VAR", "std", torch.std, (f(7, 3), False))
    check("VAR", "std", torch.Tensor.std, (f(7, 3), 0, False, True))
    far = (f(9, 2).detach() + 1e7).requires_grad_()
    check("VAR", "var", torch.var, (far, 0), tolerance=1e-7)
    complex_ = torch.randn(5, 3, dtype=torch.complex128, requires_grad=True)
    check("VAR", "var_mean", torch.var_mean, (complex_.detach(), 0))
    check("VAR", "var", torch.var, (complex_, 0))


TIES = [[1.0, 5, 5], [5, 2, 0], [5, 5, 5], [0, 5, 1], [5, 0, 5]]


def test_moments_of_a_batch_have_the_gradients_of_a_variance() -> None:
    """They are combined by a function with a backward of its own, unless a number is not finite."""
    chunks = [torch.randn(n, 5) * 3 + 7 for n in (8, 5, 1, 9)]
    words = {"correction": 0, "dtype": torch.float32}
    signature = "input, dim=None, *, correction=1, keepdim=False, dtype=None"
    call = Call(norms.batch_moments, (None, [0]), words, signature, torch.float32)
    ns = [torch.tensor(float(len(chunk)), dtype=torch.float64) for chunk in chunks]
    means = [chunk.mean(0).requires_grad_() for chunk in chunks]
    squares = [(chunk - chunk.mean(0)).square().sum(0).requires_grad_() for chunk in chunks]
    weights = torch.randn(2, 5)
    found = []
    for reduction in (sums.Moments(), sums.Var()):
        parts = [[part.double() for part in of] for of in (ns, means, squares)]
        if type(reduction) is sums.Moments:
            parts = [ns, means, squares]
        var, mean = reduction.combine(parts, call)
        loss = (torch.stack([var, mean]) * weights).sum()
        found.append([var, mean, *torch.autograd.grad(loss, [*means, *squares])])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["amax", "amin", "max", "min"])
def test_extremes_share_ties_as_eager_does(name: str) -> None:
    func = getattr(torch, name)
    for values in (torch.tensor(TIES), torch.tensor(TIES) * 0.1, torch.randn(5, 3)):
        check("AMAX", name, func, (values.double().requires_grad_(),), tolerance=1e-15)
    if name.startswith("a"):
        ties = torch.tensor(TIES, dtype=torch.float64, requires_grad=True)
        check("AMAX", name, func, (ties, 0))
        check("AMAX", name, func, (ties, (0, 1), True))
    check("AMAX", name, func, (torch.tensor(TIES).int(),))
    check("AMAX", name, func, (torch.tensor(TIES) > 1,))


def test_extremes_keep_infinities_and_nan() -> None:
    x = torch.tensor(TIES, dtype=torch.float64)
    x[1, 0] = x[3, 1] = inf
    check("AMAX", "amax", torch.amax, (x.clone().requires_grad_(), 0))
    check("AMAX", "max", torch.max, (x.clone().requires_grad_(),))
    check("AMAX", "min", torch.min, ((-x).requires_grad_(),))
    x[2, 2] = nan
    check("AMAX", "max", torch.max, (x.clone().requires_grad_(),))
    check("AMAX", "amax", torch.amax, (x, 0))


def test_the_value_of_an_extreme_is_exact() -> None:
    x = torch.full((7, 1), 0.1, dtype=torch.float64)
    call = Call(torch.amax, (x,), {}, SIGNATURES["amax"], x.dtype)
    (got,) = run_chunks("AMAX", call, [x], {0: 0}, [1, 2, 4])
    assert got == 0.1


def test_logsumexp() -> None:
    for over in ({"dim": 0}, {"dim": (0, 2)}, {"dim": [0, 1], "keepdim": True}):
        check("LOGSUMEXP", "logsumexp", torch.logsumexp, (f(7, 3, 4),), over)
    check("LOGSUMEXP", "logsumexp", torch.logsumexp, (torch.arange(6), 0), tolerance=1e-6)


@pytest.mark.parametrize("shift", [-1000.0, 0.0, 1000.0])
def test_logsumexp_with_infinite_rows(shift: float) -> None:
    x = torch.randn(5, 3, dtype=torch.float64) + shift
    x[0] = -inf
    x[3, 1] = -inf
    check("LOGSUMEXP", "logsumexp", torch.logsumexp, (x.clone().requires_grad_(), 0))
    check("LOGSUMEXP", "logsumexp", torch.logsumexp, (x.clone().requires_grad_(), (0, 1)))
    check("LOGSUMEXP", "logsumexp", torch.logsumexp, (torch.full((4, 2), -inf), 0))
    x[2, 1] = inf
    check("LOGSUMEXP", "logsumexp", torch.logsumexp, (x, 0))


@pytest.mark.parametrize("p", [1, 2, 3, 0.5, 1.5, -1])
def test_norms(p: float) -> None:
    for over in ({}, {"dim": 0}, {"dim": (0, 1), "keepdim": True}):
        check("NORM", "linalg_vector_norm", norm, (f(7, 3), p), over)
    if p > 0:
        x = torch.randn(5, 3, dtype=torch.float64)
        x[0] = x[3] = 0
        check("NORM", "linalg_vector_norm", norm, (x.clone().requires_grad_(), p, 0))
        check("NORM", "linalg_vector_norm", norm, ((x * 0).requires_grad_(), p))


@pytest.mark.parametrize("n_zeros", [0, 1, 2])
def test_prod(n_zeros: int) -> None:
    x = torch.randn(5, 2, dtype=torch.float64)
    x.view(-1)[:n_zeros] = 0
    check("PROD", "prod", torch.prod, (x.clone().requires_grad_(),))
    check("PROD", "prod", torch.prod, (x.clone().requires_grad_(), 0))


def test_all_any_and_counts() -> None:
    x = torch.tensor([[1, 0], [1, 1], [1, 1]])
    for values in (x.bool(), x.to(torch.uint8), x.double()):
        check("ALL", "all", torch.all, (values, 0))
        check("ANY", "any", torch.any, (values,))
        check("COUNT", "count_nonzero", torch.count_nonzero, (values, 0))
        check("COUNT", "count_nonzero", torch.count_nonzero, (values,))


def test_products_over_the_rows() -> None:
    check("SUM", "matmul", torch.matmul, (f(3, 7), f(7, 2)), dims={0: 1, 1: 0})
    check("SUM", "linear", nn.linear, (f(3, 7), f(2, 7)), dims={0: 1, 1: 1})
    check("SUM", "dot", torch.dot, (f(7), f(7)), dims={0: 0, 1: 0})


# --- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", [1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weight", [None, plain(4) + 0.1], ids=["", "weight"])
def test_cross_entropy(reduction: int, smoothing: float, weight: torch.Tensor | None) -> None:
    func = nn.cross_entropy_loss
    for shape, labels in (((7, 4), (7,)), ((7, 4, 3), (7, 3)), ((7, 4, 2, 3), (7, 2, 3))):
        for ignored in (-100, 2):
            target = torch.randint(0, 4, labels)
            options = (weight, reduction, ignored, smoothing)
            both = {0: 0, 1: 0}
            check(
                "CROSS_ENTROPY", "cross_entropy_loss", func, (f(*shape), target, *options), {}, both
            )
            if len(shape) == 3:
                inner = {0: 2, 1: 1}
                check(
                    "CROSS_ENTROPY",
                    "cross_entropy_loss",
                    func,
                    (f(*shape), target, *options),
                    {},
                    inner,
                )
        likely = plain(*shape).requires_grad_()
        options = (weight, reduction, -100, smoothing)
        check(
            "CROSS_ENTROPY",
            "cross_entropy_loss",
            func,
            (f(*shape), likely, *options),
            {},
            {0: 0, 1: 0},
        )


@pytest.mark.parametrize("labels", [[-100] * 5, [-100, -100, 1, -100, 3]], ids=["all", "some"])
def test_cross_entropy_with_ignored_chunks(labels: list[int]) -> None:
    target = torch.tensor(labels)
    check(
        "CROSS_ENTROPY",
        "cross_entropy_loss",
        nn.cross_entropy_loss,
        (f(5, 4), target, None, 1),
        {},
        {0: 0, 1: 0},
    )


@pytest.mark.parametrize("reduction", [1, 2])
def test_losses(reduction: int) -> None:
    both, three = {0: 0, 1: 0}, {0: 0, 1: 0, 2: 0}
    signs = (plain(7, 3) > 0.5).double() * 2 - 1
    r = reduction
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        check("LOSS", name, getattr(nn, name), (f(7, 3), f(7, 3), r), {}, both)
        check("LOSS", name, getattr(nn, name), (f(3, 7), f(3, 7)), {"reduction": r}, {0: 1, 1: 1})
    check("LOSS", "kl_div", flat.kl_div, (f(7, 3), f(7, 3), r), {"log_target": True}, both)
    check("LOSS", "soft_margin_loss", nn.soft_margin_loss, (f(7, 3), signs, r), {}, both)
    check(
        "LOSS",
        "binary_cross_entropy_with_logits",
        flat.binary_cross_entropy_with_logits,
        (f(7, 3), plain(7, 3), plain(7, 1), plain(3), r),
        {},
        three,
    )
    labels = torch.randint(0, 3, (7,))
    margin = (f(7, 3), labels, 1, 1.0, plain(3), r)
    check("ROW_LOSS", "multi_margin_loss", nn.multi_margin_loss, margin, {}, both)
    many = torch.tensor([[0, 2, -1]] * 7)
    check(
        "ROW_LOSS",
        "multilabel_margin_loss",
        nn.multilabel_margin_loss,
        (f(7, 3), many, r),
        {},
        both,
    )
    triplet = (f(7, 3), f(7, 3), f(7, 3), 1.0, 2.0, 1e-6, True, r)
    check("ROW_LOSS", "triplet_margin_loss", flat.triplet_margin_loss, triplet, {}, three)
    cosine = (f(7, 3), f(7, 3), signs[:, 0], 0.1, r)
    check("ROW_LOSS", "cosine_embedding_loss", flat.cosine_embedding_loss, cosine, {}, three)
    ranking = (f(7), f(7), signs[:, 0], 0.1, r)
    check("LOSS", "margin_ranking_loss", flat.margin_ranking_loss, ranking, {}, three)


# --- half types ----------------------------------------------------------------------------------


def test_means_of_halves_do_not_overflow() -> None:
    x = torch.full((300, 100), 100.0, dtype=torch.float16, requires_grad=True)
    check("MEAN", "mean", torch.mean, (x,), tolerance=1e-3)
    pair = (x, torch.zeros_like(x).detach(), 1)
    check("LOSS", "mse_loss", nn.mse_loss, pair, {}, {0: 0, 1: 0}, tolerance=1e-3)


def test_many_chunks_of_halves_round_once() -> None:
    x = torch.rand(512, 4).bfloat16()
    call = Call(torch.sum, (x, 0), {}, SIGNATURES["sum"], x.dtype)
    (got,) = run_chunks("SUM", call, [x, 0], {0: 0}, [1] * 512)
    assert torch.equal(got, x.double().sum(0).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(dtype: torch.dtype) -> None:
    x = torch.randn(64, 3).to(dtype).requires_grad_()
    loose = 2e-2
    check("SUM", "sum", torch.sum, (x,), tolerance=loose)
    check("VAR", "std_mean", torch.std_mean, (x, 0), tolerance=loose)
    check("LOGSUMEXP", "logsumexp", torch.logsumexp, (x, 0), tolerance=loose)
    check("AMAX", "amax", torch.amax, (x, 0), tolerance=loose)
    check("NORM", "linalg_vector_norm", norm, (x,), tolerance=loose)
    check("PROD", "prod", torch.prod, (x, 0), tolerance=loose)
    target = torch.randint(0, 3, (64,))
    pair = (x, target, None, 1)
    check(
        "CROSS_ENTROPY", "cross_entropy_loss", nn.cross_entropy_loss, pair, {}, {0: 0, 1: 0}, loose
    )


# --- what the planner is told --------------------------------------------------------------------


def gradients_of_parts(
    reduction: Reduction, call: Call, parts: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients of two chunks' parts, which are not alike, where a chunk has any."""
    chunks = [
        [(p.detach() * (n + 1) + n).requires_grad_(p.requires_grad) for n in (0, 1)] for p in parts
    ]
    value = as_tuple(reduction.combine(chunks, call))[0].sum()
    leaves = [p for part in chunks for p in part if p.requires_grad]
    return list(torch.autograd.grad(value, leaves))


CALLS = {
    "SUM": ("sum", torch.sum, (f(4, 3),)),
    "MEAN": ("mean", torch.mean, (f(4, 3),)),
    "VAR": ("var", torch.var, (f(4, 3),)),
    "AMAX": ("amax", torch.amax, (f(4, 3), 0)),
    "LOGSUMEXP": ("logsumexp", torch.logsumexp, (f(4, 3), 0)),
    "NORM": ("linalg_vector_norm", norm, (f(4, 3),)),
    "PROD": ("prod", torch.prod, (f(4, 3),)),
    "CROSS_ENTROPY": (
        "cross_entropy_loss",
        nn.cross_entropy_loss,
        (f(4, 3), torch.arange(4) % 3, None, 1),
    ),
    "LOSS": ("mse_loss", nn.mse_loss, (f(4, 3), f(4, 3), 1)),
}


@pytest.mark.parametrize("kind", sorted(CALLS))
def test_a_linear_tail_is_linear_in_the_parts(kind: str) -> None:
    """What staging says of a reduction at the end is so of its parts: no gradient of one depends on
    what the scores made of any. A mean divides by its count, which no score changes."""
    row, func, args = CALLS[kind]
    reduction = REDUCTIONS[kind]

    def parts_of(scores: Tensor) -> list[Tensor]:
        call = Call(func, (scores, *args[1:]), {}, SIGNATURES[row], torch.float64)
        return list(reduction.partials(range(N_PARTS[kind]), call))

    call = Call(func, args, {}, SIGNATURES[row], torch.float64)
    parts, others = parts_of(args[0]), parts_of(args[0].detach().flip(0) * 2 + 1)
    before = gradients_of_parts(reduction, call, parts)
    is_linear = True
    for k, (part, other) in enumerate(zip(parts, others, strict=True)):
        if torch.equal(part, other):
            continue
        moved = list(parts)
        moved[k] = other.detach().requires_grad_(part.requires_grad)
        after = gradients_of_parts(reduction, call, moved)
        is_linear &= all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    lazy = koila.lazy(args[0].detach()) * torch.ones((), dtype=torch.float64, requires_grad=True)
    is_told = Program([func(lazy, *args[1:])]).is_tail_linear
    assert is_told == is_linear or (kind == "AMAX" and not is_told)  # a largest may stay one
