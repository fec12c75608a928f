# SPDX-License-Identifier: Apache-2.0
"""Experts: what is sorted, worked on and put back goes by rows, each chunk in an order of its own;
whatever else looks at it makes it whole, and sees what eager sees."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from allocations import Allocations
from chunked import split
from koila.planning import planner, plans
from koila.staged.facts import ONCE
from koila.staged.program import Program
from koila.staged.schedule import Strategy
from limits import there
from oracle import Lazy, assert_seen, eager, tell
from test_memory_limit import Prediction

ROWS, LENGTH, WIDTH, EXPERTS, TOP = 7, 3, 8, 4, 2
Put = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_inverse(perm: Tensor, out: Tensor, x: Tensor) -> Tensor:
    """As transformers does."""
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.size(0), device=perm.device)
    return out[inverse].view(x.shape[0], TOP, -1).sum(1)


def by_argsort(perm: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return out[perm.argsort()].view(x.shape[0], TOP, -1).sum(1)


def by_assignment(perm: Tensor, out: Tensor, x: Tensor) -> Tensor:
    """As DeepSeek's own code does."""
    back = torch.empty_like(out)
    back[perm] = out
    return back.view(x.shape[0], TOP, -1).sum(1)


def by_index_add(perm: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add_(0, perm // TOP, out)


def by_index_add_apart(perm: Tensor, out: Tensor, x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, perm.floor_divide(TOP), out)


class Experts(nn.Module):
    """A router and its experts, whose entries are sorted by expert."""

    def __init__(self, put: Put = by_inverse, look: str = "", dtype: Any = torch.float64) -> None:
        super().__init__()
        self.put, self.look = put, look
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)
        self.seen: list[Tensor] = []
        self.loss: Tensor | float = 0.0
        self.to(dtype)

    def grouped(self, x: Tensor, weight: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        if x.dtype == torch.float64:  # of which torch has no kernel
            return torch.bmm(x[:, None], weight[ids])[:, 0]
        return F.grouped_mm(x, weight, offs=offsets)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.reshape(-1, WIDTH)
        probabilities = self.router(x).softmax(-1)
        weights, ids = probabilities.topk(TOP, -1)
        if self.look == "capacity":
            weights = weights * (weights > 0.4)
        weights = (weights / (weights.sum(-1, keepdim=True) + 1e-6)).reshape(-1)
        ids, perm = torch.sort(ids.reshape(-1), descending=self.look == "descending")
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        taken = x[perm // TOP]
        made = self.grouped(taken, self.up, ids, offsets)
        made.add_(self.bias[ids])
        gate, up = made.chunk(2, -1)
        if self.look == "dropout":
            up = F.dropout(up, 0.5)
        out = self.grouped(F.silu(gate) * up, self.down, ids, offsets)
        out = out * weights[perm].unsqueeze(-1)
        self.look_at(probabilities, ids, perm, counts, out)
        return self.put(perm, out, x).reshape(inputs.shape)

    def look_at(
        self, probabilities: Tensor, ids: Tensor, perm: Tensor, counts: Tensor, out: Tensor
    ) -> None:
        """At what is sorted, in another way than to put it back."""
        if self.look == "counts":  # the balance of all rows
            share = counts.to(out.dtype) / counts.sum()
            self.loss = (share * probabilities.mean(0)).sum()
        elif self.look == "held":
            self.seen += [ids, perm, counts]
        elif self.look == "read":
            self.seen += [torch.tensor(perm.tolist()), torch.tensor(counts.tolist())]
        elif self.look == "position":
            self.loss = (out[:5] * torch.arange(1, 6)[:, None]).sum() + out[2].pow(2).sum()
        elif self.look == "neighbours":
            self.loss = (out[1:] * out[:-1]).sum() + (out.cumsum(0) * 0.01).pow(2).sum()
        elif self.look == "a plain tensor":
            self.loss = (out * torch.linspace(0, 1, out.shape[0])[:, None]).pow(2).sum()
        elif self.look == "softmax":
            self.loss = (out.softmax(0) * out.flip(0)).sum()
        elif self.look == "sums":
            self.loss = out.pow(2).mean() + out.sum(0).sin().sum() * 0.1
        elif self.look == "largest":
            self.loss = out.amax(0).sum() + out.argmax(0).sum() * 0.1
        elif self.look == "pairs":
            self.loss = (out[:, None] - out[None]).pow(2).mean()
        elif self.look == "folded":
            self.loss = out.view(-1, TOP, WIDTH).prod(1).sum()
        elif self.look == "meets rows":
            self.loss = (out * weights_of(probabilities, out)).sum()
        elif self.look == "hook":
            out.register_hook(lambda grad: self.seen.append(grad.clone()))
        elif self.look == "points":
            self.loss = (perm.to(out.dtype)[:, None] * out).sum() * 1e-3
        elif self.look == "sorted again":
            self.loss = (out[perm.sort()[1]] * out).sum() + (out[ids.argsort()] * out).sum()


def weights_of(probabilities: Tensor, out: Tensor) -> Tensor:
    return probabilities.sum(-1).repeat_interleave(TOP)[:, None].expand_as(out)


class Model(nn.Module):
    """Two layers of experts, in a residual stream."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(**options) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.to(options.get("dtype", torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return x


def step(model: Model, x: Tensor, chunks: int | None) -> list[Tensor]:
    """The losses, what was looked at, and all gradients."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    for layer in model.layers:
        layer.seen = []

    def run(x: Tensor) -> list[Tensor]:
        out = model(x)
        loss = out.pow(2).mean() + sum(layer.loss for layer in model.layers)
        loss.backward()
        return [loss.detach(), *(t.detach() for layer in model.layers for t in layer.seen)]

    if chunks is None:
        found = run(x)
    else:
        with koila.config(chunks=chunks):
            found = [t.clone() for t in run(koila.lazy(x))]
    return found + [p.grad for p in model.parameters() if p.grad is not None]


def assert_equal(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-10) -> None:
    assert len(got) == len(want)
    for left, right in zip(got, want, strict=True):
        assert left.shape == right.shape and left.dtype == right.dtype
        error = (left.double() - right.double()).abs().max()
        assert error <= tolerance * (1 + right.double().abs().max())


def n_whole() -> int:
    """Calls of the last step that ran whole."""
    report = koila.report()
    assert report is not None
    return sum(len(program.whole) for program in report.programs)


def by_inverse_of_a_view(perm: Tensor, out: Tensor, x: Tensor) -> Tensor:
    """Written through a view, and read through another."""
    inverse = torch.empty_like(perm)
    inverse.view(-1)[perm] = torch.arange(perm.size(0), device=perm.device)
    return out[inverse].view(x.shape[0], TOP, -1).sum(1)


def by_a_view_of_the_inverse(perm: Tensor, out: Tensor, x: Tensor) -> Tensor:
    """Taken before it was written."""
    inverse = torch.empty_like(perm)
    view = inverse.view(-1)
    inverse[perm] = torch.arange(perm.size(0), device=perm.device)
    return out[view].view(x.shape[0], TOP, -1).sum(1)


def by_a_view_of_what_is_put_back(perm: Tensor, out: Tensor, x: Tensor) -> Tensor:
    back = torch.zeros_like(out)
    view = back.view(-1, WIDTH)
    back[perm] = out
    return view.view(x.shape[0], TOP, -1).sum(1)


def by_part_of_a_buffer(perm: Tensor, out: Tensor, x: Tensor) -> Tensor:
    back = torch.zeros(2, *out.shape, dtype=out.dtype)
    back = back + out.sum() * 0
    back[1][perm] = out
    return back[1].view(x.shape[0], TOP, -1).sum(1) + back[0].sum()


def by_entries_that_were_written(perm: Tensor, out: Tensor, x: Tensor) -> Tensor:
    """The inverse is not one any more."""
    inverse = perm.argsort()
    inverse[inverse == 0] = 1
    return out[inverse].view(x.shape[0], TOP, -1).sum(1)


def by_what_was_there(perm: Tensor, out: Tensor, x: Tensor) -> Tensor:
    """Half of it is written."""
    back = torch.ones_like(out)
    back[perm // 2] = out.detach() * 0 + 1
    return back.view(x.shape[0], TOP, -1).sum(1) * x


OTHER_PUTS = [
    by_inverse_of_a_view,
    by_a_view_of_the_inverse,
    by_a_view_of_what_is_put_back,
    by_part_of_a_buffer,
    by_entries_that_were_written,
    by_what_was_there,
]
PUTS = [by_inverse, by_argsort, by_assignment, by_index_add, by_index_add_apart]


@pytest.mark.parametrize("chunks", [1, 2, 3, ROWS])
@pytest.mark.parametrize("put", PUTS)
def test_by_rows(put: Put, chunks: int) -> None:
    torch.manual_seed(0)
    model = Model(put=put)
    x = torch.randn(ROWS, LENGTH, WIDTH).double()
    want = step(model, x, None)
    assert_equal(step(model, x, chunks), want)
    assert n_whole() == 0


@pytest.mark.parametrize("chunks", [1, 2, 3, ROWS])
@pytest.mark.parametrize("put", PUTS)
def test_groups_of_torch(put: Put, chunks: int) -> None:
    """Products of groups, whose ends are a chunk's own."""
    torch.manual_seed(0)
    model = Model(put=put, dtype=torch.float32)
    x = torch.randn(ROWS, LENGTH, WIDTH)
    want = step(model, x, None)
    assert_equal(step(model, x, chunks), want, 1e-5)
    assert n_whole() == 0


@pytest.mark.parametrize("chunks", [1, 2, 3, ROWS])
@pytest.mark.parametrize("put", OTHER_PUTS)
def test_put_back_in_a_way_that_is_not_known(put: Put, chunks: int) -> None:
    torch.manual_seed(0)
    model = Model(put=put)
    x = torch.randn(ROWS, LENGTH, WIDTH).double()
    want = step(model, x, None)
    assert_equal(step(model, x, chunks), want)


LOOKS = """counts held read position neighbours largest pairs folded hook points softmax descending
dropout""".split()
OTHERS = ["a plain tensor", "meets rows", "sorted again"]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunks", [1, 2, 3, ROWS])
@pytest.mark.parametrize("look", [*LOOKS, *OTHERS])
def test_what_is_looked_at_in_another_way(look: str, chunks: int, dtype: torch.dtype) -> None:
    """All of it is what eager has, and what was seen too."""
    torch.manual_seed(0)
    model = Model(look=look, dtype=dtype)
    x = torch.randn(ROWS, LENGTH, WIDTH).to(dtype)
    want = step(model, x, None)
    is_double = dtype == torch.float64
    assert_equal(step(model, x, chunks), want, 1e-10 if is_double else 2e-5)
    assert chunks == 1 or n_whole() > 0 or (look == "descending" and is_double)


@pytest.mark.parametrize("chunks", [2, 3, ROWS])
@pytest.mark.parametrize("look", ["sums", "capacity"])
def test_what_does_not_see_the_order(look: str, chunks: int) -> None:
    torch.manual_seed(0)
    model = Model(look=look)
    x = torch.randn(ROWS, LENGTH, WIDTH).double()
    want = step(model, x, None)
    assert_equal(step(model, x, chunks), want)
    assert n_whole() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunks", [2, 3, ROWS])
@pytest.mark.parametrize("kind", ["ties", "one", "none", "alone"])
def test_unequal_experts(kind: str, chunks: int, dtype: torch.dtype) -> None:
    """Ties in what is chosen; an expert that has all rows, or none; one that a single row has."""
    torch.manual_seed(0)
    model = Model(dtype=dtype)
    x = torch.randn(ROWS, LENGTH, WIDTH).to(dtype)
    with torch.no_grad():
        for layer in model.layers:
            router = layer.router.weight  # type: ignore[union-attr]
            if kind == "ties":
                router[1:] = router[:1]
            elif kind == "one":
                router[0] = 0
                router[1:] = -1e-3 * torch.ones_like(router[1:])
            elif kind == "none":
                router[2] = router[1]
                router[3] = router[1]
            else:
                router[:] = 0
                router[3] = torch.randn_like(router[3]) * 5
    want = step(model, x, None)
    assert_equal(step(model, x, chunks), want, 1e-10 if dtype == torch.float64 else 2e-5)
    assert n_whole() == 0


def test_keys_that_may_be_below_zero_are_sorted_whole() -> None:
    """Their counts would begin elsewhere in a chunk."""
    torch.manual_seed(0)
    weight = torch.randn(EXPERTS, WIDTH, WIDTH)

    def gradient(x: Tensor, ids: Tensor) -> Tensor:
        w = weight.clone().requires_grad_()
        keys, perm = torch.sort(ids)
        counts = torch.histc(keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        made = F.grouped_mm(x[perm], w, offs=counts.cumsum(0, dtype=torch.int32))
        x = torch.zeros_like(x).index_add_(0, perm, made)
        (grad,) = torch.autograd.grad(x[:, :3].pow(2).mean(), w)
        return grad

    x, ids = torch.randn(12, WIDTH), torch.arange(12) % (EXPERTS + 1) - 1
    want = gradient(x, ids)
    for chunks in (2, 5, 12):
        with koila.config(chunks=chunks):
            got = gradient(*koila.lazy(x, ids))
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("chunks", [2, 3, ROWS])
def test_without_gradients(chunks: int) -> None:
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(ROWS, LENGTH, WIDTH).double()
    with torch.no_grad():
        want = model(x)
        with split(chunks):
            got = model(koila.lazy(x))
            assert (got - want).abs().max().item() <= 1e-12


@pytest.mark.parametrize("at", [0, 1])
def test_a_read_in_the_middle(at: int) -> None:
    """While what is sorted is still held, and after."""
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(ROWS, LENGTH, WIDTH).double()
    layer = model.layers[at]
    put = layer.put
    seen = []

    def reading(perm: Tensor, out: Tensor, x: Tensor) -> Tensor:
        seen.append(out.sum().item())
        made = put(perm, out, x)
        seen.append(made.sum().item())
        return made

    layer.put = reading  # type: ignore[assignment]
    want = step(model, x, None)
    eager, seen[:] = list(seen), []
    assert_equal(step(model, x, 3), want)
    assert seen == pytest.approx(eager, rel=1e-12)


def test_a_limit() -> None:
    """Chunks take their share, and fit where eager does not."""
    torch.manual_seed(0)
    model = Model(dtype=torch.float32)
    x = torch.randn(64, 64, WIDTH)
    other = copy.deepcopy(model)
    peaks = []
    for chunks in (None, 4):
        found = Allocations()
        with found:
            pass
        with found:
            step(model, x, chunks)
        peaks.append(found.peak)
    assert 2**20 < peaks[1] <= 0.35 * peaks[0]
    with koila.config(memory_limit=int(there() + 0.4 * peaks[0])):
        other(koila.lazy(x)).pow(2).mean().backward()
    got, want = ([p.grad for p in m.parameters() if p.grad is not None] for m in (other, model))
    assert_equal(got, want, 1e-5)


def bytes_of_step(
    model: Model, x: Tensor, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, int]:
    """What koila says that a step of the model takes in chunks, and what it takes."""
    found = Allocations()
    said = Prediction(found, monkeypatch)
    model.zero_grad(set_to_none=True)
    with koila.config(chunks=chunks):
        with found:
            loss = model(koila.lazy(x)).pow(2).mean()
        with found:
            loss.backward()
    return said.n_bytes, found.peak


@pytest.mark.parametrize("chunks", [2, 16])
@pytest.mark.parametrize("put", [by_argsort, by_assignment, by_index_add])
def test_bytes(put: Put, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said is what is taken."""
    torch.manual_seed(0)
    model = Model(put=put, dtype=torch.float32)
    x = torch.randn(64, 64, WIDTH)
    step(model, x, chunks)
    said, taken = bytes_of_step(model, x, chunks, monkeypatch)
    assert abs(said - taken) <= max(0.01 * taken, 2**14)


@pytest.mark.parametrize("put", PUTS[:3])
@pytest.mark.parametrize("n_segments", [4, 8])
@pytest.mark.parametrize("n_pieces", [1, 2])
@pytest.mark.parametrize("chunks", [2, 8])
def test_bytes_in_segments(
    put: Put, n_segments: int, n_pieces: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sorted rows stay rows where a body runs in segments, or its last layers in pieces."""
    torch.manual_seed(0)
    model = Model(put=put, dtype=torch.float32)
    x, plan = torch.randn(64, 64, WIDTH), planner.plan
    step(model, x, chunks)
    way = Strategy(n_segments, n_pieces=n_pieces)
    monkeypatch.setattr(
        planner, "plan", lambda *a, **k: dataclasses.replace(plan(*a, **k), strategy=way)
    )
    said, taken = bytes_of_step(model, x, chunks, monkeypatch)
    assert n_whole() == 0
    assert 0.97 <= said / taken <= 1.08, (said, taken)


# Experts that run one after the other, each on its segment ----------------------------------------


def by_slices(tokens: Tensor, counts: Tensor) -> list[Tensor]:
    """As DeepSeek's own code does."""
    parts, start = [], 0
    for n in counts.cpu().numpy():
        parts.append(tokens[start : start + n])
        start += n
    return parts


def by_split(tokens: Tensor, counts: Tensor) -> list[Tensor]:
    return list(tokens.split(counts.tolist()))


def by_narrow(tokens: Tensor, counts: Tensor) -> list[Tensor]:
    ends = counts.cumsum(0).tolist()
    pairs = zip([0, *ends], ends, strict=False)
    return [tokens.narrow(0, start, end - start) for start, end in pairs]


Segment = Callable[[Tensor, Tensor], list[Tensor]]
SEGMENTS: list[Segment] = [by_slices, by_split, by_narrow]


class InSegments(nn.Module):
    """Entries are sorted by expert, and each expert runs on a part of known length."""

    def __init__(self, segment: Segment, put: Put, is_cheap: bool = False) -> None:
        super().__init__()
        self.segment, self.put, self.is_cheap = segment, put, is_cheap
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.reshape(-1, WIDTH)
        weights, ids = self.router(x).softmax(-1).topk(TOP, -1)
        ids = ids.reshape(-1)
        perm = ids.argsort(stable=True)
        tokens = x[perm // TOP]
        if self.is_cheap:  # calls in the order, before it is known to be looked at
            tokens = self.scale(tokens).tanh()
        parts = self.segment(tokens, torch.bincount(ids, minlength=EXPERTS))
        found = [e(part) for e, part in zip(self.experts, parts, strict=True) if len(part)]
        out = torch.cat(found) * weights.reshape(-1)[perm].unsqueeze(-1)
        return self.put(perm, out, x).reshape(inputs.shape)


class Segmented(nn.Module):
    """Layers of experts in a residual stream."""

    def __init__(self, segment: Segment, put: Put, is_cheap: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InSegments(segment, put, is_cheap) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 2 * ROWS])
@pytest.mark.parametrize("is_cheap", [False, True])
@pytest.mark.parametrize("put", PUTS)
@pytest.mark.parametrize("segment", SEGMENTS)
def test_segments(segment: Segment, put: Put, is_cheap: bool, chunks: int) -> None:
    """Each expert runs by rows of its segment: what is sorted once is cut like any batch."""

    def run(lazy: Lazy) -> Any:
        model = Segmented(segment, put, is_cheap).double()
        x = lazy(torch.randn(2 * ROWS, LENGTH, WIDTH).double().requires_grad_())
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss.detach() * 1, [p.grad for p in model.parameters()]

    want, _ = tell(run, eager)
    with split(chunks, rows=("linear", "silu", "layer_norm")):
        got, _ = tell(run, koila.lazy)
    assert_seen(got, want, "seen", exact_bits=chunks == 1)


def step_in_segments(segment: Segment, lazy: Lazy) -> Allocations:
    torch.manual_seed(0)
    model, x = Segmented(segment, by_assignment), torch.randn(64, 96, WIDTH)
    memory = Allocations()
    memory.count(x, list(model.parameters()))
    with memory:
        pass
    with memory:
        model(lazy(x)).pow(2).mean().backward()
    return memory


@pytest.mark.parametrize("segment", SEGMENTS)
def test_segments_take_less(segment: Segment) -> None:
    with koila.config(chunks=2):
        step_in_segments(segment, koila.lazy)
    whole = step_in_segments(segment, eager)
    for chunks, share in ((1, 1.02), (2, 0.65), (7, 0.65)):
        with koila.config(chunks=chunks):
            assert step_in_segments(segment, koila.lazy).peak <= share * whole.peak + 2**16
    with koila.config(memory_limit=int(there() + 0.7 * whole.peak)):
        step_in_segments(segment, koila.lazy)


#: In segments, in many of them, and with the head in pieces of each chunk.
WAYS = [
    Strategy(2),
    Strategy(4),
    Strategy(8),
    Strategy(64),
    Strategy(n_pieces=2),
    Strategy(4, n_pieces=2),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.n_segments}, {way.n_pieces}")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("put", PUTS)
def test_no_cut_tears_an_order(
    put: Put, dtype: torch.dtype, way: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts a chunk's rows is not handed on from segment to segment."""
    torch.manual_seed(0)
    model = Model(put=put, dtype=dtype)
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=dtype)
    want = step(model, x, None)
    plan = planner.plan

    def changed(*args: Any, **kwargs: Any) -> plans.Plan:
        return dataclasses.replace(plan(*args, **kwargs), strategy=way)

    monkeypatch.setattr(planner, "plan", changed)
    assert_equal(step(model, x, 3), want, 1e-10 if dtype == torch.float64 else 1e-5)
    assert n_whole() == 0


def in_order(loss: Tensor) -> list[tuple[int, int]]:
    return [(node.id, node.mode) for node in Program([loss]).nodes.values()]


def test_looking_leaves_the_order() -> None:
    """explain() and plan() look at all ways to run a program, and name the least limit for it."""
    torch.manual_seed(0)
    model = Model(dtype=torch.float32)
    x = torch.randn(64, 64, WIDTH)
    want = step(model, x, None)
    with koila.config(memory_limit=2**24 + there()):
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        loss = model(koila.lazy(x)).pow(2).mean()
        before = in_order(loss)
        assert all(mode != ONCE for _, mode in before)
        assert "least limit" in str(koila.explain(loss))
        for way in WAYS:
            Program([loss]).cut_for(way)
        assert in_order(loss) == before
    with koila.config(chunks=4):
        loss.backward()
    assert n_whole() == 0
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert_equal([loss.detach(), *gradients], want, 1e-5)


def test_a_plan_of_what_is_sorted_names_the_least_limit() -> None:
    torch.manual_seed(0)
    model = Model(dtype=torch.float32)
    x = torch.randn(64, 64, WIDTH)
    found = Allocations()
    with found:
        pass
    with found:
        step(model, x, None)
    limit = int(there() + 0.4 * found.peak)
    model.zero_grad(set_to_none=True)
    with koila.config(memory_limit=limit):
        model(koila.lazy(x)).pow(2).mean().backward()
    report = koila.report()
    assert report is not None and "least limit that works" in str(report)
    with koila.config(memory_limit=there() + 2**12):
        loss = model(koila.lazy(x)).pow(2).mean()
        with pytest.raises(koila.MemoryLimitError, match="set memory_limit=") as caught:
            loss.backward()
    del loss
    *_, least = re.findall(r"'([\d.]+MiB)'", str(caught.value))
    del caught
    with koila.config(memory_limit=least):
        model(koila.lazy(x)).pow(2).mean().backward()
    assert n_whole() == 0
