# SPDX-License-Identifier: Apache-2.0
"""What is done with a call that torch hands over: recorded, entered, run at once, or handled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import koila
from binding_kit import batch, in_a_thread, is_pending, op, pending
from chunked import split
from koila import _core
from koila.recording import functions

core: Any = _core
LazyTensor: Any = _core.LazyTensor


def weight() -> Tensor:
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


def n_nodes() -> int:
    n = 0
    while True:
        try:
            core.node(n)
        except IndexError:
            return n
        n += 1


# Kinds --------------------------------------------------------------------------------------------


def test_an_op_with_a_row_is_recorded_by_it() -> None:
    made = torch.tanh(koila.lazy(batch()))
    assert is_pending(made)
    func, row, reason, where, rows, inputs, *_ = core.node(0)
    assert (func, row, reason, rows, inputs) == (torch.tanh, "tanh", None, 4, (0,))
    assert "test_py_record.py:" in where


def test_an_op_without_a_row_is_recorded_by_asking_torch() -> None:
    """It runs once, on the whole batch, and draws no numbers before."""
    made = torch.linalg.pinv(koila.lazy(batch()))
    assert is_pending(made)
    assert core.node(0)[1] is None
    assert made.shape == (3, 4)
    with split(2, whole="it has no row"):
        assert made.tolist() == torch.linalg.pinv(batch()).tolist()


@pytest.mark.parametrize("kind", [functions.LIVE, functions.READ])
def test_calls_that_run_at_once(kind: int) -> None:
    """Live: the results are lazy again. Read: they are plain."""
    seen: list[type] = []

    def look(x: Tensor) -> Tensor:
        seen.append(type(x))
        return x * 2

    with op(look, kind) as call:
        made = call(pending())
    assert seen == [Tensor]
    assert koila.is_lazy(made) == (kind == functions.LIVE)
    assert not is_pending(made)
    assert made.tolist() == (batch() * 4).tolist()


def test_a_python_function_is_entered() -> None:
    """What it calls is recorded, and not it."""
    made = F.softplus(F.relu(koila.lazy(batch()) - 1) + 2)
    assert is_pending(made)
    names = [core.node(i)[1] for i in range(n_nodes())]
    assert names == ["sub", "relu", "add", "softplus"]


def test_a_handler_is_given_the_call() -> None:
    seen: list[Any] = []

    def handle(func: Any, args: Any, kwargs: Any) -> str:
        seen.append((func, args, kwargs))
        return "handled"

    def handled(x: Tensor, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("it has a handler")

    with op(handled, functions.HANDLER, handle) as call:
        x = koila.lazy(batch())
        assert call(x, 1, a=2) == "handled"
        assert call(x) == "handled"
    assert [entry[1:] for entry in seen] == [((x, 1), {"a": 2}), ((x,), {})]


def test_a_handler_may_raise() -> None:
    def handle(func: Any, args: Any, kwargs: Any) -> None:
        raise ValueError("of the handler")

    with op(handle, functions.HANDLER, handle) as call, pytest.raises(ValueError, match="handler"):
        call(koila.lazy(batch()))


def test_what_is_unknown_runs_at_once() -> None:
    def unknown(x: Tensor) -> Tensor:
        assert type(x) is Tensor
        return x * 2

    made = LazyTensor.__torch_function__(unknown, (LazyTensor,), (pending(),))
    assert koila.is_lazy(made) and not is_pending(made)
    assert made.tolist() == (batch() * 4).tolist()


@pytest.mark.parametrize("name", ["__torch_function__", "__torch_dispatch__"])
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_hooks_take_three_or_four(name: str, n: int) -> None:
    with pytest.raises(TypeError, match=f"{name} takes func, types, args, kwargs"):
        getattr(LazyTensor, name)(*([torch.tanh] * n))


@pytest.mark.parametrize("kwargs", [(), (None,), ({},)])
def test_keywords_may_be_left_out(kwargs: Any) -> None:
    x = koila.lazy(batch())
    made = LazyTensor.__torch_function__(torch.tanh, (LazyTensor,), (x,), *kwargs)
    assert is_pending(made)
    assert made.tolist() == batch().tanh().tolist()


# Which lazies are worth it ------------------------------------------------------------------------


def test_a_call_on_numbers_alone_is_run() -> None:
    """`total += loss` must not make a tape grow over steps."""
    total: Any = torch.zeros(3, dtype=torch.float64)
    for _ in range(3):
        part = (koila.lazy(batch()) * 2).sum(0)
        part.tolist()
        total = total + part
        assert type(total) is Tensor
        assert n_nodes() == 0
    assert total.tolist() == ((batch() * 2).sum(0) * 3).tolist()


def test_inputs_stay_lazy_for_ever() -> None:
    x = koila.lazy(batch())
    for _ in range(3):
        made = x * 2
        assert is_pending(made)
        made.tolist()


def test_lazies_of_another_thread_are_run() -> None:
    """The call runs at once; neither thread's tape has a node of the other's."""
    other = in_a_thread(pending)
    assert is_pending(other)
    here = koila.lazy(batch()) * 3
    both = other + here
    assert not is_pending(both) and not is_pending(other)
    assert both.tolist() == (batch() * 2 + batch() * 3).tolist()


def test_a_call_with_lazies_of_a_thread_that_records() -> None:
    """Two threads, each with a program under way, use each other's values."""
    shared: dict[str, Any] = {}
    is_made, is_used = threading.Event(), threading.Event()

    def work() -> None:
        shared["mine"] = pending()
        is_made.set()
        assert is_used.wait(60)
        shared["then"] = (shared["mine"] + 1).tolist()

    thread = threading.Thread(target=work)
    thread.start()
    assert is_made.wait(60)
    mine = koila.lazy(batch()) * 3
    used = (mine + shared["mine"]).tolist()
    is_used.set()
    thread.join(60)
    assert used == (batch() * 3 + batch() * 2).tolist()
    assert shared["then"] == (batch() * 2 + 1).tolist()


# Results ------------------------------------------------------------------------------------------

RESULTS: dict[str, Callable[[Any], Any]] = {
    "one": lambda x: x.tanh(),
    "tuple": lambda x: x.split(2),
    "tuple of one": lambda x: x.split(4),
    "named": lambda x: x.max(1),
    "named by name": lambda x: torch.topk(x, 2, 1),
    "list": lambda x: torch.broadcast_tensors(x, x[:1]),
    "unbind": lambda x: x.unbind(1),
    "no row, named": lambda x: torch.linalg.qr(x),
    "no row, tuple": lambda x: torch.frexp(x.float()),
    "no row, one": lambda x: torch.linalg.matrix_norm(x),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_come_in_torchs_containers(name: str) -> None:
    made, wanted = RESULTS[name](koila.lazy(batch()) * 1), RESULTS[name](batch())
    if isinstance(wanted, Tensor):
        assert is_pending(made)
        made, wanted = (made,), (wanted,)
    else:
        assert type(made) is type(wanted)
        assert len(made) == len(wanted)
    for got, want in zip(made, wanted, strict=True):
        assert koila.is_lazy(got)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.tolist() == want.tolist()


def test_illegal_calls_raise_torchs_words_at_once_and_leave_no_node() -> None:
    x = koila.lazy(batch())
    kept = x * 2
    for call in (
        lambda t: t @ t,
        lambda t: t.view(5, -1),
        lambda t: torch.linalg.det(t),
        lambda t: t.sum(7),
        lambda t: torch.cat([t, t[:, :1]]),
    ):
        with pytest.raises((RuntimeError, IndexError)) as wanted:
            call(batch())
        with pytest.raises(wanted.type) as got:
            call(x)
        assert str(got.value) == str(wanted.value)
    assert kept.tolist() == (batch() * 2).tolist()


# Draws --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like])
def test_what_draws_by_sizes_alone_draws_now(draw: Any) -> None:
    """Eager's own numbers, at any number of chunks; unless another draw waits."""
    torch.manual_seed(3)
    wanted = draw(batch())
    torch.manual_seed(3)
    made = draw(koila.lazy(batch()) * 2)
    assert not is_pending(made)
    assert made.tolist() == wanted.tolist()
    dropped = F.dropout(koila.lazy(batch()), 0.5)
    assert is_pending(draw(dropped))


# The net: what reaches the dispatcher went past __torch_function__ --------------------------------


def unseen(x: Any) -> Any:
    """A call that is dispatched without being offered."""
    with torch._C.DisableTorchFunction():
        return torch.add(x, 1)


def test_the_net_runs_what_needs_no_gradient() -> None:
    for x in (koila.lazy(batch()), pending()):
        made = unseen(x)
        assert made.tolist() == (x + 1).tolist()


def test_the_net_refuses_what_would_lose_a_gradient() -> None:
    lazy: Any = koila.lazy(batch()) * weight()
    with pytest.raises(koila.KoilaError, match="the gradient would be lost"):
        unseen(lazy)
    with pytest.raises(koila.KoilaError, match="would be lost"):
        LazyTensor.__torch_dispatch__(torch.ops.aten.add.Tensor, (), (1,), {"other": lazy})
    core.force(lazy)
    with torch.no_grad():
        assert unseen(lazy).tolist() == (batch() + 1).tolist()
    assert unseen(lazy.detach()).tolist() == (batch() + 1).tolist()


def test_the_net_runs_a_pending_program_with_its_graph() -> None:
    w = weight()
    lazy = koila.lazy(batch()) * w
    with torch.no_grad():
        assert unseen(lazy).tolist() == (batch() + 1).tolist()
    lazy.sum().backward()
    assert w.grad is not None
