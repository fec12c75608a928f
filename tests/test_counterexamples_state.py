# SPDX-License-Identifier: Apache-2.0
"""Programs that break a naive recorder by state and aliases: one test for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oracle import Lazy, assert_same_story, gradients
from programs_vision import ConvBatchNorm, DenseNet, Discriminator, Generator, Mlp
from stories import N_ROWS, batches, make, rows

pytestmark = pytest.mark.sanitize

DOUBLE = torch.float64
each_split = pytest.mark.parametrize("chunks", [None, 1, 2, 3])


# What a value is after it was read --------------------------------------------------------------


@each_split
def test_fake_is_differentiable_after_the_discriminator(chunks: int | None) -> None:
    """DCGAN: errD.backward() gives `fake` a value, and netD(fake) must still reach G."""

    def story(lazy: Lazy) -> Any:
        g, d = Generator().double(), Discriminator().double()
        of_d = torch.optim.SGD(d.parameters(), lr=0.1)
        x, z = lazy(rows(6), rows(4))
        fake = g(z)
        label = torch.full((len(x),), 1.0, dtype=DOUBLE)
        err_real = F.binary_cross_entropy_with_logits(d(x).view(-1), label)
        err_real.backward()
        label.fill_(0)
        err_fake = F.binary_cross_entropy_with_logits(d(fake.detach()).view(-1), label)
        err_fake.backward()
        mean = d(x).mean().item()
        of_d.step()
        label.fill_(1)
        err_g = F.binary_cross_entropy_with_logits(d(fake).view(-1), label)
        err_g.backward()
        return mean, err_real + err_fake, err_g, fake, gradients(g, d)

    assert_same_story(story, chunks)


@each_split
def test_condition_on_a_value_that_is_trained_on(chunks: int | None) -> None:
    """`if h.sum() > 0:`, and then training on h."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        h = model.body(x)
        h = h * 2 if h.sum() > 0 else h * 3
        while h.norm() > 2:
            h = h / 2
        loss = F.cross_entropy(model.head(h), y)
        loss.backward()
        return loss, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_input_used_in_a_second_forward(chunks: int | None) -> None:
    """LBFGS, PGD: the same lazy x in a second forward, with a gradient of its own."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x.requires_grad_()
        x, y = lazy(x, y)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, x.grad, model

    assert_same_story(story, chunks)


# Writes and views -------------------------------------------------------------------------------


@pytest.mark.parametrize("read", ["slice", "whole", "one", "by another name"])
@each_split
def test_outputs_written_into_zeros(chunks: int | None, read: str) -> None:
    """`out = torch.zeros(T, B, V); out[t] = lazy`, and out is read later."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        out = torch.zeros(3, N_ROWS, 5, dtype=DOUBLE)
        flat = out.view(3 * N_ROWS, 5)
        h = x
        for t in range(3):
            out[t] = model(h)
            h = h * 0.9 + out[t].mean(1, keepdim=True)
        if read == "slice":
            loss = F.cross_entropy(out[1:].reshape(-1, 5), y.repeat(2))
        elif read == "whole":
            loss = F.cross_entropy(out.permute(1, 2, 0), y[:, None].expand(-1, 3))
        elif read == "one":
            loss = F.cross_entropy(out[2], y)
        else:
            loss = F.cross_entropy(flat[N_ROWS:], y.repeat(2))
        loss.backward()
        return loss, out, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_view_taken_before_a_write_read_after_it(chunks: int | None) -> None:
    """`h = X*2; v = h[:, 0]; j = h.sum(); h.add_(j); v.exp()`: the view sees the write."""

    def story(lazy: Lazy) -> Any:
        weight = nn.Parameter(torch.randn(6, 3, dtype=DOUBLE) / 9)
        x = lazy(rows(6))
        h = (x @ weight) * 2
        v = h[:, 0]
        j = h.sum()
        h.add_(j)
        loss = v.exp().mean() + (h[:, 1] * j).mean()
        loss.backward()
        return loss, v, h, j, weight.grad

    assert_same_story(story, chunks)


@each_split
def test_old_value_read_by_a_barrier_after_a_write(chunks: int | None) -> None:
    """What a barrier read before an in-place op is the old version, in values and gradients."""

    def story(lazy: Lazy) -> Any:
        weight = nn.Parameter(torch.randn(6, 3, dtype=DOUBLE) / 9)
        x = lazy(rows(6))
        h = x @ weight
        before = h.mean(0)
        h[:, 1:] = h[:, 1:] - before[1:]
        middle = (h.mean() + 2.0).sqrt()
        h = h.tanh_()
        loss = h.mean() * middle + before.pow(2).sum()
        loss.backward()
        return loss, h, weight.grad

    assert_same_story(story, chunks)


@each_split
def test_whole_value_written_inside_a_body(chunks: int | None) -> None:
    """A value that is the same for every chunk is written once, not once for each."""

    def story(lazy: Lazy) -> Any:
        weight = nn.Parameter(torch.randn(6, 3, dtype=DOUBLE))
        x = lazy(rows(6))
        scale = weight.exp().mean(0)
        h = x @ weight
        scale.mul_(0.5)
        h = h * scale
        total = h.mean(0)
        total.add_(1.0)
        h = h + total
        total.mul_(2)
        counter = torch.zeros(3, dtype=DOUBLE)
        counter += total.detach()
        loss = (h * total + counter).pow(2).mean()
        loss.backward()
        return loss, scale, total, counter, weight.grad

    assert_same_story(story, chunks)


@each_split
def test_dense_net_list_goes_on_growing(chunks: int | None) -> None:
    """`features.append(h); h = cat(features)`: each call saw the list as it was."""

    def story(lazy: Lazy) -> Any:
        model = DenseNet(n_layers=4).double()
        x, y = lazy(rows(3, 8, 8), torch.randint(0, 5, (N_ROWS,)))
        F.cross_entropy(model(x), y).backward()
        shared: list[Any] = [x[:, 0, 0, :3]]
        sizes = []
        for _ in range(3):
            shared.append(torch.cat(shared, 1) * 0.5)
            sizes.append(shared[-1].shape[1])
        shared.clear()
        return sizes, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_arguments_changed_after_the_call(chunks: int | None) -> None:
    """Lists and dicts given to an op belong to the user, who changes them."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        shape, index = [len(x), 4, 4], [slice(None), 0]
        h = model.body(x).view(shape).permute(dims := [0, 2, 1])
        shape[0], dims[0] = 0, 7
        h = h[tuple(index)].repeat(sizes := [1, 4])
        index.clear()
        sizes.append(9)
        F.cross_entropy(model.head(h), y).backward()
        return gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_diagonal_filled(chunks: int | None) -> None:
    """`x.diagonal().fill_(0)` reaches x though `diagonal` may have no row."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        h = model.body(x) * 1.0
        h.diagonal().fill_(0)
        h.view(N_ROWS, 4, 4).diagonal(dim1=1, dim2=2).mul_(0.5)
        torch.diagonal(h, 2).add_(1)
        loss = F.cross_entropy(model.head(h), y)
        loss.backward()
        return loss, h, gradients(model)

    assert_same_story(story, chunks, whole="a write through a view of other rows")


# Effects ----------------------------------------------------------------------------------------


@each_split
def test_queue(chunks: int | None) -> None:
    """MoCo: keys are written into a queue, a pointer moves, the key encoder follows."""

    def story(lazy: Lazy) -> Any:
        model, keys = Mlp().double(), Mlp().double()
        queue, pointer = F.normalize(torch.randn(40, 5, dtype=DOUBLE), dim=1), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for x, _ in batches(3):
            x = lazy(x)
            with torch.no_grad():
                for a, b in zip(keys.parameters(), model.parameters(), strict=True):
                    a.mul_(0.9).add_(b, alpha=0.1)
                k = F.normalize(keys(x * 1.1), dim=1)
            q = F.normalize(model(x), dim=1)
            positive = (q * k).sum(1, keepdim=True)
            logits = torch.cat([positive, q @ queue.clone().t()], 1) / 0.2
            loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                queue[pointer : pointer + len(x)] = k
                pointer = (pointer + len(x)) % 33
            losses.append(loss.item())
        return losses, queue, model, keys

    assert_same_story(story, chunks)


@each_split
def test_embedding_with_a_largest_norm(chunks: int | None) -> None:
    """Embedding(max_norm=) writes its own weight when it is read, once."""

    def story(lazy: Lazy) -> Any:
        table = nn.Embedding(9, 4, max_norm=0.7).double()
        ids = lazy(torch.randint(0, 7, (N_ROWS, 3)))
        losses = []
        for _ in range(2):
            table.zero_grad()
            loss = table(ids).pow(2).sum(1).mean() + table(ids + 1).mean()
            loss.backward()
            losses.append(loss.item())
        return losses, table, gradients(table)

    assert_same_story(story, chunks)


@each_split
def test_batch_norm_updated_for_its_own_sake(chunks: int | None) -> None:
    """update_bn drops the model's result: only the statistics are wanted."""

    def story(lazy: Lazy) -> Any:
        model = ConvBatchNorm().double()
        loader = [lazy(rows(3, 8, 8)) for _ in range(3)]
        torch.optim.swa_utils.update_bn(loader, model)
        averaged = {name: b.clone() for name, b in model.named_buffers()}
        model(lazy(rows(3, 8, 8)))
        with torch.no_grad():
            model(lazy(rows(3, 8, 8)))
        out = model.eval()(lazy(rows(3, 8, 8)))
        return averaged, dict(model.named_buffers()), out

    assert_same_story(story, chunks)


def norm_and_layers() -> tuple[nn.BatchNorm1d, nn.Linear, nn.Sequential]:
    norm, layer = nn.BatchNorm1d(4).double(), nn.Linear(4, 4).double()
    deep = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4)).double()
    return norm, layer, deep


def evaluated_after(norm: Any, layer: Any, deep: Any, x: Any, z: Any) -> Any:
    made = norm(layer(x))
    norm.eval()
    return made, norm(layer(z))


def evaluated_before(norm: Any, layer: Any, deep: Any, x: Any, z: Any) -> Any:
    norm.eval()
    made = norm(layer(x))
    norm.train()
    return made, norm(layer(z))


def evaluated_without_gradients(norm: Any, layer: Any, deep: Any, x: Any, z: Any) -> Any:
    made = norm(layer(x))
    norm.eval()
    with torch.no_grad():
        return made, norm(layer(z))


def trained_twice(norm: Any, layer: Any, deep: Any, x: Any, z: Any) -> Any:
    return norm(layer(x)), norm(layer(z))


def trained_deep_and_then_shallow(norm: Any, layer: Any, deep: Any, x: Any, z: Any) -> Any:
    """By stages the second call would be the first."""
    return norm(deep(x)), norm(layer(z))


def trained_on_itself(norm: Any, layer: Any, deep: Any, x: Any, z: Any) -> Any:
    return norm(layer(norm(x))), norm(z)


def statistics_as_a_value(norm: Any, layer: Any, deep: Any, x: Any, z: Any) -> Any:
    """A penalty on the running statistics themselves, which no gradient goes through."""
    made = norm(layer(x))
    return made, (layer(z) - norm.running_mean).exp()


def statistics_by_a_call_without_a_row(norm: Any, layer: Any, deep: Any, x: Any, z: Any) -> Any:
    made = norm(layer(x))
    return made, torch.special.bessel_j0(layer(z).detach() + 0) + norm.running_mean


SHARED = [
    evaluated_after,
    evaluated_before,
    evaluated_without_gradients,
    trained_twice,
    trained_deep_and_then_shallow,
    trained_on_itself,
    statistics_as_a_value,
    statistics_by_a_call_without_a_row,
]


@each_split
@pytest.mark.parametrize("run", SHARED, ids=lambda run: run.__name__)
def test_statistics_that_several_calls_share(run: Any, chunks: int | None) -> None:
    """Each sees them as the calls before left them."""

    def story(lazy: Lazy) -> Any:
        parts = norm_and_layers()
        x, z = lazy(rows(4), rows(4))
        first, second = run(*parts, x, z)
        loss = (first * second).sum()
        loss.backward()
        norm = parts[0]
        return loss, gradients(*parts), norm.running_mean, norm.running_var, parts[2][1].running_var

    partly = "torch's backward reads statistics that are moved meanwhile"
    assert_same_story(story, chunks, partly=partly if run is evaluated_before else "")


@each_split
def test_statistics_after_a_step(chunks: int | None) -> None:
    """BatchNorm's statistics are written once a step, its counter too."""

    def story(lazy: Lazy) -> Any:
        model = ConvBatchNorm().double()
        x, y = lazy(rows(3, 8, 8), torch.randint(0, 5, (N_ROWS,)))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        count = model.bn1.num_batches_tracked.item()
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        return count, saved, loss

    assert_same_story(story, chunks)


@each_split
def test_no_gradient_stays_none(chunks: int | None) -> None:
    """A parameter that gets no gradient keeps None: AdamW must not move it."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        spare = nn.ModuleList(nn.Linear(6, 5).double() for _ in range(2))
        everything = [*model.parameters(), *spare.parameters()]
        optimizer = torch.optim.AdamW(everything, lr=0.1, weight_decay=0.5)
        x, y = lazy(x, y)
        aside = spare[1](x).detach()
        F.cross_entropy(model(x) + aside, y).backward()
        seen = gradients(model, spare)
        optimizer.step()
        return seen, model, spare

    assert_same_story(story, chunks)
