# SPDX-License-Identifier: Apache-2.0
"""How many chunks a program is run in: as many as config() asks for, else as few as fit."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from koila import (
    _core,
    across,
    budget,
    config,
    draws,
    layers,
    lines,
    memory,
    offload,
    plan_program,
    reports,
    steps,
    storages,
    whole_calls,
)
from koila.errors import MemoryLimitError
from koila.facts import name_of_call
from koila.program import Program
from koila.rows import UNIT, Bounds, largest
from koila.schedule import AS_IT_IS, WITHOUT_CHECKPOINTS, Op, Way
from koila.words import size, sizes

# A whole run must leave room to spare; a run in chunks can be undone and planned again.
WHOLE_SHARE = 0.9
# The model does not know an allocator's rounding, nor buffers inside kernels.
CHUNK_SHARE = 0.9
# The model may be so far above what is used; chunks that went well are changed only beyond that.
BOUND_SHARE = 0.75

#: Rows of the axes, number of calls, whether it is differentiated, bytes it takes whole.
Shape = tuple[tuple[int, ...], int, bool, float]


class _Lasting(NamedTuple):
    """The chunks that programs of one shape ran in last, and what was left when that was done."""

    n_chunks: int
    unit: int
    left: float
    way: Way

    def rows(self, n_rows: int) -> int:
        return largest(n_rows, self.n_chunks, self.unit)


_N_REMEMBERED = 64
_lasting: dict[Shape, _Lasting] = {}
_T = TypeVar("_T")
_Key = TypeVar("_Key", bound=tuple[object, ...])


def _remember(known: dict[_Key, _T], shape: _Key, value: _T) -> None:
    known[shape] = value
    while len(known) > _N_REMEMBERED:
        known.pop(next(iter(known)))


@dataclass(frozen=True)
class Plan:
    """A number of chunks, and why: bytes predicted at the worst moment, bytes allowed.

    Chunks are of whole `unit`s of rows, the last may be short. Under a limit of the
    process, programs of one `shape` are run in chunks of one size for as long as that fits.
    """

    n_chunks: int
    unit: int = 1
    predicted: float | None = None
    allowed: float | None = None
    shape: Shape | None = None
    way: Way = AS_IT_IS
    why: str = "it fits"  # where it is whole
    least_limit: float | None = None  # the least memory_limit that works, where one is set

    @property
    def is_whole(self) -> bool:
        """Whether it runs as it was written."""
        return self.n_chunks == 1 and self.way == AS_IT_IS

    @property
    def whole(self) -> float:
        """Bytes that the program takes whole."""
        return self.shape[3] if self.shape is not None else 0.0

    def tighter(self, program: Program, is_fixed: bool) -> tuple[Program, Plan] | None:
        """What is tried where memory ran out: twice the chunks; where each has one row, or its rows
        are fixed, shorter segments, or pieces of a second axis. None: there is nothing left to
        try."""
        most = max(program.axes.values(), default=1)
        if self.n_chunks < most and not is_fixed:
            return program, self._halved(most)
        if self.way.n_across:
            return self._smaller_pieces(program)
        n_segments = max(2, 2 * self.way.n_segments)
        while program.roots and n_segments <= _SEGMENTS[-1]:
            cut = program.cut_for(Way(n_segments))
            if cut.n_cut > program.n_cut and cut.unstageable is None:
                return cut, dataclasses.replace(
                    self, way=Way(n_segments, 1, int(_can_offload(program)))
                )
            n_segments *= 2
        options = list(_across(program.cut_for(AS_IT_IS), True))
        if not options:
            return None
        way = min(options, key=lambda one: one.estimate.peak(1)[0]).way
        return program.cut_for(way), dataclasses.replace(self, way=way)

    def _smaller_pieces(self, program: Program) -> tuple[Program, Plan] | None:
        way = self.way._replace(n_pieces=min(2 * self.way.n_pieces, self.way.n_across))
        return None if way == self.way else (program, dataclasses.replace(self, way=way))

    def _halved(self, most: int) -> Plan:
        """Twice the chunks, `most` at most; of half the size, where all are of one."""
        if not _is_measured():
            return dataclasses.replace(self, n_chunks=min(most, 2 * self.n_chunks))
        unit = max(1, self.unit // 2)
        return dataclasses.replace(self, n_chunks=-(-most // unit), unit=unit)

    def keep(self, program: Program) -> None:
        """It went well: the next program of this shape is run in the same chunks."""
        if self.shape is not None and _is_measured():
            last = _Lasting(self.n_chunks, self.unit, _allowed(program), self.way)
            _remember(_lasting, self.shape, last)


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
    others = sorted((d for d in program.devices if d.type != "cpu"), key=str)
    return others or [torch.device("cpu")]


def _held(program: Program) -> list[torch.Tensor]:
    """What of the tensors that are there is the step's: what entered, its gradients, optimizer
    state."""
    leaves = (tensor for tensor in program.entered if tensor.is_leaf)
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return program.entered + grads + budget.optimizer_state()


def _allowed(program: Program, is_alone: bool = False, needed: float = math.inf) -> float:
    """The least that any device has: what the program needs, at most, is summed over all."""
    held = _held(program)
    devices = _devices(program)
    return float(min(budget.free_bytes(device, held, is_alone, needed) for device in devices))


def _outside(program: Program) -> float:
    """Bytes that other tensors take of what the program could have."""
    held = _held(program)
    return float(max(budget.outside(device, held) for device in _devices(program)))


def _sum_of(parts: list[tuple[str, int]]) -> int:
    return sum(n_bytes for _, n_bytes in parts)


def limit_in_words(program: Program) -> str:
    """The limit, and what of it is taken already; empty: there is none."""
    limit = config.get("memory_limit")
    if limit is None:
        if budget.is_bound() and _devices(program)[0].type == "cpu":
            return "the limit of the process counts Python's objects and libraries too"
        return ""
    parts = max((budget.counted(d, program.entered) for d in _devices(program)), key=_sum_of)
    taken = ", ".join(f"{name} {size(n_bytes)}" for name, n_bytes in parts)
    return f"the limit is {size(limit)}" + (f", of which {taken}" if taken else "")


#: In more chunks than this a step takes long, on the CPU and on a GPU.
FEW_CHUNKS = 16


def _in_few_chunks(estimates: list[memory.Estimate]) -> float:
    """The least bytes that a program needs in so many chunks at most."""
    return min(one.peak(-(-one.rows // FEW_CHUNKS))[0] for one in estimates)


def _as_limit(program: Program, needed: float) -> float:
    """The memory_limit in bytes under which a program has so many."""
    held = _held(program)
    with storages.for_once():
        taken = max(budget.taken(device, held) for device in _devices(program))
    return taken + needed


def _in_tenths(n_bytes: float) -> float:
    """Not less bytes, in tenths of a MiB."""
    return math.ceil(10 * n_bytes / 2**20) * 2**20 / 10


def _mib(n_bytes: float) -> str:
    """A memory_limit as config() reads it, of so much at least."""
    return f"{_in_tenths(n_bytes) / 2**20:.1f} MiB"


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
        return _in_tenths(self.best) == _in_tenths(self.least)

    def settings(self) -> str:
        """As a user writes them."""
        best, least = (f"'{_mib(one).replace(' ', '')}'" for one in (self.best, self.least))
        if self.is_one:
            return f"set memory_limit={least}"
        return f"set memory_limit={best} for {FEW_CHUNKS} chunks, or {least} for {self.n_chunks}"


def limits(program: Program, is_graph: bool, is_for_next: bool = True) -> Limits:
    """Which memory_limit to set for a program.

    Args:
        program: what is to run.
        is_graph: whether it is differentiated.
        is_for_next: with what optimizers keep from their first step on, which the next steps have
            less; to look for those that have yet to make it takes long.
    """
    estimates = [way.estimate for way in _ways(program, is_graph)]
    rows, n_bytes, _ = min((one.least() for one in estimates), key=lambda entry: entry[1])
    n_chunks = -(-estimates[0].rows // rows)
    leaves = [leaf for leaf in program.entered if leaf.is_leaf]
    is_looked_for = is_for_next and bool(program.roots)
    coming = budget.coming_state(leaves, is_sure=True) if is_looked_for else 0
    least = _as_limit(program, n_bytes + coming)
    if n_chunks <= FEW_CHUNKS:
        return Limits(least, n_chunks, least)
    return Limits(least, n_chunks, _as_limit(program, _in_few_chunks(estimates) + coming))


def needs(program: Program) -> tuple[float, float, float]:
    """What a program that is differentiated needs whole, and in few chunks; and what of memory is
    planned with."""
    estimates = [way.estimate for way in _ways(program, True)]
    share = min(WHOLE_SHARE, CHUNK_SHARE)
    return estimates[0].whole, _in_few_chunks(estimates), share * max(0.0, left_for(program))


def left_for(program: Program, needed: float = math.inf) -> float:
    """Bytes that a program may have now, which needs so many at most."""
    return _allowed(program, needed=needed)


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
        found = limits(program, bool(program.roots))
        error = MemoryLimitError(
            f"{_answer(found, needed, has, self.n_bytes <= left)}\n"
            f"  {samples} {needed} beside what is there{fixed}, and {has} are left\n"
            f"{_in_lines(limit_in_words(program))}"
            f"{_in_lines(large and f'too large: {large}')}"
            f"{_in_lines(_others(program))}"
            f"{_in_lines(said)}"
            f"  needs most: {call}"
        )
        with contextlib.suppress(MemoryError):  # there may be no room for a plan
            way, n_chunks = smallest(program, bool(program.roots))
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


def _in_lines(text: str) -> str:
    """A line of a refusal; none where there is nothing to say."""
    return f"  {text}\n" if text else ""


def _answer(found: Limits, needed: str, has: str, is_enough: bool) -> str:
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


def _others(program: Program) -> str:
    """What tensors that are not the step's hold of a limit, and why, where that is much."""
    outside = _outside(program)
    if outside < 2**20 / 10:
        return ""
    before = "".join(f"; {one}" for one in reports.ran_before()[:1])
    return f"free some of these: other tensors hold {outside / 2**20:.1f} MiB{before}"


def least(estimate: memory.Estimate, allowed: float) -> Needs:
    """What a program needs in the chunks that need least."""
    rows, n_bytes, node = estimate.least()
    return Needs(rows, n_bytes, node, estimate.fixed(rows), allowed)


def ran_out(program: Program, said: str) -> MemoryLimitError:
    """What is raised where memory ran out in the smallest chunks, as an allocator said."""
    allowed = _allowed(program)
    ways = _ways(program, bool(program.roots))
    needs = min((least(way.estimate, allowed) for way in ways), key=lambda one: one.n_bytes)
    return needs.refusal(program, said)


def _large(program: Program, names: layers.Names) -> str:
    """The largest of what smaller chunks do not make less, by its name: a call that needs the whole
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


def smallest(program: Program, is_graph: bool) -> tuple[Way, int]:
    """The way that needs least, and in how many chunks."""
    option = min(_ways(program, is_graph), key=lambda one: one.estimate.least()[1])
    rows, _, _ = option.estimate.least()
    return option.way, -(-option.estimate.rows // rows)


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
    estimate = memory.estimate(program, is_graph)
    reports.measure(estimate.whole)
    made = _fit(program, estimate, is_graph)
    could_fit = isinstance(made, Needs) and made.n_bytes <= _allowed(program, is_alone=True)
    if could_fit and storages.look_again(is_final):
        made = _fit(program, estimate, is_graph)
    if isinstance(made, Needs) and is_final and _is_measured():
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
        known = _Least(made.whole, taken, limits(program, is_graph, False).least)
    elif taken > known.taken:  # by what optimizers keep from their first step on, above all
        known = _Least(known.whole, taken, known.limit + taken - known.taken)
    _remember(_least_limits, key, known)
    return _in_tenths(known.limit)


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
    n_bytes = _as_limit(program, needed)
    return MemoryLimitError(
        f"{_answer(Limits(n_bytes, 1, n_bytes), needs, has, False)}\n"
        f"  the whole batch needs {needs} beside what is there, and {has} are left\n"
        f"{_in_lines(limit_in_words(program))}"
        f"{_in_lines(large and f'too large: {large}')}"
        f"{_in_lines(_others(program))}"
        f"  {what}"
    )


_KEEP = 2, 3, 4, 6, 8
#: Of what crosses from body to body, every so manieth is offloaded; the last is all of it.
_OFFLOAD = 4, 2, 1
_LIGHT = 1, 2, 4, 8
_PIECES = 2, 4, 8, 16, 32
_ACROSS = 2, 4, 8, 16, 32, 64
_SEGMENTS = 2, 3, 4, 6, 8, 12, 16, 32, 64
_DEAR = 1.1  # a cost from which on other ways are looked for
# What a call of a chunk takes, forward and back, whatever its rows: as to make so many bytes by
# calls. Measured on a CPU; an accelerator makes a hundred times as many in that time.
_CALL = 2**16
_CALL_ON_ACCELERATOR = 2**23
# What is given whole is read by each chunk, and its gradient added up: so much of its bytes.
_GIVEN = 1 / 8


class Option(NamedTuple):
    """A way to run a program, and what it needs."""

    way: Way
    estimate: memory.Estimate
    n_calls: int  # of each chunk

    def rows(self, allowed: float) -> int:
        """Of the largest chunk that fits with room to spare; 0: none does."""
        return self.estimate.largest_chunk(CHUNK_SHARE * allowed)


class Fitting(NamedTuple):
    """A way that fits, in chunks of so many rows at most."""

    option: Option
    rows: int


def _option(program: Program, is_graph: bool, way: Way) -> Option:
    return Option(way, memory.estimate(program, is_graph, way), program.n_calls(way))


def _cost(program: Program, option: Option, rows: int) -> float:
    """The time of a step run this way in chunks of so many rows, as a multiple of its time without
    what chunks cost: roughly, to choose among ways."""
    way, amounts = option.way, program.amounts
    is_cpu = all(device.type == "cpu" for device in program.devices)
    of_chunk = option.n_calls * (_CALL if is_cpu else _CALL_ON_ACCELERATOR) + _GIVEN * amounts.given
    n_chunks = -(-option.estimate.rows // rows)
    is_again = way.n_segments > 1 or (way.n_segments == 1 and program.has_checkpoints)
    more = (
        0.35 * (way.keep_every > 1)
        + 0.35 * is_again
        + (0.2 / way.offload_every if way.offload_every else 0)
    )
    more += 0.05 * (way.n_light > 0) + 0.02 * way.n_light
    return (1 + more) * (1 + n_chunks * of_chunk / max(1, amounts.made))


def _can_offload(program: Program) -> bool:
    """Whether what crosses has a home beside the memory that is short."""
    is_cpu = all(device.type == "cpu" for device in _devices(program))
    return not is_cpu or offload.is_worth_it()


def _ways(program: Program, is_graph: bool) -> Iterator[Option]:
    """The ways to run a program; they give the same numbers."""
    plain = _option(program, is_graph, AS_IT_IS)
    yield plain
    is_back = is_graph and bool(program.roots)
    has_homes = bool(program.schedule(is_back, Way(1, 1, 1)).values_of(Op.HOME))
    can_offload = has_homes and _can_offload(program)
    if not is_back:
        if can_offload:
            yield _option(program, False, Way(1, 1, 1))
        return
    yield from _light(program)
    yield from _again(program)
    for offload_every in _OFFLOAD if can_offload else ():
        yield _option(program, is_graph, Way(1, 1, offload_every))
    needed = plain.estimate.peak(1)[0]
    yield from _pieces(program, is_graph, lambda best: best.estimate.peak(1)[0] < needed)
    n_before = program.n_cut
    for n_segments in _SEGMENTS:
        cut = program.cut_for(Way(n_segments))
        if cut.unstageable is not None or cut.n_cut <= n_before:
            continue  # a write would cross where none can, or there is nothing left to cut
        n_before = cut.n_cut
        for way in (Way(n_segments), *((Way(n_segments, 1, 1),) if can_offload else ())):
            yield _option(cut, is_graph, way)
    if program.has_checkpoints:
        cut = program.cut_for(WITHOUT_CHECKPOINTS)
        yield from _light(cut, WITHOUT_CHECKPOINTS)
        yield from _again(cut, WITHOUT_CHECKPOINTS)


def _light(program: Program, base: Way = AS_IT_IS) -> Iterator[Option]:
    """The ways that empty what light calls make of what crosses, as far as there is such."""
    lengths: set[int] = set()
    for n_light in _LIGHT:
        lights = program.schedule(True, base._replace(n_light=n_light)).lights
        if not lights or len(lights) in lengths:
            return
        lengths.add(len(lights))
        yield _option(program, True, base._replace(n_light=n_light))


def _crosses(program: Program) -> bool:
    """Whether anything that crosses from body to body can be made again, or offloaded."""
    return bool(program.schedule(True, Way(keep_every=2)).values_of(Op.REMAKE))


def _again(program: Program, base: Way = AS_IT_IS) -> Iterator[Option]:
    """The ways that keep a part of what crosses, and make the rest again."""
    if _crosses(program):
        ways = (base._replace(keep_every=n) for n in _KEEP)
        yield from (_option(program, True, way) for way in ways)


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
    if key not in _ways_in:
        _remember(_ways_in, key, _find_way_in(chunks, program))
    return _ways_in[key]


def _find_way_in(chunks: int, program: Program) -> Way | None:
    estimate = memory.estimate(program, True)
    rows = largest(estimate.rows, chunks, 1)
    leaves = (tensor for tensor in program.entered if tensor.is_leaf and tensor.requires_grad)
    gradients = sum(leaf.nbytes for leaf in leaves)
    asked = gradients + _ASKED_SHARE * max(0, estimate.whole - gradients)
    found = [(estimate.peak(rows)[0], AS_IT_IS)]
    others = itertools.chain(_light(program), _again(program))
    while found[-1][0] > asked and (option := next(others, None)) is not None:
        found.append((option.estimate.peak(rows)[0], option.way))
    least = min(found)[0]
    is_free = not (program.is_part or _pinned_grids(program))
    if least > _MORE * estimate.whole and is_free:
        return None
    enough = asked if least <= asked else gradients + _NEARLY * (least - gradients)
    return next(way for n_bytes, way in found if n_bytes <= enough)


def _pieces(
    program: Program, is_graph: bool, may_help: Callable[[Option], bool]
) -> Iterator[Option]:
    """The ways that run the head in pieces, where there is one that can: none, unless it may help
    to need as little as the most pieces do, for no more calls than the fewest make."""
    fewest, most = Way(n_pieces=_PIECES[0]), Way(n_pieces=_PIECES[-1])
    cut = program.cut_for(fewest)
    if not is_graph or cut.n_cut <= program.n_cut or cut.unstageable is not None:
        return
    last = _option(cut, is_graph, most)
    if may_help(Option(most, last.estimate, cut.n_calls(fewest))):
        for n_pieces in _PIECES[:-1]:
            yield _option(cut, is_graph, Way(n_pieces=n_pieces))
        yield last


def _across(program: Program, is_graph: bool) -> Iterator[Option]:
    """The ways that run the head in parts of a second axis, and what is before it in segments."""
    if not is_graph or not program.roots or not program.is_tail_linear:
        return
    n_before = program.n_cut
    for n_segments in (1, *_SEGMENTS):
        way = Way(n_segments, n_pieces=_PIECES[0])
        cut = program.cut_for(way)
        if cut.unstageable is not None or cut.n_cut <= n_before:
            continue
        n_before = cut.n_cut
        found = across.find(cut, cut.last_segment)
        for n_pieces in _ACROSS:
            if found is not None and found.is_in(n_pieces):
                along = way._replace(n_pieces=n_pieces, n_across=found.n, across=found.dim)
                yield _option(cut, is_graph, along)


#: By shape: the way that a program was last given, and what was left then.
_last_ways: dict[Shape, tuple[Way, float]] = {}
_NEAR = 0.1  # what is left now and was left then, apart by such a share


def _is_near(allowed: float, left: float) -> bool:
    """Whether as much is allowed as was left then."""
    return abs(allowed - left) <= _NEAR * left


def _cheapest(program: Program, fitting: list[Fitting], shape: Shape, allowed: float) -> Fitting:
    """The one that is taken, and from now on where as much is left."""
    best = min(fitting, key=lambda one: _cost(program, *one))
    _remember(_last_ways, shape, (best.option.way, allowed))
    return best


def _last_way(program: Program, is_graph: bool, shape: Shape, allowed: float) -> Fitting | None:
    """The way that a program of this shape was given where as much was left, if it fits."""
    way, left = _last_ways.get(shape, (AS_IT_IS, 0.0))
    cut = program.cut_for(way)
    if way == AS_IT_IS or not _is_near(allowed, left) or cut.unstageable is not None:
        return None
    option = _option(cut, is_graph, way)
    rows = option.rows(allowed)
    return Fitting(option, rows) if rows > 0 else None


def _find_way(program: Program, is_graph: bool, shape: Shape, allowed: float) -> Fitting | Needs:
    """The cheapest way that fits, and the rows of a chunk that do; or what the least needs."""
    found = _last_way(program, is_graph, shape, allowed)
    if found is not None:
        return found
    needs: list[tuple[Needs, Option]] = []
    for ways in (_ways, _across):
        fitting: list[Fitting] = []
        for option in ways(program, is_graph):
            rows = option.rows(allowed)
            if rows > 0:
                fitting.append(Fitting(option, rows))
            else:
                needs.append((least(option.estimate, allowed), option))
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
    ways = [found]
    light = _light(program) if is_graph and program.roots else ()
    cost = _cost(program, *found)

    def is_cheaper(best: Option) -> bool:
        rows = best.rows(allowed)
        return rows > 0 and _cost(program, best, rows) < cost

    for option in (*light, *_pieces(program, is_graph, is_cheaper)):
        rows = option.rows(allowed)
        ways += [Fitting(option, rows)] if rows > 0 else []
    return _cheapest(program, ways, shape, allowed)


def _fit(
    program: Program, estimate: memory.Estimate, is_graph: bool, needs: Needs | None = None
) -> Plan | Needs:
    """The plan for a program; or what it needs, if that is more than there is.

    Of what is kept back for a first step of libraries it may have, as a last resort, what it
    `needs`: where libraries then find nothing left, some of them end the process.
    """
    left, slack = _allowed(program, needed=estimate.whole), budget.slack()
    allowed = min(left + slack, needs.n_bytes / CHUNK_SHARE) if needs is not None else left
    pinned = _pinned_grids(program)
    if pinned:
        return _pinned(program, is_graph, allowed, max(pinned, key=len))
    rows = estimate.largest_chunk(CHUNK_SHARE * allowed)
    share = WHOLE_SHARE if rows > 0 else 1.0
    shape = _shape_of(program, is_graph, estimate)
    last = _lasting.get(shape) if _is_measured() else None
    was_whole = last is not None and last.n_chunks == 1 and last.way == AS_IT_IS
    fits = estimate.whole <= (left + slack if was_whole else share * allowed)
    if fits and not program.has_checkpoints:
        planned = Plan(1, 1, estimate.whole, allowed, shape)
        planned.keep(program)
        return planned
    way = AS_IT_IS
    if last is not None and not was_whole:
        allowed = left + slack  # what a first step takes was taken
        cut = program.cut_for(last.way)
        way = last.way if cut.unstageable is None else AS_IT_IS
        size = last.rows(estimate.rows)
        estimate = memory.estimate(program.cut_for(way), is_graph, way)
        rows = estimate.largest_chunk(CHUNK_SHARE * allowed)
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
        rows = estimate.largest_chunk(CHUNK_SHARE * (allowed - coming)) or rows
    if rows == 0:
        found = _find_way(program, is_graph, shape, allowed)
        if isinstance(found, Needs):
            return found
        (way, estimate, _), rows = found
    elif way == AS_IT_IS and not _is_measured():
        # Else pieces are sizes more that kernels are compiled for, which takes what is measured.
        found = Fitting(Option(way, estimate, program.n_nodes), rows)
        if _cost(program, *found) > _DEAR:
            found = _larger_chunks(program, is_graph, shape, allowed, found)
        (way, estimate, _), rows = found
    n_chunks, unit = _chunks_of(estimate.rows, rows, way)
    predicted, _ = estimate.peak(largest(estimate.rows, n_chunks, unit))
    return Plan(n_chunks, unit, predicted, allowed, shape, way)


def _shape_of(program: Program, is_graph: bool, estimate: memory.Estimate) -> Shape:
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
    for way, estimate, _ in _ways(program, is_graph):
        n_bytes, node = estimate.peak(rows)
        if n_bytes <= allowed:
            shape = _shape_of(program, is_graph, estimate)
            return Plan(len(bounds), rows, n_bytes, allowed, shape, way)
        if best is None or n_bytes < best.n_bytes:
            best = Needs(rows, n_bytes, node, estimate.fixed(rows), allowed)
    assert best is not None
    return best


def _is_measured() -> bool:
    """Whether what is left is what the system says of this process, caches of libraries and all:
    then it changes from step to step. A limit on tensors is kept to the byte."""
    return budget.is_bound() and config.get("memory_limit") is None


def _chunks_of(n_rows: int, rows: int, way: Way) -> tuple[int, int]:
    """So many chunks of `rows` rows at most, and the unit they are of: one only where its head is
    cut.

    Under a limit of the process all but the last are of one size, which is whole eights or a power
    of two: oneDNN compiles its kernels for each size that it meets, and keeps them.
    """
    if rows >= n_rows and way.n_pieces > 1:
        return 1, 1
    if _is_measured():
        rows = rows // UNIT * UNIT if rows >= UNIT else 1 << rows.bit_length() - 1
        rows = max(1, min(rows, -(-n_rows // 2)))
        return -(-n_rows // rows), rows
    n_chunks = max(2, -(-n_rows // rows))
    return n_chunks, UNIT if largest(n_rows, n_chunks, UNIT) <= rows else 1


def _still_fits(last: _Lasting, needed: float, allowed: float) -> bool:
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
    if planned.n_chunks == 1 and needed is not None and needed <= WHOLE_SHARE * planned.allowed:
        return None
    steps.note_read(program, planned.whole)
    return plan(program, False)
