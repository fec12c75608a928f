# SPDX-License-Identifier: Apache-2.0
"""Undo a run that ran out of memory, and try it again in smaller chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from koila import _core
from koila.basics.config import get
from koila.memory import budget
from koila.messages.errors import (
    KoilaError,
    MemoryLimitError,
    NotInChunksError,
    is_of_layout,
    is_out_of_memory,
    let_go,
)
from koila.planning import plans, refusals
from koila.planning.explain import report_of, scheduled
from koila.random import draws, generators
from koila.reporting import reports
from koila.running.stages import Stages
from koila.staged import hooks
from koila.staged.program import Program

_Run = TypeVar("_Run", bound=Stages)


def attempt(
    program: Program,
    planned: plans.Plan,
    make: Callable[[Program, plans.Plan, hooks.Seen], _Run],
    run: Callable[[_Run], Any],
) -> tuple[_Run, Any, plans.Plan] | None:
    """Run a program; each time memory runs out, try again in more chunks or shorter segments.

    Args:
        program: the staged program.
        planned: the chunks and the strategy of the first try.
        make: makes a replay of a plan. All tries share what the user's hooks have seen.
        run: called with the replay of each try.

    Returns:
        The replay that succeeded, what `run` returned, and the plan of this try. None if the
        program has to run whole.

    Raises:
        MemoryLimitError: not even one row at a time fits.
    """
    n_tries = 1
    hooked = hooks.Seen()
    meter = budget.Meter()
    while True:
        replay = make(program, planned, hooked)
        _core.set_busy(True)
        try:
            grids, grid_of = replay.grids, replay.grid_of
            described = scheduled(program, planned.strategy, replay.schedule, grids, grid_of)
            result = run(replay)
            reports.note(report_of(program, planned, n_tries, meter.bytes(), described))
            return replay, result, planned
        except BaseException as error:
            replay.draws.roll_back()
            if isinstance(error, NotInChunksError) or is_of_layout(error):
                # On the whole batch the call is legal, or raises the same.
                reports.decide(reports.Decision(f"it cannot be cut: {error}"))
                return None
            is_fixed = bool(draws.pinned_grids()) or get("chunks") is not None
            is_memory = is_out_of_memory(error)
            if is_memory and replay.is_delivering:
                _core.abandon()  # smaller chunks do not help, and the user's hooks have run
                raise
            tighter = None
            if is_memory:
                del replay  # free what the failed try made: planning the next one takes memory
                let_go(error)
                budget.defragment()
                tighter = _tighter(program, planned, is_fixed)
            if tighter is None:
                if not is_memory:
                    generators.move_on()  # later draws come after the program's, as in eager
                is_calls = isinstance(error, Exception) and not isinstance(error, KoilaError)
                if is_memory or not is_calls or not _core.failed(error):
                    _core.abandon()  # otherwise the core has noted which call raised
                if is_memory and not is_fixed:
                    raise _refusal(program, error) from None
                raise
        finally:
            _core.set_busy(False)
        program, planned = tighter
        n_tries += 1


def _tighter(
    program: Program, planned: plans.Plan, is_fixed: bool
) -> tuple[Program, plans.Plan] | None:
    """Return the program and plan to try next; None if there is none, or no memory to plan it."""
    try:
        return planned.tighter(program, is_fixed)
    except MemoryError:
        return None


def _refusal(program: Program, error: BaseException) -> MemoryLimitError:
    """Return the error to raise where memory ran out (`error`) in the smallest chunks."""
    said = str(error).partition("\n")[0]
    try:
        return refusals.ran_out(program, said)
    except MemoryError:
        return refusals.no_room_to_plan(program)
