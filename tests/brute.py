# SPDX-License-Identifier: Apache-2.0
"""What happens when the inputs of an op are cut: the oracle for place rules, made without rules.

Inputs are cut along given dims, torch runs on every part, and the results are held against the
whole result: do they concatenate, is each the whole, do they add up?
"""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from outcome import SEED, assert_close

T = TypeVar("T")
Call = Callable[[Sequence[torch.Tensor]], Any]
Cuts = Mapping[int, int]  # number of the tensor: the dim it is cut along


@dataclass(frozen=True)
class Verdict:
    """What the parts of one result are to the whole result."""

    dims: frozenset[int] = frozenset()  # concatenated along one of these they are the whole
    is_same: bool = False  # each of them is the whole
    is_sum: bool = False  # added up they are the whole

    def __str__(self) -> str:
        words = [f"cat {dim}" for dim in sorted(self.dims)]
        words += ["same"] * self.is_same + ["sum"] * self.is_sum
        return ", ".join(words) or "none"


def partitions(rows: int) -> list[list[int]]:
    """Divide the rows: row by row, and in two unequal parts both ways where there are enough."""
    found = [[1] * rows]
    if rows > 2:
        found += [[1, rows - 1], [rows - 1, 1]]
    return found


def alignments(tensors: Sequence[torch.Tensor]) -> Iterator[Cuts]:
    """Yield the ways to cut that torch's broadcasting suggests, each once.

    The rows are a dim of the first tensor: it alone is cut, or all tensors that have that size at
    that dim, counted from the left or from the right.
    """
    first = tensors[0]
    seen = set()
    for dim, rows in enumerate(first.shape):
        if rows < 2:
            continue
        alone = {0: dim}
        left = {i: dim for i, x in enumerate(tensors) if x.dim() > dim and x.shape[dim] == rows}
        right = {
            i: at
            for i, x in enumerate(tensors)
            if (at := dim + x.dim() - first.dim()) >= 0 and x.shape[at] == rows
        }
        for cuts in (alone, left, right):
            key = tuple(sorted(cuts.items()))
            if key not in seen:
                seen.add(key)
                yield cuts


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that can be held against another, number by number."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def run_whole(call: Call, tensors: Sequence[torch.Tensor]) -> list[Any] | None:
    """Return the results of a call; None if torch refuses it or it draws random numbers."""
    torch.default_generator.manual_seed(SEED)
    before = torch.default_generator.get_state()
    try:
        with torch.no_grad():
            results = pytree.tree_leaves(call([x.detach().clone() for x in tensors]))
            results = [dense(x) if isinstance(x, torch.Tensor) else x for x in results]
    except Exception:
        return None
    is_random = not torch.equal(before, torch.default_generator.get_state())
    return None if is_random else results


def _is_close(part: torch.Tensor, whole: torch.Tensor) -> bool:
    try:
        assert_close(whole, part, "")
    except AssertionError:
        return False
    return True


def _judge(whole: Any, parts: list[Any]) -> Verdict:
    if not isinstance(whole, torch.Tensor):
        is_same = all(type(part) is type(whole) and part == whole for part in parts)
        return Verdict(is_same=is_same)
    dims = []
    for dim in range(whole.dim()):
        rest = [(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts]
        wanted = (*whole.shape[:dim], *whole.shape[dim + 1 :])
        sizes = [part.shape[dim] if part.dim() == whole.dim() else -1 for part in parts]
        fits = set(rest) == {wanted} and sum(sizes) == whole.shape[dim] and min(sizes) > 0
        if fits and _is_close(torch.cat(parts, dim), whole):
            dims.append(dim)
    is_alike = all(part.shape == whole.shape and part.dtype == whole.dtype for part in parts)
    is_same = is_alike and all(_is_close(part, whole) for part in parts)
    is_number = whole.dtype.is_floating_point or whole.dtype.is_complex
    is_sum = is_alike and is_number and _is_close(torch.stack(parts).sum(0), whole)
    return Verdict(frozenset(dims), is_same, is_sum)


def _both(one: Verdict, other: Verdict) -> Verdict:
    return Verdict(
        one.dims & other.dims, one.is_same and other.is_same, one.is_sum and other.is_sum
    )


def oracle(call: Call, tensors: Sequence[torch.Tensor], cuts: Cuts) -> list[Verdict] | None:
    """Cut, run, put together: return what holds of each result in every partition of the rows.

    None: torch refuses the whole or a part, the parts have other results than the whole, or the
    call draws random numbers.
    """
    number, dim = next(iter(cuts.items()))
    whole = run_whole(call, tensors)
    if whole is None:
        return None
    verdicts: list[Verdict] | None = None
    for sizes in partitions(tensors[number].shape[dim]):
        split = {i: tensors[i].detach().split(sizes, at) for i, at in cuts.items()}
        parts = []
        for k in range(len(sizes)):
            mine = [split[i][k] if i in cuts else x for i, x in enumerate(tensors)]
            result = run_whole(call, mine)
            if result is None or len(result) != len(whole):
                return None
            if any(type(one) is not type(two) for one, two in zip(result, whole, strict=True)):
                return None
            parts.append(result)
        judged = [
            _judge(one, list(others))
            for one, others in zip(whole, zip(*parts, strict=True), strict=True)
        ]
        if verdicts is None:
            verdicts = judged
        else:
            verdicts = [_both(a, b) for a, b in zip(verdicts, judged, strict=True)]
    return verdicts


@dataclass(frozen=True)
class Answer:
    """What a place rule says of a call."""

    mode: str  # "ROWS", "REDUCE" or "ONCE"
    cuts: dict[int, int]  # the tensors it wants cut, and where
    outs: list[int | None]  # for each result the dim its rows are at; None: not cut
    reduce: str | None = None


def assert_agrees(answer: Answer, verdicts: list[Verdict] | None, what: str) -> None:
    """Assert that what a rule says happens; `verdicts` are the oracle's for the rule's own cuts.

    A rule may always say ONCE. How a REDUCE is combined is only checked for a plain sum.
    """
    if answer.mode == "ONCE":
        return
    assert verdicts is not None, f"{what}: {answer}, but the parts cannot be run"
    assert len(verdicts) == len(answer.outs), f"{what}: {answer}, but {len(verdicts)} results"
    for number, (dim, verdict) in enumerate(zip(answer.outs, verdicts, strict=True)):
        if answer.mode == "REDUCE":
            is_right = answer.reduce != "SUM" or verdict.is_sum
        elif dim is None:
            is_right = verdict.is_same
        else:
            is_right = dim in verdict.dims
        assert is_right, f"{what}: result {number}: {answer}, but brute force says {verdict}"


def in_child(work: Callable[[], T], seconds: int = 60) -> T:
    """Run `work` in a forked child, which torch may crash; return what it returns.

    A crash, an error or too long a time is an AssertionError.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: torch's, idle
        child = os.fork()
    if child == 0:
        os.close(reader)
        faulthandler.disable()  # a crash is an answer here
        signal.alarm(seconds)
        try:
            answer: Any = (True, work())
        except BaseException as error:
            answer = (False, f"{type(error).__name__}: {error}")
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code == 0, f"died of {signal.Signals(-code).name if code < 0 else code}"
    is_done, value = pickle.loads(data)
    assert is_done, value
    return value


def can_cut(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether there is something to cut, and cutting it in all ways is soon done."""
    is_plain = all(x.layout == torch.strided for x in tensors)
    return is_plain and 0 < sum(math.prod(x.shape) for x in tensors) <= 4000
