# SPDX-License-Identifier: Apache-2.0
"""The training steps that are timed: models, batches, and the loops one would write by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.model import GPT

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass
class Program:
    """A model, a batch of two tensors of the same rows, and a loss over all rows."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    loss: Loss
    by_hand: Callable[[Program, int], Tensor]
    n_steps: int = 1  # in one measurement
    is_limited: bool = False  # the planner chooses the chunks, under a limit
    is_exact: bool = True  # by hand the gradients are those of the whole batch

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def accumulate(program: Program, n_chunks: int) -> Tensor:
    """Gradient accumulation by hand: right for a mean over rows, with every chunk weighted."""
    total = torch.zeros((), device=program.x.device)
    n_rows = len(program.x)
    chunks = zip(program.x.tensor_split(n_chunks), program.y.tensor_split(n_chunks), strict=True)
    for x, y in chunks:
        loss = program.loss(program.model, x, y) * (len(x) / n_rows)
        loss.backward()
        total += loss.detach()
    return total


def two_passes(program: Program, n_chunks: int) -> Tensor:
    """What GradCache does: embed without graph, differentiate by the embeddings, embed again."""
    xs = program.x.tensor_split(n_chunks)
    ys = program.y.tensor_split(n_chunks)
    with torch.no_grad():
        left = torch.cat([program.model(x) for x in xs])
        right = torch.cat([program.model(y) for y in ys])
    left.requires_grad_()
    right.requires_grad_()
    loss = info_nce(left, right)
    left_grad, right_grad = torch.autograd.grad(loss, [left, right])
    chunks = zip(
        xs, ys, left_grad.tensor_split(n_chunks), right_grad.tensor_split(n_chunks), strict=True
    )
    for x, y, x_grad, y_grad in chunks:
        torch.autograd.backward([program.model(x), program.model(y)], [x_grad, y_grad])
    return loss.detach()


def info_nce(left: Tensor, right: Tensor) -> Tensor:
    """Each row's partner is the same row of the other tensor, against all other rows."""
    likeness = F.normalize(left, dim=1) @ F.normalize(right, dim=1).T / 0.1
    partners = torch.arange(len(left), device=left.device)
    return (F.cross_entropy(likeness, partners) + F.cross_entropy(likeness.T, partners)) / 2


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def continue_text(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def contrast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return info_nce(model(x), model(y))


def mlp(rows: int) -> Program:
    model = nn.Sequential(
        *(nn.Linear(1024, 2048), nn.ReLU()),
        *(nn.Linear(2048, 2048), nn.ReLU()),
        nn.Linear(2048, 10),
    )
    x, y = torch.randn(rows, 1024), torch.randint(10, (rows,))
    return Program("MLP", model, x, y, classify, accumulate)


def encoder(width: int, n_out: int) -> nn.Module:
    """A convolutional network that keeps its rows apart: group instead of batch normalization."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()),
        nn.MaxPool2d(2),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(8, 2 * width), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, n_out),
    )


def cnn(rows: int) -> Program:
    x, y = torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))
    return Program("CNN", encoder(64, 10), x, y, classify, accumulate)


def gpt(rows: int) -> Program:
    model = GPT(100, length=64, width=256, n_heads=4, n_blocks=4)
    x, y = torch.randint(100, (2, rows, 64))
    return Program("GPT", model, x, y, continue_text, accumulate)


def contrastive(rows: int) -> Program:
    x = torch.randn(rows, 3, 32, 32)
    y = x + 0.1 * torch.randn_like(x)
    return Program("contrastive", encoder(32, 64), x, y, contrast, two_passes)


def batch_norm(rows: int) -> Program:
    """Eight layers with batch normalization. The loop by hand normalizes each chunk by itself, as
    gradient accumulation does: other gradients, but the least work that chunks can be."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
    for _ in range(7):
        layers += [nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
    layers += [nn.BatchNorm2d(64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    x, y = torch.randn(rows, 3, 16, 16), torch.randint(10, (rows,))
    return Program("BatchNorm", model, x, y, classify, accumulate, is_exact=False)


def tiny(rows: int) -> Program:
    """Six calls that take torch no time to speak of."""
    model = nn.Sequential(
        *(nn.Linear(8, 8), nn.ReLU()),
        *(nn.Linear(8, 8), nn.ReLU()),
        nn.Linear(8, 8),
    )
    x, y = torch.randn(rows, 8), torch.randint(8, (rows,))
    return Program("tiny", model, x, y, classify, accumulate, n_steps=50)


def deep(rows: int) -> Program:
    """Some 900 small calls."""
    model = GPT(100, length=64, width=64, n_heads=4, n_blocks=52)
    x, y = torch.randint(100, (2, rows, 64))
    return Program("deep", model, x, y, continue_text, accumulate, is_limited=True)


# Rows for which a step takes some 0.3 s on two cores; of the last two, what koila adds shows.
PROGRAMS = {
    "MLP": (mlp, 1024),
    "CNN": (cnn, 48),
    "GPT": (gpt, 32),
    "contrastive": (contrastive, 64),
    "BatchNorm": (batch_norm, 48),
    "tiny": (tiny, 32),
    "deep": (deep, 16),
}


def make(name: str, device: str, scale: int) -> Program:
    """A program with `scale` times the usual rows, on `device`."""
    build, rows = PROGRAMS[name]
    program = build(rows * scale)
    program.model.to(device)
    program.x = program.x.to(device)
    program.y = program.y.to(device)
    return program
