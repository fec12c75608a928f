# SPDX-License-Identifier: Apache-2.0
"""Choose the number of chunks of a program: what config() asks for, or else as few as fit."""

from __future__ import annotations

import contextlib
import dataclasses

from koila import _core
from koila.basics import config, lines
from koila.basics.rows import largest
from koila.memory import budget, estimates, optimizers, storages
from koila.messages.errors import MemoryLimitError
from koila.planning import fitting, left_graphs, limits, plans, refusals, seen, steps
from koila.planning.least_limits import LeastLimit, Needed
from koila.planning.limits import Needs
from koila.planning.plans import Plan, is_measured
from koila.planning.strategies import Strategies
from koila.random import draws
from koila.reporting import reports
from koila.staged.cache import remember
from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS, Strategy

_ASKED = reports.Decision("config(chunks=1) asks for it")
_FITS = reports.Decision("it certainly fits")


def why_whole() -> reports.Decision | None:
    """Return, quickly and without staging, why all that is pending certainly runs in one chunk;
    None: that is not known."""
    now = config.settings()
    if now.chunks is not None:
        return _ASKED if now.chunks == 1 else None
    is_free = now.memory_limit is None and budget.is_ample(int(_core.pending_bytes(False)))
    return _FITS if is_free else None


def is_whole() -> bool:
    """Tell, quickly and without staging, whether all that is pending certainly fits in one
    chunk."""
    return why_whole() is not None


def plan(program: Program, is_graph: bool, is_final: bool = True) -> Plan:
    """Choose the number of chunks for a program, and the strategy by which to schedule it.

    A share of the memory that is allowed is not planned with, since predicted bytes are not exact;
    nor, under a limit of the process, what libraries may still take. A program that would otherwise
    be refused may use both, since a run that fails is undone.

    Args:
        program: what is to run.
        is_graph: whether it is differentiated.
        is_final: the caller passes a refusal on to the user; if not, it tries something else.

    Raises:
        MemoryLimitError: it fits neither whole nor in any number of chunks.
    """
    chunks = config.get("chunks")
    if chunks is not None:
        strategy = _strategy_in(chunks, program) if is_graph else AS_IT_IS
        if strategy is None and is_final:
            return Plan(1, why=_MORE_IN_CHUNKS, is_scheduled=program.is_part)
        return Plan(chunks, strategy=strategy or AS_IT_IS)
    if not program.axes:
        return Plan(1)
    try:
        return _plan(program, is_graph, is_final)
    except MemoryError:
        budget.defragment()
    try:
        return _plan(program, is_graph, is_final)
    except MemoryError:
        raise refusals.no_room_to_plan(program) from None


def _plan(program: Program, is_graph: bool, is_final: bool) -> Plan:
    """Plan a program whose number of chunks the user did not set; see `plan`."""
    key = seen.key_of(program, is_graph)
    before: seen.Seen | None = program.cache.plans.get(key) if key is not None else None
    is_printed = key is not None and key.is_printed
    if before is not None and (planned := before.now(program)) is not None:
        reports.measure(before.whole)
        if planned.least_limit is not None:
            planned.least_limit.needed.keep(program, is_graph, is_printed)
        return planned
    estimate = left_graphs.estimate(program, is_graph)
    reports.measure(estimate.whole)
    made = fitting.fit(program, estimate, is_graph)
    could_fit = isinstance(made, Needs) and made.n_bytes <= limits.allowed_for(program, True)
    if could_fit and storages.look_again(is_final):
        made = fitting.fit(program, estimate, is_graph)
    for _ in range(2 if is_final and is_measured() else 0):  # so that it fits, then in more rows
        asked = plans.to_ask_for(made)
        made = fitting.fit(program, estimate, is_graph, asked) if asked > 0 else made
    if isinstance(made, Needs):
        # Finding the names and limits in the message takes long; this caller drops the message.
        raise refusals.refusal(made, program) if is_final else MemoryLimitError
    least = _least_limit(program, made, is_graph, is_printed)
    made = dataclasses.replace(made, least_limit=least)
    seen.note(program, key, made, estimate.whole)
    return made


#: By the line that asked and the sizes of the program. Finding a limit measures all strategies, so
#: that is repeated only if a program needs more memory than before by this share.
_least_limits: dict[tuple[str, int, int, int, int], LeastLimit] = {}
_GROWN = 0.02


def _least_of(program: Program, is_graph: bool) -> float:
    return fitting.Trial(program, is_graph).least


def _least_limit(
    program: Program, made: Plan, is_graph: bool, is_printed: bool
) -> LeastLimit | None:
    """Return the least memory_limit that suffices for all programs of this kind so far; None if no
    limit is set.

    Args:
        program: what is to run.
        made: its plan.
        is_graph: whether it is differentiated.
        is_printed: as for `Needed.keep`.
    """
    limit = config.get("memory_limit")
    if limit is None or made.allowed is None:
        return None
    counts = program.n_nodes, program.n_values, program.n_imports, program.n_stages
    key = lines.user_line(), *counts
    coming = optimizers.coming_state(program.parameters) if program.roots else 0
    least, taken = _least_limits.get(key), limit - made.allowed + coming
    if least is None or made.whole > (1 + _GROWN) * least.whole:
        least = LeastLimit(made.whole, taken, refusals.before(program), Needed(_least_of))
    elif taken > least.taken:  # for instance by a replay buffer that grew
        before = least.before._replace(limit=least.before.limit + taken - least.taken)
        least = least._replace(taken=taken, before=before)
    least.needed.keep(program, is_graph, is_printed)
    remember(_least_limits, key, least)
    return least


#: Chunks that the user asked for are to need at most this share of eager mode's activations.
_ASKED_SHARE = 0.6
#: If no strategy reaches that share, strategies count that need at most this multiple of the best
#: one's bytes.
_NEARLY = 1.05
_MORE = 1.1  # the bytes predicted may be too high by this factor
#: A program that makes less runs as it is: saving memory is not worth the time.
FEW_BYTES = 2**20
_MORE_IN_CHUNKS = "in the chunks that were asked for it would take more"


def _strategy_in(chunks: int, program: Program) -> Strategy | None:
    """Return the cheapest strategy that saves memory in a number of chunks that the user asked for;
    None if every strategy needs more than a whole run."""
    if chunks == 1 or not program.axes:
        return AS_IT_IS
    is_small, is_pinned = program.amounts.made < FEW_BYTES, bool(fitting.pinned_grids(program))
    is_behind = not is_pinned and _is_graph_behind(program)
    if is_small and not is_behind:
        return AS_IT_IS
    shared = estimates.bytes_shared(program) if is_behind else 0
    key, strategies_in = (chunks, is_pinned, is_behind, shared), program.cache.strategies_in
    if key not in strategies_in:
        strategy = AS_IT_IS if is_small else _find_strategy_in(chunks, program)
        if (
            strategy is not None
            and is_behind
            and _is_less_in_one(chunks, program, strategy, shared)
        ):
            strategy = None
        strategies_in[key] = strategy
    return strategies_in[key]


#: A program with a graph behind it runs in one chunk if several would take so many bytes more.
_MORE_OF_ROWS = 2**16


def _is_graph_behind(program: Program) -> bool:
    """Tell whether a graph is behind a program, as behind each part that was cut off: of such, only
    those without barriers count."""
    if program.is_part:
        return [run.is_body for run in program.runs if run.nodes or run.combined] == [True]
    return bool(program.on_graphs)


def _is_less_in_one(chunks: int, program: Program, strategy: Strategy, shared: int) -> bool:
    """Tell whether a program that a graph is behind takes less in one chunk than in several. Each
    chunk's gradient of a value that entered with its rows is beside that of all rows; a program
    that saves little wins less than that. Nor does it win where the graph behind takes most, which
    runs later: then gradients that one chunk would share (`shared` bytes) are there as well.
    """
    cut = program.cut_for(strategy)
    alone = estimates.estimate(cut, True, strategy, graphs=lambda _: 0.0)
    rows, most = largest(alone.rows, chunks, 1), alone.whole + _MORE_OF_ROWS
    if alone.peak(rows)[0] > most:
        return True
    return shared > _MORE_OF_ROWS and estimates.estimate(cut, True, strategy).peak(rows)[0] > most


def _find_strategy_in(chunks: int, program: Program) -> Strategy | None:
    some = Strategies(program, True)
    estimate = some.option(AS_IT_IS).estimate
    rows = largest(estimate.rows, chunks, 1)
    gradients = sum(parameter.nbytes for parameter in program.parameters)
    asked = gradients + _ASKED_SHARE * max(0, estimate.whole - gradients)
    found = [(estimate.peak(rows)[0], AS_IT_IS)]
    others = map(some.option, filter(some.is_there, some.recomputing()))
    while found[-1][0] > asked and (option := next(others, None)) is not None:
        found.append((option.estimate.peak(rows)[0], option.strategy))
    least = min(found)[0]
    is_free = not (program.is_part or fitting.pinned_grids(program))
    if least > _MORE * estimate.whole and is_free:
        return None
    enough = asked if least <= asked else gradients + _NEARLY * (least - gradients)
    return next(strategy for n_bytes, strategy in found if n_bytes <= enough)


def plan_read(program: Program, is_no_grad_only: bool) -> Plan | None:
    """Choose how to compute numbers that the script reads before its backward pass.

    If the whole step will fit with its graph, the program runs live and keeps the graph for
    backward(). Else it runs without a graph. If its random draws then fix the chunks, it runs in
    those that backward() will need, as far as that is known.

    Args:
        program: what is to run.
        is_no_grad_only: it has only values without a gradient in their history.

    Returns:
        None: it runs live, together with all other pending calls.

    Raises:
        MemoryLimitError: one row does not fit, even without a graph.
    """
    try:
        return _plan_read(program, is_no_grad_only)
    except MemoryLimitError as error:
        refusals.note_backward(error, program)
        raise


def _plan_read(program: Program, is_no_grad_only: bool) -> Plan | None:
    """Do the work of `plan_read`."""
    # Numbers read before would be computed again by a live run, which builds their graph.
    is_read = _core.has_numbers()
    is_apart = is_no_grad_only or is_read
    if not program.has_body and not is_apart:
        return None
    is_pinning = program.is_drawing and any(
        node.is_random and draws.is_pinning(node.id, node.first_out)
        for run in program.runs
        if run.is_body
        for node in map(program.node, run.nodes)
    )
    if is_apart and not is_pinning:
        planned = plan(program, False)
        return None if planned.n_chunks == 1 and program.is_all and not is_read else planned
    step = Program([]) if is_no_grad_only else program
    ends = step.ends()
    with_graph: Plan | None = None
    with contextlib.suppress(MemoryLimitError):
        with_graph = plan(Program(ends), True, False) if ends else plan(step, False)
    if with_graph is None:
        return plan(program, False)  # the script may never call backward()
    # A live run would make a graph, which is not in the plan of detached values.
    is_detached = not ends and not is_no_grad_only and bool(program.needing)
    is_due = is_read or is_detached or not with_graph.is_whole
    planned = dataclasses.replace(with_graph, strategy=AS_IT_IS)  # no graph is kept here
    if is_pinning or not ends or planned.shape is None:
        return planned if is_due else None
    assert planned.allowed is not None
    needed = steps.whole(program, planned.whole)
    if (
        planned.n_chunks == 1
        and needed is not None
        and needed <= limits.whole_share() * planned.allowed
    ):
        return None
    steps.note_read(program, planned.whole)
    return plan(program, False)
