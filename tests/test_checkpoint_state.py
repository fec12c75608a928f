# SPDX-License-Identifier: Apache-2.0
"""Bodies of checkpoints that write what outlives them: torch runs them once more in backward, so it
moves statistics twice, and differentiates what the second run makes of what the first one left."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from oracle import Lazy, assert_seen, eager, tell
from stories import N_ROWS, each_split_further, rows
from test_bridge import Square
from training_lines import Counting

Body = Callable[["Model", Tensor, Tensor], Tensor]
BODIES: dict[str, Body] = {}


def add(body: Body) -> Body:
    BODIES[body.__name__] = body
    return body


class Model(nn.Module):
    """What bodies are made of."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=momentum)
        self.other = nn.BatchNorm1d(4)
        self.counting = Counting()
        self.double()


@add
def a_plain_batch(model: Model, x: Tensor, plain: Tensor) -> Tensor:
    made: Tensor = model.norm(plain) * x
    return made


@add
def a_plain_batch_first(model: Model, x: Tensor, plain: Tensor) -> Tensor:
    made: Tensor = model.norm(plain) * model.norm(model.linear(x))
    return made


@add
def a_plain_batch_last(model: Model, x: Tensor, plain: Tensor) -> Tensor:
    made: Tensor = model.norm(model.linear(x)) * model.norm(plain)
    return made


@add
def weights_alone(model: Model, x: Tensor, plain: Tensor) -> Tensor:
    made: Tensor = x * model.norm(model.linear.weight * 2)[0]
    return made


@add
def detached(model: Model, x: Tensor, plain: Tensor) -> Tensor:
    made: Tensor = model.linear(x) * model.norm(model.linear(x)).detach()
    return made


@add
def dropped(model: Model, x: Tensor, plain: Tensor) -> Tensor:
    made: Tensor = model.linear(x).tanh()
    model.norm(made)
    return made


@add
def one_in_another(model: Model, x: Tensor, plain: Tensor) -> Tensor:
    inner: Any = checkpoint(lambda a: model.norm(model.linear(a)), x, use_reentrant=False)
    made: Tensor = inner * model.norm(plain)
    return made


@add
def a_plain_one_in_another(model: Model, x: Tensor, plain: Tensor) -> Tensor:
    inner: Any = checkpoint(model.norm, plain, use_reentrant=False)
    made: Tensor = inner * model.linear(x)
    return made


@add
def functional(model: Model, x: Tensor, plain: Tensor) -> Tensor:
    norm = model.norm
    running = norm.running_mean, norm.running_var
    return F.batch_norm(model.linear(x), *running, norm.weight, norm.bias, True, 0.2)


@add
def functional_call(model: Model, x: Tensor, plain: Tensor) -> Tensor:
    weight = model.norm.weight * 2
    made: Tensor = torch.func.functional_call(model.norm, {"weight": weight}, (model.linear(x),))
    return made


@add
def in_evaluation(model: Model, x: Tensor, plain: Tensor) -> Tensor:
    model.other.eval()
    made: Tensor = model.linear(x) * model.other(x) + model.norm(x)
    model.other.train()
    return made


@add
def a_dropout_and_a_norm(model: Model, x: Tensor, plain: Tensor) -> Tensor:
    made: Tensor = F.dropout(model.norm(F.dropout(model.linear(x), 0.3)), 0.2)
    return made


@add
def a_buffer(model: Model, x: Tensor, plain: Tensor) -> Tensor:
    made: Tensor = model.counting(model.linear(x)).tanh()
    return made


@add
def a_buffer_and_a_norm(model: Model, x: Tensor, plain: Tensor) -> Tensor:
    made: Tensor = model.counting(model.norm(model.linear(x)))
    return made


def differentiate(model: Model, h: Tensor, x: Tensor) -> None:
    (model.last(h) + x).square().mean().backward()


def two_checkpoints(model: Model, h: Tensor, x: Tensor) -> None:
    loss = model.last(h).square().mean()
    (loss + checkpoint(model.norm, h * x, use_reentrant=False).sin().sum()).backward()


def not_there(model: Model, h: Tensor, x: Tensor) -> None:
    model.last(h).square().mean().backward(inputs=list(model.last.parameters()))


ENDS = [differentiate, two_checkpoints, not_there]


class Holder:
    """A model that is no attribute of a module."""

    def __init__(self, model: Model, body: Body) -> None:
        self.model, self.body = model, body

    def run(self, x: Tensor, plain: Tensor) -> Tensor:
        return self.body(self.model, x, plain)


CALLS: list[Callable[[Body, Model], Callable[..., Tensor]]] = [
    lambda body, model: lambda x, plain: body(model, x, plain),
    functools.partial,
    lambda body, model: Holder(model, body).run,
    lambda body, model: functools.partial(
        lambda x, plain, it: it[0](it[1]["m"], x, plain), it=(body, {"m": model})
    ),
]


def story(
    lazy: Lazy, name: str, end: Any, call: Any, momentum: float | None, is_reentrant: bool
) -> Any:
    model, first = Model(momentum), nn.Linear(4, 4).double()
    x, plain = lazy(rows(4)), rows(4)
    body = call(BODIES[name], model)
    h = checkpoint(body, first(x), plain, use_reentrant=is_reentrant)
    end(model, h, x)
    found = [p.grad for p in (*model.parameters(), *first.parameters())]
    return h, found, list(model.buffers())


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("name", BODIES)
@each_split_further
def test_equals_eager(
    chunks: int | None, name: str, is_reentrant: bool, end: Callable[..., None]
) -> None:
    told = functools.partial(
        story, name=name, end=end, call=CALLS[0], momentum=0.1, is_reentrant=is_reentrant
    )
    want, want_state = tell(told, eager)
    with koila.config(chunks=chunks):
        got, got_state = tell(told, koila.lazy)
    assert_seen(got, want, name, exact_bits=False)
    assert torch.equal(got_state, want_state)


@pytest.mark.parametrize("options", [{"chunks": 3}, {"memory_limit": "8 GiB"}], ids=str)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", BODIES)
def test_how_a_body_is_called(name: str, call: Any, options: dict[str, Any]) -> None:
    """Its modules are found wherever they are."""
    told = functools.partial(
        story, name=name, end=differentiate, call=call, momentum=None, is_reentrant=False
    )
    want, _ = tell(told, eager)
    with koila.config(**options):
        got, _ = tell(told, koila.lazy)
    assert_seen(got, want, name, exact_bits=False)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_module_that_is_given(is_reentrant: bool) -> None:
    """As an argument of the body."""

    def told(lazy: Lazy) -> Any:
        model = Model(0.1)
        h = model.last(lazy(rows(4)))
        h = checkpoint(lambda block, a: block(a), model.norm, h, use_reentrant=is_reentrant)
        h = checkpoint(lambda a, block: block(a), h, model.counting, use_reentrant=is_reentrant)
        h.tanh().sum().backward()
        return [p.grad for p in model.parameters()], list(model.buffers())

    want, _ = tell(told, eager)
    with koila.config(chunks=3):
        got, _ = tell(told, koila.lazy)
    assert_seen(got, want, "given", exact_bits=False)


def test_what_is_recorded() -> None:
    """A buffer that is only read, and one that another method writes, are no reason to go whole."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((4,), 2.0))
            self.register_buffer("table", torch.ones(4))

        def reset(self) -> None:
            self.table.zero_()

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).tanh()

    reads, linear = Reads(), nn.Linear(4, 4)
    with koila.config(chunks=3):
        h = checkpoint(reads, linear(koila.lazy(torch.randn(N_ROWS, 4))), use_reentrant=False)
        assert koila._core.real(h) is None
        h.sum().backward()
    report = koila.report()
    assert report is not None
    assert report.n_chunks == 3


class Sliced(nn.Module):
    """It writes a part of its buffer. From CPython 3.12 on that is an instruction of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean[:2] = 0.9 * self.mean[:2] + x.detach().mean(0)[:2]
        return x - self.mean


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_part_of_a_buffer_is_written(is_reentrant: bool) -> None:
    def told(lazy: Lazy) -> Any:
        linear, body = nn.Linear(4, 4).double(), Sliced().double()
        h = checkpoint(body, linear(lazy(rows(4))), use_reentrant=is_reentrant)
        h.tanh().sum().backward()
        return [p.grad for p in linear.parameters()], list(body.buffers())

    want, _ = tell(told, eager)
    with koila.config(chunks=3):
        got, _ = tell(told, koila.lazy)
    assert_seen(got, want, "part", exact_bits=False)


def hidden(buffer: Tensor, x: Tensor) -> None:
    buffer.lerp_(x.detach().mean(0), 0.1)


class Hides(nn.Module):
    """A buffer that a function writes which the class does not know by name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden(self.mean, x)  # type: ignore[arg-type]
        return x - self.mean


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_what_nobody_saw_coming_is_refused(is_reentrant: bool) -> None:
    model, linear = Hides(), nn.Linear(4, 4)
    h = linear(koila.lazy(torch.randn(N_ROWS, 4)))
    said = r"writes Hides\.mean \(.*test_checkpoint_state\.py:\d+\).*koila\.config\(chunks=1\)"
    with koila.config(chunks=3), pytest.raises(koila.KoilaError, match=said):
        checkpoint(model, h, use_reentrant=is_reentrant)


WRITES = {
    "in place": lambda tensor, h: tensor.add_(1),
    "of what it computes": lambda tensor, h: tensor.mul_(0.9).add_(h.detach().mean(0)),
    "an item": lambda tensor, h: tensor.__setitem__(0, 1.0),
    "as out": lambda tensor, h: torch.add(tensor, 1, out=tensor),
    "of a list": lambda tensor, h: torch._foreach_add_([tensor], 1),
}


@pytest.mark.parametrize("way", ["captured", "an attribute", "an argument", "in a list"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_writes_to_what_a_function_has_not_made_are_refused(
    is_reentrant: bool, write: str, way: str
) -> None:
    """Before the last tensor that is kept, so that torch's second run writes again."""
    linear, tensor = nn.Linear(4, 4), torch.zeros(4)
    linear.count, several = tensor, [tensor]  # type: ignore[assignment]

    def body(x: Tensor, *given: Tensor) -> Tensor:
        of = {"captured": tensor, "in a list": several[0]}.get(way)
        of = given[0] if given else linear.count if of is None else of
        WRITES[write](of, x)  # type: ignore[no-untyped-call]
        return linear(x).relu()  # type: ignore[no-any-return]

    h = nn.Linear(4, 4)(koila.lazy(torch.randn(N_ROWS, 4)))
    given = [tensor] if way == "an argument" else []
    said = r"writes a tensor of shape \[4\] .*test_checkpoint_state\.py:\d+"
    with koila.config(chunks=3), pytest.raises(koila.KoilaError, match=said):
        checkpoint(body, h, *given, use_reentrant=is_reentrant)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_statistics_without_a_gradient_are_refused(is_reentrant: bool) -> None:
    """torch stops its second run at the last tensor that was kept: before such a call, or after."""
    linear, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def body(x: Tensor) -> Tensor:
        with torch.no_grad():
            norm(x)
        return x.tanh()

    h = linear(koila.lazy(torch.randn(N_ROWS, 4)))
    said = r"of which no gradient is asked \(.*test_checkpoint_state\.py:\d+\)"
    with koila.config(chunks=3), pytest.raises(koila.KoilaError, match=said):
        checkpoint(body, h, use_reentrant=is_reentrant)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_statistics_that_are_read_are_refused(is_reentrant: bool) -> None:
    """torch's second run reads others, and its gradient is of what it makes of these."""
    linear, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def body(x: Tensor) -> Tensor:
        return norm(x) * norm.running_mean  # type: ignore[no-any-return]

    h = linear(koila.lazy(torch.randn(N_ROWS, 4)))
    said = r"running statistics .*test_checkpoint_state\.py:\d+.*koila\.config\(chunks=1\)"
    with koila.config(chunks=3), pytest.raises(koila.KoilaError, match=said):
        checkpoint(body, h, use_reentrant=is_reentrant).sum().backward()
    other = linear(koila.lazy(torch.randn(N_ROWS, 4)))
    with koila.config(chunks=3):  # outside of the body anybody may read them
        made = checkpoint(norm, other, use_reentrant=is_reentrant) * norm.running_mean
        made.sum().backward()


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("kind", [nn.Dropout, lambda: nn.BatchNorm1d(4), nn.Tanh])
def test_a_mode_that_is_set_meanwhile(kind: Callable[[], nn.Module], is_reentrant: bool) -> None:
    """torch's second run is in that mode. It is refused where the mode is asked for."""
    linear, body = nn.Linear(4, 4), kind()
    with koila.config(chunks=3):
        h = linear(koila.lazy(torch.randn(N_ROWS, 4)))
        loss = checkpoint(nn.Sequential(nn.Linear(4, 4), body), h, use_reentrant=is_reentrant).sum()
        body.eval()
        if isinstance(body, nn.Tanh):
            loss.backward()
            return
        said = r"was set to evaluation between forward and backward \(.*test_checkpoint_state\.py"
        with pytest.raises(koila.KoilaError, match=said):
            loss.backward()


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_hook_that_is_set_meanwhile(kind: str, is_reentrant: bool) -> None:
    """torch's second run calls it: one that halves a gradient would be left out."""
    linear, body = nn.Linear(4, 4), nn.Linear(4, 4)
    with koila.config(chunks=3):
        h = linear(koila.lazy(torch.randn(N_ROWS, 4)))
        loss = checkpoint(nn.Sequential(body, nn.Tanh()), h, use_reentrant=is_reentrant).sum()
        handle = getattr(body, f"register_{kind}_hook")(lambda *args: None)
        said = r"Linear in its function got or lost a hook .*test_checkpoint_state\.py"
        with pytest.raises(koila.KoilaError, match=said):
            loss.backward()
        handle.remove()
        loss.backward()
        assert linear.weight.grad is not None


@pytest.mark.usefixtures("nothing_logged")
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_hook_that_is_set_after_the_body_ran_live(
    is_reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As before, where a derivative that cannot be recorded made the calls run on the whole batch:
    autograd, and no program, then asks for the second run."""
    linear, body = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    with koila.config(chunks=3):
        h = linear(koila.lazy(torch.randn(N_ROWS, 4).double())).tanh()
        made = checkpoint(lambda x: body(x).tanh(), h, use_reentrant=is_reentrant)
        h.data.clamp_(-1, 1)
        pairs = body(made).t() @ made  # not sample by sample
        g = torch.autograd.grad(pairs.pow(2).sum(), made, create_graph=True)[0]
        assert "grad cannot be recorded" in caplog.text
        handle = body.register_full_backward_pre_hook(lambda m, go: (go[0] * 0.5,))
        said = r"Linear in its function got or lost a hook .*test_checkpoint_state\.py"
        with pytest.raises(koila.KoilaError, match=said):
            g.pow(2).sum().backward()
        handle.remove()


class Annealed(nn.Module):
    """Its temperature falls with each of its forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tau, self.n = nn.Linear(4, 4), 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.tau = max(self.tau * 0.9, 0.5)
        return (self.linear(x) / self.tau).tanh()


@pytest.mark.usefixtures("nothing_logged")
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_module_that_counts(is_reentrant: bool, caplog: pytest.LogCaptureFixture) -> None:
    """torch's second run counts, too, and the next step goes on from there."""
    torch.manual_seed(0)
    first, body = nn.Linear(4, 4).double(), Annealed().double()
    nets = [(first, body), copy.deepcopy((first, body))]
    for (linear, own), is_lazy in zip(nets, [False, True], strict=True):
        for i in range(2):
            x = torch.linspace(-1, 1 + i, N_ROWS * 4).double().view(N_ROWS, 4)
            with koila.config(chunks=3):
                h = linear(koila.lazy(x) if is_lazy else x).relu()
                checkpoint(own, h, use_reentrant=is_reentrant).pow(2).sum().backward()
    assert nets[0][1].n == nets[1][1].n == 4
    assert nets[0][1].tau == nets[1][1].tau
    wanted, found = (nn.ModuleList(pair).parameters() for pair in nets)
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)
    reason = "leaves this one to torch" if is_reentrant else "updates a number of its own"
    assert reason in (str(koila.report()) if is_reentrant else caplog.text)


class Cached(nn.Module):
    """It stores numbers that a second run leaves as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.length, self.width, self.n = nn.Linear(4, 4), 0, 4, 0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != self.length:
            self.length = len(x)
        self.n = self.width * 2
        return self.linear(x)  # type: ignore[no-any-return]


def test_a_module_that_stores_the_same_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with koila.config(chunks=3):
        h = nn.Linear(4, 4)(koila.lazy(torch.randn(N_ROWS, 4)))
        checkpoint(Cached(), h, use_reentrant=False).sum().backward()
    assert koila.report().n_chunks == 3
    assert "a number of its own" not in caplog.text


@pytest.mark.parametrize("chunks", [None, 1, 3])
@pytest.mark.parametrize("is_asked", [False, True])
def test_a_reentrant_one_gives_all_or_nothing(chunks: int | None, is_asked: bool) -> None:
    """As in torch."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    parameters = list(first.parameters())
    with koila.config(chunks=chunks):
        h = checkpoint(torch.tanh, first(koila.lazy(torch.randn(N_ROWS, 4))), use_reentrant=True)
        loss = last(h).sum()
        with pytest.raises(RuntimeError, match=r"incompatible with \.grad"):
            if is_asked:
                torch.autograd.grad(loss, parameters)
            else:
                loss.backward(inputs=parameters)


def test_gradients_of_some_inputs_only() -> None:
    """Torch gives a weight that only the body of a reentrant checkpoint reads no gradient, without
    a word, and raises where it is to go through the checkpoint; koila raises in both cases."""
    for inner in (True, False):
        first, last = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        with koila.config(chunks=2):
            h = first(koila.lazy(torch.randn(N_ROWS, 4, dtype=torch.float64)))
            loss = checkpoint(last, h, use_reentrant=True).pow(2).mean()
            inputs = list((last if inner else first).parameters())
            with pytest.raises(koila.KoilaError, match="only its function reads gets no gradient"):
                loss.backward(inputs=inputs)
        assert all(one.grad is None for one in inputs)


def raw_square(x: Tensor) -> Tensor:
    found: Tensor = Square.apply(x)  # type: ignore[no-untyped-call]
    return found


#: What of a step with a reentrant checkpoint torch differentiates for some tensors alone: its
#: derivatives go back live, or in a part that was cut off.
SOME: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "grad": lambda loss, w, _: torch.autograd.grad(loss, w),
    "grad of a value": lambda loss, _, h: torch.autograd.grad(loss, h),
    "grad with a graph": lambda loss, w, _: torch.autograd.grad(loss, w, create_graph=True),
    "backward": lambda loss, w, _: loss.backward(inputs=[w]),
    "backward to a value": lambda loss, _, h: loss.backward(inputs=[h]),
}


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("after", [torch.sin, raw_square], ids=["", "cut"])
@pytest.mark.parametrize("around", [None, True, False])
@pytest.mark.parametrize("ask", SOME)
def test_a_reentrant_checkpoint_refuses_gradients_of_some(
    ask: str, around: bool | None, after: Callable[[Tensor], Tensor], chunks: int
) -> None:
    """Also where no leaf is left out, and where the program runs live."""

    def body(h: Tensor) -> Tensor:
        return h.tanh() * 2

    def inner(h: Tensor) -> Any:
        return checkpoint(body, h, use_reentrant=True) * 2

    def run(lazy: Any) -> None:
        w = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        h = lazy(torch.arange(33, dtype=torch.float64).view(11, 3)) @ w
        k = checkpoint(body if around is None else inner, h, use_reentrant=around is not False)
        SOME[ask](after(k).pow(2).mean(), w, h)

    for lazy in (eager, koila.lazy):
        with koila.config(chunks=chunks), pytest.raises(RuntimeError) as raised:
            run(lazy)
        is_part = "only a part of its gradient" in str(raised.value)  # of `h`, behind a cut
        assert is_part or "checkpoint is incompatible with .grad()" in str(raised.value)
