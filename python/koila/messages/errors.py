# SPDX-License-Identifier: Apache-2.0
"""The exceptions koila raises by itself; torch's own pass through unchanged."""

from __future__ import annotations

import os
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from koila.basics.lines import INSIDE

if TYPE_CHECKING:
    from koila.messages.memory_plan import MemoryPlan


class KoilaError(RuntimeError):
    """A program that koila cannot run with exactly eager's numbers, with op, line and reason."""


class StaleError(KoilaError):
    """A tensor was changed between the moment a call was recorded and the moment it ran."""


class NotInChunksError(KoilaError):
    """A run in chunks found that it cannot be right; the program is then run whole."""


class MemoryLimitError(KoilaError, torch.OutOfMemoryError):
    """Not even one sample at a time fits into the memory there is.

    Attributes:
        plan: what the step takes in the chunks that need least, as `koila.plan` says it; None where
            a call was refused that is in no chunks.
    """

    plan: MemoryPlan | None = None


#: For who works on koila: what a traceback shows has koila's own frames too.
_SHOWS_FRAMES = os.environ.get("KOILA_FRAMES", "") not in ("", "0")
#: How the path of koila's own files begins.
_OWN = INSIDE[0]


def hide_frames(error: BaseException) -> None:
    """Leave koila's own frames out of the traceback of an error, and what they called of torch and
    Python on the way to other frames of koila: the user's stay, and torch's where it raised.

    An error that koila's code raised and means nobody to see is a mistake in koila: that keeps all.
    """
    frames: list[TracebackType] = []
    found = error.__traceback__
    while found is not None:
        frames.append(found)
        found = found.tb_next
    is_own = bool(frames) and frames[-1].tb_frame.f_code.co_filename.startswith(_OWN)
    is_meant = isinstance(error, KoilaError) or _is_of_call(error) or not is_own
    if _SHOWS_FRAMES or not is_meant:
        return
    kept: list[TracebackType] = []
    for frame in frames:
        path = frame.tb_frame.f_code.co_filename
        if path.startswith(_OWN):
            while kept and kept[-1].tb_frame.f_code.co_filename.startswith(INSIDE):
                kept.pop()
        else:
            kept.append(frame)
    rest: TracebackType | None = None
    for frame in reversed(kept):
        rest = TracebackType(rest, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = rest


def _is_of_call(error: BaseException) -> bool:
    """Whether a recorded call raised it, as the note says that it was given."""
    return any(note.startswith("koila: recorded at") for note in getattr(error, "__notes__", ()))


# The words of torch, oneDNN and CUDA's libraries for it, where the type does not say so.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "could not create a primitive",
    "out of memory",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, so that smaller chunks may help; a limit too small is not it."""
    if isinstance(error, MemoryLimitError):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


# Of how memory lies. A chunk, of one row above all, can lie otherwise than the whole, of which the
# call is legal.
_OF_LAYOUT = ("refer to a single memory location", "view size is not compatible")


def is_of_layout(error: BaseException) -> bool:
    """Whether a call was refused for how its tensors lie in memory."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_LAYOUT)


def let_go(error: BaseException) -> None:
    """Drop the tensors that the frames of a failed attempt hold, of what led to the error too."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
