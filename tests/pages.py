# SPDX-License-Identifier: Apache-2.0
"""The Python of pages: a page's blocks are one script, and what it shows them print they print.

    python tests/pages.py docs/quickstart.md ...

Each page runs in a process of its own, forked from this one, so that its limits count no tensors
but its own. What ```` ```text ```` shows right after a block of Python is what that prints, in
which "..." stands for anything. For each page a line of JSON says what went wrong, or null.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: What a page's blocks are called in messages that name lines.
SCRIPT = "train.py"


class Block(NamedTuple):
    """A block of Python, and what the page says that it prints; None: it does not say."""

    code: str
    shown: str | None


def blocks(text: str) -> list[Block]:
    """The Python of a page, in its order."""
    found = [(match[1], match[2], match.span()) for match in _BLOCK.finditer(text)]
    made = []
    for i, (kind, code, (_, end)) in enumerate(found):
        if kind != "python":
            continue
        follows = found[i + 1] if i + 1 < len(found) else None
        is_output = follows is not None and follows[0] == "text"
        is_next = follows is not None and not text[end : follows[2][0]].strip()
        made.append(Block(code, follows[1] if is_output and is_next and follows else None))
    return made


def run(text: str, names: dict[str, Any]) -> None:
    """Run the blocks of a page, one after the other, as one script.

    Raises:
        AssertionError: one prints something else than the page shows.
    """
    names.setdefault("__name__", "__main__")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    n_lines = 0
    for block in blocks(text):
        code = compile("\n" * n_lines + block.code, SCRIPT, "exec")
        n_lines += block.code.count("\n") + 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if block.shown is not None:
            is_same = doctest.OutputChecker().check_output(block.shown, printed.getvalue(), flags)
            assert is_same, f"{block.code}\nprints\n{printed.getvalue()}\nnot\n{block.shown}"


def _forked(path: Path) -> str | None:
    """What goes wrong with a page in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run(path.read_text(), {})
        except BaseException:
            os.write(write, traceback.format_exc()[-8000:].encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        error = file.read()
    _, status = os.waitpid(child, 0)
    return error or (f"status {status}" if status else None)


if __name__ == "__main__":
    import koila  # noqa: F401 - once, for all

    for name in sys.argv[1:]:
        print(json.dumps([name, _forked(Path(name))]), flush=True)
