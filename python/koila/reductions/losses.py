# SPDX-License-Identifier: Apache-2.0
"""Losses that are reduced over the batch, in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from koila.reductions.extremes import LogSumExp
from koila.reductions.reduction import Call, Reduction, count, ratio, total

NONE, MEAN, SUM = 0, 1, 2  # the word `reduction` of a loss


class Again(Reduction):
    """all and any: the op once more, on the chunks' answers."""

    def __init__(self, op: Callable[..., torch.Tensor]) -> None:
        self.op = op

    def partial(self, part: int, call: Call) -> torch.Tensor:
        return call.run()

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        return self.op(torch.stack(parts[0]), 0)


class Loss(Reduction):
    """Losses averaged over their terms: the sum, and the number of terms."""

    n_parts = 2
    counts = frozenset((1,))

    def partial(self, part: int, call: Call) -> torch.Tensor:
        if part == 1:
            return count(self.n_terms(call))
        if call.wide == call.dtype:
            return call.run(reduction=SUM)
        return call.run(reduction=NONE).sum(dtype=call.wide)  # the sum of halves may be infinite

    def n_terms(self, call: Call) -> int:
        given = [t for t in call.words.values() if isinstance(t, torch.Tensor)]
        shape: torch.Size = torch.broadcast_shapes(*(t.shape for t in given))
        return shape.numel()

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        if call.word("reduction", MEAN) == SUM:
            return total(parts[0]).to(call.dtype)
        return ratio(parts, call.dtype)


class RowLoss(Loss):
    """Losses whose terms are rows."""

    def n_terms(self, call: Call) -> int:
        first = next(t for t in call.words.values() if isinstance(t, torch.Tensor))
        return first.shape[0] if first.dim() > 1 else 1


class CrossEntropy(Loss):
    """Cross-entropy and nll: the weighted sum, and the weight of the labels that count."""

    counts = frozenset()  # labels can be made of scores

    def partial(self, part: int, call: Call) -> torch.Tensor:
        x: torch.Tensor = call.word("input")
        target: torch.Tensor = call.word("target")
        has_labels = target.dim() != x.dim()  # else probabilities, which count 1 each
        weight: torch.Tensor | None = call.word("weight") if has_labels else None
        if part == 0:
            if call.wide == call.dtype or weight is None or call.word("label_smoothing"):
                return super().partial(0, call)
            # weight / sum of weights must be rounded once, as eager does, not one after the other.
            losses = call.run(weight=None, reduction=NONE)
            summed: torch.Tensor = (losses * self.weights(call, weight)).sum()
            return summed
        if not has_labels:
            return count(x.numel() // x.shape[1])
        if weight is None:
            counts: torch.Tensor = target != call.word("ignore_index", -100)
            return counts.sum()
        return self.weights(call, weight).sum()

    def weights(self, call: Call, weight: torch.Tensor) -> torch.Tensor:
        """The weight of each label: 0 for those that do not count."""
        target: torch.Tensor = call.word("target")
        counts: torch.Tensor = target != call.word("ignore_index", -100)
        weights: torch.Tensor = weight.to(call.wide)[torch.where(counts, target, 0)] * counts
        return weights


class Classes(LogSumExp):
    """Cross-entropy and nll whose classes are the rows, as of a matrix of pairs turned over.

    Beside maxima and sums of exponentials: the scores of the labels that lie in the chunk, smoothed
    by those of all classes; and, of the first chunk, how much each label weighs, and whether it
    counts.
    """

    n_parts = 4

    def partials(self, parts: Sequence[int], call: Call) -> tuple[torch.Tensor, ...]:
        x = call.word("input").to(call.wide)
        most = x.detach().amax(1)
        if self.is_nll(call):
            sums = most.new_zeros(most.shape)
        else:
            sums = torch.exp(x - self.finite(most).unsqueeze(1)).sum(1)
        made = most, sums, self.scores(call, x), self.weights(call)
        return tuple(made[part] for part in parts)

    @staticmethod
    def is_nll(call: Call) -> bool:
        return call.func.__name__.startswith("nll")

    @staticmethod
    def scores(call: Call, x: torch.Tensor) -> torch.Tensor:
        at = call.word("target") - call.start
        is_here = (at >= 0) & (at < x.shape[1])
        # gather() would keep the scores, which may be written next, as after torch's own call.
        numbers = [torch.arange(n, device=at.device) for n in at.shape]
        terms = torch.meshgrid(*numbers, indexing="ij")
        found: torch.Tensor = x.movedim(1, -1)[(*terms, torch.where(is_here, at, 0))]
        found = torch.where(is_here, found, 0)
        smoothing: float = call.word("label_smoothing", 0.0)
        if not smoothing:
            return found
        return (1 - smoothing) * found + x.sum(1) * (smoothing / call.n_rows)

    @staticmethod
    def weights(call: Call) -> torch.Tensor:
        target: torch.Tensor = call.word("target")
        if call.start > 0:
            return target.new_zeros((), dtype=call.wide)
        counts: torch.Tensor = target != call.word("ignore_index", -100)
        # No chunk looks for a label that no class has.
        is_wrong = counts & ((target < 0) | (target >= call.n_rows))
        if target.device.type != "cpu":
            torch._assert_async(~is_wrong.any(), "a target is out of bounds")
        elif bool(is_wrong.any()):
            raise IndexError(f"Target {int(target[is_wrong][0])} is out of bounds.")
        given: torch.Tensor | None = call.word("weight")
        weights = counts.to(call.wide)
        if given is not None:
            weights = given.to(call.wide)[torch.where(counts, target, 0)] * weights
        return torch.stack([weights, counts.to(call.wide)])

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        weights, counts = parts[3][0]
        losses = -total(parts[2])
        if not self.is_nll(call):
            # log_softmax() of a row with inf is nan all over, and so is its gradient
            logs, most = self.joined(*parts[:2])
            losses = losses + most + logs * torch.where(logs == torch.inf, torch.nan, 1.0)
        losses = torch.where(counts == 0, 0.0, losses * weights)
        reduction = call.word("reduction", NONE)
        if reduction == NONE:
            return losses.to(call.dtype)
        loss = losses.sum()
        return (loss / weights.sum() if reduction == MEAN else loss).to(call.dtype)
