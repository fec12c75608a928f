# SPDX-License-Identifier: Apache-2.0
"""What goes into a step and what is written in it: containers, views, in-place, modes, draws."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import koila
from oracle import Lazy, assert_same_story, gradients, split
from programs_vision import DropoutMlp, Mlp
from stories import N_ROWS, batches, each_split, make

pytestmark = pytest.mark.sanitize

# What may be made lazy --------------------------------------------------------------------------

Batch = collections.namedtuple("Batch", ["x", "y"])


@dataclasses.dataclass
class Sample:
    """A batch as a dataclass, with something in it that is no tensor."""

    x: Tensor
    y: Tensor
    name: str = "sample"


@pytest.mark.parametrize("kind", ["dict", "namedtuple", "dataclass", "list", "nested"])
@each_split
def test_containers(chunks: int | None, kind: str) -> None:
    """A container comes back as what it was, its tensors lazy and the rest as it is."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        extra: Any = None
        if kind == "dict":
            batch = lazy({"x": x, "y": y, "id": "a"})
            x, y, extra = batch["x"], batch["y"], batch["id"]
        elif kind == "namedtuple":
            x, y = batch = lazy(Batch(x, y))
            extra = type(batch).__name__
        elif kind == "dataclass":
            sample = lazy(Sample(x, y))
            x, y, extra = sample.x, sample.y, (sample.name, type(sample).__name__)
        elif kind == "list":
            batch = lazy([x, y])
            x, y = batch
            extra = type(batch).__name__
        else:
            batch, y = lazy({"inputs": (x, [x * 2]), "n": 3}, y)
            x = batch["inputs"][0] + batch["inputs"][1][0]
            extra = batch["n"]
        F.cross_entropy(model(x), y).backward()
        return extra, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_one_call_for_each_tensor(chunks: int | None) -> None:
    """Inputs and labels made lazy one by one are rows of one batch all the same."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x = lazy(x)
        y = lazy(y)
        F.cross_entropy(model(x), y).backward()
        return gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_only_inputs_are_lazy(chunks: int | None) -> None:
    """Plain labels, weights and masks of the batch's size are cut along."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        keep = torch.rand(len(x), 5, dtype=torch.float64)
        shift = torch.randn(len(x), 1, dtype=torch.float64)
        x = lazy(x)
        out = model(x + shift) * keep
        loss = F.cross_entropy(out, y) + (out * F.one_hot(y, 5)).sum(1).mean()
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_lazy_twice(chunks: int | None) -> None:
    """Making a lazy tensor lazy again changes nothing."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(*lazy(x, y))
        F.cross_entropy(model(x), y).backward()
        return gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_data_loader(chunks: int | None) -> None:
    """Each batch of a loader is made lazy, the last one smaller."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make(n_rows=23)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for batch in DataLoader(TensorDataset(x, y), batch_size=9):
            a, b = lazy(*batch)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model

    assert_same_story(story, chunks)


@each_split
def test_time_major(chunks: int | None) -> None:
    """batch=1: the rows are the second dim, and views merge it with time."""

    def story(lazy: Lazy) -> Any:
        rnn, head = nn.LSTM(6, 8).double(), nn.Linear(8, 5).double()
        x = torch.randn(4, N_ROWS, 6, dtype=torch.float64)
        y = torch.randint(0, 5, (4, N_ROWS))
        x, y = lazy(x, y, batch=1)
        out, (h, c) = rnn(
            x, (torch.zeros(1, N_ROWS, 8).double(), torch.ones(1, N_ROWS, 8).double())
        )
        loss = F.cross_entropy(head(out[:2]).view(-1, 5), y[:2].reshape(-1)) + h.pow(2).mean()
        loss.backward()
        return loss, c, gradients(rnn, head)

    assert_same_story(story, chunks)


def test_off() -> None:
    """Inside off() lazy() returns what it is given."""
    x, y = batches(1)[0]
    with koila.off():
        a, b = koila.lazy(x, y)
    assert a is x
    assert b is y
    assert not koila.is_lazy(a)


# What may be done with a lazy -------------------------------------------------------------------


@each_split
def test_metadata(chunks: int | None) -> None:
    """A lazy answers for its shape and kind as its value would."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        out = model(x)
        seen = []
        for value in (x, y, out, out.t(), out[:, 1:], out.mean(), (out > 0)):
            seen.append([list(value.shape), list(value.size()), value.dim(), value.ndim])
            seen.append([value.numel(), str(value.dtype), str(value.device), value.requires_grad])
            seen.append([value.is_floating_point(), value.is_contiguous(), list(value.stride())])
            seen.append([value.is_leaf, value.element_size(), str(value.layout), value.is_cuda])
        seen.append([len(out), out.size(0), out.shape[-1], out.size(-1), isinstance(out, Tensor)])
        F.cross_entropy(out, y).backward()
        return seen, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_views(chunks: int | None) -> None:
    """Views of views, with the batch's size baked in, inferred, merged and moved."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        h = model.body(x)
        b = h.size(0)
        h = h.view(b, 4, 4).transpose(1, 2).reshape(b * 4, 4).view(-1, 4, 4).permute(2, 0, 1)
        h = h.contiguous().movedim(1, 0).flatten(1)[:, None].expand(-1, 3, -1).mean(1)
        h = torch.cat([part.squeeze(1) for part in h.unsqueeze(1).chunk(2, dim=2)], dim=1)
        h = h.unflatten(1, (2, 8)).unbind(1)[0].repeat(1, 2)
        h = h.view(N_ROWS, 2, -1).select(1, 0).repeat_interleave(2, dim=1)
        F.cross_entropy(model.head(h), y).backward()
        return gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_in_place(chunks: int | None) -> None:
    """Writes into activations, through views and slices, as eager orders them."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        h = model.body(x) * 1.0
        h[:, 0] = 0
        h[:, 1:3] *= 2
        h[:, 3] = h[:, 4] + 1
        h.view(len(x), 4, 4)[:, 1].add_(0.5)
        h += x[:, :1]
        h[h < -1.5] = -1.5
        column = h[:, 5]
        column.mul_(3)
        h[..., -1:].relu_()
        out = model.head(h)
        out.sub_(out.detach().amax(1, keepdim=True))
        loss = F.cross_entropy(out, y)
        loss.backward()
        return loss, h, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_in_place_on_the_batch(chunks: int | None) -> None:
    """Normalising the input in place changes the user's tensor, once."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        mine = x
        x, y = lazy(x, y)
        x.sub_(0.25).mul_(2)
        x[:, 0] = 1
        loss = F.cross_entropy(model(x), y) + model(x).pow(2).mean()
        loss.backward()
        return loss, x, mine, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_rows_written_into_a_plain_tensor(chunks: int | None) -> None:
    """A plain tensor filled step by step with lazy values, with and without gradient."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        steps = torch.zeros(3, len(x), 5, dtype=torch.float64)
        log = torch.zeros(len(x), dtype=torch.float64)
        for i in range(3):
            steps[i] = model(x * (i + 1))
        log[:] = steps.detach().sum((0, 2))
        loss = F.cross_entropy(steps[1:].mean(0), y)
        loss.backward()
        return loss, log, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_python_iterates_over_rows(chunks: int | None) -> None:
    """A loop over samples, and one sample taken out."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        out = model(x)
        pairs = zip(out, y, strict=True)
        loss = sum(F.cross_entropy(row[None], label[None]) for row, label in pairs) / len(x)
        loss = loss + out[0].pow(2).sum() + out[-1].sum()
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_copies_are_plain(chunks: int | None) -> None:
    """deepcopy, pickle and torch.save of a lazy give plain tensors of its value."""
    model, x, y = make()
    with split(chunks):
        a, _ = koila.lazy(x, y)
        out = model(a).detach()
        file = io.BytesIO()
        torch.save({"out": out}, file)
        file.seek(0)
        copies = [copy.deepcopy(out), pickle.loads(pickle.dumps(out)), torch.load(file)["out"]]
    for copied in copies:
        assert type(copied) is Tensor
        torch.testing.assert_close(copied, model(x).detach())


@each_split
def test_numpy_and_back(chunks: int | None) -> None:
    """Values that go through numpy, lists and torch.tensor are the values."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        out = model(x)
        weight = torch.from_numpy(out.detach().numpy()).softmax(1)[:, 0]
        best = torch.tensor(out.detach().argmax(1).tolist())
        again = torch.as_tensor(out.detach()).clone()
        losses = F.cross_entropy(out, best, reduction="none") * weight
        losses.mean().backward()
        return weight, best, again, gradients(model)

    assert_same_story(story, chunks)


# Modes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["forward", "loss too"])
@each_split
def test_autocast(chunks: int | None, inside: str) -> None:
    """bfloat16 by autocast, left before backward(), as the documentation says to."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make(torch.float32)
        x, y = lazy(x, y)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            loss = F.cross_entropy(out, y) if inside == "loss too" else None
        if loss is None:
            loss = F.cross_entropy(out.float(), y)
        loss.backward()
        return str(out.dtype), str(loss.dtype), loss, gradients(model)

    assert_same_story(story, chunks, tolerance=2e-2)


@each_split
def test_grad_scaler(chunks: int | None) -> None:
    """Steps through a gradient scaler, one of them skipped for an overflow."""

    def story(lazy: Lazy) -> Any:
        model = Mlp().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        seen = []
        for i, (x, y) in enumerate(batches(4)):
            x, y = lazy(x.float(), y)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) * (float("inf") if i == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen.append([loss.item(), scaler.get_scale()])
        return seen, model

    assert_same_story(story, chunks)


@each_split
def test_no_grad_in_the_middle(chunks: int | None) -> None:
    """A part without gradient, one with it switched on again, and detach()."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        with torch.no_grad():
            teacher = model(x).softmax(-1)
            with torch.enable_grad():
                inner = model.body(x)
        out = model.head(inner) + model(x).detach()
        loss = F.cross_entropy(out, y) + F.cross_entropy(model(x), teacher)
        loss.backward()
        flags = teacher.requires_grad, inner.requires_grad, out.requires_grad
        return flags, loss, gradients(model)

    assert_same_story(story, chunks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_split
def test_default_dtype(chunks: int | None, dtype: torch.dtype) -> None:
    """The default dtype of the forward is that of its replay."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make(dtype)
        before = torch.get_default_dtype()
        x, y = lazy(x, y)
        torch.set_default_dtype(dtype)
        try:
            out = model(x) * torch.tensor(1.5) + torch.ones(len(x), 1)
            weight = (y == 1).to(torch.get_default_dtype()).mean() + y.sum() / 10
            loss = F.cross_entropy(out, y) * weight
        finally:
            torch.set_default_dtype(before)
        loss.backward()
        return str(loss.dtype), loss, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_dispatch_mode_around_the_step(chunks: int | None) -> None:
    """A profiler's dispatch mode counts what it counts in eager."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        with FlopCounterMode(display=False) as counter:
            x, y = lazy(x, y)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        return loss, gradients(model), counter.get_total_flops()

    assert_same_story(story, chunks, whole="a dispatch mode sees each call")


@each_split
def test_function_mode_around_the_step(chunks: int | None) -> None:
    """So does a function mode that changes what is called."""

    class Louder(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            result = func(*args, **(kw or {}))
            return result * 2 if func is torch.tanh else result

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        with Louder(), torch.device("cpu"):
            loss = F.cross_entropy(model(x), y) + torch.zeros(1).sum()
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


# Draws ------------------------------------------------------------------------------------------


@each_split
def test_dropout_is_eagers(chunks: int | None) -> None:
    """Two steps with dropout draw what eager draws."""

    def story(lazy: Lazy) -> Any:
        model = DropoutMlp().double()
        losses = []
        for x, y in batches(2):
            x, y = lazy(x, y)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())
        return losses, gradients(model), torch.rand(3)

    assert_same_story(story, chunks)


@each_split
def test_masks_are_the_same_when_run_again(chunks: int | None) -> None:
    """A loss that is read first, then differentiated, drew its masks once."""
    model, x, y = DropoutMlp().double(), *batches(1)[0]
    seen = []
    for _ in range(2):
        torch.manual_seed(5)
        model.zero_grad()
        with split(chunks):
            a, b = koila.lazy(x, y)
            out = model(a)
            loss = F.cross_entropy(out, b).sqrt()
            read = loss.item()
            kept = out.detach().clone()
            loss.backward()
            again = F.cross_entropy(kept, y).sqrt().item()
        assert read == pytest.approx(again, rel=1e-12)
        assert loss.item() == pytest.approx(read, rel=1e-12)
        seen.append([read, *(p.grad.clone() for p in model.parameters())])
    for first, second in zip(*seen, strict=True):
        assert torch.equal(torch.as_tensor(first), torch.as_tensor(second))
