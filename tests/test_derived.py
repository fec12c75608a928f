# SPDX-License-Identifier: Apache-2.0
"""Derivatives in a loss (`create_graph=True`) by samples: gradient penalties, differential
equations, forces of an energy; and what goes across samples, which runs at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from allocations import Allocations
from koila.running import derived
from limits import there
from oracle import Lazy, assert_same_story
from stories import N_ROWS, each_split_further, rows
from test_bridge import Square

Story = Callable[[Lazy], Any]
BY_SAMPLES: dict[str, Story] = {}
AT_ONCE: dict[str, Story] = {}


def gradient(of: Any, by: Any, *given: Any) -> Any:
    """Return gradients on a graph; of one tensor, that of it."""
    found = torch.autograd.grad(of, by, *given, create_graph=True)
    return found if isinstance(by, list | tuple) else found[0]


def found(loss: Tensor, *models: nn.Module) -> Any:
    loss.backward()
    return loss, [p.grad for model in models for p in model.parameters()]


def critic(n: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1)).double()


def by_samples(story: Story) -> Story:
    BY_SAMPLES[story.__name__] = story
    return story


def at_once(story: Story) -> Story:
    AT_ONCE[story.__name__] = story
    return story


@by_samples
def a_gradient_penalty(lazy: Lazy) -> Any:
    D, G = critic(), nn.Linear(3, 4).double()
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (D, G)]
    seen = []
    for _ in range(2):
        real = lazy(rows(4))
        fake = G(torch.randn(len(real), 3, dtype=torch.float64)).detach()
        share = torch.rand(len(real), 1, dtype=torch.float64)
        between = (share * real + (1 - share) * fake).requires_grad_(True)
        score = D(between)
        grad = gradient(score, between, torch.ones_like(score))
        penalty = ((grad.view(len(grad), -1).norm(2, dim=1) - 1) ** 2).mean()
        loss = D(fake).mean() - D(real).mean() + 10 * penalty
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        other = -D(G(torch.randn(len(real), 3, dtype=torch.float64))).mean()
        optimizers[1].zero_grad()
        other.backward()
        optimizers[1].step()
        seen += [loss.item(), penalty.item(), other.item(), between.grad]
    return seen, list(D.parameters()), list(G.parameters())


@by_samples
def a_penalty_through_a_recurrent_layer(lazy: Lazy) -> Any:
    """Its first state, which torch makes, has the samples in another dim than its input."""
    R, H = nn.GRU(4, 5, batch_first=True).double(), nn.Linear(5, 1).double()
    x = lazy(rows(3, 4)).requires_grad_(True)
    score = H(R(x)[0][:, -1])
    grad = gradient(score.sum(), x)
    return found(score.mean() + grad.pow(2).sum((1, 2)).mean(), R, H), x.grad


@by_samples
def a_penalty_on_images(lazy: Lazy) -> Any:
    """Sizes of the batch stand in views; the sum of all scores is differentiated."""
    conv = nn.Conv2d(1, 3, 3, padding=1).double()
    last = nn.Linear(3 * 16, 1).double()
    real = rows(1, 4, 4).requires_grad_()
    real = lazy(real)
    h = F.gelu(conv(real))
    score = last(h.view(real.size(0), -1))
    grad = gradient(score.sum(), real)
    loss = F.softplus(-score).mean() + grad.pow(2).reshape(grad.shape[0], -1).sum(1).mean()
    return *found(loss, conv, last), real.grad


@by_samples
def a_differential_equation(lazy: Lazy) -> Any:
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    t, x = rows(1).requires_grad_(), rows(1).requires_grad_()
    t, x = lazy(t, x)
    u = net(torch.cat([t, x], 1))
    u_t, u_x = gradient(u, [t, x], torch.ones_like(u))
    u_xx = gradient(u_x, x, torch.ones_like(u_x))
    loss = (u_t + u * u_x - 0.1 * u_xx).pow(2).mean()
    return *found(loss, net), u_t, u_xx, t.grad, x.grad


@by_samples
def forces_of_an_energy(lazy: Lazy) -> Any:
    """The mean over all is differentiated, and the energy is in the loss as well."""
    net = nn.Sequential(nn.Linear(3, 6), nn.SiLU(), nn.Linear(6, 1)).double()
    at, wanted = rows(5, 3).requires_grad_(), rows(5, 3)
    at, wanted = lazy(at, wanted)
    distance = (at.unsqueeze(1) - at.unsqueeze(2)).pow(2).sum(-1)
    energy = net(at).sum((1, 2)) + (-distance).exp().sum((1, 2))
    force = -gradient(energy.mean(), at)
    return found(F.mse_loss(force, wanted) + energy.pow(2).mean(), net)


@by_samples
def what_else_is_read(lazy: Lazy) -> Any:
    """Values that are gone, plain tensors of as many rows, weights made of others, constants."""
    table, linear = nn.Embedding(5, 4).double(), nn.Linear(4, 4).double()
    nn.utils.parametrizations.weight_norm(linear)
    plain = rows(4)
    x, label = lazy(rows(4), torch.arange(N_ROWS) % 5)
    h = (x * 2).requires_grad_()
    score = (linear(h) * table(label).tanh() + plain * h.detach() * h).sum(1)
    grad = gradient(score, h, plain[:, 0])
    return found((grad.norm(dim=1) - 1).pow(2).mean(), table, linear)


@by_samples
def through_what_has_a_history(lazy: Lazy) -> Any:
    first, D = nn.Linear(4, 4).double(), critic()
    h = first(lazy(rows(4))).tanh()
    grad = gradient(D(h).sum(), h)
    return found((grad * h).sum(1).pow(2).mean(), first, D)


@by_samples
def a_penalty_that_is_read_first(lazy: Lazy) -> Any:
    D = critic()
    x = lazy(rows(4).requires_grad_())
    grad = gradient(D(x).sum(), x)
    seen = grad.norm().item()
    loss = grad.norm(dim=1).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return seen, [p.grad for p in D.parameters()], x.grad, grad


@by_samples
def before_a_call_that_cannot_be_recorded(lazy: Lazy) -> Any:
    D = critic()
    x = lazy(rows(4).requires_grad_())
    grad = gradient(D(x).sum(), x)
    squared: Tensor = Square.apply(grad)  # type: ignore[no-untyped-call]
    return *found(squared.mean() + grad.sin().mean(), D), x.grad


@by_samples
def before_such_a_call_with_a_hook_on_what_it_was_not_made_of(lazy: Lazy) -> Any:
    """A bias has no part in the slope, so a backward of that alone does not come to its hook."""
    D, w = critic(), torch.full((4,), 0.3, dtype=torch.float64).requires_grad_()
    seen: list[Tensor] = []
    D[2].bias.register_hook(lambda g: (seen.append(g), g.clamp(-0.1, 0.1))[1])
    x = lazy(rows(4).requires_grad_())
    slope = gradient(D(x).sum(), x)
    out: Tensor = Square.apply(x * w)  # type: ignore[no-untyped-call]
    slope.pow(2).sum().backward(retain_graph=True)
    n_seen = len(seen)
    return found(slope.sum() + D(x).sum() + out.sum(), D), n_seen, len(seen)


@by_samples
def steps_of_a_sequence(lazy: Lazy) -> Any:
    cell, last = nn.GRUCell(3, 4).double(), nn.Linear(4, 1).double()
    x = lazy(rows(3, 3).requires_grad_())
    h = x.new_zeros(len(x), 4)
    for t in range(3):
        h = cell(x[:, t], h)
    grad = gradient(last(h).sum(), x)
    return found(grad.pow(2).sum((1, 2)).mean(), cell, last)


@by_samples
def calls_of_several_parts(lazy: Lazy) -> Any:
    """What all samples make scales the scores of each, which are made in part before it."""
    D, scale = critic(), nn.Linear(4, 1).double()
    x = lazy(rows(4).requires_grad_())
    h = D[0](x).tanh()
    score = D[2](h * scale(h.detach()[:, :4]).exp().mean() + h.sin())
    grad = gradient(score.sum(), x)
    return *found(grad.pow(2).sum(1).mean() + score.mean(), D, scale), x.grad


@by_samples
def attention(lazy: Lazy) -> Any:
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, norm_first=True).double()
    x = lazy(rows(3, 4).requires_grad_())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        grad = gradient(layer(x).sum(), x)
    return found(grad.pow(2).sum((1, 2)).mean(), layer)


@by_samples
def activations_in_place(lazy: Lazy) -> Any:
    """As critics are written; what makes the images writes in place too, and waits."""
    act = nn.LeakyReLU(0.2, inplace=True)
    D = nn.Sequential(nn.Linear(4, 6), act, nn.Linear(6, 6), act, nn.Linear(6, 1)).double()
    G = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), act, nn.Linear(5, 4)).double()
    real, z = lazy(rows(4), rows(3))
    fake = G(z)
    share = torch.rand(N_ROWS, 1, dtype=torch.float64)
    between = (share * real.data + (1 - share) * fake.data).requires_grad_(True)
    score = D(between)
    grad = gradient(score, between, torch.ones_like(score))
    loss = D(fake).mean() - D(real).mean() + 10 * ((grad.norm(2, dim=1) - 1) ** 2).mean()
    return *found(loss, D, G), grad


@by_samples
def several_writes_of_one_result(lazy: Lazy) -> Any:
    D = critic()
    x = lazy(rows(4).requires_grad_())
    h = D[0](x).mul_(2).add_(0.1)
    h += 1
    grad = gradient(D[2](h.sigmoid_()).sum(), x)
    return *found(grad.pow(2).sum(1).mean() + h.sin().mean(), D), x.grad


@by_samples
def inputs_that_were_written_before(lazy: Lazy) -> Any:
    D, first = critic(), nn.Linear(4, 4).double()
    x, scale = lazy(rows(4), rows(4))
    h, scale = first(x).relu_(), (scale * 2).add_(1)
    grad = gradient((D(h) * scale).sum(), h)
    return found((grad * h).sum(1).pow(2).mean(), D, first)


@at_once
def a_write_through_a_view(lazy: Lazy) -> Any:
    D = critic()
    x = lazy(rows(4).requires_grad_())
    h = D[0](x)
    h.view(N_ROWS, 2, 3).tanh_()
    return *found(gradient(D[2](h).sum(), x).norm(dim=1).mean(), D), x.grad


@at_once
def a_write_of_what_another_call_read(lazy: Lazy) -> Any:
    D = critic()
    x = lazy(rows(4).requires_grad_())
    h = D[0](x)
    before = h.sum(1)
    score = D[2](F.tanh(h.mul_(2))).squeeze(1)
    return *found(gradient((score * before).sum(), x).norm(dim=1).mean(), D), x.grad


@at_once
def a_write_of_detached_memory(lazy: Lazy) -> Any:
    D, w = critic(), torch.ones(6, dtype=torch.float64)
    x = lazy(rows(4).requires_grad_())
    h = D[0](x)
    score = (h * w).sum(1)
    h.detach().mul_(2)
    return *found(gradient(score.sin().sum() + D[2](h).sum(), x).norm(dim=1).mean(), D), x.grad


@at_once
def a_write_of_what_is_read_without_gradient(lazy: Lazy) -> Any:
    D = critic()
    x, scale = lazy(rows(4).requires_grad_(), rows(1))
    scale = scale * 1
    score = D(x) + scale
    scale.add_(1)
    score = score.exp() + scale
    return *found(gradient(score.sum(), x).norm(dim=1).mean(), D), x.grad


@at_once
def statistics_of_the_batch(lazy: Lazy) -> Any:
    D = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = lazy(rows(4).requires_grad_())
    return found(gradient(D(x).sum(), x).norm(dim=1).mean(), D)


@at_once
def samples_that_meet(lazy: Lazy) -> Any:
    D = critic()
    x = lazy(rows(4).requires_grad_())
    h = x - x.mean(0)
    return found(gradient(D(h).sum(), x).norm(dim=1).mean(), D)


@at_once
def samples_that_read_all(lazy: Lazy) -> Any:
    D = critic()
    x, near = lazy(rows(4).requires_grad_(), torch.rand(N_ROWS, N_ROWS, dtype=torch.float64))
    score = D(x).squeeze(1)
    return found(gradient((near * score).sum(1).sum(), x).norm(dim=1).mean(), D)


@at_once
def samples_chosen_by_an_index(lazy: Lazy) -> Any:
    D = critic()
    x, index = lazy(rows(4).requires_grad_(), torch.arange(N_ROWS).flip(0))
    score = D(x).reshape(-1)[index]
    return found(gradient(score.sin().sum(), x).norm(dim=1).mean(), D)


@at_once
def noise(lazy: Lazy) -> Any:
    D = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh(), nn.Linear(4, 1)).double()
    x = lazy(rows(4).requires_grad_())
    return found(gradient(D(x).sum(), x).norm(dim=1).mean(), D)


@at_once
def gradients_of_weights(lazy: Lazy) -> Any:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    inner = net(lazy(rows(4))).pow(2).mean()
    gradients = gradient(inner, [*net.parameters()])
    moved = [p - 0.1 * g for p, g in zip(net.parameters(), gradients, strict=True)]
    names = dict(zip(dict(net.named_parameters()), moved, strict=True))
    outer = torch.func.functional_call(net, names, (lazy(rows(4)),))
    return found(outer.pow(2).mean(), net)


@at_once
def a_gradient_without_a_graph(lazy: Lazy) -> Any:
    D = critic()
    x = lazy(rows(4).requires_grad_())
    flat = gradient((x * 3).sum(), x)
    return *found((D(x) * flat).mean(), D), flat.requires_grad


@at_once
def memory_that_is_written(lazy: Lazy) -> Any:
    D = critic()
    x = lazy(rows(4).requires_grad_())
    h = x * 1.0
    h[:, 0] *= 2
    return found(gradient(D(h).sum(), x).norm(dim=1).mean(), D)


@at_once
def a_hook(lazy: Lazy) -> Any:
    D = critic()
    x = lazy(rows(4).requires_grad_())
    h = D[0](x)
    seen: list[Tensor] = []
    h.register_hook(lambda g: (seen.append(g + 0), g * 2)[1])
    return *found(gradient(D[1:](h).sum(), x).norm(dim=1).mean(), D), seen


@at_once
def a_hook_of_what_went_back(lazy: Lazy) -> Any:
    D, last = critic(), nn.Linear(4, 4).double()
    h = last(lazy(rows(4))).tanh()
    seen: list[float] = []
    h.register_hook(lambda g: seen.append(g.norm().item()))
    h.pow(2).mean().backward()
    return gradient(D(h).sum(), h), seen


@at_once
def a_checkpoint(lazy: Lazy) -> Any:
    D = critic()
    x = lazy(rows(4).requires_grad_())
    score = checkpoint(D, x, use_reentrant=False)
    return found(gradient(score.sum(), x).norm(dim=1).mean(), D)  # type: ignore[union-attr]


#: Of these something comes before, or after.
PARTLY = (
    "gradients_of_weights",
    "a_gradient_without_a_graph",
    "a_hook_of_what_went_back",
)


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("name", BY_SAMPLES)
@each_split_further
def test_by_samples(chunks: int | None, name: str) -> None:
    assert_same_story(BY_SAMPLES[name], chunks, tolerance=1e-10)


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.parametrize("chunks", [2, N_ROWS])
def test_at_once(chunks: int, name: str) -> None:
    words = {"partly" if name in PARTLY else "whole": "what is differentiated runs at once"}
    assert_same_story(AT_ONCE[name], chunks, tolerance=1e-10, **words)


def test_what_is_not_used() -> None:
    with koila.config(chunks=2):
        x, y = koila.lazy(rows(4).requires_grad_(), rows(4).requires_grad_())
        score = critic()(x).sum()
        used, unused = torch.autograd.grad(score, [x, y], create_graph=True, allow_unused=True)
        assert unused is None
        assert used.shape == x.shape


def test_a_derivative_is_told_of_its_line() -> None:
    net = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 1))
    with koila.config(chunks=2):
        x = koila.lazy(torch.randn(64, 4).requires_grad_())
        grad, *_ = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        loss = grad.pow(2).mean()
        text = str(koila.explain(loss))
        loss.backward()
    assert "test_derived.py:" in text


@pytest.mark.parametrize("in_place", [False, True])
def test_memory(in_place: bool) -> None:
    """A penalty on images takes less in chunks, and runs where half of eager's peak is allowed."""
    act = nn.LeakyReLU(0.2, in_place)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), act, nn.Conv2d(16, 16, 3, padding=1))

    def step(x: Tensor) -> None:
        x.requires_grad_()
        grad = gradient(net(x).sum(), x)
        (grad.flatten(1).norm(dim=1) - 1).pow(2).mean().backward()

    images = torch.randn(32, 3, 32, 32)
    step(images.clone())

    def peak(lazy: Lazy) -> int:
        net.zero_grad()
        x = lazy(images.clone())
        made = Allocations()
        with made:
            made.count(images, *net.parameters())
        with made:
            step(x)
        return made.peak

    whole = peak(lambda x: x)
    with koila.config(chunks=8):
        assert peak(koila.lazy) < 0.3 * whole
    counted = images.nbytes + sum(parameter.nbytes for parameter in net.parameters())
    with koila.config(memory_limit=there() + whole // 2 - counted):
        assert peak(koila.lazy) < whole // 2


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x * 2, 0.5).sum()


def in_place(x: Tensor) -> Tensor:
    h = x * 2
    h[:, 0].relu_()
    return h.sum()


def mean_of_classes(x: Tensor) -> Tensor:
    return F.cross_entropy(x * 2, torch.zeros(len(x), dtype=torch.int64))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (dropout, r"where dropout \(.*test_derived.py:\d+\) draws random numbers"),
        (in_place, r"where relu_ \(.*test_derived.py:\d+\) writes in place"),
        (mean_of_classes, r"where it starts from cross_entropy_loss \(.*test_derived.py:\d+\)"),
    ],
)
def test_why_it_runs_at_once_is_said(make: Callable[[Tensor], Tensor], why: str) -> None:
    with koila.config(chunks=2):
        x = koila.lazy(rows(4)).requires_grad_()
        (gradient(make(x), x).pow(2).sum() + x.pow(2).sum()).backward()
    assert re.search(why, str(koila.report())), koila.report()


def test_messages_name_it_as_torch_does() -> None:
    """Nor is the batch, whose gradient takes most, called a parameter."""
    D = critic(256)
    x = koila.lazy(torch.randn(64, 256, dtype=torch.float64)).requires_grad_()
    with koila.config(chunks=2):
        loss = (gradient(D(x).sum(), x).norm(dim=1) - 1).pow(2).mean()
        text = str(koila.explain(loss, full=True))
    assert "autograd.grad" in text
    assert "gradient_of" not in text
    with (
        koila.config(memory_limit=there() + 1000),
        pytest.raises(koila.MemoryLimitError) as caught,
    ):
        loss.backward()
    assert "a tensor that you made of shape [64, 256] and its gradient take 128.0 KiB" in str(
        caught.value
    )


READ_AND_WRITTEN: dict[str, tuple[Callable[[Any, Tensor], Any], bool]] = {
    # What is made of the score, and whether torch's backward needs the buffer as it was.
    "moved": (lambda out, buffer: (out - buffer).tanh(), False),
    "moved at last": (lambda out, buffer: out.tanh() + buffer, False),
    "scaled": (lambda out, buffer: (out * buffer).tanh(), True),
}


@each_split_further
@pytest.mark.parametrize("case", READ_AND_WRITTEN)
def test_a_buffer_that_it_reads_is_written(case: str, chunks: int | None) -> None:
    """It keeps what the calls that it differentiates keep, as torch says of them."""
    make, is_kept = READ_AND_WRITTEN[case]

    def story(lazy: Lazy) -> Any:
        D, buffer = critic(), torch.ones(1, dtype=torch.float64)
        x = rows(4).requires_grad_()
        x = lazy(x)
        made = Square.apply(gradient(make(D(x.sin()), buffer).sum(), x))
        buffer.add_(0.5)
        if is_kept:
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
                made.sum().backward()
            return None
        return found(made.sum(), D), x.grad

    assert_same_story(story, chunks, generator=False)


@pytest.mark.parametrize("write", ["out.mul_(2)", "out.add_(1)"])
@each_split_further
def test_its_output_is_written(chunks: int | None, write: str) -> None:
    def story(lazy: Lazy) -> Any:
        D = critic()
        x = lazy(rows(4)).requires_grad_()
        out = D(x.tanh())
        grad = gradient(out.sum(), x)
        exec(write)
        return found(grad.pow(2).sum() + out.sum(), D)

    assert_same_story(story, chunks)


@pytest.mark.parametrize("error", [koila.KoilaError, NotImplementedError])
def test_only_what_torch_says_makes_it_run_whole(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise error("made up")

    monkeypatch.setattr(derived.Recipe, "run_again", fail)
    with koila.config(chunks=2):
        x = koila.lazy(rows(4)).requires_grad_()
        if error is koila.KoilaError:
            with pytest.raises(koila.KoilaError, match="made up"):
                gradient(critic()(x).sum(), x)
        else:
            assert gradient(critic()(x).sum(), x).shape == x.shape
            assert "torch has no derivative of it" in str(koila.report())


@pytest.mark.parametrize("chunks", [None, 1, 2, 3])
def test_a_hook_that_comes_later_is_not_called(chunks: int | None) -> None:
    """It was registered after the derivative was asked for, which runs when all has to: a node of
    autograd's graph is looked at."""

    def story(lazy: Lazy) -> tuple[str, Tensor, Tensor, list[Tensor]]:
        torch.manual_seed(2)
        net, head = nn.Linear(3, 4).double(), nn.Linear(4, 4).double()
        seen: list[Tensor] = []
        h = net(lazy(rows(3)))
        given = torch.autograd.grad(head(h).tanh().sum(), h, create_graph=True)[0]
        h.register_hook(lambda g: (seen.append(g), g.clamp(-0.1, 0.1))[1])
        assert h.grad_fn is not None
        return h.grad_fn.name(), h.detach(), given.detach(), seen

    setting: Any = {} if chunks is None else {"chunks": chunks}
    with koila.config(**setting):
        name, h, given, seen = story(koila.lazy)
    want_name, want_h, want_given, _ = story(lambda x: x)
    assert name == want_name
    assert not seen
    assert torch.allclose(h, want_h, rtol=1e-10)
    assert torch.allclose(given, want_given, rtol=1e-10)


@each_split_further
def test_beside_a_body_whose_graph_waits(chunks: int | None) -> None:
    """The derivative goes through the graph of a chunk while that goes forward; what such a graph
    needs was let go of until it goes back."""

    def story(lazy: Lazy) -> Any:
        model = nn.Linear(4, 4).double()
        x = lazy(rows(4))
        first = model(x)
        q, h = first.detach().requires_grad_(), model(x).tanh()
        slope = gradient((q * h).sin().mean(), q)
        loss = (q * h).softmax(-1).mean(0).log().sum()
        return *found(loss, model), q.grad, slope

    assert_same_story(story, chunks, exact_bits=False)
