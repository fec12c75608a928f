# SPDX-License-Identifier: Apache-2.0
"""What the op table says that torch holds while a call runs, forward and back, as KlHeld has it."""

from __future__ import annotations

from typing import NamedTuple

from koila import _core


class Amount(NamedTuple):
    """Multiples of a call's result, of its first operand, and of one byte for each element of the
    larger of the two."""

    outs: float = 0.0
    ins: float = 0.0
    masks: float = 0.0


class Held(NamedTuple):
    """While a call runs, and while the gradient of operand 0, 1 and of any further one is made."""

    forward: Amount = Amount()
    backward: tuple[Amount, Amount, Amount] = (Amount(),) * 3
    relaid: float = 0.0  # results, where the gradient of the result is laid out otherwise
    handed_on: tuple[int, ...] = ()  # operands whose gradient is the result's
    is_wide: bool = False  # other gradients are made as large as the result
    is_stepwise: bool = False
    is_composed: bool = False
    is_of_terms: bool = False
    turns: bool = False

    @property
    def is_something(self) -> bool:
        """Whether more is held than operands, results and gradients."""
        return self[:6] != NOTHING[:6]


class Parts(NamedTuple):
    """What a chunk of a reduction leaves, what the graph that combines them keeps of each, and
    their gradients; and what else than by its call is kept and held on a chunk."""

    left: float
    combined: float
    seeds: float
    keeps: Amount | None
    held: Held | None
    of_row: bool  # not of the result, but of a row of the first operand


NONE = Amount()
NOTHING = Held()


def _held(told: _core._Held) -> Held:
    forward, outs, ins, masks, relaid, bits, *flags = told
    backward = tuple(Amount(*amounts, masks) for amounts in zip(outs, ins, strict=True))
    assert len(backward) == 3
    handed_on = tuple(k for k in range(8) if bits >> k & 1)
    return Held(Amount(*forward), backward, relaid, handed_on, *flags)


#: By the name of the row; the entry of a write is that of the call without it.
ROWS = {row["name"]: _held(row["held"]) for row in _core.op_table()}
#: In the order of KlReduce, and last the statistics of batch_norm, which only chunks need.
PARTS = [
    Parts(left, combined, seeds, keeps and Amount(*keeps), held and _held(held), of_row)
    for _, _, left, combined, seeds, keeps, held, of_row, _ in _core.parts_table()
]


def of(row: str | None) -> Held:
    """What a row holds in flight."""
    return ROWS[row] if row is not None else NOTHING


def parts_of(reduce: int, is_for_chunks: bool) -> Parts:
    """What a reduction leaves and holds."""
    return PARTS[-1 if is_for_chunks else reduce]
