# SPDX-License-Identifier: Apache-2.0
"""Add up the sparse gradients of chunks, such as those of `nn.Embedding(..., sparse=True)`.

torch's sum of two sparse tensors appends the entries of one to those of the other, so the sum over
all chunks would be as large as their incoming gradients together. Once it has more entries than the
dense gradient has rows, entries of the same row are added up, a slice at a time: that takes twice
the memory of the slice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeGuard

import torch

_SLICE = 1024  # entries; fewer are not worth a call


def is_sparse(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return gradient is not None and gradient.layout == torch.sparse_coo


@contextlib.contextmanager
def set_aside(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Take the sparse gradients of leaves away during the backward of a chunk, since torch would
    copy the chunk's to append it. Afterwards add them up."""
    found = [(leaf, leaf.grad) for leaf in leaves if is_sparse(leaf.grad)]
    for leaf, _ in found:
        leaf.grad = None
    yield
    while found:
        leaf, total = found.pop()
        leaf.grad = total if leaf.grad is None else _sum(total, leaf.grad)


def shrink(gradient: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient with one entry a row, if it has more entries than rows."""
    return _sum(None, gradient) if gradient._nnz() > gradient.shape[0] else gradient


@torch.no_grad()
def _sum(total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    n_rows, n = gradient.shape[0], gradient._nnz()
    if total is not None and (not is_sparse(gradient) or total._nnz() + n <= n_rows):
        return total + gradient
    indices, values, step = gradient._indices(), gradient._values(), max(n_rows, _SLICE)
    for start in range(0, n, step):
        part = torch.sparse_coo_tensor(
            indices[:, start : start + step],
            values[start : start + step],
            gradient.shape,
            check_invariants=False,
        )
        total = (part if total is None else total + part).coalesce()
    assert total is not None
    return total
