# SPDX-License-Identifier: Apache-2.0
"""Batch normalization in training by rows: eager's numbers, statistics once, half the memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from chunked import split
from collector import collector_off
from koila.reductions import norms
from koila.running import overwritten
from oracle import Lazy, assert_same_story, assert_seen, eager, gradients
from profiled import bytes_over_time

ROWS = 11
CHUNKS = [None, 1, 2, 3, 7, ROWS]
Model = Callable[[], nn.Module]


class Block(nn.Module):
    """Two or three convolutions and what was before them."""

    def __init__(self, n_in: int, n_out: int, stride: int = 1, is_bottleneck: bool = False) -> None:
        super().__init__()
        middle = n_out // 2 if is_bottleneck else n_out
        sizes = [(n_in, middle, 1), (middle, middle, 3), (middle, n_out, 1)]
        if not is_bottleneck:
            sizes = [(n_in, n_out, 3), (n_out, n_out, 3)]
        layers: list[nn.Module] = []
        for i, (before, after, kernel) in enumerate(sizes):
            step = stride if i == len(sizes) - 2 else 1
            layers.append(nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False))
            layers.append(nn.BatchNorm2d(after))
            layers.append(nn.ReLU(inplace=True))
        self.body = nn.Sequential(*layers[:-1])
        is_same = n_in == n_out and stride == 1
        shortcut = nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out)
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def head(n: int, *layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, 5))


def resnet(is_bottleneck: bool = False) -> nn.Module:
    stem = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
    blocks = Block(4, 4, 1, is_bottleneck), Block(4, 8, 2, is_bottleneck)
    return head(8, *stem, nn.MaxPool2d(2), *blocks)


def mobile() -> nn.Module:
    """An inverted residual: wide, depthwise, squeezed."""
    wide = nn.Conv2d(3, 12, 1), nn.BatchNorm2d(12), nn.Hardswish()
    deep = nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.BatchNorm2d(12), nn.Hardswish()
    return head(4, *wide, *deep, nn.Conv2d(12, 4, 1), nn.BatchNorm2d(4))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(3 + 2 * i), nn.ReLU(), nn.Conv2d(3 + 2 * i, 2, 3, 1, 1))
            for i in range(3)
        )
        self.norm = nn.BatchNorm2d(9)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.norm(torch.cat(found, 1)).mean((2, 3))[:, :5]


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up = (
            nn.Sequential(nn.Conv2d(a, b, 3, 1, 1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in ((3, 4), (4, 8), (12, 5))
        )

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        low = F.interpolate(self.deep(F.max_pool2d(high, 2)), scale_factor=2)
        return self.up(torch.cat([high, low], 1)).amax((2, 3))


class OfDims(nn.Module):
    """Points, lines and volumes of three channels, made of the pictures."""

    def __init__(self, n_dims: int, **options: Any) -> None:
        super().__init__()
        self.n_dims = n_dims
        norms = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
        self.norm = norms[n_dims](3, **options)
        self.again = norms[n_dims](3, **options)
        self.last = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        shapes = {0: (3,), 1: (3, 64), 2: (3, 8, 8), 3: (3, 4, 4, 4)}
        x = x.mean((2, 3)) if self.n_dims == 0 else x.reshape(-1, *shapes[self.n_dims])
        x = self.again(torch.tanh(self.norm(x)))
        return self.last(x.flatten(2).mean(2) if self.n_dims else x)


MODELS: dict[str, Model] = {
    "resnet": resnet,
    "bottleneck": lambda: resnet(True),
    "mobile": mobile,
    "dense": Dense,
    "unet": UNet,
    "points": lambda: OfDims(0),
    "1d": lambda: OfDims(1),
    "2d": lambda: OfDims(2),
    "3d": lambda: OfDims(3),
    "no momentum": lambda: OfDims(2, momentum=None),
    "no statistics": lambda: OfDims(2, track_running_stats=False),
    "not affine": lambda: OfDims(2, affine=False),
    "sync": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(OfDims(2)),
    "large eps": lambda: OfDims(2, eps=0.5, momentum=0.7),
}


def pictures() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 3, 8, 8, dtype=torch.float64), torch.randint(0, 5, (ROWS,))


def seen(model: nn.Module) -> Any:
    return gradients(model), dict(model.named_buffers())


@pytest.mark.rotated("chunks")
@pytest.mark.sanitize
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, chunks: int | None) -> None:
    """All of it by rows, two steps one after the other."""

    def story(lazy: Lazy) -> Any:
        model = MODELS[name]().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            x, y = lazy(*pictures())
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, seen(model)

    assert_same_story(story, chunks)


def gan(lazy: Lazy) -> Any:
    """The discriminator's norms see the real and the made, and then only the made."""
    torch.manual_seed(1)
    made_of = nn.Linear(4, 48), nn.Unflatten(1, (3, 4, 4)), nn.BatchNorm2d(3), nn.ReLU()
    g = nn.Sequential(*made_of, nn.ConvTranspose2d(3, 3, 2, 2), nn.Tanh()).double()
    d = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Flatten())
    d = nn.Sequential(*d, nn.Linear(144, 1)).double()
    x, z = lazy(pictures()[0], torch.randn(ROWS, 4, dtype=torch.float64))
    fake = g(z)
    real = F.softplus(-d(x)).mean() + F.softplus(d(fake.detach())).mean()
    real.backward()
    of_d = seen(d)
    d.zero_grad()
    F.softplus(-d(fake)).mean().backward()
    return real, of_d, seen(g), seen(d)


def vae(lazy: Lazy) -> Any:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.ReLU()).double()
    decoder = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 192)
    ).double()
    x = lazy(pictures()[0])
    mean, spread = encoder(x).chunk(2, 1)
    z = mean + torch.randn_like(mean) * (spread / 2).exp()
    loss = F.mse_loss(decoder(z), x.flatten(1)) - (1 + spread - mean.pow(2) - spread.exp()).mean()
    loss.backward()
    return loss, seen(encoder), seen(decoder)


def under_no_grad(lazy: Lazy) -> Any:
    """Statistics are gathered for their own sake."""
    model = resnet().double()
    with torch.no_grad():
        out = model(lazy(pictures()[0]))
    return out.sum(), seen(model)


def read_before_backward(lazy: Lazy) -> Any:
    model = resnet().double()
    x, y = lazy(*pictures())
    out = model(x)
    loss = F.cross_entropy(out, y)
    told = loss.item(), (out.argmax(1) == y).sum().item()
    loss.backward()
    return told, out, seen(model)


def held(lazy: Lazy) -> Any:
    """Values of the middle that the script goes on holding."""
    model = OfDims(2).double()
    x, y = lazy(*pictures())
    normal = model.norm(x)
    middle = torch.tanh(normal)
    F.cross_entropy(model.last(model.again(middle).mean((2, 3))), y).backward()
    return normal, middle.sum(), seen(model)


def hooked(lazy: Lazy) -> Any:
    model = OfDims(2).double()
    x, y = lazy(*pictures())
    normal = model.norm(x)
    normal.register_hook(lambda g: g * 2)
    normal.retain_grad()
    F.cross_entropy(model.last(model.again(normal).mean((2, 3))), y).backward()
    return normal.grad, seen(model)


def input_gradient(lazy: Lazy) -> Any:
    model = OfDims(2).double()
    real, y = pictures()
    x, y = lazy(real.requires_grad_(), y)
    F.cross_entropy(model(x), y).backward()
    return real.grad, seen(model)


def frozen(lazy: Lazy) -> Any:
    """One norm evaluated, one whose weights are fixed."""
    model = OfDims(2).double()
    model.norm.eval()
    model.again.requires_grad_(False)
    x, y = lazy(*pictures())
    F.cross_entropy(model(x), y).backward()
    return seen(model)


def of_instances(n_dims: int, *, is_frozen: bool = False, **options: Any) -> Callable[[Lazy], Any]:
    """InstanceNorm with running statistics, which move by the mean of those of the rows."""

    def story(lazy: Lazy) -> Any:
        norm = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[n_dims]
        shape = {1: (3, 64), 2: (3, 8, 8), 3: (3, 4, 4, 4)}[n_dims]
        norms = [norm(3, track_running_stats=True, **options).double() for _ in range(2)]
        seen = []
        for _ in range(2):
            real = pictures()[0].requires_grad_()
            x = lazy(real).reshape(-1, *shape)
            once = norms[0](x)
            norms[1].train(not is_frozen)
            loss = norms[1](once.tanh() + norms[0](2 * x + 1)).square().tanh().mean()
            loss.backward()
            seen += [loss, real.grad]
        return seen, [gradients(norm) for norm in norms], [dict(n.named_buffers()) for n in norms]

    story.__name__ = f"of_instances_{n_dims}d" + "_frozen" * is_frozen + "_".join(options)
    return story


def instances_under_no_grad(lazy: Lazy) -> Any:
    norm = nn.InstanceNorm2d(3, track_running_stats=True).double()
    with torch.no_grad():
        out = norm(lazy(pictures()[0]))
    return out.sum(), dict(norm.named_buffers())


def channels_last(lazy: Lazy) -> Any:
    model = resnet().double().to(memory_format=torch.channels_last)
    real, y = pictures()
    x, y = lazy(real.to(memory_format=torch.channels_last), y)
    F.cross_entropy(model(x), y).backward()
    return seen(model)


def kept_apart(lazy: Lazy) -> Any:
    """Two batches of different sizes through one norm."""
    model = OfDims(2).double()
    x, y = lazy(*pictures())
    z = lazy(torch.randn(5, 3, 8, 8, dtype=torch.float64))
    (F.cross_entropy(model(x), y) + model(z).logsumexp(1).mean()).backward()
    return seen(model)


STORIES = [gan, vae, under_no_grad, read_before_backward, held, hooked, input_gradient, frozen]
STORIES += [channels_last, kept_apart]
STORIES += [of_instances(n, affine=True) for n in (1, 2, 3)]
STORIES += [of_instances(2), of_instances(2, momentum=None), of_instances(2, is_frozen=True)]
STORIES += [instances_under_no_grad]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories(story: Callable[[Lazy], Any], chunks: int | None) -> None:
    assert_same_story(story, chunks)


def test_single_precision() -> None:
    """float32 sums in another order, with a spread that is small beside the mean."""
    norm = nn.BatchNorm2d(4)
    x = 100 + torch.randn(64, 4, 8, 8)
    wanted = norm(x)
    other = nn.BatchNorm2d(4)
    with split(7):
        made = other(koila.lazy(x)).tolist()
    torch.testing.assert_close(torch.tensor(made), wanted, rtol=0, atol=2e-4)
    torch.testing.assert_close(other.running_var, norm.running_var, rtol=1e-5, atol=0)
    torch.testing.assert_close(other.running_mean, norm.running_mean, rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_training", [True, False])
def test_instances_are_rows(is_training: bool) -> None:
    """Nothing crosses from body to body for the sake of statistics."""
    norm = nn.InstanceNorm2d(3, affine=True, track_running_stats=True).double().train(is_training)
    with split(3, rows=["instance_norm"]):
        loss = norm(koila.lazy(pictures()[0])).square().mean()
        assert "in 2 parts" in koila.explain(loss)  # a body and what follows
        loss.backward()


def test_instances_moved_and_read() -> None:
    """In one program statistics move, and are what the next call reads."""

    def found(lazy: Lazy) -> list[Tensor]:
        torch.manual_seed(0)
        norm = nn.InstanceNorm2d(3, track_running_stats=True).double()
        x = lazy(pictures()[0].requires_grad_())
        made = norm(x)
        loss = (norm.eval()(x) * made).square().mean()
        loss.backward()
        return [loss, *norm.buffers()]

    with koila.config(chunks=3):
        made = found(koila.lazy)
    for ours, theirs in zip(made, found(eager), strict=True):
        torch.testing.assert_close(torch.tensor(ours.tolist()), torch.tensor(theirs.tolist()))


@pytest.fixture
def group_of_one() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("chunks", [None, 3])
def test_sync_in_a_group_of_one(chunks: int | None, group_of_one: None) -> None:
    """Evaluated it is as any other; trained, torch wants a GPU, and says so."""

    def story(lazy: Lazy) -> Any:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(OfDims(2)).double().eval()
        x, y = lazy(*pictures())
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(ValueError, match="expected input tensor to be on GPU") as told:
            model.train()(x)
        return seen(model), str(told.value)

    assert_same_story(story, chunks)


def autocast(dtype: torch.dtype, model: nn.Module) -> Any:
    return torch.autocast("cpu", dtype)


def halved(dtype: torch.dtype, model: nn.Module) -> Any:
    model.to(dtype)
    return contextlib.nullcontext()


def all_but_norms(dtype: torch.dtype, model: nn.Module) -> Any:
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    return contextlib.nullcontext()


HALVE: list[Callable[..., Any]] = [autocast, halved, all_but_norms]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, ROWS])
@pytest.mark.parametrize("halve", HALVE, ids=lambda halve: halve.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, halve: Callable[..., Any], chunks: int) -> None:
    """Eager's bits in one chunk; in several as far from double precision as eager is."""

    def found(lazy: Lazy, is_half: bool) -> tuple[list[Tensor], list[Tensor]]:
        layers = [nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Tanh()) for _ in range(3)]
        model, (real, y) = head(3, *layers), pictures()
        block = halve(dtype, model)
        x = real.to(torch.float32 if halve is autocast else dtype)
        if not is_half:
            model, x, block = model.double(), x.double(), contextlib.nullcontext()
        x, y = lazy(x, y)
        with block:
            out = model(x)
        F.cross_entropy(out.float() if is_half else out, y).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return gradients, [b for b in model.buffers() if b.is_floating_point()]

    def apart(some: list[Tensor], others: list[Tensor]) -> float:
        pairs = list(zip(some, others, strict=True))
        differ = sum(float((a.double() - b).square().sum()) for a, b in pairs)
        return math.sqrt(differ / sum(float(b.square().sum()) for _, b in pairs))

    errors = torch.zeros(2, 2)
    for seed in range(4):
        tried = []
        for lazy, is_half in ((koila.lazy, True), (eager, True), (eager, False)):
            torch.manual_seed(seed)
            with split(chunks, rows=["conv2d"]) if lazy is koila.lazy else split(None):
                tried.append(found(lazy, is_half))
        for i, (ours, theirs, exact) in enumerate(zip(*tried, strict=True)):
            assert [t.dtype for t in ours] == [t.dtype for t in theirs]
            assert chunks > 1 or all(map(torch.equal, ours, theirs))
            errors[i] += torch.tensor([apart(ours, exact), apart(theirs, exact)])
    assert bool((errors[:, 0] <= 1.15 * errors[:, 1]).all())


def of_blocks(model: OfDims, x: Tensor, **options: Any) -> Tensor:
    def block(h: Tensor) -> Tensor:
        return torch.tanh(model.norm(h))

    return model.last(checkpoint(block, x, **options).mean((2, 3)))


def checkpointed_step(model: OfDims) -> None:
    x, y = koila.lazy(*pictures())
    F.cross_entropy(of_blocks(model, model.again(x), use_reentrant=False), y).backward()


def checkpointed(lazy: Lazy, is_reentrant: bool, **options: Any) -> Any:
    model = OfDims(2, **options).double()
    x, y = lazy(*pictures())
    x = model.again(x)
    F.cross_entropy(of_blocks(model, x, use_reentrant=is_reentrant), y).backward()
    return seen(model)


def checkpointed_twice(lazy: Lazy, is_reentrant: bool) -> Any:
    """One norm, in two checkpoints and twice in each; then a step more."""
    model = OfDims(2).double()
    norm = model.norm
    for _ in range(2):
        x, y = lazy(*pictures())
        h = model.again(x)
        for _ in range(2):
            h = checkpoint(lambda t: norm(2 * norm(t).tanh()), h, use_reentrant=is_reentrant)
        F.cross_entropy(model.last(h.mean((2, 3))), y).backward()
    return seen(model)


def checkpointed_and_read(lazy: Lazy, is_reentrant: bool) -> Any:
    """Numbers are read before backward, and the graph is gone through again after it."""
    model = OfDims(2, momentum=None).double()
    x, y = lazy(*pictures())
    loss = F.cross_entropy(of_blocks(model, model.again(x), use_reentrant=is_reentrant), y)
    told = loss.item(), model.norm.running_var.clone(), model.norm.num_batches_tracked.clone()
    loss.backward(retain_graph=True)
    return told, seen(model)


def checkpointed_for_nothing(lazy: Lazy, is_reentrant: bool) -> Any:
    """No backward comes, or none that goes there."""
    model = OfDims(2).double()
    x, y = lazy(*pictures())
    out = of_blocks(model, model.again(x), use_reentrant=is_reentrant)
    F.cross_entropy(model.last(model.again(x).mean((2, 3))), y).backward()
    with torch.no_grad():
        other = of_blocks(model, x, use_reentrant=is_reentrant)
    return out.sum().item(), other.sum().item(), seen(model)


def checkpointed_in_one(lazy: Lazy, is_reentrant: bool) -> Any:
    """A checkpoint in the body of another: torch runs that body three times."""
    model = OfDims(2).double()
    x, y = lazy(*pictures())

    def body(h: Tensor) -> Tensor:
        return of_blocks(model, h.tanh(), use_reentrant=is_reentrant)

    out = checkpoint(body, model.again(x), use_reentrant=is_reentrant)
    F.cross_entropy(out, y).backward()
    return seen(model)


UNUSED = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def checkpointed_channels(lazy: Lazy, is_reentrant: bool) -> Any:
    """The rows are channels: the norm runs once, on all of them."""
    linear = nn.Linear(192, 6).double()
    norm = nn.BatchNorm1d(ROWS).double()
    h = linear(lazy(pictures()[0]).flatten(1))
    out = checkpoint(lambda t: norm(norm(t).tanh() * 2), h.T, use_reentrant=is_reentrant).T
    plain = norm(h.sin().T).T
    (out * plain + linear(out @ linear.weight)).sin().mean().backward()
    return seen(linear), seen(norm)


CHECKPOINTED = [
    checkpointed_channels,
    checkpointed,
    functools.partial(checkpointed, momentum=None),
    checkpointed_twice,
    checkpointed_and_read,
    checkpointed_for_nothing,
    checkpointed_in_one,
]


@pytest.mark.rotated("chunks")
@UNUSED
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("number", range(len(CHECKPOINTED)))
def test_checkpoints(number: int, chunks: int | None, is_reentrant: bool) -> None:
    """Their bodies go by rows; torch runs them twice, and so writes the statistics twice."""
    assert_same_story(functools.partial(CHECKPOINTED[number], is_reentrant=is_reentrant), chunks)


@UNUSED
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("number", range(len(CHECKPOINTED)))
def test_checkpoints_that_fit(number: int, is_reentrant: bool) -> None:
    """What was recorded, for it might not fit, and runs whole."""
    story = functools.partial(CHECKPOINTED[number], is_reentrant=is_reentrant)
    torch.manual_seed(0)
    want = story(eager)
    with koila.config(memory_limit="8 GiB"):
        torch.manual_seed(0)
        got = story(koila.lazy)
    assert_seen(got, want, "seen", exact_bits=False)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_checkpoint_that_writes_what_a_norm_made(chunks: int | None) -> None:
    """To ask torch whether the norm keeps that moved its statistics."""

    def story(lazy: Lazy) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LeakyReLU(0.1, True)).double()
        x = lazy(torch.randn(ROWS, 4).double())
        checkpoint(model, x, use_reentrant=False).pow(2).sum().backward()
        return seen(model)

    overwritten._asked.clear()
    assert_same_story(story, chunks)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("has_norm", [False, True])
def test_a_checkpoint_that_makes_something_of_weights_alone(
    has_norm: bool, chunks: int | None
) -> None:
    """At once, as T5 its biases of positions: torch would run the body again, midst in backward."""

    def story(lazy: Lazy) -> Any:
        layer, last = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()
        table = nn.Embedding(6, 4).double()
        x = lazy(torch.randn(ROWS, 4).double())

        def body(x: Tensor) -> tuple[Tensor, Tensor]:
            made = layer(x).sigmoid().pow(2)
            bias = table(torch.arange(6)).exp()
            return last(made + bias.sum(0)) if has_norm else made + bias.sum(0), bias

        made, bias = checkpoint(body, x, use_reentrant=False)
        again = checkpoint(lambda y, b: (y * b.sum(0)).sin(), made, bias, use_reentrant=False)
        again.pow(2).mean().backward()
        return seen(nn.ModuleList([layer, last, table]))

    assert_same_story(story, chunks)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_checkpoint_in_a_checkpoint(chunks: int | None) -> None:
    def story(lazy: Lazy) -> Any:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
        outer = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
        x = lazy(torch.randn(ROWS, 4).double().requires_grad_())

        def body(x: Tensor) -> Tensor:
            made: Tensor = checkpoint(inner, outer(x), use_reentrant=False)
            return made

        checkpoint(body, x, use_reentrant=False).pow(2).sum().backward()
        return seen(nn.ModuleList([inner, outer]))

    assert_same_story(story, chunks)


@pytest.mark.parametrize("options", [{"memory_limit": "8 GiB"}, {"chunks": 3}], ids=str)
def test_a_checkpoint_leaves_nothing(options: dict[str, Any]) -> None:
    """With the collector off."""
    model = OfDims(2).double()

    def n_groups() -> int:
        with koila.config(**options):
            checkpointed_step(model)
        return sum(type(obj) is norms.Group for obj in gc.get_objects())

    with collector_off():
        assert n_groups() == n_groups()


@pytest.mark.parametrize("chunks", [None, 1, 3])
def test_a_checkpoint_of_fixed_weights_is_torchs(chunks: int | None) -> None:
    """Whether its norm has a part in what torch makes again, nobody knows."""

    def story(lazy: Lazy) -> Any:
        model = OfDims(2, affine=False).double()
        x, y = lazy(*pictures())
        out = checkpoint(model.norm, x, use_reentrant=False)
        F.cross_entropy(model.last(out.mean((2, 3))), y).backward()
        return seen(model)

    assert_same_story(story, chunks)


def peak(step: Callable[[], object]) -> int:
    return max(bytes_over_time(step), default=0)


def test_half_of_the_memory() -> None:
    layers = [
        nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(8)
    ]
    model = head(16, nn.Conv2d(3, 16, 1), *layers)
    x, y = torch.randn(24, 3, 16, 16), torch.randint(0, 5, (24,))
    n_parameters = sum(p.nbytes for p in model.parameters())

    def step(chunks: int | None) -> None:
        model.zero_grad()
        given = (x, y) if chunks is None else koila.lazy(x, y)
        with koila.config(chunks=chunks):
            F.cross_entropy(model(given[0]), given[1]).backward()

    step(4)
    eager = peak(lambda: step(None)) - n_parameters
    with split(4, rows=["conv2d", "batch_norm"]):
        assert peak(lambda: step(4)) - n_parameters < 0.6 * eager


def test_kernels_of_cuda_are_given_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """They refuse None for the statistics that a batch saved, where the CPU's do not read them."""
    given, real = list[tuple[Any, ...]](), norms._backward

    def noted(*args: Any) -> Any:
        given.append(args)
        return real(*args)

    monkeypatch.setattr(norms, "_backward", noted)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with split(2):
        model(koila.lazy(torch.randn(6, 4))).square().sum().backward()
    assert given
    assert all(isinstance(each, Tensor) for args in given for each in args[3:7])


def test_chunks_that_share_statistics_give_them_gradients() -> None:
    """What the gradients of the statistics have in common is computed for the first chunk alone."""
    x, y = (torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (6, 3))
    words = [torch.rand(5, dtype=torch.float64).add(0.5).requires_grad_() for _ in range(4)]

    def normalize(*given: Tensor) -> list[Tensor]:
        *chunks, weight, bias, var, mean = given
        call = norms.with_statistics()
        others = weight, bias, None, None, True, 0.1, 1e-5, False, var, mean
        return [call(chunk, *others) for chunk in chunks]

    assert torch.autograd.gradcheck(normalize, (x, y, *words))
