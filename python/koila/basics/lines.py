# SPDX-License-Identifier: Apache-2.0
"""Where in the user's program something was: "train.py:40", or "Cell In[14]:3" in a notebook."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from types import FrameType

import torch

#: How the paths of files begin that are not the user's: koila's, torch's, and those of Python's own
#: that call decorated functions.
INSIDE = (
    *(f"{Path(module).parent}{os.sep}" for module in (str(Path(__file__).parent), torch.__file__)),
    contextlib.__file__,
    functools.__file__,
)


def name_of_file(path: str) -> str:
    """What the user knows a file by: a cell of a notebook by its number, another by its path."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return path
    shell = ipython.get_ipython()
    try:
        named = shell.compile.format_code_name(path)
    except AttributeError:  # no notebook, or one that names no cells
        return path
    return " ".join(named) if named is not None else path


def user_frame() -> FrameType | None:
    """The innermost frame of the stack that is neither koila's nor torch's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame = frame.f_back
    return frame


def user_line() -> str:
    """Its line: "model.py:40"."""
    frame = user_frame()
    if frame is None:
        return "unknown line"
    return f"{name_of_file(frame.f_code.co_filename)}:{frame.f_lineno}"


def is_of_koila() -> bool:
    """Whether koila has called torch, and not the user."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        if frame.f_code.co_filename.startswith(INSIDE[0]):
            return True
        frame = frame.f_back
    return False
