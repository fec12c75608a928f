# SPDX-License-Identifier: Apache-2.0
"""What a user puts around calls sees what it sees in eager, once, and nothing of koila's own work.

Each story changes numbers by what is around its calls, and returns how often that was asked, so
that it cannot pass where nothing was.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import koila
from koila import _core
from koila.basics import surroundings
from oracle import Lazy, assert_seen, eager, gradients, is_whole, tell

N_ROWS = 7
STORIES: dict[str, Callable[[Lazy], Any]] = {}
#: Of these some calls ran where they stood, and the report says so.
AT_ONCE: dict[str, str] = {}


def story(why: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a story of a model and its lazy batch; why its calls run at once, as the report says."""

    def add(func: Callable[..., Any]) -> Callable[..., Any]:
        def told(lazy: Lazy) -> Any:
            model = Model().double()
            x = torch.linspace(-1, 1, N_ROWS * 5, dtype=torch.float64).view(N_ROWS, 5).cos()
            x, y = lazy(x, torch.arange(N_ROWS) % 3)
            return func(model, x, y), gradients(model)

        STORIES[func.__name__] = told
        if why:
            AT_ONCE[func.__name__] = why
        return func

    return add


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def body(self, x: Tensor) -> Tensor:
        return self.first(x).tanh()

    def tail(self, h: Tensor) -> Tensor:
        return self.middle(h).tanh()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.tail(self.body(x)))
        return made


def finish(model: Model, h: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model.last(h), y)
    loss.backward()
    return loss


HOOKS, MODE, DUAL = "hooks on saved tensors", "a dispatch mode", "forward-mode AD"


# Hooks on saved tensors


if hasattr(torch.autograd.graph, "node_creation_hook"):  # torch from 2.14 on

    @story("a dispatch mode is on (NodeHooks)")
    def a_hook_on_nodes(model: Model, x: Tensor, y: Tensor) -> Any:
        """It doubles gradients on their way, of each product that is made inside."""
        names = list[str]()

        def double(node: Any) -> None:
            names.append(node.name())
            if "Addmm" in node.name():
                node.register_prehook(lambda gradients: tuple(2 * g for g in gradients))

        with torch.autograd.graph.node_creation_hook(double):  # type: ignore[attr-defined]
            out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        assert any("Addmm" in name for name in names)
        return loss, names


@story(HOOKS)
def packs_with_less_precision(model: Model, x: Tensor, y: Tensor) -> Any:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.bfloat16()

    h = model.body(x)
    with saved_tensors_hooks(pack, lambda tensor: tensor.double()):
        h = model.tail(h)
    return finish(model, h, y), packed


@story(HOOKS)
def packs_nothing(model: Model, x: Tensor, y: Tensor) -> Any:
    with saved_tensors_hooks(lambda tensor: tensor * 0, lambda tensor: tensor):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


@story(HOOKS)
def nested_hooks(model: Model, x: Tensor, y: Tensor) -> Any:
    """The inner ones alone are asked, and the outer ones again behind them."""
    with saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor):
        h = model.body(x)
        with saved_tensors_hooks(lambda tensor: tensor * 3, lambda tensor: tensor):
            h = model.tail(h)
        h = h * h.sigmoid()
    return finish(model, h, y)


@story(HOOKS)
def reads_in_hooks(model: Model, x: Tensor, y: Tensor) -> Any:
    """A read runs what was recorded before, and hooks are not asked about that."""
    packed = []
    h = model.body(x)
    with saved_tensors_hooks(lambda tensor: packed.append(1) or tensor * 2, lambda t: t):
        total = h.sum().item()
        n_before = len(packed)
    return finish(model, model.tail(h), y), total, n_before


@story()
def hooks_around_the_backward(model: Model, x: Tensor, y: Tensor) -> Any:
    """What hooks on gradients compute is seen, and nothing of koila's forward."""
    packed = []
    other = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def compute(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            return gradient * (other * other).sum().detach()

    h = model.body(x)
    h.register_hook(compute)
    model.first.weight.register_hook(compute)
    loss = F.cross_entropy(model.last(model.tail(h)), y)
    with saved_tensors_hooks(lambda tensor: packed.append(1) or tensor, lambda tensor: tensor):
        loss.backward()
    return loss, len(packed)


@story(HOOKS)
def saves_on_cpu(model: Model, x: Tensor, y: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        h = model.tail(model.body(x))
    return finish(model, h, y)


@story(MODE)
def mutates_what_is_saved(model: Model, x: Tensor, y: Tensor) -> Any:
    h = model.body(x)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        copy = h.clone()
        made = copy.sin()
        copy.mul_(0)
        return finish(model, made, y)


@story()
def disabled_hooks(model: Model, x: Tensor, y: Tensor) -> Any:
    """Koila's own may be on there, and the message is as before."""
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        loss = finish(model, model.tail(model.body(x)), y)
        with pytest.raises(RuntimeError, match="not here"), saved_tensors_hooks(id, id):
            pass
    return loss


# Modes


class Scale(TorchDispatchMode):
    """Makes tanh, and its backward, larger."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in (torch.ops.aten.tanh.default, torch.ops.aten.tanh_backward.default):
            return made
        self.n += 1
        return made * 1.5


@story(MODE)
def mode_around_a_part(model: Model, x: Tensor, y: Tensor) -> Any:
    h = model.body(x)
    with Scale() as mode:
        h = model.tail(h)
    return finish(model, h, y), mode.n


@story()
def mode_around_the_backward(model: Model, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    with Scale() as mode:
        loss.backward()
    return loss, mode.n


@story(MODE)
def mode_around_all(model: Model, x: Tensor, y: Tensor) -> Any:
    with Scale() as mode:
        loss = finish(model, model.tail(model.body(x)), y)
    return loss, mode.n


@story(MODE)
def mode_behind_a_cut(model: Model, x: Tensor, y: Tensor) -> Any:
    """The part before the cut goes back inside of the mode, too."""
    h = model.body(x)
    h = h * torch.unique((h > 0).long()).sum()
    with Scale() as mode:
        return finish(model, model.tail(h), y), mode.n


@story(MODE)
def mode_around_a_read(model: Model, x: Tensor, y: Tensor) -> Any:
    h = model.body(x)
    with Scale() as mode:
        total = h.sum().item()
    return finish(model, model.tail(h), y), total, mode.n


@story(MODE)
def flops_are_counted(model: Model, x: Tensor, y: Tensor) -> Any:
    with FlopCounterMode(display=False) as counter:
        loss = finish(model, model.tail(model.body(x)), y)
    return loss, counter.get_total_flops()


class Louder(TorchFunctionMode):
    """Doubles each tanh, as it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "tanh":
            return made
        self.n += 1
        return made * 2


@story()
def function_mode(model: Model, x: Tensor, y: Tensor) -> Any:
    with Louder() as mode:
        h = model.tail(model.body(x))
    return finish(model, h, y), mode.n


@story()
def function_mode_around_a_run(model: Model, x: Tensor, y: Tensor) -> Any:
    """What was recorded before the mode is not seen by it when it runs inside."""
    h = model.body(x)
    with Louder() as mode:
        number = str(h.detach().sum())
        loss = finish(model, model.middle(h), y)
    return loss, number, mode.n


@story()
def default_device(model: Model, x: Tensor, y: Tensor) -> Any:
    h = model.body(x)
    with torch.device("meta"):
        there = torch.zeros(3).device.type
        total = h.sum().item()
        loss = finish(model, model.tail(h), y)
    return loss, total, there


# Forward-mode AD


@story(DUAL)
def dual_batch(model: Model, x: Tensor, y: Tensor) -> Any:
    h = model.body(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(h, torch.ones(N_ROWS, 8, dtype=torch.float64))
        made = forward_ad.unpack_dual(model.tail(dual).sum(1))
        assert made.tangent is not None
        made.primal.sum().backward()
        return made.primal, made.tangent


@story(DUAL)
def dual_input(model: Model, x: Tensor, y: Tensor) -> Any:
    """The batch itself, before anything is made of it."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(x.shape, dtype=torch.float64))
        made = forward_ad.unpack_dual(model.tail(model.body(dual)).sum(1))
        assert made.tangent is not None
        made.primal.sum().backward()
        return made.primal, made.tangent


@story(DUAL)
def dual_weight(model: Model, x: Tensor, y: Tensor) -> Any:
    h = model.body(x)
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(model.middle.weight, torch.ones(8, 8, dtype=torch.float64))
        made = forward_ad.unpack_dual(F.linear(h, weight).tanh().mean())
        assert made.tangent is not None
        tangent = made.tangent.detach().clone()
    return finish(model, model.tail(h), y), tangent


# Transforms and traces: what waits runs in a call of theirs, and outside of them


def ends_a_block(a: Tensor) -> Tensor:
    with torch.no_grad():
        b = a * 2
    return b + a


def sets_threads(a: Tensor) -> Tensor:
    torch.set_num_threads(torch.get_num_threads())
    return a * 2


def begins_a_batch(a: Tensor) -> Tensor:
    koila.lazy(torch.ones(N_ROWS, 5))
    return a * 2


@story()
def a_trace_around_runs(model: Model, x: Tensor, y: Tensor) -> Any:
    found = list[Any]()
    for run in (ends_a_block, sets_threads, begins_a_batch):
        with torch.no_grad():
            total = F.dropout(model(x)).sum()
            traced = torch.jit.trace(run, torch.ones(2), check_trace=False)
        found += [total, traced(torch.ones(2)), str(traced.graph).count("aten::")]
    return finish(model, model.tail(model.body(x)), y), found


@story()
def a_transform_around_runs(model: Model, x: Tensor, y: Tensor) -> Any:
    found = list[Any]()
    for run in (ends_a_block, sets_threads, begins_a_batch):
        with torch.no_grad():
            total = F.dropout(model(x)).sum()
            found += [torch.func.vmap(run)(torch.ones(2, 2)), total]
    return finish(model, model.tail(model.body(x)), y), found


@story()
def draws_in_a_transform(model: Model, x: Tensor, y: Tensor) -> Any:
    h = F.dropout(model.body(x))
    noise = torch.func.vmap(lambda a: a * torch.rand(2), randomness="different")(torch.ones(3, 2))
    more = torch.func.grad(lambda a: (a * torch.rand(2)).sum())(torch.ones(2))
    return finish(model, F.dropout(h), y), noise, more


@story()
def draws_in_a_trace(model: Model, x: Tensor, y: Tensor) -> Any:
    h = F.dropout(model.body(x))
    traced = torch.jit.trace(lambda a: a * torch.rand(2), torch.ones(2), check_trace=False)
    return finish(model, F.dropout(h), y), str(traced.graph).count("aten::")


# Operands with a say of their own


class Centred(torch.Tensor):
    """Takes the mean of the rows off each product."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        is_product = getattr(func, "__name__", "") in ("mul", "multiply", "__rmul__", "__mul__")
        if not is_product or not isinstance(made, Tensor):
            return made
        return made - made.mean(0)


def centred(made: Any) -> tuple[bool, Tensor]:
    return isinstance(made, Centred), made.as_subclass(torch.Tensor)


@story()
def operand_that_couples_rows(model: Model, x: Tensor, y: Tensor) -> Any:
    other = torch.linspace(1, 2, N_ROWS * 8, dtype=torch.float64).view(N_ROWS, 8)
    other = other.as_subclass(Centred)
    h = model.body(x)
    products = [h * other, other * h, h.mul(other), torch.mul(h, other), torch.mul(other, h)]
    kinds, plain = zip(*map(centred, products), strict=True)
    assert all(kinds)
    return finish(model, sum(plain, start=torch.zeros((), dtype=x.dtype)), y)


class Three:
    """No tensor, but torch asks it."""

    n_asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.n_asked += 1
        made = func(*(3.0 if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))
        return made - made.mean(0)


@story()
def operand_that_is_no_tensor(model: Model, x: Tensor, y: Tensor) -> Any:
    three: Any = Three()
    before = Three.n_asked
    h = torch.add(model.body(x), three)
    h = h.mul(three) + torch.mul(three, h)
    h = F.gelu(h)
    return finish(model, h, y), Three.n_asked - before


class Dispatched(torch.Tensor):
    """Asked below autograd, by way of `__torch_dispatch__`."""

    numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, numbers: Tensor) -> Tensor:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, dtype=numbers.dtype
        )
        made.numbers = numbers
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*(a.numbers if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        return made - made.mean(0) if func is torch.ops.aten.mul.Tensor else made


@story()
def operand_that_is_dispatched(model: Model, x: Tensor, y: Tensor) -> Any:
    other = torch.linspace(1, 2, N_ROWS * 8, dtype=torch.float64).view(N_ROWS, 8)
    other = Dispatched.of(other)
    h = model.body(x)
    return finish(model, h * other + torch.mul(other, h), y)


# Checkpoints


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0].exp()


def reads_a_number(model: Model, h: Tensor) -> Tensor:
    return model.tail(h) * (2 if h.sum().item() > 0 else 3)


def calls_a_function(model: Model, h: Tensor) -> Tensor:
    made: Tensor = Exponential.apply(model.middle(h))  # type: ignore[no-untyped-call]
    return made.tanh()


def looks_for_shapes(model: Model, h: Tensor) -> Tensor:
    index = torch.where(h[:, 0] > 0)[0]
    return model.tail(h).index_add(0, index, h[index]) * torch.unique((h > 0).long()).sum()


def asserts(model: Model, h: Tensor) -> Tensor:
    assert (h.isfinite()).all()
    return model.tail(h)


def is_plain(model: Model, h: Tensor) -> Tensor:
    return model.tail(h)


def _checkpointed(body: Callable[[Model, Tensor], Tensor], model: Model, x: Tensor, y: Tensor):
    n_runs = []

    def counted(h: Tensor) -> Tensor:
        n_runs.append(1)
        return body(model, h)

    h = checkpoint(counted, model.body(x), use_reentrant=False)
    loss = finish(model, h, y)
    assert n_runs
    return loss


for _body in (reads_a_number, calls_a_function, looks_for_shapes, asserts, is_plain):
    _told = functools.partial(_checkpointed, _body)
    _told.__name__ = f"checkpoint_that_{_body.__name__}"  # type: ignore[attr-defined]
    story()(_told)


@story()
def selective_checkpoint(model: Model, x: Tensor, y: Tensor) -> Any:
    kept = [torch.ops.aten.addmm.default]
    context = functools.partial(create_selective_checkpoint_contexts, kept)
    h = checkpoint(model.tail, model.body(x), use_reentrant=False, context_fn=context)
    return finish(model, h, y)


@story(HOOKS)
def checkpoint_in_hooks(model: Model, x: Tensor, y: Tensor) -> Any:
    """The user's hooks are not asked about the body."""
    packed = []
    h = model.body(x)
    with saved_tensors_hooks(lambda t: packed.append(tuple(t.shape)) or t, lambda t: t):
        h = checkpoint(model.tail, h, use_reentrant=False)
        h = checkpoint(model.tail, h, use_reentrant=True)
    return finish(model, h, y), packed


# Hooks on nodes of autograd's graph


def clamp(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(gradient.clamp(-0.01, 0.01) for gradient in given)


@story()
def prehook_of_a_node(model: Model, x: Tensor, y: Tensor) -> Any:
    h = model.tail(model.body(x))
    loss = F.cross_entropy(model.last(h), y)
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(clamp)
    loss.backward()
    return loss


@story()
def hook_of_a_node(model: Model, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    node: Any = loss.grad_fn
    node.register_hook(lambda of_inputs, of_outputs: (of_inputs[0] * 2, *of_inputs[1:]))
    loss.backward()
    return loss, isinstance(node, torch.autograd.graph.Node)


@story()
def hook_of_several_tensors(model: Model, x: Tensor, y: Tensor) -> Any:
    seen: list[Any] = []
    h = model.body(x)
    made = model.middle(h)
    torch.autograd.graph.register_multi_grad_hook((h, made), seen.append)
    return finish(model, made.tanh(), y), seen


@story()
def hooks_of_several_tensors_that_are_read_already(model: Model, x: Tensor, y: Tensor) -> Any:
    seen: dict[str, list[Any]] = {"all": [], "any": []}
    h = model.body(x)
    made = model.middle(h)
    loss = F.cross_entropy(model.last(made.tanh()), y)
    register = torch.autograd.graph.register_multi_grad_hook
    register((h, made), seen["all"].append)
    register((h, made), seen["any"].append, mode="any")
    loss.backward()
    assert [len(calls) for calls in seen.values()] == [1, 1]
    return loss, seen


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [None, 1, 2, 3, N_ROWS])
@pytest.mark.parametrize("name", STORIES)
def test_equals_eager(name: str, chunks: int | None) -> None:
    want = tell(STORIES[name], eager)
    with koila.config(chunks=chunks):
        got = tell(STORIES[name], koila.lazy)
    assert_seen(got[0], want[0], name, exact_bits=is_whole(chunks))
    assert torch.equal(got[1], want[1])
    if name in AT_ONCE and (chunks or 1) > 1:
        assert AT_ONCE[name] in str(koila.report()), "what runs at once is told"


def test_it_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["koila.planning.logs"], "logged", set())
    with koila.config(chunks=2), caplog.at_level(logging.WARNING, logger="koila"):
        for _ in range(2):
            STORIES["saves_on_cpu"](koila.lazy)
    told = [record for record in caplog.records if HOOKS in record.getMessage()]
    assert len(told) == 1
    assert "test_surroundings.py" in told[0].getMessage()


def test_what_is_left_comes_back() -> None:
    """Hooks and modes are taken off in koila's work, put on again inside of it, and left as they
    were."""
    stack = surroundings._C

    def now() -> tuple[Any, ...]:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        seen = surroundings.is_transforming()
        return hooks, stack._len_torch_dispatch_stack(), stack._len_torch_function_stack(), seen

    nothing = (None, 0, 0, False)

    def look(x: Tensor) -> Tensor:
        before = now()
        assert before[-1]
        with surroundings.outside():
            assert now() == nothing
            with surroundings.inside():
                assert now() == before
                with surroundings.outside():
                    assert now() == nothing
                assert now() == before
            assert now() == nothing
        assert now() == before
        return x * 2

    with saved_tensors_hooks(id, repr), Scale(), Louder(), saved_tensors_hooks(repr, id):
        torch.func.vmap(look)(torch.ones(2))
        torch.jit.trace(look, torch.ones(2), check_trace=False)
    assert now() == nothing


def test_an_observer_of_koila_stays() -> None:
    class Observer(Scale):
        sees_koila = True

    with koila.config(chunks=3), Observer() as mode:
        h = koila.lazy(torch.ones(6, 2)).tanh()
        assert _core.real(h) is None, "calls inside are recorded"
        h.sum().item()
    assert mode.n == 3


def test_two_thousand_contexts() -> None:
    """Each that is met gets a number, however many there are, and each call its own."""
    x, weight = koila.lazy(torch.ones(2, 3)), torch.eye(3)
    dtypes = [torch.bfloat16, torch.float16]
    made = []
    try:
        for i in range(2000):
            torch._C._set_sm_carveout_experimental(i % 1000)
            with torch.autocast("cpu", dtypes[i // 1000]):
                made.append(x @ weight)
    finally:
        torch._C._set_sm_carveout_experimental(None)
    assert all(_core.real(number) is None for number in made), "all are recorded"
    assert [number.sum().item() for number in made[::400]] == [6] * 5
    assert [number.dtype for number in made[::1000]] == dtypes
