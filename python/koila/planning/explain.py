# SPDX-License-Identifier: Apache-2.0
"""koila.explain(): describe how a recorded program would run; also the reports of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from koila import _core
from koila.basics import config, lines
from koila.basics.rows import Bounds, largest
from koila.basics.threads import in_turn
from koila.memory.plan_program import Way
from koila.messages import cards, layer_table
from koila.messages.errors import MemoryLimitError
from koila.messages.layer_table import Layer
from koila.messages.words import count, hint_to_save, size, sizes
from koila.planning import (
    left_graphs,
    limits,
    planner,
    plans,
    refusals,
    schedule_words,
    strategies,
    whole_calls,
)
from koila.reporting import reports
from koila.reporting.report_types import ProgramReport, Stage, Whole
from koila.reporting.reports import Decision
from koila.staged import hooks, layers
from koila.staged.cache import remember
from koila.staged.facts import REDUCE, Node, Run, call_in_words, name_of_call, where_of_node
from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS, Schedule, Strategy

FITS_LATER = Decision("it fits, with the backward that may follow")


_WITHOUT_SAMPLES = Decision("nothing in it has samples")


def cause_of_whole(program: Program) -> Decision:
    """Return why a program runs whole: a write that stages cannot make, or no calls by rows."""
    if program.unstageable is not None:
        node, why = program.unstageable
        made, n_calls = program.amounts.made, program.n_nodes
        whole_for = Whole(name_of_call(node.id), where_of_node(node), why, made, n_calls)
        return Decision(why, whole=(whole_for,))
    whole = whole_calls.made_whole(program) if program.amounts.n_once > 0 else ()
    if not whole:
        return _WITHOUT_SAMPLES
    why = "no call in it treats each sample by itself (is batch= the dim of the samples?)"
    return Decision(why, whole=whole)


#: By the line that asked and the number of calls: the layers of a program and its rows. A cache,
#: since finding layers takes longer than planning a small program.
_layers: dict[tuple[str, int], tuple[tuple[Layer, ...], int]] = {}


def layers_of(program: Program, planned: plans.Plan) -> tuple[Layer, ...]:
    """Return the layers of a program and the bytes that they keep for backward.

    The bytes of a sample are those found in the first run of this kind; they are multiplied by the
    number of samples. A program without a backward has no layers here, nor has a small one for
    which the number of chunks is set.
    """
    is_small = planned.predicted is None and program.amounts.made < planner.FEW_BYTES
    if is_small or not program.roots:
        return ()
    key = lines.user_line(), program.n_nodes
    rows = layers.rows_of(program)
    if key not in _layers:
        try:
            remember(_layers, key, (layers.of(program), rows))
        except MemoryError:  # the step has run, or is refused anyway: the report names no layers
            return ()
    found, rows_then = _layers[key]
    return found if rows == rows_then else tuple(one.of_more(rows - rows_then) for one in found)


class Scheduled(NamedTuple):
    """How a program is about to run in stages."""

    stages: tuple[Stage, ...]
    n_chunks: int  # the most of an axis
    n_rows: int | None  # samples of the largest chunk; None: it runs whole
    strategy: str  # what saves memory beside chunks, in words
    named: list[tuple[Node, str]]  # the calls that the stages name, in words


def scheduled(
    program: Program,
    strategy: Strategy,
    schedule: Schedule,
    grids: Mapping[int, list[Bounds]],
    grid_of: Callable[[Run], list[Bounds]],
) -> Scheduled:
    """Describe a run before it begins: afterwards there may be no memory left for that. The chunks
    of an axis are in `grids`, those of a run, or pieces of them, come from `grid_of`."""
    key = id(schedule), strategy, *grids, *map(tuple, grids.values())  # `cache` keeps the schedule
    found: Scheduled | None = program.cache.described.get(key)
    is_named = found is not None and all(call_in_words(n) == text for n, text in found.named)
    if found is not None and is_named and not hooks.is_any():
        return found
    passes = schedule_words.passes_of(schedule)
    none = schedule_words.Passes()
    runs = schedule_words.runs_of(program)
    # A part before the last one with a call only counts what the call divides by.
    last = {i: run.index for run in runs for i in run.nodes}
    stages, named = [], []
    for position, run in enumerate(runs, 1):
        rows = [stop - start for start, stop in grid_of(run)] if run.is_body else []
        of_run = passes.get(run.index, none)
        why, node = schedule_words.why_twice(program, run, of_run)
        named += [] if node is None else [(node, call_in_words(node))]
        n_calls = [last[i] for i in run.nodes].count(run.index)
        n_chunks, n_rows = len(rows) or 1, max(rows, default=None)
        stages.append(Stage(position, n_calls, n_chunks, n_rows, str(of_run), why))
    in_words = schedule_words.strategy_in_words(program, strategy, schedule)
    used = list(map(grids.__getitem__, program.axes))
    most = max(map(len, used), default=1)
    is_cut = most > 1 or bool(in_words)
    n_rows = max(stop - start for grid in used for start, stop in grid) if is_cut else None
    program.cache.described[key] = found = Scheduled(tuple(stages), most, n_rows, in_words, named)
    return found


def report_of(
    program: Program,
    planned: plans.Plan,
    n_tries: int,
    measured: int | None,
    scheduled: Scheduled,
) -> ProgramReport:
    """Return the report of a program that ran in stages, at the last of `n_tries`. `scheduled` was
    made before the run; `measured` are its peak bytes, if they were measured."""
    cause, asked = cause_of_whole(program), reports.asked()
    why = ""
    if scheduled.n_rows is None:
        fits = planned.why if planned.is_scheduled else "its numbers fit, without autograd's graph"
        why = fits if program.axes else cause.why
    return ProgramReport(
        asked,
        reports.line_of(asked),
        program.n_nodes,
        program.amounts.made,
        scheduled.n_chunks,
        scheduled.n_rows,
        n_tries,
        planned.predicted,
        planned.allowed,
        measured,
        why,
        stages=scheduled.stages,
        whole=cause.whole,
        strategy=scheduled.strategy,
        bytes_whole=planned.whole or None,
        layers=layers_of(program, planned),
        least_limit=planned.limit_for_report(),
    )


class Forecast(NamedTuple):
    """How a program would run now; if it does not fit, how it would need the least memory."""

    text: str
    program: Program  # with its bodies cut into segments as they would be
    schedule: Schedule
    way: Way


def forecast(program: Program, is_graph: bool) -> Forecast:
    """Plan a program, without running it, and describe the plan."""
    try:
        planned = planner.plan(program, is_graph)
    except MemoryLimitError as error:
        text, schedule = f"it does not fit: {error}", program.schedule(is_graph)
        least = strategies.Strategies(program, is_graph).least()
        way = Way(least.strategy, least.n_chunks, fits=False)
        return Forecast(text, program, schedule, way)
    strategy = planned.strategy
    cut = program.cut_for(strategy)
    estimate = strategies.Strategies(program, is_graph).option(strategy).estimate
    rows = largest(estimate.rows, planned.n_chunks, planned.unit)
    needed = planned.predicted
    if needed is None:
        needed, _ = estimate.peak(rows)
    n_chunks = -(-estimate.rows // rows)
    schedule = cut.schedule(is_graph, strategy)
    is_whole = n_chunks == 1 and strategy == AS_IT_IS
    if is_whole:
        needed = left_graphs.estimate(program, is_graph).whole
        how = schedule_words.checkpoints_in_words(cut, strategy)
    else:
        how = schedule_words.strategy_in_words(cut, strategy, schedule)
    chunked = f"{count(n_chunks, 'chunk')} of {count(rows, 'sample')}"
    asked = config.get("chunks")
    why = f" ({planned.why})" if asked is not None and asked > 1 and planned.why else ""
    text = f"so it runs whole{why} and takes {size(needed)}"
    if not is_whole:
        text = f"so it runs in {chunked} and takes {size(needed)}"
    more = how or (schedule_words.kept_in_words(cut, schedule) if n_chunks > 1 else "")
    text += f", with {more}" if more else ""
    way = Way(strategy, planned.n_chunks, planned.unit, True, more, estimate)
    return Forecast(text, cut, schedule, way)


def numbers(program: Program, is_graph: bool, expected: Forecast) -> list[str]:
    """Describe, a line for each, the bytes that a program needs, the bytes left, the limit, how it
    would run, and the least limit that works."""
    limit, asked = limits.limit_in_words(program), config.get("chunks")
    found = _needs(program, is_graph)
    if (limit or asked is None) and (not limit or limit not in expected.text):
        found.append(limit or "no limit is set: what is free counts")
    if asked is not None:
        found.append(f"config(chunks={asked}) is set")
    found += expected.text.splitlines()
    if expected.way.fits:
        least, asked_limit = refusals.limits_of(program, is_graph), config.get("memory_limit")
        is_short, short = asked_limit is not None and least.least > asked_limit, ""
        if is_short and least.coming:
            short = ": this limit is enough only until the optimizer has made it"
        elif is_short and least.is_of_step:
            short = ": this limit is enough for the gradients, but not for the optimizer's step"
        found.append(f"least limit that works: {least}{short}")
    return found


def numbers_of_whole(program: Program, is_graph: bool) -> list[str]:
    """As `numbers`, for a program that runs on the whole batch whatever the limit is."""
    limit = limits.limit_in_words(program)
    found = [*_needs(program, is_graph), *([limit] if limit else [])]
    return [*found, f"so it runs whole: {cause_of_whole(program).why}"]


def _needs(program: Program, is_graph: bool) -> list[str]:
    """Describe the bytes that a program needs if it runs whole, and the bytes left for it; also
    whether other pending calls, whose results the script holds, run with it."""
    whole = left_graphs.estimate(program, is_graph).whole
    needs, has = sizes(whole, max(0.0, limits.allowed_for(program)))
    found = [f"whole needs {needs} more than is in use now, and {has} are left"]
    held = [value for value in left_graphs.ends_of(program) if value in program.wanted]
    if held:
        node = program.node_of(held[0])
        assert node is not None
        found.append(
            "that includes other pending calls, whose results are still held: "
            f"{call_in_words(node)}"
        )
    return found


class Explanation(str):
    """A text that terminals and notebooks show with its line breaks, also without print().

    Attributes:
        lines: its first lines: memory, the limit, chunks, and what runs on the whole batch.
        layers: the layers, with the bytes that each keeps for backward.
        calls: the recorded calls, one a line, if explain(full=True) made it.
    """

    lines: tuple[str, ...]
    layers: tuple[Layer, ...]
    calls: tuple[str, ...]

    def __new__(
        cls, lines: Iterable[str], layers_: tuple[Layer, ...] = (), calls: Iterable[str] = ()
    ) -> Explanation:
        lines, calls = tuple(lines), tuple(calls)
        made = super().__new__(cls, "\n".join((*lines, *layer_table.table(layers_), *calls)))
        made.lines, made.layers, made.calls = lines, layers_, calls
        return made

    def __repr__(self) -> str:
        return f"{self}\n{hint_to_save('explain.txt')}"

    def _repr_html_(self) -> str:
        return cards.html("koila.explain", self.lines, self.layers, self.calls)


ALL_HAS_RUN = "nothing is pending: all has run"


def roots_of(function: str, losses: Sequence[Any]) -> list[_core.LazyTensor]:
    """Return the lazy tensors among losses and lists of losses. Raise a TypeError, which names the
    `function` called, if there are none, or one of them is no tensor."""
    listed = (loss if isinstance(loss, tuple | list) else (loss,) for loss in losses)
    found = [loss for some in listed for loss in some]
    for loss in found or [None]:
        if not isinstance(loss, torch.Tensor):
            given = f", not {type(loss).__name__}" if found else ""
            raise TypeError(f"koila.{function}: give it a loss, a lazy tensor{given}")
    return [loss for loss in found if type(loss) is _core.LazyTensor]


def why_nothing(roots: Sequence[_core.LazyTensor]) -> str:
    """Return why none of these tensors is pending; empty if one is."""
    if not roots:
        return "no lazy tensor was given: nothing is recorded for it"
    if all(map(_core.is_input, roots)):
        return "an input, of which nothing is computed yet"
    return ALL_HAS_RUN if all(_core.real(root) is not None for root in roots) else ""


#: The most calls on the whole batch that are listed with their reasons.
_MOST_WHOLE = 5


@in_turn
def explain(*losses: Any, full: bool = False) -> Explanation:
    """Describe how losses would be computed and differentiated, without running anything.

    Args:
        losses: lazy tensors that backward() would be called on, or lists of them.
        full: also list every recorded call, in the order they run: its shape, dtype and line,
            whether it runs in chunks, and if not, why.

    Returns:
        A text with the memory that the whole batch needs, the limit and what counts against it, the
        number of chunks and the bytes that it would take now, and the least limit that works; the
        layers that keep most for backward; and each call that needs the whole batch, with the
        reason and the line. If everything has run already, the report of the last step.

    Raises:
        TypeError: no tensor was given, or something else.

    Examples:
        >>> import torch, koila
        >>> x = koila.lazy(torch.ones(4, 3))
        >>> koila.explain((x * 2).sum(), full=True).splitlines()[-1].strip()
        '1 add up the results of the chunks'
    """
    roots = roots_of("explain", losses)
    nothing = why_nothing(roots)
    if nothing:
        has_run = [str(reports.report())] if nothing == ALL_HAS_RUN else []
        return Explanation([nothing, *has_run])
    program = Program(roots)
    said: list[str] = []
    unstageable = program.unstageable
    is_graph = any(root.requires_grad for root in roots)
    if program.axes and unstageable is None:
        expected = forecast(program, is_graph)
        said += numbers(program, is_graph, expected)
        cut, schedule = expected.program, expected.schedule
    else:
        said += numbers_of_whole(program, is_graph)
        cut, schedule = program, program.schedule(False)
    runs, passes = schedule_words.runs_of(cut), schedule_words.passes_of(schedule)
    last = [run.index for run in runs if run.stage == cut.last_body]
    n_forwards = max((passes[index].forward for index in last if index in passes), default=0)
    said += _why_twice(cut, runs, passes) + _why(program, n_forwards)
    found = layers.of(program)
    n_calls = f"{count(cut.n_nodes, 'call')} in {count(len(runs), 'part')}"
    if not full:
        return Explanation(said, found, [f"{n_calls}; explain(loss, full=True) lists them"])
    calls = [n_calls]
    for position, run in enumerate(runs, 1):
        calls.append(schedule_words.head_of(cut, passes, run, position))
        combined = [i for i in run.combined if cut.node(i).mode == REDUCE]
        calls += [f"    {i:4d} add up the results of the chunks" for i in combined]
        calls += [schedule_words.line_of(cut, cut.node(i)) for i in run.nodes]
    return Explanation(said, found, calls)


def _why_twice(
    program: Program, runs: Sequence[Run], passes: Mapping[int, schedule_words.Passes]
) -> list[str]:
    """Describe which parts before the last run forward twice in chunks, and why."""
    said: list[str] = []
    for position, run in enumerate(runs, 1):
        of = passes.get(run.index, schedule_words.Passes())
        is_last = run.stage == program.last_body
        why = "" if is_last else schedule_words.why_twice(program, run, of)[0]
        if why and len(said) < _MOST_WHOLE:
            said.append(f"two forwards of part {position} in chunks: {why}")
    if said:
        said[-1] += (
            " (about a third more time); layers and losses that treat each sample by itself need "
            "one forward"
        )
    return said


def _why(program: Program, n_forwards: int) -> list[str]:
    """Describe what runs twice or on the whole batch, why, and what can be done about it. Chunks of
    the last body run forward `n_forwards` times."""
    if program.unstageable is not None:
        node, why = program.unstageable
        where = call_in_words(node)
        return [f"everything runs on the whole batch, for {where}: {why}"]
    said = []
    if n_forwards > 1 and not program.is_tail_linear:
        tail = program.node(program.tail_node) if program.tail_node is not None else None
        name = f" through {call_in_words(tail)}" if tail is not None else ""
        last = next(run for run in program.runs if run.stage == program.last_body)
        why = schedule_words.hook_in_words(program, last)
        why = why or f"the gradient of the loss depends on values of the whole batch{name}"
        said.append(
            f"two forwards: {why}, so a chunk runs forward before the loss and again with its "
            "backward (about a third more time); a loss that is a sum or a mean over samples needs "
            "one"
        )
    whole = [entry for entry in whole_calls.made_whole(program) if entry.n_bytes > 0]
    said += [f"whole batch: {one.made('makes')}: {one.why}" for one in whole[:_MOST_WHOLE]]
    if len(whole) > _MOST_WHOLE:
        said.append(f"whole batch: {count(len(whole) - _MOST_WHOLE, 'call')} more")
    return said
