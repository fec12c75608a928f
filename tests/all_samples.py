# SPDX-License-Identifier: Apache-2.0
"""The samples of every row of the op table."""

from __future__ import annotations

from collections.abc import Iterator

import samples
from samples_fft import TRANSFORMS
from samples_images import IMAGES
from samples_kit import Sample
from samples_loss import LOSSES
from samples_nn import DRAWS, LAYERS, PRODUCTS

SAMPLES = {**samples.SAMPLES, **PRODUCTS, **TRANSFORMS, **IMAGES, **LAYERS, **DRAWS, **LOSSES}


def samples_of(row: str) -> Iterator[Sample]:
    """Make the calls of a row."""
    yield from SAMPLES[row]()
