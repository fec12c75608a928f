# SPDX-License-Identifier: Apache-2.0
"""What a program does, as far as its user can see, and the assertion that two runs did the same.

`observe` runs a `Program` once, plain or through koila, and keeps copies of all it left behind: an
`Outcome` holds no tensor of its run, so nothing that happens later can change it.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

import koila

ADDRESS = re.compile(r"0x[0-9a-f]+")
# torch's argument parser writes the types it was given, and a ! on both sides of a wrong one
TENSOR_TYPE = re.compile(r"!?\b(Lazy)?Tensor\b!?")
SEED = 20
#: What is nothing but rounding differs by a share of the largest number beside it.
NOISE = 1e-13

Enter = Callable[[torch.Tensor], torch.Tensor]
How = Literal["bits", "close", "unknown"]  # how far the values of two runs must agree


@dataclass(frozen=True)
class Answers:
    """What a tensor says of itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.layout
    device: str
    stride: tuple[int, ...] | None  # None where the layout has no strides
    requires_grad: bool
    is_leaf: bool
    is_conj: bool
    is_neg: bool


@dataclass(frozen=True)
class Seen:
    """A tensor: what it said when it was made and at the end, its values, and who else it is."""

    answers: Answers
    answers_at_end: Answers
    values: torch.Tensor  # plain, strided, on no graph
    same_as: int | None = None  # this very object entered as number `same_as`


@dataclass(frozen=True)
class Failure:
    """An exception, as the user reads it."""

    kind: type[BaseException]
    text: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Keep an error's words, but for addresses and for the type a tensor is of."""
        return Failure(type(error), TENSOR_TYPE.sub("Tensor", ADDRESS.sub("0x", str(error))))

    def __str__(self) -> str:
        return f"{self.kind.__name__}: {self.text}"


@dataclass
class Outcome:
    """All that a run left behind."""

    failure: Failure | None = None
    structure: pytree.TreeSpec | None = None
    results: list[Any] = field(default_factory=list)  # Seen, or the Python value itself
    entered: list[Seen] = field(default_factory=list)  # the user's own tensors
    gradients: list[Seen | None] = field(default_factory=list)
    state: list[Seen] = field(default_factory=list)
    generator: torch.Tensor | None = None


@dataclass
class Program:
    """A fresh copy of a program: nothing in it is shared with another copy."""

    run: Callable[[list[torch.Tensor]], Any]  # given the tensors as they came from `enter`
    tensors: list[torch.Tensor]  # enter, each by a call of its own
    leaves: list[torch.Tensor] = field(default_factory=list)  # may get a gradient
    state: list[torch.Tensor] = field(default_factory=list)  # parameters, buffers


def copy_fresh(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """Copy a tree of arguments; return it and the leaves that may get gradients.

    What shared a storage still does; what was on a graph is on a new one, a step from its leaf.
    """
    copies: dict[int, torch.Tensor] = {}
    leaves: list[torch.Tensor] = []
    memo: dict[int, Any] = {}

    def fresh(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value, memo)
        if id(value) not in copies:
            source = value if value.is_leaf else value.detach()
            if value.layout == torch.strided:
                leaf = copy.deepcopy(source, memo)
            else:  # deepcopy has no copy of some sparse layouts
                leaf = source.detach().clone()
            leaves.append(leaf.requires_grad_(value.requires_grad))
            copies[id(value)] = leaf if value.is_leaf else leaf.clone()
        return copies[id(value)]

    return pytree.tree_map(fresh, tree), leaves


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real tensor of the same values and layout, on no graph; a lazy one is forced."""
    if not koila.is_lazy(tensor):
        return tensor.detach().clone()
    result = copy.deepcopy(tensor.detach())
    assert type(result) is torch.Tensor, f"deepcopy of a lazy tensor gave {type(result).__name__}"
    return result


def ask(tensor: torch.Tensor) -> Answers:
    """Ask a tensor all that needs no value."""
    return Answers(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        layout=tensor.layout,
        device=str(tensor.device),
        stride=tuple(tensor.stride()) if tensor.layout == torch.strided else None,
        requires_grad=tensor.requires_grad,
        is_leaf=tensor.is_leaf,
        is_conj=tensor.is_conj(),
        is_neg=tensor.is_neg(),
    )


def read(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values, plain and strided."""
    if tensor.layout != torch.strided:  # deepcopy has no copy of some sparse layouts
        tensor = tensor.detach().to_dense()
    return plain(tensor).resolve_conj().resolve_neg()


@cache
def weights(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return fixed weights, no two near ones equal; drawing none of the generator's numbers."""
    ramp = (torch.arange(math.prod(shape), dtype=torch.float64) * 0.37) % 1 + 0.5
    values = torch.complex(ramp, 1.75 - ramp) if dtype.is_complex else ramp
    return values.reshape(shape).to(dtype)


def loss_of(results: Sequence[Any]) -> torch.Tensor | None:
    """Return the weighted sum of every result that can be differentiated; None if none can."""
    loss = None
    for result in results:
        if not isinstance(result, torch.Tensor) or not result.requires_grad:
            continue
        dense = result if result.layout == torch.strided else result.to_dense()
        part = dense * weights(tuple(dense.shape), dense.dtype)
        part = (part.real if part.dtype.is_complex else part).sum()
        loss = part if loss is None else loss + part
    return loss


def _see(tensor: torch.Tensor) -> Seen:
    values = read(tensor)
    answers = ask(tensor)
    return Seen(answers, answers, values)


def _run(program: Program, enter: Enter, is_read_first: bool, outcome: Outcome) -> None:
    lazies = [enter(tensor) for tensor in program.tensors]
    results, outcome.structure = pytree.tree_flatten(program.run(lazies))
    tensors = {i: x for i, x in enumerate(results) if isinstance(x, torch.Tensor)}
    answers = {i: ask(x) for i, x in tensors.items()}
    values = {}
    if is_read_first:
        values = {i: read(x) for i, x in tensors.items()}
    try:
        loss = loss_of(results)
        if loss is not None:
            loss.backward()
    except Exception as error:
        outcome.failure = Failure.of(error)
    if not is_read_first:
        values = {i: read(x) for i, x in tensors.items()}
    for i, x in tensors.items():
        entered_as = next((n for n, lazy in enumerate(lazies) if lazy is x), None)
        results[i] = Seen(answers[i], ask(x), values[i], entered_as)
    outcome.results = results


def observe(program: Program, enter: Enter = lambda x: x, is_read_first: bool = True) -> Outcome:
    """Run a program and its backward from a fixed generator state; keep all it leaves behind.

    `is_read_first` says whether its values are read before its gradients are asked for.
    """
    outcome = Outcome()
    torch.default_generator.manual_seed(SEED)
    try:
        _run(program, enter, is_read_first, outcome)
    except Exception as error:
        outcome.failure = Failure.of(error)
    if outcome.failure is None:
        outcome.entered = [_see(x) for x in program.tensors]
        outcome.gradients = [None if x.grad is None else _see(x.grad) for x in program.leaves]
        outcome.state = [_see(x) for x in program.state]
        outcome.generator = torch.default_generator.get_state()
    return outcome


def _bits(values: torch.Tensor) -> torch.Tensor:
    flat = values.reshape(-1).clone(memory_format=torch.contiguous_format)
    return (torch.view_as_real(flat).view(-1) if flat.dtype.is_complex else flat).view(torch.uint8)


def assert_bits(wanted: torch.Tensor, got: torch.Tensor, what: str) -> None:
    """Assert the same bits in each element; any NaN equals any other."""
    assert wanted.dtype == got.dtype and wanted.shape == got.shape, (
        f"{what}: {got.dtype} {tuple(got.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
    )
    if wanted.numel() == 0 or torch.equal(_bits(wanted), _bits(got)):
        return
    if wanted.dtype.is_complex:
        wanted, got = torch.view_as_real(wanted), torch.view_as_real(got)
    wanted, got = wanted.reshape(-1), got.reshape(-1)
    size = wanted.element_size()
    is_same = (_bits(wanted).view(-1, size) == _bits(got).view(-1, size)).all(1)
    if wanted.dtype.is_floating_point:
        is_same |= wanted.isnan() & got.isnan()
    if not is_same.all():
        at = int((~is_same).nonzero()[0, 0])
        count = int((~is_same).sum())
        raise AssertionError(
            f"{what}: {count} of {is_same.numel()} numbers differ, the first is "
            f"{got[at].item()!r}, not {wanted[at].item()!r}"
        )


def assert_close(
    wanted: torch.Tensor, got: torch.Tensor, what: str, largest_beside: float = 0.0
) -> None:
    """Assert equality but for the rounding of float64, 1e-10 of the largest; else of the bits."""
    assert wanted.dtype == got.dtype and wanted.shape == got.shape, (
        f"{what}: {got.dtype} {tuple(got.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
    )
    if wanted.dtype not in (torch.float64, torch.float32, torch.complex128, torch.complex64):
        assert_bits(wanted, got, what)
        return
    largest = _largest(wanted)
    bound = 1e-10 * largest + NOISE * largest_beside
    is_same = torch.isclose(got, wanted, rtol=1e-10, atol=bound, equal_nan=True)
    if not is_same.all():
        gap = float((got - wanted).abs()[~is_same].max())
        raise AssertionError(f"{what}: {int((~is_same).sum())} numbers differ, by up to {gap}")


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 1.0


def _assert_value(wanted: Any, got: Any, what: str, how: How) -> None:
    assert type(got) is type(wanted), f"{what}: a {type(got)}, not a {type(wanted)}"
    is_nan = isinstance(wanted, float) and math.isnan(wanted) and math.isnan(got)
    if how == "close" and isinstance(wanted, float):
        assert is_nan or math.isclose(got, wanted, rel_tol=1e-10), f"{what}: {got}, not {wanted}"
    elif how != "unknown":
        assert is_nan or got == wanted, f"{what}: {got!r}, not {wanted!r}"


def _assert_answers(wanted: Answers, got: Answers, what: str) -> None:
    wrong = {
        name: f"{getattr(got, name)}, not {answer}"
        for name, answer in vars(wanted).items()
        if getattr(got, name) != answer
    }
    assert not wrong, f"{what}: " + "; ".join(f"{name} {words}" for name, words in wrong.items())


def _assert_seen(wanted: Seen, got: Seen, what: str, how: How) -> None:
    _assert_answers(wanted.answers, got.answers, what)
    _assert_answers(wanted.answers_at_end, got.answers_at_end, f"{what} at the end")
    assert got.same_as == wanted.same_as, (
        f"{what}: the object that entered as {got.same_as}, not as {wanted.same_as}"
    )
    if how == "bits":
        assert_bits(wanted.values, got.values, what)
    elif how == "close":
        assert_close(wanted.values, got.values, what)


def assert_same(wanted: Outcome, got: Outcome, how: How = "bits") -> None:
    """Assert that two runs left the same behind.

    Values agree bit for bit, or but for rounding ("close"), or mean nothing (the `empty` kin):
    then all but the values is compared. An error may come later, but no later than a read.
    """
    assert got.failure == wanted.failure, f"{got.failure or 'no error'}, not {wanted.failure}"
    if wanted.structure is None:  # the call itself failed
        return
    assert got.structure == wanted.structure, f"{got.structure}, not {wanted.structure}"
    for part in ("results", "entered", "gradients", "state"):
        wanted_all, got_all = getattr(wanted, part), getattr(got, part)
        assert len(got_all) == len(wanted_all), f"{len(got_all)} {part}, not {len(wanted_all)}"
        for i, (one, other) in enumerate(zip(wanted_all, got_all, strict=True)):
            if isinstance(one, Seen) and isinstance(other, Seen):
                _assert_seen(one, other, f"{part}[{i}]", how)
            else:
                _assert_value(one, other, f"{part}[{i}]", how)
    if wanted.generator is not None and got.generator is not None:
        assert_bits(wanted.generator, got.generator, "the generator's state")


def assert_same_numbers(wanted: Outcome, got: Outcome, how: How = "close") -> None:
    """Assert that a run in chunks left the same numbers behind as the whole.

    Shapes, dtypes, kinds of error and the generator are the same; layouts and the words of an
    error need not be.
    """
    assert (got.failure and got.failure.kind) == (wanted.failure and wanted.failure.kind), (
        f"{got.failure or 'no error'}, not {wanted.failure}"
    )
    if wanted.structure is None:
        return
    assert got.structure == wanted.structure, f"{got.structure}, not {wanted.structure}"
    seen = [x.values for x in (*wanted.results, *wanted.gradients) if isinstance(x, Seen)]
    largest = max((_largest(x) for x in seen if x.is_floating_point()), default=0.0)
    for part in ("results", "entered", "gradients"):
        for i, (one, other) in enumerate(
            zip(getattr(wanted, part), getattr(got, part), strict=True)
        ):
            what = f"{part}[{i}]"
            if not isinstance(one, Seen) or not isinstance(other, Seen):
                _assert_value(one, other, what, how)
                continue
            asked, told = one.answers, other.answers
            assert (told.shape, told.dtype) == (asked.shape, asked.dtype), (
                f"{what}: {told.dtype} {told.shape}, not {asked.dtype} {asked.shape}"
            )
            assert told.requires_grad == asked.requires_grad, (
                f"{what}: requires_grad {told.requires_grad}, not {asked.requires_grad}"
            )
            if how != "unknown":
                assert_close(one.values, other.values, what, largest)
    if wanted.generator is not None and got.generator is not None:
        assert_bits(wanted.generator, got.generator, "the generator's state")
