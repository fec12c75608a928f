# SPDX-License-Identifier: Apache-2.0
"""What a mask chooses is written: by rows, with the mask's numbers known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from allocations import Allocations
from chunked import split
from oracle import Lazy, assert_close, eager
from written import N_ROWS, Programs, each_count

pytestmark = pytest.mark.sanitize

PROGRAMS = Programs()


@PROGRAMS.add
def as_many_of_each_row(x: Tensor, z: Tensor, w: Tensor) -> Any:
    """Rows have two entries each, at places of their own."""
    mask = x >= x.topk(2, 1).values[:, 1:]
    return (x @ w).masked_scatter(mask, (z @ w)[:, :2]), (x @ w).masked_scatter(
        mask, (z @ w) * mask
    )


@PROGRAMS.add
def vectors(x: Tensor, z: Tensor, ids: Tensor, w: Tensor) -> Any:
    """As images are put into a text: a mask of places, as wide as the model or not."""
    text, image = x[:, None] @ w * ids[..., None], torch.stack([z @ w, z], 1)
    mask = (ids >= ids.topk(2, 1).values[:, 1:]).cumsum(1).le(2) & (ids >= 0)
    mask = torch.zeros_like(ids, dtype=torch.bool).scatter(1, ids.topk(2, 1).indices, mask[:, :2])
    mask = mask.scatter(1, ids.topk(2, 1).indices, torch.ones_like(ids[:, :2]) > 0)
    wide = text.masked_scatter(mask[..., None].expand_as(text), image)
    return wide, text.masked_scatter(mask[..., None], image.flatten(0, 1))


@PROGRAMS.add
def more_of_some_rows(x: Tensor, ids: Tensor, w: Tensor, v: Tensor) -> Any:
    """Of some rows none; and of the source the last entries are not used."""
    mask, source = ids > 4, torch.arange(4.0 * 5 * N_ROWS, dtype=x.dtype).view(-1, 4) * v
    text = (x @ w)[:, None] * ids[..., None]
    return text.masked_scatter(mask[..., None], source), text.masked_scatter(ids[..., None] > 8, v)


@PROGRAMS.add
def assigned(x: Tensor, ids: Tensor, w: Tensor, v: Tensor) -> Any:
    """Each entry of what is assigned is written once; what was there has no gradient."""
    text = (x @ w)[:, None] * ids[..., None]
    before = text * 2
    mask = ids > 4
    text[mask] = before[mask].tanh() * v
    text[mask,] = text[mask] + 1
    first = x @ w
    first[x[:, 0] > 0] = first[x[:, 0] > 0].exp()
    return text, first


@PROGRAMS.add
def as_many_of_each_row_are_selected(x: Tensor, z: Tensor, w: Tensor) -> Any:
    """Of rows that are put in order or repeated too, along one dim or several, of one number."""
    mask = x >= x.topk(2, 1).values[:, 1:]
    text = (x @ w)[:, None] * (z @ w)[:, :, None]
    chosen = text[mask].view(len(x), 2, -1)
    pairs = text.flatten(0, 1)[mask[:, None].expand(-1, 4, -1).flatten(0, 1)]
    flat = (x @ w).masked_select(mask)
    return chosen.exp(), pairs.tanh() * 2, flat.view(-1, 2).softmax(1), (x @ w)[mask].sum()


@PROGRAMS.add
def others_are_selected(x: Tensor, z: Tensor, w: Tensor) -> Any:
    """The batch is both dims of a value, or in a dim that the mask does not reach."""
    scores = (x @ w) @ (z @ w).T
    mask = ~torch.eye(N_ROWS, dtype=torch.bool)
    others = scores[mask].view(N_ROWS, -1)
    of_columns = scores.T[mask].view(N_ROWS, -1)
    small = torch.tensor([[True, False], [False, True]])
    stacked = torch.stack([(x @ w).T[:2], (z @ w).T[:2]])
    return others.logsumexp(1), of_columns.logsumexp(1), stacked[small] * 2


def _pieces(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """As splines are written: another function inside of an interval than outside."""
    inside = (h >= -0.5) & (h <= 0.5)
    outside = ~inside
    outputs, total = torch.zeros_like(h), torch.zeros_like(h)
    outputs[outside] = h[outside]
    total[outside] = 0
    wide = (h.unsqueeze(-1) * w)[inside, :]
    outputs[inside] = wide.sum(-1).exp()
    total[inside] = wide.tanh().sum(-1)
    return outputs, total


@PROGRAMS.add
def pieces(x: Tensor, w: Tensor) -> Any:
    outputs, total = _pieces((x @ w).tanh(), w)
    again, more = _pieces(outputs.tanh(), w)
    total = total.sum(-1)
    total += more.sum(-1)
    return again, total


@PROGRAMS.add
def a_mask_that_is_written_later(x: Tensor, w: Tensor) -> Any:
    """Eager keeps the mask where a gradient goes through the write, and refuses the next one."""
    mask, out = x > 0, torch.zeros_like(x)
    out[mask] = x[mask].exp()
    mask.logical_not_()
    out[mask] = x[mask] * 2
    other = ~mask
    out[other] = out[other] + 1
    other[:, 0] = True
    return (out * other) @ w, out


@PROGRAMS.add
def what_others_see_is_written(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    out, mask, other = torch.zeros_like(h), h > 0, h > 1
    column, same = out[:, 0], out
    out[mask] = h[mask].exp()
    out[other] = h[other].tanh()
    return out, column * 2, same


@pytest.mark.rotated("chunks")
@each_count
@pytest.mark.parametrize("is_read_first", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str, is_read_first: bool, chunks: int) -> None:
    PROGRAMS.check(name, chunks, is_read_first)


def test_writes_through_masks_are_in_one_program() -> None:
    """Reading a mask computes what is written; the write goes to a copy, which is recorded."""
    torch.manual_seed(0)
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    with koila.config(chunks=3):
        h = (koila.lazy(torch.randn(N_ROWS, 4, dtype=torch.float64)) @ w).tanh()
        outputs, total = _pieces(h, w)
        (outputs.sum() + total.pow(2).sum()).backward()
    *reads, last = koila.report().programs
    assert {one.what for one in reads} == {"getitem()"}
    assert last.n_chunks == 3
    assert sum(one.n_calls for one in reads) < last.n_calls / 2


def test_what_does_not_fit_is_in_the_words_of_torch() -> None:
    def text_of(lazy: Lazy, n: int, shape: tuple[int, ...]) -> str:
        x = lazy(torch.ones(4, 3))
        with pytest.raises((RuntimeError, IndexError)) as error:
            out = x.masked_scatter(torch.ones(shape) > 0, torch.ones(n))
            out.sum().item()
        return str(error.value).splitlines()[0]

    for n, shape in ((11, (4, 3)), (12, (4, 2))):
        with koila.config(chunks=2):
            assert text_of(koila.lazy, n, shape) == text_of(eager, n, shape)


class Seeing(nn.Module):
    """A language model that is shown an image beside each text."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.see = nn.Embedding(32, 32), nn.Linear(48, 32)
        wide = (nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.GELU())
        self.layers = nn.Sequential(*wide, nn.Linear(32, 32))

    def forward(self, ids: Tensor, image: Tensor, is_assigned: bool) -> Tensor:
        text, seen, mask = self.words(ids), self.see(image), ids == 1
        if is_assigned:
            text = text * 1
            text[mask] = seen.flatten(0, 1)
        else:
            text = text.masked_scatter(mask[..., None].expand_as(text), seen)
        return self.layers(text)


@pytest.mark.parametrize("is_assigned", [False, True])
def test_a_model_of_images_and_text_takes_a_third(is_assigned: bool) -> None:
    torch.manual_seed(0)
    model, ids, image = Seeing(), torch.randint(2, 32, (96, 48)), torch.randn(96, 8, 48)
    ids[:, 3:11] = 1

    def peak(lazy: Lazy) -> int:
        model.zero_grad()
        memory = Allocations()
        with memory:
            batch = lazy(ids, image)
        with memory:
            out = model(*batch, is_assigned)
            F.cross_entropy(out.flatten(0, 1), batch[0].flatten()).backward()
        return memory.peak

    want = peak(eager)
    with split(6):
        assert peak(koila.lazy) <= 0.35 * want


def test_other_pairs_of_a_batch_are_selected_by_rows() -> None:
    """SimCLR, as its repository writes it: masks of the diagonal and of the positives."""
    n_pairs = 128

    def story(lazy: Lazy) -> Any:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48), nn.GELU()) for _ in range(6)]
        model = nn.Sequential(*layers).double()
        x = lazy(torch.randn(2 * n_pairs, 48, 16, dtype=torch.float64).mT.contiguous())
        labels = torch.arange(n_pairs).repeat(2)
        labels = labels[None] == labels[:, None]
        with memory:
            features = F.normalize(model(x).mean(1), dim=1)
            scores = features @ features.T
            mask = torch.eye(2 * n_pairs, dtype=torch.bool)
            labels = labels[~mask].view(2 * n_pairs, -1)
            scores = scores[~mask].view(2 * n_pairs, -1)
            positives = scores[labels].view(2 * n_pairs, -1)
            negatives = scores[~labels].view(2 * n_pairs, -1)
            logits = torch.cat([positives, negatives], dim=1) / 0.07
            loss = F.cross_entropy(logits, torch.zeros(2 * n_pairs, dtype=torch.long))
        with memory:
            loss.backward()
        return loss.detach(), [parameter.grad for parameter in model.parameters()]

    memory = Allocations()
    wanted = story(eager)
    n_bytes = memory.peak
    for chunks in (2, 7):
        memory = Allocations()
        with split(chunks, rows=("select_masked",)):
            loss, got = story(koila.lazy)
        for given, want in zip([loss, *got], [wanted[0], *wanted[1]], strict=True):
            assert_close(given, want, f"{chunks} chunks")
        assert memory.peak <= (0.7 if chunks == 2 else 0.4) * n_bytes


class Encoder(nn.Module):
    """Activations of 3 MiB, and pairs of the batch of 7 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1, dtype=torch.float64)
        self.head = nn.Linear(64, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.head(F.adaptive_avg_pool2d(self.conv(x).relu(), 2).flatten(1))
        return (vectors[:, None] - vectors).square().sum(-1)


@pytest.mark.parametrize("is_even", [True, False], ids=["as many of each row", "others"])
def test_pairs_written_where_a_mask_is_true_take_a_third(is_even: bool) -> None:
    """As ranked list loss does: the pairs under a limit are written into zeros like them. Of each
    row as many may be under it, so that they are cut with the rows."""
    torch.manual_seed(0)
    encoder, images = Encoder(), torch.randn(30, 1, 20, 20, dtype=torch.float64)
    least = float("inf") if is_even else float(encoder(images).detach().median())

    def peak(lazy: Lazy) -> int:
        encoder.zero_grad()
        memory = Allocations()
        with memory:
            x = lazy(images)
        with memory:
            pairs = encoder(x)
            near = torch.zeros_like(pairs)
            near[pairs < least] = pairs[pairs < least]
            near.square().sum().backward()
        return memory.peak

    expected = peak(eager)
    gradients = [p.grad for p in encoder.parameters()]
    with split(6):
        assert peak(koila.lazy) < expected / 3
    for p, gradient in zip(encoder.parameters(), gradients, strict=True):
        assert_close(p.grad, gradient, "a gradient", largest=float(gradients[0].abs().max()))
