"""The joints after the last body, where their gradients do not depend on values: they are run on
stand-ins, so that the gradients of what the body leaves are known before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from koila.cross import Cross
from koila.program import Run

if TYPE_CHECKING:
    from koila.replay import Replay


def seed(replay: Replay, run: Run, env: Sequence[Any], gradients: list[torch.Tensor]) -> None:
    """Give what the last body leaves its gradients, seen the values of its first chunk.

    The tail runs on zeros; only their sizes and types matter.
    """
    program = replay.program
    stand_ins: dict[int, Cross] = {}
    leaves: list[tuple[Cross, Any, torch.Tensor]] = []
    for value in run.exports:
        node = program.node_of(value)
        assert node is not None
        cross = Cross(program.info(value), program.needs_gradient(value), replay.fresh)
        if node.id in run.parts:
            early = replay.cross[value].parts
            leaves += cross.zero_parts(
                run.parts[node.id], env[value], replay.grids[run.axis], early
            )
        else:
            leaves += cross.zero_whole()
        stand_ins[value] = cross
    outputs = _run(replay, stand_ins)
    inputs = [leaf for _, _, leaf in leaves if leaf.requires_grad]
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output is not None and output.requires_grad
    ]
    if not pairs or not inputs:
        return
    found = torch.autograd.grad(
        [output for output, _ in pairs],
        inputs,
        [gradient for _, gradient in pairs],
        allow_unused=True,
    )
    grads = dict(zip(map(id, inputs), found, strict=True))
    for cross, key, leaf in leaves:
        cross.seeds[key] = grads.get(id(leaf))
    for value, cross in stand_ins.items():
        replay.cross[value].seeds.update(cross.seeds)


def _run(replay: Replay, stand_ins: dict[int, Cross]) -> list[torch.Tensor | None]:
    """Run the joints of the tail; the roots, None for one that is made before the tail.

    Only what gradients go through: all else in the tail is made from values of the body, so it is
    in no gradient, and zeros in their place may have no meaning.
    """
    program = replay.program
    made = dict(stand_ins)
    for run in program.runs:
        assert program.last_body is not None
        if run.is_body or run.stage < program.last_body:
            continue
        part = program.gradient_part(run, made)
        for value in {program.imports[number].value for number in part.imports}:
            if not (value in made or value in replay.cross or program.is_leaf(value)):
                info = program.info(value)
                made[value] = Cross(info, False, replay.fresh, replay.zeros(value, info.shape))
        env = replay.run_nodes(part, 0, True, made)
        for value in [out for node in part.combined for out in node.outs] + part.exports:
            made[value] = Cross(program.info(value), False, replay.fresh, env[value], True)
    return [made[root].read_whole(True) if root in made else None for root in program.roots]
