# SPDX-License-Identifier: Apache-2.0
"""What the core tells of staged programs, kept for the next steps that stage the same program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from koila import _core
from koila.staged.facts import Import, Node, Run, parts_in
from koila.staged.schedule import Arguments, Cheap, Graph, Op, Schedule, Step, Strategy, head_of

_OPS, _GRAPHS = tuple(Op), tuple(Graph)
#: The prints of the programs that are kept have at most so many bytes together. A call has about
#: 640; described, it takes 960 more.
_N_BYTES_KEPT = 2**19
#: So many are kept in any case: of a large program, as it is and as it is cut to run.
_N_KEPT = 3
#: So many schedules of a program are kept, about twice those that one plan looks at: plans under
#: other limits look at others.
_N_SCHEDULES = 128

_UNCUT = Strategy().cuts

_Key = TypeVar("_Key")
_T = TypeVar("_T")


def remember(cache: dict[_Key, _T], key: _Key, value: _T, most: int = 64) -> None:
    """Add an entry to a cache, and drop the oldest ones beyond `most`."""
    cache[key] = value
    while len(cache) > most:
        cache.pop(next(iter(cache)), None)  # another thread may have dropped it


class ProgramCache:
    """What the core tells of a program, and its schedules. It holds no tensor and no handle, and
    nothing in it changes: programs of other threads may share it.

    Calls, imports and values are asked for when they are first read: many programs are only
    measured, and a large one takes long to describe.
    """

    def __init__(self, printed: tuple[Any, ...], cuts: tuple[int, bool] = _UNCUT) -> None:
        self.printed = printed  # what `_core.print_of` returned before the program was cut
        self.cuts = cuts  # `Strategy.cuts`
        self.arrays: list[bytes] = printed[-1]
        self.n_bytes = sum(map(len, filter(None, self.arrays)))
        self._facts: dict[str, Any] = {}  # by name of an attribute of a program
        self.rows: dict[int, str] = {}  # by call, once asked for: the name of its row
        self.splits: dict[int, Any] = {}  # by reduction, of `reductions/calls.py`
        self.reads: dict[int, Any] | None = None  # by body, once `running/store.py` has found out
        #: Also of `running/store.py`: the values that runs read or leave; and by value that a body
        #: leaves, the partials that are added up.
        self.boundary: list[int] = []
        self.added: dict[int, frozenset[int]] = {}
        self._schedules: dict[Arguments, Schedule] = {}
        #: Caches of `planning`, by all else that they depend on: plans (`seen.py`), the limits that
        #: refusals propose (`refusals.py`), descriptions of runs (`explain.py`), strategies in a
        #: number of chunks (`planner.py`) and the further bytes of `left_graphs.py`.
        self.plans: dict[tuple[Any, ...], Any] = {}
        self.limits: dict[tuple[Any, ...], Any] = {}
        self.described: dict[tuple[Any, ...], Any] = {}
        self.strategies_in: dict[tuple[int, ...], Strategy | None] = {}
        self.further: dict[bool, float] = {}
        #: The axes over which the first stage runs on all rows at once, once `running/stages.py`
        #: has found out.
        self.at_once: list[int] | None = None
        self.sent: Any = None  # of `running/tail.py`: the gradients that it sent last

    def facts_with(self, name: str, handle: object) -> dict[str, Any]:
        """Return the attributes of a program with this handle: this one, and others that are known
        by now."""
        if name not in self._facts:
            self._facts |= FACTS[name](self, handle)
        return self._facts

    def _nodes(self, handle: object) -> dict[str, Any]:
        nodes = {
            entry[0]: Node._make((*entry, range(entry[6], entry[6] + entry[7])))
            for entry in _core.facts_of(handle, "nodes")
        }
        makers = {value: node for node in nodes.values() for value in node.outs}
        return {"nodes": nodes, "node": nodes.__getitem__, "makers": makers}

    def _imports(self, handle: object) -> dict[str, Any]:
        return {"imports": list(map(Import._make, _core.facts_of(handle, "imports")))}

    def _values(self, handle: object) -> dict[str, Any]:
        arrays = (memoryview(flags).cast("?") for flags in _core.facts_of(handle, "values"))
        names = "is_leaf", "needs_gradient", "is_kept"
        return {name: flags.__getitem__ for name, flags in zip(names, arrays, strict=True)}

    def _runs(self, handle: object) -> dict[str, Any]:
        runs = []
        for index, described in enumerate(_core.facts_of(handle, "runs")):
            stage, axis, segment, nodes, parts, *others = described
            numbers = {value: parts_in(bits) for value, bits in parts}
            runs.append(Run(index, stage, axis, segment, nodes, numbers, *others))
        return {"runs": runs}

    def _moving(self, handle: object) -> dict[str, Any]:
        imports = self.facts_with("imports", handle)["imports"]
        moving = [
            node for node in self.facts_with("nodes", handle)["nodes"].values() if node.leaf_writes
        ]
        moved = {
            node.id: [
                imports[i].value
                for k, i in enumerate(node.imports)
                if node.leaf_writes >> k & 1 and i >= 0
            ]
            for node in moving
        }
        return {"moving": moving, "moved": moved}

    def schedule(self, handle: object, policy: Arguments) -> Schedule:
        """Return the schedule of the program with this handle."""
        found = self._schedules.get(policy)
        if found is None:
            steps, n_forward, cheap_values = _core.schedule(handle, policy)
            runs = self.facts_with("runs", handle)["runs"]
            made = [
                Step(_OPS[op], _GRAPHS[graph], runs[first : first + n], values, others)
                for op, graph, first, n, values, others in steps
            ]
            freed = {value: Cheap(*cheap) for value, cheap in cheap_values.items()}
            found = Schedule(made, n_forward, freed, head_of(made))
            remember(self._schedules, policy, found, _N_SCHEDULES)
        return found


#: By attribute of a program: what asks the core for it, and for others that come with it.
FACTS: dict[str, Callable[[ProgramCache, object], dict[str, Any]]] = {
    **dict.fromkeys(("nodes", "node", "makers"), ProgramCache._nodes),
    "imports": ProgramCache._imports,
    **dict.fromkeys(("is_leaf", "needs_gradient", "is_kept"), ProgramCache._values),
    "runs": ProgramCache._runs,
    **dict.fromkeys(("moving", "moved"), ProgramCache._moving),
}

_caches: list[ProgramCache] = []


def cache_of(
    handle: object, cut_from: ProgramCache | None = None, cuts: tuple[int, bool] = _UNCUT
) -> ProgramCache:
    """Return what the core tells of the program behind a handle, kept since an earlier step staged
    the same one, or asked for now.

    Programs are the same if all is equal that the core stages, cuts and schedules them by: calls,
    shapes, dtypes, devices, gradients, hooks, what the user holds. Of a program that is cut from
    another one, the print of that and the cuts tell as much.
    """
    printed = _core.print_of(handle) if cut_from is None else cut_from.printed
    for cache in _caches:
        if cache.cuts == cuts and cache.printed == printed:
            break
    else:
        cache = ProgramCache(printed, cuts)
    keep(cache)
    return cache


def keep(cache: ProgramCache) -> None:
    """Put a program's facts into the cache, as those used last. Drop the least recently used ones
    while the cache is too large."""
    if _caches and _caches[-1] is cache:
        return
    with contextlib.suppress(ValueError):  # it is new, or another thread has dropped it
        _caches.remove(cache)
    _caches.append(cache)
    while sum(one.n_bytes for one in _caches) > _N_BYTES_KEPT and len(_caches) > _N_KEPT:
        _caches.pop(0)
