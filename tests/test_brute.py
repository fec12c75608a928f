# SPDX-License-Identifier: Apache-2.0
"""Brute force tells what cutting an op's inputs does; the place rules say the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import brute
import opdb
from brute import Answer, Verdict, assert_agrees, oracle
from koila import _core
from test_infer_opdb import LEFT_OUT

A = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
B = A.sin() + 2

CALLS: list[tuple[str, Callable[[Sequence[Tensor]], Any], dict[int, int], list[str]]] = [
    ("add, both", lambda t: t[0] + t[1], {0: 0, 1: 0}, ["cat 0"]),
    ("add, columns", lambda t: t[0] + t[1], {0: 1, 1: 1}, ["cat 1"]),
    ("matmul, rows", lambda t: t[0] @ t[1].T, {0: 0}, ["cat 0"]),
    ("matmul, rows of the right", lambda t: t[0] @ t[1].T, {1: 0}, ["cat 1"]),
    ("matmul, inner", lambda t: t[0] @ t[1].T, {0: 1, 1: 1}, ["sum"]),
    ("sum", lambda t: t[0].sum(0), {0: 0}, ["sum"]),
    ("sum of columns", lambda t: t[0].sum(1), {0: 0}, ["cat 0"]),
    ("mean", lambda t: t[0].mean(0), {0: 0}, ["none"]),
    ("softmax", lambda t: t[0].softmax(0), {0: 0}, ["none"]),
    ("softmax of columns", lambda t: t[0].softmax(1), {0: 0}, ["cat 0"]),
    ("transpose", lambda t: t[0].t(), {0: 0}, ["cat 1"]),
    ("cumsum", lambda t: t[0].cumsum(0), {0: 0}, ["none"]),
    ("max", lambda t: tuple(t[0].max(1)), {0: 0}, ["cat 0", "cat 0"]),
    ("other alone", lambda t: t[1] * 2, {0: 0}, ["same"]),
    ("shape", lambda t: t[0].shape[1], {0: 0}, ["same"]),
]


@pytest.mark.parametrize(("name", "call", "cuts", "wanted"), CALLS, ids=[c[0] for c in CALLS])
def test_oracle(name: str, call: Any, cuts: dict[int, int], wanted: list[str]) -> None:
    verdicts = oracle(call, [A, B], cuts)
    assert verdicts is not None
    assert [str(verdict) for verdict in verdicts] == wanted


def test_oracle_has_no_verdict() -> None:
    assert oracle(lambda t: t[0] + t[1], [A, B], {0: 0}) is None, "parts and whole do not broadcast"
    assert oracle(lambda t: torch.rand_like(t[0]), [A], {0: 0}) is None, "random"
    assert oracle(lambda t: list(t[0]), [A], {0: 0}) is None, "another number of results"


def test_alignments() -> None:
    bias = torch.ones(3)
    assert list(brute.alignments([A, B])) == [{0: 0}, {0: 0, 1: 0}, {0: 1}, {0: 1, 1: 1}]
    assert list(brute.alignments([A, bias])) == [{0: 0}, {0: 1}, {0: 1, 1: 0}]


RIGHT = [Verdict(dims=frozenset({0}))]


def test_agreement() -> None:
    assert_agrees(Answer("ROWS", {0: 0}, [0]), RIGHT, "")
    assert_agrees(Answer("ONCE", {}, [None]), None, "")
    assert_agrees(Answer("REDUCE", {0: 0}, [None], "SUM"), [Verdict(is_sum=True)], "")
    assert_agrees(Answer("REDUCE", {0: 0}, [None], "MEAN"), [Verdict()], "")


@pytest.mark.parametrize(
    ("answer", "verdicts"),
    [
        (Answer("ROWS", {0: 0}, [1]), RIGHT),
        (Answer("ROWS", {0: 0}, [None]), RIGHT),
        (Answer("ROWS", {0: 0}, [0, 0]), RIGHT),
        (Answer("ROWS", {0: 0}, [0]), None),
        (Answer("REDUCE", {0: 0}, [None], "SUM"), RIGHT),
    ],
)
def test_disagreement(answer: Answer, verdicts: list[Verdict] | None) -> None:
    with pytest.raises(AssertionError):
        assert_agrees(answer, verdicts, "")


def test_child_tells() -> None:
    assert brute.in_child(lambda: 3 * 5) == 15
    with pytest.raises(AssertionError, match="SIGABRT"):
        brute.in_child(os.abort)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        brute.in_child(lambda: 1 // 0)
    with pytest.raises(AssertionError, match="SIGALRM"):
        brute.in_child(lambda: [None for _ in iter(int, 1)], seconds=1)


HAS_RULES = hasattr(_core, "infer") and hasattr(_core, "op_table")


#: What test_infer_opdb leaves out, and one in ten of all others, which it cuts in more ways.
NAMES = [name for i, name in enumerate(opdb.OPS) if i % 10 == 0 or opdb.OPS[name].name in LEFT_OUT]


@pytest.mark.skipif(not HAS_RULES, reason="this koila has no op table")
@pytest.mark.parametrize("name", NAMES if HAS_RULES else [])
def test_rules_agree(name: str) -> None:
    """Whatever a rule says can be cut, can be, and comes out where the rule says."""
    import brute_rules

    found = brute.in_child(lambda: brute_rules.check_op(opdb.OPS[name]))
    assert not found.disagreed, "\n".join(found.disagreed)
