# SPDX-License-Identifier: Apache-2.0
"""Rows of many lengths: what a recurrent layer over their steps takes, and the steps that a chunk
of them has at most."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from koila.basics.rows import UNIT, grid, largest

_MOST = 1 << 22  # entries of a table of chunks and lengths


def turns(lengths: Tensor) -> int:
    """Steps where a layer that goes back through time takes up more rows: of each, all that it has
    from there on, whose states it copies."""
    return int(_turns(lengths, torch.zeros_like(lengths), 1))


def _turns(lengths: Tensor, chunks: Tensor, n_chunks: int) -> Tensor:
    """The most turns of a chunk; `chunks` says in which each row is."""
    most = int(lengths.max())
    count = torch.bincount(chunks * (most + 1) + lengths, minlength=n_chunks * (most + 1))
    count = count.view(n_chunks, most + 1)
    longer = count.flip(1).cumsum(1).flip(1)  # rows that are as long or longer
    return (longer * ((count > 0) & (longer > count))).sum(1).max()


def needs(
    x: Tensor,
    states: Sequence[Tensor],
    lengths: Tensor,
    n_gates: int,
    n_layers: int,
    is_both: bool,
    is_first: bool,
    is_sorted: bool,
) -> tuple[int, ...]:
    """The numbers of a KlUneven (ops.h), as torch goes through the steps (RNN.cpp), which packed.py
    takes out of the rows and puts back by indices. Where rows are sorted, and come first, what it
    gives is a transposed view; where they are not, states are copied.
    """
    size, n_both, n_steps = x.element_size(), 1 + is_both, int(lengths.sum())
    is_turned = is_first and is_sorted
    copied = sum(one.numel() * size for one in states) + 16 * lengths.numel()
    cell, out, given = (size * one.shape[-1] for one in (states[-1], states[0], x))
    gates, index = n_gates * cell, (16 if is_turned else 8)  # int64: where a step is taken, and put
    # Of one direction: gates and states, or their copies, and the result.
    state = (7 if out != cell else 6) * cell + out if n_gates > 1 else out
    below = n_both * out if n_layers > 1 else 0  # what comes from the layer before
    kept = given + n_layers * n_both * state + (n_layers - 1) * n_both * out + index
    kept += 0 if is_sorted else -(-copied // n_steps)
    kept_of_turn = n_layers * out if n_gates == 1 and is_both else 0
    # The input's part of all gates, and results, step by step and joined.
    run = max(gates + 2 * out, 4 * out) if is_both else gates + out
    run_of_turn = out if n_gates > 1 and is_both else 0
    # The gradient of a step's part is as large as that of all, which it is added to. The second
    # direction comes when the first has sent its gradient back.
    back = n_both * out + 2 * gates
    sent = below or (given if x.requires_grad else 0)
    second = back - state + sent if is_both else 0
    ends = [2 * given + state + back if is_both else 0, (1 + n_both) * given + gates]
    amounts = {
        "kept": (kept, kept_of_turn),
        "run": (kept + run, kept_of_turn + run_of_turn),
        "plain": (run + given + below + out + index, run_of_turn),
        "beside": (n_both * out, 0),
        "last": (given if x.requires_grad else 0, 0),
        "back": (max(back, max(ends) - kept) if x.requires_grad else back, 0),
        "second": (second, -out if n_gates == 1 and is_both else 0),
        "weights": (back - gates, 0),
    }
    numbers = (n_steps, turns(lengths), 2 * gates * out // size, int(is_turned))
    return *numbers, *(number for pair in amounts.values() for number in pair)


#: Where what is meant begins in the numbers of a KlUneven.
_KEPT, _RUN, _PLAIN, _BACK = 4, 6, 8, 14


def whole(
    x: Tensor,
    states: Sequence[Tensor],
    lengths: Tensor,
    n_gates: int,
    n_layers: int,
    is_both: bool,
    weights: Sequence[Tensor],
) -> int:
    """Bytes at the worst moment of torch's own call over the steps of all rows, with dropout
    between layers, and its backward."""
    found = needs(x, states, lengths, n_gates, n_layers, is_both, True, True)
    n_steps, n_turns, size = found[0], found[1], x.element_size()
    # Its steps are there, and no index is made; but noise between layers is.
    beside = (n_layers - 1) * (1 + is_both) * states[0].shape[-1] * size
    beside -= x.shape[-1] * size + 16

    def total(*firsts: int) -> int:
        of_step, of_turn = (sum(found[first + k] for first in firsts) for k in (0, 1))
        return (of_step + beside) * n_steps + of_turn * n_turns

    if not torch.is_grad_enabled():
        return total(_PLAIN)
    gradients = sum(one.nbytes for one in weights if one.requires_grad)
    return max(total(_RUN), total(_KEPT, _BACK) + gradients)


def _grids(n_rows: int, rows: int, n_chunks: int) -> list[list[tuple[int, int]]]:
    """The ways in which the planner makes chunks of so many rows at most."""
    unit = rows // UNIT * UNIT or 1 << rows.bit_length() - 1
    sizes = [(n_chunks, 1), (-(-n_rows // rows), rows), (-(-n_rows // unit), unit)]
    if largest(n_rows, n_chunks, UNIT) <= rows:
        sizes.append((n_chunks, UNIT))
    return [grid(n_rows, *size) for size in dict.fromkeys(sizes)]


def parts(all_lengths: Sequence[Tensor], n_rows: int, rows: int) -> tuple[float, float]:
    """The most steps, and turns, of a chunk of `rows` rows of `n_rows`: of as many rows on average
    how many times.

    Args:
        all_lengths: each [rows of an axis] int64.
        n_rows: of the longest axis.
    """
    n_chunks = -(-n_rows // max(rows, 1))
    if n_chunks == 1:
        return 1.0, 1.0
    steps = of_turns = 0.0
    for lengths in all_lengths:
        n = lengths.numel()
        own = rows if n == n_rows else largest(n, n_chunks)
        sums = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        share, n_turns = own / n, turns(lengths)
        for bounds in _grids(n, own, n_chunks):
            starts, stops = torch.tensor(bounds).unbind(1)
            most = int((sums[stops] - sums[starts]).max())
            steps = max(steps, most / (int(sums[-1]) * share))
            if n_turns and len(bounds) * int(lengths.max()) <= _MOST:
                chunks = torch.arange(len(bounds)).repeat_interleave(stops - starts)
                most = int(_turns(lengths, chunks, len(bounds)))
            of_turns = max(of_turns, most / (n_turns * share)) if n_turns else of_turns
    return steps, of_turns
