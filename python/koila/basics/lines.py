# SPDX-License-Identifier: Apache-2.0
"""Lines of the user's program, such as "train.py:40", or "Cell In[14]:3" in a notebook."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

#: Prefixes of the paths of files that are not the user's: those of koila, of torch, and of Python's
#: modules that call functions and methods.
INSIDE = (
    *(f"{Path(module).parent}{os.sep}" for module in (str(Path(__file__).parent), torch.__file__)),
    contextlib.__file__,
    copy.__file__,
    functools.__file__,
)
#: The folder of installed packages, in paths of files that pip installs.
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")


@functools.lru_cache(2**12)
def _in_packages(path: str) -> str:
    """Return the path of a file in the folder of packages, or else its path."""
    return _INSTALLED.split(path, 1)[-1]


def name_of_file(path: str) -> str:
    """Return the name by which a user knows a file: of a notebook's cell its number, of an
    installed package's file its path in the folder of packages, else its path."""
    installed = _in_packages(path)
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return installed
    shell = ipython.get_ipython()
    try:
        named = shell.compile.format_code_name(path)
    except AttributeError:  # not in a notebook, or in one whose cells have no names
        return installed
    return " ".join(named) if named is not None else installed


@functools.lru_cache(2**12)
def _is_inside(path: str) -> bool:
    """Tell whether a file is not the user's. Walks over frames ask this often."""
    return path.startswith(INSIDE)


@functools.lru_cache(2**12)
def _is_of_script(path: str) -> bool:
    """Tell whether a file is the user's and not a library's, nor Python's own runner of modules."""
    is_installed = _INSTALLED.match(path) is not None or path == "<frozen runpy>"
    return not _is_inside(path) and not is_installed


def user_frames() -> Iterator[FrameType]:
    """Yield the frames that belong neither to koila nor to torch, from the innermost out."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not _is_inside(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def user_frame() -> FrameType | None:
    """Return the innermost frame that belongs neither to koila nor to torch."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _line_of(frame: FrameType | None) -> str:
    if frame is None:
        return "unknown line"
    return f"{name_of_file(frame.f_code.co_filename)}:{frame.f_lineno}"


def user_line() -> str:
    """Return the line of the user's frame, such as "model.py:40"."""
    return _line_of(user_frame())


def script_line() -> str:
    """As `user_line`, but not of an installed library, such as a framework that calls backward(),
    if a script calls that."""
    frame: FrameType | None = sys._getframe(1)
    innermost: FrameType | None = None
    while frame is not None:
        path = frame.f_code.co_filename
        if _is_of_script(path):
            return _line_of(frame)
        if innermost is None and not _is_inside(path):
            innermost = frame
        frame = frame.f_back
    return _line_of(innermost)


def is_of_koila() -> bool:
    """Tell whether the caller was called by koila, through torch, and not by the user."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _is_inside(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(INSIDE[0]):
            return True
        frame = frame.f_back
    return False
