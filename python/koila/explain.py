"""explain(): a recorded program as text, its stages, and for each joint the reason and the line."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from koila import _core, draws, plan
from koila.program import ONCE, REDUCE, Node, Program, Run
from koila.threads import in_turn

_MODES = ("rows", "reduce", "once")
_SPREAD = "memory that several stages use is written where no stage can"
_DATA_STAGE = 1  # label counts and masks: never differentiated
_logger = logging.getLogger("koila")
_logged: set[str] = set()


def _name(node: Node) -> str:
    func, row, *_ = _core.node(node.id)
    return str(row or getattr(func, "__name__", "call"))


def _why(node: Node) -> str:
    """Why a call that reads rows runs once, or nothing."""
    _, row, reason, *_ = _core.node(node.id)
    return reason or ("" if row else f"no row for {_name(node)}")


def _joins(program: Program, node: Node) -> bool:
    """Whether a call runs once although it reads rows of a batch."""
    reads = (program.imports[number].value for number in node.imports if number >= 0)
    return node.mode == ONCE and any(program.info(v).place is not None for v in reads)


def log_whole(program: Program) -> None:
    """Say once, with the line, where a joint leaves most of a program's memory whole."""
    sizes = {
        node.id: sum(
            math.prod(program.info(v).shape) * program.info(v).dtype.itemsize for v in node.outs
        )
        for node in program.nodes.values()
    }
    whole = sum(sizes[node.id] for node in program.nodes.values() if node.mode == ONCE)
    joint = next((n for n in program.nodes.values() if _joins(program, n)), None)
    if program.spread is not None:
        where = _core.node(program.spread.id)[3]
        _log(
            where, "%s makes the program run whole (%s): %s", _name(program.spread), where, _SPREAD
        )
    elif joint is not None and 2 * whole > sum(sizes.values()):
        where = _core.node(joint.id)[3]
        _log(
            where,
            "%s needs the whole batch (%s; %s), and %d of %d calls run whole with it: "
            "koila saves little memory here",
            _name(joint),
            _why(joint),
            where,
            sum(node.mode == ONCE for node in program.nodes.values()),
            len(program.nodes),
        )


def _log(where: str, text: str, *words: Any) -> None:
    if where not in _logged:
        _logged.add(where)
        _logger.warning(text, *words)


def log_live(func: Any) -> None:
    """Say once, with the line, where a call that cannot be recorded runs all before it whole."""
    where = draws.user_line()
    if where in _logged or plan.is_whole():
        return
    _log(
        where,
        "%s cannot be recorded (%s): what was recorded before it runs now, on the whole batch, and "
        "koila saves no memory there",
        getattr(func, "__name__", func),
        where,
    )


def _describe(program: Program, value: int) -> str:
    info = program.info(value)
    dtype = str(info.dtype).removeprefix("torch.")
    if info.place is None:
        return f"{list(info.shape)} {dtype} whole"
    _, dim, outer, inner = info.place
    digits = "" if outer == inner == 1 else f" of {outer} x rows x {inner}"
    return f"{list(info.shape)} {dtype} rows in dim {dim}{digits}"


def _line(program: Program, node: Node) -> str:
    why = f"; {_why(node)}" if _joins(program, node) else ""
    mode = f"{_MODES[node.mode]:6s} {_describe(program, node.first_out)}{why}"
    return f"    {node.id:4d} {_name(node):24s} {mode}  ({_core.node(node.id)[3]})"


def _passes(program: Program, run: Run) -> str:
    if not run.has_gradient or run.stage == _DATA_STAGE:
        return "1 forward"
    is_last = run.stage == program.last_body
    return (
        "1 forward, 1 backward" if is_last and program.is_tail_linear else "2 forwards, 1 backward"
    )


def _head(program: Program, run: Run) -> str:
    if not run.is_body:
        return f"stage {run.stage}: joint, runs once"
    rows = program.axes[run.axis]
    return f"stage {run.stage}: body over {rows} rows, {_passes(program, run)}"


@in_turn
def explain(*losses: Any) -> str:
    """Describe the program behind some losses, without running it.

    Args:
        losses: lazy tensors that backward() would be called on.

    Returns:
        A text: each stage with its nodes (shape, place, mode), each call that runs once with
        its reason
        and line, and how often each body is run.

    Example:
        >>> import torch, koila
        >>> x = koila.lazy(torch.ones(4, 3))
        >>> print(koila.explain((x * 2).sum()).splitlines()[0])
        program of 2 calls in 2 stages
    """
    roots = [loss for loss in losses if type(loss) is _core.LazyTensor]
    if not roots or all(_core.real(root) is not None for root in roots):
        return "nothing is pending: the program has run"
    program = Program(roots)
    runs = [run for run in program.runs if run.nodes or run.combined]
    lines = [f"program of {len(program.nodes)} calls in {len(runs)} stages"]
    spread = program.spread
    if spread is not None:
        lines.append(f"it runs whole: {_SPREAD}\n" + _line(program, spread))
    elif program.last_body is not None and not program.is_tail_linear:
        tail = program.nodes.get(program.tail_node) if program.tail_node is not None else None
        name = f" through {_name(tail)} ({_core.node(tail.id)[3]})" if tail is not None else ""
        lines.append(f"the gradient of the loss depends on values of the batch{name}: two forwards")
    for run in runs:
        lines.append(_head(program, run))
        lines += [f"    {n.id:4d} combine the partials" for n in run.combined if n.mode == REDUCE]
        lines += [_line(program, program.nodes[i]) for i in run.nodes]
    return "\n".join(lines)


@in_turn
def plan_of(loss: torch.Tensor) -> plan.Plan:
    """The number of chunks that the program behind `loss` would run in, with the bytes
    predicted."""
    return plan.plan(Program([loss]), True)
