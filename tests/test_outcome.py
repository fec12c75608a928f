"""The comparison behind `test_opdb` sees each way in which a program can come out different."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import opdb

Break = Callable[[torch.Tensor], torch.Tensor]


def scaled(tensor: torch.Tensor) -> torch.Tensor:
    """Give the last bits of every value another meaning."""
    return tensor * (1 + 2**-40) if tensor.is_floating_point() else tensor


def drawing(tensor: torch.Tensor) -> torch.Tensor:
    """Draw a number nobody asked for."""
    torch.rand(())
    return tensor


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Lose the gradient."""
    return tensor.detach()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Lose what is written in place."""
    return tensor.clone()


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Keep the values, change the layout."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Change the dtype."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def shouting(tensor: torch.Tensor) -> torch.Tensor:
    """Fail where torch does not."""
    raise RuntimeError("no")


def swapping_gradients(tensor: torch.Tensor) -> torch.Tensor:
    """Keep the values, change the gradient."""
    return tensor + 0 * tensor.detach().sin() if not tensor.requires_grad else Doubled.apply(tensor)


class Doubled(torch.autograd.Function):
    """The identity, with twice the gradient."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        """Return twice the gradient."""
        return gradient * 2


@pytest.mark.parametrize(
    ("op", "enter", "words"),
    [
        ("add", scaled, "numbers differ"),
        ("add", drawing, "the generator's state"),
        ("sin", detached, "requires_grad False, not True"),
        ("sin", swapping_gradients, "gradients[0]"),
        ("add", copied, "in-place method: entered[0]: "),
        ("add", transposed, "stride ("),
        ("sin", narrowed, "dtype torch.float32, not torch.float64"),
        ("sin", shouting, "RuntimeError: no, not None"),
        ("cat", shouting, "[error 0] function: RuntimeError: no, not "),
        ("index_add", copied, "in-place method: "),
    ],
)
def test_sees(op: str, enter: Break, words: str) -> None:
    """A broken way in is reported, with words that tell what broke."""
    report = opdb.check_op(opdb.OPS[op], enter)
    assert any(words in line for line in report.differing), "\n".join(report.differing[:20])


def test_sees_nothing_else() -> None:
    """What is not broken is not reported."""
    report = opdb.check_op(opdb.OPS["add"], lambda tensor: tensor)
    assert not report.differing
    assert not report.not_repeated
    assert report.same > 40


def test_meaningless_values_are_not_compared() -> None:
    """`empty_like` is compared in all but its values."""
    report = opdb.check_op(opdb.OPS["empty_like"], lambda tensor: tensor)
    assert not report.differing
    assert not report.same
    assert report.values_skipped
