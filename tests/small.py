# SPDX-License-Identifier: Apache-2.0
"""Small programs that are run twice, plain and with lazy inputs, and must leave the same behind.

A program is a function of some of `x`, `z` (4 x 3, float64) and `labels` (4); what it returns is
compared, and the gradients of all it returns.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import koila
from outcome import Enter, Outcome, Program, assert_same, observe, weights

Run = Callable[..., Any]


def ones(*shape: int) -> torch.Tensor:
    """Return ones in float64."""
    return torch.ones(*shape, dtype=torch.float64)


def linear() -> torch.nn.Linear:
    """Return the same layer, from 3 to 2, at each call."""
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2).double()


def _inputs(requires_grad: bool) -> dict[str, torch.Tensor]:
    x = weights((4, 3), torch.float64) - 1
    z = weights((4, 3), torch.float64).flip(0) * 3 - 2
    made = {"x": x.clone(), "z": z.clone()}
    made = {name: tensor.requires_grad_(requires_grad) for name, tensor in made.items()}
    return made | {"labels": torch.tensor([0, 2, 1, 1])}


@dataclass(frozen=True)
class Small:
    """A program, and whether koila may refuse it with an error where eager would not."""

    run: Run
    may_refuse: bool = False

    def observe(self, requires_grad: bool, is_read_first: bool, enter: Enter) -> Outcome:
        """Run it on fresh inputs."""
        names = list(inspect.signature(self.run).parameters)
        inputs = _inputs(requires_grad)
        tensors = [inputs[name] for name in names]
        program = Program(lambda entered: self.run(*entered), tensors, tensors)
        return observe(program, enter, is_read_first)

    def check(self, requires_grad: bool, enter: Enter = koila.lazy) -> None:
        """Assert that lazy inputs make no difference, whether values or gradients come first."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for is_read_first in (True, False):
                wanted = self.observe(requires_grad, is_read_first, lambda tensor: tensor)
                got = self.observe(requires_grad, is_read_first, enter)
                is_refused = got.failure is not None and wanted.failure is None
                if not (self.may_refuse and is_refused):
                    assert_same(wanted, got)


class Smalls(dict[str, Small]):
    """The programs of a test file, by name."""

    def add(self, run: Run) -> Run:
        """Take a program that must come out as in eager."""
        self[run.__name__] = Small(run)
        return run

    def add_refusable(self, run: Run) -> Run:
        """Take a program that must come out as in eager, or raise."""
        self[run.__name__] = Small(run, may_refuse=True)
        return run
