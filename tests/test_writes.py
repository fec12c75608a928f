# SPDX-License-Identifier: Apache-2.0
"""Writes come out as in eager, wherever they go: into plain tensors, lazy ones, modules."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from outcome import weights
from small import Smalls, linear, ones

SMALLS = Smalls()


# Into plain tensors


@SMALLS.add
def add_into_plain(x: Tensor) -> Any:
    plain = ones(4, 3)
    other_name, view = plain, plain[0]
    plain += x * 2
    return plain is other_name, other_name, view


@SMALLS.add
def add_method_into_plain(x: Tensor) -> Any:
    plain = ones(4, 3)
    result = plain.add_(x).mul_(x.sum())
    return result is plain, plain


@SMALLS.add
def running_mean(x: Tensor) -> Any:
    mean = ones(3)
    with torch.no_grad():
        mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        mean.lerp_(x.std(0), 0.5)
    return mean


@SMALLS.add
def copy_into_plain(x: Tensor) -> Any:
    plain, kept = ones(4, 3), ones(4, 3)
    kept.data.copy_(x * 2)
    return plain.copy_(x * 2), kept


@SMALLS.add
def item_of_plain(x: Tensor) -> Any:
    plain = ones(4, 3)
    plain[1] = x[0]
    plain[2:, 0] = x.sum()
    return plain


@SMALLS.add
def items_of_plain_step_by_step(x: Tensor) -> Any:
    steps = torch.zeros(3, 4, 3, dtype=x.dtype)
    hidden = x
    for i in range(3):
        hidden = hidden.sin() * 2
        steps[i] = hidden
    return steps[1:], steps.sum(0)


@SMALLS.add
def lazy_index_of_plain(x: Tensor, labels: Tensor) -> Any:
    plain = ones(4, 3)
    plain[labels] = 5.0
    plain[x > 0] = 2.0
    plain[labels[0], 1] = x[0, 0].detach()
    return plain, ones(4, 3)[labels], ones(4, 3)[labels[1]], ones(4, 3)[x > 0.2]


@SMALLS.add
def scatter_into_plain(x: Tensor, labels: Tensor) -> Any:
    one, two = torch.zeros(3, 3, dtype=x.dtype), torch.zeros(4, 3, dtype=x.dtype)
    one.index_add_(0, labels, x)
    two.scatter_(1, labels[:, None], 1.0)
    return one, two, torch.zeros(3, 3, dtype=x.dtype).index_copy_(0, labels[:2], x[:2])


@SMALLS.add
def out_plain(x: Tensor) -> Any:
    sums, products = ones(4, 3), ones(4, 4)
    with torch.no_grad():
        result = torch.add(x, x, out=sums)
        torch.matmul(x, x.T, out=products)
    return result is sums, sums, products


@SMALLS.add
def out_resized(x: Tensor) -> Any:
    plain = torch.empty(0, dtype=x.dtype)
    with torch.no_grad():
        torch.mul(x, 2, out=plain)
    return plain


@SMALLS.add
def out_of_two(x: Tensor) -> Any:
    values, indices = ones(4), torch.zeros(4, dtype=torch.long)
    with torch.no_grad():
        result = torch.max(x, 1, out=(values, indices))
    return result, values, indices


@SMALLS.add
def out_with_gradient(x: Tensor) -> Any:
    return torch.add(x, 1, out=ones(4, 3))


@SMALLS.add
def out_lazy(x: Tensor) -> Any:
    step = x.detach() * 2
    view = step[1:]
    result = torch.add(ones(4, 3), 1, out=step)
    return result is step, step, view


@SMALLS.add
def foreach(x: Tensor, z: Tensor) -> Any:
    plain = [ones(4, 3), ones(4, 3)]
    torch._foreach_add_(plain, [x * 2, z])
    return plain, torch._foreach_mul([x, z], 2.0), torch._foreach_norm([x, z * 2])


@SMALLS.add
def foreach_in_place(x: Tensor, z: Tensor) -> Any:
    steps = [x * 2, z * 3]
    torch._foreach_mul_(steps, 2.0)
    torch._foreach_addcmul_(steps, [x, x], [z, z], 0.5)
    return steps


# Into lazy tensors


@SMALLS.add
def item_of_lazy(x: Tensor, z: Tensor, labels: Tensor) -> Any:
    step = x * 2
    view = step[:, 0]
    step[0] = 7.0
    step[1:3, 1] = z[0, :2]
    step[3] = ones(3)
    step[labels, 2] = z.sum()
    step[step > 2] = 0.25
    return step, view


@SMALLS.add
def batch_in_place(x: Tensor) -> Any:
    step = x.detach()
    step.mul_(2)
    return step.sin(), step.cos(), x * 1


@SMALLS.add
def batch_in_place_needs_no_leaf(x: Tensor) -> Any:
    x.mul_(2)
    return x


@SMALLS.add
def view_sees_the_write(x: Tensor) -> Any:
    hidden = x * 2
    view, total = hidden[:, 0], hidden.sum()
    hidden.add_(total)
    return view.exp(), total


@SMALLS.add
def write_through_a_view(x: Tensor) -> Any:
    step = torch.cat([x, x], 1)
    step[:3].diagonal().fill_(0)
    step.t()[1].mul_(3)
    return step


@SMALLS.add
def relu_in_place(x: Tensor) -> Any:
    step = x * 2
    result = F.relu(step, inplace=True)
    return result is step, step, F.dropout(step, 0.5, inplace=True)


@SMALLS.add
def data_in_place(x: Tensor) -> Any:
    step = x * 2
    step.data.mul_(3)
    step.data[0] = 1.0
    return step


@SMALLS.add
def data_set(x: Tensor) -> Any:
    step = x.detach() * 2
    step.data = ones(2, 2)
    return step


@SMALLS.add
def detached_in_place(x: Tensor) -> Any:
    step = x * 2
    kept = step.detach()
    return step.detach_().requires_grad, step, kept


@SMALLS.add
def resized(x: Tensor) -> Any:
    step = x.detach() * 2
    step.resize_(2, 6)
    return step, step.t_(), step.unsqueeze_(0)


@SMALLS.add
def needed_by_backward(x: Tensor) -> Any:
    step = x.exp()
    step.add_(1)
    return step


# Into modules


@SMALLS.add
def parameter_of_lazy(x: Tensor) -> Any:
    weight = nn.Parameter(x * 2)
    (weight * 3).sin().sum().backward()
    return isinstance(weight, nn.Parameter), weight.detach(), weight.grad


@SMALLS.add
def parameter_of_the_batch(x: Tensor) -> Any:
    module = nn.Module()
    module.weight = nn.Parameter(x)
    return [name for name, _ in module.named_parameters()], module.weight.detach() * 2


@SMALLS.add
def buffer_of_lazy(x: Tensor) -> Any:
    module = nn.Module()
    module.register_buffer("seen", x * 2)
    module.seen = module.seen + x
    return module.seen, list(module.state_dict()), module.state_dict()["seen"]


@SMALLS.add
def load_lazy(x: Tensor) -> Any:
    module = linear()
    module.load_state_dict({"weight": x[:2].detach() * 2, "bias": x[0, :2].detach()})
    return module.weight.detach(), module.bias.detach(), module(x)


@SMALLS.add
def batch_norm(x: Tensor) -> Any:
    module = nn.BatchNorm1d(3).double()
    return module(x), module(x * 2), module.running_mean, module.num_batches_tracked


@SMALLS.add
def embedding_with_max_norm(labels: Tensor) -> Any:
    torch.manual_seed(0)
    module = nn.Embedding(3, 4, max_norm=0.5).double()
    result = module(labels)
    return result, module.weight.detach()


@SMALLS.add
def clipped(x: Tensor) -> Any:
    module = linear()
    (module(x) ** 2).sum().backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    nn.utils.clip_grad_value_(module.parameters(), 0.05)
    return norm, [parameter.grad for parameter in module.parameters()]


@SMALLS.add
def clipped_by_a_lazy(x: Tensor) -> Any:
    module = linear()
    module(x).sum().backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), float((x.detach() ** 2).sum()) / 100)
    assert module.weight.grad is not None
    module.weight.grad.mul_(x.detach().mean())
    return norm, module.weight.grad


@pytest.mark.sanitize
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", SMALLS)
def test_equals_eager(name: str, requires_grad: bool) -> None:
    SMALLS[name].check(requires_grad)


def test_the_users_tensor_is_written_once() -> None:
    """An in-place op on the batch reaches the user's own tensor, once, in two forwards."""
    x = weights((4, 3), torch.float64).clone()
    wanted = x * 2
    lazy = koila.lazy(x)
    lazy.mul_(2)
    module = linear()
    losses = [module(lazy).sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    assert lazy.tolist() == wanted.tolist()
    assert x.tolist() == wanted.tolist()


def test_off() -> None:
    """Within `off`, and for what is no tensor, `lazy` returns what it is given."""
    x = ones(4, 3)
    with koila.off():
        assert koila.lazy(x) is x
    assert koila.lazy(x, 3)[1] == 3


def test_an_error_leaves_nothing_behind() -> None:
    """After a call that torch refuses, the next program runs as if it had never been made."""
    for _ in range(3):
        lazy = koila.lazy(ones(4, 3))
        with contextlib.suppress(RuntimeError):
            (lazy @ lazy).sum().item()
        with contextlib.suppress(IndexError):
            lazy[9].sum().item()
        assert (lazy * 2).sum().item() == 24
    assert (koila.lazy(ones(4, 3)) * 3).sum().item() == 36
