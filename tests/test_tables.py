# SPDX-License-Identifier: Apache-2.0
"""The tables of callables that are not recorded: torch itself is asked what each of them returns.

A name in a list says what is done with a call; what the call can return is torch's to say. Every
callable of the tables is called on small real tensors, with whatever arguments it takes.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import koila
from chunked import Watched, split
from koila.recording import functions, handlers
from outcome import Program, assert_same, observe, weights

#: Their answer is a number, a text or memory that leaves torch: no tensor of torch's.
ANSWERED = functions.READS | functions.QUERIES

#: No call of these succeeds on the CPU.
NEVER = frozenset({"__cuda_array_interface__", "__reduce__"})

#: Parts of torch's own functions: a tensor's class is asked before one of them is chosen, so an
#: overriding class never meets them as they are called here. The whole ones are in op_db.
PARTS = frozenset(
    """_consecutive_return_counts _consecutive_return_inverse _consecutive_return_output
    _consecutive_return_inverse_and_counts _return_counts _return_inverse
    _return_inverse_and_counts _lu_with_infos unique unique_consecutive""".split()
)


def callables() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield every callable in the tables: its table, its name, and itself."""
    met: set[tuple[str, int]] = set()
    for name, func in functions._overridable():
        if not callable(func) or isinstance(func, type):
            continue
        own = getattr(func, "__name__", name)
        kind = (
            "handler"
            if own in handlers.HANDLERS
            else "answered"
            if own in ANSWERED
            else "entered"
            if isinstance(func, types.FunctionType) and own != "unflatten"
            else "op"
        )
        if (own, id(func)) not in met:
            met.add((own, id(func)))
            yield kind, own, func
    for name, member in functions._accessors():
        getter = member.fget if isinstance(member, property) else member.__get__
        kind = "handler" if name in handlers.HANDLERS else "answered" if name in ANSWERED else "op"
        if getter is not None:
            yield kind, name, getter


def named(wanted: str) -> dict[str, list[Callable[..., Any]]]:
    """Return the callables of a table by name."""
    found: dict[str, list[Callable[..., Any]]] = {}
    for kind, name, func in callables():
        if kind == wanted:
            found.setdefault(name, []).append(func)
    return found


#: Functions of the process, not of a tensor.
UNCALLED = re.compile("set_.*|use_.*|_register_.*|manual_seed|seed|save|load|compile|_overload")

ANSWERED_CALLABLES = named("answered")
PASSED_ON = {
    name: funcs
    for name, funcs in {**named("entered"), **named("handler")}.items()
    if name not in PARTS and not UNCALLED.fullmatch(name)
}
OPS = named("op")


@dataclass(frozen=True)
class Operand:
    """What a call is made on: a leaf, and the step that leads from it."""

    step: Callable[[Tensor], Tensor]
    dtype: torch.dtype = torch.float64
    requires_grad: bool = True

    def leaf(self) -> Tensor:
        """Return a fresh leaf, of full rank also when its mean is taken off: of singular values
        that are zero rounding alone makes the vectors, and their gradients."""
        values = weights((4, 3), torch.float64) + torch.eye(4, 3, dtype=torch.float64) / 8
        return values.to(self.dtype).clone().requires_grad_(self.requires_grad)


OPERANDS = (
    Operand(lambda x: x * 1),
    Operand(lambda x: (x * 1).sum()),
    Operand(lambda x: x[0] * 1),
    Operand(lambda x: x * 1, torch.complex128),
    Operand(lambda x: (x * 1).to_sparse()),
    Operand(lambda x: x * 1, requires_grad=False),
    Operand(lambda x: x * 1, torch.int64, requires_grad=False),
    Operand(lambda x: x.sum(), torch.int64, requires_grad=False),
    Operand(lambda x: x > 1, requires_grad=False),
    Operand(lambda x: x.to_sparse().coalesce(), requires_grad=False),
    Operand(
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        torch.float32,
        requires_grad=False,
    ),
)


def arguments(operand: Tensor) -> list[Any]:
    """Return what a call may be given beside its operand: one of each kind that torch knows."""
    return [
        torch.float32,
        torch.float64,
        "torch.FloatTensor",
        "torch.DoubleTensor",
        torch.DoubleTensor,
        operand,
        weights((4, 3), torch.float64),
        np.ones((4, 3)),
        torch.Size((4, 3)),
        [1.0, 2.0],
        {},
        "",
        lambda *values: sum(values),
        True,
        2,
        0.5,
    ]


def storage_of(tensor: Tensor) -> int | None:
    """Return the memory a tensor is in; None where it has none of its own."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def is_strided(operand: Tensor) -> bool:
    """Tell whether a lazy can stand for it."""
    return operand.layout == torch.strided and not operand.is_quantized


def is_tied(result: Any, operand: Tensor) -> bool:
    """Tell whether a result holds a tensor with a gradient, or one that shares memory."""
    for part in pytree.tree_leaves(result):
        if not isinstance(part, Tensor):
            continue
        if part.grad_fn is not None or part is operand:
            return True
        memory = storage_of(part)
        if memory is not None and memory == storage_of(operand):
            return True
    return False


def dense(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    plain = plain.dequantize() if plain.is_quantized else plain
    return plain.to_dense().clone()


def calls(
    func: Callable[..., Any], n_most: int
) -> Iterator[tuple[tuple[int, ...], Tensor, Any, bool]]:
    """Call it in every way torch takes, with up to `n_most` arguments: the numbers of the operand
    and the arguments, the operand, the result, and whether the operand was written."""
    n_arguments = len(arguments(torch.zeros(())))
    for number, kind in enumerate(OPERANDS):
        for n in range(n_most + 1):
            for chosen in itertools.product(range(n_arguments), repeat=n):
                operand = kind.step(kind.leaf())
                given = [arguments(operand)[i] for i in chosen]
                before = dense(operand)
                try:
                    result = func(operand, *given)
                except Exception:
                    continue
                is_written = not torch.equal(dense(operand), before)
                yield (number, *chosen), operand, result, is_written


@pytest.mark.parametrize("name", sorted(ANSWERED_CALLABLES))
def test_what_is_answered_has_no_gradient(name: str) -> None:
    """No call of a name that is answered by a number returns a tensor on the graph, or one that
    shares memory with what it was given, or writes that."""
    n_calls = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for func in ANSWERED_CALLABLES[name]:
            for chosen, operand, result, is_written in calls(func, 2):
                n_calls += 1
                what = f"{name} of operand and arguments {chosen}"
                assert not is_tied(result, operand), f"{what} gives {result}"
                assert not is_written, f"{what} writes it"
    assert n_calls > 0 or name in NEVER, f"no call of {name} succeeded"


@pytest.mark.parametrize("name", sorted(ANSWERED_CALLABLES))
def test_schemas_of_what_is_answered(name: str) -> None:
    """torch's schemas of such a name return no tensor that can have a gradient, and write none."""
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
        if not any("Tensor" in str(argument.type) for argument in schema.arguments):
            continue
        assert all(argument.alias_info is None for argument in schema.arguments), schema
        returned = [str(result.type) for result in schema.returns]
        is_flag = name in ("_is_all_true", "_is_any_true")  # a tensor of one bool
        assert is_flag or not any("Tensor" in text for text in returned), schema


def program_of(func: Callable[..., Any], chosen: tuple[int, ...]) -> Program:
    """Return the call on a lazy step; what it gives and the step itself are looked at."""
    kind = OPERANDS[chosen[0]]
    leaf = kind.leaf()

    def run(entered: list[Tensor]) -> Any:
        operand = kind.step(entered[0])
        given = [arguments(operand)[i] for i in chosen[1:]]
        result = func(operand, *given)
        parts = [part for part in pytree.tree_leaves(result) if isinstance(part, Tensor)]
        return parts, operand

    return Program(run, [leaf], [leaf])


def check_calls(name: str, n_most: int) -> tuple[int, int]:
    """Compare with eager the calls of a name, in chunks, whose result is tied to the operand or
    that write it; return their number, and how many were cut."""
    n_calls = n_cut = 0
    for func in PASSED_ON.get(name) or OPS[name]:
        for chosen, operand, result, is_written in calls(func, n_most):
            if not is_strided(operand) or not (is_tied(result, operand) or is_written):
                continue
            n_calls += 1
            wanted = observe(program_of(func, chosen))
            with koila.config(chunks=3), Watched(3).on() as seen:
                got = observe(program_of(func, chosen), koila.lazy)
            if wanted.failure is not None:  # its text may name the sizes of a chunk
                kind = got.failure.kind if got.failure is not None else None
                assert kind is wanted.failure.kind, f"{name}{chosen}: {got.failure}"
            else:
                assert_same(wanted, got, "close")
            assert not seen.wrong
            n_cut += seen.n_cut > 0
    return n_calls, n_cut


@pytest.mark.parametrize("name", sorted(PASSED_ON))
def test_what_is_passed_on_keeps_its_gradient(name: str) -> None:
    """What a handler or one of torch's Python functions returns is on the graph as in eager."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        n_calls, n_cut = check_calls(name, 1)
    is_whole = name in ("__rmatmul__", "_verify_batch_size", "cartesian_prod")
    assert (n_cut == 0) == (n_calls == 0 or is_whole), f"{n_cut} of {n_calls} calls were cut"


@pytest.mark.parametrize("name", ["apply_", "cdouble", "map_", "type"])
def test_what_has_no_schema_keeps_its_gradient(name: str) -> None:
    """Methods of C that torch has no schema of: nothing else tells what they return or write."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        n_calls, n_cut = check_calls(name, 2)
    assert n_calls > 0
    assert n_cut > 0


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 12])
def test_type_is_recorded(chunks: int) -> None:
    """x.type(dtype) is a cast that runs by rows, x.type() a text that computes nothing."""
    batch, weight = weights((12, 3), torch.float64), weights((3, 2), torch.float64)
    found = []
    for lazy in (lambda x: x, koila.lazy):
        leaf = weight.clone().requires_grad_()
        with split(chunks) if lazy is koila.lazy else contextlib.nullcontext():
            h = lazy(batch) @ leaf
            casts = (torch.float32, "torch.FloatTensor", torch.FloatTensor, h.type())
            assert h.type() == "torch.DoubleTensor"
            sum((h.type(cast).pow(2).sum() for cast in casts), h.sum()).backward()
        found.append(leaf.grad)
    torch.testing.assert_close(found[1], found[0], rtol=0.0 if chunks == 1 else 1e-5, atol=0.0)
