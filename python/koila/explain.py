"""explain(): a recorded program as text, its stages, and for each joint the reason and the line."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from koila import _core, draws, lines, memory, plan, reports
from koila.errors import MemoryLimitError
from koila.program import (
    ONCE,
    REDUCE,
    Node,
    Op,
    Program,
    Run,
    Step,
    Way,
    name_of_node,
    where_of_node,
)
from koila.reports import Decision, ProgramReport, Stage, Whole, count, size
from koila.rows import Bounds, largest
from koila.threads import in_turn

ASKED = Decision("config(chunks=1) asks for it")
FITS = Decision("it certainly fits")
FITS_LATER = Decision("it fits, with the backward that may follow")
_MODES = ("rows", "reduce", "once")
_logger = logging.getLogger("koila")
_logged: set[str] = set()


def cause_of_whole(program: Program) -> Decision:
    """Why a program runs whole that has no body, or a write across stages."""
    if program.unstageable is not None:
        node, why = program.unstageable
        made, n_calls = program.amounts.made, program.n_nodes
        whole_for = Whole(name_of_node(node), where_of_node(node), why, made, n_calls)
        return Decision(why, whole=(whole_for,))
    whole = plan.made_whole(program) if program.amounts.n_once > 0 else ()
    why = "no call of it keeps rows apart" if whole else "nothing in it has rows"
    return Decision(why, whole=whole)


class Scheduled(NamedTuple):
    """How a program is about to run by stages: its stages, and what is done beside chunks."""

    stages: tuple[Stage, ...]
    way: str


def scheduled(
    program: Program, way: Way, steps: Sequence[Step], grid_of: Callable[[Run], list[Bounds]]
) -> Scheduled:
    """What is known of a run before it begins; it may need memory, which nothing after it does."""
    passes = _passes(steps)
    stages = (
        Stage(
            position,
            len(run.nodes) + len(run.combined),
            len(grid_of(run)) if run.is_body else 1,
            max(stop - start for start, stop in grid_of(run)) if run.is_body else None,
            str(passes.get(run.index, _Passes())),
        )
        for position, run in enumerate(_runs(program), 1)
    )
    return Scheduled(tuple(stages), way_in_words(program, way, steps))


def told(
    program: Program,
    planned: plan.Plan,
    grids: dict[int, list[Bounds]],
    n_tries: int,
    measured: int | None,
    known: Scheduled,
) -> ProgramReport:
    """What the user is told of a program that ran by stages."""
    used = [grids[axis] for axis in program.axes]
    n_chunks = max(map(len, used), default=1)
    is_whole = n_chunks == 1 and not known.way
    n_rows = None if is_whole else max(stop - start for grid in used for start, stop in grid)
    cause = cause_of_whole(program)
    fits = "its numbers fit, without autograd's graph"
    return ProgramReport(
        reports.asked(),
        lines.user_line(),
        program.n_nodes,
        program.amounts.made,
        n_chunks,
        n_rows,
        n_tries,
        planned.predicted,
        planned.allowed,
        measured,
        "" if n_chunks > 1 or known.way else fits if used else cause.why,
        stages=known.stages,
        whole=cause.whole,
        way=known.way,
    )


def log_whole(program: Program) -> None:
    """Say once, with the line, where a joint leaves most of a program's memory whole."""
    amounts = program.amounts
    if program.unstageable is not None:
        node, why = program.unstageable
        where = where_of_node(node)
        _log(where, "%s makes the program run whole (%s): %s", name_of_node(node), where, why)
    elif 2 * amounts.once > max(amounts.entered, amounts.made):
        once = (n for n in program.once() if not program.takes_rows(n) and plan.why_once(n))
        joint = next(filter(program.joins_rows, once), None)
        if joint is None:
            return
        where = where_of_node(joint)
        _log(
            where,
            "%s needs the whole batch (%s; %s), and %d of %d calls run whole with it: "
            "koila saves little memory here",
            name_of_node(joint),
            plan.why_once(joint),
            where,
            amounts.n_once,
            program.n_nodes,
        )


def _log(where: str, text: str, *words: Any) -> None:
    if where not in _logged:
        _logged.add(where)
        _logger.warning(text, *words)


def log_live(func: Any, why: str = "") -> None:
    """Say once, with the line, where a call that cannot be recorded runs all before it whole."""
    where = lines.user_line()
    if where in _logged or plan.is_whole():
        return
    _log(
        where,
        "%s cannot be recorded (%s)%s: what was recorded before it runs now, on the whole batch, "
        "and koila saves no memory there",
        reports.name_of(func),
        where,
        f", since {why}" if why else "",
    )


def log_at_once(func: Any, why: str) -> None:
    """Say once for each reason where calls run at once, and what chunks were to save is lost."""
    if not plan.is_whole():
        _log(
            why,
            "%s is not recorded (%s), since %s: such calls run where they stand, on the whole "
            "batch, and koila saves no memory there",
            reports.name_of(func),
            lines.user_line(),
            why,
        )


def note_left(func: Any, tensor: torch.Tensor, is_written: bool) -> None:
    """A call made or wrote a large plain tensor of lazy ones: what is made of it is not recorded.

    It is told by report(), and logged once for each line, where koila could save memory.

    Args:
        func: the call.
        tensor: what it made or wrote.
        is_written: whether the tensor was there before.
    """
    name, where = reports.name_of(func), lines.user_line()
    if is_written:
        made = (
            f"writes lazy values into a plain tensor of {size(tensor.nbytes)}: what is made of it "
            "is plain torch, on the whole batch; make it with torch.zeros_like(h) or "
            "h.new_zeros(...) of a lazy h, and it is recorded"
        )
    else:
        made = (
            f"makes a plain tensor of {size(tensor.nbytes)}: what it is given is computed "
            "already and has no rows of a batch"
        )
    reports.note_left(name, where, made)
    if not plan.is_whole() and where not in _logged:
        _logged.add(where)
        level = logging.WARNING if tensor.requires_grad else logging.INFO
        _logger.log(level, "%s (%s) %s", name, where, made)


def decide_whole(func: Any, why: str) -> None:
    """A call needs what was recorded whole: it is logged, and told by report()."""
    log_live(func, why)
    reports.give_reason(why)


def _describe(program: Program, value: int) -> str:
    info = program.info(value)
    dtype = str(info.dtype).removeprefix("torch.")
    if info.place is None:
        return f"{list(info.shape)} {dtype} whole"
    _, dim, outer, inner = info.place
    digits = "" if outer == inner == 1 else f" of {outer} x rows x {inner}"
    return f"{list(info.shape)} {dtype} rows in dim {dim}{digits}"


def _line(program: Program, node: Node) -> str:
    why = plan.why_once(node) if program.joins_rows(node) else ""
    why = f"; {why}" if why else ""
    others = draws.why_others(node.id, node.first_out) if node.is_random else ""
    why += f"; {others}" if others and node.mode != ONCE else ""
    mode = f"{_MODES[node.mode]:6s} {_describe(program, node.first_out)}{why}"
    return f"    {node.id:4d} {name_of_node(node):24s} {mode}  ({where_of_node(node)})"


def _runs(program: Program) -> list[Run]:
    """Its runs, in their order, that do anything."""
    return [run for run in program.runs if run.nodes or run.combined]


class _Passes(NamedTuple):
    """How often a chunk goes through a run of a schedule, which is one of so many segments."""

    forward: int = 0
    back: int = 0
    n_segments: int = 1

    def __str__(self) -> str:
        return count(self.forward, "forward") + (
            f", {count(self.back, 'backward')}" if self.back else ""
        )


def _passes(steps: Sequence[Step]) -> dict[int, _Passes]:
    """Those of each run, by its index."""
    found: dict[int, _Passes] = {}
    for step in steps:
        is_back = step.op in (Op.FUSED, Op.BACK, Op.PIECES)
        for run in step.runs:
            forward, back, n_segments = found.get(run.index, _Passes())
            is_once = step.op == Op.PIECES or run is step.runs[-1]
            forward += step.op in (Op.FORWARD, Op.AGAIN)
            forward += (is_back and not step.waits) * (1 if is_once else 2)
            n_segments = max(n_segments, len(step.runs))
            found[run.index] = _Passes(forward, back + is_back, n_segments)
    return found


def _head(program: Program, passes: Mapping[int, _Passes], run: Run, position: int) -> str:
    if not run.is_body:
        return f"stage {position}: joint, runs once"
    rows, of = program.axes[run.axis], passes[run.index]
    part = f", segment {run.segment + 1} of {of.n_segments}" if of.n_segments > 1 else ""
    return f"stage {position}: body over {rows} rows{part}, {of}"


def way_in_words(program: Program, way: Way, steps: Sequence[Step]) -> str:
    """What is done beside chunks for a step to fit, and what that costs; empty: nothing.

    Args:
        program: in the segments of that way.
        way: how it is scheduled.
        steps: its schedule.
    """
    words = []
    if program.has_checkpoints:
        how = "made again before their backward" if way.n_segments > 0 else "kept"
        words.append(f"what the script's checkpoints cover {how}")
    if way.n_segments > 1:
        n_segments = max(len(step.runs) for step in steps)
        words.append(f"bodies in up to {n_segments} segments (a second forward of all but one)")
    if way.n_across:
        words.append(f"the head in {way.n_pieces} pieces of a second axis (dim {way.across})")
    elif any(step.op == Op.PIECES for step in steps):
        words.append(f"the head in {way.n_pieces} pieces of each chunk")
    again = [step for step in steps if step.op == Op.AGAIN]
    offloaded = _offloaded(steps)
    emptied = [step for step in steps if step.op == Op.EMPTY]
    if again or offloaded or emptied:
        kept = kept_in_words(program, steps)
        words += [kept] if kept else []
    if again:
        words.append(f"{_n_bytes(program, again)} {_CROSSING} made again (one more forward)")
    if emptied:
        n_bytes = _n_bytes(program, emptied)
        words.append(f"{n_bytes} {_CROSSING} made again by light calls")
    if offloaded:
        n_bytes = _n_bytes(program, offloaded)
        words.append(f"{n_bytes} {_CROSSING} offloaded meanwhile (a copy each way)")
    return ", ".join(words)


_CROSSING = "of what crosses from body to body"


def _offloaded(steps: Sequence[Step]) -> list[Step]:
    return [step for step in steps if step.op in (Op.FORWARD, Op.FUSED, Op.PIECES) and step.values]


def _n_bytes(program: Program, steps: Iterable[Step], but: Iterable[Step] = ()) -> str:
    """Of all that steps name, less what others do; empty: nothing."""
    values = {value for step in steps for value in step.values}
    values -= {value for step in but for value in step.values}
    infos = [program.info(value) for value in values]
    total = sum(math.prod(info.shape) * info.dtype.itemsize for info in infos)
    return size(total) if total else ""


def kept_in_words(program: Program, steps: Sequence[Step]) -> str:
    """How much of what crosses from body to body is kept; empty: none, or nothing does."""
    is_graph = any(step.op == Op.BACK for step in steps)
    crossing = _offloaded(program.schedule(is_graph, Way(1, 1, True)))
    others = [step for step in steps if step.op in (Op.AGAIN, Op.EMPTY)] + _offloaded(steps)
    kept = _n_bytes(program, crossing, others)
    return f"{kept} {_CROSSING} kept" if kept else ""


def _forecast(program: Program, is_graph: bool) -> tuple[str, Program, list[Step]]:
    """In how many chunks it would run now, and in how many bytes; the program as it would be cut,
    and its schedule."""
    try:
        planned = plan.plan(program, is_graph)
    except MemoryLimitError as error:
        return f"it does not fit: {error}", program, program.schedule(is_graph)
    way = planned.way
    cut = program.cut_for(way)
    estimate = memory.estimate(cut, is_graph, way)
    rows = largest(estimate.rows, planned.n_chunks, planned.unit)
    needed = planned.predicted
    if needed is None:
        needed, _ = estimate.peak(rows)
    n_chunks = -(-estimate.rows // rows)
    steps = cut.schedule(is_graph, way)
    how = way_in_words(cut, way, steps)
    is_whole = n_chunks == 1 and not how
    chunked = f"in {count(n_chunks, 'chunk')} of at most {count(rows, 'row')}"
    chunks = "whole" if is_whole else chunked
    more = how or (kept_in_words(cut, steps) if n_chunks > 1 else "")
    chunks += f", {more}," if more else ""
    allowed = f"; {size(planned.allowed)} are allowed" if planned.allowed is not None else ""
    text = f"run now, it would run {chunks} and take {size(needed)} at its worst moment{allowed}"
    return text, cut, steps


class Explanation(str):
    """A text that a terminal or a notebook shows as it is, without print() too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        printer.text(str(self))


@in_turn
def explain(*losses: Any) -> Explanation:
    """Describe the program behind some losses, without running it.

    Args:
        losses: lazy tensors that backward() would be called on, or lists of them.

    Returns:
        A text: in how many chunks and bytes it would run now; each stage, in the order they run,
        with its calls (shape, place, mode, line), why one runs once, and how often each body is
        run. Where all has run: what the last step ran.

    Example:
        >>> import torch, koila
        >>> x = koila.lazy(torch.ones(4, 3))
        >>> print(koila.explain((x * 2).sum()).splitlines()[0])
        program of 2 calls in 2 stages
    """
    listed = (loss if isinstance(loss, tuple | list) else (loss,) for loss in losses)
    roots = [loss for some in listed for loss in some if type(loss) is _core.LazyTensor]
    if not roots:
        return Explanation("no lazy tensor was given: nothing is recorded for it")
    if all(map(_core.is_input, roots)):
        return Explanation("an input: nothing is recorded for it alone")
    if all(_core.real(root) is not None for root in roots):
        return Explanation(f"nothing is pending: the program has run\n{reports.report()}")
    program = Program(roots)
    runs = _runs(program)
    lines = [f"program of {count(program.n_nodes, 'call')} in {count(len(runs), 'stage')}"]
    unstageable = program.unstageable
    if unstageable is not None:
        lines.append(f"it runs whole: {unstageable[1]}\n" + _line(program, unstageable[0]))
    elif program.last_body is not None and not program.is_tail_linear:
        tail = program.node(program.tail_node) if program.tail_node is not None else None
        name = f" through {name_of_node(tail)} ({where_of_node(tail)})" if tail is not None else ""
        lines.append(f"the gradient of the loss depends on values of the batch{name}: two forwards")
    if program.axes and unstageable is None:
        is_graph = any(root.requires_grad for root in roots)
        lines += plan.outlook(program, is_graph)
        forecast, program, steps = _forecast(program, is_graph)
        lines.append(forecast)
    else:
        steps = program.schedule(False)
    passes = _passes(steps)
    for position, run in enumerate(_runs(program), 1):
        lines.append(_head(program, passes, run, position))
        lines += [f"    {n.id:4d} combine the partials" for n in run.combined if n.mode == REDUCE]
        lines += [_line(program, program.node(i)) for i in run.nodes]
    return Explanation("\n".join(lines))


@in_turn
def plan_of(loss: torch.Tensor) -> plan.Plan:
    """The number of chunks that the program behind `loss` would run in, with the bytes
    predicted."""
    return plan.plan(Program([loss]), True)
