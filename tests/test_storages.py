# SPDX-License-Identifier: Apache-2.0
"""memory_limit= on the CPU counts all tensors there are, whoever holds them."""

from __future__ import annotations

import collections
import gc
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import koila
from allocations import Allocations
from collector import collector_off
from koila import _core
from koila.memory import budget, optimizers, storages
from koila.messages import words
from limits import there
from oracle import Lazy, assert_close, eager

MIB = 2**20


def second_model() -> nn.Module:
    """With gradients, which have no Python objects."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    model(torch.ones(1, 1024)).sum().backward()
    return model


#: What a script may hold beside its step, and how many bytes that are.
HELD: dict[str, tuple[Callable[[], Any], int]] = {
    "tensor": (lambda: torch.zeros(16 * MIB), 64 * MIB),
    "view": (lambda: torch.zeros(16 * MIB)[5:7], 64 * MIB),
    "numpy": (lambda: torch.from_numpy(np.zeros(16 * MIB, dtype=np.float32)), 64 * MIB),
    "shared": (lambda: torch.zeros(16 * MIB).share_memory_(), 64 * MIB),
    "list": (lambda: [torch.zeros(31 * 256) for _ in range(1000)], 31_000 * 1024),
    "model": (second_model, 2 * 4 * (4 * 1024 * 1025)),
    "replay": (
        lambda: collections.deque((torch.zeros(1000, 8), torch.zeros(1)) for _ in range(500)),
        500 * 32_004,
    ),
    "cache": (lambda: {"k": [torch.zeros(1, 8, 512, 64)], "v": [torch.zeros(MIB)]}, 5 * MIB),
    "sparse": (
        lambda: torch.sparse_coo_tensor(torch.zeros(2, MIB).long(), torch.zeros(MIB), (3, 3)),
        20 * MIB,
    ),
}


class Step:
    """A step of an MLP, and what it took beside what was there before it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 5)).double()
        self.x, self.y = torch.randn(256, 64).double(), torch.randint(5, (256,))

    def run(self, lazy: Lazy) -> Step:
        memory = Allocations()
        with memory:
            loss = F.cross_entropy(self.model(lazy(self.x)), self.y)
        with memory:
            loss.backward()
        self.loss, self.took = loss.detach(), memory.peak
        self.gradients = [p.grad for p in self.model.parameters()]
        return self

    def equals(self, want: Step) -> None:
        assert_close(self.loss, want.loss, "loss")
        for gradient, wanted in zip(self.gradients, want.gradients, strict=True):
            assert gradient is not None
            assert wanted is not None
            assert_close(gradient, wanted, "gradient")


@pytest.fixture
def want() -> Step:
    return Step().run(eager)


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("name", HELD)
def test_what_a_script_holds_counts(name: str, want: Step) -> None:
    """It makes the step run in chunks, and all tensors together stay within the limit."""
    make, n_bytes = HELD[name]
    step = Step()
    limit = there() + n_bytes + want.took // 2
    held = make()
    before = there()
    assert n_bytes <= before - (limit - n_bytes - want.took // 2) <= n_bytes + 2**16
    with koila.config(memory_limit=limit):
        step.run(koila.lazy)
    assert koila.report().n_chunks > 1
    assert before + step.took <= limit
    step.equals(want)
    del held


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("name", HELD)
def test_what_is_freed_stops_counting_at_once(name: str, want: Step) -> None:
    make, n_bytes = HELD[name]
    step = Step()
    limit = there() + n_bytes + want.took // 2
    held = make()
    with koila.config(memory_limit=limit):
        koila.explain(F.cross_entropy(step.model(koila.lazy(step.x)), step.y))  # a plan is made
        _core.forget()
        del held
        step.run(koila.lazy)
    assert koila.report().n_chunks == 1
    step.equals(want)


@pytest.mark.parametrize("is_collecting", [True, False])
def test_what_was_just_made_counts(is_collecting: bool, want: Step, walks: list[None]) -> None:
    """Without another walk over all there is, whatever the collector did meanwhile."""
    step = Step()
    limit = there() + 64 * MIB + want.took // 2
    storages.walk()
    walks.clear()
    held = torch.zeros(16 * MIB)
    if is_collecting:
        gc.collect()
        garbage = [[] for _ in range(20_000)]
        del garbage
    with koila.config(memory_limit=limit):
        step.run(koila.lazy)
    assert koila.report().n_chunks > 1
    assert not walks
    del held


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """An entry for each walk; none is due, for the last one took an hour."""
    made: list[None] = []
    walk = storages.walk

    def counted() -> None:
        made.append(None)
        walk()
        storages._walked.seconds = 3600.0

    monkeypatch.setattr(storages, "walk", counted)
    counted()
    yield made
    storages._walked.seconds = 0.0


def test_walks_take_their_share_of_time(
    walks: list[None], monkeypatch: pytest.MonkeyPatch, want: Step
) -> None:
    """One in two hundred of the time since the last; a plan that needs none makes none."""
    clock = storages._walked.at
    monkeypatch.setattr(storages.time, "monotonic", lambda: clock)
    walks.clear()
    with koila.config(memory_limit="1TiB"):
        for _ in range(5):
            Step().run(koila.lazy)
        assert len(walks) == 0
        clock += 3600.0 * 200 + 1
        Step().run(koila.lazy)
        assert len(walks) == 1


def test_without_a_limit_nothing_is_looked_at(walks: list[None]) -> None:
    storages.forget()
    walks.clear()
    with koila.config(chunks=3):
        Step().run(koila.lazy)
    Step().run(koila.lazy)
    assert not walks
    assert _core.collecting_garbage not in gc.callbacks
    assert _core.storage_bytes() == 0


def test_a_limit_that_is_no_longer_asked_for_costs_nothing() -> None:
    held = torch.zeros(MIB)
    there()
    assert _core.is_following_storages()
    for _ in range(10_002):
        _core.collecting_garbage("start", {})
    assert not _core.is_following_storages()
    assert _core.storage_bytes() == 0
    assert there() >= held.nbytes


def test_dead_storages_are_forgotten_where_nobody_asks_for_bytes() -> None:
    """As after a limit that is set no longer: each collection of garbage notes new tensors."""

    def n_noted() -> int:
        return sum(type(one).__name__ == "StorageWeakRef" for one in gc.get_objects())

    storages.look_again(True)
    assert _core.is_following_storages()
    _core.storage_bytes()
    before = n_noted()
    for _ in range(40):
        made = [torch.ones(2) for _ in range(100)]
        gc.collect(0)
        del made
    assert n_noted() <= 2 * before + 200


def test_old_tensors_that_were_given_memory_are_found_before_a_refusal(
    walks: list[None], want: Step
) -> None:
    """Their objects are not new: only a walk sees them. What is garbage is let go of.

    A collection of its own accord would find the tensor whose memory an old one is given, and free
    the garbage.
    """
    old, step = torch.zeros(1), Step()
    gc.collect()
    before = there()

    class Cycle:
        pass

    with collector_off():
        old.data = torch.zeros(MIB)
        assert there_with_garbage() == before - old.element_size()
        cycle: Any = Cycle()
        cycle.itself, cycle.held = cycle, torch.zeros(16 * MIB)
        del cycle
        assert there_with_garbage() == before - old.element_size() + 64 * MIB
        walks.clear()
        with koila.config(memory_limit=before + 4 * MIB + want.took * 2):
            step.run(koila.lazy)
        assert len(walks) == 1
    assert there() - before >= 4 * MIB


def there_with_garbage() -> int:
    return storages.n_bytes([])


def test_a_refusal_names_what_is_held_outside() -> None:
    step = Step()
    limit = there() + 64 * MIB
    held = torch.zeros(16 * MIB)
    with koila.config(memory_limit=limit), pytest.raises(koila.MemoryLimitError) as caught:
        step.run(koila.lazy)
    found = re.search(r"  other tensors hold ([\d.]+) MiB", str(caught.value))
    assert found is not None, str(caught.value)
    own = sum(t.nbytes for t in (*step.model.parameters(), step.x, step.y))
    own += sum(t.nbytes for t in optimizers.state())  # of tests before
    assert float(found[1]) == pytest.approx((there() - own) / MIB, abs=0.2)
    del held


def grows_by(make: Callable[[], Any]) -> int:
    before = there()
    held = make()
    after = there()
    del held
    assert there() <= before + 4096
    return after - before


def test_bytes_count_once() -> None:
    """Views, tensors of one array, and a tensor that the program holds as well."""
    x = torch.zeros(MIB)
    assert grows_by(lambda: [x[1:], x.view(-1, 2), x.detach(), nn.Parameter(x)]) == 0
    array = np.zeros(MIB, dtype=np.float32)
    parts = grows_by(lambda: [torch.from_numpy(array[k:]) for k in (100, 0, 5000)])
    assert parts == 4 * MIB
    assert storages.n_bytes([x, x[3:]]) == there()


def test_what_has_no_bytes() -> None:
    """Placeholders, fakes and other devices."""

    def fake() -> Tensor:
        with FakeTensorMode():
            return torch.empty(MIB)

    assert grows_by(fake) == 0
    assert grows_by(lambda: torch.empty(MIB, device="meta")) == 0
    assert grows_by(lambda: torch.zeros(1).expand(MIB)) < 100
    x = koila.lazy(torch.zeros(1000, 3))
    assert grows_by(lambda: x * 2) == 0


def test_mapped_files_do_not_count(tmp_path: Path) -> None:
    """The system can drop what was read of them."""
    path = tmp_path / "data"
    np.zeros(8 * MIB, dtype=np.float32).tofile(path)
    torch.save({"w": torch.zeros(8 * MIB)}, tmp_path / "model")
    mapped: np.memmap[Any, Any] = np.memmap(path, dtype=np.float32, mode="r+")
    assert grows_by(lambda: torch.from_numpy(mapped)) == 0
    assert grows_by(lambda: torch.from_file(str(path), shared=True, size=8 * MIB)) == 0
    assert grows_by(lambda: torch.load(tmp_path / "model", mmap=True)) == 0
    assert grows_by(lambda: torch.load(tmp_path / "model")) == 32 * MIB


def test_memory_that_changes_its_size() -> None:
    x = torch.zeros(MIB)
    before = there()
    x.untyped_storage().resize_(0)
    assert there() == before - 4 * MIB
    x.untyped_storage().resize_(8 * MIB)
    assert there() == before + 4 * MIB


class Mine(Tensor):
    """A subclass that takes no question."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was asked")


def test_a_subclass_is_not_asked() -> None:
    with torch._C.DisableTorchFunctionSubclass():
        x = torch.zeros(MIB).as_subclass(Mine)
    before = there()
    with torch._C.DisableTorchFunctionSubclass():
        y = torch.zeros(MIB).as_subclass(Mine)
    assert there() - before == 4 * MIB
    del x, y


def test_other_threads_tensors_count() -> None:
    kept: list[Tensor] = []
    thread = threading.Thread(target=lambda: kept.append(torch.zeros(MIB)))
    before = there()
    thread.start()
    thread.join()
    assert there() - before == 4 * MIB


def test_a_refusal_says_what_counts() -> None:
    """Parameters, their gradients, optimizer state, and data that lies in memory of numpy's."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    data = np.ones((2048, 256), dtype=np.float32)
    held = torch.ones(2**20)
    before = there()
    state = sum(t.nbytes for t in optimizers.state())  # of tests before, too
    x = torch.from_numpy(data)
    with koila.config(memory_limit=before + data.nbytes + 2**10):
        loss = model(koila.lazy(x)).pow(2).mean()
        with pytest.raises(koila.MemoryLimitError) as raised:
            loss.backward()
    size = sum(p.nbytes for p in model.parameters())
    text = str(raised.value)
    for name, n_bytes in (
        ("parameters", size),
        ("gradients", size),
        ("optimizer state", state),
        ("tensors in NumPy's or shared memory", data.nbytes),
    ):
        assert f"{name} {words.size(n_bytes)}" in text, text
    found = re.search(r"other tensors ([\d.]+) MiB", text)
    assert found is not None and float(found[1]) >= held.nbytes / 2**20
    assert f"the limit is {words.size(before + data.nbytes + 2**10)}, of which" in text


def test_gradients_that_nobody_has_read_count() -> None:
    """Of leaves of earlier steps: torch gives them a gradient that has no Python object."""
    net = nn.Linear(256, 4)
    batches = [torch.randn(1024, 256) for _ in range(5)]
    gc.collect()
    start, counted = there(), []
    with koila.config(memory_limit="200MiB"):
        for batch in batches:
            x = koila.lazy(batch).requires_grad_()
            net(x).pow(2).mean().backward()
            with collector_off():  # and no walk over all objects is due
                counted.append(budget.taken(torch.device("cpu"), []) - start)
    want = [(i + 1) * batches[0].nbytes for i in range(len(batches))]
    assert counted == [pytest.approx(one, abs=2**16) for one in want]
