# SPDX-License-Identifier: Apache-2.0
"""plan(): the memory that a recorded step will take, before anything runs."""

from __future__ import annotations

from typing import Any

from koila.basics.threads import in_turn
from koila.memory import plan_program
from koila.messages.errors import KoilaError
from koila.messages.memory_plan import MemoryPlan
from koila.planning import limits
from koila.planning.explain import forecast, numbers, numbers_of_whole, roots_of, why_nothing
from koila.staged.program import Program


@in_turn
def plan(*losses: Any) -> MemoryPlan:
    """Return the memory that a step will take, without running anything.

    Args:
        losses: lazy tensors that backward() would be called on, or lists of them.

    Returns:
        Bytes by phase (forward, backward, optimizer's step), by category at the peak (parameters,
        gradients, optimizer state, activations, results that your script holds, temporaries), the
        ten largest values with their layer and line, the chunks, and what is recomputed or
        offloaded. It prints as a text, is a card in a notebook, and writes files (`save`): a
        picture, JSON, a trace for Chrome and Perfetto, and a snapshot for torch's memory viewer. If
        the step does not fit, it describes the chunks that need least memory.

    Raises:
        TypeError: no tensor was given, or something else.
        KoilaError: nothing is recorded for these tensors, or they are computed already.

    Examples:
        >>> import torch, koila
        >>> x = koila.lazy(torch.ones(64, 256))
        >>> w = torch.ones(256, 256, requires_grad=True)
        >>> plan = koila.plan((x @ w).relu().sum())
        >>> plan.fits, plan.n_chunks, plan.phases["optimizer's step"]
        (True, 1, 262144)
    """
    roots = roots_of("plan", losses)
    nothing = why_nothing(roots)
    if nothing:
        raise KoilaError(f"koila.plan: {nothing}; call it with a loss, before its backward()")
    program = Program(roots)
    is_graph = any(root.requires_grad for root in roots)
    if not program.axes or program.unstageable is not None:
        allowed, summary = limits.allowed_for(program), numbers_of_whole(program, is_graph)
        return plan_program.of(program, is_graph, plan_program.Way(), allowed, summary)
    expected, allowed = forecast(program, is_graph), max(0.0, limits.allowed_for(program))
    summary = numbers(program, is_graph, expected)
    return plan_program.of(program, is_graph, expected.way, allowed, summary)
