# SPDX-License-Identifier: Apache-2.0
"""Losses that are reduced over the batch, computed from partial results of chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from koila.reductions.extremes import LogSumExp
from koila.reductions.reduction import Call, Chunk, Partials, Reduction, count, ratio, total

NONE, MEAN, SUM = 0, 1, 2  # the argument `reduction` of a loss, as torch's C functions take it


class Again(Reduction):
    """all and any: the op is applied again to the results of chunks."""

    def __init__(self, op: Callable[..., torch.Tensor]) -> None:
        self.op = op

    def partial(self, part: int, call: Call) -> torch.Tensor:
        return call.run()

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        return self.op(torch.stack(parts[0]), 0)


class Loss(Reduction):
    """Losses averaged over elements: the parts are the sum and the number of terms."""

    counts = frozenset((1,))

    def partial(self, part: int, call: Call) -> torch.Tensor:
        if part == 1:
            return count(self.n_terms(call))
        if call.wide == call.dtype:
            return call.run(reduction=SUM)
        return call.run(reduction=NONE).sum(dtype=call.wide)  # the sum of halves may be infinite

    def prepare(self, parts: Sequence[int], call: Call, of: Chunk) -> Partials:
        func, names = call.func, call.names[: len(call.args)]
        if parts != (0,) or call.wide != call.dtype or "reduction" not in names:
            return super().prepare(parts, call, of)
        at = names.index("reduction")
        return lambda *args, **kwargs: (func(*args[:at], SUM, *args[at + 1 :], **kwargs),)

    def n_terms(self, call: Call) -> int:
        tensors = [t for t in call.words.values() if isinstance(t, torch.Tensor)]
        shape: torch.Size = torch.broadcast_shapes(*(t.shape for t in tensors))
        return shape.numel()

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        if call.word("reduction", MEAN) == SUM:
            return total(parts[0]).to(call.dtype)
        return ratio(parts, call.dtype)


class RowLoss(Loss):
    """Losses averaged over rows."""

    def n_terms(self, call: Call) -> int:
        first = next(t for t in call.words.values() if isinstance(t, torch.Tensor))
        return first.shape[0] if first.dim() > 1 else 1


class CrossEntropy(Loss):
    """Cross-entropy and nll: the parts are the weighted sum, and the total weight of the labels
    that are not ignored."""

    counts = frozenset()  # labels may be computed, so their weight is not known from sizes

    def partial(self, part: int, call: Call) -> torch.Tensor:
        x: torch.Tensor = call.word("input")
        target: torch.Tensor = call.word("target")
        has_labels = target.dim() != x.dim()  # else probabilities, whose rows have weight 1
        weight: torch.Tensor | None = call.word("weight") if has_labels else None
        if part == 0:
            if call.wide == call.dtype or weight is None or call.word("label_smoothing"):
                return super().partial(0, call)
            # In a half dtype eager mode rounds the factor weight / sum of weights once. With the
            # weight inside torch's loss, its two steps would be rounded one after the other.
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
        """Return the weight of each label; 0 if the label is ignored."""
        target: torch.Tensor = call.word("target")
        counts: torch.Tensor = target != call.word("ignore_index", -100)
        weights: torch.Tensor = weight.to(call.wide)[torch.where(counts, target, 0)] * counts
        return weights


class Classes(LogSumExp):
    """Cross-entropy and nll whose classes are the rows, as in a contrastive loss of the transposed
    matrix of pairs.

    The parts are the maximum, the sum of exp(x - maximum), the scores of the labels that are rows
    of the chunk (with label smoothing, mixed with the scores of all classes), and from the first
    chunk alone the weight of each label and whether it counts.
    """

    def partials(self, parts: Sequence[int], call: Call) -> tuple[torch.Tensor, ...]:
        x = call.word("input").to(call.wide)
        most = x.detach().amax(1)
        if self.is_nll(call):
            sums = most.new_zeros(most.shape)
        else:
            sums = torch.exp(x - self.finite(most).unsqueeze(1)).sum(1)
        made = most, sums, self.scores(call, x), self.weights(call)
        return tuple(map(made.__getitem__, parts))

    @staticmethod
    def is_nll(call: Call) -> bool:
        return call.func.__name__.startswith("nll")

    @staticmethod
    def scores(call: Call, x: torch.Tensor) -> torch.Tensor:
        at = call.word("target") - call.start
        is_here = (at >= 0) & (at < x.shape[1])
        # Not gather(), which saves the scores: the script may write them after torch's own call.
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
        # A label out of bounds is in no chunk, so no other part would notice it.
        is_wrong = counts & ((target < 0) | (target >= call.n_rows))
        if target.device.type != "cpu":
            torch._assert_async(~is_wrong.any(), "a target is out of bounds")
        elif bool(is_wrong.any()):
            raise IndexError(f"Target {int(target[is_wrong][0])} is out of bounds.")
        of_classes: torch.Tensor | None = call.word("weight")
        weights = counts.to(call.wide)
        if of_classes is not None:
            weights = of_classes.to(call.wide)[torch.where(counts, target, 0)] * weights
        return torch.stack([weights, counts.to(call.wide)])

    def combine(self, parts: list[list[torch.Tensor]], call: Call) -> torch.Tensor:
        weights, counts = parts[3][0]
        losses = -total(parts[2])
        if not self.is_nll(call):
            # The log_softmax of a row with inf is nan everywhere, and so is its gradient.
            logs, most = self.joined(*parts[:2])
            losses = losses + most + logs * torch.where(logs == torch.inf, torch.nan, 1.0)
        losses = torch.where(counts == 0, 0.0, losses * weights)
        reduction = call.word("reduction", NONE)
        if reduction == NONE:
            return losses.to(call.dtype)
        loss = losses.sum()
        return (loss / weights.sum() if reduction == MEAN else loss).to(call.dtype)
