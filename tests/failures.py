# SPDX-License-Identifier: Apache-2.0
"""Steps in which memory runs out at a call of one's choice, forward or backward.

`python tests/failures.py` lets every call of every case fail (some 20 minutes).

A *case* is a step that hands each thing that runs the program (a backward, a read) to `at`. There
a call of torch's fails, which call and how often being said by a `Fault`. What comes through must
be what eager computes; what is refused must leave all as it was, and come through when asked again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import koila
from koila.planning import planner, plans, second_axis
from koila.running import replay
from oracle import Lazy, assert_seen, eager, tell

N_ROWS = 12
#: With which they begin: twice the chunks are 4, then 8, then 12; then there are segments, 2 to 64,
#: and pieces of a second axis, 2 to 64.
CHUNKS = 2
N_TRIES = 20

At = Callable[[Callable[[], Any]], Any]


# Faults -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fault:
    """Which tries fail: the first `n_times`, where chunks have more than `rows` rows."""

    name: str
    n_times: int
    rows: int = 0

    @property
    def is_survived(self) -> bool:
        """Whether one of the tries goes through."""
        return self.rows > 0 or self.n_times < 4


FAULTS = (
    Fault("once", 1),
    Fault("three times", 3),
    Fault("until smaller", N_TRIES, rows=2),
    Fault("always", N_TRIES),
)


class Failing(TorchDispatchMode):
    """Let one call of each try fail: the one that is number `call` of the try."""

    sees_koila = True

    def __init__(self, fault: Fault | None, call: int) -> None:
        super().__init__()
        self.fault, self.call = fault, call
        self.n_calls = 0
        self.most = 0  # calls of the first try
        self.tries: list[int] = []  # rows of the largest chunk of each
        self.n_failed = 0

    def begin(self, rows: int) -> None:
        """Begin a try."""
        self.tries.append(rows)
        self.n_calls = 0

    def is_due(self) -> bool:
        """Whether this call fails."""
        if self.fault is None or not self.tries or self.n_calls != self.call:
            return False
        return len(self.tries) <= self.fault.n_times and self.tries[-1] > self.fault.rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if makes_tensor(func) and not any(t.device.type == "meta" for t in tensors):
            if self.is_due():
                self.n_failed += 1
                self.n_calls += 1
                raise torch.OutOfMemoryError(f"injected into {func}")
            self.n_calls += 1
            if len(self.tries) == 1:
                self.most = max(self.most, self.n_calls)
        return func(*args, **(kwargs or {}))


def makes_tensor(func: Any) -> bool:
    """Whether a call takes memory for its result: no view, and no write."""
    results = func._schema.returns
    return any(r.alias_info is None and "Tensor" in str(r.type) for r in results)


@contextlib.contextmanager
def planned(failing: Failing) -> Iterator[None]:
    """Begin each program in `CHUNKS` chunks, and tell of each try."""
    made, send_back = replay.Replay.__init__, second_axis.send_back
    is_part = False  # of a try, as the program of a head is
    n_before: int | None = None  # calls before the first try of the part

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal n_before
        made(self, *args, **kwargs)
        sizes = [stop - start for grid in self.grids.values() for start, stop in grid]
        if not is_part:
            failing.begin(max(sizes, default=0))
        elif n_before is None:
            n_before = failing.n_calls
        else:
            failing.n_calls = n_before  # a part that is tried again makes its calls again

    def run_part(*args: Any) -> None:
        nonlocal is_part, n_before
        is_part, n_before = True, None
        try:
            send_back(*args)
        finally:
            is_part = False

    with (
        unittest.mock.patch.object(planner, "why_whole", lambda: None),
        unittest.mock.patch.object(planner, "plan", lambda *_: plans.Plan(CHUNKS)),
        unittest.mock.patch.object(replay.Replay, "__init__", begin),
        unittest.mock.patch.object(second_axis, "send_back", run_part),
    ):
        yield


# What must not change ---------------------------------------------------------------------------


def look(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Copies of all that is in memory, and which tensors the gradients are.

    To ask plain torch for running statistics would run the call that is to write them.
    """
    found: dict[str, Any] = {"generator": torch.get_rng_state()}
    with torch._C.DisableTorchFunctionSubclass():
        for name, tensor in tensors.items():
            found[name] = tensor.detach().clone()
            found[f"gradient of {name}"] = None if tensor.grad is None else tensor.grad.clone()
            found[f"which gradient of {name}"] = tensor.grad
    return found


def assert_untouched(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Assert that nothing has changed, byte for byte."""
    for name, value in before.items():
        if name.startswith("which"):
            assert now[name] is value, f"{name} is another tensor"
        elif isinstance(value, Tensor):
            assert now[name] is not None, f"{name} is gone"
            assert torch.equal(now[name], value), f"{name} changed"
        else:
            assert now[name] is value, f"{name} changed"


# Cases ------------------------------------------------------------------------------------------


class Case:
    """A step: `make` its tensors, and `run` it. What `run` returns is compared with eager's."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = self.make().double()
        self.x = torch.randn(N_ROWS, 6, dtype=torch.float64)
        self.y = torch.randint(0, 5, (N_ROWS,))
        self.prepare()

    def make(self) -> nn.Module:
        """Return the model."""
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 5))

    def prepare(self) -> None:
        """Do what comes before the step."""

    def run(self, lazy: Lazy, at: At) -> Any:
        """Run the step."""
        x, y = lazy(self.x, self.y)
        loss = F.cross_entropy(self.model(x), y)
        at(loss.backward)
        return loss

    def tensors(self) -> dict[str, Tensor]:
        """Return what the user has."""
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        return named | {"x": self.x}


class Dropout(Case):
    """Two dropouts, and class weights."""

    def make(self) -> nn.Module:
        layers = nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.1)
        return nn.Sequential(*layers, nn.Linear(8, 5))


class Norm(Case):
    """Batch normalization in training, twice."""

    def make(self) -> nn.Module:
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)
        return nn.Sequential(*layers, nn.BatchNorm1d(8, momentum=None), nn.Tanh(), nn.Linear(8, 5))


class NormInPlace(Case):
    """Convolutions, normalization and dropout; gradients are there already."""

    def make(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)),
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(24, 5),
        )

    def prepare(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)


class Contrastive(Case):
    """All rows against all rows, with a temperature that is learned."""

    def prepare(self) -> None:
        self.model.register_parameter("scale", nn.Parameter(torch.tensor(2.0).double()))

    def run(self, lazy: Lazy, at: At) -> Any:
        x = lazy(self.x)
        one, other = (F.normalize(self.model(x * k), dim=1) for k in (1.0, 0.5))
        logits = one @ other.T * self.model.scale.exp()
        loss = F.cross_entropy(logits, torch.arange(N_ROWS)) + F.cross_entropy(
            logits.T, torch.arange(N_ROWS)
        )
        at(loss.backward)
        return loss, logits


class Writes(Case):
    """Writes in place, into views and into what was made for it."""

    def run(self, lazy: Lazy, at: At) -> Any:
        x, y = lazy(self.x, self.y)
        hidden = self.model[0](x)
        hidden[:, :2] *= 3
        hidden += x[:, 1:2]
        held = x.new_zeros(N_ROWS, 8)
        held[:, 1:] = hidden[:, :-1]
        held.masked_fill_(held > 2, 2)
        out = self.model[1:](held).clone()
        out[:, 0].add_(x[:, 0])
        loss = F.cross_entropy(out, y)
        at(loss.backward)
        return loss, out


class Ignored(Case):
    """Labels that do not count, class weights, and a root: the barrier keeps values."""

    def run(self, lazy: Lazy, at: At) -> Any:
        self.y[::4] = -100
        x, y = lazy(self.x, self.y)
        weight = torch.arange(1.0, 6.0).double()
        loss = F.cross_entropy(self.model(x), y, weight=weight, ignore_index=-100).sqrt()
        at(loss.backward)
        return loss


class Read(Case):
    """Values that are read before backward."""

    def make(self) -> nn.Module:
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)
        return nn.Sequential(*layers, nn.Linear(8, 5))

    def run(self, lazy: Lazy, at: At) -> Any:
        x, y = lazy(self.x, self.y)
        out = self.model(x)
        loss = F.cross_entropy(out, y)
        seen = [at(loss.item), at((out.argmax(1) == y).sum().item)]
        at((loss * 2).backward)
        return seen, loss


class Hooks(Case):
    """Hooks on values and on parameters, whose gradients are there already."""

    def prepare(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
            parameter.register_hook(lambda gradient: gradient * 2)

    def run(self, lazy: Lazy, at: At) -> Any:
        x, y = lazy(self.x, self.y)
        hidden = self.model[:2](x)
        seen: list[Tensor] = []
        hidden.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 3)
        hidden.retain_grad()
        loss = F.cross_entropy(self.model[2:](hidden), y)
        at(loss.backward)
        return loss, hidden.grad, seen[-1]


class TwoBatches(Case):
    """A batch with labels and one without, and a second step that adds to the gradients."""

    def run(self, lazy: Lazy, at: At) -> Any:
        other = torch.randn(N_ROWS - 3, 6, dtype=torch.float64)
        losses = []
        for _ in range(2):
            x, y = lazy(self.x, self.y)
            z = lazy(other)
            loss = F.cross_entropy(self.model(x), y) + self.model(z).pow(2).mean().sqrt()
            at(loss.backward)
            losses.append(loss)
        return losses


class Attention(Case):
    """Heads, dropout of weights by hand and inside the kernel."""

    def make(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(6, 24), nn.LayerNorm(8), nn.Linear(8, 5)])

    def run(self, lazy: Lazy, at: At) -> Any:
        first, norm, last = self.model
        x, y = lazy(self.x, self.y)
        q, k, v = first(x).view(N_ROWS, 3, 2, 4).unbind(1)
        by_hand = F.dropout((q @ k.transpose(1, 2)).softmax(-1), 0.2) @ v
        fused = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], dropout_p=0.2)
        loss = F.cross_entropy(last(norm((by_hand + fused[:, 0]).flatten(1))), y)
        at(loss.backward)
        return loss


class Noise(Case):
    """Noise that is drawn between the layers, and after the step."""

    def run(self, lazy: Lazy, at: At) -> Any:
        x = lazy(self.x)
        hidden = self.model[0](x)
        mean, spread = hidden.chunk(2, 1)
        z = mean + torch.randn_like(spread) * spread.exp()
        rebuilt = self.model[1:](torch.cat([z, mean], 1))
        loss = F.mse_loss(rebuilt, x[:, :5]) + 0.1 * (mean.pow(2) + spread.exp() - spread).mean()
        at(loss.backward)
        return loss, torch.rand(3)


class Recurrent(Case):
    """An LSTM over time-major steps, with dropout between its layers."""

    def make(self) -> nn.Module:
        return nn.ModuleList([nn.LSTM(2, 4, num_layers=2, dropout=0.3), nn.Linear(4, 5)])

    def run(self, lazy: Lazy, at: At) -> Any:
        x, y = lazy(self.x, self.y)
        out, _ = self.model[0](x.view(N_ROWS, 3, 2).transpose(0, 1))
        loss = F.cross_entropy(self.model[1](out[-1]), y)
        at(loss.backward)
        return loss


class Asked(Case):
    """A teacher without gradients; gradients that are asked for, of the batch too."""

    def run(self, lazy: Lazy, at: At) -> Any:
        self.x.requires_grad_()
        x, y = lazy(self.x, self.y)
        with torch.no_grad():
            target = self.model(x).softmax(1)
        out = self.model(x)
        loss = F.kl_div(out.log_softmax(1), target, reduction="batchmean") + F.cross_entropy(out, y)
        inputs = [self.x, *self.model.parameters()]
        found = at(lambda: torch.autograd.grad(loss, inputs, retain_graph=True))
        return loss, found


class Outside(Case):
    """Weights made by plain calls: what torch's own backward does then is not the program's."""

    def prepare(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.others = [torch.randn(5, 6).double().requires_grad_() for _ in range(2)]
        self.others[0].grad = torch.randn_like(self.others[0])

    def run(self, lazy: Lazy, at: At) -> Any:
        x, y = lazy(self.x, self.y)
        weights = [other.sin().exp() for other in self.others]
        loss = F.cross_entropy(self.model(x) + x @ (weights[0] + weights[1]).T, y)
        at(lambda: loss.backward(retain_graph=True))
        return loss

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"first": self.others[0], "second": self.others[1]}


CASES: dict[str, type[Case]] = {
    case.__name__: case
    for case in (
        Dropout,
        Norm,
        NormInPlace,
        Contrastive,
        Writes,
        Ignored,
        Read,
        Hooks,
        TwoBatches,
        Attention,
        Noise,
        Recurrent,
        Asked,
        Outside,
    )
}


# Running ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """What came of one step: its result, how often a call failed, how often it was refused."""

    seen: Any = None
    n_failed: int = 0
    n_refused: int = 0
    n_calls: int = 0
    is_delivering: bool = False  # while torch hands out the gradients: no other try follows
    n_places: int = 0


def run(
    name: str, lazy: Lazy, fault: Fault | None = None, call: int = -1, place: int = 0
) -> Outcome:
    """Run a step; at its `place`-th use of `at` a call fails.

    A refusal must change nothing, and is asked again.
    """
    made = Outcome()

    def story(lazy: Lazy) -> Any:
        case = CASES[name]()

        def at(go: Callable[[], Any]) -> Any:
            is_place = made.n_places == place
            made.n_places += 1
            if lazy is eager:
                return go()
            if not is_place:
                with planned(Failing(None, -1)):
                    return go()
            failing = Failing(fault, call)
            before = look(case.tensors())
            try:
                with planned(failing), failing:
                    return go()
            except torch.OutOfMemoryError as error:
                made.is_delivering = not isinstance(error, koila.MemoryLimitError)
                made.n_refused += 1
            finally:
                made.n_failed, made.n_calls = failing.n_failed, failing.most
            assert_untouched(look(case.tensors()), before)
            with planned(Failing(None, -1)):
                return go()

        result = case.run(lazy, at)
        named = case.tensors()
        return result, named, {name: tensor.grad for name, tensor in named.items()}

    made.seen = tell(story, lazy)
    return made


@functools.cache
def run_eager(name: str) -> Outcome:
    """Run a step without koila."""
    return run(name, eager)


@functools.cache
def count_calls(name: str, place: int) -> int:
    """Count the calls of the first try at a place, 0 where there is no such place."""
    return run(name, koila.lazy, place=place).n_calls


def assert_survived(name: str, fault: Fault, call: int, place: int) -> None:
    """Assert that a step in which a call fails ends as eager's, tried or asked again."""
    try:
        got, want = run(name, koila.lazy, fault, call, place), run_eager(name)
    finally:
        koila._core.forget()
    assert_seen(got.seen[0], want.seen[0], "seen", exact_bits=False)
    assert torch.equal(got.seen[1], want.seen[1]), "the generator is not where eager left it"
    if got.n_failed and not got.is_delivering:
        assert bool(got.n_refused) != fault.is_survived, f"refused {got.n_refused} times"


def main() -> None:
    """Let every call of every case fail, and print what came of it."""
    print("case            place  calls  fault          through  refused  wrong")
    for name in CASES:
        for place in range(run_eager(name).n_places):
            n_calls = count_calls(name, place)
            for fault in FAULTS:
                wrong = []
                for call in range(n_calls):
                    try:
                        assert_survived(name, fault, call, place)
                    except Exception as error:
                        wrong.append(f"call {call}: {error}")
                n_right = n_calls - len(wrong)
                through = n_right if fault.is_survived else 0
                print(
                    f"{name:15} {place:5} {n_calls:6}  {fault.name:14} {through:7} "
                    f"{n_right - through:8} {len(wrong):6}  {wrong[:1] or ''}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
