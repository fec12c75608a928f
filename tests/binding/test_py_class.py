# SPDX-License-Identifier: Apache-2.0
"""LazyTensor, the class: metadata without computing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import koila
from binding_kit import batch, in_a_thread, is_pending, live, pending
from chunked import split
from koila import _core

LazyTensor: Any = _core.LazyTensor

MADE: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: x * 2,
    "transposed": lambda x: (x * 2).t(),
    "no dims": lambda x: (x * 2).sum(),
    "no rows": lambda x: (x * 2)[:0],
    "many dims": lambda x: (x * 2)[None, None, :, None],
    "expanded": lambda x: (x * 2)[:, :1].expand(4, 5),
    "every other": lambda x: (x * 2)[:, ::2],
    "bools": lambda x: (x * 2) > 1,
    "ints": lambda x: (x * 2).argmax(1),
    "complex": lambda x: (x * 2).to(torch.complex128),
    "halves": lambda x: (x * 2).half(),
    "gradient": lambda x: x * torch.ones(3, dtype=torch.float64, requires_grad=True),
}

GETTERS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda t: t.shape,
    "size": lambda t: t.size(),
    "size of None": lambda t: t.size(None),
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "ndim": lambda t: (t.ndim, t.dim(), t.ndimension()),
    "requires_grad": lambda t: t.requires_grad,
    "numel": lambda t: (t.numel(), t.nelement(), torch.numel(t)),
    "stride": lambda t: t.stride(),
    "storage_offset": lambda t: t.storage_offset(),
    "is_contiguous": lambda t: t.is_contiguous(),
    "kind": lambda t: (t.is_floating_point(), t.is_complex(), t.layout, t.itemsize),
    "grad": lambda t: t.requires_grad and t.is_leaf,
}


def known(x: Any) -> Any:
    with split(2):
        _core.read(x)
    return x


def same(x: Any) -> Any:
    return x


@pytest.mark.parametrize("state", [same, known, live], ids=["pending", "known", "live"])
@pytest.mark.parametrize("name", MADE)
def test_getters_are_eagers(name: str, state: Callable[[Any], Any]) -> None:
    lazy, eager = MADE[name](koila.lazy(batch())), MADE[name](batch())
    was_pending = is_pending(state(lazy))
    has_gaps = name in ("expanded", "every other")
    for getter, get in GETTERS.items():
        if state is known and has_gaps and getter in ("stride", "is_contiguous"):
            continue  # the chunks of it, put together
        value = _core.id(lazy)
        if getter == "storage_offset" and value is not None and _core.value(value)[9] is not None:
            continue  # where in memory a view begins is read of its tensor
        wanted = get(eager)
        for _ in range(2):
            got = get(lazy)
            assert type(got) is type(wanted) and got == wanted, getter
        in_thread = in_a_thread(lambda get=get: get(lazy))
        assert in_thread == wanted, getter
    assert is_pending(lazy) == was_pending


@pytest.mark.parametrize("name", GETTERS)
def test_getters_of_inputs_are_eagers(name: str) -> None:
    for x in (batch(), batch().t(), batch().requires_grad_(), torch.arange(3)):
        assert GETTERS[name](koila.lazy(x)) == GETTERS[name](x)


DIMS: list[Any] = [0, 1, -1, -2, numpy.int64(1), numpy.int32(-1), 2, -3, 1.0, "x", (0,)]
DIMS += [True, 10**30, None]


@pytest.mark.parametrize("dim", DIMS, ids=repr)
def test_size_of_a_dim(dim: Any) -> None:
    """The size, or torch's type of error; and its text where a dim is out of range."""

    def ask(x: Any, word: bool) -> Any:
        try:
            return x.size(dim=dim) if word else x.size(dim)
        except Exception as error:
            is_out = isinstance(error, IndexError) and isinstance(dim, int) and abs(dim) < 9
            return type(error), str(error) if is_out else None

    for make in (same, lambda x: x * 2):
        for word in (False, True):
            wanted, got = ask(make(batch()), word), ask(make(koila.lazy(batch())), word)
            assert got == wanted


def test_size_of_what_has_no_dims() -> None:
    for make in (same, lambda x: x * 2):
        with pytest.raises(IndexError, match="Dimension specified as 0 but tensor has no dim"):
            make(koila.lazy(batch()).sum()).size(0)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((0, 1), {}), ((), {"axes": 0}), ((0,), {"dim": 0})],
)
def test_size_takes_one_dim(args: Any, kwargs: Any) -> None:
    for lazy in (koila.lazy(batch()), pending()):
        with pytest.raises(TypeError):
            lazy.size(*args, **kwargs)


def test_a_size_is_a_torch_size_and_is_kept() -> None:
    lazy = pending()
    assert type(lazy.shape) is torch.Size
    assert lazy.shape is lazy.shape
    lazy.shape.numel()
    rows, columns = lazy.shape
    assert type(rows) is type(columns) is int


def test_metadata_is_closed_but_for_requires_grad() -> None:
    lazy: Any = pending()
    for name in ("shape", "dtype", "device", "ndim"):
        with pytest.raises(AttributeError):
            setattr(lazy, name, None)
    assert is_pending(lazy)


@pytest.mark.parametrize("make", [same, lambda x: x * 2], ids=["input", "pending"])
def test_requires_grad_is_switched_as_in_eager(make: Any) -> None:
    lazy, eager = make(koila.lazy(batch())), make(batch())
    for x in (lazy, eager):
        x.requires_grad = True
        assert x.requires_grad
        (x * x).sum().backward()
    assert lazy.grad.tolist() == eager.grad.tolist()


def test_requires_grad_of_what_is_no_leaf() -> None:
    lazy = MADE["gradient"](koila.lazy(batch()))
    with pytest.raises(RuntimeError, match="leaf variables"):
        lazy.requires_grad = False
    assert lazy.requires_grad
    with pytest.raises(RuntimeError, match="requires_grad must be a bool"):
        koila.lazy(batch()).requires_grad = "yes"  # type: ignore[assignment]


def test_a_write_brings_a_gradient_to_views() -> None:
    def write(x: Tensor) -> list[bool]:
        w = torch.ones(3, dtype=torch.float64, requires_grad=True)
        base = x * 2
        view, other = base[:, :1], base.t()
        flags = [t.requires_grad for t in (base, view, other)]
        base.mul_(w)
        return flags + [t.requires_grad for t in (base, view, other)]

    assert write(koila.lazy(batch())) == write(batch()) == [False] * 3 + [True] * 3


# What stands for nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*GETTERS, "call", "force", "text", "switch"])
def test_a_placeholder_of_its_own_stands_for_nothing(name: str) -> None:
    """Code that torch runs out of sight may copy the placeholder."""
    asks: dict[str, Callable[[Any], Any]] = GETTERS | {
        "call": lambda t: t + 1,
        "force": _core.force,
        "text": lambda t: t.tolist(),
        "switch": lambda t: setattr(t, "requires_grad", True),
    }
    with pytest.raises(koila.KoilaError, match="stands for nothing"):
        asks[name](LazyTensor.__new__(LazyTensor))


def test_the_class() -> None:
    assert issubclass(LazyTensor, Tensor)
    assert LazyTensor.__module__ == "koila"
    assert isinstance(pending(), LazyTensor)
    assert type(pending()) is LazyTensor
    assert not isinstance(batch(), LazyTensor)
    with pytest.raises(TypeError):
        type(pending()._node)()  # type: ignore[attr-defined]
