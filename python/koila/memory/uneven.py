# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: the bytes that a recurrent layer over them needs, and the most time steps that
a chunk of them has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from koila.basics.rows import UNIT, grid, largest

_MOST = 1 << 22  # the most entries of a table of chunks and lengths: larger ones are not made


def turns(lengths: Tensor) -> int:
    """Count the states that a layer which runs backward through time copies.

    Going back from the longest sequence, at each length where shorter sequences join, it copies the
    states of all sequences that are as long or longer.
    """
    return int(_turns(lengths, torch.zeros_like(lengths), 1))


def _turns(lengths: Tensor, chunks: Tensor, n_chunks: int) -> Tensor:
    """Return the most turns of any chunk; `chunks` holds the number of each row's chunk."""
    most = int(lengths.max())
    count = torch.bincount(chunks * (most + 1) + lengths, minlength=n_chunks * (most + 1))
    count = count.view(n_chunks, most + 1)
    longer = count.flip(1).cumsum(1).flip(1)  # sequences of this length or longer
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
    drops: bool = False,
) -> tuple[int, ...]:
    """Compute the fields of a KlUneven (ops.h): how many steps and turns (see `turns`) the rows of
    a recurrent layer have, two totals, and the bytes that it needs for each step and turn.

    They follow torch's loop over the steps (RNN.cpp). packed.py gathers the steps from padded rows
    and scatters the results back by indices. If rows are sorted by length and the batch is the
    first dim of `x` (`is_first`), the result is a transposed view; if they are not sorted, the
    states are copied. `drops`: there is dropout between its layers.
    """
    size, n_both, n_steps = x.element_size(), 1 + is_both, int(lengths.sum())
    is_transposed = is_first and is_sorted
    copied = sum(one.numel() * size for one in states) + 16 * lengths.numel()
    # Bytes a step: of the cell's state, of the output and of the input.
    cell, out, entered = (size * one.shape[-1] for one in (states[-1], states[0], x))
    # Of the gates, and of the int64 indices by which a step is gathered and scattered.
    gates, index = n_gates * cell, (16 if is_transposed else 8)
    # What one direction keeps: gates and states, or copies of them, and the result.
    state = (7 if out != cell else 6) * cell + out if n_gates > 1 else out
    below = n_both * out if n_layers > 1 else 0  # the output of the layer before
    kept = entered + n_layers * n_both * state + (n_layers - 1) * n_both * out + index
    kept += (n_layers - 1) * n_both * out if drops else 0  # the masks
    kept += 0 if is_sorted else -(-copied // n_steps)
    kept_of_turn = n_layers * out if n_gates == 1 and is_both else 0
    # The product of the input for all gates, and the results, step by step and joined.
    run = max(gates + 2 * out, 4 * out) if is_both else gates + out
    run += 16 if drops else 0  # the step and the row of each entry of a mask
    run_of_turn = out if n_gates > 1 and is_both else 0
    # The gradient of the slice of a step is as large as the gradient of the whole tensor, to which
    # it is added. torch runs the backward of the second direction after that of the first.
    back = n_both * out + 2 * gates
    sent = below or (entered if x.requires_grad else 0)
    second = back - state + sent if is_both else 0
    ends = [2 * entered + state + back if is_both else 0, (1 + n_both) * entered + gates]
    amounts = {
        "kept": (kept, kept_of_turn),
        "run": (kept + run, kept_of_turn + run_of_turn),
        "plain": (run + entered + below + out + index, run_of_turn),
        "beside": (n_both * out, 0),
        "last": (entered if x.requires_grad else 0, 0),
        "back": (max(back, max(ends) - kept) if x.requires_grad else back, 0),
        "second": (second, -out if n_gates == 1 and is_both else 0),
        "weights": (back - gates, 0),
    }
    numbers = (n_steps, turns(lengths), 2 * gates * out // size, int(is_transposed))
    return *numbers, *(number for pair in amounts.values() for number in pair)


def _grids(n_rows: int, rows: int, n_chunks: int) -> list[list[tuple[int, int]]]:
    """Return the grids of chunks with at most `rows` rows that the planner may choose."""
    unit = rows // UNIT * UNIT or 1 << rows.bit_length() - 1
    sizes = [(n_chunks, 1), (-(-n_rows // rows), rows), (-(-n_rows // unit), unit)]
    if largest(n_rows, n_chunks, UNIT) <= rows:
        sizes.append((n_chunks, UNIT))
    return [grid(n_rows, *size) for size in dict.fromkeys(sizes)]


def _worst(
    lengths: Tensor, n_turns: int, bounds: Sequence[tuple[int, int]], n_rows: float
) -> tuple[float, float]:
    """Return the most steps, and turns, of any range of rows, relative to `n_rows` average rows.
    All rows have `n_turns` turns."""
    sums = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    starts, stops = torch.tensor(bounds).unbind(1)
    most, most_turns = int((sums[stops] - sums[starts]).max()), n_turns
    if n_turns and len(bounds) * int(lengths.max()) <= _MOST:
        ranges = torch.arange(len(bounds)).repeat_interleave(stops - starts)
        most_turns = int(_turns(lengths, ranges, len(bounds)))
    share = n_rows / lengths.numel()
    return most / (int(sums[-1]) * share), most_turns / (max(n_turns, 1) * share)


def parts(
    all_lengths: Sequence[Tensor], n_rows: int, rows: int, n_pieces: int = 1
) -> tuple[float, float, float, float]:
    """Return how many times the average steps, and turns, the worst chunk of `rows` rows has; then
    the same of the worst of the `n_pieces` pieces of a chunk that its last layers run in.
    `all_lengths` are, for each axis, the lengths of its rows; `n_rows`: of the longest axis."""
    n_chunks = -(-n_rows // max(rows, 1))
    if n_chunks == n_pieces == 1:
        return 1.0, 1.0, 1.0, 1.0
    of_chunks, of_pieces = [(0.0, 0.0)], [(0.0, 0.0)]
    for lengths in all_lengths:
        n, n_turns = lengths.numel(), turns(lengths)
        own = n if n_chunks == 1 else rows if n == n_rows else largest(n, n_chunks)
        for bounds in _grids(n, own, n_chunks) if n_chunks > 1 else [[(0, n)]]:
            of_chunks.append(_worst(lengths, n_turns, bounds, own))
            if n_pieces == 1:
                continue
            pieces = [
                (start + first, start + last)
                for start, stop in bounds
                for first, last in grid(stop - start, n_pieces)
            ]
            # A piece is measured with one row more than its share: see of_piece() in measure.c.
            of_pieces.append(_worst(lengths, n_turns, pieces, own / n_pieces + 1))
    found = of_chunks, of_pieces if n_pieces > 1 else of_chunks
    of_chunk, of_piece = (tuple(map(max, zip(*one, strict=True))) for one in found)
    return *of_chunk, *of_piece
