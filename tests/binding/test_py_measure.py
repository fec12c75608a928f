# SPDX-License-Identifier: Apache-2.0
"""What the core is told of tensors when it measures a program, and what it gives back."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import koila
from koila import _core
from koila.memory import estimates, outside
from koila.memory.estimates import Estimate
from koila.random import draws
from koila.staged.program import Program

pytestmark = pytest.mark.sanitize

ROWS, WIDTH = 8, 3
N_BYTES = ROWS * WIDTH * 4


def program_of(x: Tensor, w: Tensor) -> Program:
    return Program([(koila.lazy(x) * w).exp().sum()])


#: KlMoment, sweep.h.
MOMENT = "dddffffIII?3x"


def moments_of(estimate: Estimate) -> list[tuple[float, float, float, int]]:
    """Bytes that are fixed, of a row and of a chunk, and the node."""
    moments = struct.iter_unpack(MOMENT, estimate.moments)
    return [(fixed, row, chunk, node) for fixed, row, chunk, *_, node, _, _, _ in moments]


def weight() -> Tensor:
    return torch.ones(WIDTH, requires_grad=True)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "row by row": (lambda x: x, True),
    "every second row": (lambda x: x.repeat_interleave(2, 0)[::2], True),
    "column by column": (lambda x: x.t().contiguous().t(), False),
    "one column": (lambda x: x.t().contiguous().t()[:, :1], True),
    "expanded": (lambda x: x[:1].expand(ROWS, WIDTH), True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_chunk_of_the_batch_is_a_view_or_a_copy(name: str) -> None:
    lay, is_view = LAYOUTS[name]
    x = lay(torch.ones(ROWS, WIDTH))
    staged = program_of(x, weight()[: x.shape[1]].detach().requires_grad_())
    _, per_row, _, _ = moments_of(estimates.estimate(staged, False))[0]
    row = x.shape[1] * 4  # x * w, and with it a copy of x
    assert per_row == (row if is_view else 2 * row)


def test_a_gradient_from_before_is_added_to() -> None:
    """Live, a leaf keeps the gradient that is made, but where there is one that it is added to."""
    x, w, late = torch.ones(1000, WIDTH), weight(), torch.ones(1000, requires_grad=True)
    loss = ((koila.lazy(x) * w).exp().sum() * late).sum()
    staged = Program([loss])
    kept = estimates.estimate(staged, True).whole
    late.grad = torch.ones_like(late)
    assert estimates.estimate(staged, True).whole == kept - late.nbytes


def test_graphs_from_before_are_asked_for() -> None:
    w = weight()
    before = w.exp()
    staged = program_of(torch.ones(ROWS, WIDTH), before)
    seen: list[set[Tensor]] = []

    def peak_of(tensors: set[Tensor]) -> float:
        seen.append(tensors)
        return 1e6

    measured = _core.measure(
        staged.handle, (True, 1, False, 1, 0, 0), set(), (0, 0), draws.bytes_whole, peak_of
    )
    assert seen == [{before}] and measured[2] > 1e6
    _core.measure(
        staged.handle, (False, 1, False, 1, 0, 0), set(), (0, 0), draws.bytes_whole, peak_of
    )
    assert len(seen) == 1


def test_a_clone_is_counted() -> None:
    staged = program_of(torch.ones(ROWS, WIDTH), weight())
    last = next(node.id for node in staged.nodes.values() if node.mode == 0)
    states, noise_of, peak_of = (0, 0), draws.bytes_whole, outside.peak
    plain, *_ = _core.measure(
        staged.handle, (False, 1, False, 1, 0, 0), set(), states, noise_of, peak_of
    )
    cloned, *_ = _core.measure(
        staged.handle, (False, 1, False, 1, 0, 0), {last}, states, noise_of, peak_of
    )
    assert _core.peak(cloned, ROWS, ROWS)[0] == _core.peak(plain, ROWS, ROWS)[0] + N_BYTES


def test_what_is_drawn_whole_is_asked_for() -> None:
    x = koila.lazy(torch.ones(ROWS, WIDTH))
    staged = Program([(torch.dropout(x, 0.5, True) * weight()).sum()])
    (draw,) = (node for node in staged.nodes.values() if node.is_random)
    asked: list[tuple[int, int]] = []

    def noise_of(node: int, first_out: int) -> int:
        asked.append((node, first_out))
        return 10**6

    moments, *_ = _core.measure(
        staged.handle, (False, 1, False, 1, 0, 0), set(), (10, 5), noise_of, outside.peak
    )
    assert asked == [(draw.id, draw.first_out)]
    # the state before and after, the one kept, and the one before the draw
    assert _core.peak(moments, ROWS, ROWS)[1] == 2 * 10 + 5 + 10 + 10**6


@pytest.mark.parametrize(("n_bytes", "fixed", "per_chunk"), [(0, 55, 0.0), (-1, 35, 10.0)])
def test_states_that_are_kept(n_bytes: int, fixed: int, per_chunk: int) -> None:
    """Where a call starts, where its last chunk started and ended; or where each chunk starts."""
    x = koila.lazy(torch.ones(ROWS, WIDTH))
    staged = Program([(torch.dropout(x, 0.5, True) * weight()).sum()])
    measured = _core.measure(
        staged.handle, (False, 1, False, 1, 0, 0), set(), (10, 5), lambda *_: n_bytes, outside.peak
    )
    for found, _, of_chunk, _ in moments_of(Estimate(*measured)):
        assert found - fixed in (0, 4) and of_chunk == per_chunk  # 4: the sum is there


def test_what_is_wrong_is_said() -> None:
    staged = program_of(torch.ones(ROWS, WIDTH), weight())

    def fails(*_: object) -> int:
        raise RuntimeError("no number")

    rest = (0, 0), draws.bytes_whole, outside.peak
    with pytest.raises(TypeError, match="not a program"):
        _core.measure(object(), (True, 1, False, 1, 0, 0), set(), *rest)
    with pytest.raises(IndexError, match="there is no node 99"):
        _core.measure(staged.handle, (True, 1, False, 1, 0, 0), {99}, *rest)
    x = koila.lazy(torch.ones(ROWS, WIDTH))
    drawing = Program([(torch.dropout(x, 0.5, True) * weight().exp()).sum()])
    with pytest.raises(RuntimeError, match="no number"):
        _core.measure(drawing.handle, (True, 1, False, 1, 0, 0), set(), (0, 0), fails, outside.peak)
    with pytest.raises(RuntimeError, match="no number"):
        _core.measure(
            drawing.handle, (True, 1, False, 1, 0, 0), set(), (0, 0), draws.bytes_whole, fails
        )
    with pytest.raises(ValueError, match="not the moments"):
        _core.peak(b"123", ROWS, 1)
    with pytest.raises(ValueError, match="not the moments"):
        _core.moments(b"123", ROWS, 1)


def test_moments_are_read_as_they_were_written() -> None:
    needs = [(100.0, 10.0, 1.0, 7), (50.0, 20.0, 0.0, 8)]
    kinds = [(40.0, 4.0, 8.0, 1.0), (0.0, 0.0, 20.0, 5.0)]  # gradients, temporary: fixed, of a row
    packed = (
        struct.pack(MOMENT, *need[:3], *kind, need[3], 0, step, bool(step))
        for step, (need, kind) in enumerate(zip(needs, kinds, strict=True))
    )
    estimate = Estimate(b"".join(packed), ROWS)
    assert moments_of(estimate) == needs
    assert estimate.course(2) == [(0, 7, False, 124.0, 48.0, 10.0), (1, 8, True, 90.0, 0.0, 30.0)]
    assert estimate.peak(2) == (124.0, 7)
    assert estimate.peak(8) == (210.0, 8)
    assert estimate.fixed(8) == 50
    assert estimate.least() == (1, 118.0, 7)
    assert estimate.largest_chunk(150.0) == 4
    assert Estimate(b"", ROWS).peak(2) == (0.0, 0)
