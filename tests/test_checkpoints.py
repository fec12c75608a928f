# SPDX-License-Identifier: Apache-2.0
"""torch.utils.checkpoint is honoured: what a script would have made again is, in chunks and under a
limit, and no step takes more memory than eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import koila
from allocations import Allocations
from limits import there
from oracle import Lazy, eager

ROWS, WIDTH = 515, 32
SHARE, SLACK = 1.02, 64 * 2**10
Step = Callable[[Any, bool], Tensor]


def block(*more: nn.Module) -> nn.Sequential:
    wide = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), *more, nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(nn.LayerNorm(WIDTH), *wide)


class Blocks(nn.Module):
    """A residual stream of checkpoints."""

    def __init__(self, n_blocks: int = 16, *more: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(*more) for _ in range(n_blocks))
        self.stem, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, is_reentrant: bool) -> Tensor:
        x = self.stem(x)
        for made in self.blocks:
            x = x + checkpoint(made, x, use_reentrant=is_reentrant)
        return self.last(x)


class Dropping(Blocks):
    """What is made again draws the same numbers; and the head is more than the blocks."""

    def __init__(self) -> None:
        super().__init__(4, nn.Dropout(0.3))
        self.last = nn.Linear(WIDTH, 200)

    def forward(self, x: Tensor, is_reentrant: bool) -> Tensor:
        return super().forward(x, is_reentrant).log_softmax(-1)


class Halves(nn.Module):
    """No stream beside the checkpoints, of which the last is none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(block() for _ in range(8)))

    def forward(self, x: Tensor, is_reentrant: bool) -> Tensor:
        made: Tensor = checkpoint_sequential(self.body, 4, x.sin(), use_reentrant=is_reentrant)
        return made


class Nested(Blocks):
    """Checkpoints in the bodies of checkpoints."""

    def forward(self, x: Tensor, is_reentrant: bool) -> Tensor:
        def four(x: Tensor, first: int) -> Tensor:
            for made in self.blocks[first : first + 4]:
                x = x + checkpoint(made, x, use_reentrant=is_reentrant)
            return x

        x = self.stem(x)
        for first in range(0, 16, 4):
            x = checkpoint(four, x, first, use_reentrant=is_reentrant)
        return x


class Writing(Blocks):
    """What a checkpoint gave is written in place, and so is what is made in one."""

    def forward(self, x: Tensor, is_reentrant: bool) -> Tensor:
        def body(made: nn.Module, x: Tensor) -> Tensor:
            return F.relu(made(x).mul_(2), inplace=True) * 3

        x = self.stem(x)
        for made in self.blocks[:6]:
            x = x + checkpoint(body, made, x, use_reentrant=is_reentrant).add_(1)
            x.mul_(0.5)
        return self.last(x)


class Normed(nn.Module):
    """Batch normalizations: each block is in three bodies of the program. The last is called in
    each."""

    def __init__(self, is_shared: bool = False) -> None:
        super().__init__()
        n_norms = 1 if is_shared else 8
        self.convs = nn.ModuleList(nn.Conv2d(4, 8, 3, padding=1, bias=False) for _ in range(8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(n_norms))
        self.backs = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(8))
        self.last = nn.BatchNorm2d(4)

    def forward(self, x: Tensor, is_reentrant: bool) -> Tensor:
        def body(k: int, x: Tensor) -> Tensor:
            norm = self.norms[k % len(self.norms)]
            return self.last(self.backs[k](norm(self.convs[k](x)).relu())).tanh()

        x = x.view(-1, 4, 4, 2)
        for k in range(8):
            x = x + checkpoint(body, k, x, use_reentrant=is_reentrant)
        return x.flatten(1)


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "blocks": Blocks,
    "dropping": Dropping,
    "halves": Halves,
    "nested": Nested,
    "writing": Writing,
    "normed": Normed,
    "shared norm": lambda: Normed(True),
}


def measured(
    name: str, is_reentrant: bool, lazy: Lazy, go: Callable[[nn.Module, Tensor], list[Tensor]]
) -> tuple[int, list[Tensor]]:
    """The bytes of a step at its peak, and all that it leaves; `go` is given model and batch, and
    returns what is compared beside gradients and buffers."""
    torch.manual_seed(0)
    model = PROGRAMS[name]().double()
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64).requires_grad_(is_reentrant)
    memory = Allocations()
    memory.count(x, list(model.parameters()), list(model.buffers()))
    with memory:
        batch = lazy(x)
    with memory:
        told = go(model, batch)
    grads = [p.grad for p in (x, *model.parameters()) if p.grad is not None]
    return memory.peak, [*grads, *model.buffers(), *told]


def step(
    name: str, is_reentrant: bool, lazy: Lazy, is_read: bool = False
) -> tuple[int, list[Tensor]]:
    """As `measured`: backward, the loss read before it or only after."""

    def go(model: nn.Module, batch: Tensor) -> list[Tensor]:
        loss = model(batch, is_reentrant).pow(2).mean()
        told = loss.item() if is_read else 0.0
        loss.backward()
        return [torch.tensor([loss.item(), told])]

    return measured(name, is_reentrant, lazy, go)


def check(got: tuple[int, list[Tensor]], want: tuple[int, list[Tensor]]) -> None:
    assert len(got[1]) == len(want[1])
    for ours, theirs in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert got[0] <= SHARE * want[0] + SLACK, f"{got[0]} bytes, eager {want[0]}"


KINDS = pytest.mark.parametrize("is_reentrant", [False, True], ids=["", "reentrant"])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@KINDS
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_more_than_eager(name: str, is_reentrant: bool) -> None:
    """As koila likes; in so many chunks; where it fits whole; where it does not."""
    want = step(name, is_reentrant, eager)
    check(step(name, is_reentrant, koila.lazy), want)
    for chunks in (1, 2, 3, 7):
        with koila.config(chunks=chunks):
            check(step(name, is_reentrant, koila.lazy), want)
        assert koila.report().n_chunks == chunks
    for limit, is_whole in ((2**40, True), (want[0] * 3 // 4, False)):
        with koila.config(memory_limit=there() + limit):
            check(step(name, is_reentrant, koila.lazy), want)
        assert (koila.report().n_chunks == 1) == is_whole


@pytest.mark.parametrize("name", ["blocks", "normed"])
def test_a_loss_that_is_read_before(name: str) -> None:
    """A read leaves no graph that a checkpoint would not have left."""
    want = step(name, False, eager, True)
    for options in ({}, {"chunks": 3}, {"memory_limit": 2**40}):
        with koila.config(**options):  # type: ignore[arg-type]
            check(step(name, False, koila.lazy, True), want)


def test_what_is_told() -> None:
    """explain() and report() say that the activations in checkpoints are recomputed, whole and in
    chunks."""
    text = "the activations that the script's checkpoints cover recomputed before their backward"
    for options, how in (({"memory_limit": 2**40}, "runs whole"), ({"chunks": 2}, "in 2 chunks")):
        with koila.config(**options):  # type: ignore[arg-type]
            model = Blocks(4)
            loss = model(koila.lazy(torch.randn(ROWS, WIDTH)), False).sum()
            told = koila.explain(loss)
            assert how in told and text in told
            loss.backward()
    assert text in str(koila.report())


def test_each_row_on_its_own() -> None:
    want = step("blocks", False, eager)
    with koila.config(chunks=ROWS):
        check(step("blocks", False, koila.lazy), want)
    assert koila.report().n_chunks == ROWS
