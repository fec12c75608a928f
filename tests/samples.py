# SPDX-License-Identifier: Apache-2.0
"""Calls for every row, small enough to be cut in every way. A row without one fails test_ops.

The first dim is the batch: 4 rows, a number that no other size shares where it matters, and more
where it is merged with others. A sample is made anew for each use: in-place ops write it.
"""

from __future__ import annotations

from collections.abc import Callable

import samples_elementwise
import samples_move
import samples_reduce
from samples_kit import Sample

SAMPLES: dict[str, Callable[[], list[Sample]]] = {
    **samples_elementwise.SAMPLES,
    **samples_move.SAMPLES,
    **samples_reduce.SAMPLES,
}
