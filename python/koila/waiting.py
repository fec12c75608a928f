# SPDX-License-Identifier: Apache-2.0
"""Graphs of chunks that wait from a body's forward to its backward.

What autograd saves for it is seen as it is saved. What came into the body from outside is there
anyway; what leaves the body is in its home; what light calls make of those is made again before the
chunk goes back (KlStep.again). So nothing of a chunk is kept in between but its graph.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from koila import light
from koila.cross import Fresh, has_way_back, send_back
from koila.program import Node, Program, Step

if TYPE_CHECKING:
    from koila.replay import Replay

_Layout = tuple[torch.Size, tuple[int, ...], int]  # size, strides, offset


class Found:
    """Values that a graph needs when it goes back, each until it was read for the last time.

    It holds no graph: autograd's references to it are none that Python's collector sees.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.n_reads: Counter[int] = Counter()

    def read(self, value: int) -> torch.Tensor:
        self.n_reads[value] -= 1
        return self.tensors[value] if self.n_reads[value] else self.tensors.pop(value)


def _there(tensor: torch.Tensor) -> torch.Tensor:
    """What a graph needs; what was emptied has to be filled again before: its memory is gone."""
    assert tensor.untyped_storage().nbytes() or not tensor.nbytes, "a graph needs what was emptied"
    return tensor


class _Saved:
    """What autograd saved: a tensor, or a value that will be found, and how it was seen."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()
        #: Where it will be found: a value; and if it is a view of that, how both lay in memory.
        self.found: tuple[Found, int, tuple[_Layout, _Layout] | None] | None = None

    def let_go(self, found: Found, value: int, view: tuple[_Layout, _Layout] | None = None) -> None:
        """Keep only where it will be found."""
        self.found = found, value, view
        self.tensor = None
        found.n_reads[value] += 1

    def get(self) -> torch.Tensor:
        if self.found is None:
            assert self.tensor is not None
            return _there(self.tensor)
        found, value, view = self.found
        tensor = _there(found.read(value))
        if view is None:
            return tensor
        (size, strides, start), (size_of_view, strides_of_view, start_of_view) = view
        if tensor.stride() != strides:  # in its home it lies otherwise
            tensor = tensor.new_empty_strided(size, strides).copy_(tensor)
        start_of_view += int(tensor.storage_offset()) - start
        return tensor.as_strided(size_of_view, strides_of_view, start_of_view)


#: What a call of a graph that waits takes of the process, about: torch's nodes, and ours.
_BYTES_OF_A_CALL = 4096
#: So many are little; else they are to be a small part of what the body keeps anyway.
_FEW_BYTES = 2**20
_SHARE = 1 / 8


def pays(replay: Replay, step: Step) -> bool:
    """Whether the graphs of all chunks are small beside what they leave, which no plan says: of
    many chunks of a few numbers they are not."""
    (run,) = step.runs
    n_bytes = len(replay.grid_of(run)) * len(run.nodes) * _BYTES_OF_A_CALL
    infos = map(replay.program.info, light.homes_of(replay.program, run))
    left = sum(math.prod(info.shape) * info.dtype.itemsize for info in infos)
    return n_bytes <= max(_FEW_BYTES, _SHARE * left) and are_hooks_allowed()


def are_hooks_allowed() -> bool:
    """Whether what autograd saves may be looked at: somebody may have told torch otherwise."""
    try:
        with torch.autograd.graph.saved_tensors_hooks(_Saved, _Saved.get):
            return True
    except RuntimeError:
        return False


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


class Look:
    """Looks at what autograd saves while a chunk goes forward.

    Args:
        program: the program.
        values: those that are there when the chunk goes back: in their homes, or made again.
        light: of these, those that are made again.
    """

    def __init__(self, program: Program, values: frozenset[int], light: frozenset[int]) -> None:
        self.program = program
        self.values = values
        self.light = light
        self.found = Found()
        self.pending: list[_Saved] = []

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        pending = self.pending  # autograd keeps what packs, too: it must not hold more than this

        def pack(tensor: torch.Tensor) -> _Saved:
            pending.append(_Saved(tensor))
            return pending[-1]

        return torch.autograd.graph.saved_tensors_hooks(pack, _Saved.get)

    def settle(self, node: Node, env: Sequence[Any]) -> None:
        """Of what was saved of a call, let go what will be found when it is needed."""
        imports = self.program.imports
        read = (imports[import_id].value for import_id in node.imports if import_id >= 0)
        made = [
            (value, env[value])
            for value in (*node.outs, *read)
            if value in self.values and isinstance(env[value], torch.Tensor)
        ]
        for saved in self.pending:
            self._settle(saved, made)
        written = imports[node.imports[0]].value if node.writes else None
        copies = [saved for saved in self.pending if saved.found is None]
        if written in self.light and len(copies) == 1:  # it saves what it writes, as it was
            copies[0].let_go(self.found, written)
        self.pending.clear()

    def _settle(self, saved: _Saved, made: list[tuple[int, torch.Tensor]]) -> None:
        tensor = saved.tensor
        assert tensor is not None
        storage, layout = tensor.untyped_storage()._cdata, _layout(tensor)
        of_it = [(v, _layout(of)) for v, of in made if of.untyped_storage()._cdata == storage]
        same = [(value, None) for value, of in of_it if of == layout]
        views = [(value, (of, layout)) for value, of in of_it if value in self.light]
        for value, view in (*same, *views)[:1]:
            saved.let_go(self.found, value, view)


Edges = GradientEdge | None | tuple[GradientEdge | None, ...]


class Chunk(NamedTuple):
    """A chunk that went forward: where its graph is entered, by value that it left, of a reduction
    by part; and what that needs."""

    edges: dict[int, Edges]
    given: Fresh  # the aliases that it was given
    found: Found


def _edge_of(tensor: torch.Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad and has_way_back(tensor) else None


def _edges_of(left: Any) -> Edges:
    """Where the graph of what a chunk left is entered; None: it has none."""
    return tuple(map(_edge_of, left)) if isinstance(left, tuple) else _edge_of(left)


def forward(replay: Replay, step: Step) -> list[Chunk]:
    """Run each chunk of a body with its graph, and keep what leaves it."""
    (run,) = step.runs
    again = frozenset(step.again)
    values = again.union(light.homes_of(replay.program, run))
    chunks = []
    for chunk in range(len(replay.grid_of(run))):
        look = Look(replay.program, values, again)
        try:
            go = functools.partial(replay.run_nodes, run, chunk, True, look=look)
            env, given = replay.apart(go)
        finally:
            look.pending.clear()
        replay.collect(run, env, chunk, run.exports)
        edges = {value: _edges_of(env[value]) for value in run.exports}
        chunks.append(Chunk(edges, given, look.found))
        del env
    return chunks


def back(replay: Replay, step: Step, chunks: list[Chunk]) -> None:
    """Send the gradients of what a body left back through the graphs of its chunks, which go with
    that; and what it left, chunk by chunk."""
    (run,) = step.runs
    homes = light.homes_of(replay.program, run)
    for value in step.values:
        replay.forget(replay.cross[value].aliases.values())
        replay.cross[value].settle_all()
    for chunk in range(len(chunks)):
        edges, given, found = chunks[chunk]
        chunks[chunk] = Chunk({}, {}, found)
        replay.go_on(given)
        del given
        light.fill(replay, step.needs, chunk)
        _find(replay, step, chunk, homes, found)
        pairs = replay.seeds(run, edges, chunk)
        del edges
        send_back([edge for edge, _ in pairs], [seed for _, seed in pairs], replay.fresh)
        del pairs
        found.tensors.clear()
        replay.let_go_of_chunk(step.runs, chunk, set(step.values), set())
        light.empty(replay, chunk)
        for value in replay.program.left_by(step.runs):
            replay.cross[value].drop_seeds(chunk, chunk + 1 == len(chunks))


def _find(replay: Replay, step: Step, chunk: int, homes: Iterable[int], found: Found) -> None:
    """What the graph of a chunk needs: from its home, or made again."""
    known: dict[int, torch.Tensor | None]
    (run,) = step.runs
    grid = replay.grid_of(run)
    known = {value: replay.cross[value].of_rows(grid, chunk) for value in homes}
    again = [value for value in step.again if value in found.n_reads]
    env: Any = known
    if again:
        env = replay.run_nodes(run, chunk, False, again={**known, **dict.fromkeys(again)})
    found.tensors = {value: env[value] for value in found.n_reads}
