# SPDX-License-Identifier: Apache-2.0
"""Random training scripts as text: models, hooks, contexts, losses, optimizers, state read and
written between, several steps. A script that eager can run must give eager's numbers.

    python tests/random_training.py --first 0 --count 1000

runs that many, and prints each that differs in its smallest form, as a script that can be run. What
lines may be there is in `training_lines.py`.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import itertools
import logging
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import koila
import training_lines
from oracle import eager
from random_writes import copied, difference, is_sound, nudged
from training_lines import COMMON, INPUTS, KINDS, MODELS, OPTIMIZERS, STEPS, WIDTH

#: None: what koila does by itself, which for programs as small as these is one run of the whole.
COUNTS = (None, 1, 2, 3, 7, 99)
PLACE = re.compile(r"\{(\w+)\}")
FOUND = (bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class Program:
    """The text of a script, and what it is run with."""

    text: str
    n_rows: int
    data: int  # seed of the numbers
    kind: str  # of its batch

    def __str__(self) -> str:
        return f"# {self.kind}, {self.n_rows} rows, data {self.data}\n{self.text}"


class Notes(dict[str, list[Any]]):
    """What the hooks of a script saw: each call of one, and the sum of what it was given."""

    def __call__(self, name: str, value: Any) -> Any:
        is_plain = isinstance(value, Tensor) and not koila.is_lazy(value)
        self.setdefault(name, []).append(float(value.detach().sum()) if is_plain else 0.0)
        return value

    def only_called(self, name: str, value: Any) -> Any:
        """Note a call that may be given a lazy, of which nothing is read."""
        self.setdefault(name, []).append(0.0)
        return value


def start(program: Program, lazy: Any) -> dict[str, Any]:
    """The names a script begins with."""
    env = {name: getattr(training_lines, name) for name in COMMON}
    make = INPUTS[program.kind]

    def batch(i: int, n_rows: int = program.n_rows) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(program.data * 100 + i)
        labels = torch.randint(0, WIDTH, (n_rows,), generator=generator)
        return make(n_rows, generator), labels

    def floats(*shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(program.data)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {**env, "lazy": lazy, "batch": batch, "floats": floats, "note": Notes()}


class Outcome(NamedTuple):
    """What is seen of a script."""

    seen: dict[str, Any]
    state: Tensor  # of the generator


def _look(name: str, value: Any, seen: dict[str, Any]) -> None:
    """Add what is seen of one thing a script named."""
    if isinstance(value, Tensor):
        seen[name] = copied(value)
        is_kept = value.is_leaf or value.retains_grad
        gradient = value.grad if is_kept else None
        seen[f"gradient of {name}"] = None if gradient is None else copied(gradient)
    elif isinstance(value, nn.Module):
        for part, tensor in [*value.named_parameters(), *value.named_buffers()]:
            _look(f"{name}.{part}", tensor, seen)
        seen[f"training of {name}"] = str([m.training for m in value.modules()])
    elif isinstance(value, torch.optim.Optimizer):
        _look(f"state of {name}", value.state_dict()["state"], seen)
    elif isinstance(value, dict):
        for key, part in value.items():
            _look(f"{name}[{key}]", part, seen)
    elif isinstance(value, list | tuple):
        seen[f"length of {name}"] = len(value)
        for i, part in enumerate(value):
            _look(f"{name}[{i}]", part, seen)
    elif isinstance(value, FOUND):
        seen[name] = value


def finish(program: Program, env: dict[str, Any]) -> dict[str, Any]:
    """All that a script's author could look at."""
    seen: dict[str, Any] = {}
    begun = start(program, eager)
    for name, value in list(env.items()):
        if name == "note":  # parameters get their gradients in any order
            value = {key: sorted(numbers) for key, numbers in value.items()}
        if name == "note" or (name not in begun and not name.startswith("__")):
            _look(name, value, seen)
    return seen


@contextlib.contextmanager
def _left_as_found() -> Iterator[None]:
    """What a script may leave behind, or raise in the midst of, is undone."""
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)


def run(program: Program, lazy: Any) -> Outcome:
    """Run a script."""
    koila._core.forget()
    torch.default_generator.manual_seed(program.data)  # the public one formats a stack
    env = start(program, lazy)
    with _left_as_found():
        exec(compile(program.text, "<script>", "exec"), env)
        return Outcome(finish(program, env), torch.get_rng_state())


# Writing scripts ----------------------------------------------------------------------------------


class Writer:
    """Writes one script, line by line, and runs it as it goes: a line that raises is dropped."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        kind = choose(list(INPUTS))
        self.program = Program("", choose([2, 3, 4, 5, 6, 7, 8, 11]), seed % 1009, kind)
        torch.default_generator.manual_seed(self.program.data)
        self.env = start(self.program, eager)
        self.lines: list[str] = []
        self.n_batches = 0

    def _names(self, is_wanted: Callable[[Any], bool]) -> list[str]:
        begun = (*COMMON, "plain", "center")
        names = [k for k, t in self.env.items() if k not in begun and is_wanted(t)]
        return names[-4:] * 2 + names

    def _is_features(self, value: Any) -> bool:
        sizes = (self.program.n_rows, WIDTH)
        return isinstance(value, Tensor) and value.shape == sizes and value.is_floating_point()

    def _pick(self, place: str) -> str:
        choose = self.random.choice
        if place in ("f", "g"):
            return choose(self._names(self._is_features))
        if place == "s":  # a value that has a graph
            return choose(self._names(lambda t: self._is_features(t) and t.requires_grad))
        if place in ("l", "k"):
            names = self._names(
                lambda t: isinstance(t, Tensor) and t.shape == () and t.requires_grad
            )
            return choose(names)
        if place == "head":
            return choose([m for m in ("head", "head", "other") if m in self.env])
        if place == "m":
            return choose(["net", *[m for m in ("head", "other") if m in self.env]])
        if place == "q":
            return choose(["0.5", "2.0", "0.1", "-1.5"])
        raise KeyError(place)

    def _fill(self, text: str, name: str) -> str:
        picked = {"name": name, "B": str(self.n_batches)}

        def fill(match: re.Match[str]) -> str:
            return picked.setdefault(match[1], picked.get(match[1]) or self._pick(match[1]))

        return PLACE.sub(fill, text)

    def add(self, kind: str, choices: list[str], n_tries: int = 4) -> bool:
        """Write a line of a kind."""
        for _ in range(n_tries):
            name = f"{kind[0]}{len(self.lines)}"
            try:
                line = self._fill(self.random.choice(choices), name)
            except IndexError:  # there is no value of that kind yet
                continue
            if self._runs(line):
                self.lines.append(line)
                return True
        return False

    def _runs(self, line: str) -> bool:
        before = dict(self.env)
        try:
            with _left_as_found():
                exec(line, self.env)
        except Exception:  # the errors of all of torch and Python
            self.env.clear()
            self.env.update(before)
            return False
        return True

    def _begin(self) -> None:
        for name in ("net", "head", "other", "disc"):
            if name == "other" and self.random.random() < 0.6:
                continue
            self.add(
                name, [f"{name} = {make}.double()" for make in MODELS[name][self.program.kind]]
            )
        self.add("optimizer", OPTIMIZERS)

    def _batch(self) -> None:
        text = "x, y = batch({B})\nx = lazy(x, batch=1)\ny = lazy(y)"
        if self.program.kind != "time-major":
            text = "x, y = lazy(*batch({B}))"
        self.add("x", [text])
        self.n_batches += 1

    def _step(self) -> None:
        self._batch()
        if self.random.random() < 0.25:
            self.add("step", STEPS)
            return
        self.add("value", KINDS["enter"])
        kinds, weights = zip(*training_lines.WEIGHTS.items(), strict=True)
        for _ in range(self.random.randint(2, 9)):
            kind = self.random.choices(kinds, weights)[0]
            self.add(kind, KINDS[kind])
        self.add("loss", KINDS["loss"])
        if self.random.random() < 0.3:
            self.add("loss", KINDS["loss"])
            self.add("loss", KINDS["sum of losses"])
        if self.random.random() < 0.8:
            self.lines.append("opt.zero_grad()")
            self._runs("opt.zero_grad()")
        self.add("backward", KINDS["backward"], 8)
        for _ in range(self.random.choice([0, 0, 1, 2])):
            kind = self.random.choices(kinds, weights)[0]
            self.add(kind, KINDS[kind])
        self.add("update", KINDS["update"])

    def write(self) -> Program:
        self._begin()
        for _ in range(self.random.choice([1, 1, 2, 2, 3])):
            self._step()
        return dataclasses.replace(self.program, text="\n".join(self.lines))


def write(seed: int) -> Program:
    """The script of a seed."""
    return Writer(seed).write()


# Comparing ----------------------------------------------------------------------------------------


class Found(NamedTuple):
    """How a script differs from eager's: `kind` says in what way, for one to be told of another."""

    kind: str
    text: str

    @property
    def is_refusal(self) -> bool:
        """Whether koila said that it cannot, as its documentation says it may."""
        return self.kind == "refused"


def wanted_of(program: Program) -> Outcome | None:
    """What eager makes of a script; None where it fails, or where its numbers say little."""
    if "checkpoint(" in program.text and "register_forward" in program.text:
        return None  # torch calls such hooks once more in backward, koila runs a body's Python once
    try:
        wanted = run(program, eager)
    except Exception:
        return None
    return wanted if is_sound(wanted.seen) else None


def failure(program: Program, chunks: int | None, wanted: Outcome) -> Found | None:
    """How a script differs from eager's in this many chunks."""
    setting = {} if chunks is None else {"chunks": chunks}
    try:
        with koila.config(**setting):  # type: ignore[arg-type]
            seen = run(program, koila.lazy)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:700]
        # load_state_dict() raises an error of its own that holds the text of ours.
        is_ours = isinstance(error, koila.KoilaError) or "hile copying the parameter" in text
        is_refusal = is_ours and any(re.search(words, text) for words in training_lines.REFUSALS)
        return Found("refused" if is_refusal else type(error).__name__, text)
    found = difference(seen.seen, wanted.seen, False)
    if found is not None:
        return Found("number", found)
    if not torch.equal(seen.state, wanted.state):
        return Found("generator", "the generator is not where eager left it")
    return None


_aten = torch.ops.aten
#: Calls whose results may be others in their last bits in chunks.
_ROUNDED = {
    _aten.addmm.default,
    _aten.mm.default,
    _aten.mean.dim,
    _aten.std.correction,
    _aten.sum.dim_IntList,
    _aten.var.correction,
}


class Rounding(TorchDispatchMode):
    """Products and reductions differ in their last bits at each call, as in chunks they may."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ROUNDED:
            noise = torch.randn(out.shape, generator=self.generator, dtype=torch.float64)
            return out + out * (noise * torch.finfo(out.dtype).eps).to(out.dtype)
        return out


def is_conditioned(program: Program, wanted: Outcome) -> bool:
    """Whether eager's own numbers stay what they are where the batch, or what a layer makes of it,
    changes in its last bits."""
    try:
        if difference(run(program, nudged).seen, wanted.seen, False) is not None:
            return False
        with Rounding():
            return difference(run(program, eager).seen, wanted.seen, False) is None
    except Exception:  # it took another way
        return False


def failures(program: Program) -> Iterator[tuple[int | None, Found]]:
    """The counts of chunks in which a script differs, and how."""
    wanted = wanted_of(program)
    for chunks in COUNTS if wanted is not None else ():
        assert wanted is not None
        found = failure(program, chunks, wanted)
        if found is not None and (found.is_refusal or is_conditioned(program, wanted)):
            yield chunks, found


# Shrinking ----------------------------------------------------------------------------------------


def _lists(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """All lists of statements in a script, the outermost first."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and statements:
                yield statements


def smaller(text: str) -> Iterator[str]:
    """The script without one of its statements, or with a block's body in the place of the block;
    long stretches first."""
    n_lists = len(list(_lists(ast.parse(text))))
    for which in range(n_lists):
        n = len(list(_lists(ast.parse(text)))[which])
        size = n // 2 if which == 0 else 1
        while size >= 1:
            for at in reversed(range(0, n, size)):
                tree = ast.parse(text)
                statements = list(_lists(tree))[which]
                statements[at : at + size] = []
                if not statements:
                    statements.append(ast.Pass())
                yield ast.unparse(tree)
            size //= 2
        for at in range(n):
            tree = ast.parse(text)
            statements = list(_lists(tree))[which]
            if isinstance(statements[at], ast.With | ast.For):
                statements[at : at + 1] = statements[at].body  # type: ignore[attr-defined]
                yield ast.unparse(tree)


def shrink(program: Program, chunks: int | None, kind: str) -> Program:
    """The same failure in as few statements as can be had by leaving some out."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for text in smaller(program.text):
            less = dataclasses.replace(program, text=text)
            wanted = wanted_of(less) if len(text) < len(program.text) else None
            if wanted is None:
                continue
            found = failure(less, chunks, wanted)
            if found is None or found.kind != kind:
                continue
            if found.is_refusal or is_conditioned(less, wanted):
                program, is_smaller = less, True
                break
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many scripts")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they are")
    parser.add_argument("--refused", action="store_true", help="print what is refused, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("koila").setLevel(logging.ERROR)  # what runs whole is no matter here
    began, n_run, ends = time.monotonic(), 0, collections.Counter[str]()
    for seed in itertools.islice(itertools.count(options.first), options.count):
        program = write(seed)
        n_run += wanted_of(program) is not None
        for chunks, found in failures(program):
            ends[found.kind] += 1
            if found.is_refusal and not options.refused:
                continue
            small = program if options.no_shrink else shrink(program, chunks, found.kind)
            wanted = wanted_of(small)
            again = failure(small, chunks, wanted) if wanted is not None else None
            text = (again or found).text
            print(f"## seed {seed}, {chunks} chunks: {text}\n{small}\n", flush=True)
            break
    seconds = time.monotonic() - began
    told = ", ".join(f"{kind} {n}" for kind, n in ends.items()) or "none differs"
    print(f"{n_run} scripts from {options.first}: {told}; {seconds:.0f} s")
    return any(kind != "refused" for kind in ends)


if __name__ == "__main__":
    sys.exit(main())
