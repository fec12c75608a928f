# SPDX-License-Identifier: Apache-2.0
"""What a step does, as the core says it: in order, with the runs and values it is done to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_py_promise import weight

import koila
from binding_kit import batch, staged_as
from koila import _core
from koila.staged.schedule import Graph, Op, Policy

core: Any = _core


def staged(n_segments: int = 1) -> Any:
    x, w = koila.lazy(batch()), weight()
    loss = (x * w).exp().sin().mean().pow(2)
    return loss, staged_as([loss], False, n_segments)


def policy(is_graph: bool, policies: bytes = b"") -> tuple[Any, ...]:
    return is_graph, policies, 1, 0, False, 0


def test_instructions_are_those_of_the_core() -> None:
    text = (Path(__file__).parents[2] / "koila_c/core/schedule.def").read_text()
    assert [op.name for op in Op] == re.findall(r"^KL_INSTRUCTION\((\w+)", text, re.MULTILINE)


def test_forward_and_back() -> None:
    """Runs without calls are barriers; a body's results are freed before its backward."""
    loss, program = staged()
    runs = program["runs"]
    steps, n_forward, _ = core.schedule(program["handle"], policy(True))
    assert {step[0] for step in steps[n_forward:]} >= {Op.BARRIER_BACK, Op.SEED, Op.BACK}
    steps = [
        step
        for step in steps
        if step[3] == 0 or step[0] == Op.SEED or runs[step[2]][3] or runs[step[2]][8]
    ]
    once_more = [Op.LOOP, Op.RUN, Op.BACK, Op.TAKE, Op.END]
    wanted = [Op.STORE, Op.LOOP, Op.RUN, Op.END, Op.BARRIER, Op.BARRIER_BACK, Op.SEED, Op.FREE]
    assert [op for op, *_ in steps] == wanted + once_more
    body, barrier = steps[0][2], steps[4][2]
    assert steps[8][2:4] == (body, 1) and steps[5][2:4] == (barrier, 1)
    assert steps[7][4] == tuple(runs[body][6]), "the parts of the mean"
    graphs = [Graph(step[1]) for step in steps if step[0] == Op.RUN]
    assert graphs == [Graph.NONE, Graph.NOW]
    assert loss.requires_grad


def test_forward_alone() -> None:
    _, program = staged()
    steps, n_forward, _ = core.schedule(program["handle"], policy(False))
    ops = {op for op, *_ in steps}
    assert ops <= {Op.STORE, Op.LOOP, Op.RUN, Op.END, Op.BARRIER, Op.FREE} and Op.RUN in ops
    assert n_forward == len(steps)


def test_segments_are_runs_of_one_loop() -> None:
    _, program = staged(2)
    runs = program["runs"]
    ((_, _, first, n_runs, *_),) = (
        step
        for step in core.schedule(program["handle"], policy(True))[0]
        if step[0] == Op.LOOP and step[1] == Graph.NOW
    )
    assert [run[2] for run in runs[first : first + n_runs]] == [0, 1]
    assert runs[first][7] == runs[first][6], "handed from one to the other alone"


def sums(x: Any, w: torch.Tensor) -> Any:
    """A later body reads the sum `both`, which cheap calls can recompute from kept values."""
    h = x @ w
    both = (h - h.mean(0)) + h
    heavy = both @ w
    return ((heavy - heavy.mean(0)) + both).exp().mean().pow(2)


def test_what_is_emptied_is_filled_before_its_graph_goes_back() -> None:
    loss = sums(koila.lazy(batch()), torch.eye(batch().shape[1]).double().requires_grad_())
    program = staged_as([loss], False, 1)
    n_left = sum(len(run[6]) for run in program["runs"] if run[0] % 2 == 1)
    for n_cheap in (0, 1):
        policies = bytes([Policy.REMATERIALIZE if n_cheap else Policy.KEEP] * n_left)
        steps, _, cheap_values = core.schedule(program["handle"], policy(True, policies))
        loops = [step[0] in (Op.LOOP, Op.END) for step in steps]
        in_loop = [sum(loops[: i + 1]) % 2 == 1 for i in range(len(steps))]
        emptied = [
            step[4]
            for step, is_in in zip(steps, in_loop, strict=True)
            if step[0] == Op.FREE_STORAGE and not is_in
        ]
        needed = [step[4] for step in steps if step[0] == Op.REMATERIALIZE]
        assert len(emptied) == len(cheap_values) == n_cheap
        assert emptied == [(value,) for value in cheap_values] and set(needed) == set(emptied)
        assert all(needs == () for _, needs in cheap_values.values())


def test_what_is_no_program() -> None:
    with pytest.raises(TypeError, match="not a program"):
        core.schedule(None, policy(True))
    _, program = staged()
    with pytest.raises(TypeError, match="policy must be"):
        core.schedule(program["handle"], [True, b"", 1, 0])
