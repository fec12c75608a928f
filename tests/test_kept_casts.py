# SPDX-License-Identifier: Apache-2.0
"""Torch casts a weight once in a block of torch.autocast: the gradients of the block's calls are
added up in the lower precision, and after a write the old cast stays."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from koila.basics import switches
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
    bias: Any = next(one for one in model.parameters() if one.dim() == 1)
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
                seen.append((out.argmax(), next(critic.parameters()).norm()))
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


def test_copies_of_a_written_weight_are_parameters() -> None:
    model, _, x = adversaries()
    x = koila.lazy(x)
    with torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
        step(model)
        file = io.BytesIO()
        torch.save(model, file)
        copies = copy.deepcopy(model), torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        assert all(type(one) is not nn.Parameter for one in model.parameters())
        for copied in copies:
            assert all(type(one) is nn.Parameter for one in copied.parameters())
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(copied(x), model(x))
    assert all(type(one) is nn.Parameter for one in model.parameters())


def scores(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


def two_blocks(model: nn.Module, x: Tensor, plain: Tensor) -> Tensor:
    return scores(model, x).sum() + scores(model, x * 2).pow(2).sum()


def one_block(model: nn.Module, x: Tensor, plain: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return two_blocks(model, x, plain)


def blocks_and_a_nested_one(model: nn.Module, x: Tensor, plain: Tensor) -> Tensor:
    return one_block(model, x, plain) + two_blocks(model, x / 2, plain) + scores(model, x).sum()


def beside_plain(model: nn.Module, x: Tensor, plain: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        first = model(plain).sum()
        return first + model(x).pow(2).sum() + model(plain * 2).sum()


def read_within(model: nn.Module, x: Tensor, plain: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        first = model(x).sum()
        assert first.item() != 0
        return first + model(x * 2).pow(2).sum()


def dropped(model: nn.Module, x: Tensor, plain: Tensor) -> Tensor:
    """Torch keeps no cast for a call that never runs, after the next write of the weights."""
    scores(model, x)
    scale(model)
    return scores(model, plain).sum() + scores(model, x).pow(2).sum()


@pytest.mark.parametrize("chunks", [None, 1])
@pytest.mark.parametrize(
    "run", [two_blocks, one_block, blocks_and_a_nested_one, beside_plain, read_within, dropped]
)
def test_a_weight_is_cast_once_in_a_block(
    run: Callable[[nn.Module, Tensor, Tensor], Tensor], chunks: int | None
) -> None:
    def story(lazy: Lazy) -> Any:
        model, _, x = adversaries()
        plain, seen, optimizer = torch.randn(5, 6), [], torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            loss = run(model, lazy(x), plain)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append((loss, gradients_of(model)))
        return seen

    assert_same_story(in_float32(story), chunks)


def test_blocks_are_told_apart_under_a_limit() -> None:
    with koila.config(memory_limit="1GiB"):
        test_a_weight_is_cast_once_in_a_block(blocks_and_a_nested_one, None)


def test_the_steps_of_a_loop_are_alike() -> None:
    """A plan that is known for the first step is known for the others."""
    model, _, x = adversaries()
    model, x = model.float(), x.float()
    for _ in range(3):
        two_blocks(model, koila.lazy(x), x).backward()
    n_settings = len(switches._numbers)
    for _ in range(20):
        two_blocks(model, koila.lazy(x), x).backward()
    assert len(switches._numbers) == n_settings
