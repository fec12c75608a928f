# SPDX-License-Identifier: Apache-2.0
"""What is written between forward and backward, and was read before a call that cuts the program:
codebooks and queues, moving averages kept by hand. It stays what it was for what reads it again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from koila.recording import bridge, cut
from oracle import eager, plain
from test_bridge import Square

D = torch.float64
N_ROWS = 11
each_count = pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
Block = Callable[[Tensor], Tensor]
Run = Callable[..., Any]


def square(x: Tensor) -> Tensor:
    found: Tensor = Square.apply(x)  # type: ignore[no-untyped-call]
    return found


#: The call in the middle: one that cuts the program, and one that does not.
BLOCKS: dict[str, Block] = {"cut": square, "recorded": lambda x: x * 1}
RUNS: dict[str, Run] = {}


def add(run: Run) -> Run:
    RUNS[run.__name__] = run
    return run


def story(run: Run, lazy: Any, block: Block) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=D)

    x, w = floats(N_ROWS, 3), floats(3, 4).requires_grad_()
    buffers = {"book": floats(5, 4), "mean": torch.zeros(4, dtype=D), "queue": floats(4, 22)}
    seen = run(lazy(x) @ w, block, **buffers)
    loss, *others = seen if isinstance(seen, tuple) else (seen,)
    loss.backward()
    assert w.grad is not None
    return [*map(plain, (loss, w.grad, *others)), *buffers.values()]


def check(run: Run, block: Block, chunks: int) -> None:
    want = story(run, eager, block)
    with koila.config(chunks=chunks):
        got = story(run, koila.lazy, block)
    for value, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12)


def quantised(h: Tensor, book: Tensor) -> tuple[Tensor, Tensor]:
    index = torch.cdist(h.detach(), book).argmin(1)
    return h + (book[index] - h).detach(), F.one_hot(index, len(book)).to(D)


@add
def codebook_by_moving_means(h: Tensor, block: Block, book: Tensor, **_: Tensor) -> Any:
    """As in a VQ-VAE: the sums are written with lazies, the codebook then with plain tensors."""
    sums = torch.zeros(5, 4, dtype=D)
    z, one_hot = quantised(h, book)
    z = block(z)
    with torch.no_grad():
        sums.mul_(0.9).add_(one_hot.T @ h.detach(), alpha=0.1)
        book.data.copy_(sums / (one_hot.sum(0)[:, None] + 1))
    return z.pow(2).mean(), sums


@add
def codebook_written_twice(h: Tensor, block: Block, book: Tensor, **_: Tensor) -> Any:
    z, one_hot = quantised(h, book)
    z = block(z)
    book.lerp_(one_hot.T @ h.detach(), 0.1)
    z, one_hot = quantised(block(z), book)
    book.data[one_hot.sum(0) == 0] = 0.5
    book.data.add_(z.detach().mean(0))
    return (z * h).mean()


@add
def queue_of_keys(h: Tensor, block: Block, queue: Tensor, **_: Tensor) -> Any:
    """As in MoCo: read, and then filled with this batch's keys."""
    keys = F.normalize(h.detach(), dim=1)
    z = block(h) * (h.detach() @ queue).softmax(1)[:, :4]
    queue[:, :N_ROWS] = keys.T
    queue.data[:, N_ROWS:].add_(keys.T)
    return z.pow(2).mean()


@add
def running_mean_by_hand(h: Tensor, block: Block, mean: Tensor, **_: Tensor) -> Any:
    z = block(h - mean)
    mean.lerp_(h.detach().mean(0), 0.1).mul_(0.9)
    return z.pow(2).mean() + (h - mean).sin().mean()


@add
def running_mean_in_plain(h: Tensor, block: Block, mean: Tensor, **_: Tensor) -> Any:
    """What koila does not see."""
    now = h.detach().mean(0)
    z = block(h - mean)
    new = torch.tensor(now.tolist(), dtype=D)
    if block is square:
        torch.ops.aten.lerp_(mean, new, 0.1)
    return z.pow(2).mean()


@add
def several_at_once(h: Tensor, block: Block, mean: Tensor, book: Tensor, **_: Tensor) -> Any:
    z = block(h + mean - book[0])
    torch._foreach_add_([mean, book[0]], [h.detach().mean(0), h.detach().sum(0)])
    return (z * mean).mean()


@add
def into_out(h: Tensor, block: Block, mean: Tensor, **_: Tensor) -> Any:
    z = block(h + mean)
    torch.mean(h.detach(), 0, out=mean)
    return (z * mean).mean()


@add
def memory_by_index(h: Tensor, block: Block, queue: Tensor, **_: Tensor) -> Any:
    memory, index = queue.view(22, 4), torch.arange(N_ROWS)
    z = block(h) + memory[:N_ROWS] * memory.sum()
    memory[index] = h.detach() * 0.5 + memory[index] * 0.5
    memory.index_copy_(0, index + 5, h.detach())
    return (z * h).mean()


@add
def what_was_handed_out(h: Tensor, block: Block, **_: Tensor) -> Any:
    d, e = h.detach() * 1, h.detach() * 2
    z = block(h * e) + d
    d.mul_(2)
    z = block(z) + d * e
    return (z * d * e).mean(), d, e


@pytest.mark.rotated("chunks")
@each_count
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", RUNS)
def test_equals_eager(name: str, block: str, chunks: int) -> None:
    check(RUNS[name], BLOCKS[block], chunks)


@each_count
@pytest.mark.parametrize("is_shown", [False, True])
def test_the_batch_itself_is_written(chunks: int, is_shown: bool) -> None:
    def run(lazy: Any) -> list[Tensor]:
        mine = torch.arange(33, dtype=D).view(N_ROWS, 3) / 10
        w = torch.ones(3, dtype=D, requires_grad=True)
        x = lazy(mine)
        h = square(x * 1 + w) * (x + 2)
        (x if is_shown else x.detach()).add_(h.detach() / 100)
        loss = (h * x.detach()).mean()
        loss.backward()
        assert w.grad is not None
        return [plain(loss), w.grad, plain(x), mine]

    with koila.config(chunks=chunks):
        got = run(koila.lazy)
    for value, wanted in zip(got, run(eager), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12)


def needed(h: Tensor, block: Block, book: Tensor, **_: Tensor) -> Any:
    z = block(h @ book.T)
    with torch.no_grad():
        book.add_(h.detach().sum(0))
    return z.pow(2).mean()


def needed_by_data(h: Tensor, block: Block, book: Tensor, **_: Tensor) -> Any:
    z = block(h @ book.T)
    book.data.add_(h.detach().sum(0))
    return z.pow(2).mean()


def needed_in_plain(h: Tensor, block: Block, book: Tensor, **_: Tensor) -> Any:
    z = block(h @ book.T)
    book.mul_(2)
    return z.pow(2).mean()


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("run", [needed, needed_by_data, needed_in_plain])
def test_what_autograd_needs_is_refused(run: Run, chunks: int) -> None:
    """Eager raises, but for .data, where its gradients are those of the new numbers."""
    kind = koila.StaleError if run is needed_by_data else RuntimeError
    with koila.config(chunks=chunks), pytest.raises(kind, match=r"matmul .* keeps"):
        story(run, koila.lazy, square)


@pytest.mark.parametrize("is_small", [False, True])
def test_of_what_is_not_seen_small_buffers_are_kept(
    monkeypatch: pytest.MonkeyPatch, is_small: bool
) -> None:
    monkeypatch.setattr(bridge, "_SMALL", bridge._SMALL if is_small else 0)
    monkeypatch.setattr(bridge, "_SHARE", 10**6)
    if is_small:
        check(running_mean_in_plain, square, 3)
        return
    with koila.config(chunks=3), pytest.raises(koila.StaleError, match="sub: a tensor"):
        story(running_mean_in_plain, koila.lazy, square)


@pytest.mark.parametrize("chunks", [1, 3])
def test_what_is_not_seen_is_an_error_without_a_cut(chunks: int) -> None:
    def run(h: Tensor, block: Block, mean: Tensor, **_: Tensor) -> Any:
        z = block(h - mean)
        torch.ops.aten.mul_(mean, 0.9)
        return z.pow(2).mean()

    with koila.config(chunks=chunks), pytest.raises(koila.StaleError, match="sub: a tensor"):
        story(run, koila.lazy, BLOCKS["recorded"])


def test_copies_go_with_the_part() -> None:
    import gc
    import weakref

    kept: list[Any] = []
    before = cut.Cut.copy_what_it_reads

    def copy(part: Any, *words: Any) -> Any:
        copies = before(part, *words)
        kept.extend(weakref.ref(one.numbers) for one in copies.values())
        return copies

    with pytest.MonkeyPatch.context() as patch, koila.config(chunks=3):
        patch.setattr(cut.Cut, "copy_what_it_reads", copy)
        for run in itertools.islice(RUNS.values(), 3):
            story(run, koila.lazy, square)
    gc.collect()
    assert kept and all(ref() is None for ref in kept)


# Gradients of what was handed out -----------------------------------------------------------------


def late(lazy: Any, ask: Callable[[Tensor, Tensor], Any], is_inner: bool) -> list[Tensor]:
    """Something asks about the gradient of `h`, of which `k` was made before the cut."""
    x, w = torch.arange(33, dtype=D).view(N_ROWS, 3) / 10, torch.ones(3, 4, dtype=D) / 7
    w.requires_grad_()
    h = lazy(x) @ w
    k = h.tanh() if is_inner else (lazy(x) @ w).tanh()
    seen: list[Tensor] = []
    loss = square(h).mean() * 2
    found = ask(h, loss + (h * k).sum())
    seen.extend(found if isinstance(found, tuple) else ())
    (loss + (h * k).sum()).backward()
    assert w.grad is not None
    return [plain(loss), w.grad, *map(plain, seen)]


def hooked(h: Tensor, _: Tensor) -> Any:
    h.register_hook(lambda gradient: gradient * 2)


def retained(h: Tensor, _: Tensor) -> Any:
    h.retain_grad()


def asked(h: Tensor, loss: Tensor) -> Any:
    return torch.autograd.grad(loss, h, retain_graph=True)


@each_count
@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("ask", [hooked, retained, asked])
def test_a_gradient_is_whole_or_refused(ask: Any, is_inner: bool, chunks: int) -> None:
    want = late(eager, ask, is_inner)
    with koila.config(chunks=chunks):
        if is_inner and ask is retained and chunks > 1:
            with pytest.raises(koila.KoilaError, match="only a part of its gradient"):
                late(koila.lazy, ask, is_inner)
            return
        got = late(koila.lazy, ask, is_inner)
    for value, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12)


class FilledBehindAutogradsBack(torch.autograd.Function):
    """As torchdiffeq fills the slopes of a step: one memory, of which earlier ones were read."""

    @staticmethod
    def forward(ctx: Any, scratch: Tensor, slope: Tensor, index: int) -> Tensor:
        ctx.index = index
        scratch.data[..., index] = slope
        return scratch

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], gradients[0][..., ctx.index], None


@each_count
def test_scratch_memory_that_a_custom_function_fills(chunks: int) -> None:
    def tell(lazy: Any) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        w = torch.randn(4, 4, generator=generator, dtype=D).requires_grad_()
        y = lazy(torch.randn(N_ROWS, 4, generator=generator, dtype=D))
        for _ in range(2):
            slopes = torch.empty(*y.shape, 3, dtype=D)
            slope = (y @ w).tanh()
            for i in range(3):
                slopes = FilledBehindAutogradsBack.apply(slopes, slope, i)
                slope = ((y + 0.1 * slopes[..., : i + 1].sum(-1)) @ w).tanh()
            y = y + 0.1 * slope
        loss = y.pow(2).mean()
        loss.backward()
        assert w.grad is not None
        return [*map(plain, (loss, w.grad, y, slopes))]

    want = tell(eager)
    with koila.config(chunks=chunks):
        got = tell(koila.lazy)
    for value, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-13)


#: Writes of what was handed out, through `.data`: eager's `tanh` has kept what they change.
BEHIND: dict[str, Callable[[Tensor], object]] = {
    "the value": lambda h: h.data.mul_(0.5),
    "a part of it": lambda h: h.data[:, 0].mul_(0.5),
    "a view of it": lambda h: h[:, 1:].data.add_(1),
}


@pytest.mark.parametrize("chunks", [2, 3, N_ROWS])
@pytest.mark.parametrize("write", BEHIND)
def test_what_was_handed_out_is_written_through_data(write: str, chunks: int) -> None:
    def run(h: Tensor, block: Block, **_: Tensor) -> Tensor:
        h = h.tanh()
        c = block(h)
        BEHIND[write](h)
        return c.sum() + h.pow(2).sum()

    with pytest.raises(koila.StaleError, match=r"tanh .* keeps .* written through \.data"):
        check(run, square, chunks)


@each_count
def test_what_no_call_keeps_may_be_written_through_data(chunks: int) -> None:
    def run(h: Tensor, block: Block, **_: Tensor) -> tuple[Tensor, ...]:
        k = h.tanh()
        c = block(h) + block(k)
        h.data.mul_(0.5)
        return c.sum() + h.pow(2).sum(), k.data.mean()

    check(run, square, chunks)


@each_count
def test_a_hook_of_what_no_gradient_comes_to_is_not_called(chunks: int) -> None:
    """All that was handed out is on one node, which torch calls the hooks of."""
    seen = []

    def see(gradient: Tensor) -> Tensor:
        seen.append(gradient.sum().item())
        return gradient * 2

    def run(h: Tensor, block: Block, **_: Tensor) -> tuple[Tensor, Tensor]:
        k, c = h * 2, block(h)
        k.register_hook(see)
        h.register_hook(see)
        return c.sum(), k

    check(run, square, chunks)
    assert len(seen) == 2  # eager's and koila's, of `h`
    assert seen[0] == pytest.approx(seen[1], rel=1e-10)


def test_what_shares_memory_with_what_data_writes() -> None:
    """A call before the cut kept a detached view of what was handed out, which .data writes after
    it: eager's gradient is of the new numbers. That is refused, and was another gradient."""
    layer, w = torch.nn.Linear(3, 3).double(), torch.ones(3, 3, dtype=torch.float64)
    h = koila.lazy(torch.ones(6, 3, dtype=torch.float64)) @ w.requires_grad_()
    with koila.config(chunks=2):
        loss = (Square.apply(layer(h.detach())) + h).pow(2).sum()
        h.data.mul_(0.5)
        with pytest.raises(koila.StaleError, match=r"written through \.data or by"):
            loss.backward()
    assert layer.weight.grad is None


@pytest.mark.parametrize("chunks", [2, 3, 7, N_ROWS])
@pytest.mark.parametrize("is_trained", [False, True])
def test_what_plain_torch_wrote_before_a_call_writes_it_is_not_what_was_read(
    chunks: int, is_trained: bool
) -> None:
    """A table was looked up in, written by plain torch, and then by a call: the first look-up is
    made again going back, and read the numbers from between the two writes."""

    def run(lazy: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(5, 4, generator=generator, dtype=D).requires_grad_(is_trained)
        w = torch.ones(4, 4, dtype=D, requires_grad=True)
        x = lazy(torch.arange(2 * N_ROWS).view(N_ROWS, 2) % 5)
        h = F.embedding(x, table).sum(1) @ w
        h.detach().requires_grad_()  # cuts the program
        with torch.no_grad():
            table.mul_(0.5)
        F.embedding(x, table, max_norm=0.1)
        h.tanh().sum().backward()
        assert w.grad is not None
        return w.grad

    with koila.config(chunks=chunks):  # the part has kept a copy before the first write
        torch.testing.assert_close(run(koila.lazy), run(eager), rtol=1e-10, atol=1e-13)


@each_count
def test_what_was_written_is_kept_by_a_call_that_no_gradient_goes_through(chunks: int) -> None:
    """The batch is kept for the gradient of a weight that is not asked for."""

    def run(lazy: Any) -> list[Tensor]:
        w, v = torch.ones(3, 4, dtype=D), torch.ones(4, 2, dtype=D)
        x = lazy(torch.arange(33, dtype=D).view(N_ROWS, 3) / 10)
        h = (x @ w.requires_grad_()).tanh()  # is handed out, for it is held
        loss = (h @ v.requires_grad_()).pow(2).mean()
        x.mul_(2)
        return [*torch.autograd.grad(loss, [v], retain_graph=True), loss]

    with koila.config(chunks=chunks):
        got = run(koila.lazy)
    for value, wanted in zip(got, run(eager), strict=True):
        torch.testing.assert_close(plain(value), wanted, rtol=1e-10, atol=1e-13)


# A gradient of some leaves alone ------------------------------------------------------------------


def read_between(h: Tensor) -> Tensor:
    float(h.detach().sum())
    return h * 1


def moved_by_the_batch(x: Tensor, leaf: Tensor) -> None:
    with torch.no_grad():
        leaf.add_(x.detach().mean())


#: What is written between forward and gradient, and the leaves whose gradients eager has then.
LEFT: dict[str, tuple[str, ...]] = {
    "x": ("scale", "second", "last"),
    "scale": ("second", "last"),
    "second": ("last",),
}
HOW: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "grad": torch.autograd.grad,
    "one by one": lambda loss, leaves: [
        torch.autograd.grad(loss, leaf, retain_graph=True)[0] for leaf in leaves
    ],
    "with a graph": lambda loss, leaves: torch.autograd.grad(loss, leaves, create_graph=True),
    "backward": lambda loss, leaves: loss.backward(inputs=leaves) or [leaf.grad for leaf in leaves],
}


@pytest.mark.rotated("chunks")
@each_count
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("written", LEFT)
@pytest.mark.parametrize("block", [square, read_between])
def test_what_was_written_is_kept_for_a_leaf_that_is_not_asked_for(
    block: Block, written: str, how: str, chunks: int
) -> None:
    """A part made the gradients of all leaves that its node leads to, if one was asked for: it
    refused what eager's backward does not come to."""

    def run(lazy: Any, asked: tuple[str, ...]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        sizes = {"first": (3, 4), "scale": (4,), "second": (4, 4), "last": (4, 2)}
        leaves = {
            name: torch.randn(size, generator=generator, dtype=D).requires_grad_()
            for name, size in sizes.items()
        }
        x = lazy(torch.randn(N_ROWS, 3, generator=generator, dtype=D))
        loss = (x @ leaves["first"] * leaves["scale"]) @ leaves["second"] @ leaves["last"]
        loss = block(loss).mean()
        moved_by_the_batch(x, {**leaves, "x": x}[written])
        found = HOW[how](loss, [leaves[name] for name in asked])
        others = [leaf for name, leaf in leaves.items() if name not in asked]
        assert how != "backward" or all(leaf.grad is None for leaf in others)
        return [plain(one) for one in (*found, loss)]

    with koila.config(chunks=chunks):
        got = run(koila.lazy, LEFT[written])
    for value, wanted in zip(got, run(eager, LEFT[written]), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-13)
    kept = {"x": "first", "scale": "first", "second": "scale"}[written]
    for lazy, n in (eager, 1), (koila.lazy, chunks):
        with koila.config(chunks=n), pytest.raises(RuntimeError, match="modified by an inplace"):
            run(lazy, (kept,))


@each_count
def test_two_backwards_of_values_that_are_written_unseen(chunks: int) -> None:
    """The first runs whole, and its graph is retained: the second goes through that graph."""

    def step(lazy: Any) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(N_ROWS, 3, dtype=D, generator=generator)
        w = torch.randn(3, 4, dtype=D, generator=generator).requires_grad_()
        h = lazy(x) @ w
        clamped = h.data
        clamped.clamp_(-1, 1)
        found = square(h)
        h.detach().data.mul_(0.5)
        loss = F.mse_loss(found.softmax(-1), clamped)
        loss.backward(retain_graph=True)
        loss.backward()
        assert w.grad is not None
        return [w.grad, (h + 0).detach()]

    want = step(eager)
    with koila.config(chunks=chunks):
        got = step(koila.lazy)
    for one, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(one + 0, wanted, rtol=1e-10, atol=1e-14)
