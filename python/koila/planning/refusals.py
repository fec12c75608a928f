# SPDX-License-Identifier: Apache-2.0
"""The values of memory_limit under which a program runs, and the errors that propose them."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from koila import _core
from koila.basics import config
from koila.memory import optimizers, plan_program
from koila.messages.errors import MemoryLimitError
from koila.messages.words import count, size, sizes
from koila.planning import fitting, limits, seen, whole_calls
from koila.planning.limits import FEW_CHUNKS, Before, Needs, as_limit, in_tenths, limit_in_words
from koila.planning.strategies import Strategies
from koila.reporting import reports
from koila.staged import layers
from koila.staged.cache import remember
from koila.staged.facts import name_of_call
from koila.staged.program import Program


def _mib(n_bytes: float) -> str:
    """Return a memory_limit of at least `n_bytes`, as config() reads it."""
    return f"{in_tenths(n_bytes) / 2**20:.1f} MiB"


class Limits(NamedTuple):
    """The values of memory_limit, in bytes, under which a program runs."""

    least: float
    n_chunks: int  # the number of chunks under the least limit
    best: float  # the least limit for at most FEW_CHUNKS chunks
    coming: float = 0.0  # the part of them that is for state which optimizers have not made yet
    is_of_step: bool = False  # the optimizer's step needs the least limit, the program needs less

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


def before(program: Program) -> Before:
    """Return what a memory_limit is for beside a program."""
    parameters = program.parameters if program.roots else []
    coming = optimizers.coming_state(parameters)
    stepping = optimizers.gradients_to_come(parameters) + optimizers.temporaries(parameters)
    return Before(as_limit(program, coming), coming, stepping)


def limits_of(program: Program, is_graph: bool) -> Limits:
    """Return the values of memory_limit under which a program runs, also in the next steps."""
    beside, key = before(program), seen.key_of(program, is_graph)
    found: Limits | None = program.cache.limits.get((key, beside)) if key is not None else None
    if found is None:
        found = _find_limits(program, is_graph, beside)
        if key is not None:
            remember(program.cache.limits, (key, beside), found)
    return found


def _find_limits(program: Program, is_graph: bool, beside: Before) -> Limits:
    """Do the work of `limits_of`, given what a limit is for beside the program."""
    trial, (empty, coming, stepping) = fitting.Trial(program, is_graph), beside
    least = empty + max(trial.least, stepping)
    n_chunks = trial.n_chunks(in_tenths(least) - empty)  # a limit is set in tenths of a MiB
    best = least
    if n_chunks > FEW_CHUNKS:
        best = max(least, empty + trial.least_for(FEW_CHUNKS, empty))
    return Limits(least, n_chunks, best, coming, stepping > trial.least)


def refusal(needs: Needs, program: Program, said: str = "") -> MemoryLimitError:
    """Return the error: it names a limit that works, then what takes the memory, and where. `said`:
    the message of an allocator that failed although the program was to fit."""
    left = max(needs.allowed, 0.0)
    names = layers.Names(program)
    layer = names.of_call(needs.node)
    of_layer = f" of layer {layer!r}" if layer else ""
    call = f"{name_of_call(needs.node)}{of_layer} ({_core.node(needs.node)[3]})"
    samples = (
        "one sample at a time needs"
        if needs.rows == 1
        else f"{needs.rows} samples at a time, which takes least, need"
    )
    needed, has = sizes(needs.n_bytes, left)
    is_whole = 2 * needs.fixed >= needs.n_bytes
    fixed = f" ({size(needs.fixed)} of them for chunks of any size)" if is_whole else ""
    large = (
        _large(program, names, needs.fixed) if is_whole else f"what {call} holds for its samples"
    )
    is_graph = bool(program.roots)
    found = limits_of(program, is_graph)
    error = MemoryLimitError(
        f"{answer(found, needed, has, needs.n_bytes <= left)}\n"
        f"{in_lines(_state_to_come(found))}"
        f"  {samples} {needed} more than is in use now{fixed}, and {has} are left\n"
        f"{in_lines(limit_in_words(program))}"
        f"{in_lines(large and f'too large: {large}')}"
        f"{in_lines(_run_whole(program, needs.fixed) if is_whole else '')}"
        f"{in_lines(others(program))}"
        f"{in_lines(said)}"
        f"  needs most: {call}"
    )
    if needs.n_bytes > left:
        error.least_limit = in_tenths(found.least)
    with contextlib.suppress(MemoryError):  # the error goes without its plan if memory is short
        least = Strategies(program, is_graph).least()
        way = plan_program.Way(least.strategy, least.n_chunks, fits=False, estimate=least.estimate)
        error.plan = plan_program.of(program, is_graph, way, left, str(error).splitlines(), names)
    return error


def note_backward(error: MemoryLimitError, program: Program) -> None:
    """Add to the error of a read of a program the memory_limit under which a backward after it runs
    too, if that is higher."""
    ends, least = program.ends(), error.least_limit
    if not ends or least is None:
        return
    with contextlib.suppress(MemoryError):  # the error goes without it if memory is short
        found = limits_of(Program(ends), True)
        if _is_more_than_limit(found) and in_tenths(found.least) > least:
            error.add_note(
                f"with a backward() after this read, at least {_mib(found.least)} are needed: "
                f"{found.settings()}"
            )


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
    """Return the first line of an error: the bytes needed, the bytes left (both in words), and what
    to do. `is_enough`: the bytes left were to suffice, but an allocator failed. `is_stopped`: a
    call was stopped when it needed so much, and would have needed more."""
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
    limit, _ = sizes(config.get("memory_limit") or 0, found.least)  # digits in which they differ
    return f"{least} {_mib(found.least)} are needed and {name} is {limit}: {words}"


#: An error names a tensor if it takes at least this share of the bytes that it describes.
_CONSIDERABLE = 0.1


def others(program: Program) -> str:
    """Describe the bytes that other tensors take of a limit, if these are many; else empty."""
    outside = limits.outside(program)
    if outside < 2**20 / 10:
        return ""
    before = "".join(f"; {one}" for one in reports.ran_before()[:1])
    largest, name = limits.largest_outside(program), ""
    if largest is not None and largest.nbytes >= _CONSIDERABLE * outside:
        dtype = str(largest.dtype).removeprefix("torch.")
        shape = "nested" if largest.is_nested else list(largest.shape)
        name = f" (the largest is {shape} {dtype})"
    held = f"other tensors hold {size(outside)}{name}"
    return f"{held}, which count too: free those that you do not need{before}"


def ran_out(program: Program, said: str) -> MemoryLimitError:
    """Return the error for a program that ran out of memory in its smallest chunks. `said`: the
    message of the allocator."""
    allowed = limits.allowed_for(program)
    option = Strategies(program, bool(program.roots)).least()
    return refusal(limits.least(option.estimate, allowed), program, said)


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
    crossing = program.crossing(bool(program.roots))
    if crossing:
        value = max(crossing, key=program.bytes_of)
        n_bytes = program.bytes_of(value)
        says = f"{names.of_value(value)} takes {size(n_bytes)}, as it is kept from"
        found.append((n_bytes, f"{says} one pass over the chunks for the next"))
    if program.parameters and program.roots:
        found.append(_parameters(program.parameters, names))
    state = sum(tensor.nbytes for tensor in optimizers.state())
    found.append((state, f"the optimizer's state takes {size(state)}"))
    most, words = max(found)
    return words if most >= _CONSIDERABLE * fixed else ""


def _run_whole(program: Program, fixed: float) -> str:
    """Name the call on the whole batch with the largest results, and the reason, if the results of
    such calls are a considerable part of the `fixed` bytes, which no chunks reduce; else empty."""
    whole = [one for one in whole_calls.made_whole(program) if one.n_bytes > 0]
    if not whole or sum(one.n_bytes for one in whole) < _CONSIDERABLE * fixed:
        return ""
    n_others = sum(one.n_calls for one in whole) - 1
    others = f", and {count(n_others, 'other call')} too" if n_others else ""
    return f"{whole[0].call} ({whole[0].line}) runs on the whole batch{others}: {whole[0].why}"


def _parameters(leaves: list[torch.Tensor], names: layers.Names) -> tuple[float, str]:
    """Return the bytes of parameters with their gradients, and describe them."""
    total, largest = sum(leaf.nbytes for leaf in leaves), max(leaves, key=lambda one: one.nbytes)
    name = names.of_parameter(largest)
    if 2 * largest.nbytes >= total:
        return 2 * total, f"{name} and its gradient take {size(largest.nbytes)} each"
    return 2 * total, (
        f"{len(leaves)} parameters take {size(total)}, and their gradients as much; the largest is "
        f"{name} of {size(largest.nbytes)}"
    )


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

    `what` names the calls and why they run whole, `large` what takes most of the bytes `needed`; it
    may be empty. `is_stopped`: a call was stopped at so much, and may need more.
    """
    needs, has = sizes(needed, max(left, 0.0))
    n_bytes = as_limit(program, needed)
    found, more = Limits(n_bytes, 1, n_bytes), ", later even more," if is_stopped else ","
    error = MemoryLimitError(
        f"{answer(found, needs, has, False, is_stopped=is_stopped)}\n"
        f"  the whole batch needs {needs} more than is in use now{more} and {has} are left\n"
        f"{in_lines(limit_in_words(program))}"
        f"{in_lines(large and f'too large: {large}')}"
        f"{in_lines(others(program))}"
        f"  {what}"
    )
    error.least_limit = None if is_stopped else in_tenths(n_bytes)
    return error


def no_room_to_plan(program: Program) -> MemoryLimitError:
    """Return the error for a program that could not be planned since Python ran out of memory."""
    return MemoryLimitError(
        f"memory ran out while a program of {program.n_nodes} calls was planned: the limit of this "
        "process leaves nothing; raise it, or make the model or the batch smaller"
    )
