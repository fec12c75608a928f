# SPDX-License-Identifier: Apache-2.0
"""The bytes that a program needs and the bytes that it may use, and the errors that say so."""

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

# The share of the allowed memory that a whole run may be predicted to need: unlike a run in chunks,
# it cannot be undone and planned again.
WHOLE_SHARE = 0.9


def _tensors_of_step(program: Program) -> list[torch.Tensor]:
    """Return the existing tensors that belong to the step: inputs, parameters, their gradients, and
    the state of optimizers."""
    leaves = [tensor for tensor in program.entered if tensor.is_leaf] + program.parameters
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return program.entered + program.parameters + grads + budget.optimizer_state()


def allowed_for(program: Program, is_alone: bool = False, needed: float = math.inf) -> float:
    """Return the bytes that a program may use: the least of its devices, since the bytes that it
    needs are summed over all of them.

    Args:
        program: what is to run.
        is_alone: ignore tensors that do not belong to the step.
        needed: the most that it needs, if known; see `budget.free_bytes`.
    """
    held = _tensors_of_step(program)
    devices = devices_of(program)
    return float(min(budget.free_bytes(device, held, is_alone, needed) for device in devices))


def _outside(program: Program) -> float:
    """Return the bytes of other tensors, which count against the program's limit."""
    held = _tensors_of_step(program)
    return float(max(budget.outside(device, held) for device in devices_of(program)))


def _sum_of(parts: list[tuple[str, int]]) -> int:
    return sum(n_bytes for _, n_bytes in parts)


def limit_in_words(program: Program) -> str:
    """Describe the limit and the bytes of it that are taken; empty if there is no limit."""
    limit = config.get("memory_limit")
    if limit is None:
        if budget.is_bound() and devices_of(program)[0].type == "cpu":
            return "the limit of the process counts Python's objects and libraries too"
        return ""
    counted = (
        budget.counted(one, program.parameters, program.entered) for one in devices_of(program)
    )
    parts = max(counted, key=_sum_of)
    taken = ", ".join(f"{name} {size(n_bytes)}" for name, n_bytes in parts)
    text = f"the limit is {size(limit)}" + (f", of which {taken}" if taken else "")
    if program.roots and budget.GRADIENTS in dict(parts):
        text += (
            "; these gradients are of an earlier backward(): if that was of an earlier step, "
            "zero_grad(set_to_none=True) frees them"
        )
    return text


#: With more chunks than this a step is slow, on a CPU and on a GPU.
FEW_CHUNKS = 16


def _in_few_chunks(as_it_is: estimates.Estimate) -> float:
    """Return the bytes that a program needs in FEW_CHUNKS chunks.

    Plans take another way than as it is, which may need less, only for what does not fit so.
    """
    return as_it_is.peak(-(-as_it_is.rows // FEW_CHUNKS))[0]


def as_limit(program: Program, needed: float) -> float:
    """Return the memory_limit in bytes under which a program may use `needed` bytes."""
    held = _tensors_of_step(program)
    with storages.for_once():
        taken = max(budget.taken(device, held) for device in devices_of(program))
    return taken + needed


def in_tenths(n_bytes: float) -> float:
    """Round bytes up to a tenth of a MiB."""
    return math.ceil(10 * n_bytes / 2**20) * 2**20 / 10


def _mib(n_bytes: float) -> str:
    """Return a memory_limit of at least `n_bytes`, as config() reads it."""
    return f"{in_tenths(n_bytes) / 2**20:.1f} MiB"


class Limits(NamedTuple):
    """The values of memory_limit, in bytes, under which a program runs."""

    least: float
    n_chunks: int  # the number of chunks under the least limit
    best: float  # the least limit for at most FEW_CHUNKS chunks
    coming: float = 0.0  # the part of them that is for state which optimizers have not made yet

    def __str__(self) -> str:
        coming = f", with {self.to_come()}" if self.coming else ""
        if self.is_one:
            return f"{_mib(self.least)}{coming}"
        return (
            f"{_mib(self.least)} (in {self.n_chunks} chunks; at most {FEW_CHUNKS} chunks "
            f"need {_mib(self.best)}){coming}"
        )

    def to_come(self, verb: str = "") -> str:
        """Return what optimizers will take beyond what is in use; empty if that is nothing."""
        if not self.coming:
            return ""
        what = f"{size(self.coming)} {verb}".rstrip()
        return f"{what} for the state that the optimizer makes in its first step"

    @property
    def is_one(self) -> bool:
        """Whether both limits are the same when rounded."""
        return in_tenths(self.best) == in_tenths(self.least)

    def settings(self) -> str:
        """Return what to set, as a user writes it."""
        best, least = (_mib(one).replace(" ", "") for one in (self.best, self.least))
        now = config.settings()
        if self.is_one:
            return f"set {now.assigned(least)}"
        few, many = f"at most {FEW_CHUNKS} chunks", f"{self.n_chunks} chunks"
        return f"set {now.assigned(best)} for {few}, or {now.value(least)} for {many}"


def limits_of(program: Program, is_graph: bool) -> Limits:
    """Return the values of memory_limit under which a program runs, also in the next steps, when
    optimizers have made their state.

    Args:
        program: what is to run.
        is_graph: whether it is differentiated.
    """
    estimates = [way.estimate for way in ways.options(program, is_graph)]
    smallest = min(estimates, key=lambda one: one.least()[1])
    coming = budget.coming_state(program.parameters) if program.roots else 0
    before = as_limit(program, coming)
    least = best = before + smallest.least()[1]
    # A limit is set in tenths of a MiB. Larger chunks may fit what that adds.
    rows = smallest.largest_chunk(in_tenths(least) - before) or smallest.least()[0]
    n_chunks = -(-smallest.rows // rows)
    if n_chunks > FEW_CHUNKS:
        best = max(least, before + _in_few_chunks(estimates[0]) / CHUNK_SHARE)
    return Limits(least, n_chunks, best, coming)


def needs(program: Program) -> tuple[float, float, float]:
    """Return the bytes that a program with its backward needs whole, those that it needs in few
    chunks, and those that plans use of the memory that is left."""
    found = estimates.estimate(program, True)
    share = min(WHOLE_SHARE, CHUNK_SHARE)
    return found.whole, _in_few_chunks(found), share * max(0.0, left_for(program))


def left_for(program: Program, needed: float = math.inf) -> float:
    """Return the bytes that a program may use now; `needed` is as in `allowed_for`."""
    return allowed_for(program, needed=needed)


@dataclass(frozen=True)
class Needs:
    """The bytes that a program needs in the chunks that need least."""

    rows: int  # of a chunk
    n_bytes: float
    node: int  # the call at the worst moment
    fixed: float  # the part of `n_bytes` that does not shrink with the chunks
    allowed: float  # the bytes that the program may use

    def refusal(self, program: Program, said: str = "") -> MemoryLimitError:
        """Return the error: it names a limit that works, then what takes the memory, and where.

        Args:
            program: the program that does not fit.
            said: the message of an allocator that failed although the program was to fit.
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
        fixed = f" ({size(self.fixed)} of them for chunks of any size)" if is_whole else ""
        large = (
            _large(program, names, self.fixed) if is_whole else f"what {call} holds for its samples"
        )
        found = limits_of(program, bool(program.roots))
        error = MemoryLimitError(
            f"{answer(found, needed, has, self.n_bytes <= left)}\n"
            f"{in_lines(_state_to_come(found))}"
            f"  {samples} {needed} more than is in use now{fixed}, and {has} are left\n"
            f"{in_lines(limit_in_words(program))}"
            f"{in_lines(large and f'too large: {large}')}"
            f"{in_lines(others(program))}"
            f"{in_lines(said)}"
            f"  needs most: {call}"
        )
        if self.n_bytes > left:
            error.least_limit = in_tenths(found.least)
        with contextlib.suppress(MemoryError):  # the error goes without its plan if memory is short
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


def _state_to_come(found: Limits) -> str:
    """Describe what optimizers will take beyond the bytes of an error's first line, or of them."""
    is_proposed = _is_more_than_limit(found)
    return found.to_come(f"of the {_mib(found.least)} are" if is_proposed else "more are needed")


def _is_more_than_limit(found: Limits) -> bool:
    limit = config.get("memory_limit")
    return limit is not None and found.least > limit


def in_lines(text: str) -> str:
    """Return a text as a line of an error; empty for an empty text."""
    return f"  {text}\n" if text else ""


#: koila stops a call that takes more memory than is left. The error then proposes a memory_limit of
#: this multiple of the bytes that were in use at that moment.
_AFTER_STOP = 1.5


def answer(
    found: Limits, needed: str, has: str, is_enough: bool, *, is_stopped: bool = False
) -> str:
    """Return the first line of an error: the bytes needed, the bytes left, and what to do.

    Args:
        found: the limits that work.
        needed: the bytes needed, in words.
        has: the bytes left, in words.
        is_enough: the bytes left were to suffice, but an allocator failed.
        is_stopped: a call was stopped when it needed so much, and would have needed more.
    """
    least = "more than" if is_stopped else "at least"
    smaller = "make the model, the sequence or the batch smaller"
    if is_enough:
        return (
            f"memory ran out, though {needed} were to do and {has} were left: free some, or "
            f"{smaller}"
        )
    if not _is_more_than_limit(found):
        return (
            f"{least} {needed} more than is in use now are needed, and {has} are free: free some, "
            f"or {smaller}"
        )
    words, name = found.settings(), config.settings().option or "memory_limit"
    if is_stopped:
        more = _AFTER_STOP * found.least
        words = f"{Limits(more, 1, more).settings()}, and more if the call is stopped again"
    return f"{least} {_mib(found.least)} are needed and {name} is {_limit_next_to(found)}: {words}"


def _limit_next_to(found: Limits) -> str:
    """Return the memory_limit that is set, with enough digits to differ from the least limit."""
    limit = config.get("memory_limit")
    assert limit is not None
    return sizes(limit, found.least)[0]


def others(program: Program) -> str:
    """Describe the bytes that other tensors take of a limit, if these are many; else empty."""
    outside = _outside(program)
    if outside < 2**20 / 10:
        return ""
    before = "".join(f"; {one}" for one in reports.ran_before()[:1])
    held = f"other tensors hold {size(outside)}"
    return f"{held}, which count too: free those that you do not need{before}"


def least(estimate: estimates.Estimate, allowed: float) -> Needs:
    """Return what a program needs in the chunks that need least."""
    rows, n_bytes, node = estimate.least()
    return Needs(rows, n_bytes, node, estimate.fixed(rows), allowed)


def ran_out(program: Program, said: str) -> MemoryLimitError:
    """Return the error for a program that ran out of memory in its smallest chunks.

    Args:
        program: the program.
        said: the message of the allocator.
    """
    allowed = allowed_for(program)
    options = ways.options(program, bool(program.roots))
    needs = min((least(way.estimate, allowed) for way in options), key=lambda one: one.n_bytes)
    return needs.refusal(program, said)


#: An error says that a tensor is too large if the tensor takes at least this share of the bytes
#: that do not shrink with the chunks.
_CONSIDERABLE = 0.1


def _large(program: Program, names: layers.Names, fixed: float) -> str:
    """Describe the largest thing of the `fixed` bytes that do not shrink with the chunks; empty if
    none is a considerable part of them.

    That is the result of a call on the whole batch, an output that the user's script holds, an
    activation that one pass over the chunks keeps for the next, the parameters and their gradients,
    or the state of the optimizers. `others` describes tensors outside of the step.
    """
    whole = [one for one in whole_calls.made_whole(program) if one.n_bytes > 0]
    found: list[tuple[float, str]] = [(one.n_bytes, one.made("makes")) for one in whole]
    held = [value for value in program.wanted if program.info(value).place is not None]
    if held:
        value = max(held, key=program.bytes_of)
        n_bytes = program.bytes_of(value)
        says = f"{names.of_value(value)} takes {size(n_bytes)}, as your script holds it"
        found.append((n_bytes, f"{says}: del it before backward()"))
    homes = Way(1, 1, 1)
    crossing = program.schedule(bool(program.roots), homes).values_of(Op.HOME)
    if crossing:
        value = max(crossing, key=program.bytes_of)
        n_bytes = program.bytes_of(value)
        says = f"{names.of_value(value)} takes {size(n_bytes)}, as it is kept from"
        found.append((n_bytes, f"{says} one pass over the chunks for the next"))
    if program.parameters and program.roots:
        found.append(_parameters(program.parameters))
    state = sum(tensor.nbytes for tensor in budget.optimizer_state())
    found.append((state, f"the optimizer's state takes {size(state)}"))
    most, words = max(found)
    return words if most >= _CONSIDERABLE * fixed else ""


def _parameters(leaves: list[torch.Tensor]) -> tuple[float, str]:
    """Return the bytes of parameters with their gradients, and describe them."""
    total, largest = sum(leaf.nbytes for leaf in leaves), max(leaves, key=lambda one: one.nbytes)
    name = layers.name_of_parameter(largest)
    if 2 * largest.nbytes >= total:
        return 2 * total, f"{name} and its gradient take {size(largest.nbytes)} each"
    return 2 * total, (
        f"{len(leaves)} parameters take {size(total)}, and their gradients as much; the largest is "
        f"{name} of {size(largest.nbytes)}"
    )
