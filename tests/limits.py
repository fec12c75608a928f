"""Limits of a step's own, in a process in which other tests have left tensors behind."""

from __future__ import annotations

import torch

from koila import budget, storages


def there() -> int:
    """Bytes of all tensors on the CPU, which count against every limit.

    What is garbage now would be room later, and what a walk has not found yet would be counted
    when the step is about to be refused.
    """
    storages.look_again(True)
    return budget.taken(torch.device("cpu"), [])
