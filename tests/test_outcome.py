# SPDX-License-Identifier: Apache-2.0
"""The comparison behind `test_opdb` sees each way in which a program can come out different."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import opdb
from outcome import Outcome, Program, assert_same, assert_same_numbers, observe

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


def numbers_after(change: Break) -> None:
    """Assert that a small program has the same numbers whether or not its input is changed so."""

    def outcome(enter: Break) -> Outcome:
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).requires_grad_()
        return observe(Program(lambda entered: entered[0].sin(), [x], [x]), enter)

    assert_same_numbers(outcome(lambda x: x), outcome(change))


def undefined(tensor: torch.Tensor) -> torch.Tensor:
    """Keep everything but the gradient, which is left undefined."""
    return tensor.detach().requires_grad_()


def test_numbers_may_be_rounded() -> None:
    """Rounding and layout make no difference to numbers."""
    numbers_after(lambda x: x * (1 + 1e-13))
    numbers_after(transposed)


@pytest.mark.parametrize(
    "change", [lambda x: x * (1 + 1e-8), detached, undefined, narrowed, shouting, lambda x: x[:3]]
)
def test_numbers_may_not_be_others(change: Break) -> None:
    """What is more than rounding is seen."""
    with pytest.raises(AssertionError):
        numbers_after(change)


class Failing(torch.Tensor):
    """A tensor that cannot be read."""

    def detach(self) -> torch.Tensor:
        """Fail."""
        raise IndexError("out of range")


def fails_at_the_call(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Fail as eager does."""
    return Failing.detach(tensors[0])


def fails_at_a_read(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return something that fails when it is read."""
    return tensors[0].as_subclass(Failing)


def test_an_error_may_come_at_a_read() -> None:
    """The same error is the same at the call and at the first read, and no error is not."""
    wanted = observe(Program(fails_at_the_call, [torch.ones(2)]))
    late = observe(Program(fails_at_a_read, [torch.ones(2)]))
    assert_same(wanted, late)
    assert_same_numbers(wanted, late)
    with pytest.raises(AssertionError, match="no error, not IndexError"):
        assert_same(wanted, observe(Program(lambda tensors: tensors[0], [torch.ones(2)])))
