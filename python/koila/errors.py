# SPDX-License-Identifier: Apache-2.0
"""The exceptions koila raises by itself; torch's own pass through unchanged."""

import traceback

import torch


class KoilaError(RuntimeError):
    """A program that koila cannot run with exactly eager's numbers, with op, line and reason."""


class StaleError(KoilaError):
    """A tensor was changed between the moment a call was recorded and the moment it ran."""


class NotInChunksError(KoilaError):
    """A run in chunks found that it cannot be right; the program is then run whole."""


class MemoryLimitError(KoilaError, torch.OutOfMemoryError):
    """Not even one row at a time fits into the memory there is."""


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
