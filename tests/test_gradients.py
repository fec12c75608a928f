# SPDX-License-Identifier: Apache-2.0
"""Gradients come out as in eager however they are asked for, and so do hooks and modes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from small import Smalls, linear, ones

pytestmark = pytest.mark.sanitize

SMALLS = Smalls()

# Gradients asked for


@SMALLS.add
def backward_function(x: Tensor) -> Any:
    module = linear()
    torch.autograd.backward([module(x).sum(), (module(x) ** 2).sum()])
    return [parameter.grad for parameter in module.parameters()]


@SMALLS.add
def backward_of_rows(x: Tensor, z: Tensor) -> Any:
    module = linear()
    module(x).backward(z[:, :2].detach())
    return module.weight.grad, module.bias.grad


@SMALLS.add
def backward_of_no_scalar(x: Tensor) -> Any:
    linear()(x).backward()


@SMALLS.add
def backward_twice(x: Tensor) -> Any:
    loss = (linear()(x) ** 2).sum()
    loss.backward()
    loss.backward()


@SMALLS.add
def backward_twice_retained(x: Tensor) -> Any:
    module = linear()
    loss = (module(x) ** 2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return module.weight.grad


@SMALLS.add
def backward_to_some(x: Tensor) -> Any:
    module = linear()
    (module(x) ** 2).sum().backward(inputs=[module.bias])
    return module.weight.grad is None, module.bias.grad


@SMALLS.add
def grad_of_parameters(x: Tensor) -> Any:
    module = linear()
    return torch.autograd.grad((module(x) ** 2).sum(), list(module.parameters()))


@SMALLS.add
def grad_of_the_batch(x: Tensor) -> Any:
    x = x.detach().requires_grad_() if not x.requires_grad else x
    return torch.autograd.grad((x**3).sum(), x)


@SMALLS.add
def grad_of_a_step(x: Tensor) -> Any:
    step = linear()(x)
    return torch.autograd.grad((step**3).sum(), step)


@SMALLS.add
def grad_penalty(x: Tensor) -> Any:
    x = x.detach().requires_grad_()
    module = linear()
    (slope,) = torch.autograd.grad(module(x).tanh().sum(), x, create_graph=True)
    ((slope.norm(2, 1) - 1) ** 2).mean().backward()
    return module.weight.grad, module.bias.grad, x.grad


@SMALLS.add
def requires_grad_later(x: Tensor) -> Any:
    step = (x.detach() * 2).requires_grad_()
    (step**2).sum().backward()
    return step.requires_grad, step.is_leaf, step.grad


@SMALLS.add
def requires_grad_set(x: Tensor) -> Any:
    step = x.detach() * 2
    step.requires_grad = True
    (step**2).sum().backward()
    return step.grad


@SMALLS.add
def grad_of_lazy(x: Tensor) -> Any:
    before = x.grad
    (x.sin() * linear()(x).sum()).sum().backward()
    return before, x.grad, x.is_leaf


@SMALLS.add
def grad_set(x: Tensor) -> Any:
    step = (x.detach() * 2).requires_grad_()
    step.grad = ones(4, 3)
    (step**2).sum().backward()
    kept, step.grad = step.grad, None
    return kept, step.grad


@SMALLS.add
def grad_retained(x: Tensor) -> Any:
    step = linear()(x)
    step.retain_grad()
    (step**2).sum().backward()
    return step.retains_grad, step.grad


@SMALLS.add
def hook(x: Tensor) -> Any:
    seen: list[Tensor] = []
    module = linear()
    step = module(x)
    handle = step.register_hook(lambda gradient: gradient / gradient.norm())
    step.register_hook(seen.append)
    (step**2).sum().backward()
    handle.remove()
    return seen, module.weight.grad


@SMALLS.add
def hook_on_the_batch(x: Tensor) -> Any:
    x = x.detach().requires_grad_()
    x.register_hook(lambda gradient: gradient * 2)
    (linear()(x) ** 2).sum().backward()
    return x.grad


@SMALLS.add
def hook_after_accumulation(x: Tensor) -> Any:
    seen: list[Tensor] = []
    module = linear()
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    (module(x) ** 2).sum().backward()
    return seen


@SMALLS.add
def grad_fn(x: Tensor) -> Any:
    step = linear()(x)
    return step.grad_fn is None, (x.detach() * 2).grad_fn, step.grad_fn.name()


@SMALLS.add
def same_object(x: Tensor) -> Any:
    same = x.cpu() is x, x.double() is x, x.to(x.dtype) is x, x.contiguous() is x
    step = x * 2
    return same, step.cpu() is step, step.add_(1) is step, step.float() is step


# Modes


@SMALLS.add
def no_grad(x: Tensor) -> Any:
    module = linear()
    with torch.no_grad():
        teacher = module(x)
    return teacher, (module(x) - teacher) ** 2


@SMALLS.add
def inference_mode(x: Tensor) -> Any:
    with torch.inference_mode():
        step = x * 2
        kept = step.sin().clone(), step.is_inference()
    return kept


@SMALLS.add
def autocast(x: Tensor) -> Any:
    module = linear().float()
    with torch.autocast("cpu", torch.bfloat16):
        step = module(x.float())
        loss = F.cross_entropy(step, torch.tensor([0, 1, 1, 0]))
    return step, loss, step.dtype


@SMALLS.add
def default_dtype(x: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return torch.zeros(3) + x, x.sum(0).long() * 0.5
    finally:
        torch.set_default_dtype(torch.float32)


@SMALLS.add
def users_own_mode(x: Tensor) -> Any:
    class Counter(torch.overrides.TorchFunctionMode):
        n_calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.n_calls += func is torch.Tensor.mul
            return func(*args, **(kwargs or {}))

    with Counter() as counter:
        step = x * 2
        result = step.mul(3) + step
    return result, counter.n_calls


@SMALLS.add
def users_own_saved_tensors(x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(), torch.from_numpy):
        return (x.sin() * x.cos()).exp()


@SMALLS.add
def two_batches_meet(x: Tensor, z: Tensor) -> Any:
    return x + z, x @ z.T, torch.cat([x, z]), F.mse_loss(x, z)


@SMALLS.add
def positions(x: Tensor) -> Any:
    torch.manual_seed(0)
    embedding = nn.Embedding(4, 3).double()
    hidden = x + embedding(torch.arange(4))
    (hidden**2).sum().backward()
    return embedding.weight.grad


@SMALLS.add
def recurrent(x: Tensor) -> Any:
    torch.manual_seed(0)
    lstm, gru = nn.LSTM(3, 2).double(), nn.GRU(3, 2, 2, batch_first=True, dropout=0.5).double()
    start = torch.zeros(1, 2, 2, dtype=x.dtype)
    return lstm(x.view(2, 2, 3)), lstm(x.view(2, 2, 3), (start, start)), gru(x.view(2, 2, 3))


@SMALLS.add
def random(x: Tensor) -> Any:
    torch.manual_seed(3)
    one = F.dropout(x, 0.5)
    noise = torch.randn_like(x)
    return one, noise + x, F.dropout(one, 0.3), torch.bernoulli(x.detach().sigmoid())


@SMALLS.add
def random_read_as_drawn(x: Tensor) -> Any:
    one = F.dropout(x, 0.5)
    total = one.sum().item()
    plain = torch.rand(2)
    noise = torch.randn_like(x)
    return one, total, plain, noise


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", SMALLS)
def test_equals_eager(name: str, requires_grad: bool) -> None:
    SMALLS[name].check(requires_grad)


def draw_between(x: Tensor) -> Tensor:
    one = F.dropout(x, 0.5)
    torch.rand(2)
    return one


def seed_between(x: Tensor) -> Tensor:
    one = F.dropout(x, 0.5)
    torch.manual_seed(7)
    return one


def restore_between(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    torch.manual_seed(7)
    one = F.dropout(x, 0.5)
    torch.set_rng_state(state)
    return one


@pytest.mark.parametrize("run", [draw_between, seed_between, restore_between])
def test_generator_touched_between_record_and_read(run: Any) -> None:
    """The numbers are eager's, or a warning says that they are not."""
    torch.manual_seed(3)
    wanted = run(ones(40, 3))
    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(koila.lazy(ones(40, 3))).tolist()
    assert found == wanted.tolist() or caught, "silently another stream"
