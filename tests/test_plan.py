# SPDX-License-Identifier: Apache-2.0
"""How many chunks: the fewest that fit, of whole eights where that is free, or a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from allocations import Allocations
from koila.basics.rows import grid, largest
from koila.planning import limits, planner, plans, strategies
from koila.running import replay
from koila.staged.program import Program
from koila.staged.schedule import Strategy
from limits import made_up, there
from oracle import Lazy, eager

MIB = 2**20


def sizes(rows: int, n_chunks: int, unit: int) -> list[int]:
    return [stop - start for start, stop in grid(rows, n_chunks, unit)]


# Grids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 8, 63, 64, 100, 1000])
@pytest.mark.parametrize("n_chunks", [1, 2, 3, 7, 12, 64, 5000])
def test_grid_by_rows(rows: int, n_chunks: int) -> None:
    """As many chunks as are asked for and there are rows, larger first, equal within one row."""
    made = sizes(rows, n_chunks, 1)
    assert len(made) == min(rows, n_chunks)
    assert sum(made) == rows
    assert made == sorted(made, reverse=True)
    assert made[0] - made[-1] <= 1


@pytest.mark.parametrize("rows", [8, 63, 64, 100, 1000])
@pytest.mark.parametrize("n_chunks", [1, 2, 3, 7])
def test_grid_by_eights(rows: int, n_chunks: int) -> None:
    """All but the last are whole eights; there are no more of them."""
    made = sizes(rows, n_chunks, 8)
    assert len(made) <= n_chunks
    assert sum(made) == rows
    if len(made) * 8 <= rows:
        assert all(size % 8 == 0 for size in made[:-1])


def test_too_few_rows_for_eights() -> None:
    assert sizes(20, 5, 8) == [4, 4, 4, 4, 4]


# Plans ------------------------------------------------------------------------------------------


def planned(monkeypatch: pytest.MonkeyPatch, rows: int, most: int) -> plans.Plan:
    """The plan for a program of `rows` rows, of which `most` fit at once."""
    bytes_per_row = 1000.0
    estimate = made_up(rows, 500.0, bytes_per_row)
    monkeypatch.setattr(planner.estimates, "estimate", lambda program, is_graph: estimate)
    allowed = (500.0 + bytes_per_row * (most + 0.5)) / strategies.CHUNK_SHARE
    monkeypatch.setattr(limits, "allowed_for", lambda program, **how: allowed)
    x = koila.lazy(torch.ones(rows, 2))
    loss = (x * torch.ones(2, requires_grad=True)).sum()
    return planner.plan(Program([loss]), True)


@pytest.mark.parametrize("rows", [3, 64, 100, 128, 1000])
@pytest.mark.parametrize("most", [1, 3, 8, 30, 33, 40, 63])
def test_fewest_chunks_that_fit(monkeypatch: pytest.MonkeyPatch, rows: int, most: int) -> None:
    """One chunk less would not fit, and no chunk is larger than what does."""
    if rows <= most:
        return
    made = planned(monkeypatch, rows, most)
    bounds = grid(rows, made.n_chunks, made.unit)
    assert largest(rows, made.n_chunks, made.unit) <= most
    assert len(bounds) == -(-rows // most)


@pytest.mark.parametrize(
    ("rows", "most", "expected"),
    [
        (100, 40, [40, 32, 28]),  # and not 34, 33, 33
        (1024, 342, [342, 341, 341]),  # eights would take a fourth chunk
        (128, 43, [43, 43, 42]),
        (128, 48, [48, 40, 40]),
        (64, 7, [7, 7, 7, 7, 6, 6, 6, 6, 6, 6]),
    ],
)
def test_whole_eights_where_that_is_free(
    monkeypatch: pytest.MonkeyPatch, rows: int, most: int, expected: list[int]
) -> None:
    made = planned(monkeypatch, rows, most)
    assert sizes(rows, made.n_chunks, made.unit) == expected


def test_eights_are_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is given chunks of the sizes that were planned."""
    monkeypatch.setattr(planner, "plan", lambda program, is_graph: plans.Plan(3, 8))
    seen: list[int] = []
    run_nodes = replay.Replay.run_nodes

    def spy(self: replay.Replay, run: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        if run.is_body and run.has_gradient:
            start, stop = self.grids[run.axis][chunk]
            seen.append(stop - start)
        return run_nodes(self, run, chunk, *args, **kwargs)

    monkeypatch.setattr(replay.Replay, "run_nodes", spy)
    w = torch.randn(2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(100, 2, dtype=torch.float64)
    with koila.config(memory_limit=1):  # too little to be whole; the plan is ours
        (koila.lazy(x) * w).sum().backward()
    assert seen == [40, 32, 28]
    torch.testing.assert_close(w.grad, x.sum(0))


def test_everything_fits() -> None:
    """Under a limit that leaves room the program is run as it was written."""
    w = torch.randn(64, 3, requires_grad=True)
    x = torch.randn(1000, 64)
    with koila.config(memory_limit=there() + 64 * MIB):
        loss = (koila.lazy(x) @ w).sum()
        assert planner.plan(Program([loss]), True).n_chunks == 1
        koila._core.forget()


# Refusals ---------------------------------------------------------------------------------------


def step(make: Callable[[], nn.Module], x: Tensor, y: Tensor) -> nn.Module:
    model = make()
    loss = F.cross_entropy(model(koila.lazy(x)), y)
    loss.backward()
    return model


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 4096), nn.BatchNorm1d(4096), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4096, 5)
    )


def bytes_in(text: str) -> tuple[float, float]:
    """What a refusal says that is needed, and left."""
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20}
    found = re.search(r"needs? ([\d.]+) (\w+) more .* ([\d.]+) (\w+) are left", text)
    assert found is not None, text
    return float(found[1]) * units[found[2]], float(found[3]) * units[found[4]]


def test_a_limit_too_small_says_what_is_needed() -> None:
    """The call, its bytes and its line; torch's own kind of error, too."""
    model, x, y = normed(), torch.randn(256, 64), torch.randint(5, (256,))
    with koila.config(memory_limit=there() + MIB), pytest.raises(koila.MemoryLimitError) as caught:
        F.cross_entropy(model(koila.lazy(x)), y).backward()
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert isinstance(caught.value, koila.KoilaError)
    first, *others = str(caught.value).splitlines()
    found = re.fullmatch(
        r"at least ([\d.]+) MiB are needed and memory_limit is ([\d.]+) MiB: "
        r"set memory_limit='[\d.]+MiB'( for at most 16 chunks, or '\1MiB' for \d+ chunks)?",
        first,
    )
    assert found is not None, first
    assert float(found[1]) > float(found[2])
    needed, left = bytes_in(str(caught.value))
    assert needed > left
    assert 4 <= len(others) <= 5  # where tests before left tensors, it says so
    assert re.fullmatch(
        rf"  needs most: (batch_norm|relu|dropout|linear) .*{__file__}:\d+\)", others[-1]
    )


def test_a_refusal_changes_nothing() -> None:
    """No gradient, buffer, parameter or generator; and with more memory the same code runs."""
    model, x, y = normed(), torch.randn(256, 64), torch.randint(5, (256,))
    F.cross_entropy(model(x), y).backward()  # gradients are there already
    before = {n: t.clone() for n, t in model.state_dict().items()}
    before["1.num_batches_tracked"] += 1  # plain torch in forward(): it counts calls of the model
    gradients = [(p, p.grad, p.grad.clone()) for p in model.parameters()]
    state = torch.get_rng_state()
    with koila.config(memory_limit="1MiB"), pytest.raises(koila.MemoryLimitError):
        F.cross_entropy(model(koila.lazy(x)), y).backward()
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for parameter, gradient, value in gradients:
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)
    F.cross_entropy(model(koila.lazy(x)), y).backward()


class Fails:
    """Stand in for a kernel that finds no memory for more than so many rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.most, self.seen = most, 0
        self.run_nodes = replay.Replay.run_nodes
        monkeypatch.setattr(replay.Replay, "run_nodes", lambda *args, **kw: self.run(*args, **kw))

    def run(self, step: replay.Replay, run: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        if run.is_body and run.has_gradient:
            start, stop = step.grids[run.axis][chunk]
            self.seen += 1
            if stop - start > self.most:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")
        return self.run_nodes(step, run, chunk, *args, **kwargs)


def limited_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A step under a limit that a quarter of the rows is planned for."""
    with koila.config(memory_limit=there() + 700 * 2**10):
        loss = F.cross_entropy(model(koila.lazy(x)), y)
        loss.backward()
    return loss.detach()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5)).double()


def test_a_step_that_runs_out_of_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = small(), torch.randn(2048, 6).double(), torch.randint(5, (2048,))
    F.cross_entropy(model(x), y).backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    fails = Fails(monkeypatch, 40)
    limited_step(model, x, y)
    assert fails.seen > 2048 // 40
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-13)


def test_where_one_row_runs_out_of_memory_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = small(), torch.randn(2048, 6).double(), torch.randint(5, (2048,))
    Fails(monkeypatch, 0)
    with pytest.raises(koila.MemoryLimitError, match="one sample at a time") as caught:
        limited_step(model, x, y)
    assert re.match(
        r"memory ran out, though .* were to do .*: free some, or make", str(caught.value)
    )
    assert "\n  DefaultCPUAllocator: can't allocate memory: you tried\n" in str(caught.value)
    assert caught.value.__suppress_context__
    assert all(p.grad is None for p in model.parameters())


def test_a_refusal_names_what_is_held_whole() -> None:
    """Of what is sorted along the batch it is the batch that does not fit, not a row of it."""
    first = nn.Conv2d(3, 16, 3, padding=1)

    def model(x: torch.Tensor) -> torch.Tensor:
        return first(x).sort(0).values.relu()

    x = koila.lazy(torch.randn(64, 3, 32, 32))
    with (
        koila.config(memory_limit=there() + 5 * MIB),
        pytest.raises(koila.MemoryLimitError) as caught,
    ):
        model(x).mean().backward()
    found = re.search(
        r"needs ([\d.]+) MiB .* \(([\d.]+) MiB of them for chunks of any size\), .*"
        r"\n  too large: sort \(([^\n]*):\d+\) makes 12.0 MiB whole\n",
        str(caught.value),
        re.DOTALL,
    )
    assert found is not None, str(caught.value)
    assert 0.9 * float(found[1]) < float(found[2]) <= float(found[1])
    assert found[3] == __file__


def test_a_refusal_says_why_a_call_runs_whole() -> None:
    """Also where the parameters are larger than the results of that call."""
    model = nn.Sequential(nn.Linear(8, 700), nn.ReLU(), nn.Linear(700, 700), nn.Linear(700, 4))

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        squares = model(x).pow(2).sum(1, keepdim=True).expand(512, 512)
        return (squares + squares.T).sqrt().max(1).values.mean()

    x = koila.lazy(torch.randn(512, 8))
    with (
        koila.config(memory_limit=there() + 4 * MIB),
        pytest.raises(koila.MemoryLimitError) as caught,
    ):
        loss_of(x).backward()
    assert re.search(
        r"\n  too large: '2.weight' and its gradient .*"
        r"\n  add \(.*test_plan.py:\d+\) runs on the whole batch(, and \d+ other calls? too)?: "
        r"two inputs have their samples in different dims\n",
        str(caught.value),
    ), str(caught.value)


def test_a_refusal_names_the_call_whose_followers_are_large() -> None:
    """Of two calls that need the whole batch the smaller one has the larger results after it."""

    def model(x: torch.Tensor) -> torch.Tensor:
        h = x.sort(0).values * x.mean()
        few = x.topk(63, 0).values
        return h.mean() + torch.outer(few[:, 0], torch.ones(40_000)).sin().mean()

    x = koila.lazy(torch.randn(64, 128, requires_grad=True))
    with (
        koila.config(memory_limit=there() + 5 * MIB),
        pytest.raises(koila.MemoryLimitError) as caught,
    ):
        model(x).backward()
    assert re.search(
        r"too large: topk .*, with \d other calls?, makes [\d.]+ MiB whole\n", str(caught.value)
    )


def test_what_runs_whole_is_refused_too() -> None:
    """What no row of is kept apart is not cut; with more room it runs, as it was recorded."""
    weight = torch.ones(64, 64, requires_grad=True)
    x = koila.lazy(torch.randn(512, 64))
    loss = torch.stack([(row @ weight).square().mean() for row in x.unbind()]).sum()
    with (
        koila.config(memory_limit=there() + MIB // 16),
        pytest.raises(
            koila.MemoryLimitError,
            match=r"run on the whole batch: no call in it treats each sample by itself",
        ),
    ):
        loss.backward()
    with koila.config(memory_limit=there() + 8 * MIB):
        loss.backward()
    assert koila.report().programs[-1].n_chunks == 1
    assert weight.grad is not None


def test_a_read_that_runs_whole_is_refused_too() -> None:
    x = koila.lazy(torch.randn(512, 64))
    best = (x.topk(300, 0).values.exp() + 1).sum()
    with (
        koila.config(memory_limit=there() + MIB // 16),
        pytest.raises(koila.MemoryLimitError, match=r"topk \(.*test_plan.py:\d+\), with 3 other"),
    ):
        best.item()
    with koila.config(memory_limit=there() + 8 * MIB):
        assert best.item() > 0


def test_a_write_across_stages_is_refused_too() -> None:
    h = koila.lazy(torch.randn(300, 300)) @ torch.randn(300, 300, requires_grad=True)
    mean = h.mean()
    h.diagonal().fill_(0.5)
    loss = (h * mean).sum()
    with (
        koila.config(memory_limit=there() + MIB // 16),
        pytest.raises(koila.MemoryLimitError, match=r"fill_ \(.*test_plan.py:\d+\), with 5 other"),
    ):
        loss.backward()


def test_a_refusal_names_where_the_program_was_cut() -> None:
    """What a call that cannot be recorded is given and makes is held by the graph behind it."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * 2

    first = nn.Linear(64, 64)
    x = koila.lazy(torch.randn(4096, 64))
    with (
        koila.config(memory_limit=there() + 3 * MIB),
        pytest.raises(koila.MemoryLimitError) as caught,
    ):
        first(Twice.apply(first(x).tanh())).exp().mean().backward()
    assert re.search(
        r"other tensors hold [\d.]+ MiB( \(.*?\))?, which count too: free those that you do not "
        "need; "
        rf"Twice.apply \({__file__}:\d+\) took 1.0 MiB of the whole batch: "
        "it cannot be recorded, and the calls before it ran first",
        str(caught.value),
    )


def test_a_refusal_names_the_largest_of_other_tensors() -> None:
    buffer, batch = torch.empty(50_000, 1000), torch.randn(64, 8)
    weights = torch.randn(8, 2000, requires_grad=True)
    with (
        koila.config(memory_limit=there() + 1000),
        pytest.raises(koila.MemoryLimitError) as caught,
    ):
        (koila.lazy(batch) @ weights).mean().backward()
    largest = re.search(r"\(the largest is \[(.*?)\] (\w+)\), which count too", str(caught.value))
    assert largest is not None and buffer.nbytes > 2**27
    assert (largest[1], largest[2]) == ("50000, 1000", "float32"), largest


def test_a_refusal_that_no_call_is_to_blame_for() -> None:
    """The gradient of a weight is as large for one row."""
    w = torch.randn(1000, 1000, requires_grad=True)
    with (
        koila.config(memory_limit=there() + MIB),
        pytest.raises(koila.MemoryLimitError) as caught,
    ):
        (koila.lazy(torch.randn(64, 1000)) @ w).mean().backward()
    assert (
        "\n  too large: a tensor that you made of shape [1000, 1000] and its gradient take 3.8"
        in (str(caught.value))
    )


def test_a_refusal_names_the_state_of_an_optimizer() -> None:
    """Where it is most of what the limit is short of; a state of a parameter counts twice."""
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512))
    optimizer = torch.optim.Adam(model.parameters())
    for name, limit in (("1.8 MiB", 2**20), (None, 8 * MIB)):
        with koila.config(memory_limit=there() + limit):
            optimizer.zero_grad()
            loss = model(koila.lazy(torch.randn(64, 64))).mean()
            if name is None or not optimizer.state:
                with koila.config(memory_limit=None):
                    loss.backward()
                optimizer.step()
                continue
            with pytest.raises(koila.MemoryLimitError) as caught:
                loss.backward()
            assert f"the optimizer's state takes {name}" in str(caught.value)


# Nothing is refused that fits -------------------------------------------------------------------


class Narrow:
    """Few rows, so that parameters and their gradients are most of what there is."""

    def __init__(self, lazy: Lazy) -> None:
        torch.manual_seed(0)
        layers = [module for _ in range(4) for module in (nn.Linear(256, 256), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(256, 5))
        x, y = torch.randn(32, 256), torch.randint(5, (32,))
        memory = Allocations()
        memory.count(list(model.parameters()), x, y)
        self.held = sum(memory.before.values())
        with memory:
            loss = F.cross_entropy(model(lazy(x)), lazy(y))
        with memory:
            loss.backward()
        self.peak = memory.peak
        self.gradients = [p.grad for p in model.parameters()]


@pytest.mark.parametrize("share", [1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0])
def test_what_fits_whole_is_not_refused(share: float) -> None:
    """Nor is what fits in chunks: where there is room to spare it runs as it is written."""
    want = Narrow(eager)
    limit = want.held + int(share * (want.peak - want.held))
    with koila.config(memory_limit=there() + limit):
        got = Narrow(koila.lazy)
    assert got.peak <= limit
    for gradient, wanted in zip(got.gradients, want.gradients, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_a_refusal_names_what_was_compared() -> None:
    """Wherever the line is drawn between what runs and what does not, more is needed than left."""
    want = Narrow(eager)
    n_refused = 0
    for share in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0):
        limit = want.held + int(share * (want.peak - want.held))
        try:
            with koila.config(memory_limit=there() + limit):
                Narrow(koila.lazy)
        except koila.MemoryLimitError as error:
            n_refused += 1
            needed, left = bytes_in(str(error))
            assert needed > left
    assert n_refused > 0


@pytest.mark.parametrize(
    ("share", "wanted"),
    [
        (0.7, b""),
        (0.62, b"2"),
        (0.58, b"4"),
        (0.5, b"recomputed 2"),
        (0.3, b"recomputed 2"),
    ],
)
def test_chunks_that_are_asked_for_take_the_cheapest_way_that_is_enough(
    share: float, wanted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or, where none is, the cheapest that takes little more than the least. What crosses is made
    again where rematerializing cheap calls is not enough."""
    by_policies = {b"": 700, b"1": 650, b"2": 600, b"4": 580, b"8": 579}
    by_policies |= {b"recomputed 2": 490, b"recomputed 3": 520, b"recomputed 4": 480}
    needs = {Strategy(policies=policies): n_bytes for policies, n_bytes in by_policies.items()}

    class Needs:
        rows, whole = 8, 1000.0

        def __init__(self, way: Strategy) -> None:
            self.strategy = way

        def peak(self, rows: int) -> tuple[float, int]:
            return float(needs[self.strategy]), 0

    program: Any = SimpleNamespace(parameters=[], is_part=False)
    some = SimpleNamespace(
        option=lambda way: SimpleNamespace(strategy=way, estimate=Needs(way)),
        recomputing=lambda: list(needs)[1:],
        is_there=lambda way: True,
    )
    monkeypatch.setattr(planner, "_ASKED_SHARE", share)
    monkeypatch.setattr(planner, "Strategies", lambda *_: some)
    assert planner._find_strategy_in(4, program) == Strategy(policies=wanted)


def rolled(lazy: Lazy, memory: Allocations) -> tuple[Tensor, int]:
    """Two calls need all rows of a layer."""
    torch.manual_seed(0)
    w, x = torch.randn(16, 128, requires_grad=True), torch.randn(4096, 16)
    memory.count(w, x)
    with memory:
        h = (lazy(x) @ w).relu()
    with memory:
        ((h + 0.3 * h.roll(1, 0) + 0.1 * h.flip(0)) @ w.T).logsumexp(1).mean().backward()
    assert w.grad is not None
    return w.grad, memory.peak


def test_chunks_that_would_take_more_than_the_whole_run_are_none() -> None:
    want, most = rolled(eager, Allocations())
    with koila.config(chunks=6):
        got, peak = rolled(koila.lazy, Allocations())
    (ran,) = koila.report().programs
    assert ran.n_chunks == 1 and ran.why == "in the chunks that were asked for it would take more"
    assert peak <= 1.01 * most
    torch.testing.assert_close(got, want, rtol=0, atol=0)
