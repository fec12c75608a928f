# SPDX-License-Identifier: Apache-2.0
"""What all of the binding shares: numbers of nodes and values, and the exceptions of errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import koila
from binding_kit import batch, pending
from koila import _core


@pytest.mark.parametrize("number", ["0", 0.0, None, [0]])
def test_a_number_of_a_node_is_an_int(number: Any) -> None:
    lazy = pending()
    for ask in (_core.node, _core.value):
        with pytest.raises(TypeError, match="expected a number of a node or a value"):
            ask(number)
    assert lazy.shape == (4, 3)


@pytest.mark.parametrize("number", [-1, 2**32 - 1, 2**40, 10**30])
def test_a_number_is_of_no_node(number: int) -> None:
    lazy = pending()
    for ask in (_core.node, _core.value):
        with pytest.raises(IndexError, match=f"no node and no value has the number {number}"):
            ask(number)
    assert lazy.tolist() == (batch() * 2).tolist()


def test_an_error_of_the_core_is_torchs_kind() -> None:
    """What torch refuses raises the same class."""
    x = koila.lazy(batch())
    for call in (lambda x: x @ x, lambda x: x.view(5, -1), lambda x: x.sum(7)):
        kinds = []
        for one in (batch(), x):
            with pytest.raises(Exception) as found:
                call(one)
            kinds.append(found.type)
        assert kinds[0] is kinds[1]
    assert torch.equal((x * 2).sum(0), (batch() * 2).sum(0))
