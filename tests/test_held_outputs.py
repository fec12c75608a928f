# SPDX-License-Identifier: Apache-2.0
"""What a script still holds when its weights change: numbers stay, and the next step goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from allocations import Allocations
from chunked import split
from limits import there
from oracle import Lazy, assert_same_story, eager
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


@pytest.mark.rotated("chunks")
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


WORDS, STEPS_OF_TEXT = 61, 5


class Language(nn.Module):
    """A word language model, whose batch is in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(WORDS, 8), nn.LSTM(8, 8)
        self.decoder = nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.encoder(x))
        return self.decoder(output), hidden


def _text(n_rows: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randint(0, WORDS, (2, STEPS_OF_TEXT, n_rows)).unbind()
    return x, y


HELD: dict[str, Callable[[Tensor], Any]] = {
    "a view of all": lambda out: out.view(-1, WORDS),
    "itself and a view": lambda out: (out, out.view(-1, WORDS), out[1:]),
    "turned": lambda out: out.transpose(0, 1).reshape(-1, WORDS),
    "laid out anew": lambda out: out.transpose(1, 2).contiguous(),
    "softmax": lambda out: (out.log_softmax(-1), out.view(-1, WORDS).softmax(-1)),
}


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("is_hooked", [False, True])
@each_split_further
def test_rows_in_dim_1(chunks: int | None, kind: str, is_hooked: bool) -> None:
    """Outputs whose rows are not outermost, held over the step; a hook sees their gradient."""

    def story(lazy: Lazy) -> Any:
        torch.manual_seed(0)
        model, seen = Language().double(), list[Any]()

        def doubled(gradient: Tensor) -> Tensor:
            seen.append(gradient.clone())
            return gradient * 2

        for _ in range(2):
            x, y = lazy(*_text(N_ROWS), batch=1)
            out, hidden = model(x)
            if is_hooked:
                out.register_hook(doubled)
            held = HELD[kind](out)
            loss = F.cross_entropy(out.view(-1, WORDS), y.view(-1))
            loss.backward()
            flat = held if isinstance(held, tuple) else (held,)
            seen += [torch.tensor(one.tolist()) for one in (*flat, *hidden)]
            _without_gradients(list(model.parameters()))
        return seen, [_gradient(parameter) for parameter in model.parameters()]

    assert_same_story(story, chunks)


def test_rows_in_dim_1_are_put_together_once() -> None:
    """Beside what a chunk takes the output is there once; so half of eager's bytes are enough."""

    def step(lazy: Lazy) -> tuple[int, int]:
        torch.manual_seed(0)
        model, batch, memory = Language(), _text(4096), Allocations()
        memory.count(list(model.parameters()), batch)
        with memory:
            x, y = lazy(*batch, batch=1)
        with memory:
            out = model(x)[0].view(-1, WORDS)
            F.cross_entropy(out, y.view(-1)).backward()
        return memory.peak, out.nbytes

    want, held = step(eager)
    with koila.config(chunks=8):
        got, _ = step(koila.lazy)
    assert got < 1.2 * held + want // 8
    with koila.config(memory_limit=there() + want // 2):
        assert step(koila.lazy)[0] < want // 2
    assert koila.report().n_chunks > 1
    assert len(koila.report().programs) == 1


#: Values that a script computes with a graph and reads after the optimizer's step. Of eager's
#: graph behind them, the loss's backward has freed all that leads to weights.
METRICS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "of the output": lambda h, out: (out - 1).abs().mean(),
    "of rows": lambda h, out: out.softmax(-1),
    "of a hidden layer": lambda h, out: h.pow(2).mean(0),
    "of both": lambda h, out: (h.sum() * out.sum(), out.max()),
    "of a metric": lambda h, out: out.exp().sum(0).log(),
}


def _read_metrics(lazy: Lazy, kind: str) -> tuple[Any, int]:
    """Train two steps; return metrics and weights, and the bytes that an optimizer's step took."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(4, 64), nn.Tanh()), nn.Linear(64, 3)
    parameters = [*body.double().parameters(), *head.double().parameters()]
    optimizer, seen, memory = torch.optim.SGD(parameters, 0.1), list[Any](), Allocations()
    for _ in range(2):
        x, y = lazy(torch.randn(N_ROWS, 4, dtype=torch.float64), torch.randint(0, 3, (N_ROWS,)))
        optimizer.zero_grad()
        h = body(x)
        out = head(h)
        loss, held = F.cross_entropy(out, y), METRICS[kind](h, out)
        del h, out
        loss.backward()
        memory = Allocations()
        with memory:
            pass
        with memory:
            optimizer.step()
        flat = held if isinstance(held, tuple) else (held,)
        seen += [torch.tensor(one.tolist()) for one in flat]
        with pytest.raises(RuntimeError, match="second time"):
            flat[0].sum().backward()
    return (seen, *[parameter.detach() for parameter in parameters]), memory.peak


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("chunks", [2, 7])
def test_metrics_that_are_read_after_the_step_read_no_weights_again(kind: str, chunks: int) -> None:
    """koila keeps no copy of the old weights for a backward that eager refuses."""
    want, bytes_of_step = _read_metrics(eager, kind)
    with koila.config(chunks=chunks):
        got, bytes_of_koilas = _read_metrics(koila.lazy, kind)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert bytes_of_koilas == bytes_of_step
