# SPDX-License-Identifier: Apache-2.0
"""Where a call was recorded: two words of a frame, which become a file and a line in messages."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from binding_kit import batch, pending
from koila import _core

core: Any = _core
TORCH = str(Path(torch.__file__).parent)
KOILA = str(Path(koila.__file__).parent)


def here() -> int:
    """The line that calls it."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def where(node: int) -> tuple[str, int]:
    text = core.node(node)[3]
    found = re.fullmatch(r"call (\d+), (.*):(\d+)", text)
    assert found is not None, text
    assert int(found[1]) == node
    return found[2], int(found[3])


def test_the_line_of_the_call() -> None:
    x = koila.lazy(batch())
    line = here()
    first = x * 2
    second = (
        first +
        1
    )  # fmt: skip
    last = second.tanh(); other = second.sin()  # noqa: E702  # fmt: skip
    assert where(0) == (__file__, line + 1)
    assert where(1) == (__file__, line + 3)
    assert where(2) == where(3) == (__file__, line + 6)
    assert last.shape == other.shape


def test_the_line_is_decoded_late() -> None:
    """The frame has gone on, and is gone, when somebody asks."""

    def record() -> int:
        nonlocal made
        line = here()
        made = koila.lazy(batch()) * 2
        made = made + 1
        return line

    made: Any = None
    line = record()
    assert [where(0)[1], where(1)[1]] == [line + 1, line + 2]


def test_every_call_has_the_users_line() -> None:
    """Not that of the module of torch's which makes it."""
    x = koila.lazy(batch())
    line = here()
    hidden = F.softplus(nn.ReLU()(x))
    loss = nn.MSELoss()(hidden, batch())
    names = [core.node(i)[1] for i in range(3)]
    assert names == ["relu", "softplus", "mse_loss"]
    assert where(0) == where(1) == (__file__, line + 1)
    assert where(2) == (__file__, line + 2)
    assert loss.shape == ()


def test_files_are_known_by_their_folder() -> None:
    """One whose path only begins alike is the user's; one of a package is named by it."""
    x = koila.lazy(batch())
    kept = []

    def record(name: str) -> str:
        scope: dict[str, Any] = {"x": x}
        exec(compile("made = x.sum()", name, "exec"), scope)
        kept.append(scope["made"])
        return where(record.n)[0]

    record.n = 0  # type: ignore[attr-defined]
    for name, wanted in (
        (f"{TORCH}/nn/made.py", __file__),
        (f"{KOILA}/made.py", __file__),
        (f"{TORCH}_more/made.py", "torch_more/made.py"),
        (f"{KOILA}2.py", f"{KOILA}2.py"),
        ("<string>", "<string>"),
        ("", ""),
        ("zeichen/ü€😀.py", "zeichen/ü€😀.py"),
    ):
        assert record(name) == wanted
        record.n += 1  # type: ignore[attr-defined]


def test_more_files_than_are_kept() -> None:
    """What is known of a file is known by its name, whose place another may have taken."""
    x = koila.lazy(batch())
    names = [f"{folder}/made{i}.py" for i in range(300) for folder in (TORCH, "user")]
    kept: list[Any] = []
    for n, name in enumerate(names):
        exec(compile("kept.append(x.sum())", name, "exec"), {"x": x, "kept": kept})
        assert where(n)[0] == (name if name.startswith("user") else __file__)


def test_without_a_user_the_outermost_frame_is_told() -> None:
    """A program that is torch's or koila's own from its first frame on."""
    script = "import torch, koila\nx = koila.lazy(torch.ones(4, 3))\nmade = x.sum()\n"
    scope: dict[str, Any] = {}
    exec(compile(script, f"{TORCH}/made.py", "exec"), scope)
    assert where(0)[0] == __file__


def test_an_error_has_the_line_as_a_note() -> None:
    x, y = koila.lazy(batch(), torch.full((4,), 7))
    line = here()
    loss = F.cross_entropy(x * 2, y)
    with pytest.raises(IndexError) as told:
        loss.tolist()
    assert told.value.__notes__ == [f"koila: recorded at call 1, {__file__}:{line + 1}"]


def test_views_taken_again_have_the_line_that_reads_them() -> None:
    x = pending()
    view = x[:, 0]
    x.mul_(2)
    line = here()
    again = view + 1
    assert where(3) == where(4) == (__file__, line + 1)
    assert again.tolist() == (batch() * 4)[:, 0].add(1).tolist()
