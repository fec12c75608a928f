# SPDX-License-Identifier: Apache-2.0
"""What a memory plan says of one moment of a step, and of one value that is kept for backward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """One call of a step, forward or back, and the bytes that are there beside what was there
    before the step.

    Attributes:
        phase: "forward" or "backward".
        call: the call, as "conv2d".
        where: its line, as "model.py:40".
        layer: the path of its module; empty: it is in none.
        activations: bytes of results that later calls or the backward read.
        outputs: bytes of results that the script holds.
        gradients: bytes of gradients, those of parameters among them.
        temporaries: bytes that are there only while the call runs.
    """

    phase: str
    call: str
    where: str
    layer: str
    activations: int
    outputs: int
    gradients: int
    temporaries: int

    @property
    def n_bytes(self) -> int:
        """All of them."""
        return self.activations + self.outputs + self.gradients + self.temporaries

    def __str__(self) -> str:
        layer = f" of layer {self.layer!r}" if self.layer else ""
        return f"the {self.phase} of {self.call}{layer} ({self.where})"


@dataclass(frozen=True)
class Value:
    """What autograd keeps of one call for its backward.

    Attributes:
        call: the call, as "relu".
        where: its line, as "model.py:40".
        layer: the path of its module; empty: it is in none.
        n_bytes: bytes of the whole batch.
        in_chunk: of these, what is there at one time.
    """

    call: str
    where: str
    layer: str
    n_bytes: int
    in_chunk: int
