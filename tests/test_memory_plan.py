# SPDX-License-Identifier: Apache-2.0
"""koila.plan(): the bytes of a step before it runs, against what torch keeps and allocates."""

from __future__ import annotations

import json
import pickle
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from koila.memory import estimates, optimizers, plan_program
from koila.messages.words import size
from koila.planning import planner
from koila.staged.program import Program
from limits import there
from profiled import bytes_over_time

N_ROWS = 256


class Norms(nn.Module):
    """Convolutions with BatchNorm between them: several passes over the chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
                for _ in range(3)
            )
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 10)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (dense, (64,)),
    "norms": (Norms, (3, 12, 12)),
    "attention": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(512, 10),
        ),
        (16, 32),
    ),
}
each_model = pytest.mark.parametrize("name", MODELS)


def step_of(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    make, shape = MODELS[name]
    return make(), torch.randn(N_ROWS, *shape), torch.randint(10, (N_ROWS,))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@each_model
@pytest.mark.parametrize("setting", [{}, {"chunks": 3}, {"share": 0.6}, {"share": 0.3}], ids=str)
def test_moments_add_up(name: str, setting: dict[str, Any]) -> None:
    """At each moment what is of one kind is no more than all; at the worst it is what the number of
    chunks was chosen by; and nothing has run."""
    model, x, y = step_of(name)
    whole = koila.plan(loss_of(model, *koila.lazy(x, y))).whole
    config = dict(setting)
    if "share" in config:
        config["memory_limit"] = there() + int(config.pop("share") * whole) + 2**16
    with koila.config(**config):
        loss = loss_of(model, *koila.lazy(x, y))
        plan = koila.plan(loss)
        planned = planner.plan(Program([loss]), True)
        assert koila._core.real(loss) is None
        assert (plan.fits, plan.n_chunks == 1) == (True, not config)
        if planned.predicted is not None:
            assert plan.n_bytes == pytest.approx(planned.predicted, abs=16)
        for one in plan.moments:
            assert min(one.activations, one.outputs, one.gradients, one.temporaries) >= 0
            assert one.n_bytes <= plan.n_bytes
        assert max(plan.phases["forward"], plan.phases["backward"]) == plan.n_bytes
        phases = [one.phase for one in plan.moments]
        assert phases[0] == "forward"
        assert phases[-1] == "backward"
    parameters = sum(p.nbytes for p in model.parameters())
    assert plan.there["parameters"] == parameters == plan.phases["optimizer's step"]
    assert parameters <= plan.moments[-1].gradients <= 1.1 * parameters + x.nbytes


@each_model
def test_activations_are_what_autograd_saves(name: str) -> None:
    """Whole, when backward begins: torch's own hooks on saved tensors say so."""
    model, x, y = step_of(name)
    before = {t.untyped_storage().data_ptr() for t in (x, y, *model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in before:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = loss_of(model, x, y)
    plan = koila.plan(loss_of(model, *koila.lazy(x, y)))
    at_end = max(one.activations for one in plan.moments if one.phase == "backward")
    assert at_end == pytest.approx(sum(saved.values()), rel=0.05, abs=2**13)
    assert held.requires_grad


@each_model
@pytest.mark.parametrize("chunks", [None, 3])
def test_worst_moment_is_what_is_allocated(name: str, chunks: int | None) -> None:
    model, x, y = step_of(name)
    setting = {} if chunks is None else {"chunks": chunks}
    loss_of(model, *koila.lazy(x, y)).backward()  # what a first step alone takes
    model.zero_grad()
    with koila.config(**setting):  # type: ignore[arg-type]
        plan = koila.plan(loss_of(model, *koila.lazy(x, y)))
        peak = max(bytes_over_time(lambda: loss_of(model, *koila.lazy(x, y)).backward()))
    assert peak <= 1.1 * plan.n_bytes + 2**16
    assert plan.n_bytes <= 1.35 * peak + 2**16


def test_largest_values_are_named() -> None:
    model, x, y = step_of("norms")
    with koila.config(chunks=4):
        plan = koila.plan(loss_of(model, *koila.lazy(x, y)))
    one = N_ROWS * 8 * 12 * 12 * 4
    # The stem, and three blocks of a convolution and a ReLU.
    large = [value for value in plan.largest if value.n_bytes == one]
    assert plan.largest[: len(large)] == tuple(large)
    assert len(large) == 7
    assert large[0].in_chunk == one // 4
    assert {value.layer for value in plan.largest} >= {"stem", "blocks.0.0", "blocks.2.0"}
    assert all("test_memory_plan.py:" in value.where for value in plan.largest)
    assert "whole needs" in str(plan)
    assert "blocks.0.0" in str(plan)


def test_outputs_and_optimizer_state() -> None:
    """What the script holds is told apart; and so is what a first step of Adam will keep."""
    model, x, y = step_of("dense")
    optimizer = torch.optim.Adam(model.parameters())
    lazies = koila.lazy(x, y)
    scores = model(lazies[0])
    plan = koila.plan(F.cross_entropy(scores, lazies[1]))
    assert plan.moments[-1].outputs == scores.nbytes + 4
    parameters = sum(p.nbytes for p in model.parameters())
    allocated = optimizers.temporaries(model.parameters())
    assert plan.phases["optimizer's step"] == 3 * parameters + allocated
    F.cross_entropy(scores, lazies[1]).backward()
    optimizer.step()
    plan = koila.plan(loss_of(model, *koila.lazy(x, y)))
    assert plan.phases["optimizer's step"] == allocated > 0
    assert plan.there["optimizer state"] >= 2 * parameters


def test_a_refusal_has_its_plan() -> None:
    """All that is of the chunks that need least, and says what does not fit."""
    model, x, y = step_of("norms")
    with koila.config(memory_limit=there() + 2**12):
        loss = loss_of(model, *koila.lazy(x, y))
        plan = koila.plan(loss)
        with pytest.raises(koila.MemoryLimitError) as caught:
            loss.backward()
    assert caught.value.plan is not None
    for one in (plan, caught.value.plan):
        assert not one.fits
        assert one.n_bytes > one.allowed
        assert one.n_chunks * one.n_samples == N_ROWS
        assert one.n_samples <= 2
    assert "are needed and memory_limit is" in str(plan)
    assert caught.value.plan.summary[0] == str(caught.value).splitlines()[0]


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_a_plan_measures_no_more_than_explain(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """In chunks, what explain measured is used again, and the plan is that of a new measure."""
    n_measured, estimate = [0], estimates.estimate

    def counted(*args: Any) -> estimates.Estimate:
        n_measured[0] += 1
        return estimate(*args)

    model, x, y = step_of("norms")
    loss = loss_of(model, *koila.lazy(x, y))
    limit = there() + int(share * koila.plan(loss).whole)
    with koila.config(memory_limit=limit):
        koila.plan(loss)
        monkeypatch.setattr(estimates, "estimate", counted)
        koila.explain(loss)
        n_of_explain, n_measured[0] = n_measured[0], 0
        plan = koila.plan(loss)
        assert plan.fits and plan.n_chunks > 1
        assert n_measured[0] <= n_of_explain
        of = plan_program.of

        def measuring(program: Any, is_graph: bool, way: Any, *others: Any) -> Any:
            return of(program, is_graph, way._replace(estimate=None), *others)

        monkeypatch.setattr(plan_program, "of", measuring)
        assert koila.plan(loss) == plan


def test_evaluation_has_no_backward() -> None:
    model, x, _ = step_of("dense")
    with torch.no_grad():
        plan = koila.plan(model(koila.lazy(x)).argmax(1))
    assert list(plan.phases) == ["forward"]
    assert not any(one.gradients for one in plan.moments)


def test_nothing_to_plan() -> None:
    x = koila.lazy(torch.ones(4, 3))
    with pytest.raises(koila.KoilaError, match="an input, of which nothing is computed yet"):
        koila.plan(x)
    with pytest.raises(koila.KoilaError, match="no lazy tensor was given"):
        koila.plan(torch.ones(3))
    loss = x.sum()
    assert loss.item() == 12
    with pytest.raises(koila.KoilaError, match="all has run"):
        koila.plan(loss)


def test_what_has_no_samples() -> None:
    """A program that keeps no samples apart is planned as it runs: whole."""
    w = torch.ones(32, 32, requires_grad=True)
    x = koila.lazy(torch.ones(32, 32))
    plan = koila.plan((torch.linalg.inv(x.T @ w + torch.eye(32))).sum())
    assert plan.n_chunks == 1
    assert plan.n_bytes >= w.nbytes


@pytest.fixture(scope="module")
def some_plan() -> koila.MemoryPlan:
    model, x, y = step_of("norms")
    with koila.config(memory_limit=there() + 2**21):
        return koila.plan(loss_of(model, *koila.lazy(x, y)))


def test_files(some_plan: koila.MemoryPlan, tmp_path: Path) -> None:
    names = ("plan.svg", "plan.html", "plan.json", "plan.trace.json", "plan.pickle", "plan.txt")
    for name in names:
        some_plan.save(tmp_path / name)
    text = (tmp_path / "plan.html").read_text()
    assert "<script" not in text
    assert len(text) < 50_000
    with pytest.raises(ValueError, match=r"'plan.png' has no ending that says the format: .*\.svg"):
        some_plan.save(tmp_path / "plan.png")
    assert not (tmp_path / "plan.png").exists()
    svg = ET.parse(tmp_path / "plan.svg").getroot()
    areas = [one for one in svg.iter() if one.tag.endswith("polygon")]
    assert len(areas) == 4
    titles = [one.text or "" for one in svg.iter() if one.tag.endswith("title")]
    (marked,) = (title for title in titles if title.startswith("optimizer's step: "))
    assert marked.endswith(size(some_plan.phases["optimizer's step"]))
    *shown, hint = repr(some_plan).splitlines()
    assert "\n".join(shown) == str(some_plan)
    assert ".save('plan.svg')" in hint and all(name[4:] in hint for name in names)
    assert (tmp_path / "plan.txt").read_text() == str(some_plan)
    numbers = json.loads((tmp_path / "plan.json").read_text())
    assert numbers["n_bytes"] == some_plan.n_bytes
    assert len(numbers["moments"]) == len(some_plan.moments)
    events = json.loads((tmp_path / "plan.trace.json").read_text())["traceEvents"]
    counters = [sum(event["args"].values()) for event in events if event["ph"] == "C"]
    assert counters == [one.n_bytes for one in some_plan.moments]
    slices = [event for event in events if event["ph"] == "X"]
    assert [one["ts"] for one in slices] == sorted({one["ts"] for one in slices})


def test_snapshot_is_read_by_torchs_viewer(some_plan: koila.MemoryPlan, tmp_path: Path) -> None:
    """Replayed, its blocks are what the plan says at each moment."""
    from torch.cuda import _memory_viz as viewer

    some_plan.save(tmp_path / "plan.pickle")
    snapshot = pickle.loads((tmp_path / "plan.pickle").read_bytes())
    assert "TOTAL MEM" in viewer.trace(snapshot)
    assert viewer.trace_plot(snapshot).startswith("\n<!DOCTYPE html>")
    now, by_time = 0, dict[int, int]()
    for event in snapshot["device_traces"][0]:
        change = {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
        now += change * event["size"]
        by_time[event["time_us"]] = now
    totals = [one.n_bytes for one in some_plan.moments]
    for time, n_bytes in by_time.items():
        assert n_bytes == totals[time // 10]
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == totals[-1]


def test_plot(some_plan: koila.MemoryPlan) -> None:
    pytest.importorskip("matplotlib").use("agg")
    axes = some_plan.plot()
    assert axes.get_ylabel() == "MiB"
