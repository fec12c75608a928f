# SPDX-License-Identifier: Apache-2.0
"""What the script holds beside the loss, while its backward runs in chunks.

Calls that no gradient flows through record no graph: it would keep what they save until the
backward of the chunk. And gradients of a value that is held are freed chunk by chunk, as others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from allocations import Allocations
from koila.memory.estimates import estimate
from koila.planning import planner, plans
from koila.staged.program import Program
from limits import there
from oracle import Lazy, assert_same_story, eager, gradients

N_ROWS, WIDTH = 4096, 64
Step = Callable[[list[nn.Sequential], Tensor], Any]


def other_head(parts: list[nn.Sequential], x: Tensor) -> Tensor:
    trunk, head, other = parts
    h = trunk(x)
    loss, held = head(h).pow(2).mean(), other(h)
    loss.backward()
    return held


def made_before(parts: list[nn.Sequential], x: Tensor) -> Tensor:
    trunk, head, other = parts
    h = trunk(x)
    held = other(h)
    head(h).pow(2).mean().backward()
    return held


def deeper(parts: list[nn.Sequential], x: Tensor) -> Tensor:
    """What is held is computed from the output that the loss reads."""
    trunk, head, other = parts
    out = head(trunk(x))
    held = other(out)
    out.pow(2).mean().backward()
    return held


def two_losses(parts: list[nn.Sequential], x: Tensor) -> Tensor:
    trunk, head, other = parts
    h = trunk(x)
    loss, held = head(h).pow(2).mean(), other(h).pow(2)
    loss.backward(retain_graph=True)
    held.mean().backward()
    return held.detach()


def written(parts: list[nn.Sequential], x: Tensor) -> Tensor:
    """Its first layers' results are written in place."""
    trunk, head, other = parts
    h = trunk(x)
    held = other[1:](other[0](h).relu_().mul_(2))
    head(h).pow(2).mean().backward()
    return held


def of_one_part(parts: list[nn.Sequential], x: Tensor) -> Any:
    """No gradient flows through the trunk, though its weights could get one."""
    trunk, head, other = parts
    h = trunk(x)
    held = other(h)
    return held, torch.autograd.grad(head(h).pow(2).mean(), list(head.parameters()))


def of_a_root(parts: list[nn.Sequential], x: Tensor) -> Any:
    """The loss is the root of a mean, so bodies run once more in backward."""
    trunk, head, other = parts
    h = trunk(x)
    held = other(h)
    head(h).pow(2).mean().sqrt().backward()
    return held


def between_norms(parts: list[nn.Sequential], x: Tensor) -> Any:
    """Batch norms cut it into bodies; the last one reads what is held of the first one."""
    _, head, deep = parts
    first = F.batch_norm(deep(x), None, None, training=True)
    second = F.batch_norm(head(first), None, None, training=True)
    (second * first).mean().backward()
    return first


STEPS: list[Step] = [
    other_head, made_before, deeper, two_losses, written, of_one_part, of_a_root, between_norms,
]  # fmt: skip


def build(dtype: torch.dtype) -> list[nn.Sequential]:
    def layers(n: int) -> nn.Sequential:
        pairs = [(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(n)]
        return nn.Sequential(*[layer for pair in pairs for layer in pair]).to(dtype)

    torch.manual_seed(0)
    return [layers(2), layers(2), layers(6)]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 11])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_same_numbers(step: Step, chunks: int) -> None:
    def story(lazy: Lazy) -> Any:
        parts = build(torch.float64)
        seen = step(parts, lazy(torch.randn(11, WIDTH, dtype=torch.float64)))
        held = seen[0] if isinstance(seen, tuple) else seen
        return torch.tensor(held.tolist()), seen, [gradients(part) for part in parts]

    assert_same_story(story, chunks)


def measure(step: Step, lazy: Lazy, memory: Allocations) -> Any:
    parts, x = build(torch.float32), torch.randn(N_ROWS, WIDTH)
    memory.count([list(part.parameters()) for part in parts], x)
    with memory:
        x = lazy(x)
    with memory:
        return step(parts, x)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_bytes(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """In four chunks a step takes what is predicted, within 2 %."""
    memory, needed, make_plan = Allocations(), list[float](), planner.plan

    def plan(program: Program, is_graph: bool, is_final: bool = True) -> plans.Plan:
        made = make_plan(program, is_graph, is_final)
        memory.mark()
        predicted = estimate(program.cut_for(made.strategy), is_graph, made.strategy)
        needed.append(predicted.peak(-(-predicted.rows // made.n_chunks))[0])
        return made

    monkeypatch.setattr(planner, "plan", plan)
    with koila.config(chunks=4):
        measure(step, koila.lazy, memory)
    assert koila.report().n_chunks == 4
    predicted = max(map(sum, zip(memory.at_marks, needed, strict=True)))
    assert abs(memory.peak - predicted) <= 0.02 * memory.peak, (memory.peak, predicted)


@pytest.mark.parametrize("share", [0.5, 0.3])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_limit_is_kept(step: Step, share: float) -> None:
    whole = Allocations()
    measure(step, eager, whole)
    allowed, memory = share * whole.peak, Allocations()
    with koila.config(memory_limit=int(there() + allowed)):
        measure(step, koila.lazy, memory)
    assert koila.report().n_chunks > 1
    assert memory.peak <= allowed


class Penalized(nn.Module):
    """The gradient of the input, of which a loss is made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.last(self.first(x).tanh())
        (found,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (found.norm(dim=1) - 1).pow(2).mean()


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 11])
def test_derivatives_through_calls_that_get_no_gradient(chunks: int) -> None:
    """The loss's gradient does not flow through the first layer, but that of its input does."""

    def story(lazy: Lazy) -> Any:
        torch.manual_seed(0)
        model = Penalized()
        loss = model(lazy(torch.randn(11, WIDTH, dtype=torch.float64)))
        return torch.autograd.grad(loss, [model.last.weight])

    assert_same_story(story, chunks)


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 11])
def test_casts_of_a_shared_weight(chunks: int) -> None:
    """What casts a weight first under autocast records no graph; what reads it next does."""

    def story(lazy: Lazy) -> Any:
        torch.manual_seed(0)
        layer, x = nn.Linear(WIDTH, WIDTH), lazy(torch.randn(11, WIDTH))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            held = layer(x * 2)
            loss = layer(x).float().pow(2).mean()
        loss.backward()
        return torch.tensor(held.tolist()), gradients(layer)

    assert_same_story(story, chunks, tolerance=2e-2)
