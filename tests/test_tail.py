# SPDX-License-Identifier: Apache-2.0
"""A tail that is called linear and is not would give wrong gradients: that is told at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

import koila
from chunked import split
from koila.reductions.losses import CrossEntropy
from koila.running import tail, watched
from koila.staged import cache
from koila.staged.program import Program
from koila.staged.schedule import Graph, Op, Schedule, Step
from oracle import assert_same, eager
from programs import BARRIER

N_ROWS = 7

LABELS = torch.arange(N_ROWS) % 3
WEIGHTS = torch.tensor([1.0, 0.5, 2.0])
SCALE = torch.tensor(3.0, dtype=torch.float64)

RISING = torch.arange(1.0, N_ROWS + 1, dtype=torch.float64)[:, None]


def chosen(h: Tensor) -> Tensor:
    """Return labels that a model gives itself: 2 in the last rows."""
    return ((h.detach() * RISING).mean(1) > 3).long() * 2


def _sum_in_place(h: Tensor) -> Tensor:
    """Add up losses as scripts do."""
    total = h.mean()
    total += h.exp().mean()
    total -= h.detach().shape[0] * 0.5
    total /= 2
    return total


def _sum_from_zero(h: Tensor) -> Tensor:
    total = torch.zeros((), dtype=h.dtype)
    for term in (h, h.exp(), h.sin()):
        total += term.sum(1).mean()
    return total


def _items_written(h: Tensor) -> Tensor:
    terms = torch.stack([h.mean(), h.exp().mean(), h.sin().mean()])
    terms[0] *= 3
    terms[1:] += h.cos().sum()
    return terms.mul_(2).sum()


def _written_to_zeros(h: Tensor) -> Tensor:
    """Write what the tail has made without a gradient: such a tail is not taken for linear."""
    terms = h.sum().new_zeros(2)
    terms[0] = h.mean()
    terms[1] = h.exp().mean()
    return terms.sum()


def _squared_in_place(h: Tensor) -> Tensor:
    total = h.mean()
    total += h.exp().mean()
    return total.pow_(2)


def _multiplied_in_place(h: Tensor) -> Tensor:
    total = h.mean() + 1
    total *= h.exp().mean()
    return total


NOT_LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda h: h.mean().exp(),
    "sqrt": lambda h: h.pow(2).mean().sqrt(),
    "log": lambda h: h.exp().sum().log(),
    "pow": lambda h: h.mean(0).pow(2).sum(),
    "product of sums": lambda h: h.sum() * h.exp().sum(),
    "product of rows": lambda h: (h.flip(0)[0] * h[1]).mean(),
    "sort": lambda h: h.sort(0).values[3].sum(),
    "a matrix": lambda h: torch.linalg.svdvals(h).sum(),
    "detached statistic": lambda h: h.mean() * h.detach().pow(2).mean(),
    "detached scale": lambda h: h.sum() / h.detach().abs().mean(),
    "detached norm": lambda h: h.mean() / h.detach().norm(),
    "detached deviation": lambda h: h.mean() * h.detach().std(),
    "detached maximum": lambda h: h.mean() / (h.detach() * RISING).amax(),
    "detached sum of rows": lambda h: h.sum() * h.detach()[2].sum(),
    "detached count": lambda h: h.sum() / (h.detach() > 0.5).sum(),
    "detached share": lambda h: h.sum() * (h.detach() > 0.5).double().mean(),
    "detached vector": lambda h: (h.mean(0) * h.detach().mean(0)).sum(),
    "its own square": lambda h: h.pow(2).mean() * h.pow(2).mean().detach(),
    "labels of its own": lambda h: cross_entropy(h, chosen(h), ignore_index=0),
    "number of its own labels": lambda h: h.sum() / (chosen(h) != 0).sum(),
    "two barriers": lambda h: (h.mean() + h.flip(0).sum()).sin(),
    "squared in place": _squared_in_place,
    "multiplied in place": _multiplied_in_place,
}
LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean() * 3 + 1,
    "sums": lambda h: h.sum() / 7 - h.mean(0).sum(),
    "rows of all": lambda h: (h.flip(0) * torch.arange(3.0).double()).mean(),
    "rows of all, twice": lambda h: h.flip(0).sum() + h.roll(1, 0)[0].sum() + h[2].sum() + h.mean(),
    "gathered and reduced": lambda h: h.cumsum(0).mean() + h.sum(0)[1],
    "beside numbers": lambda h: h.mean() + h.detach().exp().mean().log(),
    "no gradient": lambda h: h.mean() * 0 + h.round().sum(),
    "infinite": lambda h: h.mean() * torch.inf,
    "mean of losses": lambda h: mse_loss(h, torch.ones(N_ROWS, 3).to(h.dtype)),
    "labels": lambda h: cross_entropy(h, LABELS),
    "labels that count": lambda h: cross_entropy(h, LABELS, ignore_index=1) * 2,
    "labels with weights": lambda h: cross_entropy(h, LABELS, WEIGHTS.to(h.dtype)),
    "a tensor of no dims": lambda h: h.mean() * torch.tensor(2.5).to(h.dtype) / SCALE,
    "a sum in place": _sum_in_place,
    "a sum in place, from zero": _sum_from_zero,
    "items written": _items_written,
}


def gradient_of(lazy: Any, loss: Callable[[Tensor], Tensor]) -> Tensor | None:
    torch.manual_seed(0)
    x = torch.rand(N_ROWS, 4, dtype=torch.float64)
    w = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    try:
        loss(torch.tanh(lazy(x) @ w)).backward()
    except koila.KoilaError:
        assert w.grad is None, "a refused step leaves no gradient"
        raise
    return w.grad


def lie(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """Have tails taken for linear that are not, as by a row that says an op keeps nothing, when it
    keeps its input; returns a list, to which programs are added that are lied about."""
    schedule = Program.schedule
    found: list[Program] = []

    def lies(program: Program, is_graph: bool, *words: Any) -> Schedule:
        made = schedule(program, is_graph, *words)
        steps = made.steps
        is_back = [step.op == Op.LOOP and step.graph != Graph.NONE for step in steps]
        if program.is_tail_linear or not any(is_back):
            return made
        begin = is_back.index(True)
        last = steps[begin].runs
        end = next(i for i in range(begin, len(steps)) if steps[i].op == Op.END)
        while steps[begin].op != Op.SEED:
            begin -= 1
            assert steps[begin].op in (Op.FREE, Op.SEED) and len(last) == 1
        steps[begin : end + 1] = [Step(Op.CHECK, Graph.NOW, last)]
        at = next(i for i, step in enumerate(steps) if step.op == Op.STORE and step.runs == last)
        run = next(step for step in steps[at:] if step.op == Op.RUN)
        end = next(i for i in range(at, len(steps)) if steps[i].op == Op.END)
        fused = Op.LOOP, Op.RUN, Op.TAIL, Op.BACK, Op.TAKE, Op.END, Op.WATCH
        steps[at + 1 : end + 1] = [
            Step(op, Graph.NOW, last, run.values if op in (Op.RUN, Op.TAIL) else ()) for op in fused
        ]
        made.__dict__.pop("executed", None)  # it was computed from the steps before
        found.append(program)
        return made

    monkeypatch.setattr(Program, "schedule", lies)
    return found


@pytest.mark.parametrize("chunks", [2, 3, 7])
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_a_wrong_verdict_is_told(name: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lied = lie(monkeypatch)
    told_so = pytest.raises(koila.KoilaError, match="to be linear")
    with split(chunks), told_so as told:
        gradient_of(koila.lazy, NOT_LINEAR[name])
    assert lied
    assert __file__ in str(told.value), "it names a line"


#: What bodies leave gets gradients of no values there; those of weights come from the values.
RIGHT_ALL_THE_SAME = {"reused", "uncertain"}


@pytest.mark.parametrize("program", BARRIER, ids=lambda program: program.name)
def test_a_wrong_verdict_is_told_of_every_loss(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a program of the suite has such a tail, nothing wrong is given in silence."""
    assert_same(program, 8, chunks=3)
    lied = lie(monkeypatch)
    try:
        assert_same(program, 8, chunks=3)
    except koila.KoilaError as error:
        assert "to be linear" in str(error)
    else:
        assert not lied or program.name in RIGHT_ALL_THE_SAME


@pytest.mark.parametrize("chunks", [2, 3, 7])
@pytest.mark.parametrize("name", LINEAR)
def test_a_right_verdict_stands(name: str, chunks: int) -> None:
    wanted = gradient_of(lambda x: x, LINEAR[name])
    with split(chunks):
        seen = gradient_of(koila.lazy, LINEAR[name])
    torch.testing.assert_close(seen, wanted, rtol=1e-10, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("chunks", [2, 3, 7])
def test_what_a_tail_made_without_a_gradient_and_writes(chunks: int) -> None:
    """The tail's run on stand-ins would not make it."""
    wanted = gradient_of(lambda x: x, _written_to_zeros)
    with split(chunks):
        seen = gradient_of(koila.lazy, _written_to_zeros)
    torch.testing.assert_close(seen, wanted, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", LINEAR)
def test_what_torch_keeps_spares_the_second_look(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_by = []
    watch = watched.Watch

    def keep(kept: Any, tensor: torch.Tensor) -> torch.Tensor:
        kept.is_from_them = True
        return tensor.detach()

    def count(*given: Any) -> watched.Watch:
        seen_by.append(name)
        return watch(*given)

    monkeypatch.setattr(watched, "Watch", count)
    with koila.config(chunks=3):
        gradient_of(koila.lazy, LINEAR[name])
        assert koila.report().n_chunks == 3
        # What is made of the body's values beside the gradient's way could be kept unseen.
        assert bool(seen_by) == (name == "beside numbers")
        seen_by.clear()
        cache._caches.clear()  # what was seen is kept for the next step
        with monkeypatch.context() as patch:
            patch.setattr(tail._Kept, "pack", keep)
            seen = gradient_of(koila.lazy, LINEAR[name])
        assert seen_by, "nothing was seen of what torch keeps"
    wanted = gradient_of(lambda x: x, LINEAR[name])
    torch.testing.assert_close(seen, wanted, rtol=1e-10, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_narrow_types(dtype: torch.dtype) -> None:
    """Of gradients of the same calls no last bit is held against a tail."""
    for loss in LINEAR.values():
        x = torch.rand(N_ROWS, 4).to(dtype)
        w = torch.rand(4, 3).to(dtype).requires_grad_()
        with split(3):
            loss(torch.tanh(koila.lazy(x) @ w)).backward()


@pytest.mark.parametrize("chunks", [2, 7])
def test_counted_before_and_made_after(chunks: int) -> None:
    """A loss that no gradient goes through is made after the last chunk went back; its labels were
    counted long before."""
    y = torch.randint(3, (N_ROWS,))

    def gradient(lazy: Any) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.rand(N_ROWS, 4, dtype=torch.float64)
        w = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
        rows, labels = lazy(x, y)
        h = rows @ w
        loss = h.square().mean() + cross_entropy(h.detach().cumsum(0), labels)
        loss.backward()
        assert w.grad is not None
        return [copy.deepcopy(loss.detach()), w.grad]

    want = gradient(eager)
    with split(chunks):
        got = gradient(koila.lazy)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Gets an entry each time a tail is differentiated."""
    found: list[None] = []
    differentiate = tail._differentiate

    def count(*given: Any) -> Any:
        found.append(None)
        return differentiate(*given)

    monkeypatch.setattr(tail, "_differentiate", count)
    monkeypatch.setattr(cache, "_caches", [])
    return found


def losses(x: Tensor, y: Tensor, w: Tensor, scale: Any, sent: Tensor | None = None) -> None:
    (cross_entropy(torch.tanh(x @ w), y) * scale).backward(sent)


DIFFERENT: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    "constant": lambda x, y, w: losses(x, y, w, 0.25),
    "sign of a zero": lambda x, y, w: losses(x, y, w, -0.0),
    "type of a constant": lambda x, y, w: losses(x, y, w, 1),
    "a tensor": lambda x, y, w: losses(x, y, w, SCALE),
    "gradient": lambda x, y, w: losses(x, y, w, 0.5, SCALE * 2),
    "labels that count": lambda x, y, w: losses(x, y, w, 0.5),
    "no label": lambda x, y, w: losses(x, y, w, 0.5),
    "rows": lambda x, y, w: losses(x[:5], y[:5], w, 0.5),
}
#: Tails whose gradients depend on more.
OPEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "noise": lambda h, y: h.mean() * torch.rand_like(h.mean().detach()),
    "labels": lambda h, y: h.mean() * y.double().mean(),
    "a weight": lambda h, y: h.mean() * torch.rand((), dtype=torch.float64),
    "a list": lambda h, y: h.mean(0).roll([1], [0])[0],
}
N_IGNORED = {"labels that count": 2, "no label": N_ROWS}


@pytest.mark.parametrize("chunks", [2, 3, 7])
@pytest.mark.parametrize("name", DIFFERENT)
def test_gradients_are_kept_while_all_is_the_same(
    name: str, chunks: int, computed: list[None]
) -> None:
    def as_before(x: Tensor, y: Tensor, w: Tensor) -> None:
        losses(x, y, w, 0.5)

    n_computed = []
    for step in (as_before, as_before, DIFFERENT[name], as_before, as_before):
        x = torch.rand(N_ROWS, 4, dtype=torch.float64)
        w = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
        y = torch.randint(3, (N_ROWS,))
        if step is not as_before:
            y[: N_IGNORED.get(name, 0)] = -100
        step(x, y, w)
        wanted, w.grad = w.grad, None
        computed.clear()
        with split(chunks):
            step(*koila.lazy(x, y), w)
        torch.testing.assert_close(w.grad, wanted, rtol=1e-10, atol=1e-14, equal_nan=True)
        n_computed.append(len(computed))
    assert n_computed[1] == 0 and n_computed[4] == 0
    assert n_computed[0] == 1 and n_computed[2] == 1


@pytest.mark.parametrize("chunks", [2, 7])
@pytest.mark.parametrize("name", OPEN)
def test_no_gradient_is_kept_that_depends_on_more(
    name: str, chunks: int, computed: list[None]
) -> None:
    for seed in range(3):
        found = []
        for lazy, block in ((eager, nullcontext()), (koila.lazy, split(chunks))):
            torch.manual_seed(seed)
            x, y = torch.rand(N_ROWS, 4, dtype=torch.float64), torch.randint(3, (N_ROWS,))
            w = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
            with block:
                rows, labels = lazy(x, y)
                OPEN[name](torch.tanh(rows @ w), labels).backward()
            found.append(w.grad)
        torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-14)
    assert len(computed) == 3


SUMMED: dict[str, Callable[[Tensor], Tensor]] = {
    "of all": lambda h: h.sum(),
    "of each row": lambda h: h.sum(1),  # those of whole values are not kept: a hook may write them
}


@pytest.mark.parametrize("name", SUMMED)
def test_kept_gradients_are_no_ones_elses(name: str, computed: list[None]) -> None:
    """A gradient that the caller passes and writes later is not what was kept."""
    w = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for _ in range(2):
        w.grad = None
        with split(3):
            root = SUMMED[name](koila.lazy(torch.ones(N_ROWS, 4, dtype=torch.float64)) @ w)
            sent = torch.ones(root.shape, dtype=torch.float64)
            root.backward(sent)
        found.append(w.grad)
        sent.zero_()
    assert len(computed) == (1 if name == "of all" else 2)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("chunks", [2, 3, 7])
def test_labels_are_counted_at_once(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n_rows = []
    weights = CrossEntropy.weights

    def count(self: CrossEntropy, call: Any, weight: Tensor) -> Tensor:
        n_rows.append(len(call.word("target")))
        return weights(self, call, weight)

    monkeypatch.setattr(CrossEntropy, "weights", count)
    wanted = gradient_of(lambda x: x, LINEAR["labels with weights"])
    n_rows.clear()
    with split(chunks):
        seen = gradient_of(koila.lazy, LINEAR["labels with weights"])
    assert n_rows == [N_ROWS]
    torch.testing.assert_close(seen, wanted, rtol=1e-10, atol=1e-14)


def test_many_labels_are_counted_by_chunks() -> None:
    """Where that takes more than the gradients, chunks of it may lower the peak."""
    y = torch.zeros(2**12, dtype=torch.long)
    w = torch.rand(1, 2, dtype=torch.float64, requires_grad=True)
    x = torch.rand(len(y), 1, dtype=torch.float64)
    with split(4):
        rows, labels = koila.lazy(x, y)
        cross_entropy(rows @ w, labels).backward()
    assert [stage.n_chunks for stage in koila.report().main.stages] == [4, 4, 1]
