# SPDX-License-Identifier: Apache-2.0
"""Calls for the reductions and the ops along a dim; see samples.py."""

from __future__ import annotations

from collections.abc import Callable

import torch

from samples_kit import Sample, b, call, each, f, i, inf


def reductions() -> list[Sample]:
    return [
        call(f(4, 3)),
        call(f(4, 3, 2), 1),
        call(f(4, 3, 2), 0),
        call(f(4, 3, 2), (0, 2)),
        call(f(4, 3, 2), dim=-1, keepdim=True),
        call(f(4, 3, 2), dim=(0,), keepdim=True),
        call(f(3, 4).t(), 1),
        call(f(4, 6), axis=1),
    ]


def one_dim() -> list[Sample]:
    return [
        call(f(4, 3)),
        call(f(4, 3, 2), 1),
        call(f(4, 3, 2), 0),
        call(f(4, 3, 2), dim=-1, keepdim=True),
        call(f(4), 0),
    ]


def along() -> list[Sample]:
    return [
        call(f(4, 3, 2), 1),
        call(f(4, 3, 2), 0),
        call(f(4, 3, 2), dim=-1),
        call(f(3, 4).t(), 1),
    ]


def variances() -> list[Sample]:
    return [
        call(f(4, 3)),
        call(f(4, 3), False),
        call(f(4, 3, 2), 1),
        call(f(4, 3, 2), (0, 1), unbiased=False),
        call(f(4, 3, 2), dim=-1, correction=0, keepdim=True),
        call(f(4, 3, 2), [1, 2], True, True),
    ]


def sorts() -> list[Sample]:
    return [
        call(f(4, 3)),
        call(f(4, 3, 2), 1, True),
        call(f(4, 3, 2), dim=0),
        call(f(4, 3), stable=True),
    ]


SAMPLES: dict[str, Callable[[], list[Sample]]] = {
    # reductions
    "sum": lambda: [
        *reductions(),
        call(i(4, 3)),
        call(b(4, 3), 1),
        call(f(4, 3), dtype=torch.float32),
    ],
    "nansum": reductions,
    "mean": lambda: [*reductions(), call(i(4, 3), 1, dtype=torch.float64)],
    "amax": lambda: [*reductions(), call(i(4, 3), 1)],
    "amin": reductions,
    "prod": lambda: [*one_dim(), call(i(4, 3) + 1)],
    **each("max min", lambda: [*one_dim(), call(f(4, 3), f(3)), call(i(4, 3), other=i(4, 1))]),
    **each(
        "all any",
        lambda: [call(b(4, 3)), call(b(4, 3), 1), call(f(4, 3), 0, True), call(b(4, 3, 2), (1, 2))],
    ),
    "count_nonzero": lambda: [call(i(4, 3)), call(i(4, 3), 1), call(b(4, 3, 2), dim=(0, 1))],
    **each(
        "argmax argmin",
        lambda: [call(f(4, 3)), call(f(4, 3), 1), call(f(4, 3), 0), call(f(4, 3), -1, True)],
    ),
    "logsumexp": lambda: [call(f(4, 3), 1), call(f(4, 3), 0), call(f(4, 3, 2), (0, 2), True)],
    **each("std std_mean var var_mean", variances),
    "linalg_vector_norm": lambda: [
        call(f(4, 3)),
        call(f(4, 3), 2, 1),
        call(f(4, 3), 1, 0),
        call(f(4, 3), inf, -1, True),
        call(f(4, 3), inf, 0),
        call(f(4, 3), 0),
    ],
    **each("median nanmedian", one_dim),
    "kthvalue": lambda: [
        call(f(4, 3), 2),
        call(f(4, 3), 1, 0),
        call(f(4, 3), 2, dim=1, keepdim=True),
    ],
    "mode": lambda: [call(f(4, 3)), call(f(4, 3), 0), call(i(4, 3), 1, True)],
    # along a dim
    **each("cummax cummin cumprod cumsum logcumsumexp", along),
    "histc": lambda: [call(f(4, 3).detach(), 5, -1, 1), call(f(6).detach(), bins=3)],
    **each("argsort sort", sorts),
    "topk": lambda: [
        call(f(4, 3), 2),
        call(f(4, 3), 2, 0),
        call(f(4, 3, 2), k=1, dim=1, largest=False),
    ],
}
