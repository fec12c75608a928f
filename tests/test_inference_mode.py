# SPDX-License-Identifier: Apache-2.0
"""What is recorded outside inference mode is no inference tensor, wherever it is read or
written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from koila.running import freed_graphs
from oracle import Lazy, Story, assert_same_story
from stories import each_split_further, rows


def weight() -> torch.Tensor:
    return torch.randn(4, 4, dtype=torch.float64, requires_grad=True)


@each_split_further
def test_written_in_it(chunks: int | None) -> None:
    def story(lazy: Lazy) -> Any:
        x, w = lazy(rows(4)), weight()
        h, g = x @ w, (x * 2) @ w
        with torch.inference_mode():
            h[:2] = 0.5
            g.masked_fill_(x > 0, x.mean())
        (h.sum() + g.pow(2).sum()).backward()
        return h, g, w.grad

    assert_same_story(story, chunks)


@each_split_further
def test_read_in_it(chunks: int | None) -> None:
    def story(lazy: Lazy) -> Any:
        x, w = lazy(rows(4)), weight()
        h = x @ w
        with torch.inference_mode():
            mean, plain = h.mean().item(), torch.zeros(4, dtype=torch.float64)
            plain.add_(h[0])
        (h * 2).pow(2).sum().backward()
        return h, mean, plain.tolist(), w.grad, h.is_inference()

    assert_same_story(story, chunks)


@each_split_further
def test_backward_in_it_leaves_nothing_behind(chunks: int | None) -> None:
    """Weights change in it, and the numbers that are left are as good as others."""

    def story(lazy: Lazy) -> Any:
        x, w = lazy(rows(4)), weight()
        h = x @ w
        _ = h.sum().item()
        with torch.no_grad():
            w -= 0.1
        with torch.inference_mode():
            inside = torch.linalg.cond(h.detach()[:4]).tolist()
        other = x @ w
        other.sum().backward()
        return inside, other, w.grad, h.sum().item()

    assert_same_story(story, chunks)


def test_spent_numbers_are_no_inference_tensors() -> None:
    number = torch.ones(2, dtype=torch.float64)
    with torch.inference_mode():
        assert not freed_graphs.hung_on(freed_graphs.OfFreedGraph, number, ()).is_inference()


@each_split_further
def test_lazies_that_were_made_in_it_are_used_again(chunks: int | None) -> None:
    """An evaluation, and then a step with a checkpoint, which keeps what it is given."""

    def story(lazy: Lazy) -> Any:
        x, w = lazy(rows(4)), weight()
        with torch.inference_mode():
            made = [(x * i).sum() for i in range(300)]
        seen = [made[0].item(), made[-1].item()]
        del made
        h = checkpoint(lambda a: (a @ w).tanh(), x * 2, use_reentrant=False)
        h.sum().backward()
        return seen, w.grad

    assert_same_story(story, chunks)


def after_the_block(use: str) -> Story:
    """What is done after the block with values that were recorded in it, each with its error."""

    def story(lazy: Lazy) -> Any:
        x, w = lazy(rows(4)), weight()
        outside = x * 2
        with torch.inference_mode():
            v = x @ w
            names = {"v": v, "part": v[:, 1:], "total": v.sum(0), "of_outside": outside[:, :2]}
            env = {**names, "w": w, "x": x, "torch": torch}
        kinds = [one.is_inference() for one in (*names.values(), outside)]
        error = ""
        try:
            exec(f"made = {use}", env)
            env["made"].sum().backward()
        except RuntimeError as caught:
            error = str(caught)[:60]
        return kinds, error, w.grad, *names.values()

    return story


USES = [
    "v * w[0]",
    "part * w[0, 1:]",
    "total * w[0]",
    "of_outside * w[0, :2]",
    "v.clone() * w[0]",
    "v + w[0]",
    "v.add_(1.0)",
    "part.mul_(2.0)",
    "v.detach() @ w",
    "torch.cat([v, x]) @ w",
]


@pytest.mark.parametrize("use", USES)
@each_split_further
def test_made_in_it(chunks: int | None, use: str) -> None:
    """Inference tensors are refused where eager refuses them."""
    assert_same_story(after_the_block(use), chunks)


def test_some_of_these_are_refused() -> None:
    errors = [after_the_block(use)(lambda x: x)[1] for use in USES]
    assert sum("Inference tensors cannot be saved" in error for error in errors) == 4
    assert sum("Inplace update to inference tensor" in error for error in errors) == 2
