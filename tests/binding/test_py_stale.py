# SPDX-License-Identifier: Apache-2.0
"""A leaf that was changed between a call and its run is an error that names both, never read.

Operators below torch's methods write it here: koila goes before those (`test_plain_writes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from binding_kit import batch, in_a_thread, is_pending
from chunked import split
from koila import _core

CHUNKS = [1, 2]
aten: Any = torch.ops.aten


def scale() -> Tensor:
    return torch.arange(1.0, 4.0, dtype=torch.float64)


def written(t: Any) -> None:
    aten.mul_(t, 3)


def by_a_view(t: Any) -> None:
    aten.zero_(t[:2])


def by_data(t: Any) -> None:
    aten.mul_(t.data, 3)


def by_data_to_the_same_sum(t: Any) -> None:
    aten.copy_(t.data, t.data.flip(0))


def by_set(t: Any) -> None:
    aten.set_(t, torch.ones(3, dtype=torch.float64))


def by_swap(t: Any) -> None:
    torch.utils.swap_tensors(t, torch.ones(3, dtype=torch.float64))


def by_out(t: Any) -> None:
    torch.mul(torch.ones(3, dtype=torch.float64), 5, out=t)


def resized(t: Any) -> None:
    aten.resize_(t, [100])


CHANGES = [written, by_a_view, by_data, by_data_to_the_same_sum, by_set, by_out]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("change", [*CHANGES, resized], ids=lambda change: change.__name__)
def test_a_changed_tensor_is_told(change: Callable[[Any], None], chunks: int) -> None:
    plain = scale()
    made = koila.lazy(batch().requires_grad_()) * plain
    change(plain)
    with split(chunks, whole="it is refused"):
        for _ in range(2):
            with pytest.raises(koila.StaleError) as told:
                made.tolist()
            text = str(told.value)
            assert text.startswith("mul: a tensor of shape torch.Size([3]) was changed in place")
            assert f"(call 0, {__file__}:" in text


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_parameter_is_told(change: Callable[[Any], None]) -> None:
    parameter = nn.Parameter(scale())
    made = (koila.lazy(batch()) * parameter).sum()
    with torch.no_grad():
        change(parameter)
    with pytest.raises(koila.StaleError, match="mul: a parameter of shape"):
        made.backward()
    assert parameter.grad is None


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_has_run_does_not_mind(change: Callable[[Any], None]) -> None:
    """Nor what is recorded afterwards, which sees the change."""
    plain, eager = scale(), scale()
    x = koila.lazy(batch())
    before = x * plain
    assert before.tolist() == (batch() * eager).tolist()
    change(plain)
    change(eager)
    assert before.tolist() == (batch() * scale()).tolist()
    assert (x * plain).tolist() == (batch() * eager).tolist()


@pytest.mark.parametrize("change", [written, by_data])
def test_a_change_between_two_calls(change: Callable[[Any], None]) -> None:
    """The first was recorded with what is gone, and fails; the second has its number."""
    plain, other = scale(), scale()
    x = koila.lazy(batch().requires_grad_())
    first = x * plain
    aside = x * other
    change(plain)
    with pytest.raises(koila.StaleError):
        first.tolist()
    second = x * plain
    assert second.tolist() == (batch() * plain).tolist()
    assert aside.tolist() == (batch() * other).tolist()


def test_all_readers_fail_and_each_is_named() -> None:
    plain = scale()
    x = koila.lazy(batch().requires_grad_())
    first, second = x * plain, x + plain
    aside = x.exp()
    aten.zero_(plain)
    with pytest.raises(koila.StaleError, match=r"^add: .*call 1"):
        second.tolist()
    for lazy, name in ((first, "mul"), (second, "add"), (second.detach, "add")):
        with pytest.raises(koila.StaleError, match=f"^{name}: "):
            lazy() if callable(lazy) else lazy.tolist()
    assert aside.tolist() == batch().exp().tolist()


def test_a_write_of_plain_torch_runs_what_reads_the_tensor() -> None:
    plain = scale()
    made = koila.lazy(batch()) * plain
    plain.data.mul_(3)
    assert made.tolist() == (batch() * scale()).tolist()


def test_data_that_is_only_read_changes_nothing() -> None:
    plain = scale()
    made = koila.lazy(batch().requires_grad_()) * plain
    assert plain.data.sum().item() == 6
    aten.sub_(aten.add_(plain.data, 1), 1)
    assert is_pending(made)
    assert made.tolist() == (batch() * scale()).tolist()


def test_changed_inputs_are_told() -> None:
    x = batch().requires_grad_()
    made = koila.lazy(x) * 2
    with torch.no_grad():
        aten.zero_(x)
    with pytest.raises(koila.StaleError, match=r"shape torch.Size\(\[4, 3\]\)"):
        made.tolist()


def test_an_inference_tensor_has_no_version() -> None:
    """Only its memory is looked at."""
    with torch.inference_mode():
        plain = scale()
    assert (koila.lazy(batch()) * plain).tolist() == (batch() * scale()).tolist()
    made = koila.lazy(batch()) * plain
    with torch.inference_mode():
        aten.set_(plain, torch.ones(3, dtype=torch.float64))
    with pytest.raises(koila.StaleError):
        made.tolist()


def test_statistics_that_a_run_writes_are_no_change() -> None:
    norm, eager = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    x = koila.lazy(batch())
    for chunks in (1, 2, 1):
        with split(chunks):
            first = norm(x)
            second = norm(first * 2)
            second.sum().backward()
        wanted = eager(eager(batch()) * 2)
        wanted.sum().backward()
        torch.testing.assert_close(norm.running_var, eager.running_var, rtol=1e-10, atol=1e-12)


def test_a_change_in_another_thread_is_told() -> None:
    plain = scale()
    made = koila.lazy(batch().requires_grad_()) * plain
    in_a_thread(lambda: aten.mul_(plain, 2))
    with pytest.raises(koila.StaleError):
        made.tolist()


def test_a_dropped_reader_is_still_a_reader() -> None:
    """What nobody can reach is not told of, and what is asked for is right."""
    plain = scale()
    x = koila.lazy(batch().requires_grad_())
    kept = x.exp()
    assert _core.leaves_of(plain) == []
    aten.mul_(plain, 2)
    _core.check_leaves()
    assert kept.tolist() == batch().exp().tolist()
