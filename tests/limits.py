# SPDX-License-Identifier: Apache-2.0
"""Limits of a step's own, in a process in which other tests have left tensors behind; and needs
that are made up."""

from __future__ import annotations

import struct

import torch

from koila.memory import budget, storages
from koila.memory.estimates import Estimate


def there() -> int:
    """Bytes of all tensors on the CPU, which count against every limit.

    What is garbage now would be room later, and what a walk has not found yet would be counted
    when the step is about to be refused.
    """
    storages.look_again(True)
    return budget.taken(torch.device("cpu"), [])


def made_up(rows: int, fixed: float, per_row: float, per_chunk: float = 0.0) -> Estimate:
    """What a program of one moment needs, which is that of its first call: a KlMoment, sweep.h."""
    return Estimate(struct.pack("dddffffIII?3x", fixed, per_row, per_chunk, *(0,) * 7, False), rows)
