"""What a script still holds when its weights change: numbers stay, and the next step goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from chunked import split
from oracle import Lazy, assert_same_story
from stories import N_ROWS, each_split_further

Step = Callable[[list[nn.Parameter]], Any]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _without_gradients(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.sub_(_gradient(parameter), alpha=0.1)


#: A step of a script that has no optimizer.
STEPS: dict[str, Step] = {
    "data": lambda ps: [p.data.add_(_gradient(p), alpha=-0.1) for p in ps],
    "data of all": lambda ps: torch._foreach_add_(
        [p.data for p in ps], [_gradient(p) for p in ps], alpha=-0.1
    ),
    "detach": lambda ps: [p.detach().add_(_gradient(p), alpha=-0.1) for p in ps],
    "no_grad": _without_gradients,
}


@pytest.mark.parametrize("step", STEPS)
@each_split_further
def test_states_of_a_layer(chunks: int | None, step: str) -> None:
    """`out, (h, c) = lstm(x)`, of which only `out` is in the loss; `q` is made and not used."""

    def story(lazy: Lazy) -> Any:
        layer, head = nn.LSTM(4, 3, batch_first=True).double(), nn.Linear(3, 2).double()
        parameters = [*layer.parameters(), *head.parameters()]
        seen: list[Any] = []
        for _ in range(3):
            x, y = torch.randn(N_ROWS, 5, 4, dtype=torch.float64), torch.randint(0, 2, (N_ROWS,))
            x, y = lazy(x, y)
            out, (h, c) = layer(x)
            q = out * 2
            loss = F.cross_entropy(head(out[:, -1]), y)
            loss.backward()
            STEPS[step](parameters)
            seen += [loss.item(), torch.tensor(h.tolist()), torch.tensor(q.tolist())]
            assert h.requires_grad
            assert c.requires_grad
            for parameter in parameters:
                parameter.grad = None
        return seen, torch.tensor(c.tolist())

    assert_same_story(story, chunks)


@each_split_further
def test_states_are_spent_with_their_layer(chunks: int | None) -> None:
    """A second backward, through another result of the same call, is refused as torch refuses."""
    layer = nn.LSTM(4, 3, batch_first=True)
    with split(chunks):
        for x in (torch.ones(N_ROWS, 5, 4), koila.lazy(torch.ones(N_ROWS, 5, 4))):
            out, (h, _) = layer(x)
            out.sum().backward()
            with pytest.raises(RuntimeError, match="second time"):
                h.sum().backward()


@each_split_further
def test_data_is_looked_at_where_no_grad_ends(chunks: int | None) -> None:
    """What is asked of a watched tensor when a block ends does not end a block itself."""

    def story(lazy: Lazy) -> Any:
        layer = nn.Linear(4, 3).double()
        x = lazy(torch.randn(N_ROWS, 4, dtype=torch.float64))
        loss = layer(x).pow(2).sum()
        count = (x > 0).sum()
        norm = layer.weight.data.norm()
        with torch.no_grad():
            mask = (x > 0.5).sum()
        loss.backward()
        return count, norm, mask, layer.weight.grad

    assert_same_story(story, chunks)
