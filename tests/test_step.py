# SPDX-License-Identifier: Apache-2.0
"""The step as people write it: reads, optimizers, accumulation, evaluation, in chunks or not."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from koila import _core
from oracle import FlopCounter, Lazy, assert_same_story, gradients, split
from programs_vision import Discriminator, DropoutMlp, Generator, Mlp
from stories import batches, each_split, make, train

#: torch warns of `float(loss)`, as people write it, once in a process.
pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")

# Before backward() ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["first", "before backward", "after step"])
@pytest.mark.parametrize("set_to_none", [True, False])
@each_split
def test_zero_grad_anywhere(chunks: int | None, place: str, set_to_none: bool) -> None:
    """Gradients are cleared before the forward, between forward and backward, or at the end."""

    def story(lazy: Lazy) -> Any:
        model = Mlp().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches(3):
            x, y = lazy(x, y)
            if place == "first":
                optimizer.zero_grad(set_to_none)
            loss = F.cross_entropy(model(x), y)
            if place == "before backward":
                optimizer.zero_grad(set_to_none)
            loss.backward()
            optimizer.step()
            if place == "after step":
                optimizer.zero_grad(set_to_none)
        return model, gradients(model)

    assert_same_story(story, chunks)


def printed(value: Any) -> str:
    """Return what print() shows of a number, without what follows it."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print(value)
    return out.getvalue().split(",")[0]


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda loss: loss.item(),
    "float": float,
    "print": printed,
    "str": lambda loss: str(loss).split(",")[0],
    "format": lambda loss: f"{loss:.4f}",
    "detach_item": lambda loss: loss.detach().cpu().item(),
    "tolist": lambda loss: loss.tolist(),
    "numpy": lambda loss: loss.detach().numpy(),
    "isnan": lambda loss: bool(torch.isnan(loss)),
    "isfinite": lambda loss: math.isfinite(loss),
    "compare": lambda loss: bool(loss > 0.0),
    "deepcopy": lambda loss: copy.deepcopy(loss.detach()),
    "clone": lambda loss: loss.detach().clone(),
}


@pytest.mark.parametrize("read", READS)
@each_split
def test_loss_read_before_backward(chunks: int | None, read: str) -> None:
    """The loss may be read, several times, and is differentiable still."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        loss = F.cross_entropy(model(x), y)
        seen = [READS[read](loss), READS[read](loss)]
        loss.backward()
        return [s.tolist() if hasattr(s, "tolist") else s for s in seen], loss, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_early_stop_on_nan(chunks: int | None) -> None:
    """Control flow on the loss takes the branch eager takes."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x[0, 0] = float("nan")
        x, y = lazy(x, y)
        loss = F.cross_entropy(model(x), y)
        if torch.isnan(loss):
            loss = torch.nan_to_num(model(x)).mean()
        if not torch.isfinite(loss).all():
            raise AssertionError("the second loss is finite")
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_activations_read_before_backward(chunks: int | None) -> None:
    """Logits may be looked at in the middle of the step."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        logits = model(x)
        norm = logits.norm().item()
        top = logits.argmax(dim=1).tolist()
        loss = F.cross_entropy(logits, y) * (2.0 if norm > 1 else 3.0)
        loss.backward()
        return norm, top, loss.item(), gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_metrics_after_the_step(chunks: int | None) -> None:
    """Accuracy is of the logits before the step, though it is computed after it."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
        x, y = lazy(x, y)
        logits = model(x)
        accuracy = (logits.argmax(1) == y).double().mean()
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        later = (logits.argmax(dim=1) == y).sum().item() / len(y)
        return accuracy.item(), later, logits, loss.item(), logits.softmax(-1), model

    assert_same_story(story, chunks)


def test_explained_before_backward() -> None:
    """explain() names each barrier and its line, and leaves the step as it was."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        loss = torch.sqrt(F.cross_entropy(model(x), y))
        if lazy is koila.lazy:
            text = koila.explain(loss, full=True)
            assert "sqrt" in text
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, 3)


# Optimizers -------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@each_split
def test_several_steps(chunks: int | None, name: str) -> None:
    """Five steps of each optimizer, with a schedule, and the losses on the way."""

    def story(lazy: Lazy) -> Any:
        model = Mlp().double()
        optimizer = OPTIMIZERS[name](model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        losses = []
        for x, y in batches(5):
            x, y = lazy(x, y)
            losses.append(train(model, optimizer, x, y).item())
            schedule.step()
        return losses, model

    assert_same_story(story, chunks)


@each_split
def test_lbfgs(chunks: int | None) -> None:
    """A closure uses one lazy batch again and again, after each of its steps."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe")
        x, y = lazy(x, y)
        seen = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            seen.append(loss.item())
            return loss

        optimizer.step(closure)
        return seen[:3], model

    assert_same_story(story, chunks, tolerance=1e-6)


@pytest.mark.parametrize("by", ["norm", "value", "hand"])
@each_split
def test_clipping(chunks: int | None, by: str) -> None:
    """Gradients are clipped as the whole that they are."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        F.cross_entropy(model(x), y).backward()
        norm: Any = None
        if by == "norm":
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        elif by == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        else:
            for parameter in model.parameters():
                parameter.grad.clamp_(-0.02, 0.02).mul_(2)
        return norm, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_accumulation(chunks: int | None) -> None:
    """The user accumulates over batches of different sizes, and steps now and then."""

    def story(lazy: Lazy) -> Any:
        model = Mlp().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen, running = [], 0.0
        for i, n_rows in enumerate((11, 4, 7, 1)):
            x, y = lazy(*batches(1, n_rows)[0])
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            running += loss.item()
            seen.append(gradients(model))
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        return running, seen[0], seen[2], model

    assert_same_story(story, chunks)


@each_split
def test_losses_of_two_batches_in_one_backward(chunks: int | None) -> None:
    """Two lazy batches of different sizes and one loss of both."""

    def story(lazy: Lazy) -> Any:
        model = Mlp().double()
        (x, y), (u, _) = batches(1, 11)[0], batches(1, 7)[0]
        x, y = lazy(x, y)
        u = lazy(u)
        loss = F.cross_entropy(model(x), y) + 0.5 * model(u).pow(2).mean()
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_two_losses_with_retain_graph(chunks: int | None) -> None:
    """Two losses of one forward, each with its own backward."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        out = model(x)
        first, second = F.cross_entropy(out, y), (out**2).mean().sqrt()
        first.backward(retain_graph=True)
        before = {name: g.clone() for name, g in gradients(model).items() if g is not None}
        second.backward()
        return first, second, before, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_one_loss_twice_with_retain_graph(chunks: int | None) -> None:
    """The same loss backward twice adds its gradients twice."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_gan(chunks: int | None) -> None:
    """Two optimizers, a fake that is detached for one and differentiated for the other."""

    def story(lazy: Lazy) -> Any:
        g, d = Generator().double(), Discriminator().double()
        of_g = torch.optim.Adam(g.parameters(), lr=0.01, betas=(0.5, 0.999))
        of_d = torch.optim.Adam(d.parameters(), lr=0.01, betas=(0.5, 0.999))
        seen = []
        for x, _ in batches(3):
            x, z = lazy(x, torch.randn(len(x), 4, dtype=torch.float64))
            real, fake = torch.ones(len(x), 1).double(), torch.zeros(len(x), 1).double()
            d.zero_grad()
            of_real = F.binary_cross_entropy_with_logits(d(x), real)
            of_real.backward()
            made = g(z)
            of_fake = F.binary_cross_entropy_with_logits(d(made.detach()), fake)
            of_fake.backward()
            of_d.step()
            g.zero_grad()
            of_made = F.binary_cross_entropy_with_logits(d(made), real)
            of_made.backward()
            of_g.step()
            seen.append([of_real.item(), of_fake.item(), of_made.item(), made])
        return seen, g, d

    assert_same_story(story, chunks)


# Evaluation and long runs -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@each_split
def test_evaluation(chunks: int | None, mode: Any) -> None:
    """Predictions are collected over batches, the mean loss is a float, training goes on."""

    def story(lazy: Lazy) -> Any:
        model = Mlp().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        predictions, total, right = [], 0.0, 0
        model.eval()
        with mode():
            for x, y in batches(4):
                x, y = lazy(x, y)
                out = model(x)
                predictions.append(out)
                total += F.cross_entropy(out, y, reduction="sum").item()
                right += (out.argmax(1) == y).sum().item()
        model.train()
        for x, y in batches(2):
            x, y = lazy(x, y)
            train(model, optimizer, x, y)
        return torch.cat(predictions), predictions[0], total, right, model

    assert_same_story(story, chunks)


@each_split
def test_predictions_outlive_the_weights(chunks: int | None) -> None:
    """What was predicted under no_grad is of the weights at that time."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        with torch.no_grad():
            before = model(x)
            worst = F.cross_entropy(model(x), y)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        with torch.no_grad():
            after = model(x)
        return before, worst, after

    assert_same_story(story, chunks)


@pytest.mark.parametrize("chunks", [None, 3])
def test_flat_memory_over_many_steps(chunks: int | None) -> None:
    """`total += loss` over a thousand steps keeps no step alive: no more than a node of each loss,
    of which torch's own sum has more."""
    model = Mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    total: Any = 0.0
    marks = []
    with split(chunks):
        for step in range(1001):
            x, y = koila.lazy(*batches(1)[0])
            total += train(model, optimizer, x, y)
            if step in (200, 1000):
                gc.collect()
                _core.storage_bytes()  # forgets storages that have died: up to half of all noted
                marks.append((len(gc.get_objects()), sys.getallocatedblocks()))
    (objects, blocks), (objects_later, blocks_later) = marks
    assert objects_later - objects < 880, f"{objects_later - objects} objects in 800 steps"
    assert blocks_later - blocks < 4800, f"{blocks_later - blocks} blocks in 800 steps"
    assert math.isfinite(float(total))


@pytest.mark.parametrize("draws", [False, True])
@each_split
def test_what_is_left_over_by_a_step(chunks: int | None, draws: bool) -> None:
    """A number whose graph is left over, read after the step: nothing is run for it again."""

    def story(lazy: Lazy) -> Any:
        model: nn.Module = DropoutMlp() if draws else Mlp()
        model, kept = model.double(), []
        optimizer = torch.optim.Adam(model.parameters())
        for x, y in batches(3, 16):
            x, y = lazy(x, y)
            out = model(x)
            entropy = -(out.softmax(1) * out.log_softmax(1)).sum(1)
            optimizer.zero_grad()
            F.cross_entropy(out, y).backward()
            with FlopCounter() as counter:
                optimizer.step()
                kept.append((entropy.mean().item(), (entropy > 1.5).sum().item()))
            assert counter.flops == 0
        with pytest.raises(RuntimeError):
            entropy.sum().backward()
        return kept, model, optimizer.state_dict()["state"][0]["exp_avg"]

    assert_same_story(story, chunks)


@each_split
def test_a_loss_read_before_its_weights_change(chunks: int | None) -> None:
    """It cannot be gone back through after that, and says so: no gradient is lost in silence."""
    model, x, y = make()
    x, y = koila.lazy(x, y)
    with split(chunks, partly="backward starts at a value that was handed out"):
        loss = F.cross_entropy(model(x), y)
        loss.item()
        with torch.no_grad():
            model.body[0].weight.mul_(2.0)
            model.head.weight.mul_(2.0)
        with pytest.raises((koila.StaleError, RuntimeError)):
            loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())


@each_split
def test_running_total(chunks: int | None) -> None:
    """A sum of losses, detached or not, is the sum of their values."""

    def story(lazy: Lazy) -> Any:
        model = Mlp().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        total: Any = 0.0
        detached = torch.zeros((), dtype=torch.float64)
        kept = []
        for x, y in batches(4):
            x, y = lazy(x, y)
            loss = train(model, optimizer, x, y)
            total += loss
            detached += loss.detach()
            kept.append(loss)
        return float(total), detached, torch.stack(kept).mean().item(), model

    assert_same_story(story, chunks)


@each_split
def test_moving_average_of_the_weights(chunks: int | None) -> None:
    """An averaged copy of the model is updated and evaluated between steps."""

    def story(lazy: Lazy) -> Any:
        model = Mlp().double()
        averaged = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        seen = []
        for x, y in batches(3):
            x, y = lazy(x, y)
            with torch.no_grad():
                target = averaged(x)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target) + F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            averaged.update_parameters(model)
            seen.append(loss.item())
        return seen, model, averaged.module

    assert_same_story(story, chunks)
