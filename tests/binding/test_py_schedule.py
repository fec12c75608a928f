# SPDX-License-Identifier: Apache-2.0
"""What a step does, as the core says it: in order, with the runs and values it is done to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_py_promise import weight

import koila
from binding_kit import batch, staged_as
from koila import _core
from koila.program import Op

core: Any = _core


def staged(n_segments: int = 1) -> Any:
    x, w = koila.lazy(batch()), weight()
    loss = (x * w).exp().sin().mean().pow(2)
    return loss, staged_as([loss], False, n_segments)


def test_forward_and_back() -> None:
    """Runs without calls are joints; what the body left goes before it goes back."""
    loss, program = staged()
    runs = program["runs"]
    steps = [
        step
        for step in core.schedule(program["handle"], (True, 1, False, 1, 0, 0))[0]
        if step[2] == 0 or runs[step[1]][3] or runs[step[1]][8]
    ]
    wanted = [Op.FORWARD, Op.JOINT, Op.JOINT_BACK, Op.SEED, Op.RELEASE, Op.BACK]
    assert [op for op, *_ in steps] == wanted
    body, joint = steps[0][1], steps[1][1]
    assert steps[5][1:3] == (body, 1) and steps[2][1:3] == (joint, 1)
    assert steps[4][3] == tuple(runs[body][6]), "the parts of the mean"
    assert loss.requires_grad


def test_forward_alone() -> None:
    _, program = staged()
    ops = {op for op, *_ in core.schedule(program["handle"], (False, 1, False, 1, 0, 0))[0]}
    assert ops <= {Op.FORWARD, Op.JOINT, Op.RELEASE} and Op.FORWARD in ops


def test_segments_are_runs_of_one_step() -> None:
    _, program = staged(2)
    runs = program["runs"]
    ((_, first, n_runs, *_),) = (
        step
        for step in core.schedule(program["handle"], (True, 1, False, 1, 0, 0))[0]
        if step[0] == Op.BACK
    )
    assert [run[2] for run in runs[first : first + n_runs]] == [0, 1]
    assert runs[first][7] == runs[first][6], "handed from one to the other alone"


def sums(x: Any, w: torch.Tensor) -> Any:
    """A sum that a later body reads: light, of what there is else."""
    h = x @ w
    both = (h - h.mean(0)) + h
    heavy = both @ w
    return ((heavy - heavy.mean(0)) + both).exp().mean().pow(2)


def test_what_is_emptied_is_filled_before_its_graph_goes_back() -> None:
    loss = sums(koila.lazy(batch()), torch.eye(batch().shape[1]).double().requires_grad_())
    program = staged_as([loss], False, 1)
    for n_light in (0, 1):
        steps, lights = core.schedule(program["handle"], (True, 1, False, 1, n_light, 0))
        emptied = [step[3] for step in steps if step[0] == Op.EMPTY]
        needed = [step[7] for step in steps if step[0] == Op.BACK and step[7]]
        assert len(emptied) == len(lights) == n_light
        assert emptied == [(value,) for value in lights] and set(needed) == set(emptied)
        assert all(needs == () for _, needs in lights.values())


def test_what_is_no_program() -> None:
    with pytest.raises(TypeError, match="not a program"):
        core.schedule(None, (True, 1, False, 1, 0, 0))
    _, program = staged()
    with pytest.raises(TypeError, match="homes must be"):
        core.schedule(program["handle"], [True, 1, False])
