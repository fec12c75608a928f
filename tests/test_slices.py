# SPDX-License-Identifier: Apache-2.0
"""Slices of a batch: what is taken of its rows, or joined of several, is a batch of its own."""

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
from chunked import split
from limits import there
from oracle import Lazy, assert_same_story, eager, gradients

N_ROWS = 30
HALF = 15
Step = Callable[[nn.Sequential, Tensor, Tensor], Any]


def network(has_norm: bool, has_dropout: bool) -> nn.Sequential:
    norm = [nn.BatchNorm1d(16)] if has_norm else []
    dropout = [nn.Dropout(0.3)] if has_dropout else []
    layers = nn.Linear(6, 16), *norm, nn.Tanh(), *dropout, nn.Linear(16, 5)
    return nn.Sequential(*layers).double()


def micro_batches(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """A backward for each, with a remainder."""
    losses = []
    for i in range(0, len(x), 8):
        part, target = x[i : i + 8], y[i : i + 8]
        loss = F.cross_entropy(model(part), target) * len(part) / len(x)
        loss.backward()
        losses.append(loss)
    return losses


def read_micro_batches(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """Each loss is read before its backward."""
    losses = []
    for part, target in zip(x.split(8), y.split(8), strict=True):
        loss = F.cross_entropy(model(part), target)
        losses.append(loss.item())
        loss.backward()
    return losses


def one_backward(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """One backward for all micro-batches."""
    parts = zip(x.split(7), y.split(7), strict=True)
    loss = torch.stack([F.cross_entropy(model(a), b, reduction="sum") for a, b in parts]).sum()
    (loss / len(x)).backward()
    return loss


def row_by_row(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))]
    (sum(losses) / len(x)).backward()  # type: ignore[union-attr]
    return losses


def accuracy(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """An evaluation loop."""
    with torch.no_grad():
        scores = [model(part) for part in x.split(8)]
        hits = [
            (part.argmax(1) == target).sum()
            for part, target in zip(scores, y.split(8), strict=True)
        ]
    return [sum(hits), *scores]


def halves(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """The real ones, and the fake ones."""
    n = len(x) // 2
    real, fake = model(x[:n])[:, 0], model(x[n:])[:, 0]
    loss = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
    loss = loss + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))
    loss.backward()
    return loss


def views(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """The two views of SimCLR."""
    a, b = (F.normalize(model(half), dim=1) for half in x.chunk(2))
    scores = a @ b.T / 0.5
    loss = F.cross_entropy(scores, torch.arange(len(a)))
    loss.backward()
    return loss, scores


def views_of_one(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """The halves of what the model made of both."""
    a, b = F.normalize(model(x), dim=1).chunk(2)
    scores = torch.cat([a, b]) @ torch.cat([b, a]).T
    scores = scores.masked_fill(torch.eye(len(x), dtype=torch.bool), -9)
    loss = F.cross_entropy(scores, torch.arange(len(x)).roll(len(a)))
    loss.backward()
    return loss


def joined_and_counted(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """A mask of two batches that were joined, read by position, as for attention over both."""
    hidden = torch.cat([model(x), model(x * 2)])
    mask = torch.cat([x > 0, x > 1])
    rows, columns = torch.arange(len(hidden)), torch.arange(5)
    hidden = hidden.masked_fill(mask[rows[:, None], columns], 0)
    losses = hidden.logsumexp(1) - hidden[rows, torch.cat([y, y])]
    losses.mean().backward()
    return losses


def mixed(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """One half mixed with the other: two batches of one size that meet."""
    h = model(0.3 * x[:HALF] + 0.7 * x[HALF:])
    loss = 0.3 * F.cross_entropy(h, y[:HALF]) + 0.7 * F.cross_entropy(h, y[HALF:])
    loss.backward()
    return loss, h


def few_shot(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """Prototypes of the support, and the queries' distances to them."""
    prototypes = model(x[:10]).view(5, 2, -1).mean(1)
    apart = torch.cdist(model(x[10:]), prototypes)
    loss = F.cross_entropy(-apart, y[10:])
    loss.backward()
    return loss, apart


def few_shot_of_one(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    z = model(x)
    prototypes = z[:10].reshape(5, 2, -1).mean(1)
    apart = (z[10:].unsqueeze(1) - prototypes.unsqueeze(0)).square().sum(-1)
    loss = F.cross_entropy(-apart, y[10:])
    loss.backward()
    return loss, apart


def some_labelled(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """Labels for some rows, and for the others entropy and agreement."""
    z = model(x)
    rest = z[4:].softmax(1)
    loss = F.cross_entropy(z[:4], y[:4]) + (rest * rest.log()).sum(1).mean()
    loss = loss + F.mse_loss(rest[:13], rest[13:].detach())
    loss.backward()
    return loss


def triplets(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """By steps, and as a view."""
    z = model(x)
    turned = model(x).view(10, 3, -1)
    loss = F.triplet_margin_loss(z[0::3], z[1::3], z[2::3])
    loss = loss + F.triplet_margin_loss(turned[:, 0], turned[:, 1], turned[:, 2])
    loss.backward()
    return loss


def of_all_kinds(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """From the end, narrow(), and a slice of a slice."""
    middle = x[5:25]
    loss = F.cross_entropy(model(x[-10:]), y[-10:]) + model(x.narrow(0, -5, 5)).square().mean()
    loss = loss + model(x[:-20]).mean() + model(middle[::3]).exp().mean() + model(middle).mean()
    loss.backward()
    return loss


def joined_again(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """Parts of one size, and of others; with more rows than the batch, and beside plain ones."""
    loss = F.cross_entropy(torch.cat([model(x[:HALF]), model(x[HALF:])]), y)
    loss = loss + F.cross_entropy(torch.cat([model(part) for part in x.split(8)]), y)
    loss = loss + F.cross_entropy(model(torch.cat([x, x[:7]])), torch.cat([y, y[:7]]))
    loss = loss + model(torch.cat([torch.ones(3, 6, dtype=x.dtype), x])).square().mean()
    loss.backward()
    return loss


def chosen(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """By an index, a mask, and views of both halves."""
    index = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    loss = F.cross_entropy(model(x[index]), y[index]) + model(x.index_select(0, index)).mean()
    z = model(x)
    is_one = y != 0
    a, b = x.view(2, HALF, 6).unbind(0)
    loss = loss + F.cross_entropy(z[is_one], y[is_one]) + (model(a) - model(b)).square().mean()
    loss.backward()
    return loss


def one_against_all(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """A slice of one row is broadcast."""
    h = model(x)
    loss = (h - h[:1]).square().mean() + (x[:1].expand_as(x) * x).sum() + (x[2:3] * h[:, :1]).mean()
    loss.backward()
    return loss


def written(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """Through slices, by rows of others."""
    h = model(x) * 1
    h[:10] = 0.5 * h[:10]
    a, b = h[:HALF], h[HALF:]
    a += model(x[HALF:])
    middle = h[10:20]
    middle *= 2
    turned = a.view(5, 3, 5)
    turned[0] = 0
    out = torch.zeros_like(h)
    out[:HALF] = model(x[:HALF])
    loss = h.square().mean() + (a * b).sum() + turned.mean() + F.cross_entropy(out, y)
    loss.backward()
    return loss, h, a, turned, out


def looked_at(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """The gradients of a slice, and of what it is a slice of."""
    h = model[0](x)
    h.retain_grad()
    a, b = h[:HALF], h[HALF:]
    a.retain_grad()
    b.register_hook(lambda gradient: gradient * 2)
    loss = F.cross_entropy(model[1:](a), y[:HALF]) + model[1:](b).mean()
    loss.backward()
    return loss, h.grad, a.grad


def again_and_again(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """Slices that outlive the program they were taken in."""
    losses = []
    part, target = x[:20], y[:20]
    for _ in range(3):
        loss = F.cross_entropy(model(part), target)
        loss.backward()
        losses.append(loss)
    return losses


def checkpointed(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    scores = [checkpoint(model, part, use_reentrant=False) for part in x.split(HALF)]
    loss = F.cross_entropy(scores[0], y[:HALF]) + F.cross_entropy(scores[1], y[HALF:])  # type: ignore[arg-type]
    loss.backward()
    return loss


def cast(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    """Autocast leaves float64 alone, and casts what is made of float32."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x[:20]), y[:20]) + model(x[20:]).mean()
    loss.backward()
    return loss


def beside_the_whole(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
    h = model(x)
    loss = F.cross_entropy(h, y) + F.cross_entropy(model(x[:10]), y[:10])
    loss = loss + (h[:10] - h[10:20].detach()).square().sum()
    loss.backward()
    return loss


STEPS: list[Step] = [
    micro_batches,
    read_micro_batches,
    one_backward,
    row_by_row,
    accuracy,
    halves,
    views,
    views_of_one,
    mixed,
    few_shot,
    few_shot_of_one,
    some_labelled,
    triplets,
    of_all_kinds,
    joined_again,
    joined_and_counted,
    chosen,
    one_against_all,
    written,
    looked_at,
    again_and_again,
    checkpointed,
    cast,
    beside_the_whole,
]
#: Normalized over one row there is nothing left.
WITHOUT_NORM = [row_by_row]


def told(step: Step, has_norm: bool, has_dropout: bool, requires_grad: bool) -> Any:
    """Tell of a step, its gradients and statistics."""

    def story(lazy: Lazy) -> Any:
        model = network(has_norm, has_dropout)
        x = torch.randn(N_ROWS, 6, dtype=torch.float64, requires_grad=requires_grad)
        seen = step(model, *lazy(x, torch.randint(5, (N_ROWS,)), batch=0))
        return seen, gradients(model), dict(model.named_buffers()), x.grad

    return story


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_slices(step: Step, chunks: int) -> None:
    """The numbers and gradients are eager's, and products run by rows."""
    assert_same_story(told(step, False, False, False), chunks)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_slices_of_other_models(step: Step, chunks: int) -> None:
    """So they are with statistics, draws in eager's order, and a batch that needs its gradient."""
    assert_same_story(told(step, step not in WITHOUT_NORM, True, True), chunks)


@pytest.mark.parametrize("chunks", [2, 7])
def test_what_is_read_by_position_goes_by_rows(chunks: int) -> None:
    torch.manual_seed(0)
    x, y = koila.lazy(torch.randn(N_ROWS, 6).double(), torch.randint(5, (N_ROWS,)), batch=0)
    with split(chunks):
        joined_and_counted(network(False, False), x, y)
    assert "made" not in str(koila.report()), "nothing is made whole"


# Passes ------------------------------------------------------------------------------------------


def two_weights(losses: Tensor, scores: Tensor) -> Tensor:
    return losses[:HALF].mean() + 2 * losses[HALF:].mean()


def of_a_mask(losses: Tensor, scores: Tensor) -> Tensor:
    return losses[torch.arange(N_ROWS) % 3 > 0].mean()


def of_two_critics(losses: Tensor, scores: Tensor) -> Tensor:
    """The distance of Wasserstein, of real ones and fake ones in one batch."""
    real, fake = scores[:, 0].chunk(2)
    return fake.mean() - real.mean()


def of_columns(losses: Tensor, scores: Tensor) -> Tensor:
    return (scores[:10].mean(0) * 0.5).sum() + losses.mean()


ENDS = [two_weights, of_a_mask, of_two_critics, of_columns]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_a_linear_end_costs_no_pass(end: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Sums of some rows' losses keep nothing: the model runs forward and back once."""

    def step(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        return end(F.cross_entropy(scores, y, reduction="none"), scores)

    def differentiated(model: nn.Sequential, x: Tensor, y: Tensor) -> Any:
        loss = step(model, x, y)
        loss.backward()
        return loss

    x, y = koila.lazy(torch.randn(N_ROWS, 6).double(), torch.randint(5, (N_ROWS,)), batch=0)
    with koila.config(chunks=3):
        text = koila.explain(step(network(False, False), x, y), full=True)
    assert f"in chunks over {N_ROWS} samples: 1 forward, 1 backward" in text
    assert_same_story(told(differentiated, False, True, True), 3)


def test_several_last_bodies_run_once() -> None:
    """Those of slices of other sizes too: what the tail sends to one asks nothing of the others.
    Of very many not all, for the tail is run for each."""
    model = network(False, False)
    x, y = koila.lazy(torch.randn(N_ROWS, 6).double(), torch.randint(5, (N_ROWS,)), batch=0)

    def passes(size: int) -> list[str]:
        parts = zip(x.split(size), y.split(size), strict=True)
        loss = torch.stack([F.cross_entropy(model(a), b) for a, b in parts]).sum()
        lines = koila.explain(loss, full=True).splitlines()
        return [line for line in lines if "in chunks over" in line and "backward" in line]

    with koila.config(chunks=3):
        few, many = passes(8), passes(1)
    assert len(few) == 4 and all("1 forward, 1 backward" in line for line in few)
    assert len(many) == N_ROWS and sum("1 forward," in line for line in many) == 16


# Memory ------------------------------------------------------------------------------------------


def two_backwards(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
    """Two micro-batches."""
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.cross_entropy(model(part), target) / 2).backward()


def several_backwards(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
    """Three, and a remainder."""
    for i in range(0, len(x), 300):
        loss = F.cross_entropy(model(x[i : i + 300]), y[i : i + 300], reduction="sum")
        (loss / len(x)).backward()


def one_for_all(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
    """Their losses are added up."""
    parts = zip(x.split(300), y.split(300), strict=True)
    torch.stack([F.cross_entropy(model(a), b, reduction="sum") for a, b in parts]).sum().backward()


def every_row(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
    """Chunks are of one row; it is the next that does not wait for its backward."""
    losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(256)]
    torch.stack(losses).sum().backward()


def of_two_halves(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
    n = len(x) // 2
    h = model(0.3 * x[:n] + 0.7 * x[n:])
    (0.3 * F.cross_entropy(h, y[:n]) + 0.7 * F.cross_entropy(h, y[n:])).backward()


def of_a_support(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
    """Few rows in one body, and many in another."""
    prototypes = model(x[:20]).view(5, 4, -1).mean(1)
    apart = (model(x[20:]).unsqueeze(1) - prototypes.unsqueeze(0)).square().sum(-1)
    F.cross_entropy(-apart, y[20:]).backward()


def of_one_forward(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
    """What follows from slices of what a model made goes by rows too."""
    n = len(x) // 2
    h = model[0](x)
    (model[1:](h[:n]).exp().mean() + F.cross_entropy(model[1:](h[n:]), y[n:])).backward()


def of_some_rows(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
    """Scores are made for those rows alone that have labels."""
    h = model[0](x)
    rows = (y > 0).nonzero()[:, 0]
    F.cross_entropy(model[1:](h[rows]), y[rows]).backward()


LIMITED = [
    (two_backwards, 0.5),
    (several_backwards, 0.6),
    (one_for_all, 0.3),
    (every_row, 0.5),
    (halves, 0.3),
    (views, 0.7),
    (of_two_halves, 0.5),
    (of_a_support, 0.4),
    (of_one_forward, 0.5),
    (of_some_rows, 0.5),
    (beside_the_whole, 0.4),
]


@pytest.mark.parametrize(("step", "share"), LIMITED, ids=[step.__name__ for step, _ in LIMITED])
def test_a_limit_is_kept(step: Step, share: float) -> None:
    """Under a limit that eager would break a step runs in chunks, and at no time are there more
    bytes in tensors."""

    def peak(lazy: Lazy) -> int:
        torch.manual_seed(0)
        wide = nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 5)
        x, y = lazy(torch.randn(1024, 6), torch.randint(5, (1024,)), batch=0)
        model = nn.Sequential(nn.Sequential(*wide), nn.Tanh(), nn.Linear(5, 64), nn.Linear(64, 5))
        allocations = Allocations()
        with allocations:
            allocations.count(model, x, y)
        with allocations:
            step(model, x, y)
        return allocations.peak - sum(allocations.before.values())

    limit = int(share * peak(eager))
    with koila.config(memory_limit=there() + limit):
        used = peak(koila.lazy)
    assert used <= limit
    programs = koila.report().programs
    assert max(program.n_chunks for program in programs) > 1 or step is every_row
