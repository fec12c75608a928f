# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out at any call, forward or backward: the step comes through, or is as if it had
not been asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import koila
from failures import CASES, FAULTS, Failing, Fault, assert_survived, count_calls, planned, run_eager
from koila.memory import budget, estimates
from koila.planning import strategies
from koila.staged import cache
from limits import there
from oracle import assert_close

N_SAMPLES = 5


@pytest.mark.rotated
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("name", CASES)
def test_a_call_fails(name: str, fault: Fault) -> None:
    """Here a few calls fail, each fault at others, and the last; `failures.py` tries them all."""
    for place in range(run_eager(name).n_places):
        n_calls = count_calls(name, place)
        assert n_calls > 0
        step = max(1, n_calls // N_SAMPLES)
        calls = {*range(FAULTS.index(fault) * step // len(FAULTS), n_calls, step), n_calls - 1}
        for call in sorted(calls):
            assert_survived(name, fault, call, place)


def model_with_hooks(seen: list[str]) -> nn.Module:
    """Each parameter has a gradient, and a hook that takes memory and is noted."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter)

        def hook(gradient: torch.Tensor, name: str = name) -> torch.Tensor:
            seen.append(name)
            return gradient * 2

        parameter.register_hook(hook)
    return model


@pytest.mark.parametrize("n_before", [1, 2, 3])
def test_a_hook_of_a_parameter_fails(n_before: int) -> None:
    """Parameters that had their gradient have it no more; no hook is called again unasked."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 6).double(), torch.arange(12) % 5
    seen: list[str] = []
    model = model_with_hooks(seen)
    F.cross_entropy(model(x), y).backward()
    want = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    seen.clear()
    loss = F.cross_entropy(model(koila.lazy(x)), koila.lazy(y))
    handle = list(model.parameters())[-1 - n_before].register_hook(fail)
    with planned(Failing(None, -1)), pytest.raises(torch.OutOfMemoryError, match="in a hook"):
        loss.backward()
    assert len(seen) == len(set(seen)) > 0
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
    handle.remove()
    with planned(Failing(None, -1)):
        loss.backward()
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        assert_close(parameter.grad, gradient, "gradient")


class FailsOnce(torch.autograd.Function):
    """Twice its argument; its first backward takes memory that there is not."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, failed: list[None]) -> torch.Tensor:
        ctx.failed = failed
        return w * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if not ctx.failed:
            ctx.failed.append(None)
            raise torch.OutOfMemoryError("behind the program")
        return gradient * 2, None


@pytest.mark.parametrize("width", [6, 256])
@pytest.mark.parametrize("is_retained", [False, True])
def test_a_graph_behind_fails(width: int, is_retained: bool) -> None:
    """No tensor has a gradient. The step can be asked for again where little was read of the graph,
    and where it is retained; else what was read is free, and torch would refuse it too."""
    torch.manual_seed(0)
    x, w = torch.randn(12, width).double(), torch.randn(width, width).double().requires_grad_()
    model, failed = nn.Linear(width, width).double(), list[None]()
    (model(x) @ FailsOnce.apply(w, [None])).sin().mean().backward()  # type: ignore[no-untyped-call]
    tensors = [w, *model.parameters()]
    want = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    made = FailsOnce.apply(w, failed)  # type: ignore[no-untyped-call]
    loss = (model(koila.lazy(x)) @ made).sin().mean()
    with planned(Failing(None, -1)):
        with pytest.raises(torch.OutOfMemoryError, match="behind the program"):
            loss.backward(retain_graph=is_retained)
        assert all(tensor.grad is None for tensor in tensors)
        if width > 6 and not is_retained:
            with pytest.raises(RuntimeError, match="a second time"):
                loss.backward()
            return
        loss.backward()
    for tensor, gradient in zip(tensors, want, strict=True):
        assert_close(tensor.grad, gradient, "gradient")


def fail(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("in a hook")


def test_a_step_after_a_refusal() -> None:
    """Who gives a step up and makes another has eager's numbers, draws among them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5)).double()
    x, y = torch.randn(12, 6).double(), torch.arange(12) % 5
    state = torch.get_rng_state()
    want = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    failing = Failing(FAULTS[-1], 9)
    loss = F.cross_entropy(model(koila.lazy(x)), koila.lazy(y))
    with planned(failing), failing, pytest.raises(koila.MemoryLimitError):
        loss.backward()
    assert failing.n_failed > 1
    del loss
    torch.set_rng_state(state)
    loss = F.cross_entropy(model(koila.lazy(x)), koila.lazy(y))
    with planned(Failing(None, -1)):
        loss.backward()
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        assert parameter.grad is not None
        assert_close(parameter.grad, gradient, "gradient")
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("call", range(6))
def test_a_whole_run_fails(call: int) -> None:
    """What has run is there, and the rest runs when it is asked for again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    x, y = torch.randn(12, 6).double(), torch.arange(12) % 5
    want = torch.autograd.grad(F.cross_entropy(model(x), y).sqrt(), list(model.parameters()))
    failing = Failing(Fault("once", 1), call)
    loss = F.cross_entropy(model(koila.lazy(x)), koila.lazy(y)).sqrt()
    failing.begin(12)
    with failing, pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.backward()
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        assert parameter.grad is not None
        assert_close(parameter.grad, gradient, "gradient")


# Python itself has no memory left -----------------------------------------------------------------


class Estimates:
    """Measures as koila does, but for the first `n_times`, where no memory is left for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_times: int) -> None:
        self.estimate, self.n_times, self.n_failed = estimates.estimate, n_times, 0
        monkeypatch.setattr(estimates, "estimate", self.measure)
        monkeypatch.setattr(cache, "_caches", [])  # a plan that was made before needs no measure

    def measure(self, *args: Any, **kwargs: Any) -> estimates.Estimate:
        if self.n_failed < self.n_times:
            self.n_failed += 1
            raise MemoryError
        return self.estimate(*args, **kwargs)


def small() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 5)).double()
    return model, torch.randn(512, 64).double(), torch.arange(512) % 5


def assert_trained(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    got = [parameter.grad for parameter in model.parameters()]
    want = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    for gradient, wanted in zip(got, want, strict=True):
        assert gradient is not None
        assert_close(gradient, wanted, "gradient")


@pytest.mark.parametrize("n_times", [1, 2])
def test_no_memory_to_plan(monkeypatch: pytest.MonkeyPatch, n_times: int) -> None:
    """Planning is tried again with what was cached given back; then the step is refused, and comes
    through when it is asked for again."""
    model, x, y = small()
    failing = Estimates(monkeypatch, n_times)
    given_back: list[bool] = []
    monkeypatch.setattr(budget, "defragment", lambda: given_back.append(True))
    with koila.config(memory_limit=there() + 3 * 2**19):
        loss = F.cross_entropy(model(koila.lazy(x)), koila.lazy(y))
        if n_times > 1:
            with pytest.raises(koila.MemoryLimitError, match="while a program of 4 calls was plan"):
                loss.backward()
            assert all(parameter.grad is None for parameter in model.parameters())
        loss.backward()
        assert koila.report().n_chunks > 1
    assert failing.n_failed == n_times
    assert given_back
    assert_trained(model, x, y)


def test_no_memory_to_plan_another_try() -> None:
    """A run in the smallest chunks fails, and then what would show another way."""
    model, x, y = small()
    x, y = x[:12], y[:12]
    failing = Failing(FAULTS[-1], 3)
    loss = F.cross_entropy(model(koila.lazy(x)), koila.lazy(y))
    with pytest.MonkeyPatch.context() as patch, planned(failing), failing:
        patch.setattr(strategies.Strategies, "along", out_of_memory)
        patch.setattr(strategies.Strategies, "least", out_of_memory)
        with pytest.raises(koila.MemoryLimitError) as raised:
            loss.backward()
    assert "was planned" in str(raised.value)
    assert all(parameter.grad is None for parameter in model.parameters())
    with planned(Failing(None, -1)):
        loss.backward()
    assert_trained(model, x, y)


def out_of_memory(*args: Any) -> Any:
    raise MemoryError


class TakenByOthers(TorchDispatchMode):
    """Once, in the midst of a step, others take most of the memory: `free` bytes are left."""

    sees_koila = True

    def __init__(self, free: list[int], left: int) -> None:
        super().__init__()
        self.free, self.left, self.n_calls = free, left, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_calls += 1
        if self.n_calls == 60:
            self.free[0] = self.left
            raise torch.OutOfMemoryError("others have taken it")
        return func(*args, **(kwargs or {}))


def test_the_next_try_fits_into_what_is_free_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the chunks, and twice those, would each fail where others have taken the memory."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()).double()
    x, free = torch.randn(4096, 64).double(), [12 * 2**20]
    model(x).pow(2).mean().backward()
    want = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    monkeypatch.setattr(budget, "free_on_cpu", lambda: free[0])
    monkeypatch.setattr(budget, "_quick", (0.0, -1.0, ()))
    with TakenByOthers(free, 3 * 2**20):
        model(koila.lazy(x)).pow(2).mean().backward()
    ran = koila.report().programs[-1]
    assert ran.n_tries == 2
    assert ran.bytes_allowed == 3 * 2**20
    assert ran.bytes_predicted is not None and ran.bytes_predicted <= 3 * 2**20
    assert ran.n_chunks > 16
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        assert_close(parameter.grad, gradient, "gradient")
