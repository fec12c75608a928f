# SPDX-License-Identifier: Apache-2.0
"""torch.compile: a compiled function gets real tensors in place of lazies, so that its backend
runs; of a lazy that it refers to, koila says that the calls on it are not compiled."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as each
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import koila
from koila.planning import logs
from oracle import Programs, assert_same_in_chunks, run_of_rows

N_ROWS = 7

n_calls = 0


def twice(graph: Any, _: Any) -> Any:
    """A backend whose numbers show that it ran."""

    def run(*args: Any) -> Any:
        global n_calls
        n_calls += 1
        assert not any(koila.is_lazy(arg) for arg in args)
        return tuple(out * 2 if isinstance(out, Tensor) else out for out in graph(*args))

    return run


def compiled(function: Any, **words: Any) -> Any:
    return torch.compile(function, backend=twice, **words)


Net = nn.Module
PROGRAMS = program = Programs()


@program
def a_function(x: Tensor, y: Tensor, net: Net) -> Any:
    f = compiled(torch.sin)
    return f(net(x)).sum() + f(net(x) * 2).sum()


@program
def the_whole_graph(x: Tensor, y: Tensor, net: Net) -> Any:
    return compiled(lambda a: a.sin(), fullgraph=True)(net(x))


@program
def decorated(x: Tensor, y: Tensor, net: Net) -> Any:
    @torch.compile(backend=twice)
    def loss(a: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(a, target)

    return loss(net(x), target=y)


@program
def a_module(x: Tensor, y: Tensor, net: Net) -> Any:
    return compiled(net)(x).sin()


@program
def a_module_in_place(x: Tensor, y: Tensor, net: Net) -> Any:
    net.compile(backend=twice)
    return net(x).sin()


@program
def with_statistics(x: Tensor, y: Tensor, net: Net) -> Any:
    norm = nn.BatchNorm1d(4).double()
    out = compiled(nn.Sequential(net, norm, nn.ReLU()))(x)
    return cross_entropy(out, y), norm.running_mean


@program
def nested_arguments(x: Tensor, y: Tensor, net: Net) -> Any:
    f = compiled(lambda given, more: {"sum": given["a"] + more[0], "list": [more[0].sin()]})
    made = f({"a": net(x)}, more=[x[:, :4]])
    return made["sum"], made["list"][0]


@program
def a_graph_break(x: Tensor, y: Tensor, net: Net) -> Any:
    def f(a: Tensor) -> Tensor:
        a = a.sin()
        torch._dynamo.graph_break()
        return a.cos()

    return compiled(f)(net(x))


@program
def a_write(x: Tensor, y: Tensor, net: Net) -> Any:
    h = net(x) * 1
    return torch.compile(lambda a, b: a.add_(b), backend="eager")(h, x[:, :4]), h


@program
def ahead_of_time(x: Tensor, y: Tensor, net: Net) -> Any:
    return torch.compile(lambda a, b: a.sin() * b, backend="aot_eager")(net(x), x[:, :4])


@program
def without_gradients(x: Tensor, y: Tensor, net: Net) -> Any:
    with torch.no_grad():
        return compiled(lambda a: a.sin())(net(x))


@program
def one_in_another(x: Tensor, y: Tensor, net: Net) -> Any:
    f = compiled(lambda a: a.sin())
    return compiled(lambda a: f(a) + 1)(net(x))


@program
def in_checkpoints(x: Tensor, y: Tensor, net: Net) -> Any:
    f = compiled(lambda a: a.sin() * a)
    direct = checkpoint(f, net(x), use_reentrant=False)
    reentrant = checkpoint(f, net(x), use_reentrant=True)
    return direct + reentrant + checkpoint(lambda a: f(net(a)), x, use_reentrant=False)


@program
def in_a_forward(x: Tensor, y: Tensor, net: Net) -> Any:
    f = compiled(lambda a: a.sin())

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Any:
            return a * f(x[:, :4])

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * f(x[:, :4])

    return Function.apply(net(x))


@program
def in_a_hook(x: Tensor, y: Tensor, net: Net) -> Any:
    h = net(x)
    f = compiled(lambda a: a.sin())
    h.register_hook(lambda g: f(g * x[:, :4]))
    return h.sin()


@program
def an_optimized_function(x: Tensor, y: Tensor, net: Net) -> Any:
    return torch._dynamo.optimize(twice)(lambda a: a.cos())(net(x))


# The higher-order ops compile what they are given


@program
def a_condition(x: Tensor, y: Tensor, net: Net) -> Any:
    h = net(x)
    plain = torch.linspace(0, 1, 4).double()
    one = torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))
    two = torch.cond(x.sum() > -100, lambda a, b: a * b, lambda a, b: a + b, (h, plain))
    return one + two


@program
def loops(x: Tensor, y: Tensor, net: Net) -> Any:
    h = net(x).detach()
    start = torch.zeros(4).double()
    scanned = scan(lambda carry, a: (carry + a, carry * a), start, h)
    looped: Any = while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, a.sin()), (torch.tensor(0), h)
    )
    return scanned, looped[1], associative_scan(torch.add, h, 0, combine_mode="generic")


@program
def a_map(x: Tensor, y: Tensor, net: Net) -> Any:
    return each(lambda a: a.sin(), net(x))


@program
def attention(x: Tensor, y: Tensor, net: Net) -> Any:
    with torch.no_grad():
        q = net(x)[None, None].expand(2, 2, N_ROWS, 4)
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score * 2 + i)


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's own, in eager too
@pytest.mark.parametrize("name", PROGRAMS)
def test_runs_compiled(name: str) -> None:
    def run(lazy: Any, chunks: int | None) -> list[Tensor]:
        torch._dynamo.reset()
        return run_of_rows(PROGRAMS[name], lazy, chunks)

    assert_same_in_chunks(run, N_ROWS)


BEFORE = """
import torch
f = torch.compile(lambda a: a.sin(), backend=lambda graph, _: lambda *a: [graph(*a)[0] * 2])
import koila
x = koila.lazy(torch.ones(3, 2))
assert torch.equal(f(x) * 1, torch.ones(3, 2).sin() * 2)
"""

AFTER = """
import torch, koila, sys
x = koila.lazy(torch.ones(3, 2))
assert "torch._dynamo" not in sys.modules
f = torch.compile(lambda a: a.sin(), backend=lambda graph, _: lambda *a: [graph(*a)[0] * 2])
assert torch.equal(f(x) * 1, torch.ones(3, 2).sin() * 2)
"""


@pytest.mark.parametrize("script", [BEFORE, AFTER])
def test_compiled_before_koila_is_imported_or_after(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True, timeout=900)


def test_a_call_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The function runs on the whole batch, which the log and the report say."""
    torch._dynamo.reset()
    logs.logged.clear()
    with koila.config(chunks=3), caplog.at_level(logging.WARNING, "koila"):
        x = koila.lazy(torch.ones(N_ROWS, 2).double())
        assert torch.equal(
            compiled(nn.Identity())(x.sin()) * 1, torch.ones(N_ROWS, 2).double().sin()
        )
    assert "Identity is not recorded" in caplog.text
    assert "since torch.compile compiles it as it is" in caplog.text
    assert "torch.compile compiles it as it is" in str(koila.report())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_torchs_own_backends_keep_the_numbers(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The calls are recorded, uncompiled, so that they can run in chunks; the log says so."""
    torch._dynamo.reset()
    logs.logged.clear()
    net = nn.Linear(2, 3).double()
    data = torch.randn(N_ROWS, 2).double()
    net(data).sin().sum().backward()
    want = net.weight.grad
    f = torch.compile(lambda a: net(a).sin(), backend=backend)
    with koila.config(chunks=3), caplog.at_level(logging.WARNING, "koila"):
        net.weight.grad = None
        h = f(koila.lazy(data))
        assert koila._core.real(h) is None
        h.sum().backward()
        assert koila.report().n_chunks == 3
    torch.testing.assert_close(net.weight.grad, want, rtol=1e-10, atol=1e-12)
    assert "runs uncompiled, with the same numbers" in caplog.text


def test_a_module_that_torch_compiles_in_chunks() -> None:
    torch._dynamo.reset()
    net = torch.compile(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double(), backend="eager")
    with koila.config(chunks=3):
        net(koila.lazy(torch.randn(N_ROWS, 2).double())).pow(3).sum().backward()
        assert koila.report().n_chunks == 3
    torch._dynamo.reset()
    with koila.config(chunks=1):
        x = koila.lazy(torch.randn(N_ROWS, 2).double())
        assert koila._core.real(net(x)) is not None, "it runs compiled"


class Scaled(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, a: Tensor) -> Tensor:
        return a * self.scale


@pytest.mark.parametrize("is_module", [False, True])
def test_a_captured_lazy_is_named(is_module: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    scale = koila.lazy(torch.ones(N_ROWS, 2).double()) * 3
    f = compiled(Scaled(scale) if is_module else lambda a: a * scale)
    with caplog.at_level(logging.WARNING, "koila"):
        out = f(torch.ones(2).double())
    assert torch.equal(out * 1, torch.full((N_ROWS, 2), 3.0).double())
    told = [
        record.message for record in caplog.records if "leaves calls uncompiled" in record.message
    ]
    assert told, caplog.text
    assert "test_compiled.py" in told[0]
    assert "scale" in told[0]
    assert "pass that tensor as an argument" in told[0]
    assert "not all of it is compiled" in str(koila.report())


#: Functions that are compiled as one graph and refer to a lazy `k`.
CAPTURING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "fullgraph": lambda a, k: compiled(lambda a: a * k, fullgraph=True)(a),
    "cond": lambda a, k: torch.cond(a.sum() > 0, lambda a: a * k, torch.cos, (a,)),
    "scan": lambda a, k: scan(lambda carry, one: (carry + one * k[0], one), a[0], a),
    "while_loop": lambda a, k: while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, a * k), (torch.tensor(0), a)
    ),
    "map": lambda a, k: each(lambda one: one * k[0], a),
    "flex_attention": lambda a, k: flex_attention(
        *[a[None, None]] * 3, score_mod=lambda score, b, h, i, j: score + k[i, 0]
    ),
}


@pytest.mark.filterwarnings("ignore:flex_attention called:UserWarning")  # in eager too
@pytest.mark.parametrize("chunks", [None, 3])
@pytest.mark.parametrize("name", CAPTURING)
def test_one_graph_around_a_lazy_is_refused(name: str, chunks: int | None) -> None:
    torch._dynamo.reset()
    with koila.config(chunks=chunks):
        k = koila.lazy(torch.ones(N_ROWS, 2).double()) * 3
        with pytest.raises(koila.KoilaError, match=r"test_compiled.py:\d+\).* as an operand"):
            CAPTURING[name](torch.ones(N_ROWS, 2).double(), k)
        assert torch.equal(k * 1, torch.full((N_ROWS, 2), 3.0).double())


@pytest.mark.parametrize("chunks", [None, 1, 3])
def test_what_a_captured_lazy_needs_runs_uncompiled(chunks: int | None) -> None:
    """What is read runs in koila, whose functions dynamo would compile as the user's."""
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
    x, y = koila.lazy(torch.randn(N_ROWS, 6).double(), torch.randint(0, 4, (N_ROWS,)))
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    with koila.config(chunks=chunks):
        k = cross_entropy(net(x), y)
        got = torch.compile(lambda a: (a.sin() * k.item()).cos() + k, backend=backend)(
            torch.ones(3)
        )
        torch.testing.assert_close(got * 1, (torch.ones(3).sin() * k.item()).cos() + k * 1)
    assert len(graphs) == 1, [graph.code for graph in graphs]


def test_of_plain_tensors_nothing_changes() -> None:
    global n_calls
    torch._dynamo.reset()
    koila.lazy(torch.ones(2))
    n_calls, f = 0, compiled(lambda a: a.sin())
    assert torch.equal(f(torch.ones(2)), torch.ones(2).sin() * 2)
    assert torch.equal(f(torch.ones(2)), torch.ones(2).sin() * 2)
    assert n_calls == 2
