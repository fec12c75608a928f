# SPDX-License-Identifier: Apache-2.0
"""Ways that store what bodies leave for each other by policies, made for a program."""

from __future__ import annotations

import random
from collections.abc import Callable

from koila.planning.policies import Policies
from koila.staged.program import Program
from koila.staged.schedule import Policy, Strategy

#: Makes the way in which a program shall run.
Make = Callable[[Program], Strategy]


def as_such(way: Strategy) -> Make:
    return lambda program: way


def rematerializing(longest: int) -> Make:
    """Free what cheap calls recompute, in chains of so many at most."""

    def make(program: Program) -> Strategy:
        values = Policies(program, True).in_chains(longest)
        return Strategy(policies=program.policies(dict.fromkeys(values, Policy.REMATERIALIZE)))

    return make


def every(n: int, policy: Policy, n_segments: int = 1, *, but: bool = False) -> Make:
    """What every n-th body leaves has a policy; or (`but`) what the others leave has it."""

    def make(program: Program) -> Strategy:
        bodies = Policies(program, True).by_body(program.crossing(True))
        some = [made for k, made in enumerate(bodies, 1) if (k % n == 0) != but]
        of_values = {value: policy for made in some for value in made}
        return Strategy(n_segments, program.policies(of_values))

    return make


def mixed(seed: int, n_segments: int = 1) -> Make:
    """Each value has a policy of its own, drawn at random."""

    def make(program: Program) -> Strategy:
        drawn = random.Random(seed).choices(list(Policy), k=len(program.boundary))
        return Strategy(n_segments, bytes(drawn))

    return make
