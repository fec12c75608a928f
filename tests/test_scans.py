# SPDX-License-Identifier: Apache-2.0
"""Running sums and products along the batch: every dtype in and out, against plain torch."""

import pytest
import torch
from torch import Tensor

import koila
from chunked import split

ROWS = 7
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
    torch.complex128,
]


def numbers(dtype: torch.dtype) -> Tensor:
    """Small whole numbers without a zero, exact in every dtype but bool."""
    made = torch.tensor([[1, 2], [2, 1], [1, 1], [3, 1], [1, 2], [2, 1], [1, 3]])
    return made.to(dtype)


def is_possible(name: str, given: torch.dtype, made: torch.dtype | None) -> bool:
    """Whether torch has this scan."""
    options = {} if made is None else {"dtype": made}
    try:
        getattr(torch, name)(numbers(given), 0, **options)
    except RuntimeError:
        return False
    return True


CASES = [
    (name, given, made)
    for name in ("cumsum", "cumprod")
    for given in DTYPES
    for made in (None, *DTYPES)
    if (given.is_complex <= (made or given).is_complex) and is_possible(name, given, made)
]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [1, 2, 3, ROWS])
@pytest.mark.parametrize("name, given, made", CASES)
def test_dtypes(name: str, given: torch.dtype, made: torch.dtype | None, chunks: int) -> None:
    options = {} if made is None else {"dtype": made}
    x = numbers(given)
    wanted = getattr(x, name)(0, **options)
    with split(chunks):
        got = getattr(koila.lazy(x, batch=0), name)(0, **options)
        assert got.dtype == wanted.dtype
        assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize("chunks", [1, 2, 3, ROWS])
def test_lengths_of_sequences(chunks: int) -> None:
    """Where sequences of a packed batch begin, as attention over them asks for it."""
    lengths = torch.tensor([3, 1, 4, 1, 5, 9, 2])
    begin = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    with split(chunks):
        x = koila.lazy(lengths, batch=0)
        got = torch.nn.functional.pad(x.cumsum(0, dtype=torch.int32), (1, 0))
        assert got.tolist() == begin.tolist()


@pytest.mark.parametrize("chunks", [1, 2, 3, ROWS])
def test_what_wraps_around(chunks: int) -> None:
    x = torch.full((ROWS,), 100, dtype=torch.int8)
    wanted = x.cumsum(0, dtype=torch.int8)
    with split(chunks):
        assert koila.lazy(x, batch=0).cumsum(0, dtype=torch.int8).tolist() == wanted.tolist()
