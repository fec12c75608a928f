# SPDX-License-Identifier: Apache-2.0
"""Find out whether something else holds the memory of a tensor, so that it must not be written."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

_OWN = 2  # references to a storage that one tensor and the query itself hold


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether something else holds the storage of a tensor."""
    if tensor.layout != torch.strided:  # a sparse gradient has no storage to ask
        return True
    return not counts_holders() or n_holders(tensor) > _OWN


def n_holders(tensor: torch.Tensor) -> int:
    """Return the reference count of a tensor's storage, with that of the query itself."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


@functools.cache
def counts_holders() -> bool:
    """Return whether this torch counts references to a storage as `is_shared` expects. If not,
    every gradient is taken to be shared, and copied."""
    alone, shared = (torch.empty(2, dtype=torch.float32, device="cpu") for _ in range(2))
    others = shared.detach(), shared[:1]
    counts = n_holders(alone), n_holders(shared)
    del others
    return (*counts, n_holders(shared)) == (2, 4, 2)


def owned(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients that may be added to in place: a copy of one whose memory is shared."""
    found, counts = [], counts_holders()
    for gradient in gradients:
        is_own = False
        if gradient.layout == torch.strided and counts and not gradient._is_zerotensor():
            storage = gradient.untyped_storage()
            n_holders = torch._C._storage_Use_Count(storage._cdata)
            is_own = n_holders <= _OWN and storage.nbytes() <= gradient.nbytes
            del storage
        found.append(gradient if is_own else gradient.clone())
    return found
