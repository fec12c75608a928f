# SPDX-License-Identifier: Apache-2.0
"""Count the calls of koila's Python functions, for tests and benchmarks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType

import koila

_FOLDER = os.path.dirname(koila.__file__) + os.sep


def frames_of(work: Callable[[], object]) -> int:
    """Return how many frames of koila's Python code `work` enters on this thread."""
    n_frames = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal n_frames
        n_frames += event == "call" and frame.f_code.co_filename.startswith(_FOLDER)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(before)
    return n_frames
