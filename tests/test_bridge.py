# SPDX-License-Identifier: Apache-2.0
"""Calls that cannot be recorded: what was recorded before them goes by rows all the same, forward
without a graph and, when autograd comes to it, forward and back."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import koila
from allocations import Allocations
from brute import in_child
from chunked import split
from koila.recording import parts
from limits import there
from oracle import Lazy, assert_same_story

DOUBLE = torch.float64
N_ROWS = 23
each_split = pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Reversed(torch.autograd.Function):
    """What domain-adversarial training has between its features and the domain's classifier."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return -ctx.scale * gradient, None


class Several(torch.autograd.Function):
    """Two results with a gradient, and one without; one of its inputs is a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        chosen = x.argmax(1)
        ctx.mark_non_differentiable(chosen)
        return x @ w, x.sum(0), chosen

    @staticmethod
    def backward(ctx: Any, of_product: Tensor, of_sum: Tensor, _: Any) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return of_product @ w.T + of_sum, x.T @ of_product


class Doubled(torch.autograd.Function):
    """Writes what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Shifted(torch.autograd.Function):
    """Keeps nothing: what it is given may be written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        raise ValueError("not this one")


class Model(nn.Module):
    """Dropout and a BatchNorm before the calls, which must draw and count once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.w = nn.Parameter(torch.randn(8, 8))

    def body(self, x: Tensor) -> Tensor:
        made: Tensor = self.drop(torch.tanh(self.norm(self.a(x))))
        return made


Use = Callable[[Model, Tensor], Tensor]
USES: dict[str, Use] = {}


def use(run: Use) -> Use:
    USES[run.__name__] = run
    return run


@use
def in_the_middle(m: Model, x: Tensor) -> Tensor:
    return m.c(m.drop(m.b(Square.apply(m.body(x)))))


@use
def at_the_end(m: Model, x: Tensor) -> Tensor:
    return Square.apply(m.c(m.body(x)))


@use
def beside_a_residual(m: Model, x: Tensor) -> Tensor:
    """What goes around is read on both sides of the call."""
    h = m.body(x)
    h = h + Square.apply(m.drop(m.b(h)))
    h = h + Square.apply(m.norm(m.b(h)))
    return m.c(h)


@use
def several_results(m: Model, x: Tensor) -> Tensor:
    product, total, chosen = Several.apply(m.body(x), m.w)
    return m.c(product * total) + chosen[:, None] * 0.1


@use
def results_that_nobody_reads(m: Model, x: Tensor) -> Tensor:
    h = m.body(x)
    Square.apply(m.b(h))
    return m.c(h)


@use
def reversed_gradients(m: Model, x: Tensor) -> Tensor:
    h = m.body(x)
    return m.c(h) + m.b(Reversed.apply(h, 0.3))[:, :5]


@use
def a_write_of_what_it_is_given(m: Model, x: Tensor) -> Tensor:
    h = m.body(x) * 1
    made = Doubled.apply(h)
    return m.c(made) + h[:, :5]


@use
def writes_of_what_it_gives(m: Model, x: Tensor) -> Tensor:
    h = Square.apply(m.body(x))
    h.add_(1.0)
    h = torch.relu_(m.b(h))
    h = Square.apply(h)
    h *= m.w[0]
    return m.c(h)


@use
def views_of_one_memory(m: Model, x: Tensor) -> Tensor:
    """What shares memory shares it behind the call too."""
    h = m.b(m.body(x))
    left, right = h[:, :4], h[:, 4:]
    made = Shifted.apply(left)
    right.mul_(2)
    return m.c(torch.cat([made, right + 1], 1) + h)


@use
def overlapping(m: Model, x: Tensor) -> Tensor:
    """Two calls on what was made from the same."""
    h = m.body(x)
    left, right = m.b(h), h @ m.w
    return m.c(Square.apply(left) + Square.apply(right))


@use
def an_exception(m: Model, x: Tensor) -> Tensor:
    h = m.a(x)
    with contextlib.suppress(ValueError):
        Refusing.apply(h)
    return m.c(torch.tanh(h))


@use
def a_plain_tensor_written(m: Model, x: Tensor) -> Tensor:
    buffer = torch.zeros(len(x), 8, dtype=DOUBLE)
    h = m.body(x) + buffer
    buffer[:] = h
    return m.c(buffer * h)


@use
def labels_written_two_calls_later(m: Model, x: Tensor) -> Tensor:
    """What a part reads stays what it was, whichever call behind it writes that."""
    mask = x[:, :1] * 1
    h = Square.apply(m.body(x) * (mask > 0))
    made = Square.apply(m.b(h))
    Doubled.apply(mask)
    return m.c(made) + mask


@use
def a_table_renormed(m: Model, x: Tensor) -> Tensor:
    """torch writes the weight, with a gradient of its own, when it is looked up."""
    ids = x.argmax(1)
    first = F.embedding(ids, m.w, max_norm=1.0)
    return m.c(first * F.embedding((ids + 1) % 8, m.w, max_norm=0.9))


@use
def in_a_checkpoint(m: Model, x: Tensor) -> Tensor:
    h = checkpoint(lambda z: Square.apply(m.drop(torch.tanh(m.a(z)))), x, use_reentrant=False)
    return m.c(h)


@use
def an_op_whose_shape_depends_on_data(m: Model, x: Tensor) -> Tensor:
    h = m.body(x)
    chosen = torch.masked_select(h, h > 0.2)
    values, _ = torch.unique(h.detach().round(), return_inverse=True)
    return m.c(h) + chosen.sum() / len(values)


def model() -> Model:
    return Model().double()


def seen_of(m: nn.Module) -> Any:
    return [p.grad for p in m.parameters()], list(m.buffers())


def batch(lazy: Lazy) -> Any:
    return lazy(torch.randn(N_ROWS, 6, dtype=DOUBLE), torch.randint(5, (N_ROWS,)))


@pytest.mark.rotated("chunks")
@each_split
@pytest.mark.parametrize("name", USES)
def test_equals_eager(name: str, chunks: int) -> None:
    """Two steps: loss, every gradient, the statistics, the generator."""

    def story(lazy: Lazy) -> Any:
        m = model()
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        losses = []
        for _ in range(2):
            x, y = batch(lazy)
            optimizer.zero_grad()
            loss = F.cross_entropy(USES[name](m, x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, seen_of(m)

    assert_same_story(story, chunks)


def told(ask: Callable[[Model, Tensor, Tensor], Any], chunks: int, **why: str) -> None:
    def story(lazy: Lazy) -> Any:
        m = model()
        return ask(m, *batch(lazy)), seen_of(m)

    assert_same_story(story, chunks, **why)


def loss_of(m: Model, x: Tensor, y: Tensor, run: Use = beside_a_residual) -> Tensor:
    return F.cross_entropy(run(m, x), y)


@each_split
def test_gradients_that_are_asked_for(chunks: int) -> None:
    def ask(m: Model, x: Tensor, y: Tensor) -> Any:
        return torch.autograd.grad(loss_of(m, x, y), [m.a.weight, m.c.weight])

    told(ask, chunks)


@each_split
def test_retained_and_twice(chunks: int) -> None:
    """A graph that is kept goes back again; one that is not says so in torch's words."""

    def ask(m: Model, x: Tensor, y: Tensor) -> Any:
        loss = loss_of(m, x, y)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return loss.detach()

    told(ask, chunks, partly="a backward that is refused is torch's")


@each_split
def test_a_number_read_before(chunks: int) -> None:
    def ask(m: Model, x: Tensor, y: Tensor) -> Any:
        loss = loss_of(m, x, y)
        number = loss.item()
        loss.backward()
        return number

    told(ask, chunks)


@each_split
def test_each_hook_once(chunks: int) -> None:
    """A weight that both sides of a call use has one gradient, of which its hooks hear once."""

    def ask(m: Model, x: Tensor, y: Tensor) -> Any:
        heard: list[Tensor] = []
        m.b.weight.register_hook(lambda gradient: heard.append(gradient.clone()))
        loss_of(m, x, y).backward()
        return heard

    told(ask, chunks)


@each_split
def test_full_backward_hooks(chunks: int) -> None:
    def ask(m: Model, x: Tensor, y: Tensor) -> Any:
        heard: list[Any] = []
        for layer in (m.b, m.c):
            layer.register_full_backward_hook(
                lambda _, into, out: heard.append((into[0].clone(), out[0].clone()))
            )
        F.cross_entropy(m.c(m.drop(m.b(m.body(x)))), y).backward()
        return heard

    told(ask, chunks)


@each_split
def test_without_gradients(chunks: int) -> None:
    def ask(m: Model, x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            teacher = beside_a_residual(m, x)
        with torch.inference_mode():
            metric = loss_of(m, x, y).item()
        loss = loss_of(m, x, y) + F.mse_loss(in_the_middle(m, x), teacher)
        loss.backward()
        return loss.detach(), metric

    told(ask, chunks)


@pytest.mark.parametrize("chunks", [1, 3])
def test_under_autocast(chunks: int) -> None:
    def ask(m: Model, x: Tensor, y: Tensor) -> Any:
        m.float()
        with torch.autocast("cpu", torch.bfloat16):
            made = m.c(Square.apply(torch.tanh(m.a(x.float()))))
        assert made.dtype == torch.bfloat16
        loss = F.cross_entropy(made.float(), y)
        loss.backward()
        return loss.item()

    def story(lazy: Lazy) -> Any:
        return ask(model(), *batch(lazy))

    assert_same_story(story, chunks, tolerance=1e-6)


def _scripted(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2 + x.mean(1, keepdim=True)


@each_split
def test_scripted(chunks: int) -> None:
    """TorchScript may compute other last bits from its second run on."""
    script = torch.jit.script(_scripted)

    def story(lazy: Lazy) -> Any:
        m = model()
        x, y = batch(lazy)
        loss = F.cross_entropy(m.c(script(m.body(x))), y)
        loss.backward()
        return loss.detach(), seen_of(m)

    assert_same_story(story, chunks, exact_bits=False)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.rnn = nn.Linear(6, 24), nn.LSTM(6, 8, batch_first=True)
        self.c = nn.Linear(8, 5)


@each_split
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("form", ["list", "tensor", "lazy"])
def test_packed_sequences(form: str, is_sorted: bool, chunks: int) -> None:
    def story(lazy: Lazy) -> Any:
        m = Recurrent().double()
        x, y = batch(lazy)
        lengths = torch.arange(N_ROWS).remainder(4).add(1)
        lengths = lengths.sort(descending=True).values if is_sorted else lengths
        given: Any = lengths.tolist() if form == "list" else lengths
        given = lazy(lengths) if form == "lazy" else given
        h = torch.tanh(m.a(x)).view(-1, 4, 6)
        packed = pack_padded_sequence(h, given, batch_first=True, enforce_sorted=is_sorted)
        out, _ = pad_packed_sequence(m.rnn(packed)[0], batch_first=True)
        loss = F.cross_entropy(m.c(out.mean(1)), y)
        loss.backward()
        return loss.detach(), seen_of(m)

    assert_same_story(story, chunks)


class Sparing(nn.Module):
    """If it spares one, one of its layers is used in every other step."""

    def __init__(self, m: Model, is_sparing: bool) -> None:
        super().__init__()
        self.m, self.rare, self.is_sparing, self.n = m, nn.Linear(5, 5).double(), is_sparing, 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        made = beside_a_residual(self.m, x) + self.m.w.sum()
        return made if self.is_sparing and self.n % 2 else self.rare(made)


def tell_distributed(words: dict[str, bool], chunks: int) -> None:
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    kept: list[Any] = []

    def story(lazy: Lazy) -> Any:
        m = Sparing(model(), "find_unused_parameters" in words)
        wrapped = nn.parallel.DistributedDataParallel(m, **words)
        kept.append(wrapped)
        seen = []
        for _ in range(3):
            x, y = batch(lazy)
            wrapped.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            seen.append([p.grad for p in m.parameters()])
        return seen, list(m.buffers())

    assert_same_story(story, chunks)
    os._exit(0)  # threads of a group may wait for the interpreter for ever when it is taken down


@pytest.mark.parametrize("chunks", [1, 2, 7])
@pytest.mark.parametrize("words", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_distributed(words: dict[str, bool], chunks: int) -> None:
    """Each gradient is reduced once, and what no gradient comes to is known beforehand."""
    with pytest.raises(EOFError):  # it leaves without an answer where all is well
        in_child(lambda: tell_distributed(words, chunks))


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_write_through_data_is_noticed(is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves no version behind: what a part read, and reads again, is another number. Where a
    copy was kept, it is what autograd needs, and has new in eager."""
    monkeypatch.setattr(koila.recording.bridge, "_SMALL", 2**18 if is_kept else 0)
    m, (x, y) = model(), batch(koila.lazy)
    table = torch.randn(8, 8, dtype=DOUBLE)
    with koila.config(chunks=3):
        loss = F.cross_entropy(m.c(Square.apply(m.a(x) @ table)), y)
        torch.ops.aten.mul_(table.data, 2)
        with pytest.raises(koila.StaleError, match=r"matmul.* keeps" if is_kept else "matmul: a"):
            loss.backward()


# Memory -------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.narrow(torch.tanh(F.gelu(self.wide(x)).pow(2) + 1))
        return made


def blocks(width: int = 32) -> nn.ModuleList:
    return nn.ModuleList(Block(width) for _ in range(6))


def cut_step(m: nn.ModuleList, x: Tensor) -> Tensor:
    """Narrow where the calls are, and wide between."""
    h = x
    for i, block in enumerate(m):
        h = Square.apply(block(h)) * 0.1 if i in (2, 4) else block(h)
    loss: Tensor = h.pow(2).mean()
    loss.backward()
    return loss


def wide_step(m: nn.ModuleList, x: Tensor) -> Tensor:
    """What the user holds where the call is made is most of all."""
    wide = torch.tanh(F.gelu(m[0].wide(x)))
    held = [wide * i for i in range(6)]
    made = Square.apply(wide)
    del wide, held
    loss: Tensor = m[0].narrow(made).pow(2).mean()
    loss.backward()
    return loss


def peak(lazy: Lazy, n_rows: int = 1000, step: Any = cut_step, **settings: int) -> tuple[int, Any]:
    torch.manual_seed(0)
    m, x = blocks(), torch.randn(n_rows, 32)
    for _ in range(2):
        m.zero_grad(set_to_none=True)
        gc.collect()
        memory = Allocations()
        limit = settings.get("limit")
        bound = {"memory_limit": there() + limit} if limit else settings
        with koila.config(**bound):
            with memory:
                pass
            with memory:
                loss = step(m, lazy(x))
    found = [p.grad for p in m.parameters() if p.grad is not None]
    return memory.peak, (loss.detach(), found)


def assert_close(got: Any, want: Any) -> None:
    torch.testing.assert_close(float(got[0]), float(want[0]))
    for one, other in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_peak_in_chunks() -> None:
    """What is put together is narrow, and of the rest a chunk is there at a time: kept with its
    graph as far as the first call, it would be half of eager's."""
    at_most, want = peak(lambda x: x)
    took, got = peak(koila.lazy, chunks=8)
    assert took < 0.35 * at_most
    assert_close(got, want)
    assert [program.n_chunks for program in koila.report().programs] == [8] * 5


def test_what_was_handed_out_is_not_made_again() -> None:
    """Going back, a part makes a chunk of it, however long the user held it."""
    at_most, want = peak(lambda x: x, step=wide_step)
    took, got = peak(koila.lazy, step=wide_step, chunks=8)
    assert took < at_most
    assert_close(got, want)


@pytest.mark.parametrize("share", [0.5, 0.3])
def test_peak_under_a_limit(share: float) -> None:
    at_most, want = peak(lambda x: x)
    took, got = peak(koila.lazy, limit=int(share * at_most))
    assert took <= share * at_most
    assert_close(got, want)
    assert max(ran.n_chunks for ran in koila.report().programs) > (share < 0.5)


def test_each_part_runs_once_more() -> None:
    """Forward without a graph, and once with it: no part runs again for what comes after it."""
    calls = []
    m = blocks()
    with split(5):
        x = koila.lazy(torch.randn(20, 32))
        replay: Any = koila.running.replay.Replay
        original = replay.run_nodes

        def counted(
            self: Any, run: Any, chunk: int, is_graph: bool, *args: Any, **words: Any
        ) -> Any:
            calls.append((len(run.nodes), is_graph) if run.is_body else (0, is_graph))
            return original(self, run, chunk, is_graph, *args, **words)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replay, "run_nodes", counted)
            cut_step(m, x)
    n_calls = sum(n for n, _ in calls)
    n_once = sum(n for n, is_graph in calls if is_graph)
    assert n_calls <= 2 * n_once


def test_nothing_is_left() -> None:
    """What was cut off goes with what was handed out."""
    m, x = model(), torch.randn(N_ROWS, 6, dtype=DOUBLE)
    with koila.config(chunks=3):
        h = m.a(koila.lazy(x))
        made = Square.apply(torch.tanh(h))
        assert koila.is_lazy(made)
        real = weakref.ref(koila._core.real(made))
        part = weakref.ref(koila._core.real(h).grad_fn.root)
        assert real() is not None and part() is not None
        del h, made
        gc.collect()
        assert real() is None and part() is None


@pytest.mark.parametrize("is_written", [False, True])
@each_split
def test_views_of_the_batch_that_are_held(chunks: int, is_written: bool) -> None:
    """`x = x.view(...)` is held by every frame that begins so: a view of the batch, as in eager."""

    def story(lazy: Lazy) -> Any:
        model, raw = Model().double(), torch.randn(N_ROWS, 3, 2, dtype=DOUBLE)
        x = lazy(raw)
        held = x.view(-1, 6)
        part = held[:, :2]
        made = Square.apply(model.body(held))
        (model.c(made).pow(2).mean() + (made * part.sum(1, keepdim=True)).mean()).backward()
        if is_written:
            held.mul_(2)
        grads = [parameter.grad for parameter in model.parameters()]
        return grads, raw, torch.tensor(part.tolist()), torch.tensor(x.tolist())

    assert_same_story(story, chunks)


class Quantizer(nn.Module):
    """A VQ-VAE, whose codebook is moved by averages of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.code = nn.Conv2d(3, 32, 4, 2, 1), nn.Conv2d(32, 4, 1)
        self.up = nn.ConvTranspose2d(4, 3, 4, 2, 1)
        self.register_buffer("codes", torch.randn(4, 8))
        self.register_buffer("sums", torch.zeros(4, 8))
        self.register_buffer("counts", torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.view(-1, 3, 16, 16)
        code = self.code(self.down(x).relu()).permute(0, 2, 3, 1)
        flat = code.reshape(-1, 4)
        nearest = torch.cdist(flat, self.codes.t()).argmin(1)
        chosen = F.one_hot(nearest, 8).type(flat.dtype)
        found = F.embedding(nearest, self.codes.t()).view(code.shape)
        self.counts.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.sums.data.mul_(0.9).add_(flat.t() @ chosen, alpha=0.1)
        self.codes.data.copy_(self.sums / self.counts.clamp(min=0.1))
        loss = (found.detach() - code).pow(2).mean()
        return self.up((code + (found - code).detach()).permute(0, 3, 1, 2)), loss


def test_a_codebook_that_is_moved() -> None:
    """The call that moves it needs a graph of what waits; no more than eager's bytes are taken."""

    def step(lazy: Lazy) -> tuple[int, list[Tensor]]:
        torch.manual_seed(0)
        model, x, memory = Quantizer().double(), torch.randn(97, 768, dtype=DOUBLE), Allocations()
        memory.count(x, list(model.parameters()), list(model.buffers()))
        with memory:
            batch = lazy(x)
        with memory:
            out, loss = model(batch)
            (F.mse_loss(out.flatten(1), batch) + loss).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return memory.peak, [*grads, *model.buffers()]

    want = step(lambda x: x)
    for chunks in (2, 7):
        with koila.config(chunks=chunks):
            got = step(koila.lazy)
        assert koila.report().n_chunks == chunks
        torch.testing.assert_close(got[1], want[1], rtol=1e-10, atol=1e-12)
        assert got[0] <= want[0]


def random_rows() -> Tensor:
    return torch.randn(N_ROWS, 3, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)


@each_split
def test_what_was_used_up_beside_what_is_differentiated(chunks: int) -> None:
    """A value whose backward ran is read again, and that is differentiated by nobody: neither by
    itself, nor with what leads to the loss."""

    def story(lazy: Lazy) -> Any:
        w, x = torch.ones(3, 2, dtype=DOUBLE, requires_grad=True), lazy(random_rows())
        used = x @ w
        used.pow(2).mean().backward(retain_graph=False)
        held = [used.softmax(-1)]
        h = (x * 1.5) @ w
        held.append(h * used)
        loss = Square.apply(h).mean()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            held[1].sum().backward()
        return [w.grad, loss, held]

    assert_same_story(story, chunks)


@each_split
def test_a_part_that_was_used_up_behind_another(chunks: int) -> None:
    """The engine comes to its node from the node of a later part, with no gradient: it is no second
    time, and it is not used up by that."""

    def story(lazy: Lazy) -> Any:
        v = torch.full((3, 3), 0.5, dtype=DOUBLE, requires_grad=True)
        w = torch.ones(3, 2, dtype=DOUBLE, requires_grad=True)
        x = lazy(random_rows())
        used, kept = x @ v, (x - 1) @ v
        seen = Square.apply(used.detach()).sum() + Square.apply(kept).sum().detach()
        used.sum().backward()
        h = (x * 1.5) @ w
        held = [(h.sum(1, keepdim=True) * used).tanh(), (h.sum(1, keepdim=True) * kept).tanh()]
        Square.apply(h).mean().backward()
        with pytest.raises(RuntimeError, match="second time"):
            held[0].sum().backward()
        kept.sum().backward()
        return [v.grad, w.grad, held, seen]

    assert_same_story(story, chunks)


@each_split
def test_a_hook_of_several_tensors_of_a_part(chunks: int) -> None:
    """What was made of one of them was handed out with it: that is refused."""
    w, x = torch.ones(3, 2, dtype=DOUBLE, requires_grad=True), koila.lazy(random_rows())
    with koila.config(chunks=chunks):
        h = x @ w
        made = h * 2
        held = Square.apply(made)
        if chunks > 1:
            with pytest.raises(koila.KoilaError, match="only a part of its gradient"):
                torch.autograd.graph.register_multi_grad_hook([h], print)
        held.sum().backward()
    assert w.grad is not None


@each_split
@pytest.mark.parametrize("is_held", [True, False])
def test_the_gradient_of_a_value_that_went_back(chunks: int, is_held: bool) -> None:
    """What was made of it was handed out with it, and does not lead to it: asking is refused, not
    answered by None. Once that is gone the gradient is whole."""
    w, x = torch.ones(3, 2, dtype=DOUBLE, requires_grad=True), koila.lazy(random_rows())
    with koila.config(chunks=chunks):
        h = (x @ w).exp()
        made = (h * 2).sin()
        seen = Square.apply(made).sum().detach()
        (h * 3).sum().backward()
        loss = made.sum() if is_held else h.pow(2).sum()
        del made
        if is_held and chunks > 1:
            with pytest.raises(koila.KoilaError, match="only a part of its gradient"):
                torch.autograd.grad(loss, h, allow_unused=True)
        else:
            (found,) = torch.autograd.grad(loss, h, allow_unused=True)
            assert torch.equal(found, 2 * (h * 2).cos() if is_held else 2 * h)
    assert not seen.requires_grad


@each_split
def test_the_gradient_of_a_view_of_what_was_handed_out(chunks: int) -> None:
    """`view.detach()` is held too, so the memory of both was handed out, and the view was taken
    again: of its gradient a share comes through what was made of it before, as of any value."""
    asked: dict[str, Callable[[Tensor], Any]] = {
        "retain_grad": lambda h: h.retain_grad(),
        "register_hook": lambda h: h.register_hook(seen.append),
        "register_multi_grad_hook": lambda h: torch.autograd.graph.register_multi_grad_hook(
            [h], seen.extend
        ),
        "grad": lambda h: seen.extend(torch.autograd.grad(loss, h, retain_graph=True)),
        "backward": lambda h: loss.backward(inputs=[h]),
    }
    w, x = torch.ones(3, 2, dtype=DOUBLE, requires_grad=True), random_rows()
    for name, ask in asked.items():
        seen: list[Tensor] = []
        with koila.config(chunks=chunks):
            h = (koila.lazy(x) @ w)[:, :1]
            held, loss = h.detach(), (h * 3).sin().sum()
            loss = loss + Square.apply(h).sum()
            if chunks > 1:
                with pytest.raises(koila.KoilaError, match=f"^{name} .*part of its gradient"):
                    ask(h)
                continue
            ask(h)
            if name != "backward":
                loss.backward()
        found = seen[0] if seen else h.grad
        assert torch.allclose(found, 3 * (held * 3).cos() + 2 * held, rtol=1e-10, atol=0)


@each_split
def test_the_gradient_of_a_view_whose_view_is_held(chunks: int) -> None:
    """A view of a view leads to it, also where both are of memory that was handed out."""

    def story(lazy: Lazy) -> Any:
        w = torch.ones(3, 2, dtype=DOUBLE, requires_grad=True)
        x = lazy(random_rows())
        h = (x @ w).view(-1)
        v = h.view(-1, 2)
        part = v[:, 1:]
        seen = Square.apply(x.detach()).sum()
        loss = (part * 3).sum() + v.pow(2).sum() + seen
        kept = torch.autograd.grad(loss, [v, part], retain_graph=True)
        loss.backward()
        return kept, torch.autograd.grad(part.sum(), v, allow_unused=True), w.grad

    assert_same_story(story, chunks)


class Watching(TorchDispatchMode):
    """A backward inside it runs whole."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@each_split
def test_a_part_that_ran_whole_copies_nothing(chunks: int) -> None:
    """Its tape is gone, and autograd keeps what its graph reads: what is written later is a leaf of
    another program, which had been copied and looked for on the tape that was gone."""

    def story(lazy: Lazy) -> Any:
        torch.manual_seed(1)
        model, added = nn.Linear(3, 3).double(), torch.ones(3, dtype=DOUBLE)
        x, others = lazy(random_rows()), set(parts._state.cuts)  # that other tests left
        seen = Square.apply(model(x).sin())
        with Watching():
            seen.sum().backward(retain_graph=True)
        pending = (model(x) + added).tanh()
        for cut in set(parts._state.cuts) - others:
            assert cut.roots or chunks == 1
            assert cut.copy_what_it_reads([added]) == {}
        (pending.sum() + seen.pow(2).sum()).backward()
        return [model.weight.grad, model.bias.grad]

    assert_same_story(story, chunks, partly="a mode sees each call of the first backward")


@each_split
def test_hooks_of_what_is_not_differentiated(chunks: int) -> None:
    """They are not called, in eager: those of a module on what has no call in common with the loss,
    and those of a tensor."""

    def story(lazy: Lazy) -> Any:
        torch.manual_seed(1)
        w = torch.ones(3, 2, dtype=DOUBLE, requires_grad=True)
        model, x = nn.Linear(3, 3).double(), lazy(random_rows())
        found = []

        def double(given: Any) -> Any:
            found.append(given[0].sum().item() if isinstance(given, tuple) else given.sum().item())
            return (given[0] * 2,) if isinstance(given, tuple) else given * 2

        model.register_full_backward_pre_hook(lambda module, given: double(given))
        x = x + torch.zeros(3, dtype=DOUBLE, requires_grad=True)
        one, other = model(x).tanh(), model(x * 0.5).tanh()
        hooked = (x + 1) @ w
        held = [Square.apply(hooked), Square.apply(one)]
        hooked.register_hook(double)
        loss = Square.apply(other).mean()
        loss.backward()
        assert len(found) == 1
        return [found, model.weight.grad, model.bias.grad, w.grad, held]

    assert_same_story(story, chunks)


@each_split
@pytest.mark.parametrize("is_trained", [True, False], ids=["training", "frozen"])
def test_a_norm_behind_a_cut_moves_its_statistics(chunks: int, is_trained: bool) -> None:
    """torch does not count writes of running statistics, and a normalization in training needs none
    for its backward; one that was given them does, and torch's own backward takes the new ones."""

    def story(lazy: Lazy) -> Any:
        torch.manual_seed(1)
        norm, layer = nn.BatchNorm1d(2).double(), nn.Linear(3, 2).double()
        x = lazy(random_rows())
        h = layer(x)
        norm.train(is_trained)
        loss = norm(h).pow(3).mean()
        norm.train()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0.5, lambda t: t):
            held = norm(h * 2)
        loss.backward()
        return [loss, held, dict(norm.named_buffers()), layer.weight.grad, norm.weight.grad]

    if not is_trained and chunks > 1:
        with koila.config(chunks=chunks), pytest.raises(koila.StaleError, match="written through"):
            story(koila.lazy)
        return
    assert_same_story(story, chunks, partly="backward is of a loss that was handed out")


@each_split
def test_values_lead_only_to_what_they_were_made_of(chunks: int) -> None:
    """Of two values that share calls: the engine does not come to the leaves of one for the other's
    sake. No hook is called there, no graph that was used up is gone through, and what was used up
    for one goes on for weights of the other's own."""

    def story(lazy: Lazy) -> Any:
        torch.manual_seed(1)
        first, second = (nn.Linear(3, 3).double() for _ in range(2))
        used = torch.ones(3, dtype=DOUBLE, requires_grad=True).exp() * 1.0
        used.sum().backward()
        h = first(lazy(random_rows())).tanh()
        out = second(h) * used
        held = Square.apply(out)
        found: list[Any] = []
        second.weight.register_hook(lambda gradient: found.append(gradient.sum().item()))
        h.sum().backward()
        asked = torch.autograd.grad(out.sum(), [second.bias], retain_graph=True)
        unused = torch.autograd.grad(h.mean(), [second.bias], allow_unused=True)
        assert not found and second.weight.grad is None
        seen = [first.weight.grad, asked, unused[0] is None, held]
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()
        return seen

    assert_same_story(story, chunks)
