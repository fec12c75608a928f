# SPDX-License-Identifier: Apache-2.0
"""A staged program: its calls by stage, its runs, and the values that pass between them."""

from __future__ import annotations

import array
import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from koila import _core
from koila.basics.engine import leaves_behind
from koila.staged import hooks, noise
from koila.staged.cache import FACTS, ProgramCache, cache_of
from koila.staged.facts import ONCE, Amounts, Import, Infos, Node, Run, is_data
from koila.staged.schedule import AS_IT_IS, Op, Policy, Schedule, Strategy

#: What the core tells of a program, and all that depends on how its bodies are cut into segments.
_OF_CUTS = ("cache", *FACTS, "unstageable", "cloned")
_UNCUT = AS_IT_IS.cuts
_NO_ID = 2**32 - 1  # KL_ID_NONE of base.h


#: Larger than the number of any call.
NO_CALL = 2**32 - 2


def _does_graph_keep_written() -> bool:
    """Tell whether the graph of pending calls keeps memory that a later call writes. After a write
    through .data, only a run of them all in their order leaves the written numbers in it."""
    ends = Program([]).ends()
    return bool(ends) and _core.overwritten(Program(ends).handle, NO_CALL) is not None


class Program:
    """The pending calls of the thread's tape, staged to compute values and differentiate roots.

    The core holds the program; this object is a handle that reads from it on demand.

    Args:
        roots: what is differentiated: lazy tensors, or numbers of values.
        is_no_grad_only: compute only values without a gradient in their history; else all that the
            user can reach.
        gets: tells whether a tensor gets a gradient; None: all get one.
        unwanted: lazy tensors whose numbers are not delivered.
        beside: plain tensors with a graph that are differentiated together with the roots.
    """

    nodes: dict[int, Node]  # all calls, by id
    imports: list[Import]
    runs: list[Run]
    moving: list[Node]  # the calls that write leaves as a side effect
    moved: dict[int, list[int]]  # by such a call: the leaves, which are running statistics
    node: Callable[[int], Node]  # of an id
    makers: dict[int, Node]  # by value: the call that makes it
    is_leaf: Callable[[int], bool]  # of a value
    needs_gradient: Callable[[int], bool]  # of a value
    #: Whether a value must exist whole at the end: it is wanted, or wanted values are views of it.
    is_kept: Callable[[int], bool]

    def __init__(
        self,
        roots: Sequence[torch.Tensor | int],
        is_no_grad_only: bool = False,
        gets: Callable[[torch.Tensor], bool] | None = None,
        unwanted: tuple[_core.LazyTensor, ...] = (),
        beside: Sequence[torch.Tensor] = (),
    ) -> None:
        _core.set_wanted(unwanted, False)
        try:
            staged = _core.stage(list(roots), is_no_grad_only, gets)
        finally:
            _core.set_wanted(unwanted, True)
        self.gets = gets
        self._unwanted = unwanted
        self.beside = beside
        self.handle: object = staged[0]
        self.roots: list[int] = staged[1]
        self.reached: list[int] = staged[2]  # the values that the user can reach
        #: By storage: how many lazy tensors of the user share it, if several do.
        self.n_sharing: dict[int, int] = dict(staged[3])
        #: By axis that a body runs over: its number of rows.
        self.axes: dict[int, int] = dict(staged[4])
        self.entered: list[torch.Tensor] = staged[5]  # the real tensors that it reads
        self.devices: set[torch.device] = staged[6]  # the devices that it computes on
        self.n_nodes, self.n_values, self.n_imports, self.n_stages = staged[7:11]
        self.last_body: int | None = staged[11]
        self.is_tail_linear: bool = staged[12]
        self.tail_node: int | None = staged[13]
        self.is_all: bool = staged[14]  # it contains every pending call
        self.has_writes: bool = staged[15]
        self.has_effects: bool = staged[16]  # it writes running statistics
        self.is_drawing: bool = staged[17]  # it draws random numbers
        self.amounts = Amounts(*staged[18])
        #: Whether a gradient goes through calls that the script checkpoints.
        self.has_checkpoints: bool = staged[19]
        self._data_write: int | None = staged[20]  # a call that writes memory through x.data
        self.n_recorded: int = staged[21]  # the calls of the tape, also those that are not staged
        self.has_aside: bool = staged[22]  # some call has a graph that leads to no root
        self.n_cut: int = len(staged[4])  # the segments of all bodies together
        #: Whether calls of its tape differentiate others (`derived.py`).
        self.is_derived = "recipes" in _core.notes()
        self.is_no_grad_only = is_no_grad_only
        self._cuts = _UNCUT
        self._cut_from: ProgramCache | None = None  # of the program that this one is cut from
        self._cloned: set[int] = set()
        self.infos = Infos()
        #: A cached function of the number of a value.
        self.info = self.infos.__getitem__
        #: A cache of `planning/strategies.py`: this program's measures, with and without backward.
        self.measured: dict[bool, Any] = {}
        #: A cache of `memory/estimates.py`: the noise that calls draw; None: not found yet.
        self.noise: bytes | None = None
        self._cut_before: dict[tuple[int, bool], Program] = {}  # by `Strategy.cuts`

    def __getattr__(self, name: str) -> Any:
        """Ask the core what it tells of the program, when that is read first."""
        if name not in FACTS:
            raise AttributeError(name)
        self.__dict__.update(self.cache.facts_with(name, self.handle))
        return self.__dict__[name]

    @functools.cached_property
    def cache(self) -> ProgramCache:
        """What is kept of the program for the next steps."""
        return cache_of(self.handle, self._cut_from, self._cuts)

    @functools.cached_property
    def regions(self) -> tuple[bytes, bytes]:
        """The checkpoint that each call is in, and the one around each checkpoint: indices, as
        arrays of uint32. Without checkpoints they are empty."""
        around: dict[int, tuple[int, ...]] = _core.notes().get("around", {})
        index, outer = {0: _NO_ID}, array.array("I")
        of_node = array.array("I", [_NO_ID] * self.n_recorded if self.has_checkpoints else [])
        for node in self.nodes.values() if self.has_checkpoints else ():
            inside = _NO_ID
            for region in around.get(node.region, (node.region,)):
                if region not in index:
                    index[region] = len(outer)
                    outer.append(inside)
                inside = index[region]
            of_node[node.id] = inside
        return of_node.tobytes(), outer.tobytes()

    @functools.cached_property
    def needing(self) -> list[torch.Tensor]:
        """The tensors that entered and need a gradient."""
        with torch._C.DisableTorchFunctionSubclass():  # statistics that are watched are a subclass
            return [tensor for tensor in self.entered if tensor.requires_grad]

    @functools.cached_property
    def on_graphs(self) -> list[torch.Tensor]:
        """The tensors that entered with a graph behind them: results of plain calls."""
        with torch._C.DisableTorchFunctionSubclass():
            return [tensor for tensor in self.needing if tensor.grad_fn is not None]

    @functools.cached_property
    def parameters(self) -> list[torch.Tensor]:
        """The leaves of autograd's graph that it reads, also through plain calls (`weight[:n]`)."""
        leaves = self.needing
        if self.on_graphs:
            with torch._C.DisableTorchFunctionSubclass():
                leaves = [leaf for leaf in leaves if leaf.is_leaf]
            leaves += leaves_behind(self.on_graphs)
        return list({id(leaf): leaf for leaf in leaves}.values())

    def once(self) -> list[Node]:
        """Return the calls that run once, on whole values."""
        return [node for node in self.nodes.values() if node.mode == ONCE]

    def aside(self) -> list[Node]:
        """Return the calls with a graph that leads to no root."""
        apart = (n for n in self.nodes.values() if not any(map(self.needs_gradient, n.outs)))
        return [n for n in apart if any(self.info(value).requires_grad for value in n.outs)]

    @functools.cached_property
    def wanted(self) -> list[int]:
        """The values computed here whose numbers are delivered to the user."""
        makers = self.makers  # a script may hold far more values that other programs compute
        return [value for value in self.reached if value in makers and not self.is_leaf(value)]

    @functools.cached_property
    def unstageable(self) -> tuple[Node, str] | None:
        """A call that cannot run in stages, and why (the program must run whole); or None."""
        first, others = self._however_cut
        node = self._find_unstageable_write() if self.has_writes and first is None else None
        if node is not None:
            return node, "memory that several parts use is written where no part can"
        return first or others

    @functools.cached_property
    def cloned(self) -> set[int]:
        """The in-place calls that write a clone instead; see `_find_unstageable_write`."""
        _ = self.unstageable
        return self._cloned

    def row_of(self, node: Node) -> str:
        """Return the name of a call's row in the op table; empty if it has no row."""
        rows = self.cache.rows
        if node.id not in rows:
            rows[node.id] = str(_core.node(node.id)[1] or "")
        return rows[node.id]

    def node_of(self, value: int) -> Node | None:
        """Return the call that makes a value in this program; None for a leaf."""
        return None if self.is_leaf(value) else self.makers.get(value)

    def reads(self, node: Node) -> list[int]:
        """Return the values that a call reads, in the order of its arguments."""
        return [self.imports[i].value for i in node.imports if i >= 0]

    def moved_by(self, node: Node) -> list[int]:
        """Return the leaves that a call writes as a side effect: running statistics."""
        return self.moved.get(node.id, [])

    @functools.cached_property
    def uncounted(self) -> frozenset[int]:
        """The storages on the tape whose .data was taken: torch does not count writes to them."""
        recorded = map(_core.node, range(self.n_recorded))
        read = (reads[0] for func, *_, reads, _ in recorded if is_data(func))
        return frozenset(self.info(value).storage for value in read)

    @functools.cached_property
    def read_until(self) -> dict[int, int]:
        """By value that calls read: the first stage with a call that reads its memory, which is the
        last one to run backward."""
        first: dict[int, int] = {}  # by storage
        storages: dict[int, int] = {}  # by value
        for node in self.nodes.values():
            for value in self.reads(node):
                storage = storages[value] = self.info(value).storage
                first[storage] = min(node.stage, first.get(storage, node.stage))
        return {value: first[storage] for value, storage in storages.items()}

    def joins_rows(self, node: Node) -> bool:
        """Tell whether a call runs once although it reads rows of a batch."""
        infos = [self.info(v) for v in self.reads(node)] if node.mode == ONCE else []
        return any(info.place is not None and 0 not in info.shape for info in infos)

    def takes_rows(self, node: Node) -> bool:
        """Tell whether all outputs of a call are views with rows: calls on them run by chunks."""
        infos = [self.info(v) for v in node.outs]
        return all(info.view is not None and info.place is not None for info in infos)

    def bytes_of(self, value: int) -> int:
        """Return the bytes of a value for the whole batch."""
        info = self.info(value)
        return math.prod(info.shape) * info.dtype.itemsize

    def bytes_made(self, node: Node) -> int:
        """Return the bytes of a call's results for the whole batch, without views."""
        return sum(self.bytes_of(v) for v in node.outs if self.info(v).view is None)

    def is_hooked(self, value: int) -> bool:
        """Tell whether a value gets a gradient that a hook reads or that is retained."""
        return self.needs_gradient(value) and hooks.is_on(value)

    @property
    def is_part(self) -> bool:
        """Whether it is a part that the bridge cut off, whose results others already hold."""
        return bool(self._unwanted)

    @property
    def has_body(self) -> bool:
        return bool(self.axes)

    def ends(self) -> list[int]:
        """Return the values that a backward may start from: wanted values with a gradient, of which
        no other wanted value is made."""
        wanted = {value for value in self.wanted if self.info(value).requires_grad}
        leads = set(wanted)  # wanted values, and the values that they are made of
        inner: set[int] = set()
        for _, node in sorted(self.nodes.items(), reverse=True):
            if any(v in leads and self.info(v).requires_grad for v in node.outs):
                leads.update(self.reads(node))
                inner.update(self.reads(node))
        return [value for value in self.wanted if value in wanted and value not in inner]

    def cut_for(self, strategy: Strategy) -> Program:
        """Return the program with its bodies cut into the segments of a strategy: it shares the
        stages.

        A program that contains derivatives is returned as it is: no cut may come between a value
        and the recorded call that computes a gradient of it.
        """
        if strategy.cuts == self._cuts or self.is_derived:
            return self
        if strategy.cuts not in self._cut_before:
            cut = copy.copy(self)
            cut.handle, axes = _core.cut_program(self.handle, *strategy.cuts)
            cut.n_cut = len(axes)
            cut._cuts, cut._cut_from = strategy.cuts, self.cache
            cut._cloned, cut._cut_before = set(), {}
            for depends_on_cuts in _OF_CUTS:
                cut.__dict__.pop(depends_on_cuts, None)
            self._cut_before[strategy.cuts] = cut
        return self._cut_before[strategy.cuts]

    def without_tensors(self) -> Program:
        """Return the program without its tensors, for `_core.held` with a tape of its print: it can
        be measured, but not run. Call this once it has been measured."""
        _ = self.cache, self._however_cut
        bare = copy.copy(self)
        for of_tensors in ("parameters", "on_graphs", "needing"):
            bare.__dict__.pop(of_tensors, None)
        bare.entered, bare.beside, bare.gets, bare._unwanted = [], (), None, ()
        bare.infos = Infos()
        bare.info, bare._cut_before = bare.infos.__getitem__, {}
        return bare

    def n_calls(self, strategy: Strategy) -> int:
        """Return the calls made for each chunk; those of a head are made for each piece of it."""
        if strategy.n_pieces == 1:
            return self.n_nodes
        return self.n_nodes + (strategy.n_pieces - 1) * len(self.last_segment.nodes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes by which a cache knows the program again in the next step."""
        counts = self.n_nodes, self.n_values, self.n_imports, self.n_stages, len(self.roots)
        return *counts, *self.axes.values(), *self.amounts, self.is_part

    @property
    def last_segment(self) -> Run:
        """The last segment of the last body: its head, if the body is cut before it."""
        return next(run for run in reversed(self.runs) if run.is_body)

    @functools.cached_property
    def boundary(self) -> list[int]:
        """The values that bodies leave for others, in the order of `Strategy.policies`; the same
        however the bodies are cut."""
        return [value for run in self.runs if run.is_body for value in run.left]

    def policies(self, of_values: Mapping[int, Policy]) -> bytes:
        """Return the policies of all boundary values: those of `of_values`, the others are kept."""
        if not of_values:
            return b""
        return bytes(of_values.get(value, Policy.KEEP) for value in self.boundary)

    def all_as(self, policy: Policy) -> bytes:
        """Return policies that store all boundary values in one way, as far as they can be."""
        return bytes([policy] * len(self.boundary))

    def crossing(self, is_graph: bool) -> set[int]:
        """Return the activations that bodies leave for others and that need not stay in memory."""
        offloading = Strategy(policies=self.all_as(Policy.OFFLOAD))
        return self.schedule(is_graph, offloading).values_of(Op.STORE)

    def schedule(
        self, is_graph: bool, strategy: Strategy = AS_IT_IS, n_chunks: int = 0
    ) -> Schedule:
        """Return the schedule of the program. `is_graph`: the roots are differentiated. `n_chunks`:
        0 if it is not known yet."""
        return self.cache.schedule(self.handle, strategy.as_tuple(is_graph, n_chunks=n_chunks))

    @functools.cached_property
    def _however_cut(self) -> tuple[tuple[Node, str] | None, tuple[Node, str] | None]:
        """What makes it unstageable however it is cut: a write through .data, and other calls."""
        if self._data_write is not None and (self.roots or _does_graph_keep_written()):
            why = (
                "its memory is written through .data, which changes what is kept for backward; "
                "write it without .data, under torch.no_grad()"
            )
            return (self.node(self._data_write), why), None
        node = self._find_write_below_hook() if self.roots and self.has_writes else None
        if node is not None:
            why = "it writes memory without a graph that a value with a hook is a view of"
            return None, (node, why)
        for node in self.nodes.values() if self.is_drawing else ():
            if node.is_random and noise.is_only_whole(node.id, node.first_out):
                why = "how the memory lies that it draws for is known only when it has run"
                return None, (node, why)
        return None, None

    def _find_write_below_hook(self) -> Node | None:
        """Return a write without a graph to the storage of a view with a hook, or None.

        After it, torch gives the view another node, which the hook is not on: the hook gets the
        gradient of the calls before the write only.
        """
        hooked = [self.info(value) for value in hooks.hooked() if value < self.n_values]
        storages = {info.storage for info in hooked if info.view is not None}
        for node in self.nodes.values() if storages else ():
            info = self.info(node.first_out)
            if node.writes and info.storage in storages and not info.requires_grad:
                return node
        return None

    def _find_unstageable_write(self) -> Node | None:
        """Return a write that cannot run in stages, or None; and fill `_cloned`.

        A run may write in place only tensors that it made itself and that no other run reads as
        they were before the write. Any other write goes to a clone, which the later calls read.
        """
        for run in self.runs:
            writes = [i for i in run.nodes if self.nodes[i].writes]
            if not writes:
                continue
            outs = ((i, self.nodes[i].outs) for i in run.nodes)
            maker = {v: i for i, of in outs if of.start not in run.parts for v in of}
            exported = {v: self.info(v).storage for v in run.exports if v in maker}
            cloned_by: dict[int, int] = {}  # by storage: the last write that goes to a clone of it
            for i in writes:
                node = self.nodes[i]
                storage = self.info(node.first_out).storage
                before = [
                    v
                    for v, of in exported.items()
                    if of == storage and cloned_by.get(storage, -1) <= maker[v] < i
                ]
                # The body of a checkpoint is recomputed before its backward, and must then find
                # what it reads unchanged: so it may write only what it made itself.
                is_own = all(
                    v in maker and self.nodes[maker[v]].region == node.region
                    for v in self._written(node, storage)
                )
                if is_own and not before:
                    continue
                if run.is_body and self._writes_other_rows(node):
                    return node
                self._cloned.add(i)
                cloned_by[storage] = i
        return None

    def _writes_other_rows(self, node: Node) -> bool:
        """Tell whether a call writes a view that cannot be taken of a chunk of its base: the view
        mixes rows, as `x.diagonal()` does."""
        view = self.info(self.imports[node.imports[0]].value).view
        while view is not None:
            if _core.node(view[0])[4] == 0:  # the call that took the view does not run by rows
                return True
            view = self.info(view[2]).view
        return False

    def _written(self, node: Node, storage: int) -> list[int]:
        """Return the value that a call writes and all values that it is a view of, up to the one
        that is the whole storage. If another run made one of them, the write would change it."""
        written, last = (self.imports[k].value for k in (node.imports[0], node.imports[-1]))
        values = [written]
        while (view := self.info(values[-1]).view) is not None:
            values.append(view[2])
        return values + [last] * (self.info(last).storage == storage)

    def gradient_part(self, run: Run, made: Iterable[int]) -> Run:
        """Return, as a run, the calls of a barrier that gradients go through. Of the reductions
        that it combines, the new run has those whose first result is among `made`, the values that
        exist already."""
        found = _core.gradient_part(self.handle, run.index, list(made))
        index, nodes, imports, exports, combined = found
        part = Run(index, run.stage, run.axis, nodes=nodes, imports=imports, exports=exports)
        part.combined = combined
        return part
