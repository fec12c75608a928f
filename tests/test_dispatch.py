# SPDX-License-Identifier: Apache-2.0
"""Calls of torch's Python functions, such as F.relu, reach koila without torch's search for the
class that overrides them, unless a mode or another class has to be asked."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import koila
from frames import n_entered

N_ROWS = 4


def batch() -> Tensor:
    made: Tensor = koila.lazy(torch.linspace(-1, 1, 2 * N_ROWS).view(N_ROWS, 2))
    return made


def searches(call: Callable[[], object]) -> int:
    """Return how often a call enters torch's function that searches for the class."""
    code = torch.overrides.handle_torch_function.__code__
    return n_entered(call, lambda entered: entered is code)


def test_calls_on_lazies_and_plain_tensors_need_no_search() -> None:
    x, y = batch(), torch.zeros(N_ROWS, dtype=torch.int64)
    assert searches(lambda: F.relu(x)) == 0
    assert searches(lambda: F.cross_entropy(x, y, torch.ones(2))) == 0
    assert searches(lambda: torch.norm(x)) == 0
    w = torch.ones(2, requires_grad=True)
    assert searches((x * w).sum().backward) == 0
    assert w.grad is not None


def test_a_mode_sees_what_it_sees_in_eager() -> None:
    class Names(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(func.__name__)
            return func(*args, **kwargs or {})

    seen = []
    for x in (batch(), torch.ones(N_ROWS, 2)):
        with Names() as names:
            F.softmax(F.relu(x), dim=1)
        seen.append([name for name in names.seen if name in ("relu", "softmax")])
    assert seen[0] == seen[1]
    assert seen[0][0] == "relu"


def test_another_class_is_asked() -> None:
    class Own(Tensor):
        asked = 0

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            cls.asked += func is F.mse_loss
            return super().__torch_function__(func, types, args, kwargs or {})

    F.mse_loss(batch(), torch.ones(N_ROWS, 2).as_subclass(Own))
    assert Own.asked > 0


def test_a_function_of_the_script_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the name of torch's, which it calls, and by which torch's passes itself on."""
    calls, own = [], F.relu

    def relu(*args: Any, **words: Any) -> Any:
        calls.append(1)
        return own(*args, **words)

    monkeypatch.setattr(F, "relu", relu)
    x = batch()
    assert torch.equal(F.relu(x), torch.linspace(-1, 1, 2 * N_ROWS).view(N_ROWS, 2).clamp(min=0))
    assert calls == [1]


def test_an_error_shows_no_frame_of_koila() -> None:
    with pytest.raises(IndexError) as raised:
        F.softmax(batch(), dim=5)
    files = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert not any(file.startswith(koila.__path__[0]) for file in files)


def test_scripts_compile_such_functions() -> None:
    def head(x: Tensor) -> Tensor:
        return F.softmax(F.relu(x), dim=1)

    assert torch.equal(torch.jit.script(head)(torch.ones(2, 2)), torch.full((2, 2), 0.5))


def test_attention_layers_can_be_scripted() -> None:
    """koila replaces their forward(), whose source TorchScript compiles."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16).eval()
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(3, 4, 8)
    for module in (layer, encoder):
        assert torch.allclose(torch.jit.script(module)(x), module(x))
    attention = torch.nn.MultiheadAttention(8, 2).eval()
    assert torch.allclose(torch.jit.script(attention)(x, x, x)[0], attention(x, x, x)[0])
