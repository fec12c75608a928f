# SPDX-License-Identifier: Apache-2.0
"""Writes of what has its number because something was read meanwhile, as in a mixture of experts:
they stay recorded where nobody else has that memory, and show where somebody has."""

from __future__ import annotations

import operator
import textwrap
import weakref
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from allocations import Allocations
from chunked import split
from limits import there
from oracle import Lazy, eager

N_ROWS = 10


class Mixture(nn.Module):
    """As transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.gate, self.out = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.SiLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x).tanh()
        weights, chosen = torch.topk(F.softmax(self.gate(h), -1), 2, -1)
        final = torch.zeros_like(h)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for i in (mask.sum((-1, -2)) > 0).nonzero():
            place, row = torch.where(mask[int(i)])
            found = self.experts[int(i)](h[row]) * weights[row, place, None]
            final.index_add_(0, row, found)
        return self.out(h + final)


def step(lazy: Any) -> list[Tensor]:
    torch.manual_seed(1)
    model = Mixture().double()
    x, y = lazy(torch.randn(N_ROWS, 4, dtype=torch.float64), torch.randint(0, 2, (N_ROWS,)))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return [loss.detach()] + [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
def test_a_mixture_of_experts_is_cut(chunks: int) -> None:
    with split(chunks, rows=("linear", "softmax")):
        got = step(koila.lazy)
    for value, wanted in zip(got, step(lambda *given: given), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-14)


#: `out` has its number when the line runs; `see` is compared.
WRITES = (
    "out.add_(h); see(out.sum())",
    "v = out[:, 0]; float(v.sum()); out.add_(h); see(v.sum(), out.sum())",
    "out.add_(h); v = out[:, 0]; v.mul_(2); see(v.sum(), out.sum())",
    "a = out.numpy(); out.add_(x); see(torch.tensor(a.sum()), out.sum())",
    "s = out + h; out.add_(h); see(s.sum(), out.sum())",
    "s = (out * h).sum(); t = (out + 1).sum(); out.add_(x); see(t, out.sum())",
    "d = out.detach(); out.add_(x); see(d.sum())",
    "other = out; out += h; see(other.sum())",
    "out[:, 1] = h[:, 0]; see(out.pow(2).sum())",
    "out[1:3] = h[0]; see(out.pow(2).sum())",
    "with torch.no_grad(): out.add_(h)\nsee((out * h).sum())",
    "with torch.inference_mode(): out.add_(x)\nsee((out * h).sum())",
    "out.copy_(h); out.mul_(h); see(out.sum())",
    "out.add_(h); out.sum().item(); out.add_(h); see(out.pow(2).sum())",
    "out.zero_().add_(h); see(out.pow(2).sum())",
    "n = (out > 9).sum(); int(n); n += (x > 0).sum(); see((h * n).sum())",
    "m = out > 9; float(m.sum()); m |= h > 0; see((h * m).sum())",
)


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("text", WRITES)
def test_writes(text: str, chunks: int) -> None:
    def run(lazy: Any) -> list[Tensor]:
        torch.manual_seed(1)
        w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        seen: list[Tensor] = []
        x = lazy(torch.randn(N_ROWS, 4, dtype=torch.float64))
        h = x @ w
        env = {"torch": torch, "x": x, "h": h, "out": torch.zeros_like(h)}
        env["see"] = lambda *tensors: seen.extend(tensors)
        float(env["out"].sum())
        exec(text, env)
        loss = sum((t * (i + 1) for i, t in enumerate(seen)), h.pow(2).sum())
        loss.backward()
        return [torch.tensor(t.item()) for t in seen] + [w.grad]

    with koila.config(chunks=chunks):
        got = run(koila.lazy)
    for value, wanted in zip(got, run(lambda x: x), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)


class Flow(nn.Module):
    """Coupling layers; `total` is of plain torch, and the logarithms of their determinants are
    added to it. That of a layer which only scales by weights is plain."""

    def __init__(self, scales: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((64,), 0.1)) if scales else None
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        if self.scale is not None:
            x = x * self.scale.exp()
            total += self.scale.sum()
        for layer in self.layers:
            moved, scale = layer(x).chunk(2, 1)
            x = x * scale.tanh().exp() + moved
            total += scale.tanh().sum(1)
        return (x.square().sum(1) - total).mean()


def step_of_flow(lazy: Lazy, scales: bool) -> tuple[Allocations, list[Tensor | None]]:
    torch.manual_seed(1)
    model, x, memory = Flow(scales), torch.randn(2048, 64), Allocations()
    memory.count(list(model.parameters()), x)
    with memory:
        batch = lazy(x)
    with memory:
        model(batch).backward()
    return memory, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("scales", [False, True])
def test_a_sum_that_a_plain_tensor_starts(scales: bool) -> None:
    """`total += lazy` is planned as `total = total + lazy` is, also if `total` takes a gradient."""
    want, wanted = step_of_flow(eager, scales)
    for options in ({"chunks": 2}, {"chunks": 7}, {"memory_limit": 0}):
        if "memory_limit" in options:
            options = {"memory_limit": there() + want.left + (want.peak - want.left) * 3 // 10}
        with koila.config(**options):  # type: ignore[arg-type]
            got, gradients = step_of_flow(koila.lazy, scales)
        assert len(koila.report().programs) == 1
        assert got.peak - want.left < 0.6 * (want.peak - want.left)
        assert got.left <= want.left + 8  # the gradient that the tail sent, for the next step
        torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-5)


#: `out` is plain and has no name but this; the second: whether it stays plain.
PLAIN = {
    "out += h": False,
    "out -= h.tanh(); out *= h; out /= h.exp()": False,
    "n = torch.zeros(N_ROWS); n += h.sum(1); see(n)": False,
    "n = torch.zeros(()); n += h.sum(); n += 1; see(n)": False,
    "with torch.no_grad(): out += h": False,
    "for _ in range(3):\n    out += (h +\n            1)": False,
    "t = torch.float32; n = torch.zeros(N_ROWS, 4, dtype=t); n += h; see(n.double())": False,
    "m = torch.zeros(N_ROWS, dtype=torch.bool); m |= h[:, 0] > 0; see((h[:, 1] * m))": False,
    "other = out; out += h; see(other)": True,
    "some = [out]; out += h; see(some[0])": True,
    "v = out[:, 0]; out += h; see(v)": True,
    "v = out.detach(); out += h; see(v)": True,
    "a = out.numpy(); out += h.detach(); see(torch.from_numpy(a))": True,
    "a = out.tolist(); a = numpy.array(a); out = torch.from_numpy(a)\n"
    "out += h.detach(); see(torch.tensor(a))": True,
    "out.share_memory_(); out += h": True,
    "out.note = 3; out += h; see(h * out.note)": True,
    "some = []; out += (some.append(out), out := h)[1]; see(some[0])": True,
    "see(operator.iadd(out, h))": True,
    "out.add_(h)": False,
    "out.zero_().add_(h)": True,
    "out.add_(h); out.mul_(out)": False,
    "out[:, 0] = h[:, 0]": False,
    "out[1:3] = h[1:3]; out[:] = out + h": False,
    "for t in range(4):\n    out[:, t] = h[:, t] + 1": False,
    "n = torch.zeros(4, 4).double().index_add_(0, torch.arange(N_ROWS) % 4, h); see(n)": False,
    "def give(t):\n    t[:, 0] = h[:, 0]\n    return t\ngive(out)": True,
    "f = out.add_; f(h); f(h)": True,
    "torch.Tensor.add_(out, h)": True,
    "(out).add_(h)": True,
    "(lambda: out)().add_(h)": True,
    "out.view(-1)[:4] = h[0]": True,
    "out[:, 0] += h[:, 0]": True,
    "some = [out]; out[:, 0] = h[:, 0]; see(some[0])": True,
    "some = [out]; some[0][:, 0] = h[:, 0]; see(out * 2)": True,
    "other = out; out.add_(h); see(other)": True,
    "with torch.no_grad(): out[:, 0] = h[:, 0]": True,
    "out[:, 0] = h[:, 0].detach()": False,
    "out[0] = h.detach().sum(0)": True,
    "n = torch.zeros(4, N_ROWS).double(); n[0] = h[:, 0].detach(); see(n)": True,
    "n = torch.zeros(N_ROWS, 4).double(); n.scatter_(1, h.argmin(1, True), 1); see(n)": False,
    "n = torch.zeros(N_ROWS, 4); n[torch.arange(N_ROWS), h.argmin(1)] = 1; see(n.double())": False,
    "v = out[0]; out[:, 0] = h[:, 0]; see(v)": True,
    "out.index_add_(0, torch.arange(N_ROWS), out := h)": False,
    "p = out.view(-1); out += h; see(p)": True,
    "s = weakref.ref(out); out += h; see(s())": True,
    "see(out * h); out += h.detach()": True,
    # It takes a gradient itself.
    "out = out * w[0]; out += h; out += h.tanh()": False,
    "n = torch.zeros(N_ROWS).double(); n += w.sum(); n += h.sum(1); n *= h.sum(1); see(n)": False,
    "out = out + w[0]; out[:, 0] = h[:, 0]": False,
    "out = out + w[0]; see((out * w[1]).sum()); out += h": True,
    "out = out * w[0]; see((out * 2).sum()); out += h": False,
    "out = (out * w[0]).exp(); out += h": True,
    "out = out * w[0]; see(out.pow(2).sum()); out += h": True,
    "out = out * w[0]; v = out.detach(); out += h; see(v)": True,
    "out = out * w[0]; other = out; out += h; see(other)": True,
    "out = out * w[0]; out.retain_grad(); out += h": True,
    "out = out * w[0]; out.register_hook(lambda g: g * 2); out += h": True,
    "out = out * w[0]; out.grad_fn.register_hook(lambda g, _: (None, g[1] * 2)); out += h": False,
    "out = out * w[0]\nwith torch.no_grad(): out += h": True,
    "out.requires_grad_()\nwith torch.no_grad(): out += h": True,
}


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [2, 3, 7, N_ROWS])
@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("text", PLAIN)
def test_plain_tensors_that_only_a_name_holds(text: str, is_local: bool, chunks: int) -> None:
    """Others see a write; and errors are eager's."""

    def run(lazy: Any) -> tuple[list[Any], type]:
        torch.manual_seed(1)
        w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        seen: list[Tensor] = []
        h = lazy(torch.randn(N_ROWS, 4, dtype=torch.float64)) @ w
        env = {"torch": torch, "h": h, "w": w, "see": seen.append, "N_ROWS": N_ROWS}
        env |= {"operator": operator, "weakref": weakref, "numpy": numpy}
        env["kinds"] = kinds = list[type]()
        lines = "out = torch.ones(N_ROWS, 4, dtype=torch.float64)\n" + text.replace("; ", "\n")
        last = "n" if "n = " in text else "m" if "m = " in text else "out"
        lines += f"\nkinds.append(type({last})); see(out)"
        if is_local:
            lines = "def run():\n" + textwrap.indent(lines, "    ") + "\nrun()"
        exec(lines, env)
        loss = sum(((t * (i + 1)).sum() for i, t in enumerate(seen)), h.pow(2).sum())
        try:
            loss.backward()
        except RuntimeError as error:
            return [str(error).split(":")[0]], kinds[0]
        return [torch.tensor(t.tolist()) for t in seen] + [w.grad], kinds[0]

    with koila.config(chunks=chunks):
        got, kind = run(koila.lazy)
    wanted, _ = run(eager)
    if isinstance(wanted[0], str):
        assert got == wanted
        return
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    assert PLAIN[text] == (kind is not koila.LazyTensor)


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
def test_one_hot_codes_are_one_pass(chunks: int) -> None:
    """The codes of a quantizer, which older models write into zeros: if the codes were read for
    that, the encoder would run twice."""

    def run(lazy: Any) -> list[Tensor]:
        torch.manual_seed(1)
        encoder, book = nn.Linear(4, 3).double(), nn.Embedding(5, 3).double()
        x = lazy(torch.randn(N_ROWS, 4, dtype=torch.float64))
        z = encoder(x)
        code = torch.cdist(z, book.weight).argmin(1).unsqueeze(1)
        one_hot = torch.zeros(code.size(0), 5, dtype=torch.float64)
        one_hot.scatter_(1, code, 1)
        chosen = one_hot @ book.weight
        loss = F.mse_loss(chosen, z.detach()) + F.mse_loss(chosen.detach(), z)
        loss.backward()
        assert encoder.weight.grad is not None and book.weight.grad is not None
        return [loss.detach(), encoder.weight.grad, book.weight.grad, one_hot.sum(0)]

    with split(chunks, rows=("linear", "scatter_", "matmul")):
        got = run(koila.lazy)
    assert chunks == 1 or len(koila.report().programs) == 1
    torch.testing.assert_close(got, run(eager), rtol=1e-10, atol=1e-12)


def test_a_leaf_is_not_written() -> None:
    for lazy in (eager, koila.lazy):
        with koila.config(chunks=2):
            h = lazy(torch.randn(N_ROWS, 4))
            out = torch.zeros(N_ROWS, 4, requires_grad=True)
            with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
                out += h
        assert type(out) is Tensor


class Decoder(nn.Module):
    """It writes its steps into a plain tensor, as many recurrent models do."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.cell, self.wide, self.out = nn.GRUCell(32, 64), nn.Linear(64, 256), nn.Linear(256, 8)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        n_rows, n_steps, _ = x.shape
        outputs = torch.zeros(n_rows, n_steps, 64)
        h = torch.zeros(n_rows, 64)
        for t in range(n_steps):
            h = self.cell(x[:, t], h)
            outputs[:, t] = h
            assert not self.reads or bool((h.abs() <= 1).all())
        return self.out(F.gelu(self.wide(outputs)))


def step_of_decoder(lazy: Lazy, reads: bool = False) -> tuple[Allocations, list[Tensor | None]]:
    torch.manual_seed(1)
    model, x, memory = Decoder(reads), torch.randn(256, 12, 32), Allocations()
    memory.count(list(model.parameters()), x)
    with memory:
        batch = lazy(x)
    with memory:
        model(batch).square().mean().backward()
    return memory, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("share", [0.6, 0.35])
def test_a_plain_tensor_that_steps_are_written_into(share: float, reads: bool) -> None:
    """A model may read a number in each step. koila then keeps one copy of `outputs`, the current
    one: it drops the copy from before each write."""
    want, wanted = step_of_decoder(eager, reads)
    taken = want.peak - want.left
    with koila.config(memory_limit=int(there() + want.left + share * taken)):
        got, gradients = step_of_decoder(koila.lazy, reads)
    assert koila.report().programs[-1].n_chunks > 1
    assert len(koila.report().programs) == (13 if reads else 1)
    assert got.peak - want.left <= 1.05 * share * taken
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-6)


def test_whole_it_takes_what_eager_takes() -> None:
    want, wanted = step_of_decoder(eager)
    with koila.config(memory_limit=int(there() + 2 * want.peak)):
        got, gradients = step_of_decoder(koila.lazy)
    assert koila.report().n_chunks == 1
    assert len(koila.report().programs) == 1
    assert got.peak <= 1.02 * want.peak
    torch.testing.assert_close(gradients, wanted, rtol=0, atol=0)


def test_other_names_keep_nothing_alive() -> None:
    """Where Python copies a function's names to change one, the copy is not kept."""

    def run() -> None:
        other = torch.ones(4)
        seen = weakref.ref(other)
        out = torch.zeros(N_ROWS, 4)
        out[:, 0] = h[:, 0]
        assert type(out) is koila.LazyTensor
        del other
        assert seen() is None

    with koila.config(chunks=2):
        h = koila.lazy(torch.randn(N_ROWS, 4)) @ torch.randn(4, 4, requires_grad=True)
        run()


def test_what_locals_gave_is_kept() -> None:
    def run() -> None:
        names = locals()
        out = torch.zeros(N_ROWS, 4)
        out[:, 0] = h[:, 0]
        assert type(out) is koila.LazyTensor
        assert names.get("out", out) is out
        again = locals()
        assert again["out"] is out
        out[:, 1] = h[:, 1]
        assert again["out"] is out

    def held() -> None:
        out = torch.zeros(N_ROWS, 4)
        names = locals()
        out[:, 0] = h[:, 0]
        assert type(out) is torch.Tensor
        assert names["out"] is out

    with koila.config(chunks=2):
        h = koila.lazy(torch.randn(N_ROWS, 4)) @ torch.randn(4, 4, requires_grad=True)
        run()
        held()


@pytest.mark.parametrize("chunks", [2, N_ROWS])
def test_names_of_generators(chunks: int) -> None:
    def steps(h: Tensor) -> Any:
        out = torch.zeros(N_ROWS, 4, dtype=torch.float64)
        for t in range(4):
            out[:, t] = h[:, t].exp()
            yield out.sum(1)

    def run(lazy: Any) -> list[Tensor | None]:
        torch.manual_seed(1)
        w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        h = lazy(torch.randn(N_ROWS, 4, dtype=torch.float64)) @ w
        sum(total.pow(2).sum() for total in steps(h)).backward()
        return [w.grad]

    with koila.config(chunks=chunks):
        got = run(koila.lazy)
        assert koila.report().n_chunks == chunks
    torch.testing.assert_close(got, run(eager), rtol=1e-10, atol=1e-12)


def test_names_that_the_call_changes() -> None:
    """User code that runs in the call may give names of the function other values. They stay."""
    n_calls = 0

    class Index:
        def __index__(self) -> int:
            nonlocal n_calls
            n_calls += 1
            return 0

    def run(h: Tensor) -> None:
        n_here = 0

        class Within(Index):
            def __index__(self) -> int:
                nonlocal n_here
                n_here += 1
                return super().__index__()

        out = torch.zeros(N_ROWS, 4)
        out[Within()] = h[0]  # type: ignore[index]
        assert type(out) is koila.LazyTensor
        assert n_here == n_calls > 0

    with koila.config(chunks=2):
        run(koila.lazy(torch.randn(N_ROWS, 4)) @ torch.randn(4, 4, requires_grad=True))
