# SPDX-License-Identifier: Apache-2.0
"""What rows hold in flight, against torch's allocator, for every row of the op table.

A row that has no last cell is said to hold nothing. Samples are of some bytes: they
are given so many rows that an operand has `LEAST`, and a result too much or too little shows.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import held
import opchunks
from all_samples import samples_of
from held import Amount, Held
from koila import _core
from koila.reductions.partials import REDUCTIONS
from koila.staged.facts import REDUCTION_NAMES
from profiled import bytes_over_time
from test_ops import CALLABLES

#: Rows that are not written: a write holds what the call without it does.
#: Of rows of many lengths test_uneven.py looks at each moment.
ROWS = sorted(
    row["name"]
    for row in _core.op_table()
    if row["kind"] != "INPLACE" and not row["name"].startswith("packed_")
)
#: Bytes of the largest operand at least.
LEAST = 64 * 1024
#: Numbers of no dim.
SMALL = 128
#: What torch copies a transposed matrix through.
TRANSPOSED = 60 * 60 * 8
#: Of what is said: numbers of no dim, and gradients of a few weights.
SLACK = 0.03
#: Rows that hold more than is said as they go back, for some ways of calling: so many times the
#: larger of result and first operand, and which ways.
MORE = {
    "__getitem__": (0.5, "one index after another"),
    "cosine_embedding_loss": (1.5, "composed of other calls"),
    "cosine_similarity": (10.0, "two operands that are both broadcast"),
    "cross_entropy_loss": (0.5, "chances for labels, of which some are smoothed"),
    "div": (1.0, "complex numbers, which are conjugated"),
    "einsum": (2.5, "an operand that is broadcast"),
    "gradient_of": (1.0, "the calls in between, which are counted when it is recorded"),
    "group_norm": (2.5, "two numbers for each row and channel, much beside a few pixels"),
    **dict.fromkeys("conv1d conv2d conv3d".split(), (0.9, "padding on one side")),
    **dict.fromkeys(
        "gru lstm rnn_relu rnn_tanh".split(),
        (4.5, "gates of all steps, beside what was kept of them, which goes meanwhile"),
    ),
    "hinge_embedding_loss": (0.5, "composed of other calls"),
    "instance_norm": (1.5, "a weight that is repeated for each row"),
    "kl_div": (2.5, "composed of other calls"),
    "linalg_vector_norm": (3.0, "norms other than the second"),
    "pad": (2.5, "modes other than constant"),
    "pairwise_distance": (1.5, "norms other than the second"),
    "prod": (0.5, "all of it, where an entry is zero"),
    "rms_norm": (3.1, "what was kept of the first of its calls, which goes meanwhile"),
    "scaled_dot_product_attention": (4.5, "composed of other calls"),
    "triplet_margin_loss": (1.5, "composed of other calls"),
}
#: The same while they run, in a program without a graph.
MORE_FORWARD = {
    **dict.fromkeys(
        "all any bilinear clone contiguous flatten logsumexp masked_fill pad ravel stack".split(),
        0.5,
    ),
    **dict.fromkeys("__getitem__ acosh addmm clamp div xlogy".split(), 1.0),
    **dict.fromkeys("Tensor_where avg_pool2d cdist einsum".split(), 1.5),
    **dict.fromkeys("feature_alpha_dropout group_norm".split(), 1.5),
    **dict.fromkeys("log_sigmoid max_pool2d max_pool2d_with_indices".split(), 1.5),
    **dict.fromkeys("normal rms_norm where".split(), 1.5),
    **dict.fromkeys("instance_norm multinomial".split(), 2.0),
    "gradient_of": 3.0,
    **dict.fromkeys("alpha_dropout cat".split(), 2.5),
    "cross_entropy_loss": 3.5,
    "poisson_nll_loss": 6.5,
    "cosine_similarity": 6.5,
    "scaled_dot_product_attention": 2.0,
    "count_nonzero": 8.5,
}
#: Kernels that work in other memory on another CPU: less may be more than enough there.
BY_CPU = re.compile("conv|gru|lstm|rnn|scaled_dot|addmm|matmul|bilinear|einsum|gradient_of")
#: No call of these has a gradient.
NO_BACKWARD = frozenset(
    """all any argmax argmin argsort bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor bool byte char count_nonzero detach empty_like eq floor_divide
    full_like ge gt int isinf isnan isneginf isposinf le logical_and logical_not logical_or
    logical_xor long lt max_pool1d multinomial ne new_empty new_full new_ones new_zeros one_hot
    ones_like rand_like randint_like randn_like searchsorted short signbit zeros_like""".split()
)
#: No call of these can be given more rows, as none is cut alone; of programs see test_orders.py.
NOT_GROWN = {"ctc_loss", "_grouped_mm", "histc"}
#: Rows that hold less than is said for these ways of calling; more is said on purpose.
LESS = {
    **dict.fromkeys("median nanmedian".split(), "torch finds the place again by comparing"),
    **dict.fromkeys("cat stack".split(), "slices of one gradient are handed on"),
    "cumprod": "zeros take more, and samples have none",
    **dict.fromkeys("gru_cell lstm_cell".split(), "a bias: its gates are made by one kernel"),
    "index_add": "the gradient of the result is handed on",
    "margin_ranking_loss": "targets that need no gradient",
}


def test_every_reduction_leaves_something() -> None:
    *found, statistics = held.PARTS
    names = [name for name, parts in zip(REDUCTION_NAMES, found, strict=True) if parts.left > 0]
    assert sorted(names) == sorted(REDUCTIONS)
    assert statistics.left == 2


def test_writes_hold_what_calls_do() -> None:
    """A write has no cell of its own; without the call that it is named after it holds nothing."""
    written = {row["name"] for row in _core.op_table() if row["kind"] == "INPLACE"}
    found = {row: held.of(row) for row in held.ROWS if row in written}
    assert found == {row: held.ROWS.get(row[:-1], held.NOTHING) for row in found}
    assert sum(entry.is_something for entry in found.values()) > 30


def n_bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def measure(run: Callable[[], object]) -> tuple[int, int]:
    """The most bytes beyond what was there before, and how many there are more after it."""
    sums = bytes_over_time(run)
    return max(sums, default=0), sums[-1] if sums else 0


def relaid(x: Tensor) -> Tensor:
    """Lay it out otherwise in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x


def measure_back(outs: list[Tensor], wanted: list[Tensor], is_laid_otherwise: bool) -> int:
    """The most bytes of a backward beyond what was there before it."""
    seeds = [relaid(seed) if is_laid_otherwise else seed for seed in map(torch.randn_like, outs)]
    return measure(lambda: torch.autograd.grad(outs, wanted, seeds, allow_unused=True))[0]


def said(amount: Amount, out: Tensor, first: Tensor) -> float:
    larger = max(out.numel(), first.numel())
    return amount.outs * n_bytes(out) + amount.ins * n_bytes(first) + amount.masks * larger


def allowed(found: Held, out: Tensor, operands: list[Tensor], wanted: list[Tensor]) -> float:
    """Bytes for the gradients and what is in flight, as sweep.c has it, of results laid alike."""
    wide = more = 0.0
    for k, operand in enumerate(operands):
        if operand.requires_grad:
            more = max(more, said(found.backward[min(k, 2)], out, operands[0]))
            is_wide = found.is_wide and k not in found.handed_on and operand.numel() < out.numel()
            wide += n_bytes(out) if is_wide else 0
    return n_bytes(*wanted) + wide + more


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


def large_calls(row: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the samples of a row with many rows."""
    for args, kwargs in samples_of(row):
        call = grown(row, args, kwargs)
        if call is not None:
            yield tuple(call[0]), call[1]


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def is_wanted(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def assert_within(used: float, most: float, more: float, operands: list[Tensor], row: str) -> bool:
    """Assert that no more is used than is said, but for what is known; tell whether it was."""
    shapes = [tuple(t.shape) for t in operands]
    assert used <= most + more, f"{row}: {used} bytes, {most} are said: {shapes}"
    return used > most


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", ROWS)
def test_backward(row: str) -> None:
    """No call holds more than is said; and one holds that, but for half of a result."""
    entry, gaps, is_more = held.of(row), [], False
    for args, kwargs in large_calls(row):
        for is_laid_otherwise in (False, True) if entry.relaid else (False,):
            operands = tensors_of([args, kwargs])
            outs = list(filter(is_wanted, tensors_of(CALLABLES[row](*args, **kwargs))))
            wanted = list(filter(is_wanted, operands))
            if not outs or not wanted:
                continue
            try:
                used = measure_back(outs, wanted, is_laid_otherwise)
            except RuntimeError:
                continue  # torch has no derivative of it, or none of these sizes
            saves: Any = _core.infer(row, args, kwargs)["saves"]
            most = allowed(entry, outs[0], operands, wanted)
            most += saves["bytes_backward"] + saves["bytes_row"]
            most += saves["bytes_extra"] if entry.is_composed else 0
            most += entry.relaid * n_bytes(outs[0]) + TRANSPOSED if is_laid_otherwise else 0
            unit = max(n_bytes(outs[0]), n_bytes(operands[0]))
            more = MORE.get(row, (0.0, ""))[0] * unit
            is_more |= assert_within(used, (1 + SLACK) * most + SMALL, more, operands, row)
            gaps.append((most - used) / unit)
    assert (not gaps) == (row in NO_BACKWARD | NOT_GROWN), f"{len(gaps)} calls were measured"
    assert is_more == (row in MORE) or BY_CPU.search(row), "it is said to hold more than is said"
    if entry.is_something and row not in LESS:
        assert min(gaps, default=0.0) < 0.5, f"{min(gaps)} of a result more is said than is held"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", ROWS)
def test_forward(row: str) -> None:
    """Without a graph: a workspace, what a graph would keep, and what is in flight; recorded with a
    gradient to come, or without."""
    entry, n_calls, is_more = held.of(row), 0, False
    for args, kwargs in large_calls(row):
        saves: Any = _core.infer(row, args, kwargs)["saves"]
        further = float(saves["bytes_extra"] + saves["bytes_fixed"])
        further = saves["bytes_steps"] if entry.is_stepwise else further
        most = further + saves["bytes_workspace"]
        args, kwargs = tree_map_only(Tensor, torch.detach, (args, kwargs))
        saves = _core.infer(row, args, kwargs)["saves"]
        run = functools.partial(CALLABLES[row], *args, **kwargs)
        with torch.no_grad():
            outs = tensors_of(run())
            peak, after = measure(run)
        if not outs:
            continue
        operands = tensors_of([args, kwargs])
        most = min(most, saves["bytes_workspace"] + saves["bytes_steps"]) + saves["bytes_row"]
        most += said(entry.forward, outs[0], operands[0])
        used = peak - max(n_bytes(*outs), after)
        unit = max(n_bytes(outs[0]), n_bytes(operands[0]))
        slack, more = SLACK * (most + unit) + SMALL, MORE_FORWARD.get(row, 0.0) * unit
        is_more |= assert_within(used, most + slack, more, operands, row)
        n_calls += 1
    assert (n_calls == 0) == (row in NOT_GROWN), f"{n_calls} calls were measured"
    assert is_more == (row in MORE_FORWARD) or BY_CPU.search(row), "it is said to hold more"
