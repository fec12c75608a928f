# SPDX-License-Identifier: Apache-2.0
"""What the core tells of staged programs, kept for the next steps that stage the same program."""

from __future__ import annotations

import contextlib
from typing import Any

from koila import _core
from koila.staged.facts import Import, Made, Node, Run, parts_in
from koila.staged.schedule import Arguments, Cheap, Graph, Op, Schedule, Step, Way, head_of

_OPS, _GRAPHS = tuple(Op), tuple(Graph)
#: The programs that are kept have at most so many calls together: a call takes 2.4 KB.
_N_KEPT = 2**9
#: So many schedules of a program are kept, about twice those that one plan looks at: plans under
#: other limits look at others.
_N_SCHEDULES = 128


class Known:
    """The calls, values and runs of a program, and its schedules. It holds no tensor and no handle,
    and nothing in it changes: programs of other threads may share it."""

    def __init__(self, handle: object, printed: tuple[Any, ...]) -> None:
        self.printed = printed  # what `_core.print_of` returns
        self.nodes: dict[int, Node] = {
            entry[0]: Node._make((*entry, range(entry[6], entry[6] + entry[7])))
            for entry in _core.facts_of(handle, "nodes")
        }
        self.imports = list(map(Import._make, _core.facts_of(handle, "imports")))
        self.made = [
            Made(self.nodes.get(node), *traits)
            for node, *traits in _core.facts_of(handle, "values")
        ]
        self.needs_gradient = [made.needs_gradient for made in self.made]
        self.runs = [self._run(*entry) for entry in enumerate(_core.facts_of(handle, "runs"))]
        self.moving = [node for node in self.nodes.values() if node.leaf_writes]
        #: By call that writes leaves as a side effect, running statistics: the leaves.
        self.moved = {
            node.id: [
                self.imports[i].value
                for k, i in enumerate(node.imports)
                if node.leaf_writes >> k & 1 and i >= 0
            ]
            for node in self.moving
        }
        self.rows: dict[int, str] = {}  # by call, once asked for: the name of its row
        self.splits: dict[int, Any] = {}  # by reduction, of `reductions/calls.py`
        self.reads: dict[int, Any] = {}  # by body, of `running/prepared.py`
        self._schedules: dict[Arguments, Schedule] = {}
        #: Caches of `planning`: descriptions of runs (`explain.py`) and ways in a number of chunks
        #: (`planner.py`) by all else that they depend on; the further bytes of `left_graphs.py`.
        self.described: dict[tuple[Any, ...], Any] = {}
        self.ways_in: dict[tuple[int, ...], Way | None] = {}
        self.further: dict[bool, float] = {}
        #: The axes over which the first stage runs on all rows at once, once `running/stages.py`
        #: has found out.
        self.at_once: list[int] | None = None
        self.sent: Any = None  # of `running/tail.py`: the gradients that it sent last

    def _run(self, index: int, described: tuple[Any, ...]) -> Run:
        stage, axis, segment, nodes, parts, imports, exports, inner, combined, *rest = described
        numbers = {
            self.nodes[i].first_out: parts_in(bits)
            for i, bits in zip(nodes, parts, strict=True)
            if bits
        }
        reductions = [self.nodes[i] for i in combined]
        between = nodes, numbers, imports, exports, inner
        return Run(index, stage, axis, segment, *between, reductions, *rest)

    def schedule(self, handle: object, policy: Arguments) -> Schedule:
        """Return the schedule of the program with this handle."""
        found = self._schedules.get(policy)
        if found is None:
            steps, n_forward, cheap_values = _core.schedule(handle, policy)
            made = [
                Step(_OPS[op], _GRAPHS[graph], self.runs[first : first + n], values, others)
                for op, graph, first, n, values, others in steps
            ]
            freed = {value: Cheap(*cheap) for value, cheap in cheap_values.items()}
            found = self._schedules[policy] = Schedule(made, n_forward, freed, head_of(made))
            with contextlib.suppress(KeyError):  # another thread has dropped it
                if len(self._schedules) > _N_SCHEDULES:
                    del self._schedules[next(iter(self._schedules))]
        return found


_known: list[Known] = []


def known_of(handle: object) -> Known:
    """Return what the core tells of the program behind a handle, kept since an earlier step staged
    the same one, or asked for now.

    Programs are the same if all is equal that the core stages, cuts and schedules them by: calls,
    shapes, dtypes, devices, gradients, hooks, what the user holds.
    """
    printed = _core.print_of(handle)
    for known in _known:
        if known.printed == printed:
            return known
    known = Known(handle, printed)
    _known.append(known)
    while sum(len(one.nodes) for one in _known) > _N_KEPT and len(_known) > 1:
        _known.pop(0)
    return known
