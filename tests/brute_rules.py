# SPDX-License-Identifier: Apache-2.0
"""Hold koila's place rules against brute force: `python tests/brute_rules.py [name ...]`.

Prints the calls that torch could run in parts and the rules run whole. Each op runs in a child of
its own: given parts that do not fit together, some of torch's kernels write where they should not.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import opdb
from brute import Answer, Cuts, alignments, assert_agrees, can_cut, in_child, oracle, run_whole
from koila import _core

C_LEVEL = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


@dataclass
class Findings:
    """What came of an op's calls."""

    agreed: Counter[str] = field(default_factory=Counter)  # by mode
    missed: Counter[str] = field(default_factory=Counter)  # the rule's reason: how often
    disagreed: list[str] = field(default_factory=list)


def row_of(func: Callable[..., Any]) -> str | None:
    """Return the name of the row of one of torch's C-level functions and methods."""
    if not isinstance(func, C_LEVEL):
        return None
    rows = {name for row in _core.op_table() for name in (row["name"], *row["aliases"])}
    name = func.__name__
    is_method = isinstance(func, types.MethodDescriptorType | types.WrapperDescriptorType)
    names = [f"Tensor_{name}", name] if is_method else [name]
    return next((name for name in names if name in rows), None)


def _spots(args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, int | None]]:
    """Return where the tensors of a call are, in the order pytree flattens them."""
    spots: list[tuple[Any, int | None]] = []
    for where, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, torch.Tensor):
            spots.append((where, None))
        elif isinstance(value, list | tuple):
            spots += [(where, k) for k, x in enumerate(value) if isinstance(x, torch.Tensor)]
    return spots


def ask_rule(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], cuts: Cuts, rows: int
) -> tuple[Answer, str] | None:
    """Ask the row of that name about a call whose tensors are cut so; return answer and reason.

    None: the row has no answer, or one that brute force cannot follow, for it takes part of a dim
    or changes numbers of the call.
    """
    spots = _spots(args, kwargs)
    said = _core.infer(name, args, kwargs)
    if said["status"] != "OK":
        return None
    numbers = [spots.index((where, entry)) for where, entry, _ in said["inputs"]]
    places = [(0, cuts[n], 1, 1) if n in cuts else None for n in numbers]
    said = _core.infer(name, args, kwargs, places, [rows])
    if said["status"] != "OK" or said["rewrites"] or any(spot[2] for spot in said["inputs"]):
        return None
    taken = [*said["in_places"], *(out[4] for out in said["outs"])]
    if any(place is not None and place[2:] != (1, 1) for place in taken):
        return None
    wanted = {n: p[1] for n, p in zip(numbers, said["in_places"], strict=True) if p is not None}
    outs = [None if out[4] is None else out[4][1] for out in said["outs"]]
    return Answer(said["mode"], wanted, outs, said["reduce"]), said["reason"] or ""


def calls_of(op: OpInfo) -> Iterator[tuple[str, Callable[..., Any], SampleInput]]:
    """Yield the row's name, the callable and the sample of each C-level call of an op."""
    dtype = opdb.dtype_of(op)
    if dtype is None:
        return
    rows = {row: func for _, func in opdb.calls_of(op) if (row := row_of(func)) is not None}
    for sample in opdb.samples_of(op, dtype) if rows else ():
        for row, func in rows.items():
            yield row, func, sample


def check_sample(row: str, func: Callable[..., Any], sample: SampleInput, found: Findings) -> None:
    """Cut a sample in every way, and hold the rule's answer against what happens."""
    flat, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    at = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]
    tensors = [flat[i] for i in at]
    args, kwargs = pytree.tree_unflatten(flat, spec)
    if not can_cut(tensors) or len(_spots(args, kwargs)) != len(tensors):
        return

    def call(parts: Sequence[torch.Tensor]) -> Any:
        values = list(flat)
        for i, part in zip(at, parts, strict=True):
            values[i] = part
        args, kwargs = pytree.tree_unflatten(values, spec)
        result = func(*args, **kwargs)
        return args[0] if result is None else result

    if run_whole(call, tensors) is None:
        return
    for cuts in alignments(tensors):
        number, dim = next(iter(cuts.items()))
        asked = ask_rule(row, args, kwargs, cuts, tensors[number].shape[dim])
        if asked is None:
            continue
        answer, reason = asked
        if answer.mode == "ONCE":
            verdicts = oracle(call, tensors, cuts)
            if verdicts and all(verdict.dims or verdict.is_sum for verdict in verdicts):
                found.missed[reason] += 1
            continue
        shapes = [tuple(x.shape) for x in tensors]
        try:
            what = f"{row} of {shapes} cut at {dict(cuts)}"
            assert_agrees(answer, oracle(call, tensors, answer.cuts), what)
        except AssertionError as error:
            found.disagreed.append(str(error))
        found.agreed[answer.mode] += 1


def check_op(op: OpInfo) -> Findings:
    """Hold every rule that an op's samples meet against brute force."""
    found = Findings()
    if opdb.NOT_REPEATED.get(opdb.full_name(op)) == opdb.MEANINGLESS:
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row, func, sample in calls_of(op):
            check_sample(row, func, sample, found)
    return found


def main() -> int:
    """Report on the ops named on the command line, or on all."""
    torch.set_num_threads(1)
    n_disagreed = 0
    for name in sys.argv[1:] or opdb.OPS:
        try:
            found = in_child(lambda name=name: check_op(opdb.OPS[name]))  # type: ignore[misc]
        except AssertionError as error:
            found = Findings(disagreed=[str(error)])
        n_disagreed += len(found.disagreed)
        counts = ", ".join(f"{count} {mode}" for mode, count in found.agreed.items())
        if found.missed or found.disagreed:
            print(f"{name}: {counts or 'nothing'} right, {len(found.disagreed)} wrong")
        for reason, count in found.missed.most_common(3):
            print(f"  could be cut {count} times: {reason}")
        for line in found.disagreed[:3]:
            print(f"  WRONG {line}")
    print(f"{n_disagreed} calls are not what the rules say")
    return bool(n_disagreed)


if __name__ == "__main__":
    raise SystemExit(main())
