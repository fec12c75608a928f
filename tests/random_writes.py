"""Random programs as text: factories, writes of every kind, views before and after, masks, reads in
the middle, several batches, draws. A program that eager can run must give eager's numbers.

    python tests/random_writes.py --first 0 --count 1000

runs that many, and prints each that differs in its smallest form, as a script that can be run.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import (
    BinaryUfuncInfo,
    OpInfo,
    ReductionOpInfo,
    UnaryUfuncInfo,
)

import koila
from oracle import eager, plain

WIDTH = 4
COUNTS = (1, 2, 3, 7, 99)
#: Values above this hide what is added to them; programs that reach it are not compared.
LARGE = 1e6

# Templates. {f}, {g}, {h}: values; {m}: a mask; {i}: ints from 0 to 3, of the rows; {n}: a number
# that was read; {B}: the rows, written out; {d}: a dim; {q}: a scale.
KINDS: dict[str, list[str]] = {
    "make": [
        "{f}.new_zeros({f}.shape)",
        "{f}.new_ones({f}.shape)",
        "{f}.new_full({f}.shape, {q})",
        "{f}.new_zeros({f}.shape[0], 3)",
        "{f}.new_full(({f}.size(0), 4), {q})",
        "{f}.new_zeros({B}, 4)",
        "{f}.new_ones(4)",
        "torch.zeros_like({f})",
        "torch.ones_like({f})",
        "torch.full_like({f}, {q})",
        "torch.empty_like({f}).fill_({q})",
        "torch.zeros({B}, 4, dtype=D)",
        "torch.ones({f}.shape, dtype=D)",
        "torch.full((len({f}), 4), {q}, dtype=D)",
        "torch.arange({f}.shape[0], dtype=D)",
        "torch.arange({B}, dtype=D)[:, None]",
        "torch.linspace(0, 1, {f}.shape[0], dtype=D)",
        "torch.eye(4, dtype=D)",
        "torch.eye({f}.shape[0], dtype=D)",
        "F.one_hot({i}, 4).to(D)",
        "torch.nn.functional.one_hot({i}).to(D)",
        "torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=D)",
        "{f}.clone()",
        "torch.empty_like({f}).copy_({g})",
        "{f}.new_tensor([1.0, 2.0, 3.0, 4.0])",
    ],
    "compute": [
        "{f} + {g}",
        "{f} * {g}",
        "{f} - {q} * {g}",
        "{f} @ w",
        "{f} * v",
        "torch.tanh({f} @ w) + v",
        "{f}.tanh()",
        "({f} * {q}).sin()",
        "{f}.sigmoid() * 2",
        "{f} * {q} + 1",
        "F.relu({f})",
        "F.softplus({f})",
        "{f}.mean({d})",
        "{f}.sum({d}, keepdim=True)",
        "{f} * {f}.mean()",
        "{f} - {f}.mean(0)",
        "{f}.softmax(-1)",
        "{f}.cumsum({d}) / 3",
        "{f}.amax(-1, keepdim=True)",
        "{f}.var({d}, correction=0)",
        "torch.where({m}, {f}, {g})",
        "torch.where({f} > 0, {f}, {q})",
        "{f}.masked_fill({m}, {q})",
        "torch.cat([{f}, {g}], {d})",
        "torch.stack([{f}, {g}], {d})",
        "{f} * {n}",
        "{f}.contiguous() * 2",
        "{f}.repeat(2, 1) * {q}",
        "{f}.flip({d})",
        "{f}.gather(1, {i}[:, None])",
        "F.layer_norm({f}, {f}.shape[-1:])",
        "{f}[{m}].sum() + {g}",
        "v[{i}]",
        "F.embedding({i}, w)",
        "{f}.index_select({d}, torch.tensor([1, 0]))",
        "{f}.pow(2).sum() * {g} / 9",
        "F.cross_entropy({f}, {i}, reduction='none')",
        "{f}.lerp({g}, 0.3)",
        "torch.addcmul({f}, {g}, {f}, value=0.5)",
        "{f}.outer({g})",
    ],
    "mask": [
        "{f} > 0",
        "{f} < {g}",
        "{i} == 1",
        "({i} > 0)[:, None]",
        "({f} > 0).any(-1)",
        "({f} > 0.1).all(-1, keepdim=True)",
        "{m} & ({f} > -0.3)",
        "~{m}",
        "torch.ones_like({f}, dtype=torch.bool)",
        "torch.tril(torch.ones({f}.shape[0], {f}.shape[0], dtype=torch.bool))",
        "torch.arange({f}.shape[0]) < 3",
    ],
    "view": [
        "{f}[:2]",
        "{f}[:, 1:]",
        "{f}[:, 0]",
        "{f}[..., -1]",
        "{f}[1]",
        "{f}.T",
        "{f}.transpose(0, 1)",
        "{f}.view(-1)",
        "{f}.view({f}.shape)",
        "{f}.view_as({g})",
        "{f}.reshape_as({g})",
        "{f}.reshape(-1, 2)",
        "{f}.flatten()",
        "{f}.unsqueeze({d})",
        "{f}.squeeze()",
        "{f}.detach()",
        "{f}.select({d}, 0)",
        "{f}.narrow({d}, 0, 2)",
        "{f}.chunk(2, {d})[1]",
        "{f}.unbind({d})[0]",
        "{f}.diagonal()",
        "{f}.expand_as({g})",
        "{f}[None].expand(3, *{f}.shape)",
        "{f}[:, None]",
        "{f}.permute(1, 0)",
        "{f}.split(2, {d})[0]",
        "{f}.unfold(1, 2, 1)",
        "{f}.movedim(0, -1)",
        "{f}.contiguous()",
        "{f}.swapaxes(0, -1)",
        "{f}[::2]",
        "{f}[:, ::2]",
        "torch.atleast_2d({f})",
        "{f}.to(D)",
    ],
    "write": [
        "{f}[:, 1:] = {g}[:, :-1].clone()",
        "{f}[:, 0] = {q}",
        "{f}[0] = {q}",
        "{f}[:2] = {g}[:2].clone()",
        "{f}[1:] = {q}",
        "{f}[:, 1] = {g}[:, 0]",
        "{f}[..., 0] = {g}.mean()",
        "{f}[{m}] = {q}",
        "{f}[{m}] += 1",
        "{f}[{i} == 1] = {q}",
        "{f}[torch.arange({f}.shape[0]), {i}] = {q}",
        "{f}[torch.arange({f}.shape[0]), {i}] += {g}[..., 0]",
        "{f}[torch.tensor([0, 1])] = {q}",
        "{f}[:, torch.tensor([0, 2])] *= {q}",
        "{f}[:] = {g}",
        "{f}.add_({g})",
        "{f}.add_({g}, alpha={q})",
        "{f}.mul_({q})",
        "{f}.mul_({g})",
        "{f}.sub_({g}.mean())",
        "{f}.div_(2)",
        "{f}.copy_({g})",
        "{f}.copy_({g}.mean(0))",
        "{f}.fill_({q})",
        "{f}.zero_()",
        "{f}.masked_fill_({m}, {q})",
        "{f}.masked_fill_({f} > 0.5, 0.5)",
        "{f}.index_put_((torch.tensor([0, 1]),), {g}[:2].clone())",
        "{f}.index_put_(({i},), {g}, accumulate=True)",
        "{f}.scatter_(1, {i}[:, None], {q})",
        "{f}.scatter_(-1, {i}[:, None], {g})",
        "{f}.scatter_add_(1, {i}[:, None], {g})",
        "{f}.index_fill_({d}, torch.tensor([1]), {q})",
        "{f}.index_add_(0, torch.tensor([0, 1]), {g}[:2].clone())",
        "{f}.index_copy_(0, torch.tensor([1, 0]), {g}[:2].clone())",
        "{f}.masked_scatter_({m}, {g}.clone())",
        "{f}.relu_()",
        "{f}.tanh_()",
        "{f}.clamp_(min=-0.5)",
        "{f}.clamp_(max=0.7)",
        "{f}.sigmoid_()",
        "{f}.neg_()",
        "{f}.exp_()",
        "{f}.addcmul_({g}, {g})",
        "{f}.lerp_({g}, 0.3)",
        "{f}.detach().add_({q})",
        "{f}.detach()[0] += 1",
        "{f}.detach()[:, 0].mul_({q})",
        "{f}.view(-1).add_({q})",
        "{f}.view(-1)[:3].mul_({q})",
        "{f}[:, 1:].add_({g}[:, 1:])",
        "{f}.T.mul_({q})",
        "{f}.T[0] = {q}",
        "{f}.select({d}, 0).add_({g}.mean())",
        "{f}.fill_diagonal_({q})",
        "{f}.diagonal().add_(1)",
        "{f}.cumsum_(-1)",
        "{f}.unsqueeze_(-1)",
        "{f}.swapdims_(0, 1)",
        "{f}.t_()",
        "{f}.transpose_({d}, 0)",
        "{f}.squeeze_()",
        "{f}.unsqueeze_({d}).mul_({q})",
        "{f} += {g}",
        "{f} *= {q}",
        "{f} -= {g}.mean(0)",
        "F.relu({f}, inplace=True)",
        "F.leaky_relu_({f}, 0.2)",
        "{f}.where({m}, {g})",
        "{f}.data.mul_({q})",
    ],
    "out": [
        "torch.add({f}, {g}, out={h})",
        "torch.mul({f}, {q}, out={h})",
        "torch.sub({f}, 1, out={h})",
        "torch.clamp({f}, max=0.0, out={h})",
        "torch.exp({f}, out={h})",
        "torch.tanh({f}, out={h}.detach())",
        "torch.matmul({f}, w, out={h})",
        "torch.mm({f}, w.detach(), out={h})",
        "torch.sum({f}, 0, out={h})",
        "torch.sum({f}, 1, keepdim=True, out={h})",
        "torch.mean({f}, {d}, out={h})",
        "torch.cat([{f}, {g}], out={h})",
        "torch.stack([{f}, {g}], out={h})",
        "F.normalize({f}, dim=-1, out={h})",
        "torch.cumsum({f}, {d}, out={h})",
        "torch.where({m}, {f}, {g}, out={h})",
        "torch.maximum({f}, {g}, out={h})",
        "torch.addcmul({f}, {g}, {g}, out={h})",
        "torch.abs({f}, out={h}[:, :2])",
        "torch.gather({f}, 1, {i}[:, None], out={h})",
        "torch.index_select({f}, {d}, torch.tensor([1, 0]), out={h})",
        "torch.amax({f}, -1, out={h})",
        "torch.logsumexp({f}, -1, out={h})",
        "torch.softmax({f}, -1, out={h})",
        "torch.take({f}, {i}, out={h})",
        "torch.arange({f}.shape[0], out={h})",
        "torch.full({f}.shape, {q}, out={h})",
    ],
    "read": [
        "{f}.mean().item()",
        "float({f}.sum() / 9)",
        "float(({f} > 0).sum()) / 5",
        "{f}.flatten()[0].tolist()",
        "1.0 if bool(({f} > 0).any()) else 0.5",
        "sum({f}.flatten()[:2].tolist())",
        "0.3 + len({f}) / 10",
        "2.0 if {m}.all() else 0.7",
        "float(F.mse_loss({f}, {g}))",
        "float({f}.detach().abs().max())",
        "0.5 if torch.isfinite({f}).all() else 0.1",
    ],
    "draw": [
        "F.dropout({f}, 0.5)",
        "F.dropout({f}.sin(), 0.3)",
        "torch.rand_like({f})",
        "{f} + torch.randn_like({f})",
        "torch.bernoulli({f}.sigmoid())",
        "F.dropout({f}.T, 0.5)",
        "F.dropout({f}.transpose(0, 1).contiguous(), 0.4)",
        "F.feature_dropout({f}, 0.5)",
        "torch.empty_like({f}).normal_()",
        "torch.empty_like({f}).uniform_(-1, 1)",
        "torch.rand(3, dtype=D)",
        "torch.randn({f}.shape, dtype=D)",
        "F.dropout(torch.stack([{f}, {g}], 0), 0.5)",
        "F.dropout(torch.cat([{f}, {g}]), 0.5)",
        "F.rrelu({f}, training=True)",
        "torch.normal({f}, 1.0)",
        "F.dropout({f}.repeat(3, 1), 0.5)",
    ],
}


def _written(value: Any) -> str:
    return f"float('{value}')" if isinstance(value, float) else repr(value)


def _of_op(op: OpInfo) -> list[str]:
    """Calls with `out=` of an op, as its samples give it numbers beside tensors."""
    samples = op.sample_inputs_func(op, "cpu", torch.float64, False)
    calls = []
    for sample in itertools.islice(samples, 12):
        words = {k: value for k, value in sample.kwargs.items() if k not in ("dim", "keepdim")}
        given = [
            "{f}",
            *("{g}" if isinstance(arg, Tensor) else _written(arg) for arg in sample.args),
        ]
        if isinstance(op, ReductionOpInfo):
            given = given[:1] + ["{d}"] * ("dim" in sample.kwargs)
            words |= {"keepdim": True} if sample.kwargs.get("keepdim") else {}
        if any(isinstance(value, Tensor | tuple | list) for value in words.values()):
            continue
        named = [f"{k}={_written(value)}" for k, value in words.items()]
        calls.append(f"torch.{op.name}({', '.join([*given, *named, 'out={h}'])})")
    return list(dict.fromkeys(calls))


#: Every elementwise op and reduction of torch's own list that takes `out=`, each call in one of the
#: forms of its samples; the memory it is given may be of another shape or dtype.
OUTS: dict[str, list[str]] = {}
for _op in op_db:
    is_simple = isinstance(_op, UnaryUfuncInfo | BinaryUfuncInfo | ReductionOpInfo)
    if is_simple and _op.supports_out and torch.float64 in _op.dtypes:
        OUTS.setdefault(_op.name, []).extend(_of_op(_op))
#: How often a line of each kind is drawn.
WEIGHTS = {
    "make": 4,
    "compute": 6,
    "mask": 2,
    "view": 5,
    "write": 8,
    "out": 1,
    "read": 2,
    "draw": 2,
}
#: What may stand under no_grad, beside writes.
UNDER_NO_GRAD = ("compute", "view")
PLACE = re.compile(r"\{(\w)\}")


@dataclasses.dataclass(frozen=True)
class Program:
    """Lines of a program, and what it is run with."""

    lines: tuple[str, ...]
    n_rows: int
    n_others: int
    data: int  # seed of the numbers
    needs_input_gradient: bool = False
    is_read_first: bool = False

    def __str__(self) -> str:
        return (
            f"# rows {self.n_rows}, others {self.n_others}, data {self.data}, input gradient "
            f"{self.needs_input_gradient}, read first {self.is_read_first}\n"
            + "\n".join(self.lines)
        )


def start(program: Program, lazy: Any) -> dict[str, Any]:
    """The names a program begins with."""
    generator = torch.Generator().manual_seed(program.data)

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n, others = program.n_rows, program.n_others
    real = {
        "x": floats(n, WIDTH),
        "z": floats(n, WIDTH),
        "y": torch.randint(0, WIDTH, (n,), generator=generator),
        "t": floats(WIDTH, n),
        "o": floats(others, WIDTH),
        "w": floats(WIDTH, WIDTH).requires_grad_(),
        "v": floats(WIDTH).requires_grad_(),
    }
    if program.needs_input_gradient:
        real["x"].requires_grad_()
    env: dict[str, Any] = {"torch": torch, "F": F, "D": torch.float64, "real": real, **real}
    env["x"], env["z"], env["y"] = lazy(real["x"], real["z"], real["y"])
    env["t"] = lazy(real["t"], batch=1)
    env["o"] = lazy(real["o"])
    return env


def tensors_of(env: dict[str, Any]) -> dict[str, Tensor]:
    return {k: t for k, t in env.items() if isinstance(t, Tensor) and k not in ("w", "v")}


def finish(program: Program, env: dict[str, Any]) -> dict[str, Any]:
    """Run a program's backward; all that its author could look at."""
    tensors = tensors_of(env)
    seen: dict[str, Any] = {k: n for k, n in env.items() if isinstance(n, float)}
    if program.is_read_first:
        for tensor in tensors.values():
            _ = tensor.tolist()
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors.values():
        if tensor.requires_grad:
            n = tensor.numel()
            scale = torch.linspace(0.5, 1.5, n, dtype=torch.float64).view(tensor.shape)
            total = total + (tensor * scale).sum() / n
    seen["total"] = total
    if total.requires_grad:
        total.backward()
    for name, tensor in tensors.items():
        seen[name] = plain(tensor)
    seen["total"] = plain(total)
    for name, tensor in env["real"].items():
        seen[f"real {name}"] = plain(tensor)
        seen[f"gradient of {name}"] = None if tensor.grad is None else plain(tensor.grad)
    return seen


def run(program: Program, lazy: Any) -> tuple[dict[str, Any], Tensor] | None:
    """Run a program; what is seen, and where it leaves the generator. None: it is refused, as it
    may be, since it wrote a plain tensor that a recorded call reads."""
    koila._core.forget()
    torch.manual_seed(program.data)
    env = start(program, lazy)
    try:
        for line in program.lines:
            exec(line, env)
        return finish(program, env), torch.get_rng_state()
    except koila.StaleError:
        plains = [t for t in env.values() if isinstance(t, Tensor) and not koila.is_lazy(t)]
        if any(tensor._version > 0 for tensor in plains):
            return None
        raise


# Writing programs ---------------------------------------------------------------------------------


class Writer:
    """Writes one program, line by line, and runs it as it goes: a line that raises is dropped."""

    def __init__(self, seed: int, weights: dict[str, int]) -> None:
        self.random = random.Random(seed)
        self.weights = weights
        n_rows = self.random.choice([2, 3, 4, 4, 5, 6, 6, 7, 8, 11])
        n_others = self.random.choice([4, n_rows, 5, 9])
        flags = self.random.random() < 0.2, self.random.random() < 0.25
        self.program = Program((), n_rows, n_others, self.random.randrange(1000), *flags)
        torch.manual_seed(self.program.data)
        self.env = start(self.program, eager)
        self.lines: list[str] = []

    def _floats(self) -> list[str]:
        return self._names(lambda t: isinstance(t, Tensor) and t.dtype.is_floating_point)

    def _names(self, is_wanted: Callable[[Any], bool]) -> list[str]:
        names = [k for k, t in self.env.items() if k not in ("real", "w", "v") and is_wanted(t)]
        return names[-5:] * 2 + names

    def _pick(self, place: str) -> str:
        choose = self.random.choice
        if place in "fgh":
            return choose(
                self._names(lambda t: isinstance(t, Tensor) and t.dtype.is_floating_point)
            )
        if place == "m":
            masks = self._names(lambda t: isinstance(t, Tensor) and t.dtype == torch.bool)
            return choose(masks) if masks else "(y > 1)"
        if place == "n":
            return choose([*self._names(lambda t: isinstance(t, float)), "0.5"])
        fixed = {"i": ["y"], "B": [str(self.program.n_rows)], "d": ["0", "1", "-1"]}
        return choose(fixed.get(place, ["0.5", "-1.5", "2.0", "0.25"]))

    def _line(self, kind: str, name: str) -> str:
        picked: dict[str, str] = {}

        def fill(match: re.Match[str]) -> str:
            return picked.setdefault(match[1], self._pick(match[1]))

        choices = KINDS[kind]
        if kind == "out" and self.random.random() < 0.7:
            choices = OUTS[self.random.choice(list(OUTS))] or choices
        text = PLACE.sub(fill, self.random.choice(choices))
        if kind == "out" or (kind == "write" and self.random.random() < 0.15):
            return f"with torch.no_grad(): {text}"
        if kind == "write":
            return text
        is_under = kind in ("compute", "view") and self.random.random() < 0.1
        if is_under and kind in UNDER_NO_GRAD:
            return f"with torch.no_grad(): {name} = {text}"
        return f"{name} = {text}"

    def write(self, n_lines: int) -> Program:
        first = self.random.choice(
            ["h = x @ w", "h = z * v", "h = t * w[:, :1]", "h = x * 1", "h = o"]
        )
        assert self._runs(first)
        self.lines.append(first)
        kinds, weights = zip(*self.weights.items(), strict=True)
        for attempt in range(6 * n_lines):
            if len(self.lines) == n_lines:
                break
            kind = self.random.choices(kinds, weights)[0]
            line = self._line(kind, f"{kind[0]}{attempt}")
            if self._runs(line):
                self.lines.append(line)
        return dataclasses.replace(self.program, lines=tuple(self.lines))

    def _runs(self, line: str) -> bool:
        before = dict(self.env)
        try:
            exec(line, self.env)
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
            self.env.clear()
            self.env.update(before)
            return False
        new = [t for k, t in self.env.items() if isinstance(t, Tensor) and before.get(k) is not t]
        if any(t.numel() == 0 or t.numel() > 600 or t.dim() > 4 for t in new):
            self.env.clear()
            self.env.update(before)
            return False
        return True


def write(seed: int, weights: dict[str, int] | None = None) -> Program:
    """The program of a seed."""
    writer = Writer(seed, WEIGHTS if weights is None else weights)
    return writer.write(writer.random.randint(3, 12))


# Comparing ----------------------------------------------------------------------------------------


def is_sound(seen: dict[str, Any]) -> bool:
    """Whether a program's numbers can be compared: none is lost beside a larger one."""
    tensors = [t for t in seen.values() if isinstance(t, Tensor) and t.is_floating_point()]
    tensors += [torch.tensor(n) for n in seen.values() if isinstance(n, float)]
    return all(bool((t.abs() < LARGE).all()) for t in tensors)


def difference(got: dict[str, Any], want: dict[str, Any], is_exact: bool) -> str | None:
    """What differs, or None."""
    floats = [t for t in want.values() if isinstance(t, Tensor) and t.is_floating_point()]
    largest = max((float(t.abs().max()) for t in floats if t.numel()), default=1.0)
    for name, right in want.items():
        seen = got.get(name)
        if isinstance(right, Tensor) and isinstance(seen, Tensor):
            if seen.dtype != right.dtype or seen.shape != right.shape:
                return f"{name}: {tuple(seen.shape)} {seen.dtype}, eager {tuple(right.shape)}"
            if torch.equal(seen, right):
                continue
            if is_exact or not right.is_floating_point():
                return f"{name}: not the same bits"
            size = max(float(right.abs().max()), 1e-4 * largest)
            far = float((seen - right).abs().max())
            if not far <= 1e-8 * size:
                return f"{name}: {far / size:.2g} off"
        elif isinstance(right, float) and isinstance(seen, float):
            if not math.isclose(seen, right, rel_tol=1e-8, abs_tol=1e-8) or (
                is_exact and seen != right
            ):
                return f"{name}: {seen}, eager {right}"
        elif seen is not right and seen != right:
            return f"{name}: {seen}, eager {right}"
    return None


def failure(program: Program, chunks: int) -> str | None:
    """How a program differs from eager's in this many chunks; None: it does not, or eager fails."""
    try:
        wanted = run(program, eager)
    except Exception:
        return None
    if wanted is None or not is_sound(wanted[0]):
        return None
    try:
        with koila.config(chunks=chunks):
            seen = run(program, koila.lazy)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:600]
    if seen is None:
        return None
    (want, state), (got, got_state) = wanted, seen
    found = difference(got, want, chunks == 1)
    if found is None and not torch.equal(state, got_state):
        return "the generator is not where eager left it"
    return found


def is_persistent(program: Program, chunks: int) -> bool:
    """Whether a program differs with other numbers too: a mask of what is nearly zero does not."""
    others = [dataclasses.replace(program, data=program.data + more) for more in (1, 2, 3)]
    return sum(failure(other, chunks) is not None for other in others) >= 1


def failures(program: Program) -> Iterator[tuple[int, str]]:
    for chunks in COUNTS:
        found = failure(program, chunks)
        if found is not None and is_persistent(program, chunks):
            yield chunks, found


def shrink(program: Program, chunks: int) -> Program:
    """The same failure in as few lines as can be had by leaving lines out."""
    kind = (failure(program, chunks) or "")[:12]
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for i in reversed(range(len(program.lines))):
            lines = program.lines[:i] + program.lines[i + 1 :]
            less = dataclasses.replace(program, lines=lines)
            found = failure(less, chunks)
            is_same = found is not None and (found[:12] == kind or "off" in found) and found
            if is_same and is_persistent(less, chunks):
                program, is_smaller = less, True
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many programs")
    parser.add_argument("--draws", type=int, default=2, help="how often a line draws numbers")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they are")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    weights = {**WEIGHTS, "draw": options.draws}
    began, n_failed = time.monotonic(), 0
    for seed in itertools.islice(itertools.count(options.first), options.count):
        program = write(seed, weights)
        for chunks, found in failures(program):
            n_failed += 1
            small = program if options.no_shrink else shrink(program, chunks)
            again = failure(small, chunks) or found
            print(f"## seed {seed}, {chunks} chunks: {again}\n{small}\n", flush=True)
            break
    seconds = time.monotonic() - began
    print(f"{options.count} programs from {options.first}, {n_failed} failed, {seconds:.0f} s")
    return n_failed > 0


if __name__ == "__main__":
    sys.exit(main())
