# SPDX-License-Identifier: Apache-2.0
"""Free as many boundary values as memory is missing, the cheapest ones first."""

from __future__ import annotations

import bisect
import functools
import heapq
from collections import Counter
from collections.abc import Container, Mapping
from typing import NamedTuple

from koila.planning.policies import Policies
from koila.staged.program import Program
from koila.staged.schedule import Op, Policy, Schedule


class _Life(NamedTuple):
    """The instructions of a schedule between which a value is in memory, if it is kept."""

    made: int
    read: int  # its last reader of the forward pass
    back: int  # the first reader of the backward pass
    freed: int

    def gone(self, policy: Policy) -> range:
        """Return the instructions at which a policy frees the value, which is kept otherwise."""
        if policy == Policy.OFFLOAD:
            return range(self.made, self.freed + 1)
        return range(self.read + 1, self.back if policy == Policy.RECOMPUTE else self.freed + 1)


def _lives(program: Program, schedule: Schedule) -> dict[int, _Life]:
    """Return the lives of the values that bodies leave for others."""
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    back: dict[int, int] = {}
    freed: dict[int, int] = {}
    for i, step in enumerate(schedule.steps):
        for run in step.runs if step.op == Op.STORE else ():
            made.update(dict.fromkeys(run.exports, i))
    for i, step in enumerate(schedule.steps if made else ()):
        for run in step.runs:
            for value in (program.imports[k].value for k in run.imports):
                if i < schedule.n_forward:
                    read[value] = i
                else:
                    back.setdefault(value, i)
        if step.op in (Op.FREE, Op.LOOP) and i >= schedule.n_forward:
            freed.update(dict.fromkeys(step.values, i))
    end = len(schedule.steps)
    return {
        value: _Life(at, read[value], back.get(value, end), freed.get(value, end))
        for value, at in made.items()
        if value in read
    }


class _Choice:
    """Policies that are chosen one after the other, and what their values still need."""

    def __init__(self, missing: Missing, over: dict[int, float]) -> None:
        self._of = missing
        self.over = over  # by instruction: the bytes that are still missing there
        self._ats = sorted(over)
        self.policies: dict[int, Policy] = {}
        self._rerun: set[int] = set()  # bodies that run once more, since their graphs are let go
        self._recomputed: set[int] = set()  # bodies that run once more for their results
        self._near: set[int] = set()  # values that cheap calls read: these must be in memory
        #: Values of which others are recomputed: they are not recomputed.
        self._sources: set[int] = set()

    def can_be(self, value: int, policy: Policy) -> bool:
        """Tell whether a value can have a policy beside those that were chosen."""
        if value in self.policies:
            return False
        others = {self.policies.get(one, Policy.KEEP) for one in self._of.inputs_of_maker[value]}
        if policy == Policy.REMATERIALIZE:
            return max(others, default=policy) <= policy
        # A chain of values that are recomputed would be in memory again with the first of them.
        is_chain = policy == Policy.RECOMPUTE and (policy in others or value in self._sources)
        return value not in self._near and not is_chain

    def price(self, value: int, policy: Policy) -> float:
        """Return the time that a policy adds to those that were chosen."""
        of = self._of.policies
        if policy == Policy.REMATERIALIZE:
            chain = {value: self._of.n_bytes[value]}
            todo = [value]
            while todo:
                for need in of.cheap[todo.pop()]:
                    if need not in chain and self.policies.get(need) == policy:
                        chain[need] = self._of.n_bytes[need]
                        todo.append(need)
            return of.price_of_cheap(sum(chain.values()) * len(self._of.readers[value]))
        again = sum(of.made[i] for i in self._of.savers[value] if i not in self._rerun)
        if policy == Policy.OFFLOAD:
            return of.price_of_runs(again) + of.price_of_offload(self._of.n_bytes[value])
        maker = self._of.maker[value]
        return of.price_of_runs(again + of.made[maker] * (maker not in self._recomputed))

    def price_of_byte(self, value: int, policy: Policy, at: int) -> float:
        """Return the time that a policy adds for each byte that is missing at an instruction."""
        return self.price(value, policy) / min(self.over[at], self._of.n_bytes[value])

    def choose(self, value: int, policy: Policy) -> None:
        self.policies[value] = policy
        if policy == Policy.REMATERIALIZE:
            self._near.update(self._of.inputs_of_maker[value])
        else:
            self._rerun.update(self._of.savers[value])
        if policy == Policy.RECOMPUTE:
            self._recomputed.add(self._of.maker[value])
            self._sources.update(self._of.inputs_of_maker[value])
        self._add(value, policy, -self._of.n_bytes[value])

    def _add(self, value: int, policy: Policy, n_bytes: int) -> None:
        for at in self._freed_at(value, policy):
            self.over[at] += n_bytes

    def _freed_at(self, value: int, policy: Policy) -> list[int]:
        """Return the instructions at which memory is missing and a policy frees a value."""
        gone = self._of.lives[value].gone(policy)
        first, stop = (bisect.bisect_left(self._ats, at) for at in (gone.start, gone.stop))
        return self._ats[first:stop]

    def drop_needless(self) -> None:
        """Keep what need not be freed, after all, beside what was chosen later."""
        for value, policy in list(self.policies.items()):
            n_bytes = self._of.n_bytes[value]
            if max(map(self.over.__getitem__, self._freed_at(value, policy))) <= -n_bytes:
                del self.policies[value]
                self._add(value, policy, n_bytes)


class Missing:
    """Chooses, for a program whose bodies are cut as for its policies, the values to free at
    moments at which memory is missing."""

    def __init__(self, program: Program, policies: Policies, can_offload: bool) -> None:
        self._program, self.policies = program, policies
        options = {
            Policy.REMATERIALIZE: policies.cheap.keys(),
            Policy.RECOMPUTE: policies.recomputed,
            Policy.OFFLOAD: policies.crossing if can_offload else (),
        }
        # To find the lives, the core describes all imports, which takes long.
        self.lives = _lives(program, policies.plain) if any(options.values()) else {}
        n_alike = Counter(program.info(value).storage for value in self.lives)
        #: By value that is alone in its storage: the policies that free it.
        self.options = {
            value: [policy for policy, values in options.items() if value in values]
            for value in self.lives
            if n_alike[program.info(value).storage] == 1
        }
        self.n_bytes = {value: program.bytes_of(value) for value in self.options}
        retained = policies.retained()
        self.maker: dict[int, int] = {}  # by value: the run of the body that makes it
        self.readers: dict[int, list[int]] = {value: [] for value in self.options}
        self.inputs_of_maker: dict[int, list[int]] = {}
        for run in program.runs if self.options else ():
            inputs = [program.imports[k].value for k in run.imports]
            for value in run.exports if run.is_body else ():
                self.maker[value], self.inputs_of_maker[value] = run.index, inputs
            for value in inputs if run.is_body else ():
                if value in self.readers:
                    self.readers[value].append(run.index)
        #: The bodies whose graphs are let go where a value is elsewhere: they may have saved it.
        self.savers = {
            value: retained.intersection([*readers, self.maker[value]])
            for value, readers in self.readers.items()
        }

    @functools.cached_property
    def _by_run(self) -> dict[int, set[int]]:
        """By body: the values for which it may run once more."""
        found: dict[int, set[int]] = {}
        for value, savers in self.savers.items():
            for run in {*savers, self.maker[value]}:
                found.setdefault(run, set()).add(value)
        return found

    def choose(self, n_bytes: Mapping[int, float], allowed: float) -> tuple[bytes, float] | None:
        """Return policies with which a step fits into `allowed` bytes, and the bytes that they free
        beyond that; None if there are none. The step needs `n_bytes`, by instruction, with none."""
        banned: set[int] = set()  # values that cheap calls cannot recompute beside the others
        while True:
            over = {at: need - allowed for at, need in n_bytes.items() if need > allowed}
            # Where cheap calls need in memory what is too much there, nothing is left to them.
            choice = self._choose(over, banned) or self._choose(over, self.policies.cheap)
            if choice is None or not choice.policies:
                return None
            policies = self._program.policies(choice.policies)
            freed = {v for v, policy in choice.policies.items() if policy == Policy.REMATERIALIZE}
            failed = freed.difference(self.policies.schedule(policies).cheap_values)
            if not failed:
                return policies, -max(choice.over.values())
            banned |= failed

    def _choose(self, over: dict[int, float], banned: Container[int]) -> _Choice | None:
        """Return policies that free what is missing; None if there are none that do."""
        choice = _Choice(self, over.copy())
        over = choice.over
        while over and max(over.values()) > 0:
            if not self._free(choice, max(over, key=over.__getitem__), banned):
                return None
        choice.drop_needless()
        return choice

    def _free(self, choice: _Choice, at: int, banned: Container[int]) -> bool:
        """Choose values to free, those with the lowest price for a byte first, until no memory is
        missing at an instruction. Return whether that was possible."""
        options = {
            value: [
                policy
                for policy in policies
                if at in self.lives[value].gone(policy)
                and not (policy == Policy.REMATERIALIZE and value in banned)
            ]
            for value, policies in self.options.items()
            if self.n_bytes[value]
        }
        queue: list[tuple[float, int, Policy]] = []

        def enter(value: int) -> None:
            for policy in options[value]:
                if choice.can_be(value, policy):
                    heapq.heappush(queue, (choice.price_of_byte(value, policy, at), value, policy))

        for value in options:
            enter(value)
        while choice.over[at] > 0 and queue:
            _, value, policy = heapq.heappop(queue)
            if not choice.can_be(value, policy):
                continue
            price = choice.price_of_byte(value, policy, at)
            if queue and price > queue[0][0]:  # it has grown since
                heapq.heappush(queue, (price, value, policy))
                continue
            choice.choose(value, policy)
            runs = {*self.savers[value], self.maker[value]}
            for other in set[int]().union(*map(self._by_run.__getitem__, runs)):
                if other in options:  # its price may have fallen: the same bodies run again for it
                    enter(other)
        return choice.over[at] <= 0
