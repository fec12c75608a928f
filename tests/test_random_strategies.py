# SPDX-License-Identifier: Apache-2.0
"""Random training scripts, run by strategies that plans rarely choose for such small ones, give
eager's numbers too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import random_training
from koila.planning import planner, plans
from koila.planning.strategies import Strategies
from koila.staged.program import Program
from koila.staged.schedule import Policy, Strategy
from policies import Make, as_such, every, mixed, rematerializing

pytestmark = pytest.mark.sanitize

#: By seed: what makes the strategy of a program.
STRATEGIES: dict[str, Callable[[int], Make]] = {
    "segments": lambda seed: as_such(Strategy(4)),
    "pieces": lambda seed: as_such(Strategy(n_pieces=2)),
    "a policy for each value": mixed,
    "policies and segments": lambda seed: mixed(seed, 3),
    "rematerialized in chains": lambda seed: rematerializing(4),
    "offloaded": lambda seed: every(2, Policy.OFFLOAD),
}
#: Scripts that differ still, by strategy and seed.
KNOWN: dict[tuple[str, int], str] = {}


class Forced:
    """Plans get strategies of `make`, where the program can run by them. `n` counts these."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        self.make: Make | None = None
        self._plan = planner.plan
        monkeypatch.setattr(planner, "plan", self._changed)

    def _changed(self, program: Program, is_graph: bool, *args: Any, **kwargs: Any) -> plans.Plan:
        planned = self._plan(program, is_graph, *args, **kwargs)
        if self.make is None or not (is_graph and program.roots):
            return planned
        made = self.make(program)
        is_cut = made.n_pieces > 1 or made.n_segments > 1
        cuts = made._replace(policies=b"")
        if program.cut_for(made).unstageable is not None:
            return planned
        if is_cut and not Strategies(program, True).is_there(cuts):
            return planned
        self.n += 1
        return dataclasses.replace(planned, strategy=made)


@pytest.mark.rotated
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, 18, 6))
@pytest.mark.parametrize("name", STRATEGIES)
def test_scripts(name: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forced, n_run = Forced(monkeypatch), 0
    for seed in range(first, first + 6):
        program = random_training.write(seed)
        wanted = random_training.wanted_of(program)
        if wanted is None or (name, seed) in KNOWN:
            continue
        n_run += 1
        for chunks in (2 + seed % 2, 7):
            forced.make = STRATEGIES[name](seed)
            found = random_training.failure(program, chunks, wanted)
            forced.make = None
            if found is None or found.is_refusal:
                continue
            is_wrong = found.kind != "number" or random_training.is_conditioned(program, wanted)
            assert not is_wrong, f"seed {seed}, {chunks} chunks: {found.text}\n{program}"
    assert forced.n >= n_run / 2
