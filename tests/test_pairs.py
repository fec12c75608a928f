# SPDX-License-Identifier: Apache-2.0
"""All pairs of rows: a call goes along the rows of one operand, and has all those of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from allocations import Allocations
from chunked import is_barrier, name_of, split
from koila.running import replay
from oracle import eager

N_ROWS = 11
EUCLID = "donot_use_mm_for_euclid_dist"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def info_nce(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))


def of_one(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """One value is read by rows and whole."""
    return F.cross_entropy(a @ a.T, torch.arange(len(a))) + (a * b).sum()


def einsum(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.einsum("id,jd->ij", a, b), torch.arange(len(a)))


def differences(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return (a[:, None] - b[None]).pow(2).sum(-1).mul(-1).exp().mean().sqrt()


def turned(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """The rows of the second operand come first."""
    return (a[None] - b[:, None]).abs().sum(-1).max(1).values.mean()


def cosine(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(a[:, None], b[None], -1).pow(2).mean()


def distances(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """The same tensor twice."""
    return torch.cdist(a, a, compute_mode=EUCLID).sum(1).sin().mean() + b.mean()


def outer(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """The same vector twice."""
    return torch.outer(a[:, 0], a[:, 0]).exp().mean() + b.mean()


def added(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return torch.addmm(y[:, None].to(a.dtype), a, b.T, alpha=0.5).log_softmax(1).square().mean()


def diagonal(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    scores = a @ b.T
    return (scores.logsumexp(1) - (scores * torch.eye(len(a), dtype=a.dtype)).sum(1)).mean()


def infinite(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """What is masked is -inf."""
    scores = (a @ b.T).masked_fill(torch.eye(len(a), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(scores, torch.arange(len(a)).roll(1))


def mined(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """The farthest of the same class, the nearest of another."""
    apart = torch.cdist(a, b, compute_mode=EUCLID)
    same = y[:, None] == y[None]
    farthest = apart.masked_fill(~same, 0).max(1).values
    return F.relu(farthest - apart.masked_fill(same, 1e4).min(1).values + 0.5).mean()


def positives(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """A mask of labels, that of a sum over all pairs."""
    same = (y[:, None] == y[None]).to(a.dtype) * (1 - torch.eye(len(a), dtype=a.dtype))
    log_p = (a @ b.T).log_softmax(1)
    return -((same * log_p).sum(1) / same.sum(1).clamp(min=1)).mean()


def classes(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """A mask that is made of labels alone is made again for each chunk."""
    same = (y[:, None] == y[None]).to(a.dtype)
    return -((same * (a @ b.T).log_softmax(1)).sum(1) / same.sum(1)).mean()


def attended(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Rows of pairs meet rows again."""
    return F.cross_entropy(a + torch.softmax(a @ a.T / 4, -1) @ b, y)


def attention(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.scaled_dot_product_attention(a, b, a), y)


def written(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Pairs are written in place with what is gathered."""
    scores = a @ b.T
    scores -= b.sum(1)[None]
    return scores.tanh().mean()


def picked(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Rows choose among all rows."""
    return (a * b[(a[:, 0] > 0).long() * y]).sum(1).exp().mean()


def hooked(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """The whole gradient of what is gathered is looked at."""
    b.register_hook(lambda gradient: gradient * 2)
    return F.cross_entropy(a @ b.T, torch.arange(len(a))) + (b * b).mean()


def in_a_row(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """What has gathered is gathered."""
    mixed = torch.softmax(a @ b.T, 1) @ b
    return F.cross_entropy(mixed @ a.T, torch.arange(len(a)))


def halved(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Without a graph in between."""
    with torch.no_grad():
        weight = torch.softmax(a @ b.T, 1)
    return (weight * (a @ b.T)).sum(1).square().mean()


def both_ways(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Rows against columns and columns against rows."""
    scores, target = a @ b.T, torch.arange(len(a))
    return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


def of_columns(**words: Any) -> Loss:
    """Columns against rows."""

    def loss(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        target = torch.arange(len(a)).roll(3)
        given = dict(words)
        if "ignore_index" in words:
            target[2:5] = words["ignore_index"]
        if "weight" in words:
            given["weight"] = torch.linspace(0.5, 2, len(a), dtype=a.dtype)
        return F.cross_entropy((a @ b.T).T, target, **given).square().mean()

    loss.__name__ = "of_columns-" + "-".join(words)
    return loss


def of_labels(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """The labels of columns are rows themselves."""
    return F.cross_entropy((a @ b.T).T, y) * 2


def log_likelihood(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss((a @ b.T).log_softmax(1).T, torch.arange(len(a)).flip(0))


def in_blocks(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """More dims after the classes."""
    scores = (a @ b.T)[:, :, None] * a[:, None, :2]
    target = torch.arange(len(a))[:, None].expand(-1, 2)
    return F.cross_entropy(scores.transpose(0, 1), target)


def written_after(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """What the loss was made of is written: it keeps shares, and no scores."""
    scores = a @ b.T
    each = F.cross_entropy(scores.T, torch.arange(len(a)), reduction="none", label_smoothing=0.1)
    scores.tanh_()
    return (scores + each[:, None]).square().mean()


def loss_of_each(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """A loss for each column meets one for each row."""
    scores, target = a @ b.T, torch.arange(len(a))
    rows = F.cross_entropy(scores, target, reduction="none")
    return (rows * F.cross_entropy(scores.T, target, reduction="none")).mean()


LOSSES: list[Loss] = [
    both_ways,
    of_columns(),
    of_columns(ignore_index=-100),
    of_columns(ignore_index=3, reduction="sum"),
    of_columns(weight=True, ignore_index=1),
    of_columns(label_smoothing=0.2),
    of_columns(label_smoothing=0.2, ignore_index=1, reduction="none"),
    of_labels,
    log_likelihood,
    in_blocks,
    written_after,
    loss_of_each,
    info_nce,
    of_one,
    einsum,
    differences,
    turned,
    cosine,
    distances,
    outer,
    added,
    diagonal,
    infinite,
    mined,
    positives,
    classes,
    attended,
    attention,
    written,
    picked,
    hooked,
    in_a_row,
    halved,
]


class Towers(nn.Module):
    """Two small models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.each = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)
        )


def step(loss: Loss, lazy: Any, n_rows: int = N_ROWS, is_one: bool = True) -> list[Tensor]:
    """The loss, and the gradients of parameters and inputs."""
    model = Towers().double()
    torch.manual_seed(4)
    x, z = (torch.randn(n_rows, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = torch.randint(4, (n_rows,))
    lazies = lazy(x, z, y) if is_one else [lazy(t) for t in (x, z, y)]
    value = loss(model.each[0](lazies[0]), model.each[1](lazies[1]), lazies[2])
    value.backward()
    tensors = [*model.parameters(), x, z]
    return [torch.tensor(value.item()), *(t.grad for t in tensors if t.grad is not None)]


@pytest.fixture
def barriers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of calls that read rows and ran once, of all that ran in chunks."""
    found: list[str] = []
    original = replay.attempt

    def attempt(program: Any, *args: Any) -> Any:
        nodes = program.nodes.values()
        found.extend(name_of(node.id) for node in nodes if is_barrier(program, node))
        return original(program, *args)

    monkeypatch.setattr(replay, "attempt", attempt)
    yield found


def assert_near(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Equal to 1e-10; what cancels to nothing is compared with the largest of all."""
    largest = max(float(t.abs().max()) for t in want)
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-13 * largest)


def assert_by_rows(loss: Loss, chunks: int, barriers: list[str]) -> None:
    """Assert that the numbers are eager's, in one chunk its bits, and that no call joins rows."""
    want = step(loss, eager)
    with split(chunks):
        got = step(loss, koila.lazy)
    if chunks == 1:
        assert all(map(torch.equal, got, want))
    assert_near(got, want)
    assert not barriers


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_by_rows(loss: Loss, chunks: int, barriers: list[str]) -> None:
    """No call has all pairs at once, and the numbers are eager's."""
    assert_by_rows(loss, chunks, barriers)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_of_several_batches(loss: Loss, barriers: list[str]) -> None:
    """Inputs that were made lazy one by one."""
    with split(3):
        got = step(loss, koila.lazy, is_one=False)
    assert_near(got, step(loss, eager))
    assert not barriers


@pytest.mark.parametrize("filled", [float("-inf"), float("inf"), float("nan")])
@pytest.mark.parametrize("n_filled", [1, 2, N_ROWS])
def test_infinite_columns(filled: float, n_filled: int) -> None:
    """A column of which some entries, or all, are no numbers."""

    def losses(lazy: Any) -> list[Tensor]:
        found: list[Tensor] = []

        def loss(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
            mask = torch.zeros(N_ROWS, N_ROWS, dtype=torch.bool)
            mask[:n_filled, 4] = True
            scores = (a @ b.T).masked_fill(mask, filled)
            target = torch.arange(N_ROWS).roll(1)
            each = F.cross_entropy(scores.T, target, reduction="none")
            found.append(each)
            return each.sum()

        gradients = step(loss, lazy)
        return [torch.tensor(found[0].tolist()), *gradients]

    want = losses(eager)
    for chunks in (3, N_ROWS):
        with split(chunks):
            got = losses(koila.lazy)
        for left, right in zip(got, want, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("wrong", [-1, N_ROWS])
@pytest.mark.parametrize("is_nll", [False, True])
def test_label_without_class(is_nll: bool, wrong: int) -> None:
    """No chunk finds such a label among its rows; torch's own call refuses it."""

    def loss(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        scores, target = (a @ b.T).T, torch.arange(len(a))
        target[4] = wrong
        return F.nll_loss(scores, target) if is_nll else F.cross_entropy(scores, target)

    for chunks in (1, 3, N_ROWS):
        with koila.config(chunks=chunks), pytest.raises(IndexError, match=f"Target {wrong} is out"):
            step(loss, koila.lazy)


def test_of_two_sizes() -> None:
    """Batches of other sizes meet, each in chunks of its own."""

    def scores(lazy: Any) -> list[Tensor]:
        torch.manual_seed(0)
        left, right = torch.randn(7, 4).double(), torch.randn(11, 4).double()
        weight = torch.randn(4, 4).double().requires_grad_()
        value = ((lazy(left) @ weight).exp() @ (lazy(right) @ weight).exp().T).log().mean()
        value.backward()
        assert weight.grad is not None
        return [torch.tensor(value.item()), weight.grad]

    want = scores(eager)
    for chunks in (2, 3, 5):
        with split(chunks, rows=("matmul",)):
            assert_near(scores(koila.lazy), want)


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("chunks", [2, 3, N_ROWS])
def test_read_and_held(chunks: int, is_read: bool, barriers: list[str]) -> None:
    """The loss is read before backward; the pairs, and what is gathered for them, are held over it
    and read after."""

    def held(lazy: Any) -> list[Tensor]:
        pairs: list[Tensor] = []

        def loss(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
            turned = b.T
            scores = a @ turned
            value = F.cross_entropy(scores, torch.arange(len(a)))
            pairs.extend([scores, turned])
            if is_read:
                value.item()
            return value

        found = step(loss, lazy)
        return [*found, *(torch.tensor(value.tolist()) for value in pairs)]

    want = held(eager)
    with split(chunks):
        got = held(koila.lazy)
    assert_near(got, want)
    assert not barriers


def test_without_gradients(barriers: list[str]) -> None:
    """Retrieval: scores of all rows, each with its best."""

    def best(lazy: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x = lazy(torch.randn(N_ROWS, 4).double())
        with torch.no_grad():
            scores = x @ x.T
            found = scores.max(1)
        return [torch.tensor(found.values.tolist()), torch.tensor(found.indices.tolist())]

    want = best(eager)
    with split(3):
        got = best(koila.lazy)
    assert_near(got, want)
    assert not barriers


N_MANY = 512


def peak_of(loss: Loss, lazy: Any, chunks: int | None) -> int:
    memory = Allocations()
    with memory:
        pass
    with koila.config(chunks=chunks), memory:
        step(loss, lazy, N_MANY)
    return memory.peak


@pytest.mark.parametrize("loss", [info_nce, classes, mined, cosine, both_ways])
def test_pairs_are_never_all_there(loss: Loss) -> None:
    """Eager has the matrix of all pairs several times, eight chunks an eighth of that."""
    step(loss, eager, 64)
    with koila.config(chunks=2):
        step(loss, koila.lazy, 64)
    plain = peak_of(loss, eager, None)
    assert plain > 2 * N_MANY**2 * 8
    peaks = [peak_of(loss, koila.lazy, chunks) for chunks in (4, 8)]
    assert peaks[0] < 0.4 * plain and peaks[1] < 0.25 * plain, [p / plain for p in peaks]


def test_what_stays_a_barrier(barriers: list[str]) -> None:
    """Of a matrix and its transpose, the second would have to be cut across its rows."""

    def symmetric(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        scores = a @ b.T
        return (scores + scores.T).exp().mean()

    want = step(symmetric, eager)
    with split(3):
        got = step(symmetric, koila.lazy)
    assert_near(got, want)
    assert barriers == ["add"]
