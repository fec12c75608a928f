"""Run a staged program in chunks: forward through the stages, back through them, one commit at the end.

Until the commit nothing that the user can see has changed: gradients are summed in detached aliases,
statistics are written on copies, the generator is put back if anything raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from koila import _core, draws, partials, plan
from koila.cross import Cross
from koila.program import ONCE, Node, Program, Run
from koila.rows import Bounds, grid
from koila.spent import spent

_OFF = (None, None)


class Replay:
    """One step: a program, its grid, and what crosses from stage to stage."""

    def __init__(self, program: Program, n_chunks: int) -> None:
        self.program = program
        self.grids: dict[int, list[Bounds]] = draws.pinned_grids()
        for axis, rows in program.axes.items():
            self.grids.setdefault(axis, grid(rows, n_chunks))
        self.cross: dict[int, Cross] = {}
        self.joint_graphs: dict[int, list[int]] = {}
        self.scratch: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.draws = draws.Draws(self)

    # -- what a stage reads ------------------------------------------------------------------------

    def cross_of(self, value: int) -> Cross:
        """The value as other stages see it; leaves enter when first asked for."""
        if value not in self.cross:
            info = self.program.info(value)
            tensor = info.real if info.real is not None else info.number
            assert tensor is not None, f"value {value} has neither a tensor nor a number"
            if value in self.scratch:
                tensor = self.scratch[value][1]
            self.cross[value] = Cross(info, self.program.needs_gradient(value), whole=tensor)
        return self.cross[value]

    def _given(
        self, number: int, run: Run, chunk: int, is_graph: bool, stand_ins: dict[int, Cross] | None
    ) -> torch.Tensor:
        entry = self.program.imports[number]
        cross = (stand_ins or {}).get(entry.value) or self.cross_of(entry.value)
        if not run.is_body:
            return cross.read_whole(is_graph)
        bounds = self.grids[run.axis][chunk]
        if entry.is_range:
            return cross.read_whole(False).narrow(0, 0, bounds[1] - bounds[0])
        if entry.place is None:
            return cross.read_whole(is_graph)
        return cross.read_rows(entry.place, self.grids[run.axis], chunk, is_graph)

    # -- running one stage --------------------------------------------------------------------------

    def run_nodes(
        self,
        run: Run,
        chunk: int,
        is_graph: bool,
        stand_ins: dict[int, Cross] | None = None,
    ) -> list[Any]:
        """Run the nodes of a stage on one chunk (a joint: once); the values made, by number."""
        env: list[Any] = [None] * len(self.program.values)
        imports: list[Any] = [None] * len(self.program.imports)
        for number in run.imports:
            imports[number] = self._given(number, run, chunk, is_graph, stand_ins)
        if not run.is_body:
            self._combine(run, env, is_graph, stand_ins)
        bounds = self.grids[run.axis][chunk] if run.is_body else None
        rows = bounds[1] - bounds[0] if bounds else -1

        def run_other(
            i: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            node = self.program.nodes[i]
            if node.is_random:
                self.draws.restore(i, chunk if run.is_body else None)
            if i in run.parts:
                return partials.run_parts(self.program, node, run.parts[i], func, args, kwargs)
            return func(*args, **kwargs)

        def cut(tensor: torch.Tensor, number: int) -> torch.Tensor:
            entry = self.program.imports[number]
            assert bounds is not None and entry.place is not None
            return Cross.cut(tensor, entry.place, self.grids[run.axis][-1][1], bounds)

        _core.run(
            run.nodes, run.drops, env, imports, self.program.import_of, rows, not is_graph, run_other, cut
        )
        return env

    def _combine(
        self, run: Run, env: list[Any], is_graph: bool, stand_ins: dict[int, Cross] | None
    ) -> None:
        """Reductions that ended in the body before: their partials become values here."""
        with torch.set_grad_enabled(is_graph):
            for node in self._combined_at(run.stage):
                value = node.first_out
                cross = (stand_ins or {}).get(value) or self.cross[value]
                parts = cross.read_parts(is_graph)
                combined = partials.combine(self.program, node, parts)
                for out, tensor in zip(node.outs, combined, strict=True):
                    env[out] = tensor

    def _combined_at(self, stage: int) -> list[Node]:
        return [
            node
            for node in self.program.nodes.values()
            if node.mode != ONCE and node.mode == 1 and node.stage + 1 == stage
        ]

    def _runs_at(self, stage: int) -> list[Run]:
        return [run for run in self.program.runs if run.stage == stage]

    # -- forward ---------------------------------------------------------------------------------------

    def _collect(self, run: Run, env: Sequence[Any], chunk: int) -> None:
        """Keep what leaves the stage, without its graph."""
        for value in run.exports:
            node = self.program.node_of(value)
            assert node is not None
            if value not in self.cross:
                info = self.program.info(value)
                self.cross[value] = Cross(info, self.program.needs_gradient(value))
            if node.id in run.parts:
                self.cross[value].add_parts(chunk, run.parts[node.id], env[value])
            else:
                self.cross[value].add_chunk(chunk, env[value])

    def forward_body(self, run: Run) -> None:
        for chunk in range(len(self.grids[run.axis])):
            self._collect(run, self.run_nodes(run, chunk, False), chunk)

    def run_joint(self, run: Run, is_graph: bool) -> dict[int, torch.Tensor]:
        """Run a joint; returns the tensors that carry its graph, by value."""
        env = self.run_nodes(run, 0, is_graph)
        graph: dict[int, torch.Tensor] = {}
        combined = [out for node in self._combined_at(run.stage) for out in node.outs]
        for value in [*combined, *run.exports]:
            tensor = env[value]
            info = self.program.info(value)
            parts = self.cross.get(value)
            whole = Cross(info, self.program.needs_gradient(value), whole=tensor.detach())
            if parts is not None:
                whole.parts = parts.parts
                whole.part_aliases = parts.part_aliases
            self.cross[value] = whole
            if is_graph and tensor.requires_grad:
                graph[value] = tensor
        return graph

    # -- backward -----------------------------------------------------------------------------------------

    def backward_chunk(self, run: Run, chunk: int) -> None:
        """Run a chunk again with its graph and send the gradients of what left it back through it."""
        env = self.run_nodes(run, chunk, True)
        self._send_back(run, env, chunk)

    def _send_back(self, run: Run, env: Sequence[Any], chunk: int) -> None:
        outputs: list[torch.Tensor] = []
        seeds: list[torch.Tensor] = []
        for value in run.exports:
            node = self.program.node_of(value)
            assert node is not None
            if node.id in run.parts:
                pairs = self.cross[value].part_seeds(chunk, run.parts[node.id], env[value])
            else:
                pairs = [(env[value], self.cross[value].seed(self.grids[run.axis], chunk))]
            for output, seed in pairs:
                if seed is not None and output.requires_grad:
                    outputs.append(output)
                    seeds.append(seed)
        if outputs:
            torch.autograd.backward(outputs, seeds)

    def _tail_runs(self) -> list[Run]:
        """The joints after the last body through which the gradient comes."""
        assert self.program.last_body is not None
        return [r for r in self.program.runs if not r.is_body and r.stage > self.program.last_body]

    def _seed_linear(self, run: Run, env: Sequence[Any], gradients: list[torch.Tensor]) -> None:
        """Run the tail on zeros: its gradients do not depend on values, so they are known first."""
        stand_ins: dict[int, Cross] = {}
        leaves: list[tuple[Cross, Any, torch.Tensor]] = []
        n_chunks = len(self.grids[run.axis])
        for body in self._runs_at(run.stage):
            for value in body.exports:
                node = self.program.node_of(value)
                assert node is not None
                cross = Cross(self.program.info(value), self.program.needs_gradient(value))
                if node.id in body.parts:
                    early = self.cross[value].parts if value in self.cross else {}
                    leaves += cross.zero_parts(body.parts[node.id], env[value], n_chunks, early)
                else:
                    leaves += cross.zero_whole()
                stand_ins[value] = cross
        outputs = self._run_tail(stand_ins)
        inputs = [leaf for _, _, leaf in leaves if leaf.requires_grad]
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        if not pairs or not inputs:
            return
        found = torch.autograd.grad(
            [o for o, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True
        )
        grads = dict(zip(map(id, inputs), found, strict=True))
        for cross, key, leaf in leaves:
            cross.seeds[key] = grads.get(id(leaf))
        for value, cross in stand_ins.items():
            self.zero_seeds[value] = cross

    def _run_tail(self, stand_ins: dict[int, Cross]) -> list[torch.Tensor]:
        """Run the joints of the tail on stand-ins for what the body will make; the roots."""
        made = dict(stand_ins)
        for run in self._tail_runs():
            env = self.run_nodes(run, 0, True, made)
            combined = [out for node in self._combined_at(run.stage) for out in node.outs]
            for value in [*combined, *run.exports]:
                info = self.program.info(value)
                made[value] = Cross(info, False, whole=env[value], is_graph=True)
        return [made[root].read_whole(True) for root in self.program.roots]
