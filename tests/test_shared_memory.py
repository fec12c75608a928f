# SPDX-License-Identifier: Apache-2.0
"""In-place calls and views in programs that are cut: who shares memory in eager sees each write."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from oracle import Lazy, assert_same_story, eager, gradients
from stories import N_ROWS, assert_cut, each_split, make, rows

DOUBLE = torch.float64

pytestmark = pytest.mark.sanitize


class Norm(nn.Module):
    """A layer and a BatchNorm: what comes after it is in a later stage."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x))


# Writes over stages -----------------------------------------------------------------------------


@each_split
def test_in_place_activations_between_barriers(chunks: int | None) -> None:
    """conv, relu_, BatchNorm, a residual, relu_: each write is of what its own stage made."""

    def story(lazy: Lazy) -> Any:
        first, second = Norm().double(), nn.BatchNorm1d(4).double()
        x = lazy(rows(6))
        h = F.relu(first.fc(x), inplace=True)
        out = F.relu(first.norm(h), inplace=True)
        out = second(out * 2)
        out += h
        out = F.leaky_relu(out, 0.1, inplace=True)
        loss = second(out).pow(3).mean() + h.sum()
        loss.backward()
        assert_cut(lazy, chunks)
        return loss, gradients(first), gradients(second), list(second.buffers())

    assert_same_story(story, chunks)


@each_split
def test_several_writes_to_what_a_barrier_made(chunks: int | None) -> None:
    """Shuffled rows, then normalised in place by two calls and an assignment."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        order = torch.arange(N_ROWS).flip(0)
        z = x[order]
        z.sub_(0.3).div_(0.7)
        z[:, 0] = 0
        z *= 2
        loss = F.cross_entropy(model(z), y[order]).sqrt()
        loss.backward()
        assert_cut(lazy, chunks)
        return loss, z, x, gradients(model)

    assert_same_story(story, chunks)


@each_split
@pytest.mark.parametrize("is_detached", [False, True])
def test_a_mean_written_after_it_was_read(chunks: int | None, is_detached: bool) -> None:
    """`z = h - m; m += 1`: the rows of a later stage read the mean as it was."""

    def story(lazy: Lazy) -> Any:
        model, x, _ = make()
        h = model(lazy(x))
        m = (h.detach() if is_detached else h).mean(0)
        z = h - m
        m += 1.0
        loss = z.pow(2).mean() * 2 + (z * m).mean() + h.mean()
        loss.backward()
        assert_cut(lazy, chunks)
        return loss, m, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_an_old_version_read_in_a_later_stage(chunks: int | None) -> None:
    """What was read before the write crosses to other stages as it was."""

    def story(lazy: Lazy) -> Any:
        model, x, _ = make()
        h = model(lazy(x)) * 1.0
        shift = h.detach().mean()
        before = h + shift
        h.add_(1.0)
        h.mul_(2.0)
        loss = (before * h.mean()).sin().mean() + h.tanh().mean()
        loss.backward()
        assert_cut(lazy, chunks)
        return loss, h, before, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_a_loss_added_to_in_place(chunks: int | None) -> None:
    """`loss += other; loss /= 2`, and what was kept of it before."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        out = model(x)
        loss = F.cross_entropy(out, y)
        kept = loss * 1.0
        loss += 0.1 * out.pow(2).mean()
        loss /= 2
        loss.backward()
        assert_cut(lazy, chunks)
        return loss, kept, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_written_without_gradients(chunks: int | None) -> None:
    """A write under no_grad changes the number and leaves the graph, also on a clone."""

    def story(lazy: Lazy) -> Any:
        model = Norm().double()
        x = lazy(rows(6))
        h = model(x)
        with torch.no_grad():
            h.clamp_(-0.5, 0.5)
        loss = (h + 1).log().mean()
        loss.backward()
        return loss, h, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_a_view_written_in_another_stage(chunks: int | None) -> None:
    """Sinkhorn's: `q = exp(out).t(); q /= q.sum()` and so on; and a column of the rows."""

    def story(lazy: Lazy) -> Any:
        model, x, _ = make()
        out = model(lazy(x))
        with torch.no_grad():
            q = torch.exp(out / 0.5).t()
            q /= torch.sum(q)
            for _ in range(2):
                q /= torch.sum(q, dim=1, keepdim=True)
                q /= torch.sum(q, dim=0, keepdim=True)
            q *= q.shape[1]
        h = out * 2
        h[:, 1:3] += h.mean()
        h.view(len(x), 5, 1)[:, 0].mul_(h.detach().amax())
        loss = -(q.t() * F.log_softmax(out, 1)).sum(1).mean() + h.pow(2).mean()
        loss.backward()
        assert_cut(lazy, chunks)
        return loss, q, h, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_the_diagonal_of_the_batch_written(chunks: int | None) -> None:
    """A view of other rows than its base's is not to be had of a chunk: the program runs whole."""

    def story(lazy: Lazy) -> Any:
        model, x, _ = make()
        h = model(lazy(x)) * 1.0
        h.diagonal().fill_(0.5)
        loss = h.pow(2).mean()
        loss.backward()
        return loss, h, gradients(model)

    assert_same_story(story, chunks)


# Views ------------------------------------------------------------------------------------------


@each_split
def test_a_written_view_after_its_base_is_written(chunks: int | None) -> None:
    """`v = h[:, :4]; v += 1; h *= 2`: v and the views of it show both writes, once each."""

    def story(lazy: Lazy) -> Any:
        model, x, _ = make()
        h = model(lazy(x)) * 1.0
        v = h[:, :4]
        v.add_(1.0)
        u = v[:, 1:]
        h.mul_(2.0)
        u -= 0.3
        w = u * 3 + v[:, :3]
        loss = w.mean() + h.mean()
        loss.backward()
        return loss, u, v, w, h, gradients(model)

    assert_same_story(story, chunks)


@each_split
@pytest.mark.parametrize("read", [True, False])
def test_an_activation_kept_before_relu_(chunks: int | None, read: bool) -> None:
    """`kept = out.detach()` in a hook, logged there, and the next layer writes in place."""

    def story(lazy: Lazy) -> Any:
        model, log = Norm().double(), []
        kept: dict[str, Tensor] = {}

        def hook(_: nn.Module, __: Any, out: Tensor) -> None:
            kept["rows"], kept["first"] = out.detach(), out[:, 0]
            if read:
                log.append((kept["rows"].mean().item(), kept["first"].tolist()))

        model.register_forward_hook(hook)
        h = F.relu(model(lazy(rows(6))), inplace=True)
        before = kept["rows"].min().item()
        loss = h.pow(2).mean() + kept["first"].sum()
        loss.backward()
        kept["rows"].add_(1.0)
        return loss, log, before, kept["rows"], h, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_values_read_without_gradients_share_memory(chunks: int | None) -> None:
    """In an evaluation too: a number that was read is no copy of its own."""

    def story(lazy: Lazy) -> Any:
        model = Norm().double()
        with torch.no_grad():
            h = model(lazy(rows(6)))
            kept, column = h.detach(), h[:, 0]
            mean = column.mean().item()
            h.relu_()
        h.view(-1, 2).mul_(2.0)
        column += 1
        return mean, kept, column, h

    assert_same_story(story, chunks)


@each_split
def test_a_view_of_the_batch_is_one_after_it_was_read(chunks: int | None) -> None:
    """A view of the input shows what is written to the input later, and the other way round."""

    def story(lazy: Lazy) -> Any:
        mine = rows(6)
        x = lazy(mine)
        column, flat = x[:, 0], x.view(-1)[3:]
        mean = column.mean().item()
        total = flat.sum().item()
        x.mul_(2.0)
        column.add_(1.0)
        mine[3] = 7.0
        return mean, total, column, flat, x, mine

    assert_same_story(story, chunks)


# Statistics -------------------------------------------------------------------------------------


@each_split
@pytest.mark.parametrize("by", ["create_graph", "selection"])
def test_statistics_of_a_program_read_and_then_run_at_once(chunks: int | None, by: str) -> None:
    """A read commits the statistics of a BatchNorm; the whole run after it does not again."""

    def story(lazy: Lazy) -> Any:
        model = Norm().double()
        h = model(lazy(rows(6)))
        mean = h.mean().item()
        loss = h.pow(3).mean()
        if by == "create_graph":
            (gradient,) = torch.autograd.grad(loss, model.fc.weight, create_graph=True)
            loss = loss + gradient.pow(2).sum()
        else:
            loss = loss + h.as_strided((2, 2), (4, 1)).sum()
        loss.backward()
        return mean, loss, gradients(model), list(model.buffers())

    assert_same_story(story, chunks, partly="the backward runs at once")


# Read, differentiated, and written after the step -------------------------------------------------

TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda h: h.select(0, -1),
    "transpose": lambda h: h.transpose(0, 1)[:, -1],
    "permute": lambda h: h.permute(1, 2, 0)[..., -1],
    "flatten": lambda h: h[-1].flatten(),
    "chunk": lambda h: h.chunk(5, 0)[-1][0],  # of several, of which torch tells no history then
    "unbind": lambda h: h.unbind(0)[2],
    "detach": lambda h: h.detach()[-1],
}


@pytest.mark.parametrize("is_held", [False, True], ids=["the base is gone", "the base is held"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", TAKEN)
def test_a_view_that_was_read_keeps_its_memory(name: str, dim: int, is_held: bool) -> None:
    """What backward leaves of it, and of its base, is where the number was that was read."""

    def step(lazy: Lazy, read: str, written: str) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(6, 4).double()
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        x = lazy(torch.randn(5, 6, 6).double(), batch=dim)
        base = layer(x).tanh()
        view = TAKEN[name](base)
        held = {"view": view, "detached": view.detach()} | ({"base": base} if is_held else {})
        del base
        if read in held:
            held[read].abs().sum().item()
        (view if view.requires_grad else layer(x)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            held[written].detach().mul_(0.5)
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        return [*(one.detach() * 1 for one in held.values()), *gradients]

    names = ["view", "detached", *["base"] * is_held]
    for read, written in itertools.product([*names, ""], names):
        want = step(eager, read, written)
        for chunks in (1, 2, 3):
            with koila.config(chunks=chunks):
                got = step(koila.lazy, read, written)
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=f"{read} {written}")
