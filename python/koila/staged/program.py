# SPDX-License-Identifier: Apache-2.0
"""A staged program: which nodes run in which stage, what they read from outside, what leaves it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from koila import _core
from koila.staged import hooks, noise
from koila.staged.facts import ONCE, Amounts, Import, Info, Made, Node, Run
from koila.staged.schedule import AS_IT_IS, Graph, Light, Op, Schedule, Step, Way

_OPS, _GRAPHS = tuple(Op), tuple(Graph)
_T = TypeVar("_T")


class _Asked(dict[int, _T]):
    """What was asked for, by number: found once, and had without a call from then on."""

    def __init__(self, find: Callable[[int], _T]) -> None:
        self._find = find

    def __missing__(self, number: int) -> _T:
        found = self[number] = self._find(number)
        return found


def _made(handle: object, value: int) -> Made:
    node, *traits = _core.maker(handle, value)
    return Made(None if node is None else Node._make(node), *traits)


def _node(handle: object, i: int) -> Node:
    return Node._make(_core.staged(handle, i))


def _row(i: int) -> str:
    return str(_core.node(i)[1] or "")


class Program:
    """What the thread's tape holds now, staged for a goal: a handle, of which the core is asked for
    what is needed."""

    def __init__(
        self,
        roots: Sequence[torch.Tensor | int],
        is_known_only: bool = False,
        n_segments: int = 1,
        is_headed: bool = False,
        gets: Callable[[torch.Tensor], bool] | None = None,
        unwanted: tuple[_core.LazyTensor, ...] = (),
    ) -> None:
        _core.set_wanted(unwanted, False)
        try:
            staged = _core.stage(list(roots), is_known_only, n_segments, is_headed, gets)
        finally:
            _core.set_wanted(unwanted, True)
        self.gets = gets  # whether a tensor is to get a gradient; None: all are
        self._unwanted = unwanted  # lazies whose numbers nobody is to get
        self.handle: object = staged[0]
        self.roots: list[int] = staged[1]
        self._reached: list[int] = staged[2]
        self.n_sharing: dict[int, int] = dict(staged[3])  # lazies of a storage, if several
        #: Rows of each axis that a body runs over.
        self.axes: dict[int, int] = staged[4]
        self.entered: list[torch.Tensor] = staged[5]
        self.devices: set[torch.device] = staged[6]  # where its values are made
        self.n_nodes, self.n_values, self.n_imports, self.n_stages = staged[7:11]
        self.last_body: int | None = staged[11]
        self.is_tail_linear: bool = staged[12]
        self.tail_node: int | None = staged[13]
        self.is_all: bool = staged[14]  # every call that waits is in it
        self.has_writes: bool = staged[15]
        self.has_effects: bool = staged[16]  # it writes statistics
        self.is_drawing: bool = staged[17]
        self.amounts = Amounts(*staged[18])
        #: A gradient goes through bodies of the user's checkpoints.
        self.has_checkpoints: bool = staged[19]
        self._hidden: int | None = staged[20]
        #: Its tape has calls that differentiate others (`derived.py`).
        self.is_derived = "recipes" in _core.memo()
        self.is_known_only = is_known_only
        self._cuts = n_segments, is_headed
        self._cloned: set[int] = set()
        #: Of a value or a call by number, asked for once.
        self.info = _Asked(Info.of).__getitem__
        self.made = _Asked(functools.partial(_made, self.handle)).__getitem__
        self.node = _Asked(functools.partial(_node, self.handle)).__getitem__
        self._rows = _Asked(_row)
        #: Of reductions, as far as they were asked for: the row's, and the rows of all chunks.
        self.signatures: dict[int, tuple[str, int]] = {}

    @functools.cached_property
    def nodes(self) -> dict[int, Node]:
        """All its calls; `node` is one of them."""
        return {node.id: node for node in map(Node._make, _core.told(self.handle, "nodes"))}

    def once(self) -> list[Node]:
        """Its calls that run once."""
        return [Node._make(entry) for entry in _core.told(self.handle, "once")]

    @functools.cached_property
    def imports(self) -> list[Import]:
        return [Import(*entry) for entry in _core.told(self.handle, "imports")]

    @functools.cached_property
    def runs(self) -> list[Run]:
        return [self._run(i, *entry) for i, entry in enumerate(_core.told(self.handle, "runs"))]

    @functools.cached_property
    def wanted(self) -> list[int]:
        """The values whose numbers the user gets."""
        return [value for value in self._reached if self.node_of(value) is not None]

    @functools.cached_property
    def unstageable(self) -> tuple[Node, str] | None:
        """A call that cannot run by stages, and why: the program runs whole."""
        return self._find_unstageable()

    @property
    def cloned(self) -> set[int]:
        """Writes that are run on a clone."""
        _ = self.unstageable
        return self._cloned

    def _run(
        self,
        index: int,
        stage: int,
        axis: int,
        segment: int,
        nodes: list[int],
        parts: dict[int, int],
        imports: list[int],
        exports: list[int],
        inner: list[int],
        combined: list[int],
        shadows: list[int],
        has_gradient: bool,
    ) -> Run:
        made = [self.node(i) for i in combined]
        numbers = {i: tuple(p for p in range(32) if bits >> p & 1) for i, bits in parts.items()}
        lists = nodes, numbers, imports, exports, inner, made, shadows
        return Run(index, stage, axis, segment, *lists, has_gradient)

    def row_of(self, node: Node) -> str:
        """The row of a call; "": it has none."""
        return self._rows[node.id]

    def node_of(self, value: int) -> Node | None:
        """The node that makes a value in this program; None for a leaf."""
        return self.made(value).node

    def is_leaf(self, value: int) -> bool:
        return self.made(value).is_leaf

    def needs_gradient(self, value: int) -> bool:
        return self.made(value).needs_gradient and self.info(value).requires_grad

    def joins_rows(self, node: Node) -> bool:
        """Whether a call runs once although it reads rows of a batch."""
        reads = (self.imports[import_id].value for import_id in node.imports if import_id >= 0)
        infos = [self.info(v) for v in reads] if node.mode == ONCE else []
        return any(info.place is not None and 0 not in info.shape for info in infos)

    def takes_rows(self, node: Node) -> bool:
        """Whether all that a call makes is views by rows: what follows is cut again."""
        infos = [self.info(v) for v in node.outs]
        return all(info.view is not None and info.place is not None for info in infos)

    def bytes_of(self, value: int) -> int:
        """Bytes of a value for all rows."""
        info = self.info(value)
        return math.prod(info.shape) * info.dtype.itemsize

    def bytes_made(self, node: Node) -> int:
        """Bytes of a call's results for all rows; views share theirs."""
        return sum(self.bytes_of(v) for v in node.outs if self.info(v).view is None)

    def is_hooked(self, value: int) -> bool:
        """Whether something looks at the whole gradient of a value."""
        return self.needs_gradient(value) and hooks.is_on(value)

    @property
    def is_part(self) -> bool:
        """Whether it was cut off, and what it handed out is held by others (`bridge.py`)."""
        return bool(self._unwanted)

    @property
    def has_body(self) -> bool:
        return bool(self.axes)

    def ends(self) -> list[int]:
        """The values a backward may start from: wanted, and nothing that is wanted goes on from
        them."""
        wanted = {value for value in self.wanted if self.info(value).requires_grad}
        leads = set(wanted)  # to what is wanted, through calls that need a gradient
        inner: set[int] = set()
        for _, node in sorted(self.nodes.items(), reverse=True):
            if any(v in leads and self.info(v).requires_grad for v in node.outs):
                read = {self.imports[i].value for i in node.imports if i >= 0}
                leads |= read
                inner |= read
        return [value for value in self.wanted if value in wanted and value not in inner]

    def cut_for(self, way: Way) -> Program:
        """The same program with its bodies cut as that way says, but that nothing is cut between
        what is differentiated and its gradient in the program."""
        if way.cuts == self._cuts or self.is_derived:
            return self
        return Program(self.roots, self.is_known_only, *way.cuts, self.gets, self._unwanted)

    def n_calls(self, way: Way) -> int:
        """Of each chunk: those of the head are made for each piece."""
        if way.n_pieces == 1:
            return self.n_nodes
        return self.n_nodes + (way.n_pieces - 1) * len(self.last_segment.nodes)

    @property
    def last_segment(self) -> Run:
        """Of the last body: its head, where it is cut before that."""
        return next(run for run in reversed(self.runs) if run.is_body)

    @property
    def n_cut(self) -> int:
        """The segments of all bodies."""
        return sum(run.is_body for run in self.runs)

    def schedule(self, is_graph: bool, way: Way = AS_IT_IS, n_chunks: int = 0) -> Schedule:
        """What is done, forward and back, in so many chunks (0: it is not known yet)."""
        homes = way.homes(is_graph, n_chunks=n_chunks)
        steps, n_forward, lights = _core.schedule(self.handle, homes)
        return Schedule(
            [
                Step(_OPS[op], _GRAPHS[graph], self.runs[first : first + n], values, others)
                for op, graph, first, n, values, others in steps
            ],
            n_forward,
            {value: Light(*light) for value, light in lights.items()},
        )

    @staticmethod
    def left_by(runs: Sequence[Run]) -> list[int]:
        """What a body with these segments leaves for others."""
        return [value for run in runs for value in run.exports if value not in run.inner]

    def _find_unstageable(self) -> tuple[Node, str] | None:
        if self.roots and self._hidden is not None:
            why = "its memory is written through .data, which changes what is kept for backward"
            return self.node(self._hidden), why
        node = self._find_unstageable_write() if self.has_writes else None
        if node is not None:
            return node, "memory that several parts use is written where no part can"
        for node in self.nodes.values() if self.is_drawing else ():
            if node.is_random and noise.is_uncounted(node.id, node.first_out):
                return node, "how the memory lies that it draws for is known only when it has run"
        return None

    def _find_unstageable_write(self) -> Node | None:
        """A write that cannot run by stages; or None, and `_cloned` are those that write a clone.

        A run may write what it made, and nothing else: what other stages made, or read as it was
        before, stays as it is, and the calls that come after read the clone.
        """
        for run in self.runs:
            writes = [i for i in run.nodes if self.nodes[i].writes]
            if not writes:
                continue
            made = {v: i for i in run.nodes if i not in run.parts for v in self.nodes[i].outs}
            kept = {v: self.info(v).storage for v in run.exports if v in made}
            since: dict[int, int] = {}  # storage -> the last clone that was made of it
            for i in writes:
                node = self.nodes[i]
                storage = self.info(node.first_out).storage
                before = [
                    v
                    for v, of in kept.items()
                    if of == storage and since.get(storage, -1) <= made[v] < i
                ]
                # What a checkpoint's body keeps is made once more before its backward, as it was.
                is_own = all(
                    v in made and self.nodes[made[v]].region == node.region
                    for v in self._written(node, storage)
                )
                if is_own and not before:
                    continue
                if run.is_body and self._is_across(node):
                    return node
                self._cloned.add(i)
                since[storage] = i
        return None

    def _is_across(self, node: Node) -> bool:
        """Whether a call writes a view that no chunk can take again: it is of other rows."""
        view = self.info(self.imports[node.imports[0]].value).view
        while view is not None:
            if _core.node(view[0])[4] == 0:  # not by rows
                return True
            view = self.info(view[2]).view
        return False

    def _written(self, node: Node, storage: int) -> list[int]:
        """What a call writes, and where that is a view all that it is a view of, to the whole
        storage: a run that had one of these from elsewhere would write a part of that."""
        written, last = (self.imports[k].value for k in (node.imports[0], node.imports[-1]))
        values = [written]
        while (view := self.info(values[-1]).view) is not None:
            values.append(view[2])
        return values + [last] * (self.info(last).storage == storage)

    def gradient_part(self, run: Run, made: Iterable[int]) -> Run:
        """The part of a joint that gradients go through, after the combined reductions `made`."""
        found = _core.gradient_part(self.handle, run.index, list(made))
        index, nodes, imports, exports, combined = found
        part = Run(index, run.stage, run.axis, nodes=nodes, imports=imports, exports=exports)
        part.combined = [self.nodes[i] for i in combined]
        return part
