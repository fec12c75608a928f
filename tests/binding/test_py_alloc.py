# SPDX-License-Identifier: Apache-2.0
"""The counters of the core's allocations."""

from __future__ import annotations

from typing import Any

import pytest

from binding_kit import batch, in_a_thread, pending
from koila import _core

pytestmark = pytest.mark.sanitize

core: Any = _core


def test_blocks_and_requests_of_memory() -> None:
    in_a_thread(pending)  # what is kept once is there
    before = core.n_blocks()
    lazy = in_a_thread(pending)
    assert core.n_blocks() > before
    del lazy
    assert core.n_blocks() == before
    core.fail_alloc_after(0)
    try:
        with pytest.raises(MemoryError):
            in_a_thread(pending)
    finally:
        core.fail_alloc_after(-1)
    assert in_a_thread(lambda: pending().tolist()) == (batch() * 2).tolist()


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError):
        core.fail_alloc_after("x")
