# SPDX-License-Identifier: Apache-2.0
"""The table of torch's callables: found by identity, attributes by their descriptor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import koila
from binding_kit import batch, is_pending, op
from koila import _core
from koila.recording import functions, packed

core: Any = _core


def ask(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Hand a call over as torch does."""
    return _core.LazyTensor.__torch_function__(func, (_core.LazyTensor,), args, kwargs)


def register(
    func: Any, kind: int = functions.OP, name: Any = "mine", handler: Any = None, row: Any = None
) -> None:
    entry = functions.Entry(kind, name, handler, has_meta=True, row=row, container=tuple)
    core.register(func, entry)


@pytest.mark.parametrize("kind", [-1, 5, 99])
def test_no_such_kind(kind: int) -> None:
    with pytest.raises(ValueError, match=f"no kind {kind} of callable"):
        register(lambda x: x, kind)


@pytest.mark.parametrize(
    "args",
    [
        (),
        (abs,),
        (abs, 0, "abs"),
        (abs, [0, "abs"]),
        (abs, (0, "abs", None)),
        (abs, functions.Entry(0, 3)),  # type: ignore[arg-type]
        (abs, functions.Entry("op", "abs")),  # type: ignore[arg-type]
        (abs, functions.Entry(0, "abs", row=3)),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments(args: Any) -> None:
    with pytest.raises(TypeError):
        core.register(*args)


class Unhashable:
    """A callable that is no key of a dict."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: Tensor) -> Tensor:
        assert type(x) is Tensor
        return x * 2


class Unequal:
    """One whose hash and comparison raise."""

    def __hash__(self) -> int:
        raise RuntimeError("no hash")

    __call__ = Unhashable.__call__


@pytest.mark.parametrize("make", [Unhashable, Unequal])
def test_a_callable_without_hash_is_one_never_heard_of(make: Any) -> None:
    """It runs at once; the exception of its hash is nobody's."""
    with pytest.raises((TypeError, RuntimeError)):
        register(make())
    made = ask(make(), koila.lazy(batch()))
    assert koila.is_lazy(made) and not is_pending(made)
    assert made.tolist() == (batch() * 2).tolist()


def test_the_last_word_counts() -> None:
    """What was registered before is forgotten, and let go."""

    def double(x: Tensor) -> Tensor:
        return x * 2

    assert not is_pending(ask(double, koila.lazy(batch())))
    register(double)
    assert is_pending(ask(double, koila.lazy(batch())))
    register(double, functions.READ)
    read = ask(double, koila.lazy(batch()))
    assert type(read) is Tensor
    register(double, functions.HANDLER, handler=lambda func, args, kwargs: (func, args, kwargs))
    assert ask(double, 1, a=2) == (double, (1,), {"a": 2})


def test_by_identity_and_not_by_name() -> None:
    def tanh(x: Tensor) -> Tensor:
        return x * 2

    made = ask(tanh, koila.lazy(batch()))
    assert not is_pending(made)
    assert made.tolist() == (batch() * 2).tolist()
    named = ask(torch.tanh, koila.lazy(batch()))
    assert core.node(0)[1] == "tanh"
    assert named.tolist() == batch().tanh().tolist()


def test_a_row_that_is_none() -> None:
    """Then the op has no row, and torch is asked on meta tensors."""
    with op(lambda x: x * 2) as call:
        with pytest.raises(KeyError, match="no row no_such_row"):
            register(call, row="no_such_row")
        register(call)
        made = call(koila.lazy(batch()))
        assert core.node(0)[1] is None
        del made
    with op(lambda x: x * 2) as call:
        register(call, row="multiply")
        made = ask(call, koila.lazy(batch()), 2)
        assert made.shape == (4, 3)
        assert core.node(0)[1] == "mul"


# Attributes: what arrives is a method-wrapper, made anew each time --------------------------------

READS: dict[str, Callable[[Any], Any]] = {
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "H": lambda x: x.H,
    "real": lambda x: x.real,
    "grad": lambda x: x.grad,
    "is_leaf": lambda x: x.is_leaf,
    "is_sparse": lambda x: x.is_sparse,
    "layout": lambda x: x.layout,
    "itemsize": lambda x: x.itemsize,
    "grad_fn": lambda x: type(x.grad_fn),
    "data": lambda x: x.data.tolist(),
    "_base": lambda x: x._base,
    "output_nr": lambda x: x.output_nr,
    "is_cuda": lambda x: x.is_cuda,
}


@pytest.mark.parametrize("name", READS)
def test_attributes_are_eagers(name: str) -> None:
    for make in (lambda x: x, lambda x: x * 2):
        wanted = READS[name](make(batch()))
        for _ in range(2):
            got = READS[name](make(koila.lazy(batch())))
            if isinstance(wanted, Tensor):
                assert got.tolist() == wanted.tolist()
            else:
                assert got == wanted


def test_an_attribute_can_be_an_op() -> None:
    transposed = (koila.lazy(batch()) * 2).T
    assert is_pending(transposed)
    assert core.node(1)[1] == "t"
    assert transposed.shape == (3, 4)


def test_reading_and_writing_an_attribute_are_two() -> None:
    """x.grad is answered by a handler; x.grad = y is not, and reaches the tensor."""
    lazy = koila.lazy(batch().requires_grad_())
    assert lazy.grad is None
    lazy.grad = batch()
    assert lazy.grad is not None
    assert lazy.grad.tolist() == batch().tolist()
    seen: list[str] = []
    key = vars(torch._C.TensorBase)["grad"], "__set__"
    register(key, functions.HANDLER, handler=lambda func, args, kwargs: seen.append("written"))
    try:
        lazy.grad = None
        assert seen == ["written"]
        assert lazy.grad is not None
    finally:
        register(key, functions.LIVE)
    lazy.grad = None
    assert lazy.grad is None


def test_deleting_an_attribute_reaches_the_tensor() -> None:
    x = batch().requires_grad_()
    lazy = koila.lazy(x)
    lazy.grad = batch()
    del lazy.grad
    assert x.grad is None


def test_every_name_of_the_table_is_registered() -> None:
    """A row that no callable of torch stands for would never be used; operators have two names."""
    named = {name for row in core.op_table() for name in (row["name"], *row["aliases"])}
    found = {f"packed_{name}" for name in packed.LAYERS}
    found |= {"as_leaf", "gradient_of", "select_masked"}
    for name, func in functions._overridable():
        if callable(func):
            found |= {getattr(func, "__name__", name), f"Tensor_{getattr(func, '__name__', name)}"}
    assert {name for name in named - found if not name.startswith("__")} == set()
