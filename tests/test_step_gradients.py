# SPDX-License-Identifier: Apache-2.0
"""Where gradients go, and who looks at them on the way: leaves, cuts, hooks, autograd.grad."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from oracle import Lazy, assert_same_story, gradients, split
from programs_vision import Mlp
from stories import batches, each_split, make

pytestmark = pytest.mark.sanitize

# Leaves -----------------------------------------------------------------------------------------


@each_split
def test_sparse_gradients(chunks: int | None) -> None:
    """An embedding with sparse=True gets a sparse gradient, added to the one that is there."""

    def story(lazy: Lazy) -> Any:
        table = nn.Embedding(9, 5, sparse=True).double()
        words, labels = torch.randint(0, 9, (11, 3)), torch.randint(0, 5, (11,))
        optimizer = torch.optim.SparseAdam(table.parameters())
        for _ in range(2):
            x, y = lazy(words, labels)
            F.cross_entropy(table(x).sum(1) + table(x[:, 0]), y).backward()
        gradient = table.weight.grad
        assert gradient is not None
        assert gradient.is_sparse
        optimizer.step()
        return gradient.to_dense(), table.weight

    assert_same_story(story, chunks)


@pytest.mark.parametrize("frozen", ["body", "head", "bias", "all but one"])
@each_split
def test_frozen_parameters(chunks: int | None, frozen: str) -> None:
    """What is frozen keeps None for a gradient, and what lies behind it still gets its own."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        for name, parameter in model.named_parameters():
            keep = name == "body.0.weight" if frozen == "all but one" else frozen not in name
            parameter.requires_grad_(keep)
        x, y = lazy(x, y)
        F.cross_entropy(model(x), y).backward()
        return gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_everything_frozen(chunks: int | None) -> None:
    """A loss of nothing that can be trained says so as torch does."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        model.requires_grad_(False)
        x, y = lazy(x, y)
        loss = F.cross_entropy(model(x), y)
        with pytest.raises(RuntimeError, match="does not require grad"):
            loss.backward()
        return loss.requires_grad, loss.item()

    assert_same_story(story, chunks)


@each_split
def test_unused_parameters(chunks: int | None) -> None:
    """A parameter that the step does not use keeps None, and one times zero gets zeros."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        unused, idle = nn.Linear(6, 5).double(), nn.Linear(6, 5).double()
        x, y = lazy(x, y)
        (F.cross_entropy(model(x) + 0 * idle(x), y)).backward()
        return gradients(model, unused, idle)

    assert_same_story(story, chunks)


@each_split
def test_gradients_already_there(chunks: int | None) -> None:
    """Gradients are added to those that stand, in the tensors that hold them."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        held = []
        for i, parameter in enumerate(model.parameters()):
            if i % 2:
                parameter.grad = torch.full_like(parameter, 0.25)
                held.append((parameter, parameter.grad))
        x, y = lazy(x, y)
        F.cross_entropy(model(x), y).backward()
        return [p.grad is g for p, g in held], [g for _, g in held], gradients(model)

    assert_same_story(story, chunks)


@pytest.mark.parametrize("when", ["before", "after"])
@each_split
def test_input_gradients(chunks: int | None, when: str) -> None:
    """The input's gradient is there under the name that was made lazy."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        if when == "before":
            x.requires_grad_()
        x, y = lazy(x, y)
        if when == "after":
            x.requires_grad_()
        F.cross_entropy(model(x), y).backward()
        return x.grad, x.grad.shape, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_input_gradient_on_the_users_tensor(chunks: int | None) -> None:
    """A leaf that asked for its gradient before it was made lazy gets it, and accumulates."""

    def story(lazy: Lazy) -> Any:
        model, leaf, y = make()
        leaf.requires_grad_()
        for _ in range(2):
            x, y = lazy(leaf, y)
            F.cross_entropy(model(x), y).backward()
        return leaf.grad, leaf

    assert_same_story(story, chunks)


@each_split
def test_projected_gradient_ascent(chunks: int | None) -> None:
    """PGD: the input moves along its own gradient for some steps, then the model is trained."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        moved = x.detach() + 0.01
        for _ in range(3):
            moved = moved.detach().requires_grad_()
            loss = F.cross_entropy(model(moved), y)
            (slope,) = torch.autograd.grad(loss, [moved])
            moved = moved + 0.02 * slope.sign()
            moved = torch.max(torch.min(moved, x + 0.05), x - 0.05)
        F.cross_entropy(model(moved.detach()), y).backward()
        return moved, gradients(model)

    assert_same_story(story, chunks)


# autograd.grad and arguments of backward() ------------------------------------------------------


@each_split
def test_autograd_grad_of_parameters(chunks: int | None) -> None:
    """autograd.grad gives gradients away and leaves .grad alone."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        spare = nn.Parameter(torch.zeros(3))
        x, y = lazy(x, y)
        loss = F.cross_entropy(model(x), y)
        wanted = [*model.parameters(), spare]
        given = torch.autograd.grad(loss, wanted, allow_unused=True)
        return given, gradients(model), loss.item()

    assert_same_story(story, chunks)


@each_split
def test_autograd_grad_of_activations(chunks: int | None) -> None:
    """The gradient of an activation has a row for each row."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        h = model.body(x)
        loss = F.cross_entropy(model.head(torch.tanh(h)), y)
        (of_h,) = torch.autograd.grad(loss, h, retain_graph=True)
        loss.backward()
        return of_h, gradients(model)

    assert_same_story(story, chunks, whole="a gradient with rows is asked for")


@each_split
def test_backward_of_some_inputs(chunks: int | None) -> None:
    """backward(inputs=...) accumulates in those alone."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        F.cross_entropy(model(x), y).backward(inputs=list(model.head.parameters()))
        return gradients(model)

    assert_same_story(story, chunks)


@pytest.mark.parametrize("kind", ["scalar", "plain rows", "lazy rows", "made from rows"])
@each_split
def test_gradient_argument(chunks: int | None, kind: str) -> None:
    """backward(gradient) of a scalar, or of a loss for each row."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        weight = torch.rand(len(x), dtype=torch.float64)
        x, y, lazy_weight = lazy(x, y, weight)
        losses = F.cross_entropy(model(x), y, reduction="none")
        if kind == "scalar":
            losses.mean().backward(gradient=torch.tensor(3.0, dtype=torch.float64))
        elif kind == "plain rows":
            losses.backward(weight)
        elif kind == "lazy rows":
            losses.backward(gradient=lazy_weight)
        else:
            losses.backward(torch.ones_like(losses))
        return gradients(model), losses

    assert_same_story(story, chunks)


@each_split
def test_backward_of_several_losses_at_once(chunks: int | None) -> None:
    """torch.autograd.backward takes a list of losses and their gradients."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        out = model(x)
        losses = [F.cross_entropy(out, y), (out**2).sum()]
        scales = [torch.tensor(0.5).double(), torch.tensor(2.0).double()]
        torch.autograd.backward(losses, scales)
        return gradients(model), losses

    assert_same_story(story, chunks)


@each_split
def test_implicit_gradient_of_rows_is_refused(chunks: int | None) -> None:
    """A loss of many rows without a gradient argument is torch's own error."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        losses = F.cross_entropy(model(x), y, reduction="none")
        with pytest.raises(RuntimeError, match="implicitly created only for scalar outputs"):
            losses.backward()
        losses.mean().backward()
        return gradients(model)

    assert_same_story(story, chunks)


# Cuts between eager's graph and the tape --------------------------------------------------------


@each_split
def test_parameter_computed_from_another(chunks: int | None) -> None:
    """A weight that is no leaf gets its gradient once, summed over the chunks."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        raw = nn.Parameter(torch.randn(5, 16, dtype=torch.float64))
        weight = raw * 2 + raw.tanh()
        x, y = lazy(x, y)
        loss = F.cross_entropy(F.linear(torch.tanh(model.body(x)), weight), y)
        loss.backward()
        return raw.grad, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_parametrised_weight(chunks: int | None) -> None:
    """Weight norm computes the weight at each forward."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        nn.utils.parametrizations.weight_norm(model.head)
        x, y = lazy(x, y)
        F.cross_entropy(model(x), y).backward()
        return gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_encoder_run_eagerly_first(chunks: int | None) -> None:
    """What is made lazy may already have a graph of its own behind it."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        encoder = nn.Linear(6, 6).double()
        h = torch.sigmoid(encoder(x))
        h, y = lazy(h, y)
        F.cross_entropy(model(h), y).backward()
        return gradients(encoder, model)

    assert_same_story(story, chunks)


@each_split
def test_eager_tail(chunks: int | None) -> None:
    """A lazy loss meets a plain one that has a graph of its own."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        other = model(torch.randn(4, 6, dtype=torch.float64)).pow(2).mean()
        x, y = lazy(x, y)
        loss = F.cross_entropy(model(x), y) * other.sqrt() + other
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


# Hooks ------------------------------------------------------------------------------------------


@each_split
def test_parameter_hooks(chunks: int | None) -> None:
    """A hook on a parameter is called once, with the whole gradient, and may change it."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        seen = []

        def hook(gradient: Tensor) -> Tensor:
            seen.append(gradient.clone())
            return gradient / (gradient.norm() + 1)

        handles = [parameter.register_hook(hook) for parameter in model.parameters()]
        x, y = lazy(x, y)
        F.cross_entropy(model(x), y).backward()
        for handle in handles:
            handle.remove()
        return len(seen), sorted(float(g.norm()) for g in seen), gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_optimizer_in_backward(chunks: int | None) -> None:
    """A post-accumulate hook steps each parameter once, and frees its gradient."""

    def story(lazy: Lazy) -> Any:
        model = Mlp().double()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        calls = []

        def hook(parameter: nn.Parameter) -> None:
            calls.append(tuple(parameter.shape))
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        losses = []
        for x, y in batches(3):
            x, y = lazy(x, y)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())
        return sorted(calls), losses, model, gradients(model)

    assert_same_story(story, chunks)


@pytest.mark.parametrize("kind", ["normalise", "look", "clamp"])
@each_split
def test_hooks_on_activations(chunks: int | None, kind: str) -> None:
    """A hook on an activation sees the gradient of all rows, once."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        seen = []

        def hook(gradient: Tensor) -> Tensor | None:
            seen.append(gradient.clone())
            if kind == "normalise":
                return gradient / gradient.norm()
            return gradient.clamp(-1e-3, 1e-3) if kind == "clamp" else None

        h = model.body(x)
        h.register_hook(hook)
        F.cross_entropy(model.head(torch.tanh(h)), y).backward()
        return seen, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_removed_hook(chunks: int | None) -> None:
    """A hook taken off again before backward() is not called."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        h = model.body(x)
        handle = h.register_hook(lambda gradient: gradient * 100)
        loss = F.cross_entropy(model.head(h), y)
        handle.remove()
        loss.backward()
        return gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_retain_grad(chunks: int | None) -> None:
    """An activation that retains its gradient has it afterwards, whole."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        h = model.body(x)
        h.retain_grad()
        loss = F.cross_entropy(model.head(torch.tanh(h)), y)
        loss.retain_grad()
        loss.backward()
        return h.grad, loss.grad, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_module_hooks(chunks: int | None) -> None:
    """Forward hooks are called once for a call; what they keep can be read after the step."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        kept = []
        model.body[1].register_forward_hook(lambda module, args, out: kept.append(out.detach()))
        model.head.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        x, y = lazy(x, y)
        F.cross_entropy(model(x), y).backward()
        return len(kept), kept, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_full_backward_hooks(chunks: int | None) -> None:
    """A module's backward hook sees the gradients of all rows at its inputs and outputs, once."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        seen = []

        def hook(module: nn.Module, of_inputs: Any, of_outputs: Any) -> None:
            seen.append([[g.clone() for g in gs] for gs in (of_inputs, of_outputs)])

        model.head.register_full_backward_hook(hook)
        x, y = lazy(x, y)
        F.cross_entropy(model(x), y).backward()
        return seen, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_state_between_forward_and_backward(chunks: int | None) -> None:
    """Nothing the user holds has changed before backward() is called."""
    model, x, y = make()
    with split(chunks):
        x, y = koila.lazy(x, y)
        loss = F.cross_entropy(model(x), y)
        assert all(gradient is None for gradient in gradients(model).values())
        loss.backward()
    assert all(gradient is not None for gradient in gradients(model).values())
