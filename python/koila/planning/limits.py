# SPDX-License-Identifier: Apache-2.0
"""What there is for a program and what it needs, as numbers, and as the sentences of refusals."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from koila import _core
from koila.basics import config
from koila.memory import budget, estimates, plan_program, storages
from koila.messages.errors import MemoryLimitError
from koila.messages.words import size, sizes
from koila.planning import ways, whole_calls
from koila.planning.ways import CHUNK_SHARE, devices_of
from koila.reporting import reports
from koila.staged import layers
from koila.staged.facts import name_of_call
from koila.staged.program import Program
from koila.staged.schedule import Op, Way

# A whole run must leave room to spare; a run in chunks can be undone and planned again.
WHOLE_SHARE = 0.9


def _held(program: Program) -> list[torch.Tensor]:
    """What of the tensors that are there is the step's: what entered, its gradients, optimizer
    state."""
    leaves = (tensor for tensor in program.entered if tensor.is_leaf)
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return program.entered + grads + budget.optimizer_state()


def allowed_for(program: Program, is_alone: bool = False, needed: float = math.inf) -> float:
    """The least that any device has: what the program needs, at most, is summed over all."""
    held = _held(program)
    devices = devices_of(program)
    return float(min(budget.free_bytes(device, held, is_alone, needed) for device in devices))


def _outside(program: Program) -> float:
    """Bytes of tensors that are not the program's, but in the memory that it may use."""
    held = _held(program)
    return float(max(budget.outside(device, held) for device in devices_of(program)))


def _sum_of(parts: list[tuple[str, int]]) -> int:
    return sum(n_bytes for _, n_bytes in parts)


def limit_in_words(program: Program) -> str:
    """The limit, and what of it is taken already; empty: there is none."""
    limit = config.get("memory_limit")
    if limit is None:
        if budget.is_bound() and devices_of(program)[0].type == "cpu":
            return "the limit of the process counts Python's objects and libraries too"
        return ""
    parts = max((budget.counted(d, program.entered) for d in devices_of(program)), key=_sum_of)
    taken = ", ".join(f"{name} {size(n_bytes)}" for name, n_bytes in parts)
    return f"the limit is {size(limit)}" + (f", of which {taken}" if taken else "")


#: In more chunks than this a step takes long, on the CPU and on a GPU.
FEW_CHUNKS = 16


def _in_few_chunks(found: list[estimates.Estimate]) -> float:
    """The least bytes that a program needs in so many chunks at most."""
    return min(one.peak(-(-one.rows // FEW_CHUNKS))[0] for one in found)


def as_limit(program: Program, needed: float) -> float:
    """The memory_limit in bytes under which a program has so many."""
    held = _held(program)
    with storages.for_once():
        taken = max(budget.taken(device, held) for device in devices_of(program))
    return taken + needed


def in_tenths(n_bytes: float) -> float:
    """Not less bytes, in tenths of a MiB."""
    return math.ceil(10 * n_bytes / 2**20) * 2**20 / 10


def _mib(n_bytes: float) -> str:
    """A memory_limit as config() reads it, of so much at least."""
    return f"{in_tenths(n_bytes) / 2**20:.1f} MiB"


class Limits(NamedTuple):
    """Under which memory_limit, in bytes, a program runs: the least of all, and one for few
    chunks."""

    least: float
    n_chunks: int  # with the least
    best: float

    def __str__(self) -> str:
        if self.is_one:
            return _mib(self.least)
        return (
            f"{_mib(self.best)} (for {FEW_CHUNKS} chunks; {_mib(self.least)} is the least, for "
            f"{self.n_chunks})"
        )

    @property
    def is_one(self) -> bool:
        return in_tenths(self.best) == in_tenths(self.least)

    def settings(self) -> str:
        """As a user writes them."""
        best, least = (f"'{_mib(one).replace(' ', '')}'" for one in (self.best, self.least))
        if self.is_one:
            return f"set memory_limit={least}"
        return f"set memory_limit={best} for {FEW_CHUNKS} chunks, or {least} for {self.n_chunks}"


def limits_of(program: Program, is_graph: bool, is_for_next: bool = True) -> Limits:
    """Which memory_limit to set for a program.

    Args:
        program: what is to run.
        is_graph: whether it is differentiated.
        is_for_next: with what optimizers keep from their first step on, which the next steps have
            less; to look for those that have yet to make it takes long.
    """
    estimates = [way.estimate for way in ways.options(program, is_graph)]
    rows, n_bytes, _ = min((one.least() for one in estimates), key=lambda entry: entry[1])
    n_chunks = -(-estimates[0].rows // rows)
    leaves = [leaf for leaf in program.entered if leaf.is_leaf]
    is_looked_for = is_for_next and bool(program.roots)
    coming = budget.coming_state(leaves, is_sure=True) if is_looked_for else 0
    least = as_limit(program, n_bytes + coming)
    if n_chunks <= FEW_CHUNKS:
        return Limits(least, n_chunks, least)
    return Limits(least, n_chunks, as_limit(program, _in_few_chunks(estimates) + coming))


def needs(program: Program) -> tuple[float, float, float]:
    """What a program that is differentiated needs whole, and in few chunks; and what of memory is
    planned with."""
    estimates = [way.estimate for way in ways.options(program, True)]
    share = min(WHOLE_SHARE, CHUNK_SHARE)
    return estimates[0].whole, _in_few_chunks(estimates), share * max(0.0, left_for(program))


def left_for(program: Program, needed: float = math.inf) -> float:
    """Bytes that a program may have now, which needs so many at most."""
    return allowed_for(program, needed=needed)


@dataclass(frozen=True)
class Needs:
    """What a program needs in the chunks that need least, and what it is allowed."""

    rows: int
    n_bytes: float
    node: int
    fixed: float  # of the bytes, what smaller chunks do not make less
    allowed: float

    def refusal(self, program: Program, said: str = "") -> MemoryLimitError:
        """What is raised: a limit that works, then what takes the memory, and where.

        Args:
            program: what does not fit.
            said: the words of an allocator that failed though it was to fit.
        """
        left = max(self.allowed, 0.0)
        names = layers.Names(program)
        layer = names.of_call(self.node)
        of_layer = f" of layer {layer!r}" if layer else ""
        call = f"{name_of_call(self.node)}{of_layer} ({_core.node(self.node)[3]})"
        samples = (
            "one sample at a time needs"
            if self.rows == 1
            else f"{self.rows} samples at a time, which takes least, need"
        )
        needed, has = sizes(self.n_bytes, left)
        is_whole = 2 * self.fixed >= self.n_bytes
        fixed = f", of which {size(self.fixed)} do not shrink with the chunks" if is_whole else ""
        large = _large(program, names) if is_whole else f"what {call} holds for its samples"
        found = limits_of(program, bool(program.roots))
        error = MemoryLimitError(
            f"{answer(found, needed, has, self.n_bytes <= left)}\n"
            f"  {samples} {needed} beside what is there{fixed}, and {has} are left\n"
            f"{in_lines(limit_in_words(program))}"
            f"{in_lines(large and f'too large: {large}')}"
            f"{in_lines(others(program))}"
            f"{in_lines(said)}"
            f"  needs most: {call}"
        )
        with contextlib.suppress(MemoryError):  # there may be no room for a plan
            way, n_chunks = ways.smallest(program, bool(program.roots))
            error.plan = plan_program.of(
                program,
                bool(program.roots),
                way,
                n_chunks,
                1,
                left,
                fits=False,
                summary=str(error).splitlines(),
            )
        return error


def in_lines(text: str) -> str:
    """A line of a refusal; none where there is nothing to say."""
    return f"  {text}\n" if text else ""


def answer(found: Limits, needed: str, has: str, is_enough: bool) -> str:
    """The first line of a refusal: what is needed, what there is, and what to do."""
    limit = config.get("memory_limit")
    smaller = "make the model, the sequence or the batch smaller"
    if is_enough:
        return (
            f"memory ran out, though {needed} were to do and {has} were left: free some, or "
            f"{smaller}"
        )
    if limit is None or found.least <= limit:
        return (
            f"at least {needed} are needed beside what is there, and {has} are free: free some, "
            f"or {smaller}"
        )
    return (
        f"at least {_mib(found.least)} are needed and memory_limit is {_limit_next_to(found)}: "
        f"{found.settings()}"
    )


def _limit_next_to(found: Limits) -> str:
    """The memory_limit that is set, in as many digits as tell it from what is needed."""
    limit = config.get("memory_limit")
    assert limit is not None
    return sizes(limit, found.least)[0]


def others(program: Program) -> str:
    """What tensors that are not the step's hold of a limit, and why, where that is much."""
    outside = _outside(program)
    if outside < 2**20 / 10:
        return ""
    before = "".join(f"; {one}" for one in reports.ran_before()[:1])
    return f"free some of these: other tensors hold {outside / 2**20:.1f} MiB{before}"


def least(estimate: estimates.Estimate, allowed: float) -> Needs:
    """What a program needs in the chunks that need least."""
    rows, n_bytes, node = estimate.least()
    return Needs(rows, n_bytes, node, estimate.fixed(rows), allowed)


def ran_out(program: Program, said: str) -> MemoryLimitError:
    """What is raised where memory ran out in the smallest chunks, as an allocator said."""
    allowed = allowed_for(program)
    options = ways.options(program, bool(program.roots))
    needs = min((least(way.estimate, allowed) for way in options), key=lambda one: one.n_bytes)
    return needs.refusal(program, said)


def _large(program: Program, names: layers.Names) -> str:
    """The name of the largest thing that smaller chunks do not shrink: a call that needs the whole
    batch, what one pass over the chunks leaves for another, a parameter and its gradient, or the
    state of an optimizer."""
    whole = [one for one in whole_calls.made_whole(program) if one.n_bytes > 0]
    if whole:
        return whole[0].made("makes")
    found: list[tuple[int, str]] = []
    homes = Way(1, 1, 1)
    crossing = program.schedule(bool(program.roots), homes).values_of(Op.HOME)
    if crossing:
        value = max(crossing, key=program.bytes_of)
        n_bytes = program.bytes_of(value)
        says = f"{names.of_value(value)} takes {size(n_bytes)}, as it is kept from"
        found.append((n_bytes, f"{says} one pass over the chunks for the next"))
    leaves = [leaf for leaf in program.entered if leaf.is_leaf and leaf.requires_grad]
    if leaves and program.roots:
        leaf = max(leaves, key=lambda one: one.nbytes)
        name = layers.name_of_parameter(leaf)
        found.append((2 * leaf.nbytes, f"{name} and its gradient take {size(leaf.nbytes)} each"))
    state = sum(tensor.nbytes for tensor in budget.optimizer_state())
    if state:
        found.append((state, f"the optimizer's state takes {size(state)}"))
    return max(found, default=(0, ""))[1]
