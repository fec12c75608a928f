"""How many chunks a program is run in: as many as config() asks for, else as few as fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from koila import _core, budget, config, memory
from koila.errors import MemoryLimitError
from koila.program import Program, name_of_node, where_of_node
from koila.reports import count
from koila.rows import largest

# A whole run must leave room to spare; a run in chunks can be undone and planned again.
WHOLE_SHARE = 0.9
# The model does not know an allocator's rounding, nor buffers inside kernels.
CHUNK_SHARE = 0.9
# Kernels are fastest, and matrix products of two passes the same, on multiples of so many rows.
UNIT = 8


@dataclass(frozen=True)
class Plan:
    """A number of chunks, and why: bytes predicted at the worst moment, bytes allowed.

    Chunks are of whole `unit`s of rows, the last may be short.
    """

    n_chunks: int
    unit: int = 1
    predicted: float | None = None
    allowed: float | None = None


def is_whole() -> bool:
    """A quick answer, without staging: whether everything pending certainly fits at once."""
    if config.get("chunks") is not None:
        return config.get("chunks") == 1
    if config.get("memory_limit") is not None:
        return False
    return budget.is_ample(int(_core.pending_bytes()))


def _devices(program: Program) -> list[torch.device]:
    """Where the program's values are made: on the CPU only where no accelerator makes any.

    A batch may still be on the CPU when it is made lazy, and be moved by a call of the program.
    """
    made = {program.info(v).device for node in program.nodes.values() for v in node.outs}
    others = sorted((d for d in made if d.type != "cpu"), key=str)
    return others or [torch.device("cpu")]


def _held(program: Program) -> list[torch.Tensor]:
    """Tensors that are there before the step: what entered, its gradients, optimizer state."""
    held: list[torch.Tensor] = []
    for entry in program.imports:
        info = program.info(entry.value)
        for tensor in (info.real, info.number):
            if tensor is not None:
                held.append(tensor)
        if info.real is not None and info.real.is_leaf and info.real.grad is not None:
            held.append(info.real.grad)
    return held + budget.optimizer_state()


def _allowed(program: Program) -> float:
    """The least that any device has: what the program needs is summed over all."""
    held = _held(program)
    return float(min(budget.free_bytes(device, held) for device in _devices(program)))


def refusal(program: Program, is_graph: bool) -> MemoryLimitError:
    """What is raised where not even one row at a time fits: the call that needs most, and why."""
    estimate = memory.estimate(program, is_graph)
    rows, needed, node = estimate.least()
    detail = _core.node(node)
    name = detail[1] or getattr(detail[0], "__name__", "a call")
    left = max(_allowed(program), 0.0)
    at_a_time = "one row at a time" if rows == 1 else f"{rows} rows at a time, the least,"
    fixed = _held_whole(program, needed, estimate.fixed(rows))
    return MemoryLimitError(
        f"{name}: {at_a_time} needs {needed / 2**20:.1f} MiB ({int(needed)} bytes) beside what is "
        f"there{fixed}, and {left / 2**20:.1f} MiB ({int(left)} bytes) are left ({detail[3]}); "
        "raise memory_limit, or make the model or the sequence smaller"
    )


def _held_whole(program: Program, needed: float, fixed: float) -> str:
    """How much of a refused program's bytes smaller chunks do not make less, and for whom."""
    if 2 * fixed < needed:
        return ""
    share = f", of which {fixed / 2**20:.1f} MiB do not depend on the rows of a chunk"
    joints = [node for node in program.nodes.values() if program.joins_rows(node)]
    made = sum(map(program.bytes_made, joints))
    if made == 0:
        return share
    first = max(joints, key=program.bytes_made)
    others = f" and {count(len(joints) - 1, 'other call')}" if len(joints) > 1 else ""
    named = f"{name_of_node(first)} ({where_of_node(first)}){others}"
    verb = "make" if others else "makes"
    return f"{share}: {named}, reading all rows at once, {verb} {made / 2**20:.1f} MiB"


def plan(program: Program, is_graph: bool) -> Plan:
    """Choose the number of chunks for a program.

    Raises:
        MemoryLimitError: one row does not fit.
    """
    chunks = config.get("chunks")
    if chunks is not None:
        return Plan(chunks)
    if not program.axes:
        return Plan(1)
    estimate = memory.estimate(program, is_graph)
    allowed = _allowed(program)
    whole, _ = estimate.peak(estimate.rows)
    if whole <= WHOLE_SHARE * allowed:
        return Plan(1, 1, whole, allowed)
    rows = estimate.largest_chunk(CHUNK_SHARE * allowed)
    if rows == 0:
        raise refusal(program, is_graph)
    n_chunks = -(-estimate.rows // rows)
    unit = UNIT if largest(estimate.rows, n_chunks, UNIT) <= rows else 1
    predicted, _ = estimate.peak(largest(estimate.rows, n_chunks, unit))
    return Plan(n_chunks, unit, predicted, allowed)


def plan_read(program: Program, is_known_only: bool) -> Plan | None:
    """Choose how a program is run whose numbers are enough, while its backward is still to come.

    Where the step fits with its graph it runs live, and the graph is there when backward() asks
    for it. Else it runs without one, in the chunks that backward() will need: they draw the same.

    Returns:
        None: it runs live, and all else that waits with it.

    Raises:
        MemoryLimitError: one row does not fit, even without its graph.
    """
    is_read = _core.has_numbers()  # run live, what that took would be run again, with its graph
    is_apart = is_known_only or is_read
    if not program.has_body and not is_apart:
        return None
    if is_apart and not program.is_drawing:
        planned = plan(program, False)
        return None if planned.n_chunks == 1 and program.is_all and not is_read else planned
    step = Program([]) if is_known_only else program
    ends = step.ends()
    try:
        planned = plan(Program(ends), True) if ends else plan(step, False)
    except MemoryLimitError:
        return plan(program, False)  # it may be that no backward comes
    return planned if planned.n_chunks > 1 or is_read else None
