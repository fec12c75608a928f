# SPDX-License-Identifier: Apache-2.0
"""Grad mode, inference mode and autocast: a call runs in those it was made in, wherever it runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import koila
from binding_kit import batch, in_a_child, is_pending
from chunked import split
from koila import _core


@pytest.fixture(autouse=True)
def settings_again() -> Iterator[None]:
    """End each test with the settings of autocast that it found."""
    before = now()
    yield
    torch.set_autocast_enabled("cpu", before.autocast)
    torch.set_autocast_dtype("cpu", before.dtype)
    torch.set_autocast_cache_enabled(before.cache)


class Context(NamedTuple):
    """What is in force."""

    grad: bool
    inference: bool
    autocast: bool
    dtype: torch.dtype
    cache: bool


def now() -> Context:
    return Context(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def settle(context: Context) -> Context:
    """Where autocast is off its dtype is nobody's affair, nor is its cache."""
    return context if context.autocast else context._replace(dtype=torch.float32, cache=True)


@contextmanager
def grad_mode(is_on: bool) -> Iterator[None]:
    """As torch.set_grad_enabled in two calls: nothing is run at the end of a block."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(is_on)
    yield
    torch._C._set_grad_enabled(before)


def together(*makes: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for make in makes:
        stack.enter_context(make())
    return stack


def no_grad() -> Any:
    return grad_mode(False)


def inference() -> Any:
    return torch._C._InferenceMode(True)


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": no_grad,
    "inference": inference,
    "autocast": autocast,
    "autocast to half": lambda: torch.autocast("cpu", torch.float16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "autocast off again": lambda: together(autocast, lambda: torch.autocast("cpu", enabled=False)),
    "grad in no_grad": lambda: together(no_grad, lambda: grad_mode(True)),
    "no_grad in autocast": lambda: together(autocast, no_grad),
    "inference in autocast": lambda: together(autocast, inference),
}


NOT_INFERENCE = [name for name in CONTEXTS if "inference" not in name]


class Watch(TorchFunctionMode):
    """Keeps the contexts in which tanh runs."""

    sees_koila = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Context] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "tanh":
            self.seen.append(settle(now()))
        return func(*args, **(kwargs or {}))


def record(names: list[str]) -> tuple[list[Tensor], list[Context]]:
    """Record a call in each context, on lazies of one batch."""
    x = koila.lazy(batch().float())
    w = torch.ones(3, requires_grad=True)
    made, contexts = [], []
    for name in names:
        with CONTEXTS[name]():
            made.append((x * w).tanh())
            contexts.append(settle(now()))
    return made, contexts


def check_replay_in(name: str, names: list[str]) -> None:
    made, wanted = record(names)
    assert all(map(is_pending, made))
    flags = [m.requires_grad for m in made]
    with CONTEXTS[name]():
        before = settle(now())
        with Watch() as watch:
            numbers = [_core.read(m).tolist() for m in made]  # type: ignore[arg-type]
        assert settle(now()) == before
    assert flags == [context.grad and not context.inference for context in wanted]
    assert all(number == numbers[0] for number in numbers)
    assert watch.seen == wanted
    koila._core.forget()


@pytest.mark.parametrize("name", CONTEXTS)
def test_replay_is_in_the_contexts_of_the_record(name: str) -> None:
    """Whatever is in force where the value is asked for; and that is in force again afterwards."""
    check_replay_in(name, [*NOT_INFERENCE, *reversed(NOT_INFERENCE)])


def test_inference_after_autocast() -> None:
    """Its guard puts back what was in force at its begin, autocast too, and is then gone."""
    for names in itertools.permutations(["autocast", "inference", "no_grad", "plain"]):
        check_replay_in("plain", list(names))


@pytest.mark.parametrize("name", CONTEXTS)
def test_chunks_are_in_the_contexts_of_the_record(name: str) -> None:
    """A forward in chunks keeps no graph; all else is as it was."""
    made, wanted = record([name])
    before = settle(now())
    with split(2), Watch() as watch:
        _core.read(made[0])  # type: ignore[arg-type]
    assert settle(now()) == before
    assert watch.seen == [context._replace(grad=False) for context in wanted] * 2


def test_contexts_through_python() -> None:
    """Where a device is known that libtorch's own functions are not asked of."""

    def work() -> None:
        assert _core.describe(torch.empty(1, device="meta")) is not None
        for name in CONTEXTS:
            check_replay_in(name, NOT_INFERENCE)

    in_a_child(work)


def nesting() -> int:
    """How many autocast blocks are around."""
    n: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return n - 1


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_call_that_raises_leaves_the_context(name: str, chunks: int) -> None:
    """The second of two contexts is in force when a label turns out to be none."""
    labels = koila.lazy(torch.full((4,), 7))
    x = koila.lazy(batch().float())
    with no_grad():
        first = x.tanh()
    with CONTEXTS[name]():
        loss = torch.nn.functional.nll_loss(first, labels)
    before = settle(now())
    with split(chunks), pytest.raises(IndexError):
        loss.tolist()
    assert settle(now()) == before
    assert nesting() == 0


@pytest.mark.parametrize("chunks", [1, 2])
def test_settings_of_autocast_are_as_before(chunks: int) -> None:
    """Its dtype and its cache, though it is off: torch.autocast("cpu") takes them up."""
    before = now()
    x = koila.lazy(batch().float())
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        made = x @ torch.eye(3, requires_grad=True)
    with split(chunks):
        made.sum().backward()
    assert now() == before


def test_contexts_are_interned() -> None:
    """As many records as one likes in a few contexts; there is room for 256 different ones."""
    x = koila.lazy(batch().float())
    made = [x]
    for _, name in zip(range(600), itertools.cycle(CONTEXTS), strict=False):
        with CONTEXTS[name]():
            made.append(x.tanh())
    assert all(map(is_pending, made[1:])), "each was recorded, and no context was one too many"


class Casts(TorchDispatchMode):
    """Counts the casts of a weight."""

    sees_koila = True

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.n = weight, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func is torch.ops.aten._to_copy.default and args[0] is self.weight
        return func(*args, **(kwargs or {}))


def casts_of_a_weight(enter: Any) -> tuple[int, Tensor]:
    w = torch.eye(3, requires_grad=True)
    with Casts(w) as casts:
        with torch.autocast("cpu", torch.bfloat16):
            x = enter(batch().float())
            y = x @ w
            loss = ((y @ w) * 1).sum()
        loss.backward()
    assert w.grad is not None
    return casts.n, w.grad


def test_a_weight_is_cast_once_in_a_replay() -> None:
    wanted_n, wanted = casts_of_a_weight(lambda x: x)
    n, grad = casts_of_a_weight(koila.lazy)
    assert n == wanted_n == 1
    assert torch.equal(grad, wanted)


def test_the_cache_of_casts_does_not_outlive_a_replay() -> None:
    """A weight that is cast later is cast anew: it may have changed."""
    w = torch.eye(3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        made = koila.lazy(batch().float()) @ w
    made.sum().backward()
    torch.set_autocast_cache_enabled(True)
    torch.set_autocast_enabled("cpu", True)  # not torch.autocast, which clears the cache itself
    with Casts(w) as casts:
        batch().float() @ w
    torch.clear_autocast_cache()
    assert casts.n == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_call_without_a_row_runs_at_once_under_autocast(dtype: torch.dtype) -> None:
    """Meta tensors know nothing of autocast: the dtype is the one that torch gives."""
    x = batch().to(dtype)[:, :3] + torch.eye(4, 3, dtype=dtype)
    with autocast():
        wanted = torch.linalg.pinv(x)
        got = torch.linalg.pinv(koila.lazy(x))
    assert not is_pending(got)
    assert got.dtype == wanted.dtype
    assert got.tolist() == wanted.tolist()
