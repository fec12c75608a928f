# SPDX-License-Identifier: Apache-2.0
"""What a script can reach no more is freed when eager frees it, and leaves nothing behind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from binding_kit import is_pending
from collector import collector_off
from oracle import cut, eager

CONFIGS: dict[str, dict[str, Any]] = {
    "whole": {},
    **{f"chunks={n}": {"chunks": n} for n in (1, 2, 3, 7)},
    "limit": {"memory_limit": "1GB"},
}


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    checkpointed(model(), batch(8)[0])  # torch's first one imports, which leaves a cycle
    with collector_off():
        yield


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CONFIGS[request.param]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def two_losses(m: nn.Module, x: Tensor) -> None:
    head = nn.Linear(3, 1).double()
    h = m(x)
    head(h.detach()).sum().backward()


def two_backwards(m: nn.Module, x: Tensor) -> None:
    first, second = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    h = m(x)
    first(h.detach()).sum().backward()
    second(h).sum().backward()


def unused(m: nn.Module, x: Tensor) -> None:
    m(x).sum()


def read(m: nn.Module, x: Tensor) -> None:
    loss = m(x).sum()
    loss.item()


def printed(m: nn.Module, x: Tensor) -> None:
    print(m(x))


def read_apart(m: nn.Module, x: Tensor) -> None:
    h = m(x)
    h.detach().numpy()
    h.detach().mean().item()


def without_gradients(m: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        h = m(x)
        h.sum()


def cut_off(m: nn.Module, x: Tensor) -> None:
    cut(m(x)).sum().item()


def cut_and_differentiated(m: nn.Module, x: Tensor) -> None:
    cut(m(x)).sum().backward()
    m.zero_grad()


def failed(m: nn.Module, x: Tensor) -> None:
    h = m(x)
    with pytest.raises(IndexError):
        nn.functional.cross_entropy(h, torch.full((len(x),), 7)).item()


def hooked(m: nn.Module, x: Tensor) -> None:
    h = m(x)
    h.retain_grad()
    h.register_hook(lambda gradient: gradient * 2)


def checkpointed(m: nn.Module, x: Tensor) -> None:
    def body(given: Tensor) -> Tensor:
        given.mean()
        result: Tensor = m(given)
        return result

    made: Tensor = checkpoint(body, x, use_reentrant=False)
    made.sum().backward()
    m.zero_grad()


def partly_differentiated(m: nn.Module, x: Tensor) -> None:
    h = m(x)
    h[:1].sum().backward(retain_graph=True)
    m.zero_grad()


def written(m: nn.Module, x: Tensor) -> None:
    h = m(x)
    view = h[:, 0]
    view.mul_(2)


USES: list[Callable[[nn.Module, Tensor], None]] = [
    two_losses,
    two_backwards,
    unused,
    read,
    printed,
    read_apart,
    without_gradients,
    cut_off,
    cut_and_differentiated,
    failed,
    hooked,
    checkpointed,
    partly_differentiated,
    written,
]


def n_alive(use: Callable[[nn.Module, Tensor], None], x: Tensor) -> int:
    m = model()
    weights = [weakref.ref(weight) for weight in m.parameters()]
    use(m, x)
    del m
    return sum(weight() is not None for weight in weights)


def step(x: Tensor, y: Tensor) -> list[Tensor]:
    m = model()
    loss = ((m(x) - y) ** 2).mean()
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in m.parameters() if weight.grad is not None)]


def batch(n_rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(n_rows, 4).double(), torch.randn(n_rows, 3).double()


@pytest.mark.parametrize("n_rows", [8, 1])
@pytest.mark.parametrize("use", USES)
def test_weights_die_as_in_eager(
    use: Callable[[nn.Module, Tensor], None], n_rows: int, config: dict[str, Any]
) -> None:
    """At `del`, without the garbage collector. The inputs stay lazy: the next step is in chunks."""

    def run(lazy: Callable[..., Any]) -> tuple[int, list[Tensor]]:
        x, y = lazy(*batch(n_rows))
        alive = n_alive(use, x)
        return alive, [*step(x, y), torch.rand(2)]

    alive, expected = run(eager)
    assert alive == 0
    with koila.config(**config):
        n_left, found = run(koila.lazy)
        assert n_left == 0
        if "chunks" in config:
            n_chunks = koila.report().programs[-1].n_chunks
            assert n_chunks == min(config["chunks"], n_rows), "the inputs were forgotten"
    assert_equal(found, expected)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n_rows", [8, 1])
def test_draws_of_what_is_dropped_come_first(n_rows: int, config: dict[str, Any]) -> None:
    """They wait until something else draws; then the weights die."""

    def run(lazy: Callable[..., Any]) -> tuple[int, list[Tensor]]:
        x, y = lazy(*batch(n_rows))
        m: nn.Module = nn.Sequential(model(), nn.Dropout())
        weights = [weakref.ref(weight) for weight in m.parameters()]
        m(x).sum()
        del m
        drawn = torch.rand(2)
        return sum(weight() is not None for weight in weights), [drawn, *step(x, y), torch.rand(2)]

    alive, expected = run(eager)
    assert alive == 0
    with koila.config(**config):
        n_left, found = run(koila.lazy)
    assert n_left == 0
    assert_equal(found, expected)


@pytest.mark.parametrize("n_rows", [8, 2])
@pytest.mark.parametrize("is_read", [False, True])
def test_statistics_of_what_is_dropped(is_read: bool, n_rows: int, config: dict[str, Any]) -> None:
    """They are written, since the module lives, and the next step of it comes after that."""

    def run(lazy: Callable[..., Any]) -> list[Tensor]:
        x, y = lazy(*batch(n_rows))
        norm = nn.BatchNorm1d(3).double()
        m: nn.Module = nn.Sequential(model(), norm)
        loss = m(x).sum()
        if is_read:
            loss.item()
        del loss
        found = [*step(x, y)]
        found += [buffer.clone() for buffer in norm.buffers()]
        ((m(x) - y) ** 2).mean().backward()
        found += [buffer.clone() for buffer in norm.buffers()]
        return [*found, *(weight.grad.clone() for weight in m.parameters())]  # type: ignore[union-attr]

    expected = run(eager)
    with koila.config(**config):
        found = run(koila.lazy)
    assert_equal(found, expected)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_value_that_lives_keeps_its_program(chunks: int) -> None:
    x, _ = koila.lazy(*batch(8))
    m = model()
    with koila.config(chunks=chunks):
        h = m(x)
        for _ in range(3):
            (x.exp()[:, :3] * h.detach()).mean().item()
            h.sum()
        del x
        h.sum().backward()
    found = [weight.grad for weight in m.parameters()]
    m.zero_grad()
    m(batch(8)[0]).sum().backward()
    assert_equal(found, [weight.grad for weight in m.parameters()])  # type: ignore[arg-type, misc]


def test_an_input_that_was_only_asked_dies() -> None:
    real = batch(8)[0].requires_grad_()
    x = koila.lazy(real)
    assert x.requires_grad
    del x
    found = weakref.ref(real)
    del real
    assert found() is None


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_dies_in_another_thread(chunks: int) -> None:
    """Nothing is lost of this thread's program."""
    x, y = koila.lazy(*batch(8))
    with koila.config(chunks=chunks):
        kept = [model()(x).sum()]
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()
        found = step(x, y)
    assert_equal(found, step(*batch(8)))


def of_outputs(m: nn.Module, x: Tensor, y: Tensor) -> Any:
    return m(x)


def of_losses(m: nn.Module, x: Tensor, y: Tensor) -> Any:
    return ((m(x) - y) ** 2).mean()


@pytest.mark.parametrize("kept_of", [of_outputs, of_losses])
@pytest.mark.parametrize("is_trained_first", [False, True])
def test_batches_that_no_backward_follows_die(
    kept_of: Callable[..., Any], is_trained_first: bool, config: dict[str, Any]
) -> None:
    """Each step's result is held until the next one's: then its batch is freed, unread."""
    m, batches, result = model(), list[weakref.ref[Tensor]](), None
    with koila.config(**config):
        if is_trained_first:
            step(*koila.lazy(*batch(8)))
        for _ in range(6):
            plain = batch(8)
            batches += map(weakref.ref, plain)
            x, y = koila.lazy(*plain)
            del plain
            result = kept_of(m, x, y)
        n_alive = sum(tensor() is not None for tensor in batches)
        assert n_alive <= 4, "of the last batch, and of the one before, which the next lazy() frees"
        expected = kept_of(m, *batch(8))
        assert_equal([result.detach()], [expected.detach()])


def of_hits(m: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    return (out.argmax(1) == y.argmax(1)).sum()


def of_detached(m: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    return ((out - y) ** 2).mean().detach()


@pytest.mark.parametrize("metric", [of_hits, of_detached])
@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("is_drawing", [False, True])
def test_batches_of_a_metric_that_is_read_at_the_end_die(
    metric: Callable[..., Tensor], is_list: bool, is_drawing: bool, config: dict[str, Any]
) -> None:
    """An evaluation without no_grad(): nobody can differentiate its outputs once they are gone."""
    drops = nn.Dropout(0.5 if is_drawing else 0.0)

    def evaluate(begin: Callable[..., Any]) -> tuple[Tensor, int]:
        m, found, batches, n_alive = model(), list[Tensor](), list[weakref.ref[Tensor]](), 0
        for _ in range(8):
            plain = batch(8)
            batches += map(weakref.ref, plain)
            x, y = begin(*plain)
            del plain
            out = drops(m(x))
            found.append(metric(m, out, y))
            if not is_list:
                found = [sum(found[1:], found[0])]
            n_alive = max(n_alive, sum(tensor() is not None for tensor in batches))
        return sum(found[1:], found[0]) * 1, n_alive

    torch.manual_seed(3)
    expected, _ = evaluate(lambda *plain: plain)
    torch.manual_seed(3)
    with koila.config(**config):
        found, n_alive = evaluate(koila.lazy)
        assert n_alive <= 6, "of three batches: the last, and two whose outputs were held"
        assert_equal([found], [expected])


def test_a_metric_waits_for_the_backward_to_come() -> None:
    """Between two batches of a step, the loss of the first can be differentiated: it runs once."""
    m = model()
    with koila.config(chunks=2):
        for _ in range(3):
            x, y = koila.lazy(*batch(8))
            out = m(x)
            loss, hits = ((out - y) ** 2).mean(), of_hits(m, out, y)
            for _ in range(3):
                z, _ = koila.lazy(*batch(8))
                loss = loss + m(z).mean()
            del out
            assert is_pending(hits)
            loss.backward()
            assert not is_pending(hits)
