# SPDX-License-Identifier: Apache-2.0
"""A weight that is written inside a block of torch.autocast: torch goes on with its old cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from oracle import Lazy, assert_same_story
from stories import N_ROWS

Write = Callable[[nn.Module], None]


def step(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), 0.5).step()


def scale(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)


def scale_data(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.data.mul_(2)


def replace_data(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.data = weight.detach() * 2


def scale_and_look(model: nn.Module) -> None:
    """Calls of plain torch on the weights see their new numbers, where nothing is cast."""
    scale(model)
    bias = model[0].bias
    assert type(bias).__name__ == "Parameter" and isinstance(bias, nn.Parameter)
    assert (bias + 1).sum().item() == (bias.detach() + 1).sum().item()


WRITES = [step, scale, scale_data, replace_data, scale_and_look]


def adversaries() -> tuple[nn.Module, nn.Module, Tensor]:
    made = (
        nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)),
    )
    return *made, torch.randn(N_ROWS, 6)


def gradients_of(*models: nn.Module) -> list[Any]:
    return [(weight.detach().clone(), weight.grad) for m in models for weight in m.parameters()]


def two_steps(write: Write, is_within: bool) -> Callable[[Lazy], Any]:
    """The critic's step stands in the block; the second backward does too, or comes after it."""

    def story(lazy: Lazy) -> Any:
        first, critic, x = adversaries()
        x, seen = lazy(x), []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                critic(x).mean().backward()
                write(critic)
                critic.zero_grad()
                loss = critic(first(x)).pow(2).mean()
                if is_within:
                    loss.backward()
            if not is_within:
                loss.backward()
            seen.append((loss, gradients_of(first, critic)))
            assert all(type(one) is nn.Parameter for one in critic.parameters())
        return seen

    return story


@pytest.mark.parametrize("chunks", [None, 1])
@pytest.mark.parametrize("is_within", [False, True], ids=["after", "within"])
@pytest.mark.parametrize("write", WRITES)
def test_equals_eager(write: Write, is_within: bool, chunks: int | None) -> None:
    story = two_steps(write, is_within)
    with torch.random.fork_rng(devices=[]):
        assert_same_story(in_float32(story), chunks)


def in_float32(story: Callable[[Lazy], Any]) -> Callable[[Lazy], Any]:
    """Autocast casts no weights of float64."""

    def told(lazy: Lazy) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return story(lazy)
        finally:
            torch.set_default_dtype(before)

    return told


@pytest.mark.parametrize("chunks", [2, 3, 7, N_ROWS])
@pytest.mark.parametrize("is_within", [False, True], ids=["after", "within"])
@pytest.mark.parametrize("write", WRITES)
def test_refused_after_chunks(write: Write, is_within: bool, chunks: int) -> None:
    with (
        koila.config(chunks=chunks),
        pytest.raises(koila.KoilaError, match=r"linear: a weight of shape \[8, 6\] was written"),
    ):
        two_steps(write, is_within)(koila.lazy)


@pytest.mark.parametrize("chunks", [2, N_ROWS])
def test_the_step_ends_the_block(chunks: int) -> None:
    """What does not read the weights is recorded, and the next block casts the new numbers."""

    def story(lazy: Lazy) -> Any:
        model, critic, x = adversaries()
        x, seen = lazy(x), []
        optimizer = torch.optim.Adam(critic.parameters(), 0.1)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
                out = critic(model(x))
                loss = F.mse_loss(out.float(), x[:, :1])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.append((out.argmax(), critic[1].bias.norm()))
            seen.append((loss, gradients_of(model, critic)))
        return seen

    assert_same_story(in_float32(story), chunks, tolerance=0.05)


def test_casts_that_are_not_kept() -> None:
    def story(lazy: Lazy) -> Any:
        first, critic, x = adversaries()
        x = lazy(x)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            critic(x).mean().backward()
            step(critic)
            loss = critic(first(x)).pow(2).mean()
        loss.backward()
        return loss, gradients_of(first, critic)

    assert_same_story(in_float32(story), 3, tolerance=0.05)


def test_recurrent_weights_are_a_list() -> None:
    def story(lazy: Lazy) -> Any:
        layer, x = nn.GRU(6, 5, batch_first=True), torch.randn(N_ROWS, 4, 6)
        x = lazy(x)
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)[0].mean().backward()
            step(layer)
            loss = layer(x)[0].pow(2).mean()
        loss.backward()
        return loss, gradients_of(layer)

    assert_same_story(in_float32(story), None)
