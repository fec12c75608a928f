# SPDX-License-Identifier: Apache-2.0
"""Running statistics move in the order of the calls, also where a later call runs before an earlier
one that waits: at the end of a block without gradients, say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from oracle import Lazy, assert_seen, eager, tell
from stories import each_split_further, rows
from test_bridge import Square

Norm = Callable[[], nn.Module]
NORMS: dict[str, Norm] = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "mean of all": lambda: nn.BatchNorm1d(4, momentum=None),
    "frozen": lambda: nn.BatchNorm1d(4).requires_grad_(False),
    "without weights": lambda: nn.BatchNorm1d(4, affine=False),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
}
Between = Callable[[nn.Module, Tensor, Tensor, Lazy], Any]
BETWEEN: dict[str, Between] = {}


def add(between: Between) -> Between:
    BETWEEN[between.__name__] = between
    return between


@add
def another_batch(norm: nn.Module, h: Tensor, x: Tensor, lazy: Lazy) -> Any:
    with torch.no_grad():
        return norm(lazy(rows(4)) * 2)


@add
def the_same_batch(norm: nn.Module, h: Tensor, x: Tensor, lazy: Lazy) -> Any:
    with torch.no_grad():
        return norm(x - 1)


@add
def a_plain_batch(norm: nn.Module, h: Tensor, x: Tensor, lazy: Lazy) -> Any:
    with torch.no_grad():
        return norm(rows(4) * 2)


@add
def twice(norm: nn.Module, h: Tensor, x: Tensor, lazy: Lazy) -> Any:
    with torch.no_grad():
        return norm(norm(x - 1) * 2)


@add
def for_nothing(norm: nn.Module, h: Tensor, x: Tensor, lazy: Lazy) -> Any:
    with torch.no_grad():
        norm(x - 1)


@add
def in_evaluation(norm: nn.Module, h: Tensor, x: Tensor, lazy: Lazy) -> Any:
    norm.eval()
    with torch.no_grad():
        made = norm(lazy(rows(4)))
    norm.train()
    return made


@add
def a_read(norm: nn.Module, h: Tensor, x: Tensor, lazy: Lazy) -> Any:
    return norm(x.detach() - 1).detach().sum().item()


@add
def in_inference_mode(norm: nn.Module, h: Tensor, x: Tensor, lazy: Lazy) -> Any:
    with torch.inference_mode():
        return norm(lazy(rows(4))).sum().item()


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("is_stepped", [False, True])
@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("kind", NORMS)
@each_split_further
def test_a_norm_that_waits(chunks: int | None, kind: str, name: str, is_stepped: bool) -> None:
    """It was called in training, before it is called without gradients."""

    def story(lazy: Lazy) -> Any:
        net, norm = nn.Linear(4, 4).double(), NORMS[kind]().double()
        parameters = [*net.parameters(), *norm.parameters()]
        optimizer = torch.optim.SGD(parameters, 0.1)
        x = lazy(rows(4))
        h = net(x)
        if is_stepped:
            h.square().mean().backward()
            optimizer.step()
            h = h.detach() + net.bias
        waits = norm(norm(h) * 2)
        made = BETWEEN[name](norm, h, x, lazy)
        loss = (waits * rows(4)).tanh().sum()
        loss.backward()
        return made, loss, list(norm.buffers()), [p.grad for p in parameters]

    want, want_state = tell(story, eager)
    with koila.config(chunks=chunks):
        got, got_state = tell(story, koila.lazy)
    assert_seen(got, want, name, exact_bits=False)
    assert torch.equal(got_state, want_state)


@pytest.mark.parametrize("is_differentiated", [False, True])
@pytest.mark.parametrize("kind", NORMS)
@each_split_further
def test_a_result_that_nobody_asks_for(
    chunks: int | None, kind: str, is_differentiated: bool
) -> None:
    """What is called on inputs alone moves its statistics also then."""

    def story(lazy: Lazy) -> Any:
        net, norm = nn.Linear(4, 4).double(), NORMS[kind]().double().requires_grad_(False)
        x = lazy(rows(4))
        norm(x - 1)
        norm(x * 2)
        if is_differentiated:
            net(x).tanh().sum().backward()
        return list(norm.buffers())

    want, want_state = tell(story, eager)
    with koila.config(chunks=chunks):
        got, got_state = tell(story, koila.lazy)
    assert_seen(got, want, kind, exact_bits=False)
    assert torch.equal(got_state, want_state)


@pytest.mark.parametrize("is_read_without_gradients", [False, True])
@pytest.mark.parametrize("kind", NORMS)
@each_split_further
def test_a_result_with_masks_that_is_let_go(
    chunks: int | None, kind: str, is_read_without_gradients: bool
) -> None:
    """A read of another value goes past its masks, which nobody sees; not past the norm."""

    def story(lazy: Lazy) -> Any:
        net, norm = nn.Linear(4, 4).double(), NORMS[kind]().double()
        x = lazy(rows(4))
        model = nn.Sequential(net, norm, nn.Dropout(0.3))
        other = model(x)
        model(x).square().sum().backward()
        torch.optim.SGD(net.parameters(), 0.1).step()
        made = model(x)
        del made
        with torch.set_grad_enabled(not is_read_without_gradients):
            total = other.sum().item()
        return total, [buffer.clone() for buffer in norm.buffers()], torch.rand(3)

    want, want_state = tell(story, eager)
    with koila.config(chunks=chunks):
        got, got_state = tell(story, koila.lazy)
    assert_seen(got, want, kind, exact_bits=False)
    assert torch.equal(got_state, want_state)


def test_in_evaluation_twice() -> None:
    """What writes back what it has read is no reason to run whole."""
    norm = NORMS["instance norm"]().double().eval()
    with koila.config(chunks=3):
        x = koila.lazy(rows(4).requires_grad_())
        (norm(norm(x) * 2) * x).tanh().sum().backward()
    report = koila.report()
    assert report is not None
    assert report.n_chunks == 3


def test_what_has_other_statistics_goes_on_waiting() -> None:
    """A teacher's norm runs without its student."""
    student, teacher = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))

    x = koila.lazy(torch.randn(8, 4))
    with koila.config(chunks=2):
        made = student(x)
        with torch.no_grad():
            teacher(x)
        assert koila._core.value(koila._core.id(made))[6] is None
        assert koila._core.real(made) is None


@pytest.mark.parametrize("is_retained", [False, True])
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("name", ["batch norm", "mean of all", "without weights"])
@each_split_further
def test_a_checkpoint_behind_a_cut_moves_them_again_after_later_calls(
    chunks: int | None, name: str, is_reentrant: bool, is_retained: bool
) -> None:
    """Its backward does, and no program that a later call waits in runs for that backward."""

    def story(lazy: Lazy) -> Any:
        torch.manual_seed(0)
        norm, layer = NORMS[name]().double(), nn.Linear(4, 4).double()
        h = layer(lazy(rows(4)))
        c = checkpoint(lambda a: norm(a) * 2, h, use_reentrant=is_reentrant)
        loss = Square.apply(c.pow(2).mean())  # type: ignore[no-untyped-call]
        later = norm(layer(lazy(rows(4)) * 2))
        loss.backward(retain_graph=is_retained)
        if is_retained:
            later = later + norm(layer(lazy(rows(4)) * 3))
            loss.backward()
        return *norm.buffers(), layer.weight.grad, later.sum()

    want, _ = tell(story, eager)
    with koila.config(chunks=chunks):
        got, _ = tell(story, koila.lazy)
    assert_seen(got, want, name, exact_bits=False)


@pytest.mark.parametrize("kind", ["block", "read", "no rows", "plain"])
@each_split_further
def test_a_checkpoint_moves_statistics_again_of_what_has_its_numbers(
    chunks: int | None, kind: str
) -> None:
    """A frozen model before it: when the function of the checkpoint is recorded, its argument has
    been computed, and needs no gradient."""

    def story(lazy: Lazy) -> Any:
        head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
        x = lazy(rows(4))
        if kind == "block":
            with torch.no_grad():
                h = x * 2
        else:
            h = (
                x * 2
                if kind == "read"
                else x.sum(0).sin() * torch.linspace(-1, 1, len(x)).double()[:, None]
            )
            told = float(h.sum())
            assert told == told
        if kind == "plain":
            h = torch.linspace(-1, 1, 4 * len(x)).view(-1, 4).double()
        made = checkpoint(lambda h, x: head(h).tanh() * x, h, x, use_reentrant=False)
        made.square().mean().backward()
        return [*head.buffers()], [p.grad for p in head.parameters()]

    want, _ = tell(story, eager)
    with koila.config(chunks=chunks):
        got, _ = tell(story, koila.lazy)
    assert_seen(got, want, "statistics", exact_bits=False)
