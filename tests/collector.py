# SPDX-License-Identifier: Apache-2.0
"""The garbage collector, which comes when it likes: how much earlier tests left decides that."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Wrap a block after a collection, with none inside it but what it asks for."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
