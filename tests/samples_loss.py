# SPDX-License-Identifier: Apache-2.0
"""Calls for the losses of ops_nn.def, with every reduction."""

from __future__ import annotations

from collections.abc import Callable

import torch

from samples_kit import Sample, call, f, i, p
from samples_nn import Make, plain, varied

REDUCTIONS = (0, 1, 2)  # none, mean, sum


def reduced(make: Callable[[int], list[Sample]]) -> Make:
    return varied(lambda: [sample for reduction in REDUCTIONS for sample in make(reduction)])


def signs(*shape: int) -> torch.Tensor:
    return (torch.rand(shape) > 0.5).double() * 2 - 1


def cross_entropies(reduction: int) -> list[Sample]:
    made = []
    for shape, labels in (
        ((4, 3), i(4, high=3)),
        ((6, 3, 2), i(6, 2, high=3)),
        ((4, 3, 2, 2), i(4, 2, 2, high=3)),
    ):
        for weight in (None, plain(3)):
            for smoothing in (0.0, 0.1):
                made.append(call(f(*shape), labels, weight, reduction, 1, smoothing))
                made.append(call(f(*shape), p(*shape), weight, reduction, -100, smoothing))
    return [
        *made,
        call(f(3), torch.tensor(1), None, reduction),
        call(f(4, 4), i(4), reduction=reduction),
    ]


def nlls(reduction: int) -> list[Sample]:
    return [
        call(f(4, 3), i(4, high=3), None, reduction),
        call(f(6, 3), i(6, high=3), plain(3), reduction, 1),
        call(f(3), torch.tensor(1), plain(3), reduction),
    ]


def nll_images(reduction: int) -> list[Sample]:
    return [
        call(f(4, 3, 2, 2), i(4, 2, 2, high=3), None, reduction),
        call(f(4, 3, 2, 2), i(4, 2, 2, high=3), plain(3), reduction, 1),
    ]


def pairs(reduction: int) -> list[Sample]:
    return [
        call(f(4, 3), f(4, 3), reduction),
        call(f(6), f(6), reduction),
        call(f(2, 4, 3).transpose(0, 1).contiguous(), f(4, 2, 3), reduction=reduction),
        call(f(1, 3), f(1, 3), reduction),
    ]


def vectors(reduction: int) -> list[Sample]:
    made = [call(f(*s, 3), f(*s, 3), signs(*s), 0.1, reduction) for s in ((4,), (6,))]
    return [*made, call(f(3), f(3), torch.tensor(1.0, dtype=torch.float64), 0.0, reduction)]


def triplets(reduction: int) -> list[Sample]:
    made = [
        call(f(4, 3), f(4, 3), f(4, 3), 1.0, 2.0, 1e-6, swap, reduction) for swap in (False, True)
    ]
    return [*made, call(f(3), f(3), f(3), reduction=reduction)]


def logits(reduction: int) -> list[Sample]:
    return [
        call(f(4, 3), p(4, 3), weight, positive, reduction)
        for weight in (None, plain(4, 1), plain(3))
        for positive in (None, plain(3))
    ]


def entropies(reduction: int) -> list[Sample]:
    return [call(p(4, 3), p(4, 3), weight, reduction) for weight in (None, plain(4, 3), plain(3))]


def ctcs(reduction: int) -> list[Sample]:
    log_probs = f(6, 4, 5).log_softmax(-1)
    lengths = (6, 6, 5, 6), (3, 2, 3, 3)
    tensors = tuple(torch.tensor(one) for one in lengths)
    return [
        call(log_probs, i(4, 3) + 1, *lengths, 0, reduction),
        call(log_probs, i(4, 3) + 1, *tensors, 0, reduction, True),
        call(log_probs, i(4, 3).int() + 1, *(one.int() for one in tensors), 0, reduction),
    ]


LOSSES: dict[str, Make] = {
    "cross_entropy_loss": reduced(cross_entropies),
    "nll_loss": reduced(nlls),
    "nll_loss_nd": reduced(
        lambda r: [*nlls(r), *nll_images(r), call(f(4, 3, 2), i(4, 2, high=3), None, r)]
    ),
    "nll_loss2d": reduced(nll_images),
    **dict.fromkeys(["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"], reduced(pairs)),
    "kl_div": reduced(
        lambda r: [call(f(4, 3), p(4, 3), r), call(f(6, 2), f(6, 2), r, log_target=True)]
    ),
    "soft_margin_loss": reduced(lambda r: [call(f(4, 3), signs(4, 3), r), call(f(6), signs(6), r)]),
    "hinge_embedding_loss": reduced(lambda r: [call(f(4, 3), signs(4, 3), 1.0, r)]),
    "margin_ranking_loss": reduced(
        lambda r: [call(f(4), f(4), signs(4), 0.1, r), call(f(6), f(6), signs(1), 0.1, r)]
    ),
    "poisson_nll_loss": reduced(
        lambda r: [
            call(f(4, 3), plain(4, 3), True, False, 1e-8, r),
            call(p(4, 3), plain(4, 3), False, True, 1e-8, r),
        ]
    ),
    "binary_cross_entropy": reduced(entropies),
    "binary_cross_entropy_with_logits": reduced(logits),
    "cosine_embedding_loss": reduced(vectors),
    "triplet_margin_loss": reduced(triplets),
    "multi_margin_loss": reduced(
        lambda r: [call(f(4, 3), i(4, high=3), 1, 1.0, w, r) for w in (None, plain(3))]
    ),
    "multilabel_margin_loss": reduced(lambda r: [call(f(4, 3), torch.tensor([[0, 2, -1]] * 4), r)]),
    "ctc_loss": reduced(ctcs),
}
