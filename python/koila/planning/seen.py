# SPDX-License-Identifier: Apache-2.0
"""A cache of plans: the plan of a program that an earlier step had too is looked up."""

from __future__ import annotations

from typing import NamedTuple

import torch

from koila import _core
from koila.memory import budget, estimates, optimizers
from koila.planning import limits, strategies
from koila.planning.plans import Plan
from koila.random import draws
from koila.staged import hooks
from koila.staged.cache import keep, remember
from koila.staged.program import Program
from koila.staged.schedule import Policy

#: A plan is used again if at most this share more of memory is left than when it was made: with
#: more, fewer chunks may do.
_MORE_LEFT = 0.01


class Seen(NamedTuple):
    """A plan that was made, and the bytes that its program needs whole."""

    plan: Plan
    whole: float

    def now(self, program: Program) -> Plan | None:
        """Return the plan, with the bytes that the program may use now in its `allowed`.

        Return None if the program has to be planned again: the plan no longer fits, or so much more
        memory is left than when it was made that fewer chunks may do.
        """
        plan, allowed = self.plan, limits.allowed_for(program, needed=self.whole)
        assert plan.predicted is not None and plan.allowed is not None
        fits = allowed >= plan.allowed or plan.predicted <= strategies.CHUNK_SHARE * allowed
        is_near = plan.is_whole or allowed <= (1 + _MORE_LEFT) * plan.allowed
        if Policy.OFFLOAD in plan.strategy.policies:
            fits = fits and strategies.can_offload(program)
        if not (fits and is_near):
            return None
        return plan if allowed == plan.allowed else plan.with_allowed(allowed)


class Key(NamedTuple):
    """All that a plan depends on beside the program, which has the cache, and the memory that
    is left."""

    is_graph: bool  # it is differentiated
    gets_all: bool  # all leaves get a gradient
    have_gradients: tuple[bool, ...]  # of the tensors that need one: whether it exists
    coming: int  # the bytes of state that optimizers will make
    drawn: int  # the bytes of generator states that are kept
    noise: object  # of programs that draw: what `estimates.of_nodes` returns
    hooked: tuple[int, ...]  # the values with hooks

    @property
    def is_printed(self) -> bool:
        """Whether the program needs as much memory as its print tells alone, without tensors and
        without what belongs to its tape."""
        return not (any(self.have_gradients) or self.drawn or self.hooked)


def key_of(program: Program, is_graph: bool) -> Key | None:
    """Return what a plan is cached by; None: it depends on more than a Key holds.

    That is so if other calls are pending or graphs exist that are differentiated too, and if what
    an earlier run of the program left, its numbers or the chunks in which it drew, counts.
    """
    notes = _core.notes()
    is_alone = program.is_all and not (program.beside or "lengths" in notes or "grids" in notes)
    if not is_alone or budget.is_bound() or _core.has_numbers() or program.on_graphs:
        return None
    coming = optimizers.coming_state(program.parameters) if is_graph else 0
    with torch._C.DisableTorchFunctionSubclass():  # statistics that are watched are a subclass
        have_gradients = tuple([one.grad is not None for one in program.needing])
    noise = estimates.of_nodes(program) if program.is_drawing else None
    drawn, hooked = draws.bytes_kept(), tuple(hooks.hooked())
    gets_all = program.gets is None
    return Key(is_graph, gets_all, have_gradients, coming, drawn, noise, hooked)


def note(program: Program, key: Key | None, made: Plan, whole: float) -> None:
    """Keep a plan for later steps with the same program."""
    if key is not None and made.predicted is not None:
        remember(program.cache.plans, key, Seen(made, whole))
        keep(program.cache)  # what was measured since may have displaced it
