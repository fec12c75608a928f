# SPDX-License-Identifier: Apache-2.0
"""The oracle notices: a naive splitter, and each kind of small wrong, is told from eager."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from koila.reporting import reports
from oracle import Outcome, assert_outcomes, make_batch, run, split
from programs import BARRIER, PROGRAMS
from programs_kit import Program
from stories import make

N_ROWS = 11
#: These have a barrier, but no row sees another: naive splitting does not show.
ROWWISE = {"uncertain", "quantise"}


def by_name(name: str) -> Program:
    """Return one program."""
    (program,) = (program for program in PROGRAMS if program.name == name)
    return program


def run_naively(program: Program, chunks: int) -> Outcome:
    """Run each chunk as if it were a batch, and weigh its loss by its share of the rows."""
    model = program.build(0)
    batch = make_batch(program, N_ROWS)
    dims = program.dims_of(batch)
    parts = [value.tensor_split(chunks, dim=dim) for value, dim in zip(batch, dims, strict=True)]
    torch.manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for part in zip(*parts, strict=True):
        loss = program.step(model, *part) * (part[0].shape[dims[0] or 0] / N_ROWS)
        loss.backward()
        total += loss.detach()
    return Outcome(
        loss=total,
        gradients={name: parameter.grad for name, parameter in model.named_parameters()},
        inputs={f"batch[{i}]": None for i in range(len(batch))},
        buffers=dict(model.named_buffers()),
        generator=torch.get_rng_state(),
    )


@pytest.mark.parametrize(
    "program", [p for p in BARRIER if p.name not in ROWWISE], ids=lambda program: program.name
)
def test_barrier_programs_need_the_batch(program: Program) -> None:
    """No program said to have a barrier can be split naively."""
    with pytest.raises(AssertionError, match=r"eager|close|generator"):
        assert_outcomes(run_naively(program, 3), run(program, N_ROWS), generator=False)


@pytest.mark.parametrize(
    "name",
    [
        "mlp-ce_sum",
        "mlp-ce_ignored",
        "mlp-ce_weights",
        "mlp-masked_mean",
        "gpt_by_hand-masked_tokens",
    ],
)
def test_uneven_losses_need_their_counts(name: str) -> None:
    """A mean whose denominator is in the data is no mean of chunk means."""
    with pytest.raises(AssertionError, match="close"):
        assert_outcomes(run_naively(by_name(name), 3), run(by_name(name), N_ROWS))


def test_the_naive_splitter_is_right_where_it_can_be() -> None:
    """A plain mean survives it: so what it fails on is the program's fault."""
    program = by_name("mlp-mse")
    assert_outcomes(run_naively(program, 3), run(program, N_ROWS))


def test_small_wrongs_are_noticed() -> None:
    """One more draw, statistics written twice, zeros for None, one wrong bit."""
    want = run(by_name("cnn_bn-ce"), N_ROWS)
    nothing = dict.fromkeys(want.gradients)
    twice = {n: b * 1.01 for n, b in want.buffers.items()}
    nudged = {
        n: None if g is None else torch.nextafter(g, g + 1) for n, g in want.gradients.items()
    }
    zeros = {n: torch.zeros_like(g) for n, g in want.gradients.items() if g is not None}
    assert_outcomes(want, want, exact_bits=True)
    for wrong, exact_bits in [
        ({"generator": torch.get_rng_state().flip(0)}, False),
        ({"buffers": twice}, False),
        ({"gradients": nothing}, False),
        ({"gradients": zeros}, False),
        ({"gradients": nudged}, True),
        ({"loss": want.loss * (1 + 1e-9)}, False),
    ]:
        with pytest.raises(AssertionError):
            assert_outcomes(dataclasses.replace(want, **wrong), want, exact_bits=exact_bits)
    with pytest.raises(AssertionError):
        assert_outcomes(want, dataclasses.replace(want, gradients=nothing))


# Chunks -----------------------------------------------------------------------------------------


def step() -> None:
    """Take a step that can be cut."""
    model, x, y = make()
    x, y = koila.lazy(x, y)
    F.cross_entropy(model(x), y).backward()


def whole_step() -> None:
    """Take one that cannot."""
    model, x, y = make()
    x, y = koila.lazy(x, y)
    loss = F.cross_entropy(model(x), y)
    torch.autograd.grad(loss, model.head.weight, create_graph=True)


def step_with_a_whole_model() -> None:
    """Take a step of which only the loss is cut."""
    model, x, y = make()
    x, y = koila.lazy(x, y)
    h = model(x)
    koila._core.force(h)
    F.cross_entropy(h * 2, y).backward()


def product_of_all_rows() -> Tensor:
    """Sum what all rows make up to something plain, in one call."""
    model, x, _ = make()
    h = model(koila.lazy(x))
    return torch.addmm(torch.ones(h.shape[1], 1, dtype=h.dtype), h.t(), h).sum()


def test_split_is_told_from_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was to be cut and ran whole is noticed, however much of it did."""
    with split(3, rows=("linear", "cross_entropy_loss")):
        step()
    with pytest.raises(AssertionError, match=r"not by rows: ..conv2d"), split(3, rows=("conv2d",)):
        step()
    with pytest.raises(AssertionError, match="nothing was cut"), split(3):
        whole_step()
    with pytest.raises(AssertionError, match="ran whole: what made"), split(3):
        step_with_a_whole_model()
    with pytest.raises(AssertionError, match="addmm, which runs once"), split(3):
        product_of_all_rows().backward()
    with pytest.raises(AssertionError, match="a backward"), split(3):
        step()
        whole_step()
    asked = reports.Decision("it is asked for")
    monkeypatch.setattr(koila.planning.planner, "why_whole", lambda: asked)
    with pytest.raises(AssertionError, match="nothing was cut"), split(3):
        step()


def test_what_is_said_to_be_whole_must_be() -> None:
    """So that no reason outlives what it is given for."""
    with split(3, whole="create_graph"):
        whole_step()
    with pytest.raises(AssertionError, match="it is cut"), split(3, whole="never mind"):
        step()
    with split(3, partly="rows against rows"):
        product_of_all_rows().backward()
    with pytest.raises(AssertionError, match="all of it is cut"), split(3, partly="never mind"):
        step()


def test_the_number_of_chunks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer chunks than were asked for, and one that is left out."""
    with split(100):
        step()  # of fewer rows
    grid = koila.running.store.grid
    monkeypatch.setattr(koila.running.store, "grid", lambda rows, n, unit: grid(rows, n - 1, unit))
    with pytest.raises(AssertionError, match="asked for 3 chunks: 11 rows ran as"), split(3):
        step()
