"""What rows hold in flight, against torch's allocator: backward, for every row of the op table.

A row that has no entry in `flight.ROWS` is said to hold nothing. Samples are of some bytes: they
are given so many rows that an operand has `LEAST`, and a result too much or too little shows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._pytree import tree_leaves

import opchunks
from all_samples import samples_of
from koila import _core, flight
from koila.flight import Amount
from koila.partials import REDUCTIONS
from koila.sweep import _COMPOSED
from test_ops import CALLABLES

#: Rows that are not written: a write holds what the call without it does.
ROWS = sorted(row["name"] for row in _core.op_table() if row["kind"] != "INPLACE")
#: Bytes of the largest operand at least.
LEAST = 64 * 1024
#: Numbers of no dim.
SMALL = 128
#: Of what is said: numbers of no dim, and gradients of a few weights.
SLACK = 0.03
#: Composed of other calls where these say so, which keep what is not counted here as in flight.
COMPOSED = {
    "cosine_embedding_loss",
    "hinge_embedding_loss",
    "kl_div",
    "margin_ranking_loss",
    "poisson_nll_loss",
    "rms_norm",
    "scaled_dot_product_attention",
    "triplet_margin_loss",
}
#: Rows in which only some ways of calling hold more than is said, all of them rare.
RARE = {
    **dict.fromkeys("gru lstm rnn_relu rnn_tanh".split(), "free what they keep as they go back"),
    **dict.fromkeys("conv1d conv2d conv3d".split(), "groups, and padding on one side"),
    **dict.fromkeys("conv_transpose1d conv_transpose2d conv_transpose3d".split(), "groups"),
    "__getitem__": "one index after another",
    "bilinear": "the products of all features of both sides",
    "cdist": "by matrix products, with a row more for the norms",
    "cosine_similarity": "two operands that are both broadcast",
    "cross_entropy_loss": "two steps back, each with a gradient as large as the scores",
    "cumprod": "zeros",
    "einsum": "an operand that is broadcast",
    "group_norm": "two numbers for each row and channel, much beside a few pixels",
    "im2col": "a gradient cut from a larger one",
    "instance_norm": "a weight that is repeated for each row",
    "linalg_vector_norm": "norms other than the second",
    **dict.fromkeys("gru_cell lstm_cell".split(), "the gates of both products"),
    "matmul": "a matrix that is copied for each row",
    "outer": "a vector of one number",
    "pad": "modes other than constant",
    "pairwise_distance": "norms other than the second",
    "pow": "a tensor as exponent, which the row's own rule counts",
    "prod": "an entry that is zero",
    "std": "correction",
    "take_along_dim": "an operand that is broadcast to more than the result",
}
#: Rows that hold less than is said for these ways of calling; more is said on purpose.
LESS = {
    **dict.fromkeys("gelu layer_norm".split(), "a gradient that is laid out otherwise"),
    **dict.fromkeys("median nanmedian".split(), "torch finds the place again by comparing"),
    **dict.fromkeys("cat stack".split(), "slices of one gradient are handed on"),
    "l1_loss": "a sign that both sides share",
}


def test_names_are_rows() -> None:
    """A name that is no row is never looked up."""
    rows = {row["name"] for row in _core.op_table()}
    assert sorted(set(flight.ROWS) - rows) == []
    assert sorted(flight.TURNS - rows) == []
    assert sorted(set(REDUCTIONS) ^ set(flight.PARTS)) == []


def n_bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def measure_back(outs: list[Tensor], wanted: list[Tensor]) -> int:
    """The most bytes of a backward beyond what was there before it."""
    seeds = [torch.randn_like(out) for out in outs]
    with profile(profile_memory=True) as found:
        gradients = torch.autograd.grad(outs, wanted, seeds, allow_unused=True)
    del gradients
    now = peak = 0
    results: Any = found.kineto_results
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def said(amount: Amount, out: Tensor, first: Tensor) -> float:
    larger = max(out.numel(), first.numel())
    return amount.outs * n_bytes(out) + amount.ins * n_bytes(first) + amount.masks * larger


def allowed(
    held: flight.Flight, out: Tensor, operands: list[Tensor], wanted: list[Tensor]
) -> float:
    """Bytes for the gradients and what is in flight, as sweep.py has it."""
    last = len(held.backward) - 1
    wide = more = 0.0
    for k, operand in enumerate(operands):
        if operand.requires_grad:
            more = max(more, said(held.backward[min(k, last)], out, operands[0]))
            is_wide = held.broadcasts and k not in held.handed_on and operand.numel() < out.numel()
            wide += n_bytes(out) if is_wide else 0
    return n_bytes(*wanted) + wide + more + said(held.turned, out, operands[0])


def entries(args: Any, kwargs: Any, said: Any) -> Iterator[Tensor]:
    """Yield the inputs that a row found in a call."""
    for where, entry, _ in said["inputs"]:
        word = args[where] if isinstance(where, int) else kwargs[where]
        yield word if entry is None else word[entry]


def with_rows(whole: Tensor, place: opchunks.Place | None, rows: int, n: int) -> Tensor:
    """Repeat the rows of a value until there are `n`."""
    if place is None:
        return whole
    _, dim, outer, inner = place
    digits = whole.detach().unflatten(dim, (outer, rows, inner))
    many = digits.index_select(dim + 1, torch.arange(n) % rows).flatten(dim, dim + 2)
    return opchunks.like_in_memory(many, whole)


def grown(row: str, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """Give a call so many rows that an operand is large; None where it has none."""
    said: Any = _core.infer(row, args, kwargs)
    if said["status"] != "OK" or not said["inputs"]:
        return None
    inputs = list(entries(args, kwargs, said))
    for places, rows in opchunks.assignments(inputs):
        said = _core.infer(row, args, kwargs, places)
        counts_rows = any(is_range for *_, is_range in said.get("inputs", ()))
        if said["status"] != "OK" or said["mode"] == "ONCE" or counts_rows or rows < 2:
            continue
        n = rows * math.ceil(LEAST / max(map(n_bytes, inputs)))
        new_args, new_kwargs = list(args), dict(kwargs)
        for (where, entry, _), place in zip(said["inputs"], said["in_places"], strict=True):
            whole = functools.partial(with_rows, place=place, rows=rows, n=n)
            opchunks.put(new_args, new_kwargs, where, entry, whole)
        for where, entry, part, scale in said["rewrites"]:
            change = opchunks.rewritten(part, scale * n)
            opchunks.put(new_args, new_kwargs, where, entry, change)
        return new_args, new_kwargs
    return None


def said_by_rule(row: str, args: Any, kwargs: Any) -> float:
    """Bytes in a call's backward that depend on its arguments: what its `saves` rule says of them,
    and what a call made of two keeps, which has a gradient of its own."""
    saves: Any = _core.infer(row, tuple(args), kwargs)["saves"]
    further = saves["bytes_extra"] + saves["bytes_fixed"] if row in _COMPOSED else 0
    return float(saves["bytes_backward"] + further)


def large_calls(row: str) -> Iterator[tuple[list[Tensor], list[Tensor], str, float]]:
    """Yield the operands and results of calls of a row, those through which gradients go; and the
    bytes that its rule says its backward holds."""
    for args, kwargs in samples_of(row):
        call = grown(row, args, kwargs)
        if call is None:
            continue
        operands = [t for t in tree_leaves(call) if isinstance(t, Tensor)]
        outs = [t for t in tree_leaves([CALLABLES[row](*call[0], **call[1])]) if is_wanted(t)]
        if outs and any(map(is_wanted, operands)):
            what = f"{[tuple(t.shape) for t in operands]} {kwargs}"
            yield operands, outs, what, said_by_rule(row, *call)


def is_wanted(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", [row for row in ROWS if row not in COMPOSED | set(RARE)])
def test_backward(row: str) -> None:
    """No call holds more than is said; and one holds that, but for half of a result."""
    held, gaps = flight.of(row), []
    for operands, outs, what, by_rule in large_calls(row):
        wanted = [t for t in operands if t.requires_grad]
        try:
            used = measure_back(outs, wanted)
        except RuntimeError:
            continue  # torch has no derivative of it, or none of these sizes
        most = allowed(held, outs[0], operands, wanted) + by_rule
        assert used <= (1 + SLACK) * most + SMALL, f"{used} bytes, {most} are said: {what}"
        gaps.append((most - used) / max(n_bytes(outs[0]), n_bytes(operands[0])))
    if row in flight.ROWS and row not in LESS:
        assert min(gaps, default=0.0) < 0.5, f"{min(gaps)} of a result more is said than is held"
