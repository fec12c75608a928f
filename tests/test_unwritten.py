# SPDX-License-Identifier: Apache-2.0
"""Running statistics that a recorded call is still to write: whoever asks for them sees them
written, in eager's order.

A GAN shows its discriminator a real batch and then a generated one in one step; an average of a
model copies its state between forward and backward; a checkpoint is saved there.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree
from torch.utils import dlpack

import koila
from chunked import split
from koila.running import unwritten
from oracle import Lazy, assert_seen, cut, eager, is_whole, tell

ROWS = 7
CHUNKS = [None, 1, 2, 3, ROWS]
#: Training forwards of one step, in order: of the lazy batch, or of a plain one.
ORDERS = ["lp", "pl", "lpl", "lplp", "llp", "pll", "plpl", "llll"]


class Net(nn.Module):
    """Two normalizations of batches and one of instances."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.norm, self.again = nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None)
        self.each = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        h = self.each(h.unflatten(1, (2, 3))).flatten(1)
        out: Tensor = self.last(self.again(h))
        return out


class Step:
    """A network, two batches, and what some code held of them before the step began."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net, self.ema = Net().double(), Net().double()
        self.x, self.plain = torch.randn(2, ROWS, 4, dtype=torch.float64)
        self.mean = self.net.norm.running_mean
        self.state = self.net.state_dict()
        self.view = self.net.norm.running_var[1:3]


def seen(net: nn.Module) -> list[Tensor | None]:
    return [*(b.clone() for b in net.buffers()), *(p.grad for p in net.parameters())]


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_network_of_lazy_and_plain_batches(order: str, chunks: int | None) -> None:
    def story(lazy: Lazy) -> Any:
        step = Step()
        x = lazy(step.x)
        loss = torch.zeros((), dtype=torch.float64)
        for kind in order:
            loss = loss + step.net(x if kind == "l" else step.plain).square().mean()
        loss.backward()
        return [loss.detach(), *seen(step.net)]

    want = story(eager)
    with split(chunks):
        got = story(koila.lazy)
    # Gradients of several graphs are added up in the order in which those were made.
    assert_seen(got, want, order, exact_bits=is_whole(chunks) and "p" not in order)


ASK: dict[str, Callable[[Step], Any]] = {}


def ask(function: Callable[[Step], Any]) -> Callable[[Step], Any]:
    ASK[function.__name__] = function
    return function


@ask
def state_dict(step: Step) -> Any:
    return step.net.state_dict()


@ask
def state_dict_of_the_tensors_themselves(step: Step) -> Any:
    return step.net.state_dict(keep_vars=True)["norm.running_var"] * 2


@ask
def saved(step: Step) -> Any:
    file = io.BytesIO()
    torch.save(step.net.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@ask
def saved_module(step: Step) -> Any:
    file = io.BytesIO()
    torch.save(step.net, file)
    file.seek(0)
    return torch.load(file, weights_only=False).state_dict()


@ask
def pickled(step: Step) -> Any:
    return pickle.loads(pickle.dumps(step.net)).state_dict()


@ask
def copied(step: Step) -> Any:
    return copy.deepcopy(step.net).state_dict()


@ask
def copied_shallowly(step: Step) -> Any:
    return copy.copy(step.net.norm.running_mean)


@ask
def averaged_by_torch(step: Step) -> Any:
    average = AveragedModel(step.net, use_buffers=True)
    average.update_parameters(step.net)
    return average.state_dict()


@ask
def averaged(step: Step) -> Any:
    with torch.no_grad():
        for ours, theirs in zip(step.ema.buffers(), step.net.buffers(), strict=True):
            if ours.is_floating_point():
                ours.lerp_(theirs, 0.1)
    return step.ema.state_dict()


@ask
def averaged_by_lists(step: Step) -> Any:
    ours, theirs = ([*net.norm.buffers()][:2] for net in (step.ema, step.net))
    torch._foreach_lerp_(ours, theirs, 0.25)
    return ours


@ask
def loaded_by_another(step: Step) -> Any:
    step.ema.load_state_dict(step.net.state_dict())
    return step.ema.state_dict()


@ask
def evaluated(step: Step) -> Any:
    step.net.eval()
    with torch.no_grad():
        out = step.net(step.plain)
    step.net.train()
    return out


@ask
def trained_on(step: Step) -> Any:
    return step.net(step.plain)


@ask
def functional(step: Step) -> Any:
    norm = step.net.norm
    return F.batch_norm(torch.tanh(step.plain[:, :1] * torch.ones(6).double()), norm.running_mean,
                        norm.running_var, training=True)  # fmt: skip


@ask
def functional_call(step: Step) -> Any:
    state = {name: value * 2 for name, value in step.net.state_dict().items()}
    return torch.func.functional_call(step.net.eval(), state, (step.plain,))


@ask
def every_buffer(step: Step) -> Any:
    return [buffer.clone() for buffer in step.net.buffers()]


@ask
def named_buffers(step: Step) -> Any:
    return {name: buffer + 1 for name, buffer in step.net.named_buffers()}


@ask
def a_reference_from_before(step: Step) -> Any:
    return step.mean.sum()


@ask
def a_state_dict_from_before(step: Step) -> Any:
    return {name: value.clone() for name, value in step.state.items()}


@ask
def a_view_from_before(step: Step) -> Any:
    return step.view.tolist()


@ask
def read_as_numbers(step: Step) -> Any:
    norm = step.net.norm
    return (
        norm.running_mean[0].item(),
        norm.running_var.numpy().tolist(),
        float(norm.running_var[1]),
    )


@ask
def read_by_numpy(step: Step) -> Any:
    return np.asarray(step.net.norm.running_mean).tolist()


@ask
def in_a_list(step: Step) -> Any:
    return torch.stack([step.net.norm.running_mean, step.net.again.running_mean])


@ask
def made_a_tensor_of(step: Step) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says how else to copy
        return torch.tensor(step.mean)


@ask
def taken_as_a_tensor(step: Step) -> Any:
    return torch.as_tensor(step.mean)


@ask
def taken_as_an_array(step: Step) -> Any:
    return torch.asarray(step.mean, dtype=torch.float32)


@ask
def by_dlpack(step: Step) -> Any:
    made = torch.from_dlpack(step.net.norm.running_mean).clone()
    return made, dlpack.from_dlpack(dlpack.to_dlpack(step.net.norm.running_var)).clone()


@ask
def set_as_memory(step: Step) -> Any:
    return torch.empty(0, dtype=torch.float64).set_(step.mean).clone()


@ask
def by_address(step: Step) -> Any:
    storage = step.net.norm.running_mean.untyped_storage()
    return torch.empty(0, dtype=torch.float64).set_(storage)


@ask
def printed(step: Step) -> Any:
    return str(step.net.norm.running_mean)


@ask
def compared(step: Step) -> Any:
    return torch.equal(step.mean, torch.zeros(6).double()), (step.mean == 0).all()


@ask
def in_a_transform(step: Step) -> Any:
    return torch.vmap(lambda x: x * step.mean)(torch.ones(2, 6).double())


@ask
def in_a_custom_function(step: Step) -> Any:
    return cut(step.mean)


@ask
def scripted(step: Step) -> Any:
    return torch.jit.script(step.net.norm).running_mean.clone()


@ask
def traced(step: Step) -> Any:
    batch = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
    return torch.jit.trace(step.net.norm, batch, check_trace=False)(batch)


@ask
def traced_and_checked(step: Step) -> Any:
    """torch traces it again, and compares the lines of calls too."""
    batch = torch.ones(2, 6).double()
    made = torch.jit.trace(lambda x: x * step.mean, batch)
    return made(batch), str(made.graph).count("aten::")


@ask
def traced_below(step: Step) -> Any:
    batch = torch.ones(2, 6).double()
    return make_fx(lambda x: x * step.mean)(batch)(batch)


@ask
def exported(step: Step) -> Any:
    batch = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
    return torch.export.export(step.net.norm, (batch,)).module()(batch)


@ask
def moved(step: Step) -> Any:
    return step.net.norm.running_mean.to(torch.float32)


def told(value: Any) -> list[Any]:
    """What was asked for, as it was then."""
    leaves = pytree.tree_leaves(value)
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


@pytest.mark.rotated("chunks")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # in eager too
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", ASK)
def test_who_asks_between_forward_and_backward(name: str, chunks: int | None) -> None:
    def story(lazy: Lazy) -> Any:
        step = Step()
        x = lazy(step.x)
        step.net(x)  # nobody looks at what it makes
        loss = step.net(x).square().mean()
        found = told(ASK[name](step))
        loss.backward()
        return [*found, loss.detach(), *seen(step.net)]

    want = story(eager)
    with split(chunks):
        got = story(koila.lazy)
    assert_seen(got, want, name, exact_bits=is_whole(chunks) and name != "trained_on")
    assert not unwritten._n_writes


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "zero_": lambda norm: norm.running_mean.zero_(),
    "an entry": lambda norm: norm.running_var.__setitem__(0, 3.0),
    "a view": lambda norm: norm.running_mean[2:4].zero_(),
    "out=": lambda norm: torch.mul(norm.running_var, 2, out=norm.running_var),
    "reset": lambda norm: norm.reset_running_stats(),
    "loaded": lambda norm: norm.load_state_dict(
        {name: one.clone() for name, one in norm.named_buffers()}, strict=False
    ),
    "through .data": lambda norm: norm.running_mean.data.zero_(),
    "another tensor": lambda norm: setattr(norm, "running_mean", torch.ones(6).double()),
}


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("how", ["pending", "read", "behind a cut", "detached"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_between_forward_and_backward(name: str, how: str, chunks: int | None) -> None:
    """torch's backward of a normalization refuses it, though it reads no running statistics."""

    def story(lazy: Lazy) -> Any:
        step = Step()
        h = step.net.first(lazy(step.x))
        made = step.net.norm(h.detach() if how == "detached" else h)
        if how == "behind a cut":
            made = Same.apply(made)
        made = (made.detach() if how == "detached" else made) * h.sigmoid()
        if how == "read":
            made.detach().sum().item()
        with torch.no_grad():
            WRITES[name](step.net.norm)
        try:
            made.square().sum().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            return "refused"
        return seen(step.net)

    want = story(eager)
    with split(chunks):
        got = story(koila.lazy)
    assert (got == "refused") == (want == "refused")
    if got != "refused":
        assert_seen(got, want, name, exact_bits=is_whole(chunks))


@pytest.mark.parametrize("chunks", CHUNKS)
def test_statistics_that_were_written_before_and_that_a_part_copies(chunks: int | None) -> None:
    """The second normalization runs where it stands, and updates what the first one has read."""

    def story(lazy: Lazy) -> Any:
        step = Step()
        step.net.load_state_dict({n: t.clone() for n, t in step.net.state_dict().items()})
        h = step.net.norm(step.net.first(lazy(step.x)))
        with torch.autograd.graph.save_on_cpu():
            out = step.net.norm(h.tanh())
        out.square().sum().backward()
        return seen(step.net)

    want = story(eager)
    with koila.config(chunks=chunks):
        got = story(koila.lazy)
    assert_seen(got, want, "seen", exact_bits=is_whole(chunks))


@pytest.mark.parametrize("chunks", [None, 3])
def test_tensors_have_their_own_class_where_nothing_waits(chunks: int | None) -> None:
    step = Step()
    classes = [type(buffer) for buffer in step.net.buffers()]
    x = koila.lazy(step.x)
    with split(chunks):
        for _ in range(2):
            loss = step.net(x).square().mean()
            assert type(step.net.norm.running_mean) is not Tensor
            assert isinstance(step.net.norm.running_mean, Tensor)
            loss.backward()
            assert [type(buffer) for buffer in step.net.buffers()] == classes


def test_what_is_asked_of_no_number_runs_nothing() -> None:
    step = Step()
    with koila.config(chunks=3):
        out = step.net(koila.lazy(step.x))
        mean = step.net.norm.running_mean
        assert mean.shape == (6,) and mean.dtype == torch.float64 and mean.device.type == "cpu"
        assert mean.dim() == 1 and len(mean) == 6 and not mean.requires_grad and mean.is_leaf
        assert koila._core.pending_bytes(False) > 0
        assert "pending" in repr(out)


@pytest.mark.parametrize("chunks", [None, 3])
def test_others_of_the_same_memory_come_and_go(chunks: int | None) -> None:
    step = Step()
    x = koila.lazy(step.x)
    for _ in range(4):
        state = step.net.state_dict()
        with koila.config(chunks=chunks):
            out = step.net(x)
            mean = state["norm.running_mean"].clone()
            del out
        assert torch.equal(mean, step.net.norm.running_mean)
        step.state = state


def test_a_step_that_nobody_interrupts_runs_once() -> None:
    """Forward and backward of three batches in chunks: no pass for the statistics' sake."""
    step = Step()
    with koila.config(chunks=3):
        x = koila.lazy(step.x)
        sum(step.net(x).square().mean() for _ in range(3)).backward()
        (program,) = koila.report().programs
        assert program.n_chunks == 3


def test_a_dropped_program_leaves_no_trace() -> None:
    """Its tape ends with its thread, and nobody asked for what it was to write."""
    step = Step()

    def record() -> None:
        step.net(koila.lazy(step.x))

    thread = threading.Thread(target=record)
    thread.start()
    thread.join()
    assert type(step.net.norm.running_mean.clone()) is Tensor
    assert type(step.net.norm.running_mean) is Tensor


@pytest.mark.parametrize("chunks", CHUNKS)
def test_hooks_of_parameters_see_the_statistics(chunks: int | None) -> None:
    def story(lazy: Lazy) -> Any:
        step, found = Step(), []
        for p in step.net.parameters():
            p.register_post_accumulate_grad_hook(
                lambda _: found.append(step.net.norm.running_mean.clone())
            )
        step.net(lazy(step.x)).square().mean().backward()
        return found

    want = story(eager)
    with split(chunks):
        got = story(koila.lazy)
    assert_seen(got, want, "what hooks saw", exact_bits=is_whole(chunks))


def write_by_hand(step: Step) -> None:
    step.net.norm.running_mean.fill_(3.0)
    step.net.again.running_var.data.mul_(2)
    torch._foreach_add_([step.net.again.running_mean], 1.0)


def load(step: Step) -> None:
    step.net.load_state_dict(step.ema.state_dict())


def change_dtype(step: Step) -> None:
    step.net.float().double()


def reset(step: Step) -> None:
    step.net.norm.reset_running_stats()


def replace(step: Step) -> None:
    step.net.norm.running_mean = torch.ones(6).double()


def set_data(step: Step) -> None:
    step.net.norm.running_mean.data = torch.ones(6).double()


@pytest.mark.parametrize("chunks", [None, 1, 3])
@pytest.mark.parametrize(
    "change",
    [write_by_hand, load, change_dtype, reset, replace, set_data],
    ids=lambda f: f.__name__,
)
def test_who_writes_after_a_forward_writes_last(
    change: Callable[[Step], None], chunks: int | None
) -> None:
    def story(lazy: Lazy) -> Any:
        step = Step()
        out = step.net(lazy(step.x))
        mean = step.net.norm.running_mean
        change(step)
        return [out.detach().clone(), mean.clone(), *seen(step.net)]

    want = story(eager)
    with koila.config(chunks=chunks):
        got = story(koila.lazy)
    assert_seen(got, want, change.__name__, exact_bits=is_whole(chunks))


def test_another_thread_sees_them_written() -> None:
    def story(lazy: Lazy) -> Any:
        step, found = Step(), []
        loss = step.net(lazy(step.x)).square().mean()
        ask = threading.Thread(target=lambda: found.append(step.net.norm.running_mean.clone()))
        ask.start()
        ask.join()
        loss.backward()
        return [*found, *seen(step.net)]

    assert_seen(story(koila.lazy), story(eager), "on a thread", exact_bits=True)


@pytest.mark.parametrize("chunks", [None, 3])
def test_a_norm_in_evaluation_keeps_the_statistics_that_it_saw(chunks: int | None) -> None:
    """An instance normalization in evaluation writes what it reads."""

    def story(lazy: Lazy) -> Any:
        step = Step()
        step.net.eval()
        loss = step.net(lazy(step.x)).square().mean()
        loss.item()
        step.net.train()
        with torch.no_grad():
            step.net(step.plain)
        loss.backward()
        return seen(step.net)

    want = story(eager)
    with koila.config(chunks=chunks):
        try:
            got = story(koila.lazy)
        except koila.StaleError:
            return
    assert_seen(got, want, "in evaluation", exact_bits=is_whole(chunks))


@pytest.mark.parametrize("chunks", CHUNKS)
def test_data_of_statistics_that_a_later_call_will_write(chunks: int | None) -> None:
    """To see whether they were written through .data, koila reads them as they are: as plain torch
    would read them, it would have to run the pending calls, before which it looks at them. And it
    does not take its own writes for the user's."""

    def story(lazy: Lazy) -> Any:
        step = Step()
        step.net.eval()
        step.net(lazy(step.x)).square().mean().backward()
        norm = nn.BatchNorm1d(4).double()
        x = lazy(torch.randn(ROWS, 4, dtype=torch.float64))
        norm(x).pow(2).sum().backward()
        before = norm(x * 3)
        of_data = norm.running_mean.data
        after = norm(x * 2)
        seen = before.std().item() + after.std().item()
        kept = copy.deepcopy(norm)
        return seen, of_data, kept.running_mean, norm.running_mean, norm.weight.grad

    want, _ = tell(story, eager)
    with split(chunks):
        got, _ = tell(story, koila.lazy)
    assert_seen(got, want, "statistics", exact_bits=False)


def test_collectives_see_them_written(tmp_path: Path) -> None:
    """What a process sends to others has no torch function."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        seen_by: list[list[Tensor | None]] = []
        for lazy in (eager, koila.lazy):
            step = Step()
            out = step.net(lazy(step.x))
            sent = step.net.norm.running_mean
            dist.all_reduce(sent)
            assert type(sent) is Tensor
            seen_by.append([sent.clone(), out.detach().clone()])
    finally:
        dist.destroy_process_group()
    assert_seen(seen_by[1], seen_by[0], "sent", exact_bits=True)


def _twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class _Doubling:
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return _twice(x)


def test_a_scripted_class_finds_the_names_around_it() -> None:
    """Which torch looks up in the frame that calls script(), counted from its own."""
    doubling = torch.jit.script(_Doubling)
    assert doubling().double(torch.ones(2)).tolist() == [2.0, 2.0]


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor(1.0)


def test_a_script_calls_what_koila_has_patched() -> None:
    assert torch.jit.script(_plus_one)(torch.ones(2)).tolist() == [2.0, 2.0]
