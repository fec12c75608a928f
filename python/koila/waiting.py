# SPDX-License-Identifier: Apache-2.0
"""Graphs of chunks that wait from a body's forward to its backward.

What autograd saves for it is seen as it is saved. What came into the body from outside is there
anyway; what leaves the body is in its home; what light calls make of those is made again before the
chunk goes back (KlStep.again). So nothing of a chunk is kept in between but its graph.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from koila import light
from koila.cross import Fresh, has_way_back, send_back
from koila.facts import Node, Run
from koila.program import Program

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


#: In so many chunks no graph waits.
NEVER = 2**32 - 1


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


class Waiting:
    """The graphs of the chunks of a body.

    Args:
        replay: the step.
        run: the body, of one segment.
        again: what is made again for its graphs.
    """

    def __init__(self, replay: Replay, run: Run, again: Sequence[int]) -> None:
        self.replay, self.run_ = replay, run
        self.again = frozenset(again)
        self.homes = light.homes_of(replay.program, run)
        self.chunks: dict[int, Chunk] = {}

    def run(self, chunk: int) -> None:
        """Run a chunk with its graph, and keep what leaves it."""
        replay, run = self.replay, self.run_
        look = Look(replay.program, self.again.union(self.homes), self.again)
        try:
            go = functools.partial(replay.run_nodes, run, chunk, True, look=look)
            env, given = replay.apart(go)
        finally:
            look.pending.clear()
        replay.collect(run, env, chunk, run.exports)
        edges = {value: _edges_of(env[value]) for value in run.exports}
        self.chunks[chunk] = Chunk(edges, given, look.found)

    def send_back(self, chunk: int) -> None:
        """Send the gradients of what a chunk left back through its graph, which goes with that."""
        edges, given, found = self.chunks.pop(chunk)
        self.replay.go_on(given)
        del given
        self._find(chunk, found)
        pairs = self.replay.seeds(self.run_, edges, chunk)
        del edges
        send_back([edge for edge, _ in pairs], [seed for _, seed in pairs], self.replay.fresh)
        del pairs
        found.tensors.clear()

    def _find(self, chunk: int, found: Found) -> None:
        """What the graph of a chunk needs: from its home, or made again."""
        replay, run = self.replay, self.run_
        grid = replay.grid_of(run)
        known: dict[int, torch.Tensor | None]
        known = {value: replay.cross[value].of_rows(grid, chunk) for value in self.homes}
        again = [value for value in self.again if value in found.n_reads]
        env: Any = known
        if again:
            env = replay.run_nodes(run, chunk, False, again={**known, **dict.fromkeys(again)})
        found.tensors = {value: env[value] for value in found.n_reads}
