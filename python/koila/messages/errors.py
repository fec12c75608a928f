# SPDX-License-Identifier: Apache-2.0
"""The exceptions that koila raises itself; torch's own pass through unchanged."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from koila.basics.lines import INSIDE

if TYPE_CHECKING:
    from koila.messages.memory_plan import MemoryPlan


class KoilaError(RuntimeError):
    """koila cannot run a program with eager's numbers; the text names op, line, reason."""

    __module__ = "koila"  # a traceback shows the name that a script catches it by


class StaleError(KoilaError):
    """A tensor that a call reads was changed after the call was recorded and before it ran."""

    __module__ = "koila"


class NotInChunksError(KoilaError):
    """Raised during a run in chunks that would give wrong numbers; the program then runs whole."""


class MemoryLimitError(KoilaError, torch.OutOfMemoryError):
    """A program does not fit into memory, not even with one sample at a time.

    Attributes:
        plan: the plan of `koila.plan` for the chunks that need the least memory; None if the error
            is about a call that cannot run in chunks.
        least_limit: the least memory_limit, in bytes, that works.
    """

    __module__ = "koila"
    plan: MemoryPlan | None = None
    least_limit: float | None = None


#: Keep koila's own frames in tracebacks, for working on koila.
_SHOWS_FRAMES = os.environ.get("KOILA_FRAMES", "") not in ("", "0")
#: The prefix of the paths of koila's files.
_OWN = INSIDE[0]


def hide_frames(error: BaseException) -> None:
    """Remove koila's frames from the traceback of an error.

    Frames of torch and Python between frames of koila are removed too. The user's frames stay, and
    those of torch where it raised the error. An unexpected error of koila's own code, which is a
    bug in koila, keeps all frames.
    """
    frames: list[TracebackType] = []
    found = error.__traceback__
    while found is not None:
        frames.append(found)
        found = found.tb_next
    is_own = bool(frames) and frames[-1].tb_frame.f_code.co_filename.startswith(_OWN)
    notes = getattr(error, "__notes__", ())  # a recorded call that raises gets one with its line
    is_of_call = any(note.startswith("koila: recorded at") for note in notes)
    is_expected = isinstance(error, KoilaError) or is_of_call or not is_own
    if _SHOWS_FRAMES or not is_expected:
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


class HiddenFrames:
    """Wraps a block that the user's code, or torch for it, gets to: an exception leaves it without
    koila's frames."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            hide_frames(error)


# Texts of errors of torch, oneDNN and CUDA's libraries, of any type, that mean out of memory.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "could not create a primitive",
    "out of memory",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, so that smaller chunks may help. A MemoryLimitError is no such
    error: it says that the smallest chunks do not fit."""
    if isinstance(error, MemoryLimitError):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


# Texts of errors about strides. A chunk, above all of one row, may have other strides than the
# whole tensor, for which the call is legal.
_OF_LAYOUT = ("refer to a single memory location", "view size is not compatible")


def is_of_layout(error: BaseException) -> bool:
    """Tell whether torch refused a call because of the strides of its tensors."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_LAYOUT)


def kept(
    error: BaseException, where: str | None
) -> tuple[type[Exception], tuple[Any, ...], list[str] | None] | None:
    """Return what `again` takes to make an exception again, without its frames, which hold tensors.
    None: it is an interrupt, which says nothing about the call that raised it. `where`: where the
    call was recorded, which a note says."""
    if where is not None:
        error.add_note(f"koila: recorded at {where}")
    if not isinstance(error, Exception):
        return None
    return type(error), error.args, getattr(error, "__notes__", None)


def again(kind: type[Exception], args: tuple[Any, ...], notes: list[str] | None) -> Exception:
    """Return an exception from what `kept` returned for it."""
    try:
        error = kind(*args)
    except Exception:  # the __init__ of its class takes other arguments than args holds
        error = kind.__new__(kind, *args)
    if notes is not None:
        error.__notes__ = notes
    return error


def broken_promise(
    func: Callable[..., Any],
    result: Any,
    shape: torch.Size,
    requires_grad: bool,
    dtype: str,
    is_of_chunk: bool,
    where: str,
) -> KoilaError:
    """Return the error about a call whose result is not what was inferred when it was recorded."""
    given, tracked, kind = (_of(result, name) for name in ("shape", "requires_grad", "dtype"))
    return KoilaError(
        f"{func!r} gave {type(result).__name__} of {given!r} (requires_grad {tracked!r}, {kind}) "
        f"where {shape!r} (requires_grad {requires_grad}, torch.{dtype}) was "
        f"expected{' of a chunk' if is_of_chunk else ''} ({where}): a mistake in koila's "
        "inference, please report it"
    )


def _of(result: Any, name: str) -> Any:
    """Return an attribute of the result of a call; None: the result, of any type, has none."""
    try:
        return getattr(result, name)
    except Exception:  # a nested tensor raises RuntimeError for its shape
        return None


def changed_leaf(
    func: Callable[..., Any], tensor: torch.Tensor, shape: torch.Size, where: str
) -> StaleError:
    """Return the error about a tensor that was changed between a call that reads it and its run."""
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    return StaleError(
        f"{func.__name__}: a {kind} of shape {shape} was changed in place after it was recorded "
        f"({where}) and before the call ran; change it after backward(), or read the result first"
    )


def let_go(error: BaseException) -> None:
    """Free the tensors that the frames of an error and of its causes hold."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
