# SPDX-License-Identifier: Apache-2.0
"""What the core is told of tensors when it measures a program, and what it gives back."""

from __future__ import annotations

import array
import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import koila
from koila import _core
from koila.memory import estimates, outside
from koila.memory.estimates import Estimate
from koila.random import draws
from koila.staged.program import Program

pytestmark = pytest.mark.sanitize

ROWS, WIDTH = 8, 3
N_BYTES = ROWS * WIDTH * 4

#: No call writes a clone, draws, or is in a checkpoint.
NONE = b"", b"", b"", b""
FORWARD, BACK = (False, b"", 1, 0), (True, b"", 1, 0)


def staged_for(loss: Tensor) -> Program:
    """A program with its root, without which its tape would be cleared."""
    staged = Program([loss])
    staged.__dict__["loss"] = loss
    return staged


def program_of(x: Tensor, w: Tensor) -> Program:
    return staged_for((koila.lazy(x) * w).exp().sum())


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

    measured = _core.measure(staged.handle, BACK, NONE, (0, 0), peak_of)
    assert seen == [{before}] and measured[2] > 1e6
    _core.measure(staged.handle, FORWARD, NONE, (0, 0), peak_of)
    assert len(seen) == 1


def test_a_clone_is_counted() -> None:
    staged = program_of(torch.ones(ROWS, WIDTH), weight())
    flags = bytearray(staged.n_recorded)
    flags[next(node.id for node in staged.nodes.values() if node.mode == 0)] = 1
    nodes = bytes(flags), b"", b"", b""
    plain, *_ = _core.measure(staged.handle, FORWARD, NONE, (0, 0), outside.peak)
    cloned, *_ = _core.measure(staged.handle, FORWARD, nodes, (0, 0), outside.peak)
    assert _core.peak(cloned, ROWS, ROWS)[0] == _core.peak(plain, ROWS, ROWS)[0] + N_BYTES


def drawing(n_bytes: int) -> tuple[Program, tuple[bytes, bytes, bytes, bytes]]:
    """A program with dropout, of which so many bytes of noise are told."""
    x = koila.lazy(torch.ones(ROWS, WIDTH))
    staged = staged_for((torch.dropout(x, 0.5, True) * weight()).sum())
    (draw,) = (node for node in staged.nodes.values() if node.is_random)
    noise = array.array("q", [n_bytes if i == draw.id else 0 for i in range(staged.n_recorded)])
    return staged, (b"", noise.tobytes(), b"", b"")


def test_what_is_drawn_whole_is_counted() -> None:
    staged, nodes = drawing(10**6)
    moments, *_ = _core.measure(staged.handle, FORWARD, nodes, (10, 5), outside.peak)
    # the state before and after, the one kept, and the one before the draw
    assert _core.peak(moments, ROWS, ROWS)[1] == 2 * 10 + 5 + 10 + 10**6


def test_noise_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    staged, _ = drawing(0)
    (draw,) = (node for node in staged.nodes.values() if node.is_random)
    asked: list[tuple[int, int]] = []

    def bytes_whole(node: int, first_out: int) -> int:
        asked.append((node, first_out))
        return 10**6

    monkeypatch.setattr(draws, "bytes_whole", bytes_whole)
    assert estimates.estimate(staged, False).peak(ROWS)[0] > 10**6
    assert asked == [(draw.id, draw.first_out)]


def test_checkpoints_are_told() -> None:
    """The innermost that each call is in, and the one around each."""

    def inner(x: Tensor) -> Tensor:
        return x.exp().sin()

    def outer(x: Tensor) -> Tensor:
        x = checkpoint(inner, x, use_reentrant=False)
        return checkpoint(inner, x, use_reentrant=False).cos()

    with koila.config(chunks=2):
        x = koila.lazy(torch.ones(ROWS, WIDTH)) * weight()
        h = checkpoint(inner, checkpoint(outer, x, use_reentrant=False), use_reentrant=False)
        staged = Program([h.sum()])
    regions, around = (memoryview(one).cast("I").tolist() for one in staged.regions)
    none = 2**32 - 1
    assert regions == [none, 1, 1, 2, 2, 0, 3, 3, none]
    assert around == [none, 0, 0, none]


@pytest.mark.parametrize(("n_bytes", "fixed", "per_chunk"), [(0, 55, 0.0), (-1, 35, 10.0)])
def test_states_that_are_kept(n_bytes: int, fixed: int, per_chunk: int) -> None:
    """Where a call starts, where its last chunk started and ended; or where each chunk starts."""
    staged, nodes = drawing(n_bytes)
    measured = _core.measure(staged.handle, FORWARD, nodes, (10, 5), outside.peak)
    for found, _, of_chunk, _ in moments_of(Estimate(*measured)):
        assert found - fixed in (0, 4) and of_chunk == per_chunk  # 4: the sum is there


def test_what_is_wrong_is_said() -> None:
    staged = program_of(torch.ones(ROWS, WIDTH), weight())

    def fails(*_: object) -> int:
        raise RuntimeError("no number")

    with pytest.raises(TypeError, match="not a program"):
        _core.measure(object(), BACK, NONE, (0, 0), outside.peak)
    for nodes in ((b"1", *NONE[1:]), (b"", b"1", b"", b""), (b"", b"", b"1", b"")):
        with pytest.raises(ValueError, match="measure: 1 bytes for 3"):
            _core.measure(staged.handle, BACK, nodes, (0, 0), outside.peak)
    staged = program_of(torch.ones(ROWS, WIDTH), weight().exp())
    with pytest.raises(RuntimeError, match="no number"):
        _core.measure(staged.handle, BACK, NONE, (0, 0), fails)
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
    assert estimate.least == (1, 118.0, 7)
    assert estimate.largest_chunk(150.0) == 4
    assert Estimate(b"", ROWS).peak(2) == (0.0, 0)
