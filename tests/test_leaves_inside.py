# SPDX-License-Identifier: Apache-2.0
"""A leaf of autograd's graph that a script makes in mid-model: `h.detach().requires_grad_()`.

Its gradient can be asked for only while a Python object is left of it. After that chunks make it
for their rows, and no gradient of it is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from allocations import Allocations
from limits import there
from oracle import Lazy, assert_same_story, cut, eager, gradients

N_ROWS = 11
Step = Callable[[nn.Sequential, Tensor, Tensor], Any]


def looks(leaf: Tensor, made: Tensor) -> tuple[Any, ...]:
    """What a leaf and a value made of it say of autograd's graph."""
    assert leaf.grad_fn is None and made.grad_fn is not None
    return leaf.is_leaf, leaf.requires_grad, made.is_leaf, made.requires_grad, leaf.grad


def scores_of(model: nn.Sequential, h: Tensor, leaf: Tensor) -> Tensor:
    return model[2:](h + leaf * 1.5 + leaf.exp())


def zeros(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """As transformers' MRA does in place of attention."""
    h = model[:2](x)
    leaf = torch.zeros_like(h).requires_grad_()
    scores = scores_of(model, h, leaf)
    seen = looks(leaf, scores)
    del leaf
    loss = F.cross_entropy(scores, y)
    loss.backward()
    return scores, loss, seen


def ready_made(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    loss = F.cross_entropy(scores_of(model, h, torch.ones_like(h, requires_grad=True)), y)
    loss.backward()
    return loss


def of_the_batch(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    loss = F.cross_entropy(scores_of(model, h, F.pad(x, (0, 10)).detach().requires_grad_()), y)
    loss.backward()
    return loss


def cut_in_two(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """Nothing before the leaf gets a gradient."""
    loss = F.cross_entropy(model[2:](model[:2](x).detach().requires_grad_()), y)
    loss.backward()
    return loss


def held(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    leaf = torch.ones_like(h).requires_grad_()
    scores = scores_of(model, h, leaf)
    F.cross_entropy(scores, y).backward()
    return scores, leaf, leaf.grad, looks(leaf, leaf * 2)


def held_by_a_module(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    holder = nn.Module()
    holder.leaf = h.detach().clone().requires_grad_()
    F.cross_entropy(scores_of(model, h, holder.leaf), y).backward()
    return holder.leaf, holder.leaf.grad


def as_a_parameter(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    leaf = nn.Parameter(model[:2](x).detach())
    loss = F.cross_entropy(scores_of(model, model[:2](x), leaf), y)
    loss.backward()
    return leaf, leaf.grad, loss


def held_after_the_forward(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    leaf = torch.ones_like(h).requires_grad_()
    loss = F.cross_entropy(scores_of(model, h, leaf), y)
    seen = loss.item()
    del leaf
    loss.backward()
    return loss, seen


def held_in_the_first_of_two(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    leaf = torch.ones_like(h).requires_grad_()
    loss = F.cross_entropy(scores_of(model, h, leaf), y)
    loss.backward(retain_graph=True)
    assert leaf.grad is not None
    first = leaf.grad.clone()
    del leaf
    loss.backward()
    return loss, first


def twice(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    leaf = torch.ones_like(h).requires_grad_()
    loss = F.cross_entropy(scores_of(model, h, leaf), y)
    del leaf
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def one_of_two(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    one, other = torch.ones_like(h).requires_grad_(), torch.zeros_like(h).requires_grad_()
    loss = F.cross_entropy(scores_of(model, h, one * other + one), y)
    del other
    loss.backward()
    return one.grad, loss


def hooked(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """A hook keeps a leaf's gradient in sight when the leaf is gone."""
    h, seen = model[:2](x), list[Tensor]()
    leaf = torch.ones_like(h).requires_grad_()
    leaf.register_hook(lambda gradient: seen.append(gradient.clone()))
    loss = F.cross_entropy(scores_of(model, h, leaf), y)
    del leaf
    loss.backward()
    return seen, loss


def hooked_after(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h, seen = model[:2](x), list[Tensor]()
    leaf = torch.ones_like(h).requires_grad_()
    loss = F.cross_entropy(scores_of(model, h, leaf), y)
    assert leaf.is_leaf
    leaf.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.clone()))
    del leaf
    loss.backward()
    return seen, loss


def hook_behind(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """The hook is on a value that is computed from the leaf and from nothing else."""
    h, seen = model[:2](x), list[Tensor]()
    made = torch.ones_like(h).requires_grad_() * 3
    made.register_hook(lambda gradient: seen.append(gradient.clone()))
    loss = F.cross_entropy(scores_of(model, h, made.sin()), y)
    loss.backward()
    return seen, loss


def retained_behind(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    made = torch.ones_like(h).requires_grad_() * 3
    made.retain_grad()
    loss = F.cross_entropy(scores_of(model, h, made.sin()), y)
    loss.backward()
    return made.grad, loss


def node_hook(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h, seen = model[:2](x), list[Tensor]()
    made = torch.ones_like(h).requires_grad_() * 3
    assert made.grad_fn is not None
    made.grad_fn.register_prehook(lambda given: seen.append(given[0].clone()))
    loss = F.cross_entropy(scores_of(model, h, made), y)
    loss.backward()
    return seen, loss


def the_leafs_node(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """The node that accumulates its gradient keeps a leaf alive, and leads to it."""
    h = model[:2](x)
    made = torch.ones_like(h).requires_grad_() * 3
    assert made.grad_fn is not None
    node: Any = made.grad_fn.next_functions[0][0]
    loss = F.cross_entropy(scores_of(model, h, made), y)
    loss.backward()
    return node.variable.grad, loss


def nothing_else(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """No gradient of the loss reaches anything."""
    leaf = x.clone().requires_grad_()
    loss = (leaf.exp() * leaf).mean().sqrt()
    del leaf
    loss.backward()
    return loss, loss.requires_grad, model[0].weight.grad


def no_weight(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """Beside a loss of the weights."""
    made = (x * 2).requires_grad_().exp()
    aside = made.square().mean()
    loss = F.cross_entropy(model(x), y) + aside
    loss.backward()
    return loss, aside, made.requires_grad


def named(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    leaf = torch.ones_like(h).requires_grad_()
    loss = F.cross_entropy(scores_of(model, h, leaf), y)
    first = torch.autograd.grad(loss, leaf, retain_graph=True)
    loss.backward(inputs=[leaf], retain_graph=True)
    del leaf
    loss.backward(inputs=[model[0].weight])
    return first, loss


def second_derivative(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """The penalty of a gradient, of a leaf; beside one that is gone."""
    leaf = (x * 2).requires_grad_()
    gone = torch.ones_like(x).requires_grad_()
    energy = model(leaf + gone * x).sum()
    del gone
    (gradient,) = torch.autograd.grad(energy, leaf, create_graph=True)
    loss = (gradient.norm(dim=1) - 1).square().mean() + F.cross_entropy(model(x), y)
    loss.backward()
    return loss, gradient, leaf.grad


def penalty_of_a_gone_leaf(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    def penalty() -> Tensor:
        leaf = (x * 2).requires_grad_()
        (gradient,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
        return (gradient.norm(dim=1) - 1).square().mean()

    loss = penalty() + F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def in_a_checkpoint(is_reentrant: bool) -> Step:
    def body(model: nn.Sequential, h: Tensor) -> Tensor:
        return scores_of(model, h, torch.ones_like(h).requires_grad_() * 2)

    def step(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
        scores = checkpoint(body, model, model[:2](x), use_reentrant=is_reentrant)
        loss = F.cross_entropy(scores, y)
        loss.backward()
        return loss, scores

    step.__name__ = f"in_a_{'reentrant_' * is_reentrant}checkpoint"
    return step


def behind_a_mean(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """It is read by a later part of the step than the one that makes it."""
    h = model[:2](x)
    leaf = (h.detach() * 2).requires_grad_()
    made = leaf.exp()
    del leaf
    loss = F.cross_entropy(scores_of(model, h - h.mean(0), made / made.mean(0)), y)
    loss.backward()
    return loss


def read_before(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """Calls have read what becomes a leaf, and the memory that it is of."""
    h = model[:2](x)
    wide = h * 2
    read, leaf = wide + 1, wide.detach()
    del wide
    leaf.requires_grad_()
    loss = F.cross_entropy(scores_of(model, h + read, leaf), y)
    with torch.no_grad():
        leaf.mul_(0.5)
    loss = loss + F.cross_entropy(scores_of(model, h, leaf), y)
    loss.backward()
    return leaf, leaf.grad, loss


def of_no_dims(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    scale = model(x).mean().detach().requires_grad_()
    loss = F.cross_entropy(model(x * scale), y)
    loss.backward()
    return scale, scale.grad, loss


def without_grad(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    with torch.no_grad():
        leaf = torch.ones_like(h).requires_grad_()
    loss = F.cross_entropy(scores_of(model, h, leaf), y)
    seen = looks(leaf, leaf * 2)
    del leaf
    loss.backward()
    return loss, seen


def written(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    leaf = torch.ones_like(h).requires_grad_()
    with torch.no_grad():
        leaf.mul_(3)
    loss = F.cross_entropy(scores_of(model, h, leaf), y)
    loss.backward()
    return leaf, leaf.grad, loss


def view_written(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """The leaf is gone, and a view of it is written."""
    h = model[:2](x)
    view = torch.ones_like(h).requires_grad_()[:, :3]
    with torch.no_grad():
        view.mul_(3)
    seen = view.requires_grad, view.is_leaf
    loss = F.cross_entropy(scores_of(model, h, F.pad(view, (0, 13))), y)
    loss.backward()
    return view, loss, seen


def other_data(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    leaf = torch.ones_like(h).requires_grad_()
    leaf.data = leaf.data * 3
    loss = F.cross_entropy(scores_of(model, h, leaf), y)
    loss.backward()
    return leaf, leaf.grad, loss


def given_a_gradient(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    leaf = torch.ones_like(h).requires_grad_()
    leaf.grad = torch.ones(h.shape, dtype=h.dtype)
    loss = F.cross_entropy(scores_of(model, h, leaf), y)
    loss.backward()
    return leaf.grad, loss


def frozen_again(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model[:2](x)
    leaf = torch.ones_like(h).requires_grad_()
    made = leaf * 2
    leaf.requires_grad_(False)
    loss = F.cross_entropy(scores_of(model, h, leaf + made), y)
    loss.backward()
    return loss, leaf.requires_grad, leaf.grad


def optimized(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """The leaf is what an optimizer moves; the step of another comes between."""
    h = model[:2](x)
    leaf = torch.ones_like(h).requires_grad_()
    moves, trains = torch.optim.SGD([leaf], lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(x), y).backward()
    trains.step()
    loss = F.cross_entropy(scores_of(model, model[:2](x), leaf), y)
    loss.backward()
    moves.step()
    return leaf, loss


def before_a_custom_function(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """What waits has its number before the function is called."""
    h = model[:2](x)
    leaf, kept = torch.ones_like(h).requires_grad_(), (h.detach() + 1).requires_grad_()
    alone, mixed = leaf * 3 + 1, h + leaf * kept
    del leaf
    made: Any = cut(mixed)
    seen = alone.requires_grad, alone.is_leaf, mixed.requires_grad, kept.is_leaf
    loss = F.cross_entropy(model[2:](made * alone + kept), y)
    loss.backward()
    return loss, alone, mixed, kept, kept.grad, seen


def norms(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """Read by several bodies."""
    h = model[:2](x)
    leaf = torch.ones_like(h).requires_grad_()
    first = F.batch_norm(h + leaf, None, None, training=True)
    loss = F.cross_entropy(
        model[2:](F.batch_norm(first * h * leaf + h, None, None, training=True)), y
    )
    del leaf
    loss.backward()
    return loss


STEPS: list[Step] = [
    zeros,
    ready_made,
    of_the_batch,
    cut_in_two,
    held,
    held_by_a_module,
    as_a_parameter,
    held_after_the_forward,
    held_in_the_first_of_two,
    twice,
    one_of_two,
    hooked,
    hooked_after,
    hook_behind,
    retained_behind,
    node_hook,
    the_leafs_node,
    nothing_else,
    no_weight,
    named,
    second_derivative,
    penalty_of_a_gone_leaf,
    in_a_checkpoint(False),
    in_a_checkpoint(True),
    behind_a_mean,
    read_before,
    of_no_dims,
    without_grad,
    written,
    view_written,
    other_data,
    given_a_gradient,
    frozen_again,
    optimized,
    before_a_custom_function,
    norms,
]


_NODES = "a node of autograd's graph is of the whole batch"
PARTLY = {node_hook: _NODES, the_leafs_node: _NODES}


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_leaf(step: Step, chunks: int) -> None:
    def story(lazy: Lazy) -> Any:
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).double()
        plain = torch.randn(N_ROWS, 6, dtype=torch.float64)
        seen = step(model, *lazy(plain, torch.randint(5, (N_ROWS,)), batch=0))
        return seen, gradients(model), plain.requires_grad, plain.grad

    assert_same_story(story, chunks, partly=PARTLY.get(step, ""))


def _add(leaf: Tensor) -> None:
    leaf.data.add_(2)


def _add_to_alias(leaf: Tensor) -> None:
    leaf.detach().add_(2)


def _fill_column(leaf: Tensor) -> None:
    leaf.data[:, 0].fill_(1.5)


def _subtract_gradient(leaf: Tensor) -> None:
    """As a sampler by Langevin dynamics does."""
    leaf.pow(2).sum().backward()
    assert leaf.grad is not None
    leaf.data.sub_(0.1 * leaf.grad)
    leaf.grad = None


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("is_held", [False, True], ids=["gone", "held"])
@pytest.mark.parametrize("rows", [slice(None), slice(1, None)], ids=["all", "some"])
@pytest.mark.parametrize("write", [_add, _add_to_alias, _fill_column, _subtract_gradient])
def test_a_leaf_in_the_memory_of_the_batch_is_written(
    write: Callable[[Tensor], None], rows: slice, is_held: bool, chunks: int
) -> None:
    def story(lazy: Lazy) -> Any:
        model = nn.Linear(6, 1).double()
        batch = torch.randn(N_ROWS, 6, dtype=torch.float64)
        x = lazy(batch.clone(), batch=0)
        leaf = x[rows].detach().requires_grad_()
        kept = x if is_held else None
        del x
        write(leaf)
        model(leaf).pow(2).sum().backward()
        return leaf.detach(), leaf.grad, gradients(model), kept

    assert_same_story(story, chunks, partly="")


def peak(lazy: Lazy, is_held: bool, limit: float = 0.0) -> int:
    """The most bytes of a step with a leaf in mid-model."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)
    )
    x, y = lazy(torch.randn(2048, 8), torch.randint(5, (2048,)), batch=0)
    allocations = Allocations()
    with allocations:
        allocations.count(model, x, y)
    with allocations:
        h = model[:2](x)
        leaf = torch.zeros_like(h).requires_grad_()
        made = model[2:](h + leaf.exp())
        if not is_held:
            del leaf
        F.cross_entropy(made, y).backward()
    return allocations.peak - sum(allocations.before.values())


def test_peak() -> None:
    """Neither its number nor its gradient is there of all rows, unless the leaf is held."""
    peak(koila.lazy, False)
    with koila.config(chunks=6):
        gone, held_on = peak(koila.lazy, False), peak(koila.lazy, True)
    n_bytes = 2048 * 64 * 4
    assert gone < 0.5 * peak(eager, False)
    assert held_on > gone + 1.5 * n_bytes


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8, 0.95, 1.05, 1.3])
def test_a_limit_is_kept(share: float) -> None:
    """It runs whole only where the gradient that torch accumulates for the leaf fits, too."""
    limit = int(share * peak(eager, False))
    with koila.config(memory_limit=there() + limit):
        used = peak(koila.lazy, False)
    assert used <= limit
