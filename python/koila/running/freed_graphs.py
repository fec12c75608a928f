# SPDX-License-Identifier: Apache-2.0
"""Numbers whose graph is gone, which still require a gradient and raise if one is sent back."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from koila import _core
from koila.basics import engine, surroundings
from koila.basics.rows import as_new
from koila.messages.errors import KoilaError, StaleError


@functools.cache
def _second_time() -> str:
    """Return the text of torch's error for a second backward through a graph."""
    with surroundings.outside(), torch._C._InferenceMode(False), torch.enable_grad():
        leaf = torch.ones((), device="cpu", requires_grad=True)
        root = leaf.exp()
        try:
            for _ in range(2):
                engine.gradients_of([root], [leaf], [torch.ones_like(root)])
        except RuntimeError as error:
            return str(error)
    raise AssertionError("a graph that was used up can be used again")


def used_up() -> KoilaError:
    """Return the error for a second backward. torch raises it only if a call of the graph saved
    something; koila keeps no graph in either case."""
    return KoilaError(
        f"{_second_time()} koila keeps no graph behind a value whose backward ran, also where the "
        "calls saved nothing for it."
    )


class _Refusing(engine.Function):
    """The node behind a number whose graph is gone; `refuse` raises the reason. Its inputs are the
    leaves and numbers that the number was computed from, so that autograd.grad finds a path to
    them."""

    @staticmethod
    def forward(ctx: Any, number: list[torch.Tensor], *leaves: torch.Tensor) -> torch.Tensor:
        ctx.n = len(leaves)
        ctx.set_materialize_grads(False)
        return as_new(number[0])  # a tensor of its own, to which autograd gives this node

    @classmethod
    def backward(cls, ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Refuse a gradient. Without one there is nothing to refuse: the engine visits all inputs
        of a node that stands for a part of a program."""
        if any(gradient is not None for gradient in gradients):
            cls.refuse()
        return (None,) * (1 + ctx.n)

    @staticmethod
    def refuse() -> NoReturn:
        raise NotImplementedError


class OfFreedGraph(_Refusing):
    """A number whose graph was freed by a backward."""

    @staticmethod
    def refuse() -> NoReturn:
        raise used_up()


class Outdated(_Refusing):
    """A number whose graph read tensors that have changed since."""

    @staticmethod
    def refuse() -> NoReturn:
        raise StaleError(
            "backward: only the number of this value is left, since a tensor that it was computed "
            "with was changed in place after it was read, or its step is over; call backward() "
            "before that"
        )


def hung_on(function: Any, number: torch.Tensor, before: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return `number`, in the same memory, with a graph behind it that raises; it does not keep the
    memory, as a freed graph of eager's does not. The node behind it is an OfFreedGraph or Outdated;
    its inputs are the tensors `before`, from which the number was computed; none: a new leaf."""
    with torch._C._InferenceMode(False), torch.enable_grad():
        found = list(before)
        inputs = list(dict(zip(map(id, found), found, strict=True)).values())
        if not inputs:
            inputs.append(torch.ones((), device="cpu").requires_grad_())
        with engine.as_recorded(inputs):
            hung: torch.Tensor = function.apply([number], *inputs)
    return hung


def check_program(program: object) -> None:
    """Raise if an earlier backward went through calls of a program (its handle) without
    retain_graph, also if no lazy refers to their values any more."""
    if _core.spend(program, True) is not None:
        OfFreedGraph.refuse()


def is_failed(lazy: _core.LazyTensor) -> bool:
    """Return whether a lazy has no value, since a call before it failed."""
    try:
        _core.describe(lazy)
    except Exception:  # the call's own
        return True
    return False
