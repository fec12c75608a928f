# SPDX-License-Identifier: Apache-2.0
"""A program in chunks draws eager's numbers, wherever the rows are in memory and whatever draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from koila import _core
from koila.random import noise_drawn
from koila.staged import noise
from oracle import Lazy, assert_same_story, eager, split

ROWS = 12
CHUNKS = [1, 2, 3, 7, ROWS]
F64 = torch.float64

#: (rows, 4, 6) and a (6, 6) weight that needs a gradient, to what has drawn.
Model = Callable[[Tensor, Tensor], Tensor]


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.4)


def drop_in_place(x: Tensor) -> Tensor:
    return F.dropout(x * 1, 0.4, inplace=True)


def heads(x: Tensor) -> Tensor:
    """(rows, 4, 6) -> (3, rows, 4, 2)."""
    return x.view(x.shape[0], 4, 3, 2).permute(2, 0, 1, 3)


def time_major_attention(x: Tensor, w: Tensor) -> Tensor:
    q = heads(x @ w)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)


def by_hand(x: Tensor, w: Tensor) -> Tensor:
    q = (x @ w).view(-1, 4, 3, 2).transpose(1, 2)
    weights = drop((q @ q.transpose(2, 3)).softmax(-1))
    return (weights @ q).transpose(1, 2).reshape(x.shape[0], 4, 6)


def heads_first_by_hand(x: Tensor, w: Tensor) -> Tensor:
    q = heads(x @ w).contiguous()
    return drop((q @ q.transpose(2, 3)).softmax(-1)) @ q


def pictures(x: Tensor, w: Tensor) -> Tensor:
    """Channels last, as models make pictures of tokens: (rows, 6, 2, 2)."""
    return (x @ w).transpose(1, 2).reshape(x.shape[0], -1, 2, 2)


def upsampled(x: Tensor) -> Tensor:
    return F.interpolate(x, size=(4, 4), mode="bilinear")


LAYOUTS: dict[str, Model] = {
    "pictures": lambda x, w: drop(pictures(x, w)),
    "pictures, larger": lambda x, w: drop(upsampled(pictures(x, w))),
    "pictures, joined": lambda x, w: drop(torch.cat([upsampled(pictures(x, w))] * 2, 1)),
    "pictures, stacked": lambda x, w: drop(torch.stack([upsampled(pictures(x, w))] * 2, 1)),
    "pictures, rolled": lambda x, w: drop(upsampled(pictures(x, w)).roll(1, -1)),
    "pictures, joined along a side": lambda x, w: drop(torch.cat([pictures(x, w)] * 2, -1).relu()),
    "rows first": lambda x, w: drop(x @ w),
    "time-major": lambda x, w: drop((x @ w).transpose(0, 1).contiguous()),
    "time-major view": lambda x, w: drop((x @ w).transpose(0, 1)),
    "time-major, in place": lambda x, w: drop_in_place((x @ w).transpose(0, 1).contiguous()),
    "a view of every second": lambda x, w: drop((x @ w)[:, :, ::2]),
    "columns first": lambda x, w: drop((x @ w)[:, 0].t().contiguous()),
    "stacked": lambda x, w: drop(torch.stack([x @ w, x * 2], 0)),
    "stacked inside": lambda x, w: drop(torch.stack([x @ w, x * 2], 1)),
    "joined along the batch": lambda x, w: drop(torch.cat([x @ w, x * 2], 0)),
    "repeated": lambda x, w: drop((x @ w).repeat(3, 1, 1)),
    "some rows of an expanded": lambda x, w: drop(
        (x @ w).broadcast_to(2, *x.shape[:-1], w.shape[-1])[:, :2]
    ),
    "repeated inside": lambda x, w: drop((x @ w).repeat_interleave(2, 0)),
    "rows and time as one": lambda x, w: drop((x @ w).view(-1, 6)),
    "time and rows as one": lambda x, w: drop((x @ w).transpose(0, 1).reshape(-1, 6)),
    "one of time and rows": lambda x, w: drop(
        (x @ w).transpose(0, 1).reshape(4, x.shape[0] * 6).view(4, x.shape[0], 6)
    ),
    "channels last": lambda x, w: drop(
        (x @ w).view(-1, 4, 2, 3).contiguous(memory_format=torch.channels_last)
    ),
    "heads before rows": lambda x, w: drop(heads(x @ w).contiguous()),
    "heads before rows, a view": lambda x, w: drop(heads(x @ w)),
    "attention by hand": by_hand,
    "attention by hand, heads first": heads_first_by_hand,
    "features": lambda x, w: F.dropout1d(x @ w, 0.4),
    "features of time-major": lambda x, w: F.dropout1d((x @ w).transpose(1, 2), 0.4),
    "features, rows second": lambda x, w: F.feature_alpha_dropout(
        (x @ w).transpose(0, 1).contiguous(), 0.4, training=True
    ),
    "alpha": lambda x, w: F.alpha_dropout((x @ w).transpose(0, 1), 0.4, training=True),
    "native": lambda x, w: torch.native_dropout((x @ w).transpose(0, 1), 0.4, True)[0],
    "native, rows first": lambda x, w: torch.native_dropout(x @ w, 0.4, True)[0],
}


def fill(method: str, *args: Any) -> Model:
    def model(x: Tensor, w: Tensor) -> Tensor:
        hidden = x @ w
        return hidden * getattr(torch.empty_like(hidden), method)(*args)

    return model


def fill_time_major(method: str, *args: Any) -> Model:
    def model(x: Tensor, w: Tensor) -> Tensor:
        hidden = (x @ w).transpose(0, 1).contiguous()
        return hidden * getattr(torch.empty_like(hidden), method)(*args)

    return model


def fill_narrow(method: str, *args: Any) -> Model:
    def model(x: Tensor, w: Tensor) -> Tensor:
        hidden = (x @ w)[:, 0, :1]
        return hidden * getattr(torch.empty_like(hidden), method)(*args)

    return model


def fill_part(method: str, *args: Any) -> Model:
    def model(x: Tensor, w: Tensor) -> Tensor:
        hidden = x @ w
        noise = torch.zeros_like(hidden)
        getattr(noise[:, :, 1:4], method)(*args)
        return hidden * noise

    return model


FILLS: dict[str, tuple[Any, ...]] = {
    "bernoulli_": (0.3,),
    "cauchy_": (),
    "exponential_": (),
    "geometric_": (0.3,),
    "log_normal_": (),
    "normal_": (1.0, 2.0),
    "random_": (0, 9),
    "uniform_": (-1.0, 1.0),
}
KINDS = {"": fill, " time-major": fill_time_major, " narrow": fill_narrow, " of a part": fill_part}
FILLED: dict[str, Model] = {
    method + kind: make(method, *args)
    for method, args in FILLS.items()
    for kind, make in KINDS.items()
}

OTHERS: dict[str, Model] = {
    "rand_like": lambda x, w: drop(x @ w) * torch.rand_like(x @ w),
    "rand_like time-major": lambda x, w: (
        drop(x @ w) * torch.rand_like((x @ w).transpose(0, 1)).sum()
    ),
    "randn_like": lambda x, w: drop(x @ w) * torch.randn_like(x @ w),
    "randint_like": lambda x, w: drop(x @ w) * torch.randint_like(x @ w, 2, 9),
    "normal": lambda x, w: torch.normal((x @ w).detach(), 0.5) + drop(x @ w),
    "normal of a deviation": lambda x, w: torch.normal(1.0, (x @ w).detach().abs()) + x @ w,
    "normal of both": lambda x, w: (
        torch.normal((x @ w).detach().transpose(0, 1), x.transpose(0, 1).abs())
        + (x @ w).transpose(0, 1)
    ),
    "bernoulli": lambda x, w: torch.bernoulli((x @ w).detach().sigmoid()) * (x @ w),
    "bernoulli time-major": lambda x, w: (
        torch.bernoulli((x @ w).detach().sigmoid().transpose(0, 1)) * (x @ w).transpose(0, 1)
    ),
    "bernoulli of p, time-major": lambda x, w: (
        torch.bernoulli((x @ w).detach().transpose(0, 1), 0.3) * (x @ w).transpose(0, 1)
    ),
    "bernoulli_ of chances": lambda x, w: (
        torch.empty_like(x).bernoulli_((x @ w).detach().sigmoid()) * (x @ w)
    ),
    "bernoulli_ of chances, time-major": lambda x, w: (
        torch.empty_like((x * 1).transpose(0, 1)).bernoulli_(
            (x @ w).detach().sigmoid().transpose(0, 1)
        )
        * (x @ w).transpose(0, 1)
    ),
    "bernoulli of p": lambda x, w: torch.bernoulli((x @ w).detach(), 0.3) * (x @ w),
    "multinomial": lambda x, w: (x @ w)[:, 0].gather(
        1, torch.multinomial((x @ w)[:, 0].detach().softmax(1), 3)
    ),
    "multinomial of one": lambda x, w: (x @ w)[:, 0].gather(
        1, torch.multinomial((x @ w)[:, 0].detach().softmax(1), 1)
    ),
    "multinomial with replacement": lambda x, w: (x @ w)[:, 0].gather(
        1, torch.multinomial((x @ w)[:, 0].detach().softmax(1), 5, replacement=True)
    ),
    "poisson": lambda x, w: torch.poisson((x @ w).detach().abs()) * (x @ w),
    "poisson with a gradient": lambda x, w: torch.poisson((x @ w).abs()) * (x @ w),
    "rrelu": lambda x, w: F.rrelu(x @ w, training=True),
    "rrelu time-major": lambda x, w: F.rrelu((x @ w).transpose(0, 1), training=True),
    "gumbel_softmax": lambda x, w: F.gumbel_softmax(x @ w),
    "a mask for all rows": lambda x, w: (x @ w) * drop(torch.ones(6, dtype=F64)),
    "a mask of the weights": lambda x, w: x @ drop(w),
    "a mask for each row": lambda x, w: (x @ w) * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7),
    "a mask of a mean": lambda x, w: (x @ w) * drop((x @ w).mean(0)),
    "attention, heads before rows": time_major_attention,
}


def layer(make: Callable[[], nn.Module], call: Callable[[Any, Tensor], Tensor]) -> Model:
    """A layer of torch on x, its weights from the seed; the gradients of all are compared."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        module = make().double()
        out = call(module, x @ w)
        for parameter in module.parameters():
            KEPT.append(parameter)
        return out

    return model


KEPT: list[Tensor] = []


def attend(x: Tensor, **options: Any) -> Tensor:
    q = x.view(-1, 4, 3, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3, **options)


def attend_with(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(6, 3, dropout=0.3, **options)


def encode(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(6, 3, 8, dropout=0.3, **options)


def decode(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerDecoderLayer(6, 3, 8, dropout=0.3, **options)


def recur(kind: type[nn.Module], n: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(6, 5, num_layers=n, dropout=0.4, **options)


def time_major(call: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda module, x: call(module, x.transpose(0, 1))


def with_ends(module: Any, x: Tensor) -> Tensor:
    out, (hidden, cell) = module(x)
    return out + (hidden * cell).sum(0).unsqueeze(1)


LAYERS: dict[str, Model] = {
    "attention": lambda x, w: attend(x @ w),
    "attention, causal": lambda x, w: attend(x @ w, is_causal=True),
    "attention of float32": lambda x, w: attend((x @ w).float()).double(),
    "attention of one head": lambda x, w: F.scaled_dot_product_attention(
        x @ w, x, x, dropout_p=0.3
    ),
    "MultiheadAttention": layer(
        attend_with(batch_first=True), lambda m, x: m(x, x, x, need_weights=False)[0]
    ),
    "MultiheadAttention with weights": layer(
        attend_with(batch_first=True), lambda m, x: m(x, x, x)[0]
    ),
    "MultiheadAttention, time-major": layer(
        attend_with(), time_major(lambda m, x: m(x, x, x, need_weights=False)[0])
    ),
    "MultiheadAttention with weights, time-major": layer(
        attend_with(), time_major(lambda m, x: m(x, x, x)[0])
    ),
    "TransformerEncoderLayer": layer(encode(batch_first=True), lambda m, x: m(x)),
    "TransformerEncoderLayer, time-major": layer(encode(), time_major(lambda m, x: m(x))),
    "TransformerDecoderLayer": layer(decode(batch_first=True), lambda m, x: m(x, x * 2)),
    "TransformerDecoderLayer, time-major": layer(decode(), time_major(lambda m, x: m(x, x * 2))),
    "LSTM": layer(recur(nn.LSTM, 2, batch_first=True), lambda m, x: m(x)[0]),
    "LSTM, time-major": layer(recur(nn.LSTM, 2), time_major(lambda m, x: m(x)[0])),
    "LSTM of three layers, both ways": layer(
        recur(nn.LSTM, 3, batch_first=True, bidirectional=True), lambda m, x: m(x)[0]
    ),
    "LSTM with a projection": layer(
        recur(nn.LSTM, 2, batch_first=True, proj_size=2), lambda m, x: m(x)[0]
    ),
    "GRU": layer(recur(nn.GRU, 3, batch_first=True), lambda m, x: m(x)[0]),
    "RNN": layer(recur(nn.RNN, 2, batch_first=True), lambda m, x: m(x)[0]),
    "LSTM, what it ends in": layer(recur(nn.LSTM, 3, batch_first=True), with_ends),
    "GRU, what it ends in, both ways, time-major": layer(
        recur(nn.GRU, 2, bidirectional=True), time_major(lambda m, x: m(x)[1].sum(0))
    ),
    "LSTM that drops all": layer(
        lambda: nn.LSTM(6, 5, 2, dropout=1.0, batch_first=True), lambda m, x: m(x)[0]
    ),
    "attention that drops all": lambda x, w: F.scaled_dot_product_attention(
        x @ w, x, x @ w, dropout_p=1.0
    ),
}


@pytest.fixture(autouse=True)
def few_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws as few as those here are gone past as many are elsewhere."""
    monkeypatch.setattr(noise_drawn, "_MANY", 48)


def story_of(model: Model) -> Callable[[Lazy], Any]:
    def story(lazy: Lazy) -> Any:
        KEPT.clear()
        weight = (torch.randn(6, 6, dtype=F64) / 2).requires_grad_()
        x = lazy(torch.randn(ROWS, 4, 6, dtype=F64))
        loss = model(F.dropout(x, 0.1), weight).pow(2).mean()
        loss = loss + F.dropout(x @ weight, 0.5).mean()
        loss.backward()
        return loss, weight.grad, [parameter.grad for parameter in KEPT], torch.rand(2)

    return story


ALL = {**LAYOUTS, **FILLED, **OTHERS, **LAYERS}


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", ALL)
def test_draws_are_eagers(name: str, chunks: int) -> None:
    assert_same_story(story_of(ALL[name]), chunks)


@pytest.mark.parametrize("chunks", [1, 7])
@pytest.mark.parametrize("name", [name for name in ALL if "poisson" not in name])
def test_draws_in_inference_mode_are_eagers(name: str, chunks: int) -> None:
    """There torch takes no composite apart before a dispatch mode sees it."""

    def story(lazy: Lazy) -> Any:
        weight = torch.randn(6, 6, dtype=F64) / 2
        x = lazy(torch.randn(ROWS, 4, 6, dtype=F64))
        with torch.inference_mode():
            out = ALL[name](F.dropout(x, 0.1), weight)
            return out.sum(), (out * out).mean(), torch.rand(2)

    assert_same_story(story, chunks)


@pytest.mark.parametrize("name", ALL)
def test_what_is_drawn_lies_as_eagers(name: str) -> None:
    """Whether view() of it is legal, and in which order it is added up, hangs on that: of the value
    that waits, and of what it becomes."""

    def strides(lazy: Lazy) -> list[tuple[int, ...]]:
        KEPT.clear()
        torch.manual_seed(0)
        weight = (torch.randn(6, 6, dtype=F64) / 2).requires_grad_()
        out = ALL[name](lazy(torch.randn(ROWS, 4, 6, dtype=F64)), weight)
        asked = out.stride()
        if lazy is koila.lazy:
            _core.force(out)
            return [asked, _core.real(out).stride()]
        return [asked, asked]

    wanted = strides(eager)
    with split(1):
        assert strides(koila.lazy) == wanted


@pytest.mark.parametrize("n_rows", [1, 5, 40, 999])
def test_moving_past_memory_with_gaps(n_rows: int) -> None:
    """There normal_() draws number after number, where it draws blocks of sixteen otherwise."""
    drawn, moved = (torch.Generator().manual_seed(3) for _ in range(2))
    given = noise.Noise("normal_", {}, (0.0, 1.0), (n_rows, 3), (6, 2), torch.float32, None, False)
    given.draw(drawn)
    noise_drawn.advance(given, given.n_elements, moved)
    assert torch.equal(drawn.get_state(), moved.get_state())
