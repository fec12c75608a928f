"""explain(): a recorded program as text, its stages, and for each joint the reason and the line."""

from __future__ import annotations

from typing import Any

import torch

from koila import _core, plan
from koila.program import REDUCE, Node, Program, Run

_MODES = ("rows", "reduce", "once")


def _describe(program: Program, value: int) -> str:
    info = program.info(value)
    dtype = str(info.dtype).removeprefix("torch.")
    if info.place is None:
        return f"{list(info.shape)} {dtype} whole"
    _, dim, outer, inner = info.place
    digits = "" if outer == inner == 1 else f" of {outer} x rows x {inner}"
    return f"{list(info.shape)} {dtype} rows in dim {dim}{digits}"


def _line(program: Program, node: Node) -> str:
    func, row, reason, where, *_ = _core.node(node.id)
    name = row or getattr(func, "__name__", "call")
    why = ""
    if node.mode == 2:
        why = f"; {reason}" if reason else ("" if row else f"; no row for {name}")
    return f"    {node.id:4d} {name:24s} {_MODES[node.mode]:6s} {_describe(program, node.first_out)}{why}  ({where})"  # noqa: E501


def _passes(program: Program, run: Run) -> str:
    if not run.has_gradient:
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
    spread = program.spread_writes()
    if spread is not None:
        lines.append(
            "it runs whole: memory that several stages use is written through a view\n"
            + _line(program, spread)
        )
    elif program.last_body is not None and not program.is_tail_linear:
        tail = program.nodes.get(program.tail_node) if program.tail_node is not None else None
        name = f" ({_core.node(tail.id)[3]})" if tail is not None else ""
        lines.append(f"the gradient of the loss depends on values of the batch{name}: two forwards")
    for run in runs:
        lines.append(_head(program, run))
        lines += [f"    {n.id:4d} combine the partials" for n in run.combined if n.mode == REDUCE]
        lines += [_line(program, program.nodes[i]) for i in run.nodes]
    return "\n".join(lines)


def plan_of(loss: torch.Tensor) -> plan.Plan:
    """The number of chunks that the program behind `loss` would run in, with the bytes
    predicted."""
    return plan.plan(Program([loss]), True)
