# SPDX-License-Identifier: Apache-2.0
"""Accumulate the gradient of a large weight in place.

torch computes the gradient of a chunk in a tensor as large as the weight and adds it to `.grad`, so
a step in chunks would need one weight's memory more than a whole one. The products here add to the
`.grad` of the alias themselves (addmm_). kl_stage_accruing says which calls run so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from koila.basics import engine, table
from koila.basics.holders import owned
from koila.staged.facts import Node
from koila.staged.program import Program

Call = Callable[[], torch.Tensor]

#: The gradients of other dtypes are accumulated in float32, so not in the dtype of the product.
_SUMMED = torch.float32, torch.float64


def _gathered(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient accumulated so far for an alias, in memory of its own."""
    if weight.grad is not None:
        (weight.grad,) = owned((weight.grad,))
    return weight.grad


def _add_product(
    weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float
) -> None:
    total = _gathered(weight)
    if total is not None:
        total.addmm_(left, right, alpha=alpha)
        return
    made = torch.mm(left, right, out=torch.empty_like(weight))
    weight.grad = made if alpha == 1 else made.mul_(alpha)


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _Product(engine.Function):
    """A product of rows and a weight (transposed for linear()), with an optional added term."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        x: torch.Tensor,
        weight: torch.Tensor,
        added: torch.Tensor | None,
        is_turned: bool,
        scales: tuple[float, float],
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[1] else None)
        ctx.weight, ctx.is_turned, ctx.scales = weight, is_turned, scales
        ctx.added_shape = added.shape if added is not None else None
        made = call()
        return torch.ops.aten._unsafe_view(made, made.shape) if made._is_view() else made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        beta, alpha = ctx.scales
        of_rows, rows = _as_matrix(gradient), _as_matrix(x)
        left, right = (of_rows, rows) if ctx.is_turned else (rows, of_rows)
        _add_product(ctx.weight, left.t(), right, alpha)
        del left, right, rows
        of_x = of_added = None
        if ctx.needs_input_grad[1]:
            of_x = of_rows.mm(weight if ctx.is_turned else weight.t())
            of_x = (of_x if alpha == 1 else of_x.mul_(alpha)).view(x.shape)
        if ctx.needs_input_grad[3]:
            of_added = gradient.sum_to_size(ctx.added_shape)
            of_added = of_added if beta == 1 else of_added * beta
        return None, of_x, None, of_added, None, None


class _LookUp(engine.Function):
    """A look-up of rows in an embedding table."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, weight: torch.Tensor, indices: torch.Tensor, padding: int
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.weight, ctx.padding = weight, padding
        return call()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        (indices,) = ctx.saved_tensors
        total = _gathered(ctx.weight)
        if total is None:
            total = ctx.weight.grad = torch.zeros_like(ctx.weight)
        aside = total[ctx.padding].clone() if ctx.padding >= 0 else None
        total.index_add_(0, indices.reshape(-1), gradient.reshape(-1, total.shape[1]))
        if aside is not None:
            total[ctx.padding] = aside  # the padding row gets no gradient from this call
        return None, None, None, None


def _can(weight: torch.Tensor) -> bool:
    """Return whether the weight is an alias (a leaf) whose `.grad` the call can add to."""
    is_alias = weight.is_leaf and weight.requires_grad and weight.dim() == 2
    is_cast = torch.is_autocast_enabled(weight.device.type) or weight.dtype not in _SUMMED
    return is_alias and not is_cast and torch.is_grad_enabled()


def _linear(call: Call, words: dict[str, Any]) -> torch.Tensor:
    x, weight = words["input"], words["weight"]
    return _apply(_Product, call, weight, (x, weight, words.get("bias"), True, (1, 1)))


def _product(call: Call, words: dict[str, Any]) -> torch.Tensor:
    x, weight = words["input"], words["other" if "other" in words else "mat2"]
    return _apply(_Product, call, weight, (x, weight, None, False, (1, 1)))


def _sum(call: Call, words: dict[str, Any]) -> torch.Tensor:
    x, weight, scales = words["mat1"], words["mat2"], (words.get("beta", 1), words.get("alpha", 1))
    return _apply(_Product, call, weight, (x, weight, words["input"], False, scales))


def _entries(call: Call, words: dict[str, Any]) -> torch.Tensor:
    if words.get("sparse"):
        return call()
    weight, padding = words["weight"], words.get("padding_idx", -1)
    return _apply(_LookUp, call, weight, (weight, words["indices"], padding))


def _apply(function: Any, call: Call, weight: torch.Tensor, words: tuple[Any, ...]) -> torch.Tensor:
    made: torch.Tensor = function.apply(call, *words) if _can(weight) else call()
    return made


#: By the text of the row's cell `gathers`; called with the call and its arguments by name.
OF_CELLS: dict[str, Callable[[Call, dict[str, Any]], torch.Tensor]] = {
    "LINEAR": _linear,
    "PRODUCT": _product,
    "SUM": _sum,
    "ENTRIES": _entries,
}


def is_for(program: Program, node: Node) -> bool:
    """Tell whether a call accumulates the gradient of its weight in place. No call does in a
    program that differentiates calls (`derived.py`): these products cannot be differentiated
    twice."""
    row = table.ROWS.get(program.row_of(node))
    return row is not None and row["gathers"] is not None and not program.is_derived


def run(
    program: Program,
    node: Node,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Run such a call."""
    row = table.ROWS[program.row_of(node)]
    assert row["gathers"] is not None
    words = table.bind(row["call"], args, kwargs)
    return OF_CELLS[row["gathers"]](lambda: func(*args, **kwargs), words)
