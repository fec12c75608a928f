# SPDX-License-Identifier: Apache-2.0
"""Methods and operators of a lazy go straight to the recorder, but not past who overrides them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.overrides
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import koila

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
}
OTHERS = {
    "tensor": torch.arange(1.0, 4.0),
    "parameter": nn.Parameter(torch.arange(2.0, 5.0)),
    "float": 2.5,
    "int": 3,
    "bool": True,
    "complex": 1 + 2j,
}


def x() -> Tensor:
    return torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_eagers_from_both_sides(name: str, other: str) -> None:
    operate, value = OPERATORS[name], OTHERS[other]
    if name == "sub" and other == "bool":
        pytest.skip("torch subtracts no bool")
    lazy = koila.lazy(x() + 1)
    for got, wanted in (
        (operate(lazy, value), operate(x() + 1, value)),
        (operate(value, lazy), operate(value, x() + 1)),
        (operate(lazy, lazy), operate(x() + 1, x() + 1)),
    ):
        assert koila.is_lazy(got)
        assert got.dtype == wanted.dtype
        assert got.requires_grad == wanted.requires_grad
        assert got.tolist() == wanted.tolist()


def test_matmul_and_minus() -> None:
    lazy = koila.lazy(x())
    assert (lazy @ x().t()).tolist() == (x() @ x().t()).tolist()
    assert (x().t() @ lazy).tolist() == (x().t() @ x()).tolist()
    assert (-lazy).tolist() == (-x()).tolist()


@pytest.mark.parametrize("other", ["text", None, object()], ids=["str", "None", "object"])
@pytest.mark.parametrize("name", OPERATORS)
def test_what_torch_refuses_is_refused_in_its_words(name: str, other: Any) -> None:
    def words(value: Any) -> tuple[type, str]:
        with pytest.raises(TypeError) as caught:
            OPERATORS[name](value, other)
        return caught.type, str(caught.value).replace("LazyTensor", "Tensor")

    assert words(koila.lazy(x())) == words(x())


def test_an_operand_that_answers_for_itself_does() -> None:
    class Other:
        def __radd__(self, left: Any) -> str:
            return "mine"

    assert koila.lazy(x()) + Other() == "mine"


class Names(TorchFunctionMode):
    """Keeps the names of the calls it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_users_mode_sees_every_call() -> None:
    lazy, labels = koila.lazy(x()), torch.tensor([0, 1, 2, 0])
    with Names() as names:
        (-(lazy + 1)).view(12).tanh()
        F.cross_entropy(lazy, labels)
    assert names.seen == ["add", "neg", "view", "tanh", "cross_entropy"]


def test_where_overriding_is_off_torchs_own_way_is_taken() -> None:
    lazy = koila.lazy(x())
    with torch._C.DisableTorchFunctionSubclass():
        made = [lazy + 1, lazy.mul(2), -lazy]
    assert [m.tolist() for m in made] == [(x() + 1).tolist(), (x() * 2).tolist(), (-x()).tolist()]


class Mine(Tensor):
    """A subclass that answers for itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "mine"


def test_another_subclass_that_comes_first_is_asked_first() -> None:
    assert torch.ones(3).as_subclass(Mine) + koila.lazy(x()) == "mine"
    assert F.linear(koila.lazy(x()), torch.ones(2, 3).as_subclass(Mine)) == "mine"
    assert F.mse_loss(koila.lazy(x()), torch.ones(4, 3).as_subclass(Mine)) == "mine"


def test_python_functions_are_passed_on_without_torchs_search() -> None:
    before = torch.overrides.handle_torch_function
    passed: list[Any] = []

    def own(*args: Any, **kwargs: Any) -> Any:
        passed.append(args[0])
        return before(*args, **kwargs)

    handle = koila._core.handler(own)
    lazy = koila.lazy(x() - 5)
    try:
        made = handle(F.dropout, (lazy, None), lazy, p=0.0)
        assert not passed
        assert torch.equal(made, x() - 5)
        assert handle(F.relu, (lazy, torch.ones(1).as_subclass(Mine)), lazy) is not None
        assert handle(mine, (lazy,), lazy) is not None
        assert passed == [F.relu, mine]
    finally:
        koila._core.handler(before)


def mine(tensor: Tensor) -> Tensor:
    """A function that koila does not know."""
    return tensor * 2


def test_methods_look_like_torchs() -> None:
    assert koila._core.LazyTensor.view.__name__ == "view"
    assert koila._core.LazyTensor.relu.__doc__ == Tensor.relu.__doc__
    assert inspect.ismethod(koila.lazy(x()).tanh)
    assert Tensor.relu(koila.lazy(x() - 5)).tolist() == (x() - 5).relu().tolist()


def test_keywords_and_errors_of_methods() -> None:
    lazy = koila.lazy(x())
    assert lazy.sum(dim=1, keepdim=True).tolist() == x().sum(dim=1, keepdim=True).tolist()
    assert lazy.clamp(min=3, max=7).tolist() == x().clamp(min=3, max=7).tolist()
    with pytest.raises(TypeError) as wanted:
        x().relu(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError) as got:
        lazy.relu(1)
    assert str(got.value) == str(wanted.value)
    with pytest.raises(RuntimeError, match="shape '\\[5\\]' is invalid for input of size 12"):
        lazy.view(5)


def test_the_short_ways_are_open() -> None:
    """Each has a long way round, which is right as well, and would be taken without a word."""
    assert koila._core.is_recycling()
    assert type(vars(koila._core.LazyTensor)["view"]).__name__ == "LazyMethod"


def test_names_that_are_installed_are_torchs() -> None:
    with pytest.raises(TypeError, match="names is not a tuple"):
        koila._core.install_slots(["view"])  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no_such_method"):
        koila._core.install_slots(("no_such_method",))
    koila._core.install_slots(("item", "backward", "view"))
    for name in ("item", "backward"):
        assert name not in vars(koila._core.LazyTensor), "no ops: torch's own way stays"


def test_a_method_without_a_lazy_is_torchs() -> None:
    """Called through the class, with whatever comes first."""
    method: Any = koila._core.LazyTensor.view
    assert method(x(), 12).tolist() == x().view(12).tolist()
    with pytest.raises(TypeError):
        method()
    with pytest.raises(TypeError):
        method(3, 12)


def test_a_transform_under_way_takes_torchs_own_way() -> None:
    lazy = koila.lazy(x())
    got = torch.func.vmap(lambda row: row * lazy[0] + 1)(x())
    assert got.tolist() == (x() * x()[0] + 1).tolist()
