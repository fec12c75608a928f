# SPDX-License-Identifier: Apache-2.0
"""Calls that cannot be recorded as they are: what else waits is cut all the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from chunked import split
from oracle import Lazy, assert_same_story, gradients
from small import linear, ones
from stories import N_ROWS, assert_cut, each_split, make, rows

DOUBLE = torch.float64


def one_hot_by_scatter(out: Tensor, y: Tensor) -> Tensor:
    """A plain tensor written by labels, while the model's output waits."""
    target = torch.zeros(N_ROWS, 5, dtype=DOUBLE).scatter_(1, y.unsqueeze(1), 1.0)
    return -(out.log_softmax(1) * target).sum(1).mean()


def one_hot_by_data(out: Tensor, y: Tensor) -> Tensor:
    """The number of classes is the largest label and one."""
    return (out[:, : int(y.max()) + 1] * F.one_hot(y)).sum(1).mean()


def where_counted(out: Tensor, y: Tensor) -> Tensor:
    """Places of some labels."""
    (at,) = torch.where(y > 1)
    return out.index_select(0, at).mean() + out.tanh().mean()


def copied_to_the_cpu(out: Tensor, y: Tensor) -> Tensor:
    """cpu() where it is already, and the numbers of it."""
    error = (out.detach().cpu().argmax(1) != y.cpu()).to(out.dtype)
    return (F.cross_entropy(out, y, reduction="none") * (1 + error)).mean()


def through_data(out: Tensor, y: Tensor) -> Tensor:
    """out.data, as old scripts have it."""
    weight = torch.softmax(out.data, 1).gather(1, y[:, None])[:, 0]
    return (F.cross_entropy(out, y, reduction="none") * weight).mean()


def masked_rows(out: Tensor, y: Tensor) -> Tensor:
    """Only rows of some labels."""
    keep = y != 0
    return F.cross_entropy(out[keep], y[keep])


def masked_losses(out: Tensor, y: Tensor) -> Tensor:
    """The mean over the losses of some rows."""
    return F.cross_entropy(out, y, reduction="none")[y != 0].mean()


def masked_entries(out: Tensor, y: Tensor) -> Tensor:
    """Entries by a mask of both dims, rows by a mask and a column by a number."""
    return out[out.detach() > 0].pow(2).sum() + out[y > 1, 2].sin().sum()


def masked_columns(out: Tensor, y: Tensor) -> Tensor:
    """Columns by a plain mask: they are cut by rows."""
    return out[:, torch.tensor([True, False, True, True, False])].exp().mean()


def selected(out: Tensor, y: Tensor) -> Tensor:
    """masked_select, its mask of fewer dims."""
    return out.masked_select((y > 0)[:, None]).pow(2).mean()


def detached_in_place(out: Tensor, y: Tensor) -> Tensor:
    """detach_() of what needs no gradient."""
    with torch.no_grad():
        target = out.softmax(1).detach_()
    return F.kl_div(out.log_softmax(1), target * 0.9 + 0.02, reduction="batchmean")


LOSSES: list[Callable[[Tensor, Tensor], Tensor]] = [
    one_hot_by_scatter,
    one_hot_by_data,
    where_counted,
    copied_to_the_cpu,
    through_data,
    masked_rows,
    masked_losses,
    masked_entries,
    masked_columns,
    selected,
    detached_in_place,
]


@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda loss_of: loss_of.__name__)
@each_split
def test_the_model_is_cut(chunks: int | None, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Only what the call reads runs before it, and backward() is in chunks."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        out = model(x)
        loss = loss_of(out, y)
        if lazy is koila.lazy and chunks == 3:
            assert koila._core.real(out) is None, "the model ran whole"
        loss.backward()
        assert_cut(lazy, chunks)
        return loss, out, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_masks_of_another_shape_are_torchs_errors(chunks: int | None) -> None:
    """What torch refuses, it refuses in its own words."""

    def story(lazy: Lazy) -> Any:
        x = lazy(rows(4)) * 2
        wrong = lazy(torch.zeros(N_ROWS, 3, dtype=torch.bool))
        with pytest.raises(IndexError, match="does not match the shape of the indexed tensor"):
            x[wrong]
        return x[x > 9], x[torch.zeros(N_ROWS, dtype=torch.bool)], x[:, 0]

    assert_same_story(story, chunks)


@each_split
def test_a_plain_tensor_that_waits_to_be_read(chunks: int | None) -> None:
    """It is read before it is written, though the call that reads it was only recorded."""

    def story(lazy: Lazy) -> Any:
        model, x, _ = make()
        x = lazy(x)
        mean, count = torch.zeros(5, dtype=DOUBLE), torch.zeros(5, dtype=DOUBLE)
        out = model(x) - mean[None]
        with torch.no_grad():
            mean.add_(out.mean(0))
            count.add_(out.detach().abs().amax(0))
        loss = (out * count).pow(2).mean()
        loss.backward()
        return loss, mean, count, gradients(model)

    assert_same_story(story, chunks)


@each_split
def test_written_through_data_before_backward(chunks: int | None) -> None:
    """torch does not see a write through .data, and uses what is there: so does a run by stages."""

    def story(lazy: Lazy) -> Any:
        model, x, y = make()
        x, y = lazy(x, y)
        out = torch.sigmoid(model(x))
        mean = out.detach().mean(0)
        out.data.sub_(mean).mul_(2.0)
        loss = (out * mean).sum(1).mean()
        loss.backward()
        return loss, out, gradients(model)

    assert_same_story(story, chunks, whole="a write that torch does not see")


@pytest.mark.parametrize("use_reentrant", [True, False])
@each_split
def test_statistics_in_a_checkpoint(chunks: int | None, use_reentrant: bool) -> None:
    """torch runs the body twice, and its BatchNorm counts both."""

    def story(lazy: Lazy) -> Any:
        first = nn.Linear(6, 6).double()
        body = nn.Sequential(nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU()).double()
        h = first(lazy(rows(6)))
        h = checkpoint(lambda t: body(t) * 2, h, use_reentrant=use_reentrant)
        loss = h.pow(3).mean()
        loss.backward()
        return loss, gradients(first, body), list(body.buffers())

    assert_same_story(story, chunks)


def test_a_reentrant_checkpoint_is_cut() -> None:
    """Its body is recorded as any other code."""
    module = linear()
    with split(2):
        x = koila.lazy(ones(4, 3))
        h = module(x)
        out = checkpoint(torch.tanh, h, use_reentrant=True)
        assert koila._core.real(h) is None
        out.sum().backward()
    assert koila.report() is not None


def test_what_makes_a_program_whole_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A call that needs the graph of all that was recorded, and before which the program cannot be
    cut as somebody looks at a gradient, names itself and its line."""
    module = linear()
    with (
        split(2, whole="a plain tensor is written"),
        caplog.at_level(logging.WARNING, logger="koila"),
    ):
        for _ in range(3):
            out = module(koila.lazy(ones(4, 3)))
            out.register_hook(lambda gradient: None)
            held = [torch.zeros(4, out.shape[1], dtype=DOUBLE)]
            held[0].add_(out).sum().backward()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "add_" in said[0]
    assert "test_run_now.py:" in said[0]


def inner(name: str) -> Callable[[Tensor, Tensor], Any]:
    """A question to the loss that only autograd's graph, or torch's tensor, answers."""
    return lambda x, loss: getattr(loss, name)


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("output_nr", inner("output_nr")),
        ("_version", inner("_version")),
        ("_backward_hooks", inner("_backward_hooks")),
        ("share_memory_", lambda x, loss: x.share_memory_()),
        ("new", lambda x, loss: x.new(x)),
    ],
)
def test_a_question_that_cuts_is_told(
    name: str, ask: Callable[[Tensor, Tensor], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """By its name, with the line of whoever asks, in the report."""
    module = linear()
    with split(2), caplog.at_level(logging.WARNING, logger="koila"):
        for _ in range(2):
            x = koila.lazy(ones(4, 3))
            loss = module(x).tanh().mean()
            ask(x, loss)
    assert not caplog.records
    program = koila.report().programs[-1]
    assert (program.what, program.n_chunks) == (f"{name}()", 2)
    assert [entry.call for entry in program.whole] == [name]
    assert "test_run_now.py:" in program.whole[0].line


@pytest.mark.parametrize("name", ["grad_fn", "output_nr", "_version", "_backward_hooks"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_question_to_an_input_runs_nothing(
    name: str, requires_grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tensor is there, and answers."""
    module = linear()
    plain = ones(4, 3).mul_(2).requires_grad_(requires_grad)
    with split(2), caplog.at_level(logging.WARNING, logger="koila"):
        x = koila.lazy(plain)
        loss = module(x).tanh().mean()
        assert getattr(x, name) == getattr(plain, name)
        assert koila._core.real(loss) is None
        loss.backward()
    assert not caplog.records


@pytest.mark.parametrize("name", ["grad_fn", "output_nr", "_backward_hooks"])
def test_what_requires_no_gradient_is_in_no_graph(name: str) -> None:
    """No call of it runs to say so."""
    module = linear()
    with split(2):
        x = koila.lazy(ones(4, 3))
        loss, mean = module(x).tanh().mean(), x.mean()
        assert getattr(mean, name) == getattr(ones(1), name)
        assert koila._core.real(loss) is None
        loss.backward()


def test_the_version_of_an_input_counts_its_writes() -> None:
    """Those that are recorded too, through its views as well."""

    def versions(x: Tensor) -> list[int]:
        found = [x._version]
        y = x * 2
        x.add_(1)
        found.append(x._version)
        x[:2].mul_(2)
        found += [x._version, y._version]
        x.detach().sub_(1)
        found.append(x._version)
        y.mul_(3)
        return [*found, x._version, y._version]

    with koila.config(chunks=2):
        assert versions(koila.lazy(ones(4, 3))) == versions(ones(4, 3))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_to_require_what_is_required_runs_nothing(
    requires_grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch is what it was; of a value that requires a gradient it is no leaf either."""
    module = linear()
    with split(2), caplog.at_level(logging.WARNING, logger="koila"):
        x = koila.lazy(ones(4, 3).requires_grad_(requires_grad))
        loss = module(x).tanh().mean()
        assert x.requires_grad_(requires_grad) is x
        assert x.requires_grad_(requires_grad=requires_grad) is x
        assert loss.requires_grad_() is loss
        assert not loss.is_leaf
        assert koila._core.real(loss) is None
        loss.backward()
    assert not caplog.records
    with pytest.raises(TypeError):
        koila.lazy(ones(4, 3)).requires_grad_(flag=False)
