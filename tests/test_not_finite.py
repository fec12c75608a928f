# SPDX-License-Identifier: Apache-2.0
"""Infinities, nan, zeros and ties in the data: reductions have eager's values and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from oracle import assert_seen, eager

ROWS = 7
inf, nan = torch.inf, torch.nan
Op = Callable[[Tensor], Tensor]


def data() -> Tensor:
    return torch.randn(ROWS, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def put(*places: tuple[int, float]) -> Tensor:
    """Put numbers into the second column, by row."""
    x = data()
    for row, number in places:
        x[row, 1, 0] = number
    return x


def column(number: float) -> Tensor:
    x = data()
    x[:, 1] = number
    return x


def row(number: float) -> Tensor:
    x = data()
    x[3] = number
    return x


FILLED: dict[str, Callable[[], Tensor]] = {
    "finite": data,
    "nan": lambda: put((2, nan)),
    "nans": lambda: put((0, nan), (4, nan), (6, nan)),
    "nan at the end": lambda: put((6, nan)),
    "inf": lambda: put((2, inf)),
    "-inf": lambda: put((5, -inf)),
    "inf at the end": lambda: put((6, inf)),
    "infs": lambda: put((1, inf), (5, inf)),
    "opposite infs": lambda: put((1, inf), (5, -inf)),
    "nan and inf": lambda: put((0, nan), (6, inf)),
    "zero": lambda: put((3, 0)),
    "zeros": lambda: put((1, 0), (2, 0), (6, 0)),
    "zero, then inf": lambda: put((1, 0), (3, inf)),
    "zero, then -inf and zero": lambda: put((0, 0), (3, -inf), (5, 0)),
    "zero, then nan": lambda: put((1, 0), (4, nan)),
    "inf, then zero": lambda: put((1, inf), (5, 0)),
    "inf, then nan": lambda: put((0, inf), (4, nan)),
    "-inf, then nan": lambda: put((1, -inf), (2, nan)),
    "opposite infs and zero": lambda: put((0, inf), (3, 0), (6, -inf)),
    "a row of nan": lambda: row(nan),
    "a row of -inf": lambda: row(-inf),
    "a column of -inf": lambda: column(-inf),
    "a column of inf": lambda: column(inf),
    "a column of nan": lambda: column(nan),
    "all nan": lambda: torch.full_like(data(), nan),
    "all inf": lambda: torch.full_like(data(), inf),
    "all -inf": lambda: torch.full_like(data(), -inf),
    "all zero": lambda: data() * 0,
    "rows of zeros": lambda: torch.cat([data()[:3] * 0, data()[3:]]),
    "ties": lambda: data().round(),
    "all the same": lambda: data() * 0 + 1.5,
    "huge": lambda: data() * 1e200,
    "tiny": lambda: data() * 1e-200,
}

OVER: dict[str, dict[str, Any]] = {
    "rows": {"dim": 0},
    "rows kept": {"dim": 0, "keepdim": True},
    "rows and columns": {"dim": (0, 1)},
    "all": {"dim": None},
}
LABELS = torch.arange(ROWS) % 3
POSITIVE = torch.linspace(0.1, 1, ROWS * 12, dtype=torch.float64).view(ROWS, 4, 3)
SIGNS = (torch.arange(ROWS * 12).view(ROWS, 4, 3) % 2 * 2 - 1).double()
WEIGHTS = torch.tensor([1.0, 0.0, 2.0, 0.5], dtype=torch.float64)


def reductions() -> Iterator[tuple[str, Op]]:
    for place, words in OVER.items():
        for name in ("sum", "mean", "nansum", "nanmean", "amax", "amin"):
            given = words if name[0] != "a" or words["dim"] is not None else {}
            yield f"{name} of {place}", functools.partial(getattr(torch, name), **given)
        for name in ("var", "std"):
            for correction in (0, 1, 2):
                given = {**words, "correction": correction}
                yield (
                    f"{name} {correction} of {place}",
                    functools.partial(getattr(torch, name), **given),
                )
        for name in ("var_mean", "std_mean"):
            for k, what in enumerate(("first", "mean", "both")):
                yield f"{what} of {name} of {place}", functools.partial(one_of, name, k, words)
        for p in (0, 0.5, 1, 1.5, 2, 3, -1):
            yield (
                f"norm {p} of {place}",
                functools.partial(torch.linalg.vector_norm, ord=p, **words),
            )
    yield "logsumexp of rows", lambda x: x.logsumexp(0)
    yield "logsumexp of all", lambda x: x.logsumexp((0, 1, 2))
    yield "prod of rows", lambda x: x.prod(0)
    yield "prod of all", lambda x: x.prod()
    yield "max", lambda x: x.max()
    yield "min", lambda x: x.min()
    yield "cumsum", lambda x: x.cumsum(0)
    yield "cumprod", lambda x: x.cumprod(0)
    yield "logcumsumexp", lambda x: x.logcumsumexp(0)
    yield "softmax", lambda x: x.softmax(0)
    yield "log_softmax", lambda x: x.log_softmax(0)
    yield "batch_norm", lambda x: F.batch_norm(x, None, None, training=True)
    yield "all", lambda x: x.sum(0) + x.all(0)
    yield "any", lambda x: x.sum(0) + x.any(0)
    yield "count_nonzero", lambda x: x.sum(0) + x.count_nonzero(0)
    yield "product of rows", lambda x: x[:, :, 0].T @ x[:, :, 1]
    yield "pairs", lambda x: x[:, :, 0] @ x[:, :, 1].T
    yield "normalized", lambda x: F.normalize(x, dim=0)
    yield "by its norm", lambda x: x / x.norm()


def one_of(name: str, k: int, words: dict[str, Any], x: Tensor) -> Tensor:
    made = getattr(torch, name)(x, **words)
    return made[0] * 2 + made[1] if k == 2 else made[k]  # type: ignore[no-any-return]


def losses() -> Iterator[tuple[str, Op]]:
    for how in ("mean", "sum"):
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss"):
            loss = functools.partial(getattr(F, name), target=POSITIVE, reduction=how)
            yield f"{how} of {name}", loss
        for name in ("soft_margin_loss", "hinge_embedding_loss"):
            loss = functools.partial(getattr(F, name), target=SIGNS, reduction=how)
            yield f"{how} of {name}", loss
        yield f"{how} of kl_div", functools.partial(F.kl_div, target=POSITIVE, reduction=how)
        yield (
            f"{how} of binary cross-entropy",
            functools.partial(
                F.binary_cross_entropy_with_logits, target=SIGNS.clamp(min=0), reduction=how
            ),
        )
        for weight in (None, WEIGHTS):
            for ignored in (-100, 1):
                words: dict[str, Any] = {"weight": weight, "ignore_index": ignored}
                words["reduction"] = how
                text = f"{how}, {'' if weight is None else 'weighted, '}without {ignored}, of"
                yield f"{text} cross_entropy", functools.partial(of_labels, words)
                smoothed = {**words, "label_smoothing": 0.1}
                yield f"{text} smoothed cross_entropy", functools.partial(of_labels, smoothed)
                yield f"{text} nll_loss", functools.partial(nll_of_labels, words)
        yield (
            f"{how} of cross_entropy of one label",
            lambda x, how=how: F.cross_entropy(
                x[:, :, 0], torch.ones(ROWS, dtype=torch.long), reduction=how, ignore_index=1
            ),
        )
        yield (
            f"{how} of cross_entropy whose classes are rows",
            lambda x, how=how: F.cross_entropy(
                x[:, :, 0].T, torch.tensor([0, 3, 6, 2]), reduction=how
            ),
        )


def of_labels(words: dict[str, Any], x: Tensor) -> Tensor:
    return F.cross_entropy(x[:, :, 0], LABELS, **words)


def nll_of_labels(words: dict[str, Any], x: Tensor) -> Tensor:
    return F.nll_loss(x[:, :, 0], LABELS, **words)


OPS = {**dict(reductions()), **dict(losses())}
#: What torch itself gives there is rounding, or the order in which infinities met. In a product of
#: matrices it depends on the kernel whether terms too large are infinities before they are added.
UNTOLD = {
    ("product of rows", "huge"),
    ("pairs", "huge"),
    ("logcumsumexp", "huge"),
    ("cumprod", "huge"),
    # The gradient of a zero behind an inf: each chunk multiplies its share by the inf.
    ("cumprod", "opposite infs and zero"),
}


def told(op: Op, lazy: Any, x: Tensor) -> list[Tensor | None]:
    x = x.clone().requires_grad_()
    made = op(lazy(x))
    seed = torch.linspace(0.5, 2, made.numel(), dtype=torch.float64).view(made.shape)
    number = made.detach()
    made.backward(seed)
    return [number + 0, x.grad]


@pytest.mark.rotated("chunks")
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("chunks", [3, ROWS])
@pytest.mark.parametrize("name", OPS)
def test_as_eager(name: str, chunks: int) -> None:
    for filled, make in FILLED.items():
        if (name, filled) in UNTOLD:
            continue
        want = told(OPS[name], eager, make())
        with koila.config(chunks=chunks):
            got = told(OPS[name], koila.lazy, make())
            assert koila.report().n_chunks == chunks, filled
        assert_seen(got, want, f"{name}, {filled}", exact_bits=False)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("chunks", [2, ROWS])
@pytest.mark.parametrize("correction", [ROWS, ROWS + 2])
@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
@pytest.mark.parametrize("dim", [0, None])
def test_where_no_freedom_is_left(name: str, correction: int, dim: int | None, chunks: int) -> None:
    """Then torch divides by nothing, or by less: it runs whole."""
    for filled, make in FILLED.items():
        x = make()[:, :1, :1]

        def op(x: Tensor) -> Tensor:
            made = getattr(torch, name)(x, dim=dim, correction=correction)
            return made[0] + made[1] if isinstance(made, tuple) else made

        want = told(op, eager, x)
        with koila.config(chunks=chunks):
            got = told(op, koila.lazy, x)
        assert_seen(got, want, filled, exact_bits=True)


@pytest.mark.parametrize("chunks", [2, ROWS])
def test_the_mean_alone_of_var_mean(chunks: int) -> None:
    """What nobody wants of a call does not keep the gradient from the rest of it."""

    def gradient(lazy: Any) -> Tensor | None:
        x = data().requires_grad_()
        torch.var_mean(lazy(x).tanh(), 0)[1].exp().sum().backward()
        return x.grad

    want = gradient(eager)
    with koila.config(chunks=chunks):
        got = gradient(koila.lazy)
        assert koila.report().n_chunks == chunks
    assert_seen(got, want, "of the mean", exact_bits=False)
