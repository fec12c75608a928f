# SPDX-License-Identifier: Apache-2.0
"""lazy() of what is lazy already: as it is, or as is asked for, or an error that says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import koila
from binding_kit import is_pending
from oracle import Lazy, assert_same_story
from stories import each_split_further, rows


def test_it_stays_as_it_is() -> None:
    x = koila.lazy(torch.ones(4, 6), batch=1)
    h = x * torch.ones(4, 1, requires_grad=True)
    assert koila.lazy(x) is x
    assert koila.lazy(x, batch=1) is x
    assert koila.lazy({"h": h})["h"] is h
    assert koila.lazy(h, batch=-1) is h
    whole = koila.lazy(torch.ones(4), batch=None)
    assert koila.lazy(whole, batch=None) is koila.lazy(whole) is whole
    assert is_pending(h), "nothing ran for it"


def n_rows_of(x: torch.Tensor) -> Any:
    with koila.config(chunks=2):
        (x * 2).sum().item()
    return koila.report().n_rows


def test_another_dim_of_a_tensor_that_is_there() -> None:
    x = koila.lazy(torch.ones(4, 6))
    assert n_rows_of(x) == 2
    again = koila.lazy(x, batch=1)
    assert again is not x
    assert n_rows_of(again) == 3
    assert n_rows_of(x) == 2
    assert n_rows_of(koila.lazy(x, batch=-1)) == 3
    assert n_rows_of(koila.lazy(koila.lazy(torch.ones(4, 6), batch=None), batch=0)) == 2


@each_split_further
def test_both_are_the_same_memory(chunks: int | None) -> None:
    def story(lazy: Lazy) -> Any:
        w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        x = lazy(rows(4))
        h = x @ w
        again = lazy(x, batch=1)
        loss = (again * h).sum()
        loss.backward()
        x.add_(1)
        return loss, w.grad, again.sum().item()

    assert_same_story(story, chunks)


@pytest.mark.parametrize("chunks", [1, 3])
def test_another_dim_of_what_is_still_to_be_computed(chunks: int) -> None:
    with koila.config(chunks=chunks):
        h = koila.lazy(torch.ones(4, 6)) * torch.full((6,), 2.0, requires_grad=True)
        with pytest.raises(ValueError, match=r"input is lazy already, with batch=0, .* batch=1"):
            koila.lazy(h, batch=1)
        with pytest.raises(ValueError, match=r"input\['h'\] is lazy already, with batch=0"):
            koila.lazy({"h": h}, batch=None)
        with pytest.raises(ValueError, match="in a part of a dim"):
            koila.lazy(h.view(24), batch=0)
        with pytest.raises(ValueError, match="without samples"):
            koila.lazy(h.sum(0), batch=0)
        assert is_pending(h), "nothing is lost"
        assert h.tolist() == [[2.0] * 6] * 4
