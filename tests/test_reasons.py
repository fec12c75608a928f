# SPDX-License-Identifier: Apache-2.0
"""koila says why it does not record a call, and what the user can do about it."""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import koila
from koila.planning import logs
from koila.recording import functions, reasons

PACKAGE = Path(koila.__file__).parent


pytestmark = pytest.mark.usefixtures("nothing_logged")


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n.add_(1)
        return x * 2


def empty_labels(h: Tensor) -> Any:
    return F.cross_entropy(h, koila.lazy(torch.zeros(0, dtype=torch.long)))


def _write_data(h: Any) -> None:
    h.data.add_(1)
    h.exp().sum().backward()


def _write_an_item(h: Tensor) -> None:
    outputs = [torch.zeros(2048, 64)]  # what an item holds is not replaced by a lazy tensor
    outputs[0][:, :4] = h[:, :4]


def _add_to_an_item(h: Tensor) -> None:
    totals = [torch.zeros(2048)]
    totals[0].add_(h.sum(1))


def _call_a_hooked_module(h: Tensor) -> None:
    module = nn.Linear(64, 4)
    module.register_full_backward_hook(lambda *_: None)
    module(h).sum().backward()


def _scatter_nothing(h: Tensor) -> None:
    h.scatter(1, h[:, :0].long(), 1.0)


CALLS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda h: checkpoint(Counts(), h, use_reentrant=False), "a module in it updates a buffer"),
]
CUT = [
    (lambda h: torch.cov(h.T), "no rule for it; write it with other calls"),
    (lambda h: Doubles.apply(h), "custom autograd.Function gets real tensors; write it with"),
    (_call_a_hooked_module, "hook the module's output instead, with output.register_hook()"),
    (_write_data, "write it without .data, under torch.no_grad()"),
    (lambda h: torch.nonzero(h), "size of its result depends on numbers"),
    (_scatter_nothing, "an index, or another tensor beside its first one, is empty; make"),
    (_add_to_an_item, "it writes into a plain tensor; make that with h.new_zeros"),
    (_write_an_item, "it writes into a plain tensor; make that with h.new_zeros"),
]


@pytest.mark.parametrize(("call", "why"), CALLS)
def test_a_log_has_the_reason(
    call: Callable[[Any], Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    with koila.config(memory_limit="1GiB"), caplog.at_level(logging.WARNING, "koila"):
        call(koila.lazy(torch.ones(8, 8)) @ weight)
    (message,) = [r.getMessage() for r in caplog.records if "cannot be recorded" in r.getMessage()]
    assert f"{__file__}:" in message and ", since " in message and why in message


@pytest.mark.parametrize("call", [empty_labels, lambda h: F.group_norm(h, 4)])
def test_no_log_of_an_empty_batch(
    call: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    h = koila.lazy(torch.ones(0, 8)) @ torch.ones(8, 8, requires_grad=True)
    with koila.config(memory_limit="1GiB"), caplog.at_level(logging.WARNING, "koila"):
        assert "empty; leave empty batches out" in reasons.why(F.group_norm, (h, 4), {})
        call(h)
    assert caplog.records == []


def test_no_log_where_nothing_that_waits_has_samples(caplog: pytest.LogCaptureFixture) -> None:
    """As where buffers follow averages over the batch: the first write cuts the program, and what
    waits at the second one is made of such an average alone."""
    weight = torch.ones(8, 8, requires_grad=True)
    counts, means = torch.zeros(()), torch.zeros(8)
    with koila.config(chunks=3), caplog.at_level(logging.WARNING, "koila"):
        h = koila.lazy(torch.ones(24, 8)) @ weight
        mean, spread = h.mean(0), h.std()
        counts.data.lerp_(spread, 0.1)
        means.data.lerp_(mean.double().float(), 0.1)
        h.square().mean().backward()
        assert any(one.n_chunks == 3 for one in koila.report().programs)
    assert_close(means, torch.full((8,), 0.8))
    assert caplog.records == []


@pytest.mark.parametrize(("call", "why"), CUT)
def test_a_report_has_the_reason(call: Callable[[Any], Any], why: str) -> None:
    """Of the call that cut the program, or that ran what waited whole."""
    weight = torch.ones(64, 64, requires_grad=True)
    with koila.config(chunks=3):
        h = koila.lazy(torch.ones(2048, 64)) @ weight
        call(h.exp().tanh().exp())
    assert why in str([ran.whole for ran in koila.report().programs])


def test_every_function_has_a_reason() -> None:
    """This holds for each op that koila has a rule for, and for ops that it has none for."""
    known = [*functions._names(), Doubles.apply, torch.jit.script(_plus_one), len]
    without = [func for func in known if not reasons.why(func, (torch.ones(2),), {})]
    assert without == []
    assert all("; " in reasons.why(func, (), None) for func in known)  # and what to do


def _plus_one(x: Tensor) -> Tensor:
    return x + 1


def test_every_place_gives_a_reason() -> None:
    """Each call that tells why a call runs whole is given a text that is never empty."""
    places = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "logs.log_live",
                "unsplit.check",
                "reports.note_handed_out",
                "_cut",
            ):
                assert len(node.args) > 1, f"{path}:{node.lineno}"
                given = node.args[1]
                assert not (isinstance(given, ast.Constant) and not given.value)
                places.append(path)
    assert len(places) > 6
    with pytest.raises(TypeError):
        logs.log_live(torch.cov)  # type: ignore[call-arg]
