# SPDX-License-Identifier: Apache-2.0
"""Calls for the Fourier transforms of ops_nn.def, as samples.py has them for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from samples_kit import Sample, call, f


def signals() -> Iterator[tuple[torch.Tensor, tuple[int, ...], int]]:
    """Yield real numbers, the dims to transform, and how the result is normalized."""
    yield f(4, 3, 5), (2,), 0
    yield f(4, 5, 3), (1,), 1
    yield f(4, 3, 5).transpose(1, 2), (2,), 2
    yield f(4, 3), (0,), 0
    yield f(4, 3, dtype=torch.float32), (1,), 0
    yield f(4, 3, 5), (1, 2), 0
    yield f(4, 3, 5, 2), (2, 1), 1
    yield f(4, 2, 3, 5).transpose(1, 2), (2, 3), 0


def spectra(last: Callable[[int], int]) -> list[Sample]:
    """Calls on complex numbers; `last` gives the last argument for the size of the last dim."""
    return [
        call(torch.complex(x, x.cos()), dims, norm, last(x.shape[dims[-1]]))
        for x, dims, norm in signals()
    ]


TRANSFORMS: dict[str, Callable[[], list[Sample]]] = {
    "_fft_c2c": lambda: [*spectra(lambda n: True), *spectra(lambda n: False)],
    "_fft_c2r": lambda: [*spectra(lambda n: 2 * n - 2), *spectra(lambda n: 2 * n - 1)],
    "_fft_r2c": lambda: [call(*one, is_half) for one in signals() for is_half in (True, False)],
}
