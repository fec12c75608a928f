# SPDX-License-Identifier: Apache-2.0
"""Describe the random numbers that recorded calls draw on the CPU: kernel, tensor, memory layout.

Torch's CPU kernels fill a tensor in the order of its memory, taking number after number from the
generator. So if the rows of a tensor are outermost in memory, it can be filled chunk by chunk, each
chunk with the generator in the state that the one before left. Any other tensor is filled whole,
once, and then cut into chunks. A tensor of sixteen or more numbers is filled by normal_() in blocks
of sixteen, so it is filled whole too if a chunk would end within a block. In some builds of torch a
library fills a tensor from one seed, not in order: `is_serial` finds that out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from koila import _core
from koila.basics import packing, rows, table
from koila.staged import layouts
from koila.staged.facts import Info

SIXTEEN = 16  # the numbers in a block of normal_()
_LAYERS = 4  # which argument of a recurrent net is the number of its layers


class Noise(NamedTuple):
    """A tensor of random numbers that a call fills, such as the mask of a dropout."""

    method: str  # the method of torch.Tensor that fills it
    words: dict[str, Any]  # its keyword arguments
    values: tuple[Any, ...]  # its positional arguments
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    place: rows.Place | None  # where its rows are; None: all rows share it
    follows: bool  # on a chunk its layout is that of the call's first argument
    is_known: bool = True  # its layout is known; else `strides` are those of a row-major tensor
    #: Of a packed sequence: the keys of its rows and their number (`packing.of_keys`), and the
    #: [steps, rows, features] into which its entries are put. There `place` is where the rows are.
    keys: tuple[torch.Tensor, int] | None = None
    padded: tuple[int, ...] = ()

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
        """The dtype to store it in; zeros and ones need only a byte each."""
        return torch.bool if self.method == "bernoulli_" and is_serial(self) else self.dtype

    @property
    def n_bytes(self) -> int:
        return math.prod(self.padded or self.shape) * self.stored.itemsize

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        # Not from torch.Tensor, whose method koila may have replaced by a wrapper.
        method = getattr(torch._C.TensorBase, self.method)
        filled: torch.Tensor = method(tensor, *self.values, **self.words, generator=generator)
        return filled

    def draw(
        self, generator: torch.Generator, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Draw the whole tensor, or a chunk of shape `shape` with its dims in the same order in
        memory. That of a packed sequence is padded."""
        strides = self.strides if shape is None else rows.dense_strides(shape, self.strides)
        drawn = self.fill(
            torch.empty_strided(shape or self.shape, strides, dtype=self.stored, device="cpu"),
            generator,
        )
        if self.keys is None:
            return drawn
        _, *steps = packing.steps_of(*packing.of_keys(*self.keys))
        n_steps, n_rows, n_features = self.padded
        padded = drawn.new_zeros(n_rows, n_steps, n_features).transpose(0, 1)  # chunks are views
        return padded.index_put_(tuple(steps), drawn)


# What calls draw ----------------------------------------------------------------------------------


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    return torch.empty_strided(shape, strides, device="meta").is_contiguous()


def _like(shape: Sequence[int], strides: Sequence[int] | None) -> tuple[int, ...]:
    """Return the strides of empty_like() of a tensor of this shape; None: they are not known."""
    return rows.dense_strides(shape) if strides is None else rows.strides_like(shape, strides)


def _dropout(call: _Draw, follows: bool) -> list[Noise]:
    """Describe the mask of a dropout: an element for each element (`follows`), or each feature."""
    (source, *_), shape = call.inputs, call.inputs[0].shape
    if not follows:
        shape = (*shape[:2], *(1 for _ in shape[2:]))
    strides = _like(shape, source.strides) if follows else rows.dense_strides(shape)
    is_known = source.strides is not None or not follows
    values, place = (1 - call.word("p"),), call.out.place
    return [Noise("bernoulli_", {}, values, shape, strides, source.dtype, place, follows, is_known)]


def _fill(method: str, out: Info, values: tuple[Any, ...], words: dict[str, Any]) -> Noise:
    """Describe a call that fills its output."""
    is_known = out.strides is not None
    strides = out.strides or rows.dense_strides(out.shape)
    return Noise(method, words, values, out.shape, strides, out.dtype, out.place, True, is_known)


def _bernoulli_of_tensor(source: Info, out: Info, is_in_place: bool) -> Noise:
    """Describe bernoulli() with a tensor of probabilities, compared with uniform numbers."""
    dtype = torch.float64 if source.dtype == torch.float64 else torch.float32
    strides = _like(out.shape, out.strides)
    is_known = out.strides is not None
    return Noise("uniform_", {}, (), out.shape, strides, dtype, out.place, is_in_place, is_known)


def _multinomial(call: _Draw) -> list[Noise]:
    """Describe multinomial(): a number for each sample, or without replacement for each weight."""
    source, out = call.inputs[0], call.out
    if call.word("replacement", False) and call.word("num_samples") > 1:
        strides = rows.dense_strides(out.shape)
        return [Noise("uniform_", {}, (), out.shape, strides, torch.float64, out.place, False)]
    strides = _like(source.shape, source.strides)
    words: Any = source.shape, strides, source.dtype, out.place, True, source.strides is not None
    return [Noise("exponential_", {}, (), *words)]


def _attention(call: _Draw) -> list[Noise]:
    """Describe the dropout mask of attention, a new tensor of the shape of its weights. If only the
    values have a batch dim, the entries of that dim share the mask: it has no rows."""
    (query, key, *_), out = call.inputs, call.out
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    shape = (*batch, query.shape[-2], key.shape[-2])
    place = out.place
    if place is not None:
        dim = place[1] - (len(out.shape) - len(shape))
        is_theirs = 0 <= dim < len(shape) - 1 and shape[dim] == out.shape[place[1]]
        place = (place[0], dim, *place[2:]) if is_theirs else None
    values, strides = (1 - call.word("dropout_p"),), rows.dense_strides(shape)
    return [Noise("bernoulli_", {}, values, shape, strides, out.dtype, place, False)]


def _recurrent(
    source: Info, hidden: Info, words: tuple[Any, ...], keys: tuple[torch.Tensor, int] | None
) -> list[Noise]:
    """Describe the dropout masks of a recurrent net: one for the output of each layer but the last,
    time-major, with all directions.

    `source` is the input, padded; `words` are the arguments from the number of layers on; `keys`
    are those of the rows of a packed sequence, and their number.
    """
    n_layers, p, _, is_both, is_batch_first = words[:5]
    time, batch = (1, 0) if is_batch_first else (0, 1)
    n_features = hidden.shape[-1] * (2 if is_both else 1)
    shape = (source.shape[time], source.shape[batch], n_features)
    place = source.place and (source.place[0], 1, *source.place[2:])
    strides = rows.dense_strides(shape)
    noise = Noise("bernoulli_", {}, (1 - p,), shape, strides, source.dtype, place, False)
    if keys is not None:
        own = int(packing.of_keys(*keys)[0].sum()), n_features
        strides = rows.dense_strides(own)
        noise = noise._replace(shape=own, strides=strides, keys=keys, padded=shape)
    return [noise] * (n_layers - 1)


class _Draw(NamedTuple):
    """A recorded call that draws, with its arguments."""

    row: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Info]
    out: Info

    def word(self, name: str, fallback: Any = None) -> Any:
        """Return the argument of this name."""
        return table.bind(table.ROWS[self.row]["call"], self.args, self.kwargs).get(name, fallback)


def _of_fill(call: _Draw) -> list[Noise]:
    has_tensor = call.row == "bernoulli_" and None in (*call.args[1:2], *call.kwargs.values())
    if has_tensor:
        return [_bernoulli_of_tensor(call.inputs[1], call.out, True)]
    return [_fill(call.row, call.out, call.args[1:], call.kwargs)]


def _of_like(method: str) -> Callable[[_Draw], list[Noise]]:
    def of_like(call: _Draw) -> list[Noise]:
        ends = (call.word("low"), call.word("high"))
        return [_fill(method, call.out, tuple(end for end in ends if end is not None), {})]

    return of_like


def _of_shifted(call: _Draw) -> list[Noise]:
    std, out = call.word("std", 1.0), call.out
    values = (0.0, std if len(call.inputs) == 1 and std is not None else 1.0)
    strides = rows.dense_strides(out.shape)
    return [Noise("normal_", {}, values, out.shape, strides, out.dtype, out.place, False)]


def _of_chances(call: _Draw) -> list[Noise]:
    p = call.word("p")
    if p is None:
        return [_bernoulli_of_tensor(call.inputs[0], call.out, False)]
    return [_fill("bernoulli_", call.out, (p,), {})._replace(follows=False)]


def _of_layers(call: _Draw) -> list[Noise] | None:
    if call.kwargs:
        return None
    words = call.args[_LAYERS:]
    if not call.row.startswith("packed_"):
        return _recurrent(call.inputs[0], call.inputs[1], words, None)
    source, keys, hidden = call.inputs[:3]
    assert keys.real is not None
    return _recurrent(source, hidden, words[1:], (keys.real, call.args[-1]))


#: By the word in the `draws` cell of a row: a function that describes what a call draws.
OF_CELLS: dict[str, Callable[[_Draw], list[Noise] | None]] = {
    "FILL": _of_fill,
    "UNIFORM": _of_like("uniform_"),
    "NORMAL": _of_like("normal_"),
    "INTEGERS": _of_like("random_"),
    "SHIFTED": _of_shifted,
    "CHANCES": _of_chances,
    "SAMPLES": _multinomial,
    "ENTRIES": functools.partial(_dropout, follows=True),
    "MASK": functools.partial(_dropout, follows=True),
    "FEATURES": functools.partial(_dropout, follows=False),
    "WEIGHTS": _attention,
    "LAYERS": _of_layers,
}


def of(i: int, first_out: int) -> list[Noise] | None:
    """Return the tensors that call `i` draws, in order; None: not known before the call has run."""
    row = table.ROWS.get(str(_core.node(i)[1]))
    if row is None or row["draws"] is None:
        return None
    _, args, kwargs = _core.call(i)
    inputs = [layouts.settled(value) for value in _core.node(i)[5] if value >= 0]
    out = layouts.settled(first_out)
    kwargs = {word: argument for word, argument in kwargs.items() if word != "generator"}
    return OF_CELLS[row["draws"]](_Draw(row["name"], args, kwargs, inputs, out))


def drawn_by(func: Any) -> str | None:
    """Return the `draws` cell of a function's row; None: it draws nothing, or has no row."""
    row = table.ROWS.get(getattr(func, "__name__", ""))
    return row["draws"] if row is not None else None


# In which order -----------------------------------------------------------------------------------

_serial: dict[tuple[str, torch.dtype], bool] = {}


def is_serial(noise: Noise) -> bool:
    """Tell whether the kernel takes number after number from the generator, the same ones for the
    dtype that is stored as for that of the call; otherwise a library fills all from one seed.

    The answer is found by drawing once as a whole and once in two parts, and is cached.
    """
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
    """Return the dims of more than one entry, the outermost in memory first."""
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    return sorted(dims, key=lambda dim: -strides[dim])


def _is_outermost(noise: Noise) -> bool:
    """Tell whether its rows are outermost in memory."""
    assert noise.place is not None
    if noise.padded:  # a packed sequence lies step by step
        return False
    _, dim, outer, _ = noise.place
    return outer == 1 and all(d == dim for d in _order(noise.shape, noise.strides)[:1])


def is_in_order(noise: Noise, sizes: Sequence[int]) -> bool:
    """Tell whether chunks of these sizes, drawn one after another, get the numbers of the whole."""
    if noise.place is None:
        return True
    if not is_serial(noise) or not _is_outermost(noise):
        return False
    if noise.method != "normal_" or noise.n_elements < SIXTEEN:
        return True
    if not is_contiguous(noise.shape, noise.strides):
        return False  # with gaps in memory, normal_() does not draw in blocks
    per_row = noise.n_elements // noise.n_rows
    ends_within = any(size * per_row % SIXTEEN for size in sizes[:-1])
    return not ends_within and sizes[-1] * per_row >= SIXTEEN


def _is_ordered(noise: Noise) -> bool:
    """Tell whether it is known in which order the tensor is filled: that of its layout. If the
    layout is not known, all rows must share the numbers, or there must be no other dims."""
    return noise.is_known or noise.place is None or len(_order(noise.shape, noise.strides)) <= 1


def is_counted(noise: Noise) -> bool:
    """Tell whether it is known how many numbers are drawn: for normal_() that depends on whether
    memory has gaps, and so on the layout."""
    return noise.is_known or noise.method != "normal_" or noise.n_elements < SIXTEEN


def fits(noise: Noise, args: Sequence[Any]) -> bool:
    """Tell whether a call with arguments `args`, of a chunk, fills memory in the order in which the
    call on the whole batch does."""
    if not noise.follows or not noise.is_known:
        return True
    source: torch.Tensor = args[0]
    if source.is_contiguous() and is_contiguous(noise.shape, noise.strides):
        return True
    strides = _like(source.shape, source.stride())
    is_alike = _order(source.shape, strides) == _order(source.shape, noise.strides)
    return is_alike and noise.method != "normal_"


def is_uncounted(i: int, first_out: int) -> bool:
    """Tell whether the number of random numbers that a call draws is unknown before it runs."""
    noises = noises_of(i, first_out)
    return noises is not None and not all(map(is_counted, noises))


def is_only_whole(i: int, first_out: int) -> bool:
    """Tell whether chunks of a call may not draw the numbers that eager mode draws, because it is
    not known how memory lies."""
    noises = noises_of(i, first_out)
    return noises is not None and not all(is_counted(one) and _is_ordered(one) for one in noises)


def noises_of(i: int, first_out: int) -> list[Noise] | None:
    """Return the tensors that call `i` draws, cached; None: not known, or not on the CPU."""
    noises: dict[int, list[Noise] | None] = _core.notes().setdefault("noises", {})
    if i not in noises:
        is_cpu = _core.value(first_out)[10].type == "cpu"
        noises[i] = of(i, first_out) if is_cpu else None
    return noises[i]
