# SPDX-License-Identifier: Apache-2.0
"""Calls for the Fourier transforms of ops_nn.def, as samples.py has them for the others."""

from __future__ import annotations

import functools

import torch

from samples_kit import Sample, call, f, i


def signals(n_dims: int) -> list[Sample]:
    """Arguments of a transform of one dim, of two, or of as many as are given (0)."""
    if n_dims == 1:
        return [
            call(f(4, 3, 5)),
            call(f(4, 3, 5), 8, 1, "ortho"),
            call(f(4, 5, 2), n=3, dim=1),
            call(f(4, 3, 5).transpose(1, 2), norm="forward"),
            call(f(4, 3), dim=0),
            call(i(4, 3)),
            call(f(4, 3, dtype=torch.float32)),
        ]
    return [
        call(f(4, 3, 5), dim=(-2, -1)),
        call(f(4, 3, 5), (4, 7), (1, 2), "ortho"),
        call(f(4, 3, 5, 2), dim=(2, 1)),
        call(f(4, 2, 3, 5).transpose(1, 2), (2, 2), norm="forward"),
        call(f(4, 3)) if n_dims == 0 else call(f(4, 3, 5)),
    ]


def spectra(n_dims: int) -> list[Sample]:
    """Likewise, of real and of complex numbers."""
    return [*signals(n_dims), *halves(n_dims)]


def halves(n_dims: int) -> list[Sample]:
    """Likewise, of complex numbers alone."""
    made = []
    for (x, *args), kwargs in signals(n_dims):
        if x.is_floating_point():
            made.append(Sample((torch.complex(x, x.cos()), *args), kwargs))
    return made


TRANSFORMS = {
    f"fft_{name}{ending}": functools.partial(make, n_dims)
    for ending, n_dims in (("", 1), ("2", 2), ("n", 0))
    for make, names in (
        (signals, ("rfft",)),
        (spectra, ("fft", "irfft")),
        (halves, ("ifft",)),
    )
    for name in names
}
