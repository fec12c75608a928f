# SPDX-License-Identifier: Apache-2.0
"""Random heads run in pieces along every dim of their inputs: a wrong dim costs memory only."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from koila import _core
from koila.planning import fitting, plans, second_axis
from koila.staged.program import Program
from koila.staged.schedule import Strategy
from oracle import assert_close

Head = Callable[[Tensor, Tensor, dict[str, Tensor], Tensor], Tensor]
N_WORDS, N_PROGRAMS = 7, 120

#: What is done to scores `z`, given labels, weights and what the body left.
STEPS: dict[str, Head] = {
    "tanh": lambda z, y, w, h: z.tanh(),
    "relu": lambda z, y, w, h: z.relu(),
    "over words": lambda z, y, w, h: z.softmax(-1),
    "over positions": lambda z, y, w, h: z.softmax(1),
    "running": lambda z, y, w, h: z.cumsum(1),
    "masked": lambda z, y, w, h: z * (y % 2 == 0).double().unsqueeze(-1),
    "places": lambda z, y, w, h: z + w["places"][: z.shape[1]],
    "temperature": lambda z, y, w, h: z * w["scale"].exp(),
    "gated": lambda z, y, w, h: z * (h @ w["gate"]),
    "mixed": lambda z, y, w, h: w["mix"][: z.shape[1], : z.shape[1]] @ z,
    "normed": lambda z, y, w, h: F.layer_norm(z, z.shape[-1:]),
    "turned": lambda z, y, w, h: torch.cat([z[:, 1:], z[:, :1]], 1),
    "flipped": lambda z, y, w, h: z.flip(1),
    "centred": lambda z, y, w, h: z - z.mean(1, keepdim=True),
    "relaid": lambda z, y, w, h: z.transpose(1, 2).contiguous().transpose(1, 2),
    "flat": lambda z, y, w, h: z.reshape(-1, N_WORDS).view(len(y), -1, N_WORDS),
    "split": lambda z, y, w, h: torch.cat(z.split([3, N_WORDS - 3], -1)[::-1], -1),
    "from the largest": lambda z, y, w, h: z - z.amax(-1, keepdim=True),
    "from the second": lambda z, y, w, h: z - z.topk(2, -1)[0][..., 1:],
}


def cross_entropy(z: Tensor, y: Tensor, **words: object) -> Tensor:
    return F.cross_entropy(z.reshape(-1, N_WORDS), y.flatten(), **words)  # type: ignore[arg-type]


def picked(z: Tensor, y: Tensor, w: dict[str, Tensor], h: Tensor) -> Tensor:
    return -z.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()


def counted(z: Tensor, y: Tensor, w: dict[str, Tensor], h: Tensor) -> Tensor:
    losses, mask = cross_entropy(z, y, reduction="none").view(y.shape), (y % 3 > 0).double()
    return (losses * mask).sum() / (mask.sum() + 1)


LOSSES: dict[str, Head] = {
    "mean": lambda z, y, w, h: cross_entropy(z, y),
    "sum": lambda z, y, w, h: cross_entropy(z, y, reduction="sum"),
    "smooth": lambda z, y, w, h: cross_entropy(z, y, label_smoothing=0.2),
    "ignored": lambda z, y, w, h: cross_entropy(z, y, ignore_index=1, reduction="sum") / y.numel(),
    "weighted": lambda z, y, w, h: F.nll_loss(
        z.reshape(-1, N_WORDS).log_softmax(-1), y.flatten(), weight=w["bias"].detach().abs()
    ),
    "classes first": lambda z, y, w, h: F.cross_entropy(z.transpose(1, 2), y),
    "picked": picked,
    "counted": counted,
    "squares": lambda z, y, w, h: F.mse_loss(z, F.one_hot(y, N_WORDS).double()),
    "two terms": lambda z, y, w, h: cross_entropy(z, y) + z.square().mean() + (h * h).mean(),
}


def make(seed: int) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor, dict[str, Tensor]]:
    """A loss, a batch and weights."""
    rnd = random.Random(seed)
    torch.manual_seed(seed)
    n_rows, length, width = rnd.choice([1, 2, 3]), rnd.choice([5, 6, 8]), rnd.choice([4, 6])
    shapes = {"body": (width, width), "head": (width, N_WORDS), "gate": (width, N_WORDS)}
    shapes |= {"places": (length, N_WORDS), "mix": (length, length), "bias": (N_WORDS,)}
    weights = {name: torch.randn(shape).double() for name, shape in shapes.items()}
    weights["scale"] = torch.randn(()).double()
    x, y = torch.randn(n_rows, length, width).double(), torch.randint(N_WORDS, (n_rows, length))
    steps = rnd.choices(list(STEPS.values()), k=rnd.randint(1, 4))
    loss, attends = rnd.choice(list(LOSSES.values())), rnd.random() < 0.5

    def run(x: Tensor, y: Tensor) -> Tensor:
        h = x @ weights["body"]
        h = ((h @ h.transpose(1, 2)).softmax(-1) @ h if attends else h).tanh()
        z = h @ weights["head"]
        for step in steps:
            z = step(z, y, weights, h)
        return loss(z, y, weights, h)

    return run, x, y, {name: w.requires_grad_() for name, w in weights.items()}


def ways(run: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> list[Strategy]:
    """Every way along a second axis that its program can be run in, sensible or not."""
    found = []
    loss = run(*koila.lazy(x, y))  # held: a program that nobody can ask for ends
    program = Program([loss])
    for n_segments in (1, 2) if program.is_tail_linear else ():
        cut = program.cut_for(Strategy(n_segments, n_pieces=2))
        last = max((r for r in cut.runs if r.is_body), key=lambda r: r.index, default=None)
        if last is None or cut.n_cut <= program.n_cut or not second_axis.can_run(cut, last):
            continue
        activations = [
            cut.info(cut.imports[i].value) for i in second_axis.activations_of(cut, last)
        ]
        n_dims = min((len(info.shape) for info in activations), default=0)
        for dim in range(n_dims):
            n_pieces = 2 + (dim + n_segments) % 3
            found.append(Strategy(n_segments, b"", n_pieces, activations[0].shape[dim], dim))
    _core.forget()
    return found


@pytest.mark.rotated
@pytest.mark.parametrize("first", range(0, N_PROGRAMS, 20))
def test_random_heads(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n_ways = 0
    for seed in range(first, first + 20):
        run, x, y, weights = make(seed)
        run(x, y).backward()
        wanted = {name: w.grad for name, w in weights.items()}
        with koila.config(memory_limit=2**42):
            tried = ways(run, x, y)
        for way in tried:
            for w in weights.values():
                w.grad = None
            made = plans.Plan(len(x), strategy=way)
            monkeypatch.setattr(fitting, "fit", lambda *_, made=made: made)
            with koila.config(memory_limit=2**42):
                run(*koila.lazy(x, y)).backward()
            assert "pieces along dim" in koila.report().programs[-1].strategy
            for name, right in wanted.items():
                found = weights[name].grad
                assert (found is None) == (right is None), f"{seed}, {way}: {name}"
                if found is not None and right is not None:
                    assert_close(found, right, f"{seed}, {way}: {name}")
            n_ways += 1
    assert n_ways > 20
