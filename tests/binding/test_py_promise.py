# SPDX-License-Identifier: Apache-2.0
"""What inference promised, held against what torch gives: whole, by rows, and combined of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import koila
from binding_kit import batch, op
from chunked import split
from koila import _core
from koila.reductions import calls

core: Any = _core
MISTAKE = "a mistake in koila's inference"


def weight() -> Tensor:
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


BY_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x[:1] * 2,
    "dims": lambda x: x[0] * 2,
    "dtype": lambda x: (x * 2).float(),
    "whole": lambda x: torch.zeros(4, 3, dtype=x.dtype),
    "no tensor": lambda x: 3.0,
    "number of outputs": lambda x: [x * 2, x * 2],
    "sparse": lambda x: (x * 2).to_sparse(),
}
WHOLE: dict[str, Callable[[Tensor], Any]] = {
    **BY_ROWS,
    "whole": lambda x: torch.zeros(5, 3, dtype=x.dtype),
    "gradient": lambda x: (x * 2).detach(),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("name", WHOLE)
def test_of_a_whole_run(name: str) -> None:
    """A wrong shape would be a wrong number further on: it is told where it comes."""

    def breach(x: Tensor) -> Any:
        return x * 2 if x.device.type == "meta" else WHOLE[name](x)

    with op(breach) as recorded:
        made = recorded(koila.lazy(batch()) * weight())
        with pytest.raises(koila.KoilaError, match=MISTAKE) as told:
            made.tolist()
    assert "call 1, " in str(told.value)


@pytest.mark.parametrize("name", BY_ROWS)
@pytest.mark.parametrize("row", ["tanh", None], ids=["by rows", "once"])
def test_of_a_run_in_chunks(name: str, row: str | None) -> None:
    """What a chunk gave is compared too, with its own number of rows; and what a barrier gave."""

    def breach(x: Tensor) -> Any:
        return x * 2 if x.device.type == "meta" else BY_ROWS[name](x)

    w = weight()
    with split(2), op(breach, row=row) as recorded:
        made = (recorded(koila.lazy(batch()) * w) * 3).sum()
        if name == "whole" and row is None:
            made.backward()  # a barrier gives what is promised
            return
        with pytest.raises(koila.KoilaError, match=MISTAKE) as told:
            made.backward()
    assert "call 1, " in str(told.value)
    assert w.grad is None
    core.forget()


def test_of_a_combined_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put together of parts is no call of torch, and is compared all the same."""
    w = weight()
    monkeypatch.setattr(calls, "combine", lambda *_: [torch.zeros(2, dtype=torch.float64)])
    with split(2):
        made = (koila.lazy(batch()) * w).sum()
        with pytest.raises(koila.KoilaError, match=MISTAKE):
            made.backward()
    assert w.grad is None
    core.forget()


def test_of_another_number_of_rows() -> None:
    """A chunk of one row is promised one row, the last of a batch that does not divide its own."""
    for chunks in (2, 3, 4):
        w = weight()
        with split(chunks):
            (koila.lazy(batch()) * w).repeat_interleave(2, 0).tanh().sum().backward()


def test_wrong_arguments() -> None:
    made = koila.lazy(batch()) * 2
    with pytest.raises(TypeError):
        core.check_result(0, 0)
    with pytest.raises(IndexError, match="there is no value 9"):
        core.check_result(0, 9, torch.ones(1))
    core.check_result(0, 1, batch())
    with pytest.raises(koila.KoilaError, match=MISTAKE):
        core.check_result(0, 1, batch()[:2])
    assert made.tolist() == (batch() * 2).tolist()
