# SPDX-License-Identifier: Apache-2.0
"""What can be recorded is: a model that runs while it is recorded cannot be cut any more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import koila
from oracle import FlopCounter, Lazy, eager, make_batch, make_lazy, plain
from programs import PROGRAMS
from programs_kit import Program

#: What the program's own code does to make its model run at once, or why flops are counted.
RUNS = {
    "gan_discriminator": "the generator's noise is a plain tensor",
    "critic": "the critic is given plain noise too",
    "time_major_scan": "the first state is a plain tensor of zeros",
    "distillation": "the end of no_grad() runs what was computed in it",
    "q_learning": "the end of no_grad() runs what was computed in it",
    "fix_match": "the end of no_grad() runs what was computed in it",
    "mlp-selected_by_value": "the number of what its own values select",
    "sparse_mixture": "a result whose size depends on data",
    "quantise": "a custom autograd.Function",
    "maml": "a gradient inside the program",
    "slope": "a gradient inside the program",
    **{
        f"{model}-{loss}": "the queries are parameters alone"
        for model in ("attention", "attention_time")
        for loss in ("ce", "ce_ignored", "masked_mean")
    },
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_nothing_runs_while_recorded(program: Program) -> None:
    """No product, convolution or attention is computed before backward() is called."""
    model = program.build(0)
    batch = make_batch(program, program.rows(7))
    counter = FlopCounter()
    with koila.config(chunks=3), counter:
        program.step(model, *make_lazy(koila.lazy, batch, program.dims_of(batch)))
    assert (counter.flops > 0) == (program.name in RUNS), f"{counter.flops} flops"


def test_a_view_of_a_number_writes_nothing() -> None:
    """A call that waits reads the indices, and a view of them is no reason to run it."""
    x, labels = koila.lazy(torch.randn(12, 8), torch.randint(0, 4, (12,)), batch=0)
    weight = torch.randn(8, 4, requires_grad=True)
    counter = FlopCounter()
    with koila.config(chunks=3), counter:
        found = (labels >= 0).nonzero()
        logits = torch.gather(x @ weight, 0, found.expand(-1, 4))
        chosen = torch.gather(labels, 0, found.view(-1))
        assert counter.flops == 0, "the model ran while it was recorded"
        torch.nn.functional.cross_entropy(logits, chosen).backward()
    assert counter.flops > 0


def test_a_write_through_a_view_of_a_number_waits_for_its_readers() -> None:
    """What was recorded before the write reads what was there then."""
    x, labels = koila.lazy(torch.randn(12, 8), torch.randint(0, 4, (12,)), batch=0)
    weight = torch.randn(8, 4, requires_grad=True)
    with koila.config(chunks=3):
        found = (labels >= 0).nonzero()
        logits = torch.gather(x @ weight, 0, found.expand(-1, 4))
        found.view(-1)[:] = 0
        assert torch.equal(logits, x @ weight)


@pytest.mark.parametrize("chunks", [1, 3, 12])
def test_a_write_without_a_row_into_labels_alone(chunks: int) -> None:
    """Which pairs match is known of the labels: to write that needs no number of the model."""

    def step(lazy: Lazy) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(12, 8, dtype=torch.float64, generator=generator)
        labels = torch.randint(0, 4, (12,), generator=generator)
        weight = torch.randn(8, 8, dtype=torch.float64, generator=generator).requires_grad_()
        x, labels = lazy(x, labels)
        counter = FlopCounter()
        with counter:
            h = x @ weight
            matches = (labels[:, None] == labels[None]).byte()
            column, differs = matches[:, 0], matches ^ 1
            scaled = h * matches.sum(1, keepdim=True)
            matches.fill_diagonal_(0)
            assert lazy is eager or chunks == 1 or counter.flops == 0, (
                "the model ran while it was recorded"
            )
        loss = ((h @ h.T) * matches + differs).pow(2).mean() + (scaled * column[:, None]).mean()
        loss.backward()
        return loss, weight.grad, matches, column, differs, scaled

    with koila.config(chunks=chunks):
        seen = step(koila.lazy)
    for value, expected in zip(seen, step(eager), strict=True):
        torch.testing.assert_close(plain(value), plain(expected), rtol=1e-10, atol=1e-10)


def test_a_product_for_each_group_of_rows() -> None:
    """The experts of a mixture: torch's meta kernel knows them in bfloat16 alone."""

    def step(lazy: Lazy, counter: FlopCounter) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(24, 16, generator=generator)
        expert = torch.randint(0, 4, (24,), generator=generator)
        weight = torch.randn(16, 16, generator=generator).requires_grad_()
        experts = torch.randn(4, 16, 8, generator=generator).requires_grad_()
        x, expert = lazy(x, expert)
        with counter:
            h = (x @ weight).tanh()
            order = expert.argsort()
            ends = torch.bincount(expert, minlength=4).cumsum(0).to(torch.int32)
            made = torch.nn.functional.grouped_mm(h[order], experts, offs=ends).relu()
            loss = made[order.argsort()].pow(2).mean() + h.mean()
        loss.backward()
        return loss, weight.grad, experts.grad

    with koila.config(chunks=5):
        seen = step(koila.lazy, counter := FlopCounter())
    assert counter.flops == 0, "the model ran while it was recorded"
    for value, expected in zip(seen, step(eager, FlopCounter()), strict=True):
        torch.testing.assert_close(plain(value), plain(expected), rtol=1e-5, atol=1e-6)
