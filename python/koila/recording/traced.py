# SPDX-License-Identifier: Apache-2.0
"""Record a call without a row as the calls that ATen composes it of.

Those depend on sizes and dtypes alone. So the call is made once on meta tensors, under a dispatch
mode that sees the calls which it makes; these are recorded, now and for calls that are alike. A run
in one chunk equals eager bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from koila.basics import table
from koila.basics.surroundings import Mode
from koila.basics.table import Args, Func, Words
from koila.staged import meta
from koila.staged.cache import remember

#: Ops by name: those whose calls are recorded. Most have no row, and the row of einsum() is for
#: products.
NAMES = frozenset(
    """atleast_1d atleast_2d atleast_3d broadcast_to column_stack cross
    cumulative_trapezoid diff dsplit dstack einsum fft_fft fft_fft2 fft_fftn
    fft_fftshift fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_irfft fft_irfft2
    fft_irfftn fft_rfft fft_rfft2 fft_rfftn fliplr flipud float_power ger hsplit hstack
    inner isclose isfinite isreal linalg_matrix_norm linalg_matrix_power
    linalg_multi_dot linalg_norm linalg_vander linalg_vecdot margin_ranking_loss
    moveaxis movedim nanmean outer row_stack special_ndtr take_along_dim tensor_split
    tensordot tile trapezoid trapz vsplit vstack""".split()
)


class _Ref(NamedTuple):
    """The number of a tensor, in its place among the arguments and results of calls."""

    number: int


class _Call(NamedTuple):
    """A call that ATen makes, with references in place of tensors."""

    func: Func
    args: Any
    kwargs: Any
    made: list[int]  # the numbers of its results


#: Calls, and what the last of them makes for the caller.
_Found = tuple[list[_Call], Any]
_cache: dict[Any, _Found | None] = {}
_N_CACHED = 1024

_C: Any = torch._C
_OWNERS: tuple[Any, ...] = torch, torch.Tensor, _C._linalg


def _sliced(
    x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Record `aten::slice`, which Python has no function for, as an index."""
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


#: The functions of torch for operators of ATen that have other names there. A reshape is a view or
#: a copy by the strides, which may not be known where it is traced: so it is recorded as it is.
_OTHER_NAMES: dict[str, Func] = {
    "slice": _sliced,
    "_to_copy": Tensor.to,
    "view": Tensor.reshape,
    "_unsafe_view": Tensor.reshape,
}


def _function_of(name: str) -> Func:
    """Return the function of torch for an operator of ATen that has a row."""
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    if name not in table.ROWS:
        raise NotImplementedError(name)
    found: Func = next(getattr(owner, name) for owner in _OWNERS if hasattr(owner, name))
    return found


class _Trace(Mode):
    """Notes the calls that are made in a block; `tensors` are those that they read and make."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._tensors = tensors  # kept, so that their ids stay unique
        self._numbers = {id(tensor): i for i, tensor in enumerate(tensors)}

    def refer(self, tensor: Tensor) -> _Ref:
        """Return the number of a tensor, a new one if it has none."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
        return _Ref(self._numbers[id(tensor)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        words = kwargs or {}
        function = _function_of(func.overloadpacket.__name__)
        made = func(*args, **words)
        args, words = meta.map_nested((args, words), Tensor, self.refer)
        numbers = [self.refer(tensor).number for tensor in meta.tensors(made)]
        self.calls.append(_Call(function, args, words, numbers))
        return made


def _trace(func: Func, args: Args, kwargs: Words) -> _Found | None:
    """Return the calls that ATen composes a call of; None: it cannot be made on meta tensors, or
    one of these calls has no row."""
    metas: list[Tensor] = []

    def stand_in(tensor: Tensor) -> Tensor:
        metas.append(meta.stand_in_of(tensor))
        return metas[-1]

    # On inference tensors a mode would see the call itself.
    with torch._C._InferenceMode(False), torch.set_grad_enabled(False):
        given, words = meta.map_nested((args, kwargs), Tensor, stand_in)
        trace = _Trace(metas)
        try:
            with trace:
                made = func(*given, **words)
        except Exception:  # torch raises its own error for the call
            return None
    return trace.calls, meta.map_nested(made, Tensor, trace.refer)


def _filled(value: Any, env: dict[int, Tensor]) -> Any:
    """Return an argument or a result with the tensors that it refers to."""
    kind = type(value)
    if kind is _Ref:
        return env[value.number]
    return kind([_filled(one, env) for one in value]) if kind in (list, tuple) else value


@functools.cache
def _is_cast(name: str) -> bool:
    """Return whether autocast casts the arguments of an operator before ATen composes it."""
    has_kernel = _C._dispatch_has_kernel_for_dispatch_key
    overloads = _C._dispatch_get_all_op_names()
    named = [full for full in overloads if full.partition(".")[0] == f"aten::{name}"]
    return any(has_kernel(one, key) for one in named for key in ("AutocastCPU", "AutocastCUDA"))


def record(func: Func, args: Args, kwargs: Words) -> Any:
    """Record the calls that ATen composes a call of; NotImplemented if these are not known."""
    key = meta.key_of(func, args, kwargs)
    if key is None or (_C._is_any_autocast_enabled() and _is_cast(func.__name__)):
        return NotImplemented
    if key not in _cache:
        remember(_cache, key, _trace(func, args, kwargs), _N_CACHED)
    found = _cache.get(key)
    if found is None:
        return NotImplemented
    calls, result = found
    env = dict(enumerate(meta.tensors((args, kwargs))))
    for call in calls:
        words = {name: _filled(one, env) for name, one in call.kwargs.items()}
        made = call.func(*[_filled(one, env) for one in call.args], **words)
        results = [made] if isinstance(made, Tensor) else meta.tensors(made)
        env.update(zip(call.made, results, strict=True))
    return _filled(result, env)
