# SPDX-License-Identifier: Apache-2.0
"""The cost of a plan grows as the program does. Counted are the lines of koila's that run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import koila
from koila.planning import planner
from koila.staged import cache
from koila.staged.program import Program
from limits import there

HOME = str(Path(koila.__file__).parent)


def elementwise(x: Tensor, w: Tensor, n: int) -> Tensor:
    for _ in range(n):
        x = torch.tanh(x) * w
    return x.sum()


def linear(x: Tensor, w: Tensor, n: int) -> Tensor:
    weight = torch.diag_embed(w)
    for _ in range(n):
        x = torch.nn.functional.linear(x, weight, w)
    return x.sum()


def written(x: Tensor, w: Tensor, n: int) -> Tensor:
    for _ in range(n):
        x = (x * w).relu_()
        x[:, 0] += 1
    return x.sum()


def barriers(x: Tensor, w: Tensor, n: int) -> Tensor:
    for _ in range(n):
        x = x * w - x.mean(0)
        x /= 2
    return x.sum()


def n_lines(run: Callable[[], Any]) -> int:
    """How many lines of koila's own run in a call."""
    n = 0

    def line(frame: Any, event: str, arg: Any) -> Any:
        nonlocal n
        n += event == "line"
        return line

    def call(frame: Any, event: str, arg: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(HOME) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        run()
    finally:
        sys.settrace(before)
    return n


def cost(program: Callable[[Tensor, Tensor, int], Tensor], n: int) -> int:
    w = torch.linspace(0.9, 1.1, 3, requires_grad=True)
    loss = program(koila.lazy(torch.ones(8, 3)), w, n)
    with koila.config(memory_limit="1GiB"):
        lines = n_lines(lambda: planner.plan(Program([loss]), True))
    koila._core.forget()
    return lines


@pytest.mark.parametrize("program", [elementwise, linear, written, barriers])
def test_cost_is_linear(program: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    few, many = cost(program, 40), cost(program, 160)
    assert many < 4.5 * few, f"{few} lines for a fourth of the program, {many} for all of it"


@pytest.mark.parametrize("program", [elementwise, linear])
def test_no_call_is_described_to_plan(
    program: Callable[[Tensor, Tensor, int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ways are measured and counted by the core: calls, and what they read, are described when they
    are to run."""
    described: list[str] = []
    facts_of = koila._core.facts_of

    def noting(handle: object, what: str) -> Any:
        described.append(what)
        return facts_of(handle, what)

    monkeypatch.setattr(koila._core, "facts_of", noting)
    monkeypatch.setattr(cache, "_caches", [])
    w = torch.linspace(0.9, 1.1, 64, requires_grad=True)
    loss = program(koila.lazy(torch.ones(64, 64)), w, 40)
    with koila.config(memory_limit=there() + 40 * 64 * 64):
        staged = Program([loss])
        assert planner.plan(staged, True).n_chunks > 1
        assert not {"nodes", "imports"}.intersection(described)
        assert staged.node(0).id == 0 and described[-1] == "nodes"
    koila._core.forget()
