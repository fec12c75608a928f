# SPDX-License-Identifier: Apache-2.0
"""Losses, written as people write them, and the targets they are computed from.

Each loss takes `(model, output, *targets)` and returns a scalar. The kinds are those of the outputs
they fit: `classes` (B, 5) logits, `tokens` (B, T, 13) logits, `image` (B, 3, 8, 8) of numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from programs_text import N_TOKENS
from programs_vision import N_CLASSES

N_STEPS = 6
IMAGE = (3, 8, 8)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss of one kind of output. `barrier` gives the reason why it needs the whole batch."""

    name: str
    kind: str
    targets: Callable[[int, Generator], tuple[Any, ...]]
    compute: Callable[..., Tensor]
    barrier: str = ""


def randn(generator: Generator, *shape: int) -> Tensor:
    """Draw float64 numbers from the batch's own generator."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# Targets ----------------------------------------------------------------------------------------


def labels(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """One class for each row."""
    return (torch.randint(0, N_CLASSES, (n_rows,), generator=generator),)


def labels_some_ignored(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """Classes of which more are ignored the further down the batch."""
    (y,) = labels(n_rows, generator)
    ignored = torch.rand(n_rows, generator=generator) < torch.linspace(0.1, 0.8, n_rows)
    return (y.masked_fill(ignored, -100),)


def labels_first_rows_only(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """Classes in the first two rows: every later chunk has no valid label at all."""
    (y,) = labels(n_rows, generator)
    y[2:] = -100
    return (y,)


def labels_none(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """A batch without a valid label."""
    return (torch.full((n_rows,), -100),)


def probabilities(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """A distribution over the classes for each row."""
    return (randn(generator, n_rows, N_CLASSES).softmax(-1),)


def numbers(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """A number for each class of each row."""
    return (randn(generator, n_rows, N_CLASSES),)


def bits(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """Several true classes in each row."""
    return (torch.randint(0, 2, (n_rows, N_CLASSES), generator=generator).double(),)


def numbers_and_mask(n_rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Numbers, and which of them count: uneven from row to row."""
    (y,) = numbers(n_rows, generator)
    return y, torch.rand(n_rows, N_CLASSES, generator=generator) < 0.3


def labels_and_weights(n_rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """A class and an importance for each row."""
    return *labels(n_rows, generator), torch.rand(n_rows, generator=generator, dtype=torch.float64)


def next_tokens(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """A token for each step."""
    return (torch.randint(0, N_TOKENS, (n_rows, N_STEPS), generator=generator),)


def next_tokens_padded(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """A token for each step, ignored from a length on that differs from row to row."""
    (y,) = next_tokens(n_rows, generator)
    lengths = torch.randint(1, N_STEPS + 1, (n_rows, 1), generator=generator)
    return (y.masked_fill(torch.arange(N_STEPS) >= lengths, -100),)


def image(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """A number for each pixel."""
    return (randn(generator, n_rows, *IMAGE),)


def image_bits(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """A mask for each channel, of a size that differs from row to row."""
    share = torch.rand(n_rows, 1, 1, 1, generator=generator)
    return ((torch.rand(n_rows, *IMAGE, generator=generator) < share).double(),)


def image_labels(n_rows: int, generator: Generator) -> tuple[Tensor]:
    """A channel for each pixel, some pixels void."""
    y = torch.randint(0, IMAGE[0], (n_rows, *IMAGE[1:]), generator=generator)
    void = torch.rand(n_rows, *IMAGE[1:], generator=generator) < torch.rand(
        n_rows, 1, 1, generator=generator
    )
    return (y.masked_fill(void, 255),)


# Losses of (B, classes) -------------------------------------------------------------------------


def class_weights(like: Tensor) -> Tensor:
    """Return a weight for each class."""
    return torch.tensor([0.2, 1.0, 3.0, 0.5, 7.0], dtype=like.dtype)


def smoothed_weighted(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Class weights, smoothing and ignored rows at once."""
    return F.cross_entropy(out, y, class_weights(out), label_smoothing=0.1)


def focal(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """The focal loss of one-hot targets."""
    one_hot = F.one_hot(y, N_CLASSES).to(out.dtype)
    p = torch.sigmoid(out)
    ce = F.binary_cross_entropy_with_logits(out, one_hot, reduction="none")
    p_t = p * one_hot + (1 - p) * (1 - one_hot)
    return (ce * (1 - p_t) ** 2).sum(1).mean()


def masked_mean(model: nn.Module, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The mean over the entries that count, which is a number in the data."""
    return ((out - y) ** 2 * mask).sum() / mask.sum().clamp(min=1)


def where_mean(model: nn.Module, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The same by where()."""
    error = torch.where(mask, (out - y).abs(), torch.zeros_like(out))
    return error.sum() / mask.to(out.dtype).sum()


def weighted_rows(model: nn.Module, out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """An average weighted by a number of each row."""
    losses = F.cross_entropy(out, y, reduction="none")
    return (losses * weight).sum() / weight.sum()


def picked(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Cross entropy by hand: log-probabilities picked at arange(B) and the label."""
    log_p = out - out.logsumexp(dim=-1, keepdim=True)
    return -log_p[torch.arange(len(y)), y].mean()


def gathered(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """The same by gather, divided by the size of the batch as a number."""
    log_p = F.log_softmax(out, dim=1)
    return -log_p.gather(1, y.unsqueeze(1)).sum() / y.shape[0]


def several(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Two losses and a penalty on the parameters, added."""
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    return F.cross_entropy(out, y) + 0.3 * (out**2).mean() + 1e-3 * penalty


def distilled(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """A KL divergence from soft targets at a temperature, batchmean."""
    return F.kl_div(F.log_softmax(out / 2, -1), y, reduction="batchmean") * 4.0


def _class_losses() -> list[Loss]:
    """All losses of (B, classes) whose gradient needs no value of the batch."""
    table: list[tuple[str, Any, Any]] = [
        ("ce", labels, lambda m, out, y: F.cross_entropy(out, y)),
        ("ce_module", labels, lambda m, out, y: nn.CrossEntropyLoss()(out, y)),
        ("ce_sum", labels, lambda m, out, y: F.cross_entropy(out, y, reduction="sum")),
        ("ce_none", labels, lambda m, out, y: F.cross_entropy(out, y, reduction="none").mean()),
        ("ce_ignored", labels_some_ignored, lambda m, out, y: F.cross_entropy(out, y)),
        ("ce_late_ignored", labels_first_rows_only, lambda m, out, y: F.cross_entropy(out, y)),
        ("ce_all_ignored", labels_none, lambda m, out, y: F.cross_entropy(out, y)),
        ("ce_weights", labels, lambda m, out, y: F.cross_entropy(out, y, class_weights(out))),
        ("ce_smoothed", labels, lambda m, out, y: F.cross_entropy(out, y, label_smoothing=0.1)),
        ("ce_smoothed_weighted", labels_some_ignored, smoothed_weighted),
        ("ce_soft", probabilities, lambda m, out, y: F.cross_entropy(out, y)),
        ("ce_accumulated", labels, lambda m, out, y: F.cross_entropy(out, y) / 4),
        ("nll", labels, lambda m, out, y: F.nll_loss(F.log_softmax(out, -1), y)),
        ("focal", labels, focal),
        ("picked", labels, picked),
        ("gathered", labels, gathered),
        ("several", labels, several),
        ("mse", numbers, lambda m, out, y: F.mse_loss(out, y)),
        ("mse_sum", numbers, lambda m, out, y: F.mse_loss(out, y, reduction="sum") / len(y)),
        ("mse_by_hand", numbers, lambda m, out, y: ((out - y) ** 2).mean(dim=1).mean()),
        ("l1", numbers, lambda m, out, y: F.l1_loss(out, y)),
        ("huber", numbers, lambda m, out, y: F.smooth_l1_loss(out, y, beta=0.5)),
        ("cosine", numbers, lambda m, out, y: (1 - F.cosine_similarity(out, y)).mean()),
        ("bce", bits, lambda m, out, y: F.binary_cross_entropy_with_logits(out, y)),
        ("bce_sigmoid", bits, lambda m, out, y: F.binary_cross_entropy(torch.sigmoid(out), y)),
        (
            "bce_weights",
            bits,
            lambda m, out, y: F.binary_cross_entropy_with_logits(
                out, y, pos_weight=class_weights(out)
            ),
        ),
        ("kl_batchmean", probabilities, distilled),
        ("masked_mean", numbers_and_mask, masked_mean),
        ("where_mean", numbers_and_mask, where_mean),
        ("weighted_rows", labels_and_weights, weighted_rows),
    ]
    return [Loss(name, "classes", targets, compute) for name, targets, compute in table]


# Losses of (B, T, tokens) and of (B, 3, 8, 8) ---------------------------------------------------


def flattened(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Batch and time become one dim before the loss."""
    return F.cross_entropy(out.view(-1, out.size(-1)), y.view(-1))


def baked(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """The same with the sizes read first and multiplied."""
    b, t, v = out.shape
    return F.cross_entropy(out.reshape(b * t, v), y.reshape(b * t), ignore_index=-100)


def shifted(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Each step predicts the next, contiguous pieces flattened."""
    logits, targets = out[..., :-1, :].contiguous(), y[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, N_TOKENS), targets.view(-1), ignore_index=-100)


def masked_tokens(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """The loss of each token, averaged over those that are there."""
    mask = (y != -100).to(out.dtype)
    losses = F.cross_entropy(out.transpose(1, 2), y.clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum()


def by_row(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """The mean over the tokens of a row, then over the rows."""
    losses = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    count = (y != -100).sum(dim=1)
    return (losses.sum(dim=1) / count).mean()


def _token_losses() -> list[Loss]:
    table: list[tuple[str, Any, Any]] = [
        ("flat_ce", next_tokens, flattened),
        ("flat_ce_ignored", next_tokens_padded, flattened),
        ("baked_ce_ignored", next_tokens_padded, baked),
        ("shifted_ce_ignored", next_tokens_padded, shifted),
        ("inner_ce", next_tokens, lambda m, out, y: F.cross_entropy(out.transpose(1, 2), y)),
        ("masked_tokens", next_tokens_padded, masked_tokens),
        ("mean_by_row", next_tokens_padded, by_row),
    ]
    return [Loss(name, "tokens", targets, compute) for name, targets, compute in table]


def dice_by_row(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """A soft dice of each image on its own, then the mean."""
    p = torch.sigmoid(out).flatten(1)
    t = y.flatten(1)
    dice = (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)
    return 1 - dice.mean()


def total_variation(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """A reconstruction and the roughness of the image."""
    rough = (out[:, :, 1:] - out[:, :, :-1]).abs().mean() + (
        out[..., 1:] - out[..., :-1]
    ).abs().mean()
    return F.mse_loss(out, y) + 0.1 * rough


def _image_losses() -> list[Loss]:
    table: list[tuple[str, Any, Any]] = [
        ("pixel_mse", image, lambda m, out, y: F.mse_loss(out, y)),
        (
            "pixel_ce_void",
            image_labels,
            lambda m, out, y: F.cross_entropy(out, y, ignore_index=255),
        ),
        ("pixel_bce", image_bits, lambda m, out, y: F.binary_cross_entropy_with_logits(out, y)),
        ("dice_by_row", image_bits, dice_by_row),
        ("total_variation", image, total_variation),
    ]
    return [Loss(name, "image", targets, compute) for name, targets, compute in table]


# Losses that need the whole batch ---------------------------------------------------------------


def dice(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """A soft dice over the batch: a quotient of two sums."""
    p = torch.sigmoid(out)
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


def correlation(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """One minus Pearson's correlation over the batch."""
    a, b = out[:, 0] - out[:, 0].mean(), y[:, 0] - y[:, 0].mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm() + 1e-8)


def spread(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """A penalty on features whose spread over the batch is small (VICReg)."""
    std = torch.sqrt(out.var(dim=0) + 1e-4)
    return F.mse_loss(out, y) + F.relu(1.5 - std).mean()


def log_partition(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """A log of a mean over the batch (Donsker-Varadhan)."""
    return torch.log(torch.exp(out[:, 0]).mean()) - (out * y).mean()


def hard_half(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """The mean of the hardest half of the rows."""
    losses = F.cross_entropy(out, y, reduction="none")
    return losses.topk(k=max(1, len(y) // 2)).values.mean()


def softmax_over_rows(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """A listwise ranking: a softmax along the batch."""
    return -(F.log_softmax(out[:, 0], dim=0) * F.softmax(y[:, 0], dim=0)).sum()


def survival(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Cox's partial likelihood: rows sorted by time, a cumulative sum of risks."""
    risk = out[torch.argsort(y[:, 0], descending=True), 0]
    return -(risk - torch.log(torch.cumsum(torch.exp(risk), dim=0))).mean()


def ranked(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Sorted predictions against sorted targets (a Wasserstein distance)."""
    return (torch.sort(out, dim=0).values - torch.sort(y, dim=0).values).abs().mean()


def selected(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Only the rows that a mask from the labels picks."""
    keep = y != 0
    return F.cross_entropy(out[keep], y[keep])


def selected_by_value(model: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Only the entries that the model's own values pick."""
    return F.mse_loss(out[out > 0], y[out.detach() > 0])


def _barrier_losses() -> list[Loss]:
    table: list[tuple[str, Any, Any, str]] = [
        ("rmse", numbers, lambda m, out, y: torch.sqrt(F.mse_loss(out, y)), "root of a mean"),
        ("norm", numbers, lambda m, out, y: (out - y).norm() / len(y), "2-norm of the batch"),
        ("log_partition", numbers, log_partition, "log of a mean"),
        ("dice", bits, dice, "quotient of sums"),
        ("correlation", numbers, correlation, "quotient of sums of centred rows"),
        ("spread", numbers, spread, "standard deviation over the batch"),
        ("hard_half", labels, hard_half, "topk over the batch"),
        ("softmax_over_rows", numbers, softmax_over_rows, "softmax over the batch"),
        ("survival", numbers, survival, "sort and cumsum over the batch"),
        ("ranked", numbers, ranked, "sort over the batch"),
        ("selected", labels, selected, "shape depends on labels"),
        ("selected_by_value", numbers, selected_by_value, "shape depends on values"),
        ("median", numbers, lambda m, out, y: (out - y).abs().median(), "median of the batch"),
        ("worst", numbers, lambda m, out, y: (out - y).abs().amax(dim=0).sum(), "max of the batch"),
    ]
    return [Loss(n, "classes", targets, compute, barrier) for n, targets, compute, barrier in table]


LOSSES = [*_class_losses(), *_token_losses(), *_image_losses()]
BARRIER_LOSSES = _barrier_losses()
