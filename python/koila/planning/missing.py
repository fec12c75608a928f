# SPDX-License-Identifier: Apache-2.0
"""Free as many boundary values as memory is missing, the cheapest ones first."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import NamedTuple

from koila.planning.policies import Policies
from koila.staged.program import Program
from koila.staged.schedule import Op, Policy, Schedule


class Chosen(NamedTuple):
    """Policies that free what is missing, and the bytes that they free beyond that."""

    policies: bytes
    spare: float


class _Life(NamedTuple):
    """The instructions of a schedule between which a value is in memory, if it is kept."""

    made: int
    read: int  # its last reader of the forward pass
    back: int  # the first reader of the backward pass
    freed: int

    def is_gone(self, policy: Policy, at: int) -> bool:
        """Tell whether a policy frees the value at an instruction at which it is kept otherwise."""
        if policy == Policy.OFFLOAD:
            return self.made <= at <= self.freed
        return self.read < at < (self.back if policy == Policy.REMAKE else self.freed + 1)


def _lives(program: Program, schedule: Schedule) -> dict[int, _Life]:
    """Return the lives of the values that bodies leave for others."""
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    back: dict[int, int] = {}
    freed: dict[int, int] = {}
    for i, step in enumerate(schedule.steps):
        for run in step.runs:
            if step.op == Op.STORE:
                made.update(dict.fromkeys(run.exports, i))
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
        self.policies: dict[int, Policy] = {}
        self._rerun: set[int] = set()  # bodies that run once more, since their graphs are let go
        self._remade: set[int] = set()  # bodies that run once more for their results
        self._near: set[int] = set()  # values that cheap calls read: these must be in memory
        self._sources: set[int] = set()  # values of which others are remade: they are not remade

    def can_be(self, value: int, policy: Policy) -> bool:
        """Tell whether a value can have a policy beside those that were chosen."""
        if value in self.policies:
            return False
        others = {self.policies.get(one, Policy.KEEP) for one in self._of.inputs_of_maker[value]}
        if policy == Policy.EMPTY:
            return max(others, default=policy) <= policy
        # A chain of values that are remade would be in memory again with the first of them.
        is_chain = policy == Policy.REMAKE and (policy in others or value in self._sources)
        return value not in self._near and not is_chain

    def price(self, value: int, policy: Policy) -> float:
        """Return the time that a policy adds to those that were chosen."""
        of = self._of.policies
        if policy == Policy.EMPTY:
            n_bytes, needs = 0, [value]
            for need in needs:
                n_bytes += self._of.n_bytes[need]
                needs += [v for v in of.cheap[need] if self.policies.get(v) == policy]
            return of.price_of_cheap(n_bytes * len(self._of.readers[value]))
        again = sum(of.made[i] for i in self._of.savers[value] if i not in self._rerun)
        if policy == Policy.OFFLOAD:
            return of.price_of_runs(again) + of.price_of_offload(self._of.n_bytes[value])
        maker = self._of.maker[value]
        return of.price_of_runs(again + of.made[maker] * (maker not in self._remade))

    def choose(self, value: int, policy: Policy) -> None:
        self.policies[value] = policy
        if policy == Policy.EMPTY:
            self._near.update(self._of.inputs_of_maker[value])
        else:
            self._rerun.update(self._of.savers[value])
        if policy == Policy.REMAKE:
            self._remade.add(self._of.maker[value])
            self._sources.update(self._of.inputs_of_maker[value])
        self._add(value, policy, -self._of.n_bytes[value])

    def _add(self, value: int, policy: Policy, n_bytes: int) -> None:
        life = self._of.lives[value]
        for at in self.over:
            if life.is_gone(policy, at):
                self.over[at] += n_bytes

    def drop_needless(self) -> None:
        """Keep what need not be freed, after all, beside what was chosen later."""
        for value, policy in list(self.policies.items()):
            self._add(value, policy, self._of.n_bytes[value])
            if max(self.over.values()) <= 0:
                del self.policies[value]
            else:
                self._add(value, policy, -self._of.n_bytes[value])


class Missing:
    """Chooses, for one program, the values to free at moments at which memory is missing.

    Args:
        program: the program, with its bodies cut as for the policies.
        policies: its policies.
        can_offload: values may be offloaded.
    """

    def __init__(self, program: Program, policies: Policies, can_offload: bool) -> None:
        self._program, self.policies = program, policies
        self.lives = _lives(program, policies.plain)
        options = {
            Policy.EMPTY: policies.cheap.keys(),
            Policy.REMAKE: policies.remade,
            Policy.OFFLOAD: policies.crossing if can_offload else (),
        }
        storages = [program.info(value).storage for value in self.lives]
        #: By value that is alone in its storage: the policies that free it.
        self.options = {
            value: [policy for policy, values in options.items() if value in values]
            for value in self.lives
            if storages.count(program.info(value).storage) == 1
        }
        self.n_bytes = {value: program.bytes_of(value) for value in self.options}
        retained = policies.retained()
        self.maker: dict[int, int] = {}  # by value: the run of the body that makes it
        self.readers: dict[int, list[int]] = {value: [] for value in self.options}
        self.inputs_of_maker: dict[int, list[int]] = {}
        for run in program.runs:
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

    def choose(self, n_bytes: Mapping[int, float], allowed: float) -> Chosen | None:
        """Return policies with which a step fits; None if there are none.

        Args:
            n_bytes: by instruction, the bytes that the step needs if all values are kept.
            allowed: the bytes that it may take.
        """
        banned: set[int] = set()  # values that cheap calls cannot recompute beside the others
        while True:
            over = {at: need - allowed for at, need in n_bytes.items() if need > allowed}
            # Where cheap calls need in memory what is too much there, nothing is left to them.
            choice = self._choose(over, banned) or self._choose(over, self.policies.cheap)
            if choice is None or not choice.policies:
                return None
            policies = self._program.policies(choice.policies)
            emptied = {v for v, policy in choice.policies.items() if policy == Policy.EMPTY}
            failed = emptied.difference(self.policies.schedule(policies).cheap_values)
            if not failed:
                return Chosen(policies, -max(choice.over.values()))
            banned |= failed

    def _choose(self, over: dict[int, float], banned: Container[int]) -> _Choice | None:
        """Return policies that free what is missing; None if there are none that do."""
        choice = _Choice(self, over.copy())
        over = choice.over
        while over and max(over.values()) > 0:
            worst = max(over, key=over.__getitem__)
            best: tuple[float, int, Policy] | None = None
            for value, options in self.options.items():
                useful = min(over[worst], self.n_bytes[value])
                for policy in options:
                    is_gone = self.lives[value].is_gone(policy, worst) and useful > 0
                    if (policy == Policy.EMPTY and value in banned) or not is_gone:
                        continue
                    if choice.can_be(value, policy):
                        price = choice.price(value, policy) / useful
                        best = min(best or (math.inf, 0, policy), (price, value, policy))
            if best is None:
                return None
            choice.choose(best[1], best[2])
        choice.drop_needless()
        return choice
