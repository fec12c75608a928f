# SPDX-License-Identifier: Apache-2.0
"""requires_grad_() of a lazy: what comes after it has a gradient, and nothing else runs for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from allocations import Allocations
from limits import there
from oracle import Lazy, assert_same_story, eager, gradients

N_ROWS = 11
Step = Callable[[nn.Sequential, Tensor, Tensor], Any]


def fgsm(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    x.requires_grad_()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    assert x.grad is not None and x.is_leaf
    return loss, x.grad, model((x + 0.1 * x.grad.sign()).detach())


def set_by_name(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    x.requires_grad = True
    F.cross_entropy(model(x), y).backward()
    return x.grad


def detached(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """It has the memory of the batch; beside a loss that waits."""
    clean = F.cross_entropy(model(x), y)
    leaf = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(leaf), y), leaf)
    moved = (leaf + 0.1 * gradient.sign()).detach()
    (clean + F.cross_entropy(model(moved), y)).backward()
    return clean, gradient, x.requires_grad


def projected(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """Projected gradient descent, beside a loss that waits."""
    clean = model(x)
    moved, losses = x.clone().detach(), []
    for _ in range(3):
        moved.requires_grad_(True)
        loss = F.cross_entropy(model(moved), y)
        (gradient,) = torch.autograd.grad(loss, [moved])
        moved = moved.detach() + 0.05 * gradient.sign()
        moved = torch.min(torch.max(moved, x - 0.1), x + 0.1).clamp(-3, 3)
        losses.append(loss)
    (F.cross_entropy(clean, y) + F.cross_entropy(model(moved), y)).backward()
    return losses, moved


def free(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """What is added to the batch is moved on, and is a leaf again."""
    delta, losses = torch.zeros_like(x), []
    for _ in range(3):
        delta.requires_grad_()
        loss = F.cross_entropy(model(x + delta), y)
        model.zero_grad()
        loss.backward()
        assert delta.grad is not None
        delta = (delta.detach() + 0.02 * delta.grad.sign()).clamp(-0.1, 0.1)
        losses.append(loss)
    return losses, delta


def one_delta(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """One leaf, written in place after each of its gradients."""
    delta = torch.zeros_like(x, requires_grad=True)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(x + delta), y)
        loss.backward()
        assert delta.grad is not None
        with torch.no_grad():
            delta.add_(delta.grad.sign(), alpha=0.02).clamp_(-0.1, 0.1)
        delta.grad = None
        losses.append(loss)
    return losses, delta


def moved_by_data(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """A leaf is given other numbers, beside a loss that waits."""
    clean = F.cross_entropy(model(x), y)
    moved, losses = x.clone().detach().requires_grad_(), []
    for _ in range(3):
        loss = F.cross_entropy(model(moved), y)
        (gradient,) = torch.autograd.grad(loss, moved)
        moved.data = torch.clamp(moved.data + 0.02 * gradient.sign(), -3, 3)
        losses.append(loss)
    (clean + F.cross_entropy(model(moved.detach()), y)).backward()
    return losses, moved, clean


def virtual(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """Virtual adversarial training: the direction that changes the scores most."""
    with torch.no_grad():
        wanted = model(x).softmax(1)
    step = torch.randn_like(x)
    step = 0.1 * F.normalize(step, dim=1)
    step.requires_grad_()
    apart = F.kl_div(model(x + step).log_softmax(1), wanted, reduction="batchmean")
    (gradient,) = torch.autograd.grad(apart, step)
    moved = x + F.normalize(gradient, dim=1).detach()
    loss = F.cross_entropy(model(x), y)
    loss = loss + F.kl_div(model(moved).log_softmax(1), wanted, reduction="batchmean")
    loss.backward()
    return loss, gradient


def of_a_slice(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    scores = model(x)
    half = x[:6].clone().detach()
    half.requires_grad = True
    F.cross_entropy(model(half), y[:6]).backward()
    F.cross_entropy(scores, y).backward()
    return scores, half.grad


def in_between(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """A network in two parts, with a leaf between them."""
    leaf = model[0](x).detach().requires_grad_()
    F.cross_entropy(model[1:](leaf), y).backward()
    model[0](x).backward(leaf.grad)
    return leaf.grad


def switched(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """Each call sees what it was when it was made."""
    before = x * 2
    x.requires_grad_()
    first = model(x + before).sum()
    x.requires_grad_(False)
    second = model(x).square().sum()
    x.requires_grad_()
    (first + second + model(x).exp().sum()).backward()
    return before, first, second, x.grad


def hooked(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    seen: list[Tensor] = []
    scores = model(x)
    x.requires_grad_()
    x.register_hook(lambda gradient: seen.append(gradient.clone()))
    (scores.mean() + F.cross_entropy(model(x), y)).backward()
    return seen, x.grad


def written_later(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """What shares its memory shows what is written into that."""
    h = x * 1
    leaf = h.detach()
    leaf.requires_grad_()
    h.mul_(2)
    loss = F.cross_entropy(model(h), y)
    loss.backward()
    return h, leaf, loss


def integrated(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    total = torch.zeros_like(x)
    for k in range(1, 4):
        point = (x * (k / 3)).detach().requires_grad_()
        score = model(point).gather(1, y[:, None]).sum()
        total = total + torch.autograd.grad(score, point)[0]
    return total * x


STEPS: list[Step] = [
    fgsm,
    set_by_name,
    detached,
    projected,
    free,
    one_delta,
    moved_by_data,
    virtual,
    of_a_slice,
    in_between,
    switched,
    hooked,
    written_later,
    integrated,
]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("has_dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_require_grad(step: Step, chunks: int, has_dropout: bool) -> None:
    """The numbers and gradients are eager's, and nothing runs whole."""

    def story(lazy: Lazy) -> Any:
        dropout = [nn.Dropout(0.3)] if has_dropout else []
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *dropout, nn.Linear(16, 5)).double()
        plain = torch.randn(N_ROWS, 6, dtype=torch.float64)
        seen = step(model, *lazy(plain, torch.randint(5, (N_ROWS,)), batch=0))
        return seen, gradients(model), plain.requires_grad, plain.grad

    assert_same_story(story, chunks)


def test_a_view_that_is_held() -> None:
    """A view of a leaf says what the leaf says, for it was taken with a graph: so it is live."""
    x = torch.randn(4, 6)
    with koila.config(chunks=2):
        batch = koila.lazy(x)
        view, apart = batch.view(4, 2, 3), batch.detach()
        batch.requires_grad_()
        assert view.requires_grad and not apart.requires_grad


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_cannot_is_torchs_error(chunks: int) -> None:
    with koila.config(chunks=chunks):
        x, y = koila.lazy(torch.randn(4, 6), torch.randint(5, (4,)), batch=0)
        with pytest.raises(RuntimeError, match="floating point"):
            y.requires_grad_()
        with pytest.raises(RuntimeError, match="leaf variables"):
            nn.Linear(6, 5)(x).requires_grad_(False)
        with pytest.raises(RuntimeError, match="leaf variables"):
            nn.Linear(6, 5)(x).requires_grad = False
        with pytest.raises((TypeError, RuntimeError)):
            x.requires_grad = "yes"  # type: ignore[assignment]


@pytest.mark.parametrize("step", [fgsm, detached, projected, switched], ids=lambda s: s.__name__)
def test_a_limit_is_kept(step: Step) -> None:
    def peak(lazy: Lazy) -> int:
        torch.manual_seed(0)
        wide = nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)
        x, y = lazy(torch.randn(1024, 6), torch.randint(5, (1024,)), batch=0)
        model, allocations = nn.Sequential(*wide), Allocations()
        with allocations:
            allocations.count(model, x, y)
        with allocations:
            step(model, x, y)
        return allocations.peak - sum(allocations.before.values())

    limit = int(0.5 * peak(eager))
    with koila.config(memory_limit=there() + limit):
        used = peak(koila.lazy)
    assert used <= limit
