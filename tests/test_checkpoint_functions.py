# SPDX-License-Identifier: Apache-2.0
"""Custom autograd functions in the functions of torch.utils.checkpoint: what they read, save and
return is not kept until backward, as in eager, and is computed again there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from allocations import Allocations
from koila.running import repeated
from oracle import Lazy, assert_seen, eager, tell
from stories import N_ROWS, rows
from test_bridge import Doubled
from test_checkpoints import KINDS, ROWS, WIDTH, check

Apply = Callable[..., Any]


class _RmsNorm(torch.autograd.Function):
    """Saves its input, a weight, and what it made of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        inner = gradient * weight
        shared = x * scale**3 * (inner * x).mean(-1, keepdim=True)
        return scale * inner - shared, (gradient * x * scale).flatten(0, -2).sum(0)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        a, b = ctx.saved_tensors
        gate = a.sigmoid()
        return gradient * (gate + a * gate * (1 - gate)) * b, gradient * a * gate


class _Waves(torch.autograd.Function):
    """Several results, of which one has no gradient; it saves one of the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Any:
        chosen, sine = x.argmax(-1), (scale * x).sin()
        ctx.scale = scale
        ctx.save_for_backward(x, sine)
        ctx.mark_non_differentiable(chosen)
        return sine, (scale * x).cos(), chosen

    @staticmethod
    def backward(ctx: Any, of_sine: Tensor, of_cosine: Tensor, _: Any) -> Any:  # type: ignore[override]
        x, sine = ctx.saved_tensors
        return ctx.scale * (of_sine * (ctx.scale * x).cos() - of_cosine * sine), None


class _Dropped(torch.autograd.Function):
    """Draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) > 0.3
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        return gradient * mask


class _Reversed(torch.autograd.Function):
    """Return a view of the argument; reverse the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


class _Cubed(torch.autograd.Function):
    """Its backward can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        made: Tensor = 3 * x * x * gradient
        return made


rms_norm: Apply = _RmsNorm.apply
swiglu: Apply = _SwiGlu.apply
waves: Apply = _Waves.apply
dropped: Apply = _Dropped.apply
doubled: Apply = Doubled.apply
reversed_: Apply = _Reversed.apply
cubed: Apply = _Cubed.apply


# Memory -------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.a, self.b = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.last = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = rms_norm(x, self.weight) if "norm" in self.kind else F.layer_norm(x, (WIDTH,))
        a, b = self.a(x), self.b(x)
        h = swiglu(a, b) if "swiglu" in self.kind else F.silu(a) * b
        made: Tensor = self.last(h)
        return made


class Blocks(nn.Module):
    def __init__(self, kind: str, n_blocks: int = 6) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(n_blocks))

    def forward(self, x: Tensor, is_reentrant: bool) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=is_reentrant)
        made: Tensor = self.head(x)
        return made


def step(kind: str, is_reentrant: bool, lazy: Lazy) -> tuple[int, list[Tensor]]:
    torch.manual_seed(0)
    model = Blocks(kind).double()
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64).requires_grad_(is_reentrant)
    memory = Allocations()
    memory.count(x, list(model.parameters()))
    with memory:
        batch = lazy(x)
    with memory:
        loss = model(batch, is_reentrant).pow(2).mean()
        loss.backward()
    grads = [p.grad for p in (x, *model.parameters()) if p.grad is not None]
    return memory.peak, [*grads, torch.tensor(loss.item())]


@KINDS
@pytest.mark.parametrize("kind", ["norm", "swiglu", "norm and swiglu"])
def test_no_more_than_eager(kind: str, is_reentrant: bool) -> None:
    want = step(kind, is_reentrant, eager)
    for chunks in (1, 2, 3, 7):
        with koila.config(chunks=chunks):
            check(step(kind, is_reentrant, koila.lazy), want)


# Numbers ------------------------------------------------------------------------------------------

Story = Callable[[Lazy, bool], Any]
STORIES: dict[str, Story] = {}


def add(story: Story) -> Story:
    STORIES[story.__name__] = story
    return story


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.weight = nn.Parameter(torch.rand(4))
        self.norm = nn.BatchNorm1d(4)
        self.double()

    def told(self) -> list[Any]:
        return [p.grad for p in self.parameters()] + [b.clone() for b in self.norm.buffers()]


Body = Callable[[Net, int, Tensor], Tensor]
#: Writes of a tensor that a custom function has read or returned.
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "through data": lambda a: a.data.mul_(2),
    "by a custom function": lambda a: doubled(a),
    "unseen by autograd": lambda a: a.detach().mul_(2),
}


def written_input(write: Callable[[Tensor], Any], net: Net, k: int, h: Tensor) -> Tensor:
    a = net.layers[k](h) * 0.3
    b = cubed(a) if write is WRITES["through data"] else cubed(a).detach()
    write(a)
    return b.sin() + cubed(a) + swiglu(a, a.sin())


def written_result(write: Callable[[Tensor], Any], net: Net, k: int, h: Tensor) -> Tensor:
    a = net.layers[k](h) * 0.3
    b = cubed(a)
    write(b)
    made: Tensor = swiglu(b, a)
    return made


def forward(lazy: Lazy, is_reentrant: bool, body: Body) -> tuple[Net, Tensor, Tensor]:
    """Three checkpoints, each of which reads the sum of what came before; model, batch and loss."""
    net, x = Net(), rows(4).requires_grad_()
    h = net.layers[3](lazy(x))
    for k in range(3):
        h = h + checkpoint(partial(body, net, k), h, use_reentrant=is_reentrant)
    return net, x, h.square().mean()


def layered(lazy: Lazy, is_reentrant: bool, body: Body) -> tuple[Any, ...]:
    net, x, loss = forward(lazy, is_reentrant, body)
    loss.backward()
    return loss, x.grad, net.told()


BODIES: dict[str, Body] = {
    "one": lambda net, k, h: net.layers[k](rms_norm(h, net.weight)),
    "at the end": lambda net, k, h: swiglu(net.layers[k](h), h.sin()),
    "one after the other": lambda net, k, h: cubed(rms_norm(net.layers[k](h), net.weight)).sin(),
    "with calls between": lambda net, k, h: swiglu(
        net.layers[k](rms_norm(h, net.weight)).tanh(), h
    ).sin(),
    "several results": lambda net, k, h: (lambda a, b, c: (a * b + c.unsqueeze(-1)).tanh())(
        *waves(net.layers[k](h), 0.5)
    ),
    "draws": lambda net, k, h: F.dropout(dropped(F.dropout(net.layers[k](h), 0.3)), 0.2).sin(),
    "writes": lambda net, k, h: doubled(net.layers[k](h)).sin() * rms_norm(h, net.weight),
    "reads, then writes": lambda net, k, h: (
        lambda a: cubed(a).detach() * 0 + doubled(a).sin() * cubed(a)
    )(net.layers[k](h)),
    "a view": lambda net, k, h: reversed_(net.layers[k](h)).sin(),
    "a view, then a function": lambda net, k, h: cubed(reversed_(net.layers[k](h))).sin(),
    "views": lambda net, k, h: swiglu(*net.layers[k](h).chunk(2, -1)).repeat(1, 2).sin(),
    "transposed": lambda net, k, h: cubed(net.layers[k](h).view(-1, 2, 2).transpose(1, 2)).flatten(
        1
    ),
    "of what it was given": lambda net, k, h: cubed(h).sin() * net.layers[k](h),
    "a normalization": lambda net, k, h: cubed(net.norm(net.layers[k](h))).sin(),
    "a normalization after it": lambda net, k, h: net.norm(cubed(net.layers[k](h))).sin(),
    "in another": lambda net, k, h: checkpoint(
        lambda h: rms_norm(net.layers[k](cubed(h.sin())), net.weight), h.cos(), use_reentrant=False
    ).sin(),
    "in another, reentrant": lambda net, k, h: checkpoint(
        lambda h: rms_norm(net.layers[k](cubed(h.sin())), net.weight), h.cos(), use_reentrant=True
    ).sin(),
    "a result that is written": lambda net, k, h: cubed(net.layers[k](h)).mul_(2).sin(),
    "without gradient": lambda net, k, h: cubed(net.layers[k](h).detach()) * net.layers[k](h),
    "numbers that are read": lambda net, k, h: (
        cubed(net.layers[k](h)) * (1.0 if float(h.detach().sum()) > 0 else 2.0)
    ),
}

BODIES |= {f"input written {name}": partial(written_input, WRITES[name]) for name in WRITES}
BODIES |= {f"result written {name}": partial(written_result, WRITES[name]) for name in WRITES}
for name, body in BODIES.items():
    STORIES[name] = lambda lazy, is_reentrant, body=body: layered(lazy, is_reentrant, body)


@add
def twice(lazy: Lazy, is_reentrant: bool) -> Any:
    """Backward goes through it again."""
    net = Net()
    h = checkpoint(
        lambda h: swiglu(net.layers[0](h).tanh(), h).sin(),
        net.layers[3](lazy(rows(4))),
        use_reentrant=is_reentrant,
    )
    loss = h.square().mean()
    loss.backward(retain_graph=True)
    first = [one.clone() for one in net.told() if one is not None]
    loss.backward()
    return loss, first, net.told()


@add
def results_that_are_held(lazy: Lazy, is_reentrant: bool) -> Any:
    """And written after they were read."""
    net, held = Net(), []

    def body(h: Tensor, k: int) -> Tensor:
        a = net.layers[k](h)
        b = cubed(a)
        held.append((a, b))
        return b.sin() * a

    h = net.layers[3](lazy(rows(4)))
    for k in range(3):
        h = h + checkpoint(body, h, k, use_reentrant=is_reentrant)
    seen = [(a.detach().clone(), b.detach().clone()) for a, b in held]
    with torch.no_grad():
        for a, b in held:
            a.mul_(3)
            b.mul_(5)
    h.square().mean().backward()
    return seen, net.told()


@add
def for_some_inputs(lazy: Lazy, is_reentrant: bool) -> Any:
    net = Net()
    if is_reentrant:  # torch refuses it
        return None
    h = net.layers[3](lazy(rows(4)))
    for k in range(3):
        h = h + checkpoint(
            lambda h, k=k: rms_norm(net.layers[k](cubed(h)), net.weight), h, use_reentrant=False
        )
    return torch.autograd.grad(h.square().mean(), [net.weight, net.layers[1].weight])


@add
def a_gradient_with_a_graph(lazy: Lazy, is_reentrant: bool) -> Any:
    net = Net()
    if is_reentrant:
        return None
    h = net.layers[3](lazy(rows(4)))
    for k in range(2):
        h = h + checkpoint(lambda h, k=k: cubed(net.layers[k](h)).sin(), h, use_reentrant=False)
    loss = h.square().mean()
    (found,) = torch.autograd.grad(loss, [net.layers[3].weight], create_graph=True)
    (loss + found.square().sum()).backward()
    return loss, found, net.told()


@add
def under_autocast(lazy: Lazy, is_reentrant: bool) -> Any:
    net = Net().float()
    h = net.layers[3](lazy(rows(4).float()))
    with torch.autocast("cpu", torch.bfloat16):
        for k in range(2):
            h = h + checkpoint(
                lambda h, k=k: swiglu(net.layers[k](h), h.bfloat16()), h, use_reentrant=is_reentrant
            )
    h.float().square().mean().backward()
    return h, net.told()


@add
def only_a_part(lazy: Lazy, is_reentrant: bool) -> Any:
    """The second checkpoint gets no gradient, and none is computed in it."""
    net = Net()
    h = net.layers[3](lazy(rows(4)))
    first = checkpoint(lambda h: cubed(net.layers[0](h)).sin(), h, use_reentrant=is_reentrant)
    second = checkpoint(
        lambda h: dropped(cubed(net.layers[1](h))).sin(), first, use_reentrant=is_reentrant
    )
    number = second.sum().item()
    first.square().mean().backward()
    return number, net.told(), torch.rand(2)


@add
def what_is_not_asked_for_beside(lazy: Lazy, is_reentrant: bool) -> Any:
    """One part has calls that read what the first backward freed, and those of another loss."""
    net = Net()
    z = lazy(rows(4))
    first = cubed(net.layers[0](z))
    second = checkpoint(lambda h: cubed(net.layers[1](h)), first, use_reentrant=is_reentrant)
    beside = second.square().sum()
    second.square().mean().backward()
    other = z.detach().clone().requires_grad_()
    loss = cubed(net.layers[2](other)).square().mean()
    return torch.autograd.grad(loss, other), net.told(), beside.detach() + 0, first.detach() + 0


@pytest.mark.rotated("chunks")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@KINDS
@pytest.mark.parametrize("chunks", [None, 1, 2, 3, N_ROWS])
@pytest.mark.parametrize("name", STORIES)
def test_equals_eager(name: str, chunks: int | None, is_reentrant: bool) -> None:
    def story(lazy: Lazy) -> Any:
        return STORIES[name](lazy, is_reentrant)

    want, want_state = tell(story, eager)
    with koila.config(chunks=chunks):
        got, got_state = tell(story, koila.lazy)
    is_close = name == "under_autocast"
    assert_seen(
        got,
        want,
        name,
        exact_bits=chunks in (None, 1) and not is_close,
        tolerance=2e-2 if is_close else None,
    )
    assert torch.equal(got_state, want_state)


@KINDS
def test_statistics_that_are_moved_on_both_sides(is_reentrant: bool) -> None:
    """The backward of the part before comes last, and would move them last."""
    net = Net()
    with koila.config(chunks=3), pytest.raises(koila.KoilaError, match="before and after a call"):
        checkpoint(
            lambda h: net.norm(cubed(net.norm(h))),
            net.layers[0](koila.lazy(rows(4))),
            use_reentrant=is_reentrant,
        )
    koila._core.forget()


@KINDS
@pytest.mark.parametrize("chunks", [1, 2])
def test_backward_in_other_chunks(chunks: int, is_reentrant: bool) -> None:
    """What was cut off in chunks runs whole, or in other chunks."""

    def story(lazy: Lazy) -> Any:
        with koila.config(chunks=3):
            net, _, loss = forward(lazy, is_reentrant, BODIES["with calls between"])
        with koila.config(chunks=chunks):
            loss.backward()
        return loss, net.told()

    want, _ = tell(story, eager)
    if is_reentrant and chunks == 1:  # a part that runs whole asks torch for some gradients alone
        with pytest.raises(koila.KoilaError, match="is incompatible with"):
            tell(story, koila.lazy)
        return
    got, _ = tell(story, koila.lazy)
    assert_seen(got, want, "other chunks", exact_bits=False)


@KINDS
def test_nothing_is_left(is_reentrant: bool) -> None:
    """Of a graph that nobody differentiates, or that has been."""

    def weight_of(is_differentiated: bool) -> weakref.ref[Any]:
        net, _, loss = forward(koila.lazy, is_reentrant, BODIES["with calls between"])
        loss.item()
        if is_differentiated:
            loss.backward()
        return weakref.ref(net.layers[1].weight)

    for is_differentiated in (False, True):
        with koila.config(chunks=3):
            gc.disable()
            try:
                kept = weight_of(is_differentiated)
                koila._core.forget()
                assert kept() is None
            finally:
                gc.enable()


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("first", [False, True], ids=["", "after_another_backward"])
def test_its_weights_are_written_before_it_is_computed_again(chunks: int, first: bool) -> None:
    """What the function returned is not kept, and is computed again from the old weights, of which
    the part has a copy. The next step runs."""

    def gated(x: Tensor) -> Tensor:
        made: Tensor = _SwiGlu.apply(layer(x), x)
        return made

    def gradient(lazy: Any) -> Tensor:
        torch.manual_seed(0)
        nn.init.normal_(layer.weight)
        x = lazy(rows(4))
        h = x @ torch.randn(x.shape[-1], WIDTH).double()
        if first:
            gated(h).sum().backward()
        inner = checkpoint(gated, h, use_reentrant=False)
        with torch.no_grad():
            layer.weight.mul_(0.5)
        (found,) = torch.autograd.grad(gated(inner).tanh().sum(), inner, create_graph=True)
        return found.detach() + 0

    layer = nn.Linear(WIDTH, WIDTH).double()
    want = gradient(lambda x: x)
    with koila.config(chunks=chunks):
        torch.testing.assert_close(gradient(koila.lazy) + 0, want, rtol=1e-10, atol=1e-13)
        gated(koila.lazy(rows(4)) @ torch.ones(rows(4).shape[-1], WIDTH).double()).sum().backward()
        assert koila.report().n_chunks == chunks


def test_a_saved_conjugate_is_taken_of_its_memory() -> None:
    """Its numbers lie there as they are without conj(), and are conjugated when they are read."""
    z = torch.tensor([[1 + 2j, 3 - 1j], [0.5j, 2 + 0j]])
    saved = (z.conj(), z.t().conj(), z.conj()[1:])
    for tensor in saved:
        layout = repeated.Layout(tensor)
        assert layout.is_of(z)
        assert torch.equal(layout.taken_of(z), tensor)
    assert not repeated.Layout(z.conj().imag).is_of(z)
    negated = z.conj().imag
    assert negated.is_neg()
    assert torch.equal(repeated.Layout(negated).taken_of(z.real), negated)
