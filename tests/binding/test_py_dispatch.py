# SPDX-License-Identifier: Apache-2.0
"""What torch finds when it asks a lazy for its __torch_function__."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.overrides import get_overridable_functions, has_torch_function, is_tensor_like

import koila
from koila import _core


def lazy() -> Tensor:
    return koila.lazy(torch.arange(6.0).view(3, 2))


def test_the_class_and_its_objects_have_the_same() -> None:
    function = lazy().__torch_function__
    assert function is _core.LazyTensor.__torch_function__
    assert function.__name__ == "__torch_function__"
    assert has_torch_function((lazy(),)) and is_tensor_like(lazy())


def test_it_records_what_it_is_given() -> None:
    x = lazy()
    called = x.__torch_function__(torch.relu, (type(x),), (x,))
    with_words = x.__torch_function__(torch.add, (type(x),), (x, 1), {"alpha": 2})
    assert koila.is_lazy(called) and called.tolist() == torch.relu(x).tolist()
    assert koila.is_lazy(with_words) and with_words.tolist() == (x + 2).tolist()


@pytest.mark.parametrize("n", [0, 2, 5])
def test_it_wants_four_arguments_by_position(n: int) -> None:
    with pytest.raises(TypeError, match="__torch_function__ takes func, types, args, kwargs"):
        lazy().__torch_function__(*[None] * n)
    with pytest.raises(TypeError, match="no keyword arguments"):
        lazy().__torch_function__(torch.relu, (), args=())  # type: ignore[call-arg]


def test_it_is_no_method_of_the_tensor() -> None:
    """torch warns of those, and asks for __self__ in each call."""
    x = lazy()
    function = x.__torch_function__
    assert function.__self__ is None  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        _ = function.__other__  # type: ignore[attr-defined]


def test_other_attributes_are_found_as_ever() -> None:
    x = lazy()
    x.mark = "here"  # type: ignore[attr-defined]
    assert x.mark == "here"  # type: ignore[attr-defined]
    assert x.__class__ is _core.LazyTensor
    with pytest.raises(AttributeError, match="no attribute '__torch_functions__'"):
        _ = x.__torch_functions__  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'ünknown_torch_fun'"):
        getattr(x, "ünknown_torch_fun")  # noqa: B009


def test_every_way_to_a_call_leads_here() -> None:
    """As a function, a method, through torch.nn.functional and through Python: all are recorded."""
    x = lazy()
    results = [
        torch.exp(x),
        x.exp(),
        torch.nn.functional.softmax(x, 1),
        torch.ops.aten.exp(x),
        torch.special.expm1(x),
    ]
    assert [koila.is_lazy(result) for result in results] == [True] * 5
    assert torch.exp in get_overridable_functions()[torch]
