# SPDX-License-Identifier: Apache-2.0
"""Ask torch itself, on meta tensors, for the shapes and dtypes of a call that has no row."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree

from koila import _core
from koila.basics import counting

_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, _core.LazyTensor})
_LITERALS: tuple[type, ...] = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis))
_LITERALS += (torch.dtype, torch.layout, torch.memory_format)

_Description = tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None, bool, int]
_Out = tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None, bool, int]
_Answer = tuple[type | None, tuple[_Out, ...], counting.Held]

_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16}
    | {torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)

#: What the meta kernel knows in one dtype; the call takes others, and gives what it is given.
_ASKED_IN = {"_grouped_mm": torch.bfloat16}

#: How their results lie meta kernels say otherwise than those that run, also where all that they
#: are given is row-major.
LAID_OUT_OTHERWISE = frozenset(
    "fft_hfft2 fft_hfftn fft_rfft2 fft_rfftn linalg_eig linalg_svd nonzero_static svd".split()
)

_cache: dict[Any, _Answer | None] = {}
_CACHE_MAX = 65536


class _UnknownError(Exception):
    """The call cannot be asked of meta tensors."""


def _describe(tensor: torch.Tensor) -> _Description:
    if type(tensor) not in _PLAIN_TENSORS:
        raise _UnknownError
    if not isinstance(tensor, _core.LazyTensor) and (tensor.is_conj() or tensor.is_neg()):
        raise _UnknownError
    description = _core.describe(tensor)
    if description is None:
        raise _UnknownError
    return description


def _key(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return _describe(argument)
    if isinstance(argument, tuple | list):
        return (type(argument), tuple(_key(item) for item in argument))
    if isinstance(argument, dict):
        return tuple((name, _key(item)) for name, item in argument.items())
    if isinstance(argument, slice):
        return (slice, _key(argument.start), _key(argument.stop), _key(argument.step))
    if isinstance(argument, _LITERALS):
        return (type(argument), repr(argument) if isinstance(argument, float) else argument)
    if isinstance(argument, torch.device):
        return argument
    raise _UnknownError


def stand_in(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    requires_grad: bool,
) -> torch.Tensor:
    """A tensor without memory; dense where the strides are not known."""
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)
    return torch.empty_strided(
        shape, strides, dtype=dtype, device="meta", requires_grad=requires_grad
    )


def _stand_in(argument: Any, met: list[torch.Tensor]) -> Any:
    if isinstance(argument, torch.Tensor):
        dtype, shape, strides, requires_grad, _ = _describe(argument)
        meta = stand_in(dtype, shape, strides, requires_grad)
        met.append(meta)
        return meta
    if isinstance(argument, torch.Size):
        return argument
    if isinstance(argument, tuple | list):
        return type(argument)([_stand_in(item, met) for item in argument])
    if isinstance(argument, dict):
        return {name: _stand_in(item, met) for name, item in argument.items()}
    if isinstance(argument, torch.device):
        return torch.device("meta")
    return argument


def leaves(argument: Any) -> Iterator[Any]:
    """What is no tuple, list or dict in an argument. (A nested function that calls itself, as in
    `_pytree`, is a cycle, which would wait for the collector with all that it has met.)"""
    if isinstance(argument, dict):
        argument = list(argument.values())
    if isinstance(argument, tuple | list):
        for item in argument:
            yield from leaves(item)
    else:
        yield argument


def _device_of(args: Any) -> int | None:
    """The one device of all tensors with dims, as a number of the core; None where they differ."""
    devices: set[int] = set()
    scalars: set[int] = set()
    for leaf in leaves(args):
        if isinstance(leaf, torch.Tensor):
            _, shape, _, _, device = _describe(leaf)
            (devices if shape else scalars).add(device)
        elif isinstance(leaf, torch.device):
            raise _UnknownError
    devices = devices or scalars
    return devices.pop() if len(devices) == 1 else None


def _are_strides_known(name: str, met: list[torch.Tensor], device: int) -> bool:
    """Whether meta kernels say how the results of a call lie: so a test has found of the CPU's, of
    what is row-major. Of other inputs some go another way, or do so for some sizes."""
    is_plain = device == 0 and all(tensor.is_contiguous() for tensor in met)
    return is_plain and name not in LAID_OUT_OTHERWISE


def _read_out(tensor: Any, inputs: set[int], device: int, are_strides_known: bool) -> _Out:
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        raise _UnknownError
    if tensor.is_conj() or tensor.is_neg() or tensor.dim() > 8:
        raise _UnknownError
    if tensor.untyped_storage()._cdata in inputs:
        raise _UnknownError  # it aliases an input: only the real call knows how
    if tensor.dtype not in _DTYPES:
        raise _UnknownError
    strides = tensor.stride() if are_strides_known or tensor.dim() == 0 else None
    return (tensor.dtype, tuple(tensor.shape), strides, tensor.requires_grad, device)


def _ask(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Answer:
    device = _device_of((args, kwargs))
    if device is None:
        raise _UnknownError
    met: list[torch.Tensor] = []
    meta_args = _stand_in(args, met)
    meta_kwargs = _stand_in(kwargs, met)
    given = met[0].dtype if met else None
    asked_in = _ASKED_IN.get(getattr(func, "__name__", ""))
    if asked_in is not None:
        if any(isinstance(item, torch.dtype) for item in (*args, *kwargs.values())):
            raise _UnknownError
        meta_args, meta_kwargs = _pytree.tree_map_only(
            torch.Tensor,
            lambda one: one.to(asked_in) if one.dtype == given else one,
            (meta_args, meta_kwargs),
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result, held = counting.held(lambda: func(*meta_args, **meta_kwargs), met)
    if asked_in is not None:
        result = result.to(given)
    inputs = {tensor.untyped_storage()._cdata for tensor in met}
    tensors = (leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    are_given = all(_describe(tensor)[2] is not None for tensor in tensors)
    is_known = are_given and _are_strides_known(getattr(func, "__name__", ""), met, device)
    if isinstance(result, torch.Tensor):
        return None, (_read_out(result, inputs, device, is_known),), held
    if not isinstance(result, tuple | list) or not result:
        raise _UnknownError
    outs = tuple(_read_out(item, inputs, device, is_known) for item in result)
    return type(result), outs, held


def infer(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> _Answer | None:
    """Infer the results of a call from its arguments' metadata; nothing is computed.

    Returns:
        None where torch cannot tell (the call is then run at once); else the container's type
        (None for a single tensor), for each tensor its dtype, shape, strides where they are known,
        requires_grad and device number, and what the call and its backward take besides.
    """
    kwargs = kwargs or {}
    if kwargs.get("out") is not None:
        return None
    try:
        key = (func, torch.is_grad_enabled(), torch.get_default_dtype(), _key(args), _key(kwargs))
        if key in _cache:
            return _cache[key]
    except (_UnknownError, TypeError):
        return None
    answer: _Answer | None
    try:
        answer = _ask(func, args, kwargs)
    except Exception:
        answer = None  # an illegal call or one meta cannot do: the real call says which
    if len(_cache) >= _CACHE_MAX:
        _cache.clear()
    _cache[key] = answer
    return answer


def refuse(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None, is_illegal: bool
) -> None:
    """Raise what torch raises of a call that sizes and dtypes make illegal: nothing runs for it.

    Where it is not known that they do, meta kernels say. They have words of their own: torch's are
    those of tensors of the same sizes, whose numbers nobody has looked at when they are refused.
    """
    kwargs = kwargs or {}
    if not is_illegal and (_writes(func) or not _is_refused(func, args, kwargs)):
        return
    of_zeros, of_ones = (_error_of(func, args, kwargs, number) for number in (0, 1))
    # What torch says of some numbers alone is not of sizes and dtypes.
    if of_zeros is not None and of_ones is not None and str(of_zeros) == str(of_ones):
        try:
            raise of_zeros
        finally:
            del of_zeros  # its traceback holds this frame


def _error_of(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], number: int
) -> Exception | None:
    """What torch says of sizes and dtypes, where each lazy has one number everywhere."""
    args, kwargs = _filled(args, number), _filled(kwargs, number)
    was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # a block of torch.no_grad() runs what waits at its end
    try:
        func(*args, **kwargs)
    except Exception as error:
        return error.with_traceback(None) if type(error) in _OF_SIZES else None
    finally:
        torch._C._set_grad_enabled(was_enabled)
    return None


def _filled(argument: Any, number: int) -> Any:
    """An argument with tensors of one number for its lazies."""
    if isinstance(argument, _core.LazyTensor):
        full = torch.full((), number, dtype=argument.dtype, device=argument.device)
        return full.expand(argument.shape)
    if isinstance(argument, dict):
        return {name: _filled(item, number) for name, item in argument.items()}
    if type(argument) in (tuple, list):
        return type(argument)([_filled(item, number) for item in argument])
    return argument


def _writes(func: Callable[..., Any]) -> bool:
    """Whether a call writes an operand: here one number stands for all, and torch would refuse."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


#: Of what torch raises, the types of what it says of sizes and dtypes, not of numbers.
_OF_SIZES = frozenset({RuntimeError, IndexError, ValueError, TypeError})


def _is_refused(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch refuses a call on meta tensors."""
    if infer(func, args, kwargs) is not None:
        return False
    try:
        _ask(func, args, kwargs)
    except (_UnknownError, NotImplementedError):
        return False
    except Exception:
        return True
    return False


def is_row_range(index: torch.Tensor) -> bool:
    """Tell whether an index tensor counts 0, 1, 2, ... along its first dim, the others being 1."""
    if index.dtype != torch.int64 or index.dim() == 0 or index.numel() != index.shape[0]:
        return False
    flat = index.reshape(-1)
    n = flat.numel()
    if n > 0 and int(flat[-1]) != n - 1:  # before another is made that is as large
        return False
    return torch.equal(flat, torch.arange(n, device=flat.device))


def draw_like(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw now for randn_like(lazy) and its kin: the tensor is read for its sizes only.

    Returns:
        NotImplemented where the strides, and with them the order of the draws, are not known.
    """
    lazy, *rest = args if args else (kwargs.get("input"),)
    if type(lazy) is not _core.LazyTensor or not args:
        return NotImplemented
    description = _core.describe(lazy)
    if description is None:
        return NotImplemented
    dtype, shape, strides, _, _ = description
    if strides is None:
        return NotImplemented
    stand_in = torch.empty_strided(shape, strides, dtype=dtype, device=lazy.device)
    return _core.like(func(stand_in, *rest, **kwargs), lazy)


_AS_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHECKED_AT_ONCE = 2**20  # elements: a large table shall not be there three times more


def checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Two numbers that a write to a tensor changes: the sum of its bits read as integers, and that
    sum weighted by position. Both overflow, alike each time, and know no NaN. What is gathered of
    shards has those of this process's shard."""
    plain = getattr(tensor, "_koila_gathered_of", tensor).detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    # The end of torch.no_grad runs what waits, which asks for checksums.
    with torch.set_grad_enabled(False):
        bits = plain.reshape(-1).view(_AS_INTS[plain.element_size()])
        sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
        for start in range(0, bits.numel(), _CHECKED_AT_ONCE):
            block = bits[start : start + _CHECKED_AT_ONCE].to(torch.int64)
            stop = start + block.numel()
            places = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=bits.device)
            sums += torch.stack((block.sum(), (block * places).sum()))
    first, second = sums.tolist()
    return first, second
