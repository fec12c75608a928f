# SPDX-License-Identifier: Apache-2.0
"""The bytes that a program needs, and the bytes that it may use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from koila.basics import config
from koila.memory import budget, estimates, optimizers, storages
from koila.messages.words import size
from koila.planning.strategies import devices_of
from koila.staged.program import Program

# The share of the allowed memory that a whole run may be predicted to need: unlike a run in chunks,
# it cannot be undone and planned again. A limit of the process counts the allocator's holes, too.
_WHOLE_SHARE, _BOUND_SHARE = 0.9, 0.8


def whole_share() -> float:
    """Return the share of the allowed memory that a whole run may be predicted to need."""
    return _BOUND_SHARE if budget.is_bound() else _WHOLE_SHARE


def _tensors_of_step(program: Program) -> list[torch.Tensor]:
    """Return the existing tensors that belong to the step, without gradients: inputs, parameters,
    and the state of optimizers."""
    storages.note_leaves(program.parameters)
    behind = program.parameters if program.on_graphs else []  # else they are among those that enter
    return program.entered + behind + optimizers.state()


def allowed_for(program: Program, is_alone: bool = False, needed: float = math.inf) -> float:
    """Return the bytes that a program may use: the least of its devices, since the bytes that it
    needs are summed over all of them. `is_alone`: ignore tensors that do not belong to the step.
    `needed`: the most that it needs, if known; see `budget.free_bytes`."""
    held = _tensors_of_step(program) if config.get("memory_limit") is not None else []
    free = [budget.free_bytes(one, held, is_alone, needed) for one in devices_of(program)]
    return float(min(free))


def outside(program: Program) -> float:
    """Return the bytes of other tensors, which count against the program's limit."""
    held = _tensors_of_step(program)
    return float(max(budget.outside(device, held) for device in devices_of(program)))


def largest_outside(program: Program) -> torch.Tensor | None:
    """Return the largest other tensor on a device of the program; None: there is none."""
    held = _tensors_of_step(program)
    found = (storages.largest_beside(held, device) for device in devices_of(program))
    return max((one for one in found if one is not None), key=lambda one: one.nbytes, default=None)


def limit_in_words(program: Program) -> str:
    """Describe the limit and the bytes of it that are taken; empty if there is no limit."""
    limit = config.get("memory_limit")
    if limit is None:
        if budget.is_bound() and devices_of(program)[0].type == "cpu":
            return "the limit of the process counts Python's objects and libraries too"
        return ""
    counted = (
        budget.counted(one, program.parameters, program.entered) for one in devices_of(program)
    )
    parts = max(counted, key=lambda parts: sum(n_bytes for _, n_bytes in parts))
    taken = ", ".join(f"{name} {size(n_bytes)}" for name, n_bytes in parts)
    text = f"the limit is {size(limit)}" + (f", of which {taken}" if taken else "")
    if program.roots and budget.GRADIENTS in dict(parts):
        text += (
            "; these gradients are of an earlier backward(): if that was of an earlier step, "
            "zero_grad(set_to_none=True) frees them"
        )
    return text


#: With more chunks than this a step is slow, on a CPU and on a GPU.
FEW_CHUNKS = 16


def as_limit(program: Program, needed: float) -> float:
    """Return the memory_limit in bytes under which a program may use `needed` bytes."""
    held = _tensors_of_step(program)
    with storages.for_once():
        taken = max(budget.taken(device, held) for device in devices_of(program))
    return taken + needed


class Before(NamedTuple):
    """What a memory_limit is for beside a program, in bytes."""

    limit: float  # it leaves nothing for the program
    coming: float  # the part of it for state that optimizers have not made yet
    stepping: float  # what the step of an optimizer takes beyond it


def in_tenths(n_bytes: float) -> float:
    """Round bytes up to a tenth of a MiB."""
    return math.ceil(10 * n_bytes / 2**20) * 2**20 / 10


@dataclass(frozen=True)
class Needs:
    """The bytes that a program needs in the chunks that need least."""

    rows: int  # of a chunk
    n_bytes: float
    node: int  # the call at the worst moment
    fixed: float  # the part of `n_bytes` that does not shrink with the chunks
    allowed: float  # the bytes that the program may use


def least(estimate: estimates.Estimate, allowed: float) -> Needs:
    """Return what a program needs in the chunks that need least."""
    rows, n_bytes, node = estimate.least
    return Needs(rows, n_bytes, node, estimate.fixed(rows), allowed)
