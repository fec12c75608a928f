# SPDX-License-Identifier: Apache-2.0
"""Training in several processes: what each rank makes lazy runs in chunks of its own number, and
the processes meet in the same collectives as without koila, or fewer.

All ranks of a case train the same model plainly and then with lazy batches, on rows of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import koila
from allocations import Allocations
from koila import _core
from koila.memory import outside
from limits import there

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch renames its functions

DOUBLE = torch.float64
Lazy = Callable[..., Any]
Story = Callable[[Lazy, int], list[Tensor]]


def lazily(x: Tensor, y: Tensor) -> Any:
    return koila.lazy(x, y, batch=0)


def plainly(x: Tensor, y: Tensor) -> Any:
    return x, y


class Net(nn.Module):
    """With statistics of a batch, and a layer that is used in every other step if it spares one."""

    def __init__(self, is_sparing: bool = False) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.rare, self.c = nn.Linear(8, 8), nn.Linear(8, 4)
        self.is_sparing, self.n = is_sparing, 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        h = torch.tanh(self.norm(self.a(x)))
        h = h + torch.relu(self.b(h))
        return self.c(h if self.is_sparing and self.n % 2 else h + self.rare(h))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(self.norm(x))))


class Noted(nn.Module):
    """It returns a dict, and leaves a value behind that a loss may be made of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.inner(x)
        self.noted = h.square().mean()
        return {"h": h}


class Model(nn.Sequential):
    def forward(self, h: Tensor) -> Tensor:
        for layer in self:
            out = layer(h)
            h = out["h"] if isinstance(out, dict) else out
        return h


def blocks(block: Callable[[], nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return Model(nn.Linear(6, 8), block(), block(), nn.Linear(8, 4)).to(DOUBLE)


def rows(generator: torch.Generator, n: int = 17, dtype: torch.dtype = DOUBLE) -> Any:
    x = torch.randn(n, 6, generator=generator, dtype=DOUBLE).to(dtype)
    return x, torch.randint(4, (n,), generator=generator)


def own_generator(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + rank)


def _work(rank: int, world: int, folder: str, case: Any) -> None:
    signal.alarm(50)  # processes that wait for each other
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    code = 0
    try:
        case(rank)
        dist.barrier()
    except BaseException:
        code = 1
        Path(f"{folder}/error{rank}").write_text(traceback.format_exc())
    os._exit(code)  # threads of a group may wait for the interpreter for ever when it is taken down


def in_processes(case: Callable[[int], None], folder: Path, world: int = 2) -> None:
    """Run `case(rank)` in as many processes, which are in one group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: torch's, idle
        children = [_fork(rank, world, str(folder), case) for rank in range(world)]
    codes = []
    while children:
        child, status = os.wait()
        if child in children:
            children.remove(child)
            codes.append(os.waitstatus_to_exitcode(status))
        if any(codes):  # the others wait for it
            for other in children:
                os.kill(other, signal.SIGKILL)
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("error*")))
    assert not any(codes), errors or codes


def _fork(rank: int, world: int, folder: str, case: Any) -> int:
    child = os.fork()
    if child == 0:
        _work(rank, world, folder, case)
    return child


def assert_same(story: Story, rank: int, chunks: tuple[int, ...], within: float = 1e-10) -> None:
    """Parameters, statistics and losses are those of plain torch; of ranks each has its number of
    chunks."""
    want = story(plainly, rank)
    with koila.config(chunks=chunks[rank % len(chunks)]):
        got = story(lazily, rank)
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        scale = max(b.abs().max().item(), 1e-4)  # of a bias before a normalization: nothing
        assert (a - b).abs().max().item() <= within * scale, i


# DistributedDataParallel --------------------------------------------------------------------------


def ddp(words: dict[str, Any], n_backwards: int = 1) -> Story:
    def story(lazy: Lazy, rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        m = Net("find_unused_parameters" in words).to(DOUBLE)
        wrapped = nn.parallel.DistributedDataParallel(m, **words)
        n_reduced, n_hooks = torch.zeros(()), torch.zeros(())

        def reduce(bucket: Any) -> Any:
            n_reduced.add_(1)
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]

        if not words:  # torch wants no other annotations than its own
            wrapped.register_comm_hook(None, lambda _, bucket: reduce(bucket))
        for p in m.parameters():
            p.register_post_accumulate_grad_hook(lambda _: n_hooks.add_(1) and None)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        generator, losses = own_generator(rank), []
        for _ in range(5):
            optimizer.zero_grad()
            for i in range(n_backwards):
                x, y = lazy(*rows(generator, 17 + 3 * rank))
                is_last = i == n_backwards - 1
                with contextlib.nullcontext() if is_last else wrapped.no_sync():
                    loss = F.cross_entropy(wrapped(x), y)
                    loss.backward()
                losses.append(loss.detach().item())
            optimizer.step()
        m.eval()
        with torch.no_grad():
            x, y = lazy(*rows(generator))
            losses.append(F.cross_entropy(wrapped(x), y).item())
        tensors = [t.detach() for t in (*m.parameters(), *m.buffers())]
        return [*tensors, torch.tensor(losses, dtype=DOUBLE), n_reduced, n_hooks]

    return story


DDP = [
    ({}, 1),
    ({}, 2),
    ({"find_unused_parameters": True}, 2),
    ({"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}, 1),
    ({"static_graph": True}, 1),
]


def test_ddp(tmp_path: Path) -> None:
    """Each gradient is reduced once a step, also where ranks run in other numbers of chunks."""

    def case(rank: int) -> None:
        for words, n_backwards in DDP:
            assert_same(ddp(words, n_backwards), rank, (3,))
        assert_same(ddp({}), rank, (1, 7))

    in_processes(case, tmp_path)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.rare = nn.Linear(6, 8), nn.Linear(8, 4)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.a(x))
        weights = self.heads[0].weight.square().sum()
        return {"0": self.heads[0](h), "1": self.heads[1](h), "weights": weights}


def test_ddp_of_outputs_without_a_gradient(tmp_path: Path) -> None:
    """Backward comes to the parameters of all outputs, for which the other ranks wait, and each of
    these gets a gradient; that of others stays None. Nothing runs to find that out."""

    def story(lazy: Lazy, rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        m = Heads().to(DOUBLE)
        wrapped = nn.parallel.DistributedDataParallel(m, find_unused_parameters=True)
        generator, found = own_generator(rank), []
        for step in range(4):
            m.zero_grad()
            x, y = lazy(*rows(generator, 17 + 3 * rank))
            out = wrapped(x)
            with torch.no_grad():
                found.append(wrapped(x)["0"].sum().item())
            loss = F.cross_entropy(out[str(step % 2)], y)
            if step == 2:
                found.append(loss.item())  # before its backward
            (loss + out["weights"] if step == 3 else loss).backward()
            assert lazy is plainly or "_find_tensors" not in str(koila.report())
            found += [len([p for p in m.parameters() if p.grad is not None])]
            found += [p.grad.norm().item() for p in m.parameters() if p.grad is not None]
        return [torch.tensor(found, dtype=DOUBLE)]

    def case(rank: int) -> None:
        assert_same(story, rank, (3,))
        assert_same(story, rank, (1, 7))

    in_processes(case, tmp_path)


@pytest.mark.parametrize("are_views", [False, True])
def test_ddp_within_a_limit(tmp_path: Path, are_views: bool) -> None:
    """The buckets into which DDP copies gradients count, as long as gradients are not views of
    them."""

    def case(rank: int) -> None:
        def train(lazy: Lazy) -> None:
            layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)]
            m = nn.parallel.DistributedDataParallel(
                nn.Sequential(*layers, nn.Linear(512, 4)), gradient_as_bucket_view=are_views
            )
            for _ in range(3):
                x, y = lazy(torch.randn(4000, 512), torch.randint(4, (4000,)))
                m.zero_grad()
                F.cross_entropy(m(x), y).backward()

        def peak(lazy: Lazy) -> int:
            memory = Allocations()
            with memory:
                train(lazy)
            with memory:
                pass
            return memory.peak

        allowed = int(0.5 * peak(plainly))
        with koila.config(memory_limit=there() + allowed):
            got = peak(lazily)
            assert koila.report().n_chunks > 1
        assert got <= 1.01 * allowed, (got, allowed)

    in_processes(case, tmp_path)


def test_collectives(tmp_path: Path) -> None:
    """A loss over the rows of all processes, and a metric that is summed over them."""

    def story(lazy: Lazy, rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        m = nn.parallel.DistributedDataParallel(Net().to(DOUBLE))
        x, y = lazy(*rows(own_generator(rank)))
        h = m(x)
        everybodys = torch.cat(list(torch.distributed.nn.functional.all_gather(h)))
        pairs = h @ everybodys.T
        loss = pairs.logsumexp(1).mean() + F.cross_entropy(h, y)
        shown = loss.detach()
        dist.all_reduce(shown)
        loss.backward()
        return [shown.clone(), *(p.grad for p in m.parameters() if p.grad is not None)]

    in_processes(lambda rank: assert_same(story, rank, (3,)), tmp_path)


# fully_shard --------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts how often torch gathers parameters and reduces gradients."""
    made = dict.fromkeys(("foreach_all_gather", "foreach_reduce"), 0)
    before = {name: getattr(groups, name) for name in made}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            made[name] += 1
            return before[name](*args, **kwargs)

        return call

    for name in made:
        setattr(groups, name, counting(name))
    yield made
    for name in made:
        setattr(groups, name, before[name])


def sharded(policy: MixedPrecisionPolicy | None = None, **words: Any) -> Any:
    """The root module keeps its parameters gathered, and takes what it is given as it is."""
    m: Any = blocks()
    of_root = {word: given for word, given in words.items() if word != "reshard_after_forward"}
    if policy is not None:
        m, words["mp_policy"] = m.float(), policy
        of_root["mp_policy"] = dataclasses.replace(policy, output_dtype=torch.float32)
    for block in m[1:3]:
        fully_shard(block, **words)
    return fully_shard(m, **of_root)


def parameters_of(m: Any) -> list[Any]:
    states = [module._get_fsdp_state() for module in m.modules() if hasattr(module, "unshard")]
    return [p for s in states for g in s._fsdp_param_groups for p in g.fsdp_params]


def n_bytes_gathered(m: Any) -> int:
    gathered = [getattr(p, "_unsharded_param", None) for p in parameters_of(m)]
    return sum(p.untyped_storage().nbytes() for p in gathered if p is not None)


def fsdp(made: dict[str, int], n_chunks: int = 1, **words: Any) -> Story:
    """Steps with a batch each, and with one batch of which each chunk has a backward of its own."""

    def story(lazy: Lazy, rank: int) -> list[Tensor]:
        m = sharded(**words)
        dtype = next(m.parameters()).dtype
        # AdamW steps by the sign of a gradient, which rounding may turn where it is tiny.
        kind = torch.optim.AdamW if dtype == DOUBLE else torch.optim.SGD
        optimizer = kind(m.parameters(), lr=0.01)
        generator, losses = own_generator(rank), []
        is_as_given = "policy" in words and not words["policy"].cast_forward_inputs
        for step in range(3):
            optimizer.zero_grad()
            x, y = rows(generator, 18, dtype)
            x, y = lazy(x.to(words["policy"].param_dtype) if is_as_given else x, y)
            for a, b in zip(x.chunk(n_chunks), y.chunk(n_chunks), strict=True):
                made.update(dict.fromkeys(made, 0) if not step else {})
                loss = F.cross_entropy(m(a).to(dtype), b) / n_chunks
                if step == 1:
                    losses.append(loss.item())  # before its backward
                loss.backward()
                losses.append(loss.detach().item())
            assert n_bytes_gathered(m) == 0
            optimizer.step()
        parameters = [p.detach().full_tensor() for p in m.parameters()]
        with torch.no_grad():
            x, y = lazy(*rows(generator, 18, dtype))
            x = x.to(words["policy"].param_dtype) if is_as_given else x
            losses.append(F.cross_entropy(m(x).to(dtype), y).item())
        return [*parameters, torch.tensor(losses, dtype=DOUBLE)]

    return story


def test_fully_shard(tmp_path: Path) -> None:
    """Parameters are gathered as often as by torch for the whole batch, or once where they stay
    gathered, and nothing stays gathered in the end; ranks need not agree on a number of chunks."""

    def case(rank: int) -> None:
        with counted() as made:
            for words in ({}, {"reshard_after_forward": False}):
                fsdp(made, n_chunks=3, **words)(plainly, rank)
                of_loop = dict(made)
                fsdp(made, **words)(plainly, rank)
                of_torch = dict(made)
                for chunks in ((3,), (1, 3)):
                    assert_same(fsdp(made, **words), rank, chunks)
                    assert koila.report().n_chunks == chunks[rank % len(chunks)]
                    assert made == of_torch
                assert made["foreach_all_gather"] < of_loop["foreach_all_gather"]
                assert made["foreach_reduce"] < of_loop["foreach_reduce"]

    in_processes(case, tmp_path)


def test_fully_shard_on_four_ranks(tmp_path: Path) -> None:
    """Replicated pairs of shards, fewer shards between forward and backward, and shards that are
    offloaded."""

    def case(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicated", "sharded"))
        with counted() as made:
            for words in (
                {"mesh": mesh},
                {"reshard_after_forward": 2},
                {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            ):
                assert_same(fsdp(made, **words), rank, (3, 1))

    in_processes(case, tmp_path, world=4)


def test_fully_shard_in_half_precision(tmp_path: Path) -> None:
    """Bit for bit where it runs whole, else within the rounding of bfloat16."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def case(rank: int) -> None:
        with counted() as made:
            for policy in (mixed, dataclasses.replace(mixed, cast_forward_inputs=False)):
                assert_same(fsdp(made, policy=policy), rank, (1,), within=0)
                assert_same(fsdp(made, policy=policy), rank, (3,), within=0.02)

    in_processes(case, tmp_path, world=4)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)).sin().cos())


def test_fully_shard_memory(tmp_path: Path) -> None:
    """Of the modules that let go of their parameters one has them at a time, and one its graph of a
    chunk: less than in a loop over the chunks."""

    def case(rank: int) -> None:
        def peak(lazy: Lazy, n_chunks: int) -> tuple[int, int]:
            torch.manual_seed(0)
            m: Any = nn.Sequential(*(Wide() for _ in range(6)), nn.Linear(64, 4))
            for block in m[:-1]:
                fully_shard(block)
            fully_shard(m)
            most, memory = 0, Allocations()

            def look(*_: Any) -> None:
                nonlocal most
                most = max(most, n_bytes_gathered(m))

            for block in m[:-1]:
                block.b.register_forward_hook(look)
            for step in range(2):
                x, y = lazy(torch.randn(600, 64), torch.randint(4, (600,)))
                with memory if step else contextlib.nullcontext():
                    pass
                with memory if step else contextlib.nullcontext():
                    for a, b in zip(x.chunk(n_chunks), y.chunk(n_chunks), strict=True):
                        F.cross_entropy(m(a), b).backward()
            return most, memory.peak

        loop = peak(plainly, 3)
        with koila.config(chunks=3):
            chunks = peak(lazily, 1)
        assert chunks[0] == loop[0] < 2 * sum(p.nbytes for p in Wide().parameters())
        assert chunks[1] < 0.7 * loop[1], (chunks, loop)

    in_processes(case, tmp_path)


def test_fully_shard_takes_what_is_predicted(tmp_path: Path) -> None:
    """Of a backward through many modules: one has its gradients at a time, the others their
    shards."""

    def case(rank: int) -> None:
        m: Any = nn.Sequential(*(Wide() for _ in range(24)))
        for block in m:
            fully_shard(block)
        fully_shard(m)
        memory, x = Allocations(), torch.randn(30, 64)
        with koila.config(chunks=3):
            out = m(koila.lazy(x, batch=0))
            predicted = outside.peak([_core.real(out)])
            with memory:
                seed = torch.ones(30, 64)
            with memory:
                memory.mark()
                out.backward(seed)
        used = memory.peak - memory.at_marks[0]
        assert 0.8 * used <= predicted <= 1.25 * used, (used, predicted)

    in_processes(case, tmp_path)


def test_fully_shard_of_what_modules_leave_behind(tmp_path: Path) -> None:
    """Modules that return no tensor, in one of which another is sharded on its own, and a loss of a
    value inside of one."""

    def story(lazy: Lazy, rank: int) -> list[Tensor]:
        found = []
        for is_all in (True, False):
            m: Any = blocks(Noted)
            fully_shard(m[1])
            fully_shard(m[2].inner.a)
            fully_shard(m[2])
            fully_shard(m)
            x, y = lazy(*rows(own_generator(rank)))
            loss = F.cross_entropy(m(x), y)
            (loss + m[1].noted if is_all else m[1].noted).backward()
            found += [p.grad.full_tensor() for p in m.parameters() if p.grad is not None]
        return found

    in_processes(lambda rank: assert_same(story, rank, (3,)), tmp_path)


def test_fully_shard_written_before_its_backward(tmp_path: Path) -> None:
    """Torch gathers the new numbers, of which nothing tells that they are others."""

    def case(rank: int) -> None:
        with koila.config(chunks=3):
            x, y = lazily(*rows(own_generator(rank)))
            for words in ({}, {"reshard_after_forward": False}):  # what waits keeps its own
                m = sharded(**words)
                optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
                first, second = (F.cross_entropy(m(x), y) for _ in range(2))
                first.backward()
                optimizer.step()
                with pytest.raises(koila.StaleError, match="changed in place"):
                    second.backward()
            for write in (lambda p: p.data.mul_(2.0), lambda p: torch._foreach_mul_([p], 2.0)):
                m = fully_shard(blocks(), reshard_after_forward=True)
                loss = F.cross_entropy(m(x), y)
                with torch.no_grad():
                    for parameter in m.parameters():
                        write(parameter)
                with pytest.raises(koila.StaleError, match="changed in place"):
                    loss.backward()

    in_processes(case, tmp_path)


def test_fully_shard_twice_before_a_backward(tmp_path: Path) -> None:
    """Two forwards of one model, and a backward of each: what the second reads stays gathered. The
    state of the model is taken between forward and backward. Whole it is torch's own program, also
    where weights take a step between the two, and their new numbers are gathered."""

    def story(lazy: Lazy, rank: int, is_stepping: bool, **words: Any) -> list[Tensor]:
        m, generator = sharded(**words), own_generator(rank)
        losses = []
        for _ in range(2):
            x, y = lazy(*rows(generator))
            losses.append(F.cross_entropy(m(x), y))
        state = [t.full_tensor().clone() for t in m.state_dict().values()]
        for loss in losses:
            loss.backward()
            if is_stepping:
                torch.optim.SGD(m.parameters(), lr=0.1).step()
        gradients = [p.grad.full_tensor() for p in m.parameters()]
        return [*gradients, *state, *(loss.detach() + 0 for loss in losses)]

    def case(rank: int) -> None:
        assert_same(functools.partial(story, is_stepping=False), rank, (3,))
        for words in ({}, {"reshard_after_forward": False}):
            assert_same(functools.partial(story, is_stepping=True, **words), rank, (1,), within=0)

    in_processes(case, tmp_path)


def test_the_older_fsdp_is_refused(tmp_path: Path) -> None:
    def case(rank: int) -> None:
        m = FullyShardedDataParallel(blocks(), device_id=torch.device("cpu"))
        x, _ = koila.lazy(*rows(own_generator(rank)))
        with pytest.raises(
            koila.KoilaError, match=r"FullyShardedDataParallel \(.*test_proc.*:\d+\)"
        ):
            m(x)

    in_processes(case, tmp_path)


def test_the_engine_of_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls torch's engine in a hook of the loss: "Final callbacks can only be installed during
    backward pass."."""
    module: Any = types.ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = type("DeepSpeedEngine", (nn.Linear,), {})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    engine = module.DeepSpeedEngine(6, 2)
    x, _ = koila.lazy(*rows(own_generator(0), dtype=torch.float32))
    with pytest.raises(koila.KoilaError, match=r"DeepSpeedEngine \(.*test_proc.*:\d+\)"):
        engine(x)


def test_tensor_parallel(tmp_path: Path) -> None:
    """Layers that are split over processes run whole, where they stand; each half of them may be
    sharded too, over other processes."""

    def story(is_sharded: bool) -> Story:
        def tell(lazy: Lazy, rank: int) -> list[Tensor]:
            m: Any = blocks()
            plan = {"a": ColwiseParallel(), "b": RowwiseParallel()}
            sizes, names = ((2, 2), ("data", "tensor")) if is_sharded else ((2,), ("tensor",))
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            parallelize_module(m[1], mesh["tensor"], plan)
            if is_sharded:
                fully_shard(m[1], mesh=mesh["data"])
                fully_shard(m, mesh=mesh["data"])
            x, y = lazy(*rows(own_generator(rank // 2)))
            loss = F.cross_entropy(m(x), y)
            loss.backward()
            found: list[Any] = [p.grad for p in m.parameters()]
            return [loss.detach() + 0, *(getattr(g, "full_tensor", lambda g=g: g)() for g in found)]

        return tell

    for n_ranks, is_sharded in ((2, False), (4, True)):
        folder = tmp_path / str(n_ranks)
        folder.mkdir()
        told = story(is_sharded)
        in_processes(functools.partial(assert_same, told, chunks=(3,)), folder, world=n_ranks)


# SyncBatchNorm ------------------------------------------------------------------------------------


def formulas_of_sync_batch_norm() -> dict[str, Callable[..., Any]]:
    """What torch has kernels of on GPUs only."""

    def others(x: Tensor) -> list[int]:
        return [dim for dim in range(x.dim()) if dim != 1]

    def stats(x: Tensor, eps: float) -> Any:
        return x.mean(others(x)), (x.var(others(x), unbiased=False) + eps).rsqrt()

    def gather(x: Tensor, means: Tensor, scales: Tensor, *rest: Any) -> Any:
        tracked_mean, tracked_variance, momentum, eps, counts = rest
        n, weights = counts.sum(), counts[:, None] / counts.sum()
        mean = (means * weights).sum(0)
        variance = ((scales**-2 - eps + means**2) * weights).sum(0) - mean**2
        tracked_mean.lerp_(mean, momentum)
        tracked_variance.lerp_(variance * n / (n - 1), momentum)
        return mean, (variance + eps).rsqrt()

    def forward(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, scale: Tensor, eps: float) -> Tensor:
        return (x - mean) * (scale * w) + b

    def reduce(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, *_: Any) -> Any:
        sums = g.sum(others(x)), (g * (x - mean)).sum(others(x))
        return *sums, sums[1] * scale, sums[0]

    def back(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
        of_g, of_x, counts = rest
        n = counts.sum()
        return (g - of_g / n - (x - mean) * scale**2 * of_x / n) * (scale * w)

    return {
        "batch_norm_stats": stats,
        "batch_norm_gather_stats_with_counts": gather,
        "batch_norm_elemt": forward,
        "batch_norm_backward_reduce": reduce,
        "batch_norm_backward_elemt": back,
    }


def test_sync_batch_norm(tmp_path: Path) -> None:
    """Statistics of the rows of all processes, which one process has when it has all rows."""

    def steps(m: Any, batches: list[list[Any]]) -> list[Tensor]:
        """Each batch is in parts, whose losses count alike."""
        optimizer, losses = torch.optim.SGD(m.parameters(), lr=0.1), []
        for parts in batches:
            optimizer.zero_grad()
            scores = m(torch.cat([x for x, _ in parts]) if len(parts) > 1 else parts[0][0])
            sizes = [len(x) for x, _ in parts]
            of_parts = zip(scores.split(sizes), parts, strict=True)
            loss = sum(F.cross_entropy(h, y) for h, (_, y) in of_parts) / len(parts)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        state = [t.detach() for t in (*m.parameters(), *m.buffers())]
        return state if len(batches[0]) > 1 else [*state, torch.tensor(losses, dtype=DOUBLE)]

    def batches(generator: torch.Generator, rank: int) -> list[Any]:
        return [rows(generator, 17 + 3 * rank) for _ in range(3)]

    def story(lazy: Lazy, rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        m = nn.parallel.DistributedDataParallel(Net().to(DOUBLE))
        nn.SyncBatchNorm.convert_sync_batchnorm(m.module)  # which DDP wants on a GPU
        return steps(m, [[lazy(*batch)] for batch in batches(own_generator(rank), rank)])

    def case(rank: int) -> None:
        warnings.simplefilter("ignore")  # a device called cpu cannot be seeded
        library = torch.library.Library("aten", "IMPL")
        for name, formula in formulas_of_sync_batch_norm().items():
            library.impl(name, formula, "CPU")
        setattr(torch._C, "_get_privateuse1_backend_name", lambda: "cpu")  # noqa: B010
        torch.manual_seed(0)
        of_ranks = [batches(own_generator(one), one) for one in range(2)]
        want = steps(Net().to(DOUBLE), [list(parts) for parts in zip(*of_ranks, strict=True)])
        for got, wanted in zip(story(plainly, rank), want, strict=False):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
        assert_same(story, rank, (3,))
        assert_same(story, rank, (1, 7))

    in_processes(case, tmp_path)
