# SPDX-License-Identifier: Apache-2.0
"""Find out whether something else holds the memory of a tensor, so that it must not be written."""

from __future__ import annotations

import functools

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


def owned(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient that may be added to in place: a copy of `grad` if its memory is shared."""
    if grad.layout == torch.strided and counts_holders() and not grad._is_zerotensor():
        storage = grad.untyped_storage()  # asked for once: this runs for each gradient of a chunk
        n_holders = torch._C._storage_Use_Count(storage._cdata)
        if n_holders <= _OWN and storage.nbytes() <= grad.nbytes:
            return grad
    return grad.clone()
