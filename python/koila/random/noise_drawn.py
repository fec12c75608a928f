# SPDX-License-Identifier: Apache-2.0
"""Skip the draws of noise without drawing them, and run calls with noise that was drawn before."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from koila import _core
from koila.basics import generator_state
from koila.basics.surroundings import Mode
from koila.basics.table import Args, Func, Words
from koila.staged.noise import SIXTEEN, Noise, drawn_by, is_contiguous, is_serial

_BLOCK = 1 << 16  # the elements drawn at a time, if only the generator's state matters
_N_OF_LAYER = 9  # the arguments of torch's recurrent layers over padded rows
_MANY = 1 << 9  # from this many elements on, the generator is advanced without drawing


def _skip(generator: torch.Generator, n_words: int) -> None:
    """Advance the generator by a number of words, as drawing them would."""
    state = generator_state.get(generator)
    after = _core.skip_words(ctypes.string_at(state.data_ptr(), state.nbytes), n_words)
    generator_state.set_to(generator, torch.frombuffer(bytearray(after), dtype=torch.uint8))


@functools.lru_cache(maxsize=256)
def _words(method: str, dtype: torch.dtype, values: tuple[Any, ...]) -> int:
    """Return how many words of the generator an element of noise takes, 1 or 2.

    It is found by trying: for several sizes, drawing must leave the generator in the same state as
    skipping the words does. 0: neither number does.
    """
    noise = Noise(method, {}, values, (1,), (1,), dtype, None, False)
    for n_words in (1, 2):
        for n_elements in (SIXTEEN, 999, _MANY):
            drawn, moved = (torch.Generator().manual_seed(n_elements) for _ in range(2))
            # normal_() draws pairs, of which the generator keeps the second: both start with one.
            for generator in (drawn, moved):
                for of in (torch.float32, torch.float64):
                    torch.empty(1, dtype=of, device="cpu").normal_(generator=generator)
            _fill_all(noise, 5 * n_elements, drawn)
            n_filled = 5 * n_elements % SIXTEEN + SIXTEEN
            try:
                _skip(moved, n_words * (5 * n_elements - n_filled))
            except ValueError:  # this torch has another generator
                return 0
            _fill_all(noise, n_filled, moved)
            if not torch.equal(generator_state.get(drawn), generator_state.get(moved)):
                break
        else:
            return n_words
    return 0


def _fill_all(noise: Noise, n_elements: int, generator: torch.Generator) -> None:
    noise.fill(torch.empty(n_elements, dtype=noise.dtype, device="cpu"), generator)


def _skip_most(noise: Noise, n_elements: int, generator: torch.Generator) -> int:
    """Advance the generator past most of a number of elements without drawing, if possible. Return
    how many are left to draw: normal_() fills its last block in another way."""
    is_plain = not noise.words and all(isinstance(value, int | float) for value in noise.values)
    if n_elements < _MANY or not is_plain:
        return n_elements
    n_words = _words(noise.method, noise.stored, noise.values)
    if n_words == 0:
        return n_elements
    n_left = n_elements % SIXTEEN + SIXTEEN
    _skip(generator, n_words * (n_elements - n_left))
    return n_left


def advance(noise: Noise, n_elements: int, generator: torch.Generator) -> None:
    """Advance the generator past a number of elements of noise, in little memory."""
    if not is_serial(noise):
        _fill_all(noise, n_elements, generator)
        return
    is_strided = noise.method == "normal_" and not is_contiguous(noise.shape, noise.strides)
    step = 2 if is_strided else 1  # with gaps in memory normal_() draws one by one, not in blocks
    if not is_strided:
        n_elements = _skip_most(noise, n_elements, generator)
    size = min(n_elements, _BLOCK + SIXTEEN)
    buffer = torch.empty(step * size, dtype=noise.stored, device="cpu")[::step]
    while n_elements > 0:
        n = n_elements if n_elements <= size else _BLOCK
        noise.fill(buffer[:n], generator)
        n_elements -= n


def call_given(func: Func, args: Args, kwargs: Words, noises: Sequence[torch.Tensor]) -> Any:
    """Run a random call with noise that was drawn for it."""
    if drawn_by(func) == "LAYERS":
        is_packed = len(args) > _N_OF_LAYER  # a layer of recording/packed.py
        return func(*args, noises=noises) if is_packed else _layer(func, args, noises)
    with Given(noises):
        return func(*args, **kwargs)


def _layer(func: Func, args: Args, noises: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run a recurrent net over padded rows with dropout masks drawn before."""
    x, hx, params, has_biases, n_layers, p, is_training, is_both, is_batch_first = args
    words = has_biases, 1, 0.0, is_training, is_both, False

    def run(*args: Any) -> Any:
        return func(*args, *words)

    x = x.transpose(0, 1) if is_batch_first else x
    x, *ends = by_layers(run, x, hx, params, n_layers, p, noises)
    return (x.transpose(0, 1) if is_batch_first else x, *ends)


def by_layers(
    run: Callable[..., Any],
    x: torch.Tensor,
    hx: Any,
    params: Sequence[torch.Tensor],
    n_layers: int,
    p: float,
    noises: Iterable[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Run a recurrent net layer by layer, with dropout masks drawn before: `noises`, one for the
    output of each layer but the last. `run` runs one layer, given its input, states and weights;
    `hx` are the states of all layers, a pair for an LSTM.

    `Given` could do it in one call, but would intercept each of the thousands of ops of that call.
    """
    is_lstm = not isinstance(hx, torch.Tensor)
    states = [state.chunk(n_layers) for state in (hx if is_lstm else (hx,))]
    n_params, masks = len(params) // n_layers, iter(noises)
    ends: list[list[torch.Tensor]] = [[] for _ in states]
    for i in range(n_layers):
        initial = [of[i] for of in states]
        weights = params[i * n_params : (i + 1) * n_params]
        x, *final = run(x, tuple(initial) if is_lstm else initial[0], weights)
        for end, state in zip(ends, final, strict=True):
            end.append(state)
        if i < n_layers - 1:
            x = x * next(masks).to(x.dtype, copy=True).div_(1 - p)
    return (x, *map(torch.cat, ends))


class Given(Mode):
    """A dispatch mode in which random ops return noise that was drawn before, in order."""

    def __init__(self, noises: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.noises = iter(noises)

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        words = kwargs or {}
        drawn = drawn_by(func.overloadpacket)
        if drawn in _DRAWN:
            return _DRAWN[drawn](next(self.noises), *args, **words)
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        if torch.is_inference_mode_enabled() and func.has_kernel_for_dispatch_key(composite):
            # In inference mode a composite op arrives here whole: decompose it, for its random ops.
            with self:
                return func._op_dk(composite, *args, **words)
        return func(*args, **words)


def _fill(noise: torch.Tensor, x: torch.Tensor, p: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    return x.copy_(noise < p if isinstance(p, torch.Tensor) else noise)


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


_DRAWN: dict[str | None, Callable[..., Any]] = {
    "FILL": _fill,
    "UNIFORM": _take,
    "NORMAL": _take,
    "INTEGERS": _take,
    "SHIFTED": _normal,
    "CHANCES": _take_bernoulli,
    "MASK": _native_dropout,
    "SAMPLES": _multinomial,
}
