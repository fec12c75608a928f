# SPDX-License-Identifier: Apache-2.0
"""What the tests of writes share: small functions of a batch and two parameters, plain and lazy.

A program is a function of some of `x`, `z` (rows of 4), `labels` (0 to 3), `ids` (rows of 5 ints),
and the parameters `w` (4 x 4) and `v` (4), by name. It returns what its author would have looked
at; the gradients of all that has one are compared too.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import koila
from chunked import split
from oracle import Lazy, assert_seen, eager, tell

N_ROWS = 11
Run = Callable[..., Any]

#: One chunk, uneven ones, and one row a chunk.
each_count = pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])


@dataclasses.dataclass(frozen=True)
class Written:
    """A program, and why it is whole or cut in part only: alone, and if it is read first."""

    run: Run
    why: dict[str, str]
    why_read_first: dict[str, str]


class Programs(dict[str, Written]):
    """The programs of a test file by name: each is cut, but for what it says of itself."""

    def add(self, run: Run) -> Run:
        """Take a program that is cut, all of it."""
        return self.add_but()(run)

    def add_but(
        self, *, whole: str = "", partly: str = "", read_first: str = ""
    ) -> Callable[[Run], Run]:
        """Take a program of which something is not cut, see `chunked.split`.

        `read_first` is why some of it is not where its numbers are read before its backward.
        """

        def add(run: Run) -> Run:
            why = {"whole": whole, "partly": partly}
            self[run.__name__] = Written(run, why, {**why, "partly": partly or read_first})
            return run

        return add

    def check(self, name: str, chunks: int, is_read_first: bool) -> None:
        """Assert that lazy inputs make no difference to what a program gives."""
        program = self[name]
        run, why = program.run, program.why_read_first if is_read_first else program.why

        def story(lazy: Lazy) -> Any:
            given = _inputs()
            batch = [name for name in given if name not in ("w", "v")]
            given |= dict(zip(batch, lazy(*(given[name] for name in batch)), strict=True))
            seen = run(**{name: given[name] for name in inspect.signature(run).parameters})
            outs = _tensors(seen)
            if is_read_first:
                _ = [out.tolist() for out in outs]
            loss = sum((out.pow(2).sum() for out in outs if out.requires_grad), torch.zeros(()))
            if loss.requires_grad:
                loss.backward()
            else:
                _ = [out.tolist() for out in outs]
            return seen, given["w"].grad, given["v"].grad

        want, want_state = tell(story, eager)
        with split(chunks, **why):
            got, got_state = tell(story, koila.lazy)
        assert_seen(got, want, "seen", exact_bits=chunks == 1)
        assert torch.equal(got_state, want_state), "the generator is not where eager left it"


def _inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "x": floats(N_ROWS, 4),
        "z": floats(N_ROWS, 4),
        "labels": torch.randint(0, 4, (N_ROWS,), generator=generator),
        "ids": torch.randint(1, 9, (N_ROWS, 5), generator=generator),
        "w": floats(4, 4).requires_grad_(),
        "v": floats(4).requires_grad_(),
    }


def _tensors(seen: Any) -> list[Tensor]:
    if isinstance(seen, Tensor):
        return [seen]
    return [t for one in seen for t in _tensors(one)] if isinstance(seen, (list, tuple)) else []
