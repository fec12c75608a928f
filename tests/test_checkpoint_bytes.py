# SPDX-License-Identifier: Apache-2.0
"""What a whole run with checkpoints is said to take, and takes, against what eager takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import koila
from allocations import Allocations
from test_memory_limit import Prediction

SLACK = 64 * 2**10
WIDTH, ROWS = 48, 640


class Block(nn.Module):
    """x + b(relu(a(norm(x)))), of WIDTH features."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.relu(self.a(self.norm(x))))


class Attention(nn.Module):
    """One layer of a transformer, on sentences of 20 words."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(WIDTH), Block()
        self.project, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).view(-1, 20, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.block(x + self.join(h))


Step = Callable[[nn.Sequential, Tensor, bool], Tensor]


def each(model: nn.Sequential, x: Tensor, is_reentrant: bool) -> Tensor:
    """Each layer is checkpointed."""
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=is_reentrant)
    return x


def in_turn(model: nn.Sequential, x: Tensor, is_reentrant: bool) -> Tensor:
    """A layer in the middle is checkpointed; the others are plain."""
    for i, layer in enumerate(model):
        x = checkpoint(layer, x, use_reentrant=is_reentrant) if i in (2, 3) else layer(x)
    return x


def nested(model: nn.Sequential, x: Tensor, is_reentrant: bool) -> Tensor:
    """Each layer is checkpointed, and each half of them; the halves have no calls of their own."""
    half = len(model) // 2
    for part in (model[:half], model[half:]):
        x = checkpoint(each, part, x, is_reentrant, use_reentrant=is_reentrant)
    return x


def around(model: nn.Sequential, x: Tensor, is_reentrant: bool) -> Tensor:
    """As `nested`, and the halves have calls before, between and after the checkpoints inside."""

    def body(part: nn.Sequential, x: Tensor) -> Tensor:
        h = checkpoint(part[0], x.sin(), use_reentrant=is_reentrant).cos()
        return checkpoint(part[1:], h * x, use_reentrant=is_reentrant).tanh() + x

    half = len(model) // 2
    for part in (model[:half], model[half:]):
        x = checkpoint(body, part, x, use_reentrant=is_reentrant)
    return x


def sequential(model: nn.Sequential, x: Tensor, is_reentrant: bool) -> Tensor:
    return checkpoint_sequential(model, 3, x, use_reentrant=is_reentrant)


def viewed(model: nn.Sequential, x: Tensor, is_reentrant: bool) -> Tensor:
    """Each function begins with a view of its argument, and ends with a read of another one."""
    for layer in model:
        x = checkpoint(
            lambda x, y, f: f(x.view(-1, WIDTH)) + y, x, x / 2, layer, use_reentrant=is_reentrant
        )
    return x


def held(model: nn.Sequential, x: Tensor, is_reentrant: bool) -> Tensor:
    """Results are read again after the last checkpoint."""
    results = [x]
    for layer in model:
        results.append(checkpoint(layer, results[-1], use_reentrant=is_reentrant))
    return torch.stack(results).sigmoid().sum(0)


def blocks(norm: Callable[[int], nn.Module] = nn.LayerNorm) -> nn.Sequential:
    return nn.Sequential(*(Block(norm) for _ in range(6)))


def mlp(first: int = 4) -> nn.Sequential:
    """Six blocks whose last call is a product: eager's second run ends before it. The first one is
    `first` times as wide inside."""
    parts = (
        nn.Sequential(nn.Linear(WIDTH, n * WIDTH), nn.ReLU(), nn.Linear(n * WIDTH, WIDTH))
        for n in (first, 4, 4, 4, 4, 4)
    )
    return nn.Sequential(*parts)


def dropping() -> nn.Sequential:
    parts = (nn.Sequential(Block(), nn.Dropout(0.3), nn.GELU()) for _ in range(6))
    return nn.Sequential(*parts)


def transformer() -> nn.Sequential:
    return nn.Sequential(*(Attention() for _ in range(6)))


SCRIPTS: dict[str, tuple[Callable[[], nn.Sequential], Step]] = {
    "mlp": (mlp, each),
    "wide at first": (lambda: mlp(12), each),
    "residual": (blocks, each),
    "dropout": (dropping, each),
    "transformer": (transformer, each),
    "in the middle": (blocks, in_turn),
    "nested": (blocks, nested),
    "nested, with calls": (blocks, around),
    "batch norm": (lambda: blocks(nn.BatchNorm1d), each),
    "sequential": (blocks, sequential),
    "viewed": (lambda: mlp(12), viewed),
    "held": (blocks, held),
    "plain": (blocks, lambda model, x, _: model(x)),
}


def step(
    name: str, is_reentrant: bool, lazy: Callable[[Tensor], Tensor], memory: Allocations
) -> int:
    """Return the peak of a step."""
    make, forward = SCRIPTS[name]
    torch.manual_seed(0)
    model = make()
    size = (ROWS // 4, 20, WIDTH) if name == "transformer" else (4 * ROWS, WIDTH)
    x = torch.randn(*size, requires_grad=is_reentrant)
    memory.count(list(model.parameters()), list(model.buffers()), x)
    with memory:
        pass
    with memory:
        forward(model, lazy(x), is_reentrant).square().mean().backward()
    return memory.peak


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("is_reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_whole(name: str, is_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """koila predicts the peak of its own whole run within 1 %, and needs no more memory for it than
    eager needs."""
    eager = step(name, is_reentrant, lambda x: x * 1, Allocations())
    memory = Allocations()
    said = Prediction(memory, monkeypatch, is_whole=True)
    with koila.config(memory_limit=2**40):
        peak = step(name, is_reentrant, lambda x: koila.lazy(x) * 1, memory)
    text = f"{said.n_bytes:.0f} bytes were predicted, {peak} used; eager uses {eager}"
    assert abs(said.n_bytes - peak) <= 0.01 * peak, text
    assert peak <= max(1.01 * eager, eager + SLACK), text
