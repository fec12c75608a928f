# SPDX-License-Identifier: Apache-2.0
"""How many chunks a program is run in: as many as config() asks for, else as few as fit."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

from koila import _core
from koila.basics import config, lines
from koila.basics.rows import UNIT, Bounds, largest
from koila.memory import budget, estimates, storages
from koila.messages.errors import MemoryLimitError
from koila.messages.words import sizes
from koila.planning import limits, steps, ways
from koila.planning.limits import Limits, Needs
from koila.planning.plans import Lasting, Plan, Shape, is_measured, lasting, remember
from koila.planning.ways import Option
from koila.random import draws
from koila.reporting import reports
from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS, Way

# The model may be so far above what is used; chunks that went well are changed only beyond that.
BOUND_SHARE = 0.75


def is_whole() -> bool:
    """A quick answer, without staging: whether everything pending certainly fits at once."""
    if config.get("chunks") is not None:
        return config.get("chunks") == 1
    if config.get("memory_limit") is not None:
        return False
    return budget.is_ample(int(_core.pending_bytes(False)))


def plan(program: Program, is_graph: bool, is_final: bool = True) -> Plan:
    """Choose the number of chunks for a program.

    A share of what is allowed is kept back, for the model of bytes is not exact, and of what a
    limit of the process leaves what libraries may still take; but before it is refused a program
    may have all: a try that fails is undone.

    Args:
        program: what is to run.
        is_graph: whether it is differentiated.
        is_final: a refusal ends it; if not, the caller goes on another way.

    Raises:
        MemoryLimitError: it fits neither whole nor in any chunks.
    """
    chunks = config.get("chunks")
    if chunks is not None:
        way = _way_in(chunks, program) if is_graph else AS_IT_IS
        if way is None and is_final:
            return Plan(1, why=_MORE_IN_CHUNKS)
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
    """What is raised where Python itself had no memory left to plan a program."""
    return MemoryLimitError(
        f"memory ran out while a program of {program.n_nodes} calls was planned: the limit of this "
        "process leaves nothing; raise it, or make the model or the batch smaller"
    )


def _plan(program: Program, is_graph: bool, is_final: bool) -> Plan:
    """As `plan`, where the number of chunks is to be found."""
    estimate = estimates.estimate(program, is_graph)
    reports.measure(estimate.whole)
    made = _fit(program, estimate, is_graph)
    alone = limits.allowed_for(program, is_alone=True)
    could_fit = isinstance(made, Needs) and made.n_bytes <= alone
    if could_fit and storages.look_again(is_final):
        made = _fit(program, estimate, is_graph)
    if isinstance(made, Needs) and is_final and is_measured():
        made = _fit(program, estimate, is_graph, made)
    if isinstance(made, Needs):
        # To look for names and limits takes long, and who goes on another way reads neither.
        raise made.refusal(program) if is_final else MemoryLimitError
    return dataclasses.replace(made, least_limit=_least_limit(program, made, is_graph))


class _Least(NamedTuple):
    """The least limit of a program that takes so much whole, where so much else was taken."""

    whole: float
    taken: float
    limit: float


#: By the line that asked and the sizes of the program. All ways are looked at, so that is done
#: again only for a program that takes so much more.
_least_limits: dict[tuple[str, int, int, int, int], _Least] = {}
_GROWN = 0.02


def _least_limit(program: Program, made: Plan, is_graph: bool) -> float | None:
    """The least memory_limit, where one is set, that does for programs of this kind so far."""
    limit = config.get("memory_limit")
    if limit is None or made.allowed is None:
        return None
    counts = program.n_nodes, program.n_values, program.n_imports, program.n_stages
    key = lines.user_line(), *counts
    known, taken = _least_limits.get(key), limit - made.allowed
    if known is None or made.whole > (1 + _GROWN) * known.whole:
        known = _Least(made.whole, taken, limits.limits_of(program, is_graph, False).least)
    elif taken > known.taken:  # by what optimizers keep from their first step on, above all
        known = _Least(known.whole, taken, known.limit + taken - known.taken)
    remember(_least_limits, key, known)
    return limits.in_tenths(known.limit)


def too_large(
    program: Program, what: str, needed: float, left: float, large: str = ""
) -> MemoryLimitError:
    """What is raised of what runs whole and does not fit.

    Args:
        program: what waits.
        what: runs whole, and why.
        needed: the bytes that it takes.
        left: the bytes that there are for it.
        large: what makes most of them.
    """
    needs, has = sizes(needed, max(left, 0.0))
    n_bytes = limits.as_limit(program, needed)
    return MemoryLimitError(
        f"{limits.answer(Limits(n_bytes, 1, n_bytes), needs, has, False)}\n"
        f"  the whole batch needs {needs} beside what is there, and {has} are left\n"
        f"{limits.in_lines(limits.limit_in_words(program))}"
        f"{limits.in_lines(large and f'too large: {large}')}"
        f"{limits.in_lines(limits.others(program))}"
        f"  {what}"
    )


class Fitting(NamedTuple):
    """A way that fits, in chunks of so many rows at most."""

    option: Option
    rows: int


#: What a step in chunks that were asked for is to take of eager's activations, if it can.
_ASKED_SHARE = 0.6
_NEARLY = 1.05  # of the least that can be had
_MORE = 1.1  # of the whole: the model may be so far above
#: Of less nothing is worth while.
_FEW_BYTES = 2**20
_ways_in: dict[tuple[int, ...], Way | None] = {}
_MORE_IN_CHUNKS = "in the chunks that were asked for it would take more"


def _way_in(chunks: int, program: Program) -> Way | None:
    """How a step is scheduled whose chunks were asked for: as it is, or the cheapest way to what
    they were asked for, less memory. None: no way takes less than the whole run."""
    if chunks == 1 or not program.axes or program.amounts.made < _FEW_BYTES:
        return AS_IT_IS
    sizes = program.n_nodes, program.n_values, program.n_imports, program.n_stages
    key = chunks, *sizes, *program.axes.values(), *program.amounts
    key = *key, len(program.roots), program.is_part, bool(_pinned_grids(program))
    if key not in _ways_in:
        remember(_ways_in, key, _find_way_in(chunks, program))
    return _ways_in[key]


def _find_way_in(chunks: int, program: Program) -> Way | None:
    estimate = estimates.estimate(program, True)
    rows = largest(estimate.rows, chunks, 1)
    leaves = (tensor for tensor in program.entered if tensor.is_leaf and tensor.requires_grad)
    gradients = sum(leaf.nbytes for leaf in leaves)
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


#: By shape: the way that a program was last given, and what was left then.
_last_ways: dict[Shape, tuple[Way, float]] = {}
_NEAR = 0.1  # what is left now and was left then, apart by such a share


def _is_near(allowed: float, left: float) -> bool:
    """Whether as much is allowed as was left then."""
    return abs(allowed - left) <= _NEAR * left


def _cheapest(program: Program, fitting: list[Fitting], shape: Shape, allowed: float) -> Fitting:
    """The one that is taken, and from now on where as much is left."""
    best = min(fitting, key=lambda one: ways.cost(program, *one))
    remember(_last_ways, shape, (best.option.way, allowed))
    return best


def _last_way(program: Program, is_graph: bool, shape: Shape, allowed: float) -> Fitting | None:
    """The way that a program of this shape was given where as much was left, if it fits."""
    way, left = _last_ways.get(shape, (AS_IT_IS, 0.0))
    cut = program.cut_for(way)
    if way == AS_IT_IS or not _is_near(allowed, left) or cut.unstageable is not None:
        return None
    option = ways.option_of(cut, is_graph, way)
    rows = option.rows(allowed)
    return Fitting(option, rows) if rows > 0 else None


def _find_way(program: Program, is_graph: bool, shape: Shape, allowed: float) -> Fitting | Needs:
    """The cheapest way that fits, and the rows of a chunk that do; or what the least needs."""
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
    """What fits in many chunks, in larger ones some other way, if that is cheaper."""
    way, left = _last_ways.get(shape, (None, 0.0))
    if way == found.option.way and _is_near(allowed, left):
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
    program: Program, estimate: estimates.Estimate, is_graph: bool, needs: Needs | None = None
) -> Plan | Needs:
    """The plan for a program; or what it needs, if that is more than there is.

    Of what is kept back for a first step of libraries it may have, as a last resort, what it
    `needs`: where libraries then find nothing left, some of them end the process.
    """
    left, slack = limits.allowed_for(program, needed=estimate.whole), budget.slack()
    allowed = min(left + slack, needs.n_bytes / ways.CHUNK_SHARE) if needs is not None else left
    pinned = _pinned_grids(program)
    if pinned:
        return _pinned(program, is_graph, allowed, max(pinned, key=len))
    rows = estimate.largest_chunk(ways.CHUNK_SHARE * allowed)
    share = limits.WHOLE_SHARE if rows > 0 else 1.0
    shape = _shape_of(program, is_graph, estimate)
    last = lasting.get(shape) if is_measured() else None
    was_whole = last is not None and last.n_chunks == 1 and last.way == AS_IT_IS
    # Numbers alone are made stage by stage in one chunk too, which keeps what crosses from each.
    # What is differentiated whole runs live, and all that waits besides runs with it.
    besides = 0 if program.is_all else max(0, _core.pending_bytes(True) - program.amounts.made)
    staged = 0 if is_graph else estimate.peak(estimate.rows)[0]
    needed = max(estimate.whole + besides * is_graph, staged)
    fits = needed <= (left + slack if was_whole else share * allowed)
    if fits and not program.has_checkpoints:
        planned = Plan(1, 1, needed, allowed, shape)
        planned.keep(program)
        return planned
    way = AS_IT_IS
    if last is not None and not was_whole:
        allowed = left + slack  # what a first step takes was taken
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
        # The steps that follow have as much less as optimizers keep: this one goes as they will.
        coming = budget.coming_state(leaf for leaf in program.entered if leaf.is_leaf)
        rows = estimate.largest_chunk(ways.CHUNK_SHARE * (allowed - coming)) or rows
    if rows == 0:
        found = _find_way(program, is_graph, shape, allowed)
        if isinstance(found, Needs):
            return found
        (way, estimate, _), rows = found
    elif way == AS_IT_IS and not is_measured():
        # Else pieces are sizes more that kernels are compiled for, which takes what is measured.
        found = Fitting(Option(way, estimate, program.n_nodes), rows)
        if ways.cost(program, *found) > ways.DEAR:
            found = _larger_chunks(program, is_graph, shape, allowed, found)
        (way, estimate, _), rows = found
    if is_graph and way == AS_IT_IS and not fits:
        rows = min(rows, -(-estimate.rows // 2))  # one chunk is the whole
    n_chunks, unit = _chunks_of(estimate.rows, rows, way)
    predicted, _ = estimate.peak(largest(estimate.rows, n_chunks, unit))
    return Plan(n_chunks, unit, predicted, allowed, shape, way)


def _shape_of(program: Program, is_graph: bool, estimate: estimates.Estimate) -> Shape:
    sizes = tuple(sorted(program.axes.values()))
    return sizes, program.n_nodes, is_graph, estimate.whole


def _pinned_grids(program: Program) -> list[list[Bounds]]:
    """The chunks that it has to run in, as it drew in them."""
    return [grid for axis, grid in draws.pinned_grids().items() if axis in program.axes]


def _pinned(program: Program, is_graph: bool, allowed: float, bounds: list[Bounds]) -> Plan | Needs:
    """The chunks that an earlier run of this program drew in: in others it would draw other
    numbers."""
    rows = max(stop - start for start, stop in bounds)
    best: Needs | None = None
    for way, estimate, _ in ways.options(program, is_graph):
        n_bytes, node = estimate.peak(rows)
        if n_bytes <= allowed:
            shape = _shape_of(program, is_graph, estimate)
            return Plan(len(bounds), rows, n_bytes, allowed, shape, way)
        if best is None or n_bytes < best.n_bytes:
            best = Needs(rows, n_bytes, node, estimate.fixed(rows), allowed)
    assert best is not None
    return best


def _chunks_of(n_rows: int, rows: int, way: Way) -> tuple[int, int]:
    """So many chunks of `rows` rows at most, and the unit they are of: one only where its head is
    cut.

    Under a limit of the process all but the last are of one size, which is whole eights or a power
    of two: oneDNN compiles its kernels for each size that it meets, and keeps them.
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
    """Whether a program runs in the chunks that it ran in last.

    What kernels keep for chunks of that size was taken then: these fit as long as no less is left
    than was. Else they are tried where they may fit, for other sizes take memory for good, and a
    try that fails is undone.
    """
    if allowed >= last.left + budget.slack() - max(2**20, 0.02 * last.left):
        return True
    return BOUND_SHARE * needed <= allowed


def plan_read(program: Program, is_known_only: bool) -> Plan | None:
    """Choose how a program is run whose numbers are enough, while its backward is still to come.

    Where the step will fit with its graph, to its end, it runs live, and the graph is there when
    backward() asks for it. Else it runs without one; where that pins the chunks, in those that
    backward() will need as far as is known.

    Returns:
        None: it runs live, and all else that waits with it.

    Raises:
        MemoryLimitError: one row does not fit, even without its graph.
    """
    is_read = _core.has_numbers()  # run live, what that took would be run again, with its graph
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
    try:
        planned = plan(Program(ends), True, False) if ends else plan(step, False)
    except MemoryLimitError:
        return plan(program, False)  # it may be that no backward comes
    is_due = is_read or not planned.is_whole
    planned = dataclasses.replace(planned, way=AS_IT_IS)  # no graph is kept here
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
