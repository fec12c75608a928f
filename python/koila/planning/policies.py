# SPDX-License-Identifier: Apache-2.0
"""Storage policies for the values that bodies leave for others, and the time that they take."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS, Graph, Op, Policy, Schedule, Strategy

# Of the bodies every n-th is kept, or offloaded; a chain of rematerialized values has at most n.
_KEEP = 2, 3, 4, 6, 8
_OFFLOAD = 4, 2, 1
_CHEAP = 1, 2, 4, 8
# The time to run all calls forward once more, and the time in which cheap calls compute as many
# bytes as all calls do, as shares of the step's time.
_FORWARD, _CHEAPLY = 0.3, 0.2
# The time to offload and fetch all activations kept between bodies, as a share of the step's time.
# On a CPU it is a copy to mapped pages. An accelerator computes bytes three times as fast as its
# bus moves them.
_OFFLOADED, _OFFLOADED_FROM_ACCELERATOR = 0.25, 3.0


class Families(NamedTuple):
    """Policies that are tried, each without those that do nothing else than one before."""

    #: Cheap calls rematerialize values, in ever longer chains.
    rematerializing: list[bytes]
    #: Each n-th body's results are kept; the runs of the others recompute theirs.
    recomputing: list[bytes]
    #: A part of the results is offloaded; the last of these policies offloads all.
    offloading: list[bytes]


class Policies:
    """The policies that are tried for a program, whose bodies are cut as for `base`: as it is, or
    without the script's checkpoints."""

    def __init__(self, program: Program, is_graph: bool, base: Strategy = AS_IT_IS) -> None:
        self._program, self._is_graph, self._base = program.cut_for(base), is_graph, base
        self._is_on_cpu = all(device.type == "cpu" for device in program.devices)
        self.plain = self.schedule(b"")
        self.crossing = program.crossing(is_graph)  # what can be offloaded
        every = self.schedule(self._program.all_as(Policy.RECOMPUTE))
        self.recomputed = every.values_of(Op.RECOMPUTE)  # what the runs of bodies can recompute
        every = self.schedule(self._program.all_as(Policy.REMATERIALIZE))
        #: By value that cheap calls recompute: those of them that they read; in order.
        self.cheap = {value: cheap.needs for value, cheap in every.cheap_values.items()}

    def schedule(self, policies: bytes) -> Schedule:
        """Return the schedule with these policies."""
        return self._program.schedule(self._is_graph, self._base._replace(policies=policies))

    def by_body(self, values: set[int]) -> list[list[int]]:
        """Return values by the body that makes them, in order."""
        found: dict[tuple[int, int], list[int]] = {}
        for run in self._program.runs if values else ():
            made = found.setdefault((run.stage, run.axis), [])
            made += [value for value in run.exports if value in values]
        return [made for made in found.values() if made]

    # -- families of policies ----------------------------------------------------------------------

    def families(self) -> Families:
        """Return the policies that are tried."""
        by_body, recomputed = self.by_body(self.crossing), self.by_body(self.recomputed)
        kept = ([i for i in range(len(recomputed)) if (i + 1) % n] for n in _KEEP)
        offloaded = (range(n - 1, len(by_body), n) for n in _OFFLOAD)
        return Families(
            _each_once(self._all(self.in_chains(n), Policy.REMATERIALIZE) for n in _CHEAP),
            _each_once(self._all(_of(recomputed, some), Policy.RECOMPUTE) for some in kept),
            _each_once(self._all(_of(by_body, some), Policy.OFFLOAD) for some in offloaded),
        )

    def _all(self, values: Iterable[int], policy: Policy) -> bytes:
        return self._program.policies(dict.fromkeys(values, policy))

    def in_chains(self, longest: int) -> list[int]:
        """Return the values that are rematerialized in chains of at most so many: where a chain
        would be longer, a value is kept."""
        length: dict[int, int] = {}
        for value, needs in self.cheap.items():
            before = max((length.get(need, 0) for need in needs), default=0)
            if before < longest:
                length[value] = before + 1
        return list(length)

    # -- the time that they take -------------------------------------------------------------------

    def price(self, policies: bytes) -> float:
        """Return the time that policies add to a step, as a share of its time."""
        if not policies:
            return 0.0
        made, schedule, bytes_of = self.made, self.schedule(policies), self._program.bytes_of
        again = sum(made[i] for i in _runs(schedule)) - sum(made[i] for i in _runs(self.plain))
        rematerialized = sum(map(bytes_of, _rematerialized(schedule)))
        offloaded = sum(map(bytes_of, schedule.values_of(Op.STORE)))
        others = self.price_of_cheap(rematerialized) + self.price_of_offload(offloaded)
        return self.price_of_runs(again) + others

    def price_of_runs(self, n_bytes: int) -> float:
        """Return the time to run bodies that make so many bytes forward once more."""
        return _FORWARD * n_bytes / self._all_made

    def price_of_cheap(self, n_bytes: int) -> float:
        """Return the time in which cheap calls recompute so many bytes."""
        return _CHEAPLY * n_bytes / self._all_made

    def price_of_offload(self, n_bytes: int) -> float:
        """Return the time to offload so many bytes, and to fetch them."""
        of_all = _OFFLOADED if self._is_on_cpu else _OFFLOADED_FROM_ACCELERATOR
        return of_all * n_bytes / self._all_crossing

    @functools.cached_property
    def _all_crossing(self) -> int:
        return max(1, sum(map(self._program.bytes_of, self.crossing)))

    @functools.cached_property
    def _all_made(self) -> int:
        return max(1, sum(self.made.values()))

    @functools.cached_property
    def made(self) -> dict[int, int]:
        """By run of a body: the bytes that its calls make."""
        return {run.index: run.made for run in self._program.runs if run.is_body}

    def retained(self) -> set[int]:
        """Return the bodies whose graphs are retained if all values are kept."""
        steps, retained = self.plain.steps, (Op.RUN, Graph.RETAIN)
        return {step.runs[0].index for step in steps if (step.op, step.graph) == retained}


def _of(by_body: Sequence[Sequence[int]], some: Iterable[int]) -> list[int]:
    """Return the values of some bodies."""
    return [value for i in some for value in by_body[i]]


def _each_once(found: Iterable[bytes]) -> list[bytes]:
    """Return what is not empty, each once."""
    return list(dict.fromkeys(filter(None, found)))


def _runs(schedule: Schedule) -> list[int]:
    """Return the runs that chunks go through, each as often as they do."""
    return [step.runs[0].index for step in schedule.steps if step.op == Op.RUN]


def _rematerialized(schedule: Schedule) -> list[int]:
    """Return the values that cheap calls recompute, each as often as they do."""
    found: list[int] = []
    for step in schedule.steps:
        rematerialized: set[int] = set()
        todo = list(step.values) if step.op == Op.REMATERIALIZE else []
        while todo:
            value = todo.pop()
            if value not in rematerialized:
                rematerialized.add(value)
                todo += schedule.cheap_values[value].needs
        found += rematerialized
    return found
