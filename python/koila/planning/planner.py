# SPDX-License-Identifier: Apache-2.0
"""Choose the number of chunks of a program: what config() asks for, or else as few as fit."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import NamedTuple

from koila import _core
from koila.basics import config, lines
from koila.basics.rows import UNIT, Bounds, largest
from koila.memory import budget, estimates, storages
from koila.messages.errors import MemoryLimitError
from koila.messages.words import sizes
from koila.planning import left_graphs, limits, plans, steps, ways
from koila.planning.limits import Limits, Needs
from koila.planning.plans import Lasting, Plan, Shape, is_measured, lasting, remember
from koila.planning.ways import Option
from koila.random import draws
from koila.reporting import reports
from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS, Way

# A prediction may be too high. So chunks that fitted in an earlier step are used again if the limit
# allows at least this share of the bytes that are predicted for them.
BOUND_SHARE = 0.75


def is_whole() -> bool:
    """Tell, quickly and without staging, whether all that is pending certainly fits in one
    chunk."""
    if config.get("chunks") is not None:
        return config.is_one_chunk()
    if config.get("memory_limit") is not None:
        return False
    return budget.is_ample(int(_core.pending_bytes(False)))


def plan(program: Program, is_graph: bool, is_final: bool = True) -> Plan:
    """Choose the number of chunks for a program, and the way to schedule it.

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
        way = _way_in(chunks, program) if is_graph else AS_IT_IS
        if way is None and is_final:
            return Plan(1, why=_MORE_IN_CHUNKS, is_scheduled=program.is_part)
        return Plan(chunks, way=way or AS_IT_IS)
    if not program.axes:
        return Plan(1)
    try:
        return _plan(program, is_graph, is_final)
    except MemoryError:
        budget.defragment()
    try:
        return _plan(program, is_graph, is_final)
    except MemoryError:
        raise no_room_to_plan(program) from None


def no_room_to_plan(program: Program) -> MemoryLimitError:
    """Return the error for a program that could not be planned since Python ran out of memory."""
    return MemoryLimitError(
        f"memory ran out while a program of {program.n_nodes} calls was planned: the limit of this "
        "process leaves nothing; raise it, or make the model or the batch smaller"
    )


def _plan(program: Program, is_graph: bool, is_final: bool) -> Plan:
    """Plan a program whose number of chunks the user did not set; see `plan`."""
    estimate = left_graphs.estimate(program, is_graph)
    reports.measure(estimate.whole)
    made = _fit(program, estimate, is_graph)
    could_fit = isinstance(made, Needs) and made.n_bytes <= limits.allowed_for(program, True)
    if could_fit and storages.look_again(is_final):
        made = _fit(program, estimate, is_graph)
    for _ in range(2 if is_final and is_measured() else 0):  # so that it fits, then in more rows
        asked = plans.to_ask_for(made)
        made = _fit(program, estimate, is_graph, asked) if asked > 0 else made
    if isinstance(made, Needs):
        # Finding the names and limits in the message takes long; this caller drops the message.
        raise made.refusal(program) if is_final else MemoryLimitError
    return dataclasses.replace(made, least_limit=_least_limit(program, made, is_graph))


class _Least(NamedTuple):
    """A least limit that was computed once, with what it depends on."""

    whole: float  # the bytes that the program took whole
    taken: float  # the bytes that other tensors took, and those of state that optimizers will make
    limit: float


#: By the line that asked and the sizes of the program. Computing a limit measures all ways, so it
#: is repeated only if a program needs more memory than before by this share.
_least_limits: dict[tuple[str, int, int, int, int], _Least] = {}
_GROWN = 0.02


def _least_limit(program: Program, made: Plan, is_graph: bool) -> float | None:
    """Return the least memory_limit that suffices for all programs of this kind so far; None if no
    limit is set."""
    limit = config.get("memory_limit")
    if limit is None or made.allowed is None:
        return None
    counts = program.n_nodes, program.n_values, program.n_imports, program.n_stages
    key = lines.user_line(), *counts
    coming = budget.coming_state(program.parameters) if program.roots else 0
    known, taken = _least_limits.get(key), limit - made.allowed + coming
    if known is None or made.whole > (1 + _GROWN) * known.whole:
        known = _Least(made.whole, taken, limits.limits_of(program, is_graph).least)
    elif taken > known.taken:  # for instance by a replay buffer that grew
        known = _Least(known.whole, taken, known.limit + taken - known.taken)
    remember(_least_limits, key, known)
    return limits.in_tenths(known.limit)


def too_large(
    program: Program,
    what: str,
    needed: float,
    left: float,
    large: str = "",
    *,
    is_stopped: bool = False,
) -> MemoryLimitError:
    """Return the error for calls that run on the whole batch and do not fit.

    Args:
        program: the pending program.
        what: a sentence that names the calls and why they run whole.
        needed: the bytes that they need.
        left: the bytes that are left for them.
        large: what takes most of these bytes; may be empty.
        is_stopped: a call was stopped when it needed so much; how much more it needs is not known.
    """
    needs, has = sizes(needed, max(left, 0.0))
    n_bytes = limits.as_limit(program, needed)
    found, more = Limits(n_bytes, 1, n_bytes), ", later even more," if is_stopped else ","
    error = MemoryLimitError(
        f"{limits.answer(found, needs, has, False, is_stopped=is_stopped)}\n"
        f"  the whole batch needs {needs} more than is in use now{more} and {has} are left\n"
        f"{limits.in_lines(limits.limit_in_words(program))}"
        f"{limits.in_lines(large and f'too large: {large}')}"
        f"{limits.in_lines(limits.others(program))}"
        f"  {what}"
    )
    error.least_limit = None if is_stopped else limits.in_tenths(n_bytes)
    return error


class Fitting(NamedTuple):
    """A way that fits, with the most rows that its chunks may have."""

    option: Option
    rows: int


#: Chunks that the user asked for are to need at most this share of eager mode's activations.
_ASKED_SHARE = 0.6
#: If no way reaches that share, ways count that need at most this multiple of the best one's bytes.
_NEARLY = 1.05
_MORE = 1.1  # the bytes predicted may be too high by this factor
#: A program that makes less runs as it is: saving memory is not worth the time.
FEW_BYTES = 2**20
_ways_in: dict[tuple[int, ...], Way | None] = {}
_MORE_IN_CHUNKS = "in the chunks that were asked for it would take more"


def _way_in(chunks: int, program: Program) -> Way | None:
    """Return the cheapest way that saves memory in a number of chunks that the user asked for; None
    if every way needs more than a whole run."""
    if chunks == 1 or not program.axes:
        return AS_IT_IS
    is_small, is_pinned = program.amounts.made < FEW_BYTES, bool(_pinned_grids(program))
    is_behind = not is_pinned and _is_graph_behind(program)
    if is_small and not is_behind:
        return AS_IT_IS
    shared = estimates.bytes_shared(program) if is_behind else 0
    key = chunks, *program.sizes, is_pinned, is_behind, shared
    if key not in _ways_in:
        way = AS_IT_IS if is_small else _find_way_in(chunks, program)
        if way is not None and is_behind and _is_less_in_one(chunks, program, way, shared):
            way = None
        remember(_ways_in, key, way)
    return _ways_in[key]


#: A program with a graph behind it runs in one chunk if several would take so many bytes more.
_MORE_OF_ROWS = 2**16


def _is_graph_behind(program: Program) -> bool:
    """Tell whether a graph is behind a program, as behind each part that was cut off: of such, only
    those without joints count."""
    if program.is_part:
        return [run.is_body for run in program.runs if run.nodes or run.combined] == [True]
    return any(tensor.grad_fn is not None for tensor in program.entered)


def _is_less_in_one(chunks: int, program: Program, way: Way, shared: int) -> bool:
    """Tell whether a program that a graph is behind takes less in one chunk than in several. Each
    chunk's gradient of a value that entered with its rows is beside that of all rows; a program
    that saves little wins less than that. Nor does it win where the graph behind takes most, which
    runs later: then gradients that one chunk would share (`shared` bytes) are there as well.
    """
    cut = program.cut_for(way)
    alone = estimates.estimate(cut, True, way, graphs=lambda _: 0.0)
    rows, most = largest(alone.rows, chunks, 1), alone.whole + _MORE_OF_ROWS
    if alone.peak(rows)[0] > most:
        return True
    return shared > _MORE_OF_ROWS and estimates.estimate(cut, True, way).peak(rows)[0] > most


def _find_way_in(chunks: int, program: Program) -> Way | None:
    estimate = estimates.estimate(program, True)
    rows = largest(estimate.rows, chunks, 1)
    gradients = sum(parameter.nbytes for parameter in program.parameters)
    asked = gradients + _ASKED_SHARE * max(0, estimate.whole - gradients)
    found = [(estimate.peak(rows)[0], AS_IT_IS)]
    others = itertools.chain(ways.recomputing_cheap(program), ways.recomputing(program))
    while found[-1][0] > asked and (option := next(others, None)) is not None:
        found.append((option.estimate.peak(rows)[0], option.way))
    least = min(found)[0]
    is_free = not (program.is_part or _pinned_grids(program))
    if least > _MORE * estimate.whole and is_free:
        return None
    enough = asked if least <= asked else gradients + _NEARLY * (least - gradients)
    return next(way for n_bytes, way in found if n_bytes <= enough)


#: By shape: the way that a program ran in last, and the bytes that were allowed then.
_last_ways: dict[Shape, tuple[Way, float]] = {}
_NEAR = 0.1


def _is_near(allowed: float, before: float) -> bool:
    """Tell whether about as many bytes are allowed as before."""
    return abs(allowed - before) <= _NEAR * before


def _cheapest(program: Program, fitting: list[Fitting], shape: Shape, allowed: float) -> Fitting:
    """Return the cheapest way, and remember it for later programs of this shape."""
    best = min(fitting, key=lambda one: ways.cost(program, *one))
    remember(_last_ways, shape, (best.option.way, allowed))
    return best


def _last_way(program: Program, is_graph: bool, shape: Shape, allowed: float) -> Fitting | None:
    """Return the way that a program of this shape ran in last, if about as many bytes were allowed
    then and it fits now."""
    way, before = _last_ways.get(shape, (AS_IT_IS, 0.0))
    cut = program.cut_for(way)
    if way == AS_IT_IS or not _is_near(allowed, before) or cut.unstageable is not None:
        return None
    option = ways.option_of(cut, is_graph, way)
    rows = option.rows(allowed)
    return Fitting(option, rows) if rows > 0 else None


def _find_way(program: Program, is_graph: bool, shape: Shape, allowed: float) -> Fitting | Needs:
    """Return the cheapest way that fits, or if none does, what the one that needs least needs."""
    found = _last_way(program, is_graph, shape, allowed)
    if found is not None:
        return found
    needs: list[tuple[Needs, Option]] = []
    for options in (ways.options, ways.along_second_axis):
        fitting: list[Fitting] = []
        for option in options(program, is_graph):
            rows = option.rows(allowed)
            if rows > 0:
                fitting.append(Fitting(option, rows))
            else:
                needs.append((limits.least(option.estimate, allowed), option))
        if fitting:
            return _cheapest(program, fitting, shape, allowed)
    needed, option = min(needs, key=lambda one: one[0].n_bytes)
    if needed.n_bytes > allowed:
        return needed
    return Fitting(option, max(needed.rows, option.estimate.largest_chunk(allowed)))


def _larger_chunks(
    program: Program, is_graph: bool, shape: Shape, allowed: float, found: Fitting
) -> Fitting:
    """Return a way with larger chunks for a program that fits in many small ones, if it is cheaper;
    else the fitting that was found."""
    way, before = _last_ways.get(shape, (None, 0.0))
    if way == found.option.way and _is_near(allowed, before):
        return found
    known = _last_way(program, is_graph, shape, allowed)
    if known is not None:
        return known
    fitting = [found]
    light = ways.recomputing_cheap(program) if is_graph and program.roots else ()
    cost = ways.cost(program, *found)

    def is_cheaper(best: Option) -> bool:
        rows = best.rows(allowed)
        return rows > 0 and ways.cost(program, best, rows) < cost

    for option in (*light, *ways.in_pieces(program, is_graph, is_cheaper)):
        rows = option.rows(allowed)
        fitting += [Fitting(option, rows)] if rows > 0 else []
    return _cheapest(program, fitting, shape, allowed)


def _fit(
    program: Program, estimate: estimates.Estimate, is_graph: bool, asked: float = 0.0
) -> Plan | Needs:
    """Return the plan for a program; or what it needs, if that does not fit.

    Args:
        program: what is to run.
        estimate: the bytes that it needs as it is.
        is_graph: whether it is differentiated.
        asked: bytes that it may use even if they are kept back for libraries. No more than that,
            since some libraries end the process if they get no memory.
    """
    left, slack = limits.allowed_for(program, needed=estimate.whole), budget.slack()
    allowed = max(left, min(left + slack, asked))
    shape, pinned = _shape_of(program, is_graph, estimate), _pinned_grids(program)
    if pinned:
        return _pinned(program, is_graph, shape, allowed, max(pinned, key=len))
    rows = estimate.largest_chunk(ways.CHUNK_SHARE * allowed)
    share = limits.WHOLE_SHARE if rows > 0 else 1.0
    last = lasting.get(shape) if is_measured() else None
    was_whole = last is not None and last.n_chunks == 1 and last.way == AS_IT_IS
    # Without a graph one chunk runs stage by stage too, and each stage keeps what later ones read.
    # With a graph a whole run is live: it runs all other pending calls as well.
    besides = 0 if program.is_all else max(0, _core.pending_bytes(True) - program.amounts.made)
    staged = 0 if is_graph else estimate.peak(estimate.rows)[0]
    needed = max(estimate.whole + besides * is_graph, staged)
    fits = needed <= (left + slack if was_whole else share * allowed)
    if fits:
        planned = Plan(1, 1, needed, allowed, shape)
        planned.keep(program)
        return planned
    way = AS_IT_IS
    if last is not None and not was_whole:
        allowed = left + slack  # libraries have taken what they take in a first step
        cut = program.cut_for(last.way)
        way = last.way if cut.unstageable is None else AS_IT_IS
        size = last.rows(estimate.rows)
        estimate = estimates.estimate(program.cut_for(way), is_graph, way)
        rows = estimate.largest_chunk(ways.CHUNK_SHARE * allowed)
        if rows < 2 * size and _still_fits(last, estimate.peak(size)[0], allowed):
            needed = estimate.peak(size)[0]
            return Plan(last.n_chunks, last.unit, needed, allowed, shape, way)
        if 0 < rows < 2 * size:
            while size > rows:
                size //= 2
            rows = size
    if last is None and rows > 0 and is_graph and budget.is_limited():
        # Later steps have less, by the state that optimizers make. The first step already uses the
        # chunks that will fit then, so that all steps have the same ones.
        coming = budget.coming_state(program.parameters)
        rows = estimate.largest_chunk(ways.CHUNK_SHARE * (allowed - coming)) or rows
    if rows == 0:
        found = _find_way(program, is_graph, shape, allowed)
        if isinstance(found, Needs):
            return found
        (way, estimate, _), rows = found
    elif way == AS_IT_IS and not is_measured():
        # Not under a limit of the process: oneDNN would compile kernels for the size of pieces too,
        # and their memory counts against that limit.
        found = Fitting(Option(way, estimate, program.n_nodes), rows)
        if ways.cost(program, *found) > ways.DEAR:
            found = _larger_chunks(program, is_graph, shape, allowed, found)
        (way, estimate, _), rows = found
    if is_graph and way == AS_IT_IS and not fits:
        rows = min(rows, -(-estimate.rows // 2))  # one chunk is a whole run, which does not fit
    n_chunks, unit = _chunks_of(estimate.rows, rows, way)
    predicted, _ = estimate.peak(largest(estimate.rows, n_chunks, unit))
    return Plan(n_chunks, unit, predicted, allowed, shape, way)


def _shape_of(program: Program, is_graph: bool, estimate: estimates.Estimate) -> Shape:
    sizes = tuple(sorted(program.axes.values()))
    return sizes, program.n_nodes, is_graph, estimate.whole


def _pinned_grids(program: Program) -> list[list[Bounds]]:
    """Return the grids of chunks that a program must run in, since it drew random numbers in
    them."""
    return [grid for axis, grid in draws.pinned_grids().items() if axis in program.axes]


def _pinned(
    program: Program, is_graph: bool, shape: Shape, allowed: float, bounds: list[Bounds]
) -> Plan | Needs:
    """Plan a program in the chunks `bounds` in which an earlier run of it drew random numbers; in
    other chunks it would draw others."""
    rows = max(stop - start for start, stop in bounds)
    best: Needs | None = None
    for way, estimate, _ in ways.options(program, is_graph):
        n_bytes, node = estimate.peak(rows)
        if n_bytes <= allowed:
            return Plan(len(bounds), rows, n_bytes, allowed, shape, way)
        if best is None or n_bytes < best.n_bytes:
            best = Needs(rows, n_bytes, node, estimate.fixed(rows), allowed)
    assert best is not None
    return best


def _chunks_of(n_rows: int, rows: int, way: Way) -> tuple[int, int]:
    """Return the number of chunks with at most `rows` rows, and the unit of rows that they have.

    A single chunk is returned only if the head runs in pieces of it. Under a limit of the process
    all chunks but the last have one size, a multiple of eight or a power of two, since oneDNN
    compiles kernels for each size and keeps them.
    """
    if rows >= n_rows and way.n_pieces > 1:
        return 1, 1
    if is_measured():
        rows = rows // UNIT * UNIT if rows >= UNIT else 1 << rows.bit_length() - 1
        rows = max(1, min(rows, -(-n_rows // 2)))
        return -(-n_rows // rows), rows
    n_chunks = max(2, -(-n_rows // rows))
    return n_chunks, UNIT if largest(n_rows, n_chunks, UNIT) <= rows else 1


def _still_fits(last: Lasting, needed: float, allowed: float) -> bool:
    """Tell whether a program shall run in the chunks that it ran in last.

    The kernels for these chunks are compiled, so the same chunks fit as long as no less memory is
    left than before. With less left they are tried if they may fit: other sizes would take memory
    for new kernels for good, while a run that fails is undone.
    """
    if allowed >= last.left + budget.slack() - max(2**20, 0.02 * last.left):
        return True
    return BOUND_SHARE * needed <= allowed


def plan_read(program: Program, is_known_only: bool) -> Plan | None:
    """Choose how to compute numbers that the script reads before its backward pass.

    If the whole step will fit with its graph, the program runs live and keeps the graph for
    backward(). Else it runs without a graph. If its random draws then fix the chunks, it runs in
    those that backward() will need, as far as that is known.

    Args:
        program: what is to run.
        is_known_only: it has only values without a gradient in their history.

    Returns:
        None: it runs live, together with all other pending calls.

    Raises:
        MemoryLimitError: one row does not fit, even without a graph.
    """
    # Numbers read before would be computed again by a live run, which builds their graph.
    is_read = _core.has_numbers()
    is_apart = is_known_only or is_read
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
    step = Program([]) if is_known_only else program
    ends = step.ends()
    with_graph: Plan | None = None
    with contextlib.suppress(MemoryLimitError):
        with_graph = plan(Program(ends), True, False) if ends else plan(step, False)
    if with_graph is None:
        return plan(program, False)  # the script may never call backward()
    is_due = is_read or not with_graph.is_whole
    planned = dataclasses.replace(with_graph, way=AS_IT_IS)  # no graph is kept here
    if is_pinning or not ends or planned.shape is None:
        return planned if is_due else None
    assert planned.allowed is not None
    needed = steps.whole(program, planned.whole)
    if (
        planned.n_chunks == 1
        and needed is not None
        and needed <= limits.WHOLE_SHARE * planned.allowed
    ):
        return None
    steps.note_read(program, planned.whole)
    return plan(program, False)
