# SPDX-License-Identifier: Apache-2.0
"""Reading a number before backward() costs none of the memory that chunks save."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from allocations import Allocations
from limits import there
from oracle import FlopCounter, Lazy, assert_close, eager, gradients

ROWS, WIDTH, CLASSES = 1024, 128, 10


class Metric:
    """Accuracy that adds up, as metric libraries keep it."""

    def __init__(self) -> None:
        self.n_right = torch.tensor(0)
        self.n = 0

    def update(self, out: Tensor, y: Tensor) -> None:
        self.n_right += (out.argmax(1) == y).sum()
        self.n += y.numel()


def accuracy(loss: Tensor, out: Tensor, y: Tensor) -> Any:
    return (out.argmax(1) == y).float().mean().item()


def several(loss: Tensor, out: Tensor, y: Tensor) -> Any:
    texts = f"{loss:.3f} {accuracy(loss, out, y):.3f} {out.max():.3f} {loss * 2:.3f}"
    return [float(text) for text in texts.split()]


def metric(loss: Tensor, out: Tensor, y: Tensor) -> Any:
    kept = Metric()
    kept.update(out, y)
    return int(kept.n_right)


def numbers_of_the_model(loss: Tensor, out: Tensor, y: Tensor) -> Any:
    return float(out.detach().softmax(-1).cpu().numpy().sum())


def is_finite(loss: Tensor, out: Tensor, y: Tensor) -> Any:
    return bool(torch.isfinite(loss)), bool(out.isnan().any()), math.isfinite(loss.detach())


#: Each reads something of a step before its backward().
READS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "item": lambda loss, out, y: loss.item(),
    "float": lambda loss, out, y: float(loss.detach()),
    "format": lambda loss, out, y: float(f"{loss:.3f}"),
    "is_finite": is_finite,
    "accuracy": accuracy,
    "several": several,
    "metric": metric,
    "outputs": numbers_of_the_model,
    "labels": lambda loss, out, y: (bool((y >= 0).all()), int((y == 3).sum())),
    "tolist": lambda loss, out, y: out[:2].argmax(1).tolist(),
}
each_read = pytest.mark.parametrize("name", READS)
each_share = pytest.mark.parametrize("share", [0.8, 0.5, 0.3])


def make_model(p: float) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(p)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


class Step:
    """One step with a read in its midst: what it saw, left behind and took."""

    def __init__(self, name: str, lazy: Lazy, p: float, looks: Callable[[Any], None]) -> None:
        self.model = make_model(p)
        x, y = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))
        self.held = sum(t.nbytes for t in (*self.model.parameters(), x, y))
        memory = Allocations()
        memory.count(list(self.model.parameters()), x, y)
        torch.manual_seed(1)
        with memory:
            x, y = lazy(x, y)
            out = self.model(x)
            loss = F.cross_entropy(out, y)
            self.seen = READS[name](loss, out, y)
        looks(loss)
        with memory:
            loss.backward()
        self.loss = loss.item()
        self.peak = memory.peak
        self.gradients = gradients(self.model)
        self.generator = torch.get_rng_state()


def nothing(loss: Any) -> None:
    """Look at nothing."""


def is_recorded(loss: Any) -> None:
    """The program is still there to be cut."""
    assert koila.explain(loss).startswith("whole needs")


def limit_of(step: Step, share: float) -> int:
    """A share of what a step took beside what was there before it."""
    return step.held + int(share * (step.peak - step.held))


@pytest.mark.rotated("share")
@each_share
@each_read
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_reads_keep_the_limit(name: str, share: float, p: float) -> None:
    """The numbers are eager's, the program stays recorded, and the limit holds to the end."""
    want = Step(name, eager, p, nothing)
    limit = limit_of(want, share)
    with koila.config(memory_limit=there() + limit):
        got = Step(name, koila.lazy, p, is_recorded)
    report = koila.report()
    assert report is not None
    assert report.n_chunks > 1
    assert got.peak <= limit, f"{got.peak} bytes, the limit is {limit}, eager's {want.peak}"
    assert got.seen == pytest.approx(want.seen, rel=1e-5)
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    assert torch.equal(got.generator, want.generator)
    for key, gradient in want.gradients.items():
        found = got.gradients[key]
        assert gradient is not None
        assert found is not None
        assert_close(found, gradient, key, tolerance=1e-4)


# What a read runs -------------------------------------------------------------------------------


def flops_of(act: Callable[[], Any]) -> int:
    counter = FlopCounter()
    with counter:
        act()
    return counter.flops


def test_one_pass_gives_all_numbers() -> None:
    """What was run for one number is not run again for the next."""
    model = make_model(0.0)
    x, y = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))
    once = flops_of(lambda: model(x.detach()))
    with koila.config(memory_limit=there() + 3 * 2**20):
        lazy_x, lazy_y = koila.lazy(x, y)
        out = model(lazy_x)
        loss = F.cross_entropy(out, lazy_y)
        assert flops_of(loss.item) == once
        assert flops_of(lambda: several(loss, out, lazy_y)) == 0
        assert flops_of(lambda: print(loss, out[0], (loss * 2 + out.mean()).item())) == 0
        assert flops_of(loss.backward) == 3 * once - ROWS * WIDTH * WIDTH * 2  # x has no gradient


@pytest.mark.parametrize("limit", [3 * 2**20, 2**30])
def test_what_needs_no_model_runs_none(limit: int) -> None:
    """A mask of the labels, a mean of the inputs: bit for bit, and nothing else is run."""
    model = make_model(0.0)
    x, y = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))

    def read(x: Any, y: Any) -> Any:
        mask = (y > 3) & (x.sum(1) > 0)
        best = x.max(0)
        of_inputs = x.mean().item(), x.std().item(), x.var(0)[3].item(), best.values[2].item()
        counts = bool(mask.any()), int(mask.sum()), y[mask].sum().item(), y.unique().tolist()
        return of_inputs, counts, best.indices[4].item(), F.one_hot(y, 10).float().mean().item()

    want = read(x, y)
    with koila.config(memory_limit=there() + limit):
        lazy_x, lazy_y = koila.lazy(x, y)
        loss = F.cross_entropy(model(lazy_x), lazy_y)
        seen: list[Any] = []
        assert flops_of(lambda: seen.append(read(lazy_x, lazy_y))) == 0
        assert seen == [want]
        assert koila.explain(loss).startswith("whole needs")
        loss.backward()


def test_no_grad_in_the_midst_of_a_step() -> None:
    """A teacher's pass runs alone: the student's program stays recorded, and is cut."""
    teacher, student = make_model(0.0), make_model(0.0)
    x = torch.randn(ROWS, WIDTH)
    want = F.mse_loss(student(x), teacher(x).detach())
    want.backward()
    wanted = gradients(student)
    student.zero_grad()
    once = flops_of(lambda: teacher(x.detach()))
    with koila.config(memory_limit=there() + 3 * 2**20):
        lazy_x = koila.lazy(x)
        out = student(lazy_x)

        def teach() -> Tensor:
            with torch.no_grad():
                return teacher(lazy_x)

        targets: list[Tensor] = []
        assert flops_of(lambda: targets.append(teach())) == once
        loss = F.mse_loss(out, targets[0])
        loss.backward()
        report = koila.report()
    assert report is not None
    assert report.n_chunks > 1
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    for name, gradient in gradients(student).items():
        expected = wanted[name]
        assert gradient is not None
        assert expected is not None
        assert_close(gradient, expected, name, tolerance=1e-4)


def test_a_read_without_backward_to_come() -> None:
    """Where the graph fits in no number of chunks a number is still had without it."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(8)]
    model = nn.Sequential(*layers)  # 4 MiB of weights
    x = torch.randn(256, 64)
    want = model(x).sum().item()
    with koila.config(memory_limit=there() + 2**20):
        total = model(koila.lazy(x)).sum()
        assert total.item() == pytest.approx(want, rel=1e-4)
        with pytest.raises(koila.MemoryLimitError):
            total.backward()


def test_what_a_frozen_trunk_gave_is_not_made_again() -> None:
    """Its numbers were read in chunks. What is left fits whole, and runs so: without the trunk."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, 16 * WIDTH), nn.Tanh(), nn.Linear(16 * WIDTH, WIDTH)]
    trunk, head = nn.Sequential(*layers).requires_grad_(False), nn.Linear(WIDTH, CLASSES)
    x, y = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))
    once = flops_of(lambda: trunk(x))

    def step(lazy: Lazy) -> tuple[float, int, int]:
        head.zero_grad()
        memory, counter = Allocations(), FlopCounter()
        with counter:
            with memory:
                a, b = lazy(x, y)
                features = trunk(a)
                out = head(features)
                assert out.isfinite().all()
            with memory:
                loss = F.cross_entropy(out, b)
                loss.backward()
        return loss.item(), memory.peak, counter.flops

    want, most, n_flops = step(eager)
    gradient = head.weight.grad
    assert gradient is not None
    with koila.config(memory_limit=there() + most // 2):
        loss, peak, n_flops_lazy = step(koila.lazy)
    read, *_, backward = (ran for ran in koila.report().programs if "item" not in ran.what)
    assert read.n_chunks > 1
    assert backward.n_chunks == 1
    assert n_flops_lazy < n_flops + once // 2
    assert peak <= most // 2
    assert loss == pytest.approx(want, rel=1e-5)
    assert head.weight.grad is not None
    assert_close(head.weight.grad, gradient, "head", tolerance=1e-4)


def test_what_was_read_and_is_gone_takes_nothing() -> None:
    """A mask of all triplets that where() read whole, as miners do: in chunks as much as in eager,
    which lets go of it before the distances are made."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 16), torch.randn(96, 8), torch.arange(96) % 8

    def triplets(labels: Tensor) -> tuple[Tensor, ...]:
        same = (labels.unsqueeze(1) == labels.unsqueeze(0)).byte()
        other = same ^ 1
        return torch.where(same.unsqueeze(2) * other.unsqueeze(1))

    def step(lazy: Lazy) -> tuple[Tensor, int]:
        memory = Allocations()
        with memory:
            pass
        with memory:
            given, labels = lazy(x, y)
            out = model(given)
            anchor, positive, negative = triplets(labels)
            distances = torch.cdist(out, out)
            loss = (distances[anchor, positive] - distances[anchor, negative]).relu().mean()
            loss.backward()
        return loss.detach(), memory.peak

    step(eager)
    wanted, most = step(eager)
    with koila.config(chunks=4):
        loss, peak = step(koila.lazy)
    assert_close(loss + 0, wanted, "the loss")
    assert peak <= 1.03 * most, f"{peak} bytes in chunks, {most} in eager"


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_what_waits_besides_a_loss_is_counted(share: float) -> None:
    """Predictions were read, and are kept with their history: whole, that would run with the loss,
    which alone fits."""

    def step(lazy: Lazy) -> tuple[list[Tensor], int]:
        net, memory = make_model(0.1), Allocations()
        batch = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))
        memory.count(list(net.parameters()), *batch)
        with memory:
            pass
        with memory:
            x, y = lazy(*batch)
            drawn = torch.stack([net(x) for _ in range(3)])
            spread = drawn.std(0).mean().item()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
        found = [p.grad for p in net.parameters() if p.grad is not None]
        return [torch.tensor([spread, loss.item()]), *found], memory.peak

    want, peak = step(eager)
    with koila.config(memory_limit=there() + int(share * peak)):
        got, took = step(koila.lazy)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert took <= share * peak, f"{took / peak:.2f} of eager's {peak / 2**20:.1f} MiB"


def test_a_refused_read_tells_what_its_backward_needs() -> None:
    """The limit of the error's first line is enough for the read alone; that of its note is enough
    for all steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, CLASSES))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))

    def step(limit: int, is_backward: bool = True) -> None:
        with koila.config(memory_limit=limit):
            x, y = koila.lazy(*batch)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.item()
            if is_backward:
                loss.backward()
                optimizer.step()

    with pytest.raises(koila.MemoryLimitError) as raised:
        step(there())
    assert raised.value.least_limit is not None
    (note,) = raised.value.__notes__
    limits = [float(text) for text in re.findall(r"'([\d.]+)MiB'", note)]
    step(int(raised.value.least_limit), is_backward=False)
    with pytest.raises(koila.MemoryLimitError):
        step(int(raised.value.least_limit))
    for _ in range(2):
        step(math.ceil(min(limits) * 2**20))


def test_detached_outputs_are_read_without_a_graph() -> None:
    """Nobody can call backward() on them, so koila plans no graph: the run must not build one."""
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])
    x = torch.randn(ROWS, 64)

    def read(lazy: Lazy) -> Tensor:
        return torch.from_numpy(model(lazy(x)).detach().numpy().copy())

    wanted, limit = read(eager), there() + 4 * x.nbytes
    memory = Allocations()
    with memory:
        pass
    with koila.config(memory_limit=limit), memory:
        got = read(koila.lazy)
    report = koila.report()
    assert report is not None and report.n_chunks == 1
    assert memory.peak <= limit
    assert_close(got, wanted, "outputs")
