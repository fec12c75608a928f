# SPDX-License-Identifier: Apache-2.0
"""What random calls draw on the CPU: with which kernel, on what tensor, in which order of memory.

Such a kernel goes through a tensor in the order of its memory and takes number after number from
the generator. So rows that are outermost in memory can be drawn chunk by chunk, each from where the
one before left the generator; others are drawn for the whole batch, once, and cut. normal_() takes
numbers in blocks of sixteen where there are as many: a chunk that ends within one is drawn whole
too. Where torch was built to let a library draw, all depends on one seed: that is found out.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from koila import _core, rows, table
from koila.program import Info

# As they were before koila patched them: for all others what was recorded draws before they answer.
get_state: Any = torch._C.Generator.get_state
set_state: Any = torch._C.Generator.set_state

_BLOCK = 1 << 16  # elements drawn at a time where only the generator has to move
_MANY = 1 << 9  # elements from which on it is moved without drawing
_SIXTEEN = 16  # normal_() draws so many at once


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


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    return torch.empty_strided(shape, strides, device="meta").is_contiguous()


def _like(shape: Sequence[int], strides: Sequence[int] | None) -> tuple[int, ...]:
    """The strides of empty_like()."""
    return _contiguous(shape) if strides is None else rows.strides_like(shape, strides)


def _info(value: int) -> Info:
    return Info(*_core.value(value))


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
    inputs = [_info(value) for value in _core.node(i)[5] if value >= 0]
    kwargs = {word: given for word, given in kwargs.items() if word != "generator"}
    return OF_CELLS[row["draws"]](_Drawn(row["name"], args, kwargs, inputs, _info(first_out)))


def _draws(func: Any) -> str | None:
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
        whole = noise.fill(
            torch.empty(4 * _SIXTEEN, dtype=noise.dtype, device="cpu"), generators[0]
        )
        parts = torch.empty(4 * _SIXTEEN, dtype=kept, device="cpu")
        for part in parts.split(2 * _SIXTEEN):
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
    if noise.method != "normal_" or noise.n_elements < _SIXTEEN:
        return True
    if not _is_contiguous(noise.shape, noise.strides):
        return False  # then it draws one by one
    per_row = noise.n_elements // noise.n_rows
    ends_within = any(size * per_row % _SIXTEEN for size in sizes[:-1])
    return not ends_within and sizes[-1] * per_row >= _SIXTEEN


def is_eagers(noise: Noise) -> bool:
    """Whether it is known that a chunk has eager's numbers; else its rows lie inside other dims,
    and in which order is not known."""
    return noise.is_known or noise.place is None or _is_outermost(noise)


def is_counted(noise: Noise) -> bool:
    """Whether it is known how many numbers it draws: normal_() draws others where memory has
    gaps."""
    return noise.is_known or noise.method != "normal_" or noise.n_elements < _SIXTEEN


def fits(noise: Noise, args: Sequence[Any]) -> bool:
    """Whether a call on a chunk draws in the order in which it draws on the whole."""
    if not noise.follows or not noise.is_known:
        return True
    given: torch.Tensor = args[0]
    if given.is_contiguous() and _is_contiguous(noise.shape, noise.strides):
        return True
    strides = _like(given.shape, given.stride())
    is_alike = _order(given.shape, strides) == _order(given.shape, noise.strides)
    return is_alike and noise.method != "normal_"


# Drawing ------------------------------------------------------------------------------------------


def _skip(generator: torch.Generator, n_words: int) -> None:
    """Move the generator past so many words, as draws of them would."""
    state = get_state(generator)
    after = _core.skip_words(ctypes.string_at(state.data_ptr(), state.nbytes), n_words)
    set_state(generator, torch.frombuffer(bytearray(after), dtype=torch.uint8))


@functools.lru_cache(maxsize=256)
def _words(method: str, dtype: torch.dtype, values: tuple[Any, ...]) -> int:
    """The words of the generator that each element takes, where draws of all kinds of sizes leave
    it where skipping them does; else 0."""
    noise = Noise(method, {}, values, (1,), (1,), dtype, None, False)
    for n_words in (1, 2):
        for n_elements in (_SIXTEEN, 999, _MANY):
            drawn, moved = (torch.Generator().manual_seed(n_elements) for _ in range(2))
            for generator in (drawn, moved):  # each keeps the second of a pair of normal numbers
                for of in (torch.float32, torch.float64):
                    torch.empty(1, dtype=of, device="cpu").normal_(generator=generator)
            _fill_all(noise, 5 * n_elements, drawn)
            n_filled = 5 * n_elements % _SIXTEEN + _SIXTEEN
            try:
                _skip(moved, n_words * (5 * n_elements - n_filled))
            except ValueError:  # it is another kind of generator
                return 0
            _fill_all(noise, n_filled, moved)
            if not torch.equal(get_state(drawn), get_state(moved)):
                break
        else:
            return n_words
    return 0


def _fill_all(noise: Noise, n_elements: int, generator: torch.Generator) -> None:
    noise.fill(torch.empty(n_elements, dtype=noise.dtype, device="cpu"), generator)


def _skip_most(noise: Noise, n_elements: int, generator: torch.Generator) -> int:
    """Move the generator past most of so many elements, without drawing where that can be; returns
    how many are left to draw: normal_() draws its last block in another way."""
    is_plain = not noise.words and all(isinstance(value, int | float) for value in noise.values)
    if n_elements < _MANY or not is_plain:
        return n_elements
    n_words = _words(noise.method, noise.stored, noise.values)
    if n_words == 0:
        return n_elements
    n_left = n_elements % _SIXTEEN + _SIXTEEN
    _skip(generator, n_words * (n_elements - n_left))
    return n_left


def advance(noise: Noise, n_elements: int, generator: torch.Generator) -> None:
    """Move the generator past so many elements of noise, with next to no memory."""
    if not is_serial(noise):
        _fill_all(noise, n_elements, generator)
        return
    is_strided = noise.method == "normal_" and not _is_contiguous(noise.shape, noise.strides)
    step = 2 if is_strided else 1  # then it draws one by one
    if not is_strided:
        n_elements = _skip_most(noise, n_elements, generator)
    size = min(n_elements, _BLOCK + _SIXTEEN)
    buffer = torch.empty(step * size, dtype=noise.stored, device="cpu")[::step]
    while n_elements > 0:
        n = n_elements if n_elements <= size else _BLOCK
        noise.fill(buffer[:n], generator)
        n_elements -= n


def call_given(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    noises: Sequence[torch.Tensor],
) -> Any:
    """Make a call with noise that was drawn for it."""
    if _draws(func) == "LAYERS" and len(args) == 9:
        return _by_layers(func, args, noises)
    with Given(noises):
        return func(*args, **kwargs)


def _by_layers(
    func: Callable[..., Any], args: tuple[Any, ...], noises: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """A recurrent net, each layer by itself as torch runs it: to be given its noise within one
    call, each of the thousands of calls that it makes would have to be seen."""
    x, hx, params, has_biases, n_layers, p, is_training, is_both, is_batch_first = args
    x = x.transpose(0, 1) if is_batch_first else x
    is_lstm = not isinstance(hx, torch.Tensor)
    states = [state.chunk(n_layers) for state in (hx if is_lstm else (hx,))]
    n_params = len(params) // n_layers
    ends: list[list[torch.Tensor]] = [[] for _ in states]
    for i in range(n_layers):
        given = [of[i] for of in states]
        weights = params[i * n_params : (i + 1) * n_params]
        words = has_biases, 1, 0.0, is_training, is_both, False
        x, *left = func(x, tuple(given) if is_lstm else given[0], weights, *words)
        for end, state in zip(ends, left, strict=True):
            end.append(state)
        if i < len(noises):
            x = x * noises[i].to(x.dtype, copy=True).div_(1 - p)
    return (x.transpose(0, 1) if is_batch_first else x, *map(torch.cat, ends))


class Given(TorchDispatchMode):
    """Calls in it draw nothing: they are given their noise."""

    def __init__(self, noises: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noises = iter(noises)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler at the first call, to keep out of this class."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        words = kwargs or {}
        drawn = _draws(func.overloadpacket)
        if drawn == "FILL":
            noise = next(self.noises)
            is_compared = len(args) > 1 and isinstance(args[1], torch.Tensor)
            return args[0].copy_(noise < args[1] if is_compared else noise)
        if drawn in _DRAWN:
            return _DRAWN[drawn](next(self.noises), *args, **words)
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with self:  # what else would have come here as the calls that it is made of
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **words)
        return func(*args, **words)


def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _take(noise: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return noise.clone()


def _normal(noise: torch.Tensor, mean: Any, std: Any = 1.0, **_: Any) -> torch.Tensor:
    scaled = noise.clone()
    if isinstance(std, torch.Tensor):
        scaled.mul_(std)
    return scaled.add_(mean)


def _take_bernoulli(noise: torch.Tensor, source: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    is_compared = noise.dtype != torch.bool
    return (noise < source if is_compared else noise).to(source.dtype, copy=True)


def _native_dropout(noise: torch.Tensor, source: torch.Tensor, p: float, _: Any) -> Any:
    mask = noise.to(torch.bool, copy=True)
    return source.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


def _multinomial(
    noise: torch.Tensor, source: torch.Tensor, n: int, *_: Any, **__: Any
) -> torch.Tensor:
    chances = source / noise
    return chances.argmax(-1, keepdim=True) if n == 1 else chances.topk(n).indices


_DRAWN: dict[str, Callable[..., Any]] = {
    "UNIFORM": _take,
    "NORMAL": _take,
    "INTEGERS": _take,
    "SHIFTED": _normal,
    "CHANCES": _take_bernoulli,
    "MASK": _native_dropout,
    "SAMPLES": _multinomial,
}
