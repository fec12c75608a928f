# SPDX-License-Identifier: Apache-2.0
"""The entries of a memory plan: moments of a step, and values that are kept for backward."""

from __future__ import annotations

from dataclasses import dataclass

#: The phases of a step, in order.
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer's step"


@dataclass(frozen=True)
class Moment:
    """A call of a step, forward or backward, and the bytes alive while it runs, without those that
    existed before the step.

    Attributes:
        phase: "forward" or "backward".
        call: the name of the call, such as "conv2d".
        where: its line, such as "model.py:40".
        layer: the path of its module; empty if it is in none.
        activations: bytes of results that later calls or the backward read.
        outputs: bytes of results that the script holds.
        gradients: bytes of gradients, those of parameters included.
        temporaries: bytes that are allocated only while the call runs.
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
        """The sum of all kinds of bytes."""
        return self.activations + self.outputs + self.gradients + self.temporaries

    def __str__(self) -> str:
        layer = f" of layer {self.layer!r}" if self.layer else ""
        return f"the {self.phase} of {self.call}{layer} ({self.where})"


@dataclass(frozen=True)
class Value:
    """A result of a call that autograd saves for backward.

    Attributes:
        call: the name of the call, such as "relu".
        where: its line, such as "model.py:40".
        layer: the path of its module; empty if it is in none.
        n_bytes: bytes for the whole batch.
        in_chunk: bytes for one chunk.
    """

    call: str
    where: str
    layer: str
    n_bytes: int
    in_chunk: int
