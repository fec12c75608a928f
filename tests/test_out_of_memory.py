"""Memory that runs out at any call, forward or backward: the step comes through, or is as if it had
not been asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from failures import CASES, FAULTS, Failing, Fault, assert_survived, count_calls, planned, run_eager
from oracle import assert_close

N_SAMPLES = 5


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
