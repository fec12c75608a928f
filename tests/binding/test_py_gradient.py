# SPDX-License-Identifier: Apache-2.0
"""Who gets a gradient, and which calls cannot give theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_py_promise import weight

import koila
from binding_kit import batch
from koila import _core
from koila.staged.program import Program

core: Any = _core
LAST = 2**32 - 2


def test_calls_that_keep_what_was_written() -> None:
    x, w = koila.lazy(batch()), weight()
    h = (x * w).exp()
    h.mul_(w)
    h.add_(1)
    program = Program([h.sum()], False)
    assert core.overwritten(program.handle, LAST) == (1, [3]), "exp keeps what mul_ wrote"
    assert core.overwritten(program.handle, 1) is None


def test_what_is_written_and_not_kept() -> None:
    x, w = koila.lazy(batch()), weight()
    h = x * w
    h.mul_(2)
    h.add_(w)
    assert core.overwritten(Program([h.sum()], False).handle, LAST) is None


def test_gradients_go_only_on_the_way_to_some() -> None:
    x, w, v = koila.lazy(batch()), weight(), torch.ones((), requires_grad=True)
    h = x * w
    k = h * v
    both = Program([k.sum()], False)
    one = Program([k.sum()], False, gets=lambda tensor: tensor is v)
    made = [node.first_out for node in both.nodes.values()]
    assert all(both.needs_gradient(value) for value in made)
    assert [one.needs_gradient(value) for value in made[:2]] == [False, True]


def test_who_gets_one_is_asked_in_vain() -> None:
    def refuse(tensor: torch.Tensor) -> bool:
        raise KeyError("no")

    x = koila.lazy(batch())
    with pytest.raises(KeyError, match="no"):
        Program([(x * weight()).sum()], False, gets=refuse)


def test_what_is_no_program() -> None:
    with pytest.raises(TypeError, match="not a program"):
        core.overwritten(None, 0)
