# SPDX-License-Identifier: Apache-2.0
"""Every op of torch's own `op_db`, through torch and through koila: the same, bit for bit.

An op is run on each of its samples as function, method, operator and in-place variants; in
float64, or in its first dtype where it has none. Each tensor of a sample enters by a `lazy` call
of its own. KOILA_TEST_DEVICE=cuda makes the samples on a GPU.
"""

from __future__ import annotations

import os
import random
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import koila
from outcome import SEED, Enter, How, Outcome, Program, assert_same, copy_fresh, observe

DEVICE = os.environ.get("KOILA_TEST_DEVICE", "cpu")

MEANINGLESS = "its values are whatever was in memory"
ROUNDED = "its last bits depend on where its memory lies"

# Samples of these are not repeated by torch itself, so their values are not compared (or only up
# to rounding); all else is: structure, shape, dtype, strides, errors, the generator.
NOT_REPEATED = {
    "empty_like": MEANINGLESS,
    "new_empty": MEANINGLESS,
    "new_empty_strided": MEANINGLESS,
    "linalg.lstsq": ROUNDED,
    "linalg.lstsq.grad_oriented": ROUNDED,
}
HOW_OF: dict[str, How] = {MEANINGLESS: "unknown", ROUNDED: "close"}

VARIANTS = {
    "function": "op",
    "method": "method_variant",
    "operator": "operator_variant",
    "in-place method": "inplace_variant",
    "in-place operator": "inplace_operator_variant",
}

# `OpInfo.dtypes` comes out of a set, in another order in each process.
DTYPES = (torch.float32, torch.complex128, torch.int64, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Case:
    """One call: an op's variant on one of its samples."""

    name: str
    call: Callable[..., Any]
    sample: SampleInput
    is_inplace: bool
    number: int

    def program(self) -> Program:
        """Return a fresh copy of the call; what an in-place variant writes is no leaf."""
        whole, leaves = copy_fresh((self.sample.input, self.sample.args, self.sample.kwargs))
        flat, spec = pytree.tree_flatten(whole)
        tensors = {id(x): x for x in flat if isinstance(x, torch.Tensor)}
        if self.is_inplace and isinstance(flat[0], torch.Tensor):
            tensors[id(flat[0])] = flat[0].clone()
        order = list(tensors)

        def run(entered: list[torch.Tensor]) -> Any:
            known = dict(zip(order, entered, strict=True))
            first, args, kwargs = pytree.tree_unflatten([known.get(id(x), x) for x in flat], spec)
            return self.call(first, *args, **kwargs)

        return Program(run, list(tensors.values()), leaves)


@dataclass
class Report:
    """What came of an op's cases: counts, and names where there is something to say."""

    same: int = 0
    same_error: int = 0
    late_error: list[str] = field(default_factory=list)  # of these: not at the call, at a read
    not_repeated: list[str] = field(default_factory=list)  # by torch itself, and unexpected
    values_skipped: list[str] = field(default_factory=list)  # the same, values apart: NOT_REPEATED
    no_tensor: list[str] = field(default_factory=list)
    no_dtype: list[str] = field(default_factory=list)  # ops that have none on the CPU
    differing: list[str] = field(default_factory=list)  # name: what differs

    def add(self, other: Report) -> None:
        """Add another op's report to this one."""
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))


def dtype_of(op: OpInfo) -> torch.dtype | None:
    """Return the dtype an op is tried in; None if it has none there."""
    supported = op.supported_dtypes(DEVICE)
    if torch.float64 in supported:
        return torch.float64
    return next((dtype for dtype in DTYPES if dtype in supported), None)


def full_name(op: OpInfo) -> str:
    """Return the name of an op_db entry, unlike any other's."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def _seed() -> None:
    # torch.manual_seed formats the stack for each kind of device that is not there
    torch.default_generator.manual_seed(SEED)
    if DEVICE != "cpu":
        torch.cuda.manual_seed_all(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def samples_of(op: OpInfo, dtype: torch.dtype) -> list[SampleInput]:
    """Return the op's samples, the same at each call; they require grad where the op allows."""
    is_differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes(DEVICE)
    _seed()
    return list(op.sample_inputs_func(op, DEVICE, dtype, is_differentiable))


def unseeded(call: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a call without the seeding that op_db wraps around what is random; None if not so.

    Seeded, an op tells nothing of the generator: it gets a seed of its own and is put back after.
    """
    code = getattr(call, "__code__", None)
    if code is None or "wrapper_set_seed" not in code.co_names:
        return None
    names = call.__globals__ | {"wrapper_set_seed": lambda f, *args, **kwargs: f(*args, **kwargs)}
    return types.FunctionType(code, names, call.__name__, call.__defaults__, call.__closure__)


def calls_of(op: OpInfo) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the variants of an op and of its aliases, by name."""
    spellings = [("", op)] + [(f"{alias.name} ", alias) for alias in op.aliases]
    for spelling, source in spellings:
        for variant, attribute in VARIANTS.items():
            call = getattr(source, attribute, None)
            if call is not None:
                yield spelling + variant, call
            if call is not None and (bare := unseeded(call)) is not None:
                yield f"{spelling}{variant} unseeded", bare


def cases_of(op: OpInfo) -> Iterator[Case]:
    """Yield every sample of an op in every variant."""
    dtype = dtype_of(op)
    if dtype is None:
        return
    samples = samples_of(op, dtype)
    for variant, call in calls_of(op):
        for number, sample in enumerate(samples):
            name = f"{full_name(op)}[{number}] {variant}"
            yield Case(name, call, sample, "in-place" in variant, number)


def error_cases_of(op: OpInfo) -> Iterator[Case]:
    """Yield the calls that torch's own tests expect to fail."""
    if op.error_inputs_func is None:
        return
    _seed()
    for number, wrong in enumerate(op.error_inputs_func(op, DEVICE)):
        name = f"{full_name(op)}[error {number}] function"
        yield Case(name, op.op, wrong.sample_input, False, number)


def _difference(wanted: Outcome, got: Outcome, how: How) -> str | None:
    try:
        assert_same(wanted, got, how)
    except AssertionError as error:
        return str(error)
    return None


def check_case(case: Case, report: Report, how: How, enter: Enter) -> None:
    """Run a case through torch and through koila, and enter what was seen in the report.

    If it differs, or is not compared, it is run through torch again: is it repeated there at all?
    """
    program = case.program()
    if not program.tensors:
        report.no_tensor.append(case.name)
        return
    is_read_first = case.number % 2 == 0
    wanted = observe(program, is_read_first=is_read_first)
    got = observe(case.program(), enter, is_read_first)
    difference = _difference(wanted, got, how)
    if difference or how != "bits":
        again = observe(case.program(), is_read_first=is_read_first)
        if by_torch := _difference(wanted, again, how):
            report.not_repeated.append(f"{case.name}: {by_torch}")
            return
    if difference:
        report.differing.append(f"{case.name}: {difference}")
    elif wanted.failure is not None:
        report.same_error += 1
        if wanted.structure is None and got.structure is not None:
            report.late_error.append(case.name)
    elif how != "bits":
        report.values_skipped.append(case.name)
    else:
        report.same += 1


def check_op(op: OpInfo, enter: Enter = koila.lazy, n_samples: int | None = None) -> Report:
    """Run all of an op's samples and error inputs, or the first `n_samples` of each variant."""
    report = Report()
    name = full_name(op)
    if dtype_of(op) is None:
        report.no_dtype.append(name)
    how = HOW_OF[NOT_REPEATED[name]] if name in NOT_REPEATED else "bits"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in chain(cases_of(op), error_cases_of(op)):
            if n_samples is None or case.number < n_samples:
                check_case(case, report, how, enter)
    return report


OPS: dict[str, OpInfo] = {full_name(op): op for op in op_db}
assert len(OPS) == len(op_db), "two entries of op_db have one name"
