# SPDX-License-Identifier: Apache-2.0
"""Random programs as text: factories, writes of every kind, views before and after, masks, reads in
the middle, several batches, draws. A program that eager can run must give eager's numbers.

    python tests/random_writes.py --first 0 --count 1000

runs that many, and prints each that differs in its smallest form, as a script that can be run.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import hashlib
import itertools
import math
import os
import random
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import koila
import random_lines
from oracle import eager, plain
from random_lines import KINDS, WEIGHTS

FOUND = (bool, int, float, str)

WIDTH = 4
COUNTS = (1, 2, 3, 7, 99)
#: Values above this hide what is added to them; programs that reach it are not compared.
LARGE = 1e6

#: What may stand under no_grad, beside writes.
UNDER_NO_GRAD = ("compute", "view", "op")
#: What may stand in a block.
IN_A_BLOCK = ("make", "compute", "view", "view", "write", "write", "write", "out", "read", "op")
CONTEXTS = ("with torch.no_grad()",) * 5 + (
    "with torch.enable_grad()",
    "with torch.no_grad(), torch.enable_grad()",
    "with torch.set_grad_enabled(False)",
    "with torch.inference_mode()",
)
#: How often a line of a kind is written anew, where it does not fit the values that are there.
N_TRIES = {"op": 5, "op in place": 5, "op out": 5, "block": 3}
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
        "p": floats(2, n, 3),
        "u": floats(WIDTH, WIDTH),
        "w": floats(WIDTH, WIDTH).requires_grad_(),
        "v": floats(WIDTH).requires_grad_(),
    }
    if program.needs_input_gradient:
        real["x"].requires_grad_()
    modules: dict[str, Any] = {"torch": torch, "F": F, "np": np, "copy": copy, "pytree": pytree}
    modules["StaleError"] = koila.StaleError  # it may be refused, and no program is to hide that
    env: dict[str, Any] = {**modules, "D": torch.float64, "lazy": lazy, "real": real, **real}
    env["x"], env["z"], env["y"] = lazy(real["x"], real["z"], real["y"])
    env["t"] = lazy(real["t"], batch=1)
    env["o"] = lazy(real["o"])
    env["p"] = lazy(real["p"], batch=1)
    env["u"] = lazy(real["u"], batch=None)
    return env


def is_square(tensor: Tensor) -> bool:
    return tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2]


def _memory(value: Any) -> int | None:
    is_tensor = isinstance(value, Tensor) and value.layout == torch.strided
    return value.untyped_storage().data_ptr() if is_tensor else None


def tensors_of(env: dict[str, Any]) -> dict[str, Tensor]:
    return {k: t for k, t in env.items() if isinstance(t, Tensor) and k not in ("w", "v")}


def copied(tensor: Tensor) -> Tensor:
    """A plain copy; of what has its tensor without the detour of a deep copy."""
    real = koila._core.real(tensor) if koila.is_lazy(tensor) else tensor
    return plain(tensor) if real is None or real.layout != torch.strided else real.detach().clone()


def finish(program: Program, env: dict[str, Any]) -> dict[str, Any]:
    """Run a program's backward; all that its author could look at."""
    tensors = tensors_of(env)
    seen: dict[str, Any] = {k: n for k, n in env.items() if type(n) in FOUND and k[:2] != "__"}
    if program.is_read_first:
        for tensor in tensors.values():
            _ = tensor.tolist()
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors.values():
        if tensor.requires_grad:
            tensor = torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor
            n = tensor.numel()
            scale = torch.linspace(0.5, 1.5, n, dtype=torch.float64).view(tensor.shape)
            total = total + (tensor * scale).sum() / n
    seen["total"] = total
    if total.requires_grad:
        total.backward()
    for name, tensor in tensors.items():
        seen[name] = copied(tensor)
    seen["total"] = copied(total)
    for name, tensor in env["real"].items():
        seen[f"real {name}"] = copied(tensor)
        seen[f"gradient of {name}"] = None if tensor.grad is None else copied(tensor.grad)
    return seen


class Outcome(NamedTuple):
    """What is seen of a program."""

    seen: dict[str, Any]
    state: Tensor  # of the generator
    has_plain_graph: bool  # which is older than the recorded calls: sums are in another order


def has_plain_graph(program: Program, env: dict[str, Any]) -> bool:
    """Whether a line makes a graph of plain tensors alone: a variable, or a term of a call."""
    names = {name for name, value in tensors_of(env).items() if koila.is_lazy(value)}
    plains = {k for k, t in env.items() if isinstance(t, Tensor) and t.requires_grad} - names
    if any(not env[name].is_leaf for name in plains):
        return True
    terms = (ast.Subscript, ast.BinOp, ast.UnaryOp, ast.Call)
    for node in itertools.chain.from_iterable(ast.walk(ast.parse(s)) for s in program.lines):
        if isinstance(node, terms):
            used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            if used & plains and not used & names:
                return True
    return False


def run(program: Program, lazy: Any) -> Outcome | None:
    """Run a program. None: it is refused, as it may be, since it wrote a plain tensor that a
    recorded call reads, or memory behind torch's back."""
    koila._core.forget()
    torch.default_generator.manual_seed(program.data)  # the public one formats a stack
    env = start(program, lazy)
    try:
        for line in program.lines:
            exec(line, env)
        is_plain = has_plain_graph(program, env)
        return Outcome(finish(program, env), torch.get_rng_state(), is_plain)
    except koila.StaleError:
        plains = [t for t in env.values() if isinstance(t, Tensor) and not koila.is_lazy(t)]
        if any(not t.is_inference() and t._version > 0 for t in plains):
            return None
        if any(".data" in line for line in program.lines):
            return None  # where a gradient would need that, no version tells
        raise


# Writing programs ---------------------------------------------------------------------------------


class Writer:
    """Writes one program, line by line, and runs it as it goes: a line that raises is dropped."""

    def __init__(self, seed: int, weights: dict[str, float]) -> None:
        self.random = random.Random(seed)
        self.weights = weights
        n_rows = self.random.choice([2, 3, 4, 4, 5, 6, 6, 7, 8, 11])
        n_others = self.random.choice([4, n_rows, 5, 9])
        flags = self.random.random() < 0.2, self.random.random() < 0.25
        self.program = Program((), n_rows, n_others, self.random.randrange(1000), *flags)
        torch.default_generator.manual_seed(self.program.data)
        self.env = start(self.program, eager)
        self.lines: list[str] = []

    def _floats(self) -> list[str]:
        return self._names(lambda t: isinstance(t, Tensor) and t.dtype.is_floating_point)

    def _names(self, is_wanted: Callable[[Any], bool]) -> list[str]:
        names = [k for k, t in self.env.items() if k not in ("real", "w", "v") and is_wanted(t)]
        return names[-5:] * 2 + names

    def _pick(self, place: str) -> str:
        choose = self.random.choice
        if place in "efgh":
            return choose(self._floats())
        if place == "s":
            square = [k for k in self._floats() if is_square(self.env[k])]
            return choose([*square, f"({choose(self._floats())}.T @ x)", "(x.T @ x + u)"])
        if place == "m":
            masks = self._names(lambda t: isinstance(t, Tensor) and t.dtype == torch.bool)
            return choose(masks) if masks else "(y > 1)"
        if place == "j":
            return choose(self._names(lambda t: isinstance(t, Tensor) and t.dtype == torch.long))
        if place == "n":
            return choose([*self._names(lambda t: isinstance(t, float)), "0.5"])
        fixed = {"i": ["y"], "B": [str(self.program.n_rows)], "d": ["0", "1", "-1"]}
        return choose(fixed.get(place, ["0.5", "-1.5", "2.0", "0.25"]))

    def _pick_apart(self, place: str, others: list[str]) -> str:
        """A value that shares no memory with those that a line names already."""
        used = {_memory(self.env.get(name)) for name in (*others, "y")}
        kind = "f" if place in "PQR" else "j"
        for _ in range(10):
            name = self._pick(kind)
            if _memory(self.env[name]) not in used:
                return name
        return "torch.empty(0, dtype=D)" if kind == "f" else "torch.empty(0, dtype=torch.long)"

    def _text(self, kind: str, name: str) -> str:
        picked: dict[str, str] = {}

        def fill(match: re.Match[str]) -> str:
            place = match[1]
            if place not in picked and place in "PQRJK":
                picked[place] = self._pick_apart(place, list(picked.values()))
            return picked.setdefault(place, self._pick(place))

        if kind.startswith("op"):
            choices = random_lines.calls(kind, self.random.choice(random_lines.names(kind)))
        else:
            choices = KINDS[kind]
        text = self.random.choice(choices) if choices else "None"
        return PLACE.sub(fill, text).replace("{name}", name)

    def _line(self, kind: str, name: str) -> str:
        text = self._text(kind, name)
        is_shut = "\n" in text or text.startswith(("for", "with", "del", "if"))
        if is_shut or kind in ("grad", "fail"):
            return text
        if kind in ("out", "op out") and self.random.random() < 0.8:
            return f"with torch.no_grad(): {text}"
        if kind in ("write", "op in place") and self.random.random() < 0.15:
            return f"with torch.no_grad(): {text}"
        if kind in ("write", "out", "op in place", "op out"):
            return text
        if kind in UNDER_NO_GRAD and self.random.random() < 0.1:
            return f"with torch.no_grad(): {name} = {text}"
        return f"{name} = {text}"

    def _block(self, name: str) -> str:
        """A block of two or three lines without gradients, or with them after all."""
        lines = []
        for part in range(self.random.randint(2, 3)):
            kind = self.random.choice(IN_A_BLOCK)
            text = self._text(kind, f"{name}{'abc'[part]}")
            if "\n" in text or text.startswith(("for", "with")):
                continue
            is_made = kind not in ("write", "op in place", "op out", "out")
            lines.append(f"{name}{'abc'[part]} = {text}" if is_made else text)
        return "\n    ".join([f"{self.random.choice(CONTEXTS)}:", *(lines or ["pass"])])

    def write(self, n_lines: int) -> Program:
        first = self.random.choice(
            ["h = x @ w", "h = z * v", "h = t * w[:, :1]", "h = x * 1", "h = o", "h = p * w[0, 0]"]
        )
        assert self._runs(first)
        self.lines.append(first)
        kinds, weights = zip(*self.weights.items(), strict=True)
        for attempt in range(6 * n_lines):
            if len(self.lines) == n_lines:
                break
            kind = self.random.choices(kinds, weights)[0]
            name = f"{kind[0]}{attempt}"
            for _ in range(N_TRIES.get(kind, 1)):
                line = self._block(name) if kind == "block" else self._line(kind, name)
                if self._runs(line):
                    self.lines.append(line)
                    break
        return dataclasses.replace(self.program, lines=tuple(self.lines))

    def _runs(self, line: str) -> bool:
        before = dict(self.env)
        try:
            exec(line, self.env)
        except Exception:  # the errors of all of torch, numpy and Python
            self.env.clear()
            self.env.update(before)
            return False
        new = [t for k, t in self.env.items() if isinstance(t, Tensor) and before.get(k) is not t]
        if any(t.numel() == 0 or t.numel() > 600 or t.dim() > 4 for t in new):
            self.env.clear()
            self.env.update(before)
            return False
        return True


def write(seed: int, weights: dict[str, float] | None = None) -> Program:
    """The program of a seed."""
    writer = Writer(seed, WEIGHTS if weights is None else weights)
    return writer.write(writer.random.randint(3, 12))


# Comparing ----------------------------------------------------------------------------------------


def is_sound(seen: dict[str, Any]) -> bool:
    """Whether a program's numbers can be compared: none is lost beside a larger one."""
    found = [t for t in seen.values() if isinstance(t, Tensor)]
    if any(t.layout != torch.strided for t in found):
        return False
    tensors = [t for t in found if t.is_floating_point() or t.is_complex()]
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
            if is_exact or not (right.is_floating_point() or right.is_complex()):
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


def wanted_of(program: Program) -> Outcome | None:
    """What eager makes of a program; None where it fails, or where its numbers say little."""
    text = str(program)
    if "checkpoint" in text and ".data" in text:
        return None  # eager's second run of the body sees what was written meanwhile
    try:
        wanted = run(program, eager)
    except Exception:
        return None
    return wanted if wanted is not None and is_sound(wanted.seen) else None


def failure(program: Program, chunks: int, wanted: Outcome | None = None) -> str | None:
    """How a program differs from eager's in this many chunks; None: it does not, or eager fails."""
    wanted = wanted_of(program) if wanted is None else wanted
    if wanted is None:
        return None
    try:
        with koila.config(chunks=chunks):
            seen = run(program, koila.lazy)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:600]
    if seen is None:
        return None
    is_exact = chunks == 1 and not seen.has_plain_graph
    found = difference(seen.seen, wanted.seen, is_exact)
    if found is None and not torch.equal(seen.state, wanted.state):
        return "the generator is not where eager left it"
    return found


def is_persistent(program: Program, chunks: int) -> bool:
    """Whether a program differs with other numbers too: a mask of what is nearly zero does not."""
    others = [dataclasses.replace(program, data=program.data + more) for more in (1, 2, 3)]
    return sum(failure(other, chunks) is not None for other in others) >= 1


def nudged(*tensors: Tensor, batch: int | None = 0) -> Any:
    """In place of lazy(): plain tensors, changed in their last bits."""
    del batch
    for tensor in tensors:
        if tensor.is_floating_point():
            by = torch.linspace(-1, 1, tensor.shape[-1], dtype=torch.float64)
            tensor.data.mul_(1 + 1e-14 * by)
    return tensors[0] if len(tensors) == 1 else tensors


def is_conditioned(program: Program, wanted: Outcome) -> bool:
    """Whether eager's own numbers stay what they are where the inputs change in their last bits: a
    matrix that is singular but for rounding has a determinant that says nothing."""

    seen = run(program, nudged)
    return seen is not None and difference(seen.seen, wanted.seen, False) is None


def bits(program: Program) -> str:
    """A digest of all that eager's author could look at."""
    seen = run(program, eager)
    assert seen is not None
    tensors = [t for t in seen.seen.values() if isinstance(t, Tensor)]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def is_repeated(program: Program) -> bool:
    """Whether eager has the same bits in other processes: where memory is decides some of them."""
    found = set()
    for _ in range(8):
        command = f"import random_writes as r; print(r.bits(r.{program!r}))"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", command],
            env=env,
            capture_output=True,
            check=True,
        )
        found.add(done.stdout)
    return len(found) == 1


def failures(program: Program) -> Iterator[tuple[int, str]]:
    wanted = wanted_of(program)
    for chunks in COUNTS if wanted is not None else ():
        found = failure(program, chunks, wanted)
        if found is None or wanted is None or not is_persistent(program, chunks):
            continue
        if is_repeated(program) if "same bits" in found else is_conditioned(program, wanted):
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
    weights: dict[str, float] = {**WEIGHTS, "draw": options.draws}
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
