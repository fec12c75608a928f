# SPDX-License-Identifier: Apache-2.0
"""What has a backward or a schema of its own comes out as in eager: its backward is the one used.

`autograd.Function`, module backward hooks, checkpoints, custom ops and the dispatcher's own ops.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints

from koila.patches import patching
from koila.reductions import norms
from small import Smalls

SMALLS = Smalls()

# Functions with a backward of their own


class Straight(torch.autograd.Function):
    """Round; pass gradients straight through, tripled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float = 1.0) -> Tensor:
        ctx.scale = scale
        return (x * scale).round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 3 * ctx.scale, None


class TwoResults(torch.autograd.Function):
    """Save an input and a result; set up the context apart; return two tensors."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x * weight, x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(inputs[0], inputs[1], output[1])

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, exponential = ctx.saved_tensors
        return one * weight * 5 + two * exponential, (one * x).sum(0)


class Marked(torch.autograd.Function):
    """Write the input in place; one result is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        signs = x.sign()
        ctx.mark_dirty(x)
        ctx.mark_non_differentiable(signs)
        return x, signs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, signs: Tensor) -> Tensor:
        return gradient * 7


straight = Straight.apply


@SMALLS.add
def function_apply(x: Tensor) -> Any:
    return Straight.apply(x * 2)


@SMALLS.add
def function_apply_to_the_batch(x: Tensor) -> Any:
    return Straight.apply(x, 2.5)


@SMALLS.add
def function_apply_captured(x: Tensor) -> Any:
    return straight(x * 2)


@SMALLS.add
def function_with_context(x: Tensor) -> Any:
    weight = torch.ones(3, dtype=x.dtype).requires_grad_()
    one, two = TwoResults.apply(x * 2, weight)
    gradient = torch.autograd.grad((one + two).sum(), weight, retain_graph=True)
    return one, two, gradient


@SMALLS.add
def function_in_place(x: Tensor) -> Any:
    step = x * 2
    result, signs = Marked.apply(step)
    return result, signs, step


@SMALLS.add
def function_under_no_grad(x: Tensor) -> Any:
    with torch.no_grad():
        return Straight.apply(x)


@SMALLS.add
def function_of_a_wrong_shape(x: Tensor) -> Any:
    return TwoResults.apply(x, torch.ones(5, dtype=x.dtype))


@SMALLS.add
def module_backward_hook(x: Tensor) -> Any:
    torch.manual_seed(0)
    seen: list[Tensor] = []
    linear = nn.Linear(3, 2).double()
    linear.register_full_backward_hook(lambda module, ins, outs: seen.append(outs[0].clone()))
    linear(x).sin().sum().backward()
    return seen


# Checkpoints


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.GELU(), nn.Linear(5, 3)).double()


@SMALLS.add
def checkpoint(x: Tensor) -> Any:
    return checkpoints.checkpoint(block(), x, use_reentrant=False)


@SMALLS.add
def checkpoint_reentrant(x: Tensor) -> Any:
    return checkpoints.checkpoint(block(), x, use_reentrant=True)


@SMALLS.add
def checkpoint_of_a_step(x: Tensor) -> Any:
    return checkpoints.checkpoint(lambda h: h.sin() * x, x * 2, use_reentrant=False)


@SMALLS.add
def checkpoint_sequential(x: Tensor) -> Any:
    return checkpoints.checkpoint_sequential(block(), 2, x, use_reentrant=False)


# Custom ops and the dispatcher


@torch.library.custom_op("koila_tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 3)


@tripled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


tripled.register_autograd(lambda ctx, gradient: gradient * 3)


@torch.library.custom_op("koila_tests::add_one_", mutates_args=("x",))
def add_one_(x: Tensor) -> None:
    x.add_(1)


@SMALLS.add
def custom_op(x: Tensor) -> Any:
    return tripled(x * 2), torch.ops.koila_tests.tripled(x)


@SMALLS.add
def custom_op_overload(x: Tensor) -> Any:
    return torch.ops.koila_tests.tripled.default(x * 2)


@SMALLS.add
def custom_op_in_place(x: Tensor) -> Any:
    step = x.detach() * 2
    add_one_(step)
    return step


@SMALLS.add
def aten_overload(x: Tensor, z: Tensor) -> Any:
    return torch.ops.aten.mul.Tensor(x, z), torch.ops.aten.sum.dim_IntList(x, [0], True)


@SMALLS.add
def aten_packet(x: Tensor) -> Any:
    return torch.ops.aten.mul(x, 2), torch.ops.aten.add_(x * 2, 1)


@SMALLS.add
def aten_of_a_wrong_shape(x: Tensor) -> Any:
    return torch.ops.aten.mm.default(x, x)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", SMALLS)
def test_equals_eager(name: str, requires_grad: bool) -> None:
    SMALLS[name].check(requires_grad)


def test_apply_captured_before_koila_is_imported() -> None:
    """The custom backward is used even where `apply` was looked up before koila came."""
    program = """
        import torch

        class Tripled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                return gradient * 3

        tripled = Tripled.apply
        import koila

        x = torch.ones(4, 2, requires_grad=True)
        tripled(koila.lazy(x) * 2).sum().backward()
        assert torch.equal(x.grad, torch.full((4, 2), 6.0)), x.grad
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=900)


def test_only_functions_of_others_are_searched_for_lazies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk runs koila's own functions, and never on lazies."""
    searched: list[Any] = []
    monkeypatch.setattr(patching, "holds_lazy", searched.append)
    x = torch.ones(4, 2, requires_grad=True)
    norms.Moments.apply(x, {}, None)
    assert not searched
    Straight.apply(x)
    assert searched == [(x,), {}]
