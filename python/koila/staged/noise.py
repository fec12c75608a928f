# SPDX-License-Identifier: Apache-2.0
"""What random calls draw on the CPU: with which kernel, on what tensor, in which order of memory.

Such a kernel goes through a tensor in the order of its memory and takes number after number from
the generator. So rows that are outermost in memory can be drawn chunk by chunk, each from where the
one before left the generator; others are drawn for the whole batch, once, and cut. normal_() takes
numbers in blocks of sixteen where there are as many: a chunk that ends within one is drawn whole
too. Where torch was built to let a library draw, all depends on one seed: that is found out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from koila import _core
from koila.basics import rows, table
from koila.staged.facts import Info

# As they were before koila patched them: for all others what was recorded draws before they answer.
get_state: Any = torch._C.Generator.get_state
set_state: Any = torch._C.Generator.set_state

SIXTEEN = 16  # normal_() draws so many at once


class Noise(NamedTuple):
    """One tensor of random numbers that a call fills."""

    method: str  # the method of torch.Tensor that fills it
    words: dict[str, Any]
    values: tuple[Any, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    place: rows.Place | None  # where its rows are; None: all rows share it
    follows: bool  # on a chunk it is laid out as the first argument is
    is_known: bool = True  # how it is laid out; else it is taken to lie row by row

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def n_rows(self) -> int:
        assert self.place is not None
        _, dim, outer, inner = self.place
        return self.shape[dim] // (outer * inner)

    @property
    def stored(self) -> torch.dtype:
        """The dtype it is kept in: yes and no need one byte."""
        return torch.bool if self.method == "bernoulli_" and is_serial(self) else self.dtype

    @property
    def n_bytes(self) -> int:
        return self.n_elements * self.stored.itemsize

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        # In torch.Tensor a wrapper may stand there, for the draws of plain calls.
        method = getattr(torch._C.TensorBase, self.method)
        filled: torch.Tensor = method(tensor, *self.values, **self.words, generator=generator)
        return filled

    def draw(
        self, generator: torch.Generator, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """All of it, or a chunk of a shape, laid out as all of it is."""
        strides = self.strides if shape is None else _dense(shape, self.strides)
        return self.fill(
            torch.empty_strided(shape or self.shape, strides, dtype=self.stored, device="cpu"),
            generator,
        )


# What calls draw ----------------------------------------------------------------------------------


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return _dense(shape, range(len(shape), 0, -1))


def _dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, of dims that lie in memory as `order`, other strides, says."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (order[d], -d)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    return torch.empty_strided(shape, strides, device="meta").is_contiguous()


def _like(shape: Sequence[int], strides: Sequence[int] | None) -> tuple[int, ...]:
    """The strides of empty_like()."""
    return _contiguous(shape) if strides is None else rows.strides_like(shape, strides)


def _dropout(call: _Drawn, follows: bool) -> list[Noise]:
    """Of entries, or of features of all entries."""
    (source, *_), shape = call.inputs, call.inputs[0].shape
    if not follows:
        shape = (*shape[:2], *(1 for _ in shape[2:]))
    strides = _like(shape, source.strides) if follows else _contiguous(shape)
    is_known = source.strides is not None or not follows
    values, place = (1 - call.word("p"),), call.out.place
    return [Noise("bernoulli_", {}, values, shape, strides, source.dtype, place, follows, is_known)]


def _fill(method: str, out: Info, values: tuple[Any, ...], words: dict[str, Any]) -> Noise:
    is_known = out.strides is not None
    strides = out.strides or _contiguous(out.shape)
    return Noise(method, words, values, out.shape, strides, out.dtype, out.place, True, is_known)


def _by_chance(source: Info, out: Info, is_in_place: bool) -> Noise:
    """bernoulli() of a tensor: what is compared with its chances, number by number."""
    dtype = torch.float64 if source.dtype == torch.float64 else torch.float32
    strides = _like(out.shape, out.strides)
    is_known = out.strides is not None
    return Noise("uniform_", {}, (), out.shape, strides, dtype, out.place, is_in_place, is_known)


def _multiple(source: Info, out: Info, is_replaced: bool) -> Noise:
    """multinomial(): a number for each sample, or for each of what is drawn from."""
    if is_replaced:
        strides = _contiguous(out.shape)
        return Noise("uniform_", {}, (), out.shape, strides, torch.float64, out.place, False)
    strides = _like(source.shape, source.strides)
    is_known = source.strides is not None
    return Noise(
        "exponential_", {}, (), source.shape, strides, source.dtype, out.place, True, is_known
    )


def _attention(out: Info, query: Info, key: Info, p: float) -> Noise:
    """The weights of attention: a row for each of the queries, a new tensor. Batches that only the
    values have share them."""
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    shape = (*batch, query.shape[-2], key.shape[-2])
    place = out.place
    if place is not None:
        dim = place[1] - (len(out.shape) - len(shape))
        is_theirs = 0 <= dim < len(shape) - 1 and shape[dim] == out.shape[place[1]]
        place = (place[0], dim, *place[2:]) if is_theirs else None
    return Noise("bernoulli_", {}, (1 - p,), shape, _contiguous(shape), out.dtype, place, False)


def _recurrent(source: Info, hidden: Info, args: tuple[Any, ...]) -> list[Noise]:
    """What each layer but the last gives: time-major, of all directions."""
    n_layers, p, _, is_both, is_batch_first = args[4:9]
    time, batch = (1, 0) if is_batch_first else (0, 1)
    n_features = hidden.shape[-1] * (2 if is_both else 1)
    shape = (source.shape[time], source.shape[batch], n_features)
    place = source.place and (source.place[0], 1, *source.place[2:])
    strides = _contiguous(shape)
    noise = Noise("bernoulli_", {}, (1 - p,), shape, strides, source.dtype, place, False)
    return [noise] * (n_layers - 1)


class _Drawn(NamedTuple):
    """A call that draws."""

    row: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Info]
    out: Info

    def word(self, name: str, fallback: Any = None) -> Any:
        return table.bind(table.ROWS[self.row]["call"], self.args, self.kwargs).get(name, fallback)


def _of_fill(call: _Drawn) -> list[Noise]:
    is_by_chance = call.row == "bernoulli_" and None in (*call.args[1:2], *call.kwargs.values())
    if is_by_chance:
        return [_by_chance(call.inputs[1], call.out, True)]
    return [_fill(call.row, call.out, call.args[1:], call.kwargs)]


def _of_like(method: str) -> Callable[[_Drawn], list[Noise]]:
    def of_like(call: _Drawn) -> list[Noise]:
        ends = (call.word("low"), call.word("high"))
        return [_fill(method, call.out, tuple(end for end in ends if end is not None), {})]

    return of_like


def _of_shifted(call: _Drawn) -> list[Noise]:
    std, out = call.word("std", 1.0), call.out
    values = (0.0, std if len(call.inputs) == 1 and std is not None else 1.0)
    strides = _contiguous(out.shape)
    return [Noise("normal_", {}, values, out.shape, strides, out.dtype, out.place, False)]


def _of_chances(call: _Drawn) -> list[Noise]:
    p = call.word("p")
    if p is None:
        return [_by_chance(call.inputs[0], call.out, False)]
    return [_fill("bernoulli_", call.out, (p,), {})._replace(follows=False)]


def _of_samples(call: _Drawn) -> list[Noise]:
    is_replaced = bool(call.word("replacement", False)) and call.word("num_samples") > 1
    return [_multiple(call.inputs[0], call.out, is_replaced)]


def _of_weights(call: _Drawn) -> list[Noise]:
    return [_attention(call.out, call.inputs[0], call.inputs[1], call.word("dropout_p"))]


def _of_layers(call: _Drawn) -> list[Noise] | None:
    return None if call.kwargs else _recurrent(call.inputs[0], call.inputs[1], call.args)


#: By what the cell of a row says.
OF_CELLS: dict[str, Callable[[_Drawn], list[Noise] | None]] = {
    "FILL": _of_fill,
    "UNIFORM": _of_like("uniform_"),
    "NORMAL": _of_like("normal_"),
    "INTEGERS": _of_like("random_"),
    "SHIFTED": _of_shifted,
    "CHANCES": _of_chances,
    "SAMPLES": _of_samples,
    "ENTRIES": functools.partial(_dropout, follows=True),
    "MASK": functools.partial(_dropout, follows=True),
    "FEATURES": functools.partial(_dropout, follows=False),
    "WEIGHTS": _of_weights,
    "LAYERS": _of_layers,
}


def of(i: int, first_out: int) -> list[Noise] | None:
    """What one call draws, in this order; None: only the call itself can say."""
    row = table.ROWS.get(str(_core.node(i)[1]))
    if row is None or row["draws"] is None:
        return None
    _, args, kwargs = _core.call(i)
    inputs = [Info.of(value) for value in _core.node(i)[5] if value >= 0]
    kwargs = {word: given for word, given in kwargs.items() if word != "generator"}
    return OF_CELLS[row["draws"]](_Drawn(row["name"], args, kwargs, inputs, Info.of(first_out)))


def drawn_by(func: Any) -> str | None:
    """What the row of a function says that it draws; None: nothing, or there is no row."""
    row = table.ROWS.get(getattr(func, "__name__", ""))
    return row["draws"] if row is not None else None


# In which order -----------------------------------------------------------------------------------

_serial: dict[tuple[str, torch.dtype], bool] = {}


def is_serial(noise: Noise) -> bool:
    """Whether the kernel takes number after number from the generator, alike for each dtype that
    noise is kept in; else a library draws all from one seed."""
    key = noise.method, noise.dtype
    if key not in _serial:
        kept = torch.bool if noise.method == "bernoulli_" else noise.dtype
        generators = [torch.Generator().manual_seed(1) for _ in range(2)]
        whole = noise.fill(torch.empty(4 * SIXTEEN, dtype=noise.dtype, device="cpu"), generators[0])
        parts = torch.empty(4 * SIXTEEN, dtype=kept, device="cpu")
        for part in parts.split(2 * SIXTEEN):
            noise.fill(part, generators[1])
        states = [generator.get_state() for generator in generators]
        is_same = torch.equal(whole.to(torch.float64), parts.to(torch.float64))
        _serial[key] = is_same and torch.equal(*states)
    return _serial[key]


def _order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    return sorted(dims, key=lambda dim: -strides[dim])


def _is_outermost(noise: Noise) -> bool:
    assert noise.place is not None
    _, dim, outer, _ = noise.place
    return outer == 1 and all(d == dim for d in _order(noise.shape, noise.strides)[:1])


def is_in_order(noise: Noise, sizes: Sequence[int]) -> bool:
    """Whether chunks of so many rows, drawn one after another, have the numbers of the whole."""
    if noise.place is None:
        return True
    if not is_serial(noise) or not _is_outermost(noise):
        return False
    if noise.method != "normal_" or noise.n_elements < SIXTEEN:
        return True
    if not is_contiguous(noise.shape, noise.strides):
        return False  # then it draws one by one
    per_row = noise.n_elements // noise.n_rows
    ends_within = any(size * per_row % SIXTEEN for size in sizes[:-1])
    return not ends_within and sizes[-1] * per_row >= SIXTEEN


def is_eagers(noise: Noise) -> bool:
    """Whether it is known that a chunk has eager's numbers; else its rows lie inside other dims,
    and in which order is not known."""
    return noise.is_known or noise.place is None or _is_outermost(noise)


def is_counted(noise: Noise) -> bool:
    """Whether it is known how many numbers it draws: normal_() draws others where memory has
    gaps."""
    return noise.is_known or noise.method != "normal_" or noise.n_elements < SIXTEEN


def fits(noise: Noise, args: Sequence[Any]) -> bool:
    """Whether a call on a chunk draws in the order in which it draws on the whole."""
    if not noise.follows or not noise.is_known:
        return True
    given: torch.Tensor = args[0]
    if given.is_contiguous() and is_contiguous(noise.shape, noise.strides):
        return True
    strides = _like(given.shape, given.stride())
    is_alike = _order(given.shape, strides) == _order(given.shape, noise.strides)
    return is_alike and noise.method != "normal_"


def is_uncounted(i: int, first_out: int) -> bool:
    """Whether it is not known how many numbers a call draws before it is made."""
    noises = noises_of(i, first_out)
    return noises is not None and not all(map(is_counted, noises))


def noises_of(i: int, first_out: int) -> list[Noise] | None:
    """What a call draws, on the CPU; None: that is not known."""
    known: dict[int, list[Noise] | None] = _core.memo().setdefault("noises", {})
    if i not in known:
        is_cpu = _core.value(first_out)[10].type == "cpu"
        known[i] = of(i, first_out) if is_cpu else None
    return known[i]
