# SPDX-License-Identifier: Apache-2.0
"""Infer the results of a call that has no row in the op table by running it on meta tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from koila import _core
from koila.basics import counting
from koila.basics.table import Args, Func, Words
from koila.staged.cache import remember

_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, _core.LazyTensor})
_LITERALS: tuple[type, ...] = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis))
_LITERALS += (torch.dtype, torch.layout, torch.memory_format)

_Description = tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None, bool, int]
_Answer = tuple[type | None, tuple[_Description, ...], counting.Held]

_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16}
    | {torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)

#: Functions whose meta kernels report other strides than real ones, also for row-major inputs.
LAID_OUT_OTHERWISE = frozenset(
    "fft_hfft2 fft_hfftn fft_rfft2 fft_rfftn linalg_eig linalg_svd nonzero_static svd".split()
)

_cache: dict[Any, _Answer | None] = {}
_N_CACHED = 65536


class _UnknownError(Exception):
    """The call cannot be run on meta tensors."""


def _describe(tensor: torch.Tensor) -> _Description:
    if type(tensor) not in _PLAIN_TENSORS:
        raise _UnknownError
    if not isinstance(tensor, _core.LazyTensor) and (tensor.is_conj() or tensor.is_neg()):
        raise _UnknownError
    description = _core.describe(tensor)
    if description is None:
        raise _UnknownError
    return description


def key_of(func: Func, args: Args, kwargs: Words) -> Any:
    """Return all that the metadata of a call's results depend on; None: it is not known."""
    try:
        hash(func)
        return func, torch.is_grad_enabled(), torch.get_default_dtype(), _key(args), _key(kwargs)
    except (_UnknownError, TypeError):
        return None


def _key(argument: Any) -> Any:
    if type(argument) in _PLAIN_TENSORS:
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
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None, requires_grad: bool
) -> torch.Tensor:
    """Return a meta tensor of this description; a dense one if `strides` is None."""
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)
    return torch.empty_strided(
        shape, strides, dtype=dtype, device="meta", requires_grad=requires_grad
    )


def stand_in_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the metadata of a tensor, which may be lazy."""
    return stand_in(*_describe(tensor)[:4])


def map_nested(obj: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return nested arguments with `change` applied to each object of type `kind`."""
    if isinstance(obj, kind):
        return change(obj)
    if isinstance(obj, dict):
        return {key: map_nested(one, kind, change) for key, one in obj.items()}
    if isinstance(obj, tuple | list):
        made = [map_nested(one, kind, change) for one in obj]
        if hasattr(obj, "_fields"):
            return type(obj)(*made)
        return made if isinstance(obj, list) else type(obj)(made)
    return obj


def leaves(argument: Any) -> list[Any]:
    """Return the items of an argument that are not tuples, lists or dicts.

    `_pytree` is not used: its nested recursive functions are reference cycles, which keep the
    tensors that they visited alive until the garbage collector runs.
    """
    found: list[Any] = []
    _add_leaves(argument, found)
    return found


def _add_leaves(argument: Any, found: list[Any]) -> None:
    if isinstance(argument, dict):
        argument = list(argument.values())
    if isinstance(argument, tuple | list):
        for item in argument:
            _add_leaves(item, found)
    else:
        found.append(argument)


def tensors(argument: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of an argument."""
    return [leaf for leaf in leaves(argument) if isinstance(leaf, torch.Tensor)]


def _device_of(args: Any) -> int | None:
    """Return the core's number of the one device of all tensors with dims; None if they differ.
    Tensors without dims may be on another device, and count only if there are no others. Raise an
    _UnknownError if an argument names a device."""
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


def _read_out(tensor: Any, inputs: set[int], device: int, are_strides_known: bool) -> _Description:
    """Describe a result; `inputs` are the storages of the meta tensors that the call read."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        raise _UnknownError
    if tensor.is_conj() or tensor.is_neg() or tensor.dim() > 8:
        raise _UnknownError
    if tensor.untyped_storage()._cdata in inputs:
        raise _UnknownError  # the result is a view of an input
    if tensor.dtype not in _DTYPES:
        raise _UnknownError
    strides = tensor.stride() if are_strides_known or tensor.dim() == 0 else None
    return (tensor.dtype, tuple(tensor.shape), strides, tensor.requires_grad, device)


def _ask(func: Func, args: Args, kwargs: Words) -> _Answer:
    device = _device_of((args, kwargs))
    if device is None:
        raise _UnknownError
    metas: list[torch.Tensor] = []

    def without_numbers(tensor: torch.Tensor) -> torch.Tensor:
        metas.append(stand_in_of(tensor))
        return metas[-1]

    given = map_nested((args, kwargs), torch.Tensor, without_numbers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result, held = counting.held(lambda: func(*given[0], **given[1]), metas)
    inputs = {tensor.untyped_storage()._cdata for tensor in metas}
    # A test compares the strides that meta kernels report with those of kernels on the CPU, for
    # row-major inputs. For others some kernels choose other strides, or do so for some sizes.
    is_known = device == 0 and all(one.is_contiguous() for one in metas)
    is_known = is_known and getattr(func, "__name__", "") not in LAID_OUT_OTHERWISE
    is_known &= all(_describe(one)[2] is not None for one in tensors((args, kwargs)))
    if isinstance(result, torch.Tensor):
        return None, (_read_out(result, inputs, device, is_known),), held
    if not isinstance(result, tuple | list) or not result:
        raise _UnknownError
    outs = tuple(_read_out(item, inputs, device, is_known) for item in result)
    return type(result), outs, held


def infer(func: Func, args: Args, kwargs: Words | None) -> _Answer | None:
    """Infer the results of a call from its arguments' metadata, and cache the answer.

    Returns:
        None if meta tensors cannot tell: the caller then runs the call at once. Else the type of
        the container that the call returns (None: a single tensor); of each result its dtype,
        shape, strides (None: unknown), requires_grad and device number; and the bytes that the
        call and its backward hold beside operands and results.
    """
    kwargs = kwargs or {}
    if kwargs.get("out") is not None:
        return None
    key = key_of(func, args, kwargs)
    if key is None or key in _cache:
        return _cache.get(key)
    answer: _Answer | None
    try:
        answer = _ask(func, args, kwargs)
    except Exception:
        answer = None  # either the call is illegal or it has no meta kernel: the real call tells
    remember(_cache, key, answer, _N_CACHED)
    return answer


def refusal(
    func: Func, args: Args, kwargs: Words | None, is_illegal: bool
) -> tuple[type[Exception], tuple[Any, ...], None] | None:
    """Return the type and the arguments of the error that torch raises for a call whose sizes or
    dtypes are illegal; None: it is legal. Unless inference has found it illegal (`is_illegal`), it
    is first run on meta tensors.

    The caller raises it while the call is recorded, before any pending call has run. It is the real
    kernel's: a meta kernel's text may differ. So the call runs on real tensors of the same sizes
    and dtypes, once filled with 0 and once with 1. If the two errors differ, or only one is raised,
    the cause is in the numbers, and the call is legal.
    """
    kwargs = kwargs or {}
    if not is_illegal and (_writes(func) or not _is_refused(func, args, kwargs)):
        return None
    of_zeros, of_ones = (_error_of(func, args, kwargs, number) for number in (0, 1))
    if of_zeros is None or of_ones is None or str(of_zeros) != str(of_ones):
        return None
    return type(of_zeros), of_zeros.args, None


def _error_of(func: Func, args: Args, kwargs: Words, number: int) -> Exception | None:
    """Return the error that torch raises if all elements of each lazy tensor are `number`."""

    def filled(lazy: torch.Tensor) -> torch.Tensor:
        return torch.full((), number, dtype=lazy.dtype, device=lazy.device).expand(lazy.shape)

    args, kwargs = map_nested((args, kwargs), _core.LazyTensor, filled)
    # The exit of a torch.no_grad() block would run the pending program.
    with torch.set_grad_enabled(False):
        try:
            func(*args, **kwargs)
        except Exception as error:
            return error.with_traceback(None) if type(error) in _OF_SIZES else None
    return None


def _writes(func: Func) -> bool:
    """Tell whether a call writes an operand: torch refuses to write the expanded tensors of
    `_error_of`, so such a call cannot be checked."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


#: The types of errors that torch raises for illegal sizes and dtypes.
_OF_SIZES = frozenset({RuntimeError, IndexError, ValueError, TypeError})


def _is_refused(func: Func, args: Args, kwargs: Words) -> bool:
    """Tell whether a call raises on meta tensors."""
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
    """Tell whether an index tensor is 0, 1, 2, ... along its first dim, others having size 1."""
    if index.dtype != torch.int64 or index.dim() == 0 or index.numel() != index.shape[0]:
        return False
    flat = index.reshape(-1)
    n = flat.numel()
    if n > 0 and int(flat[-1]) != n - 1:  # answers most calls without the tensor made below
        return False
    return torch.equal(flat, torch.arange(n, device=flat.device))


def size_method(shape: torch.Size) -> Callable[..., Any]:
    """Return `size` of a tensor of this shape, for torch's own errors."""
    return torch.empty(shape, device="meta").size


def draw_like(func: Func, args: Args, kwargs: Words) -> Any:
    """Run randn_like(lazy) or a function like it at once: it reads only the sizes of the tensor.
    Return a lazy tensor of the numbers drawn; or NotImplemented if the strides of `lazy`, and so
    the order in which numbers fill the result, are not known."""
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
    stand_in.untyped_storage().resize_(0)  # as many bytes as the numbers take
    return _core.like(func(stand_in, *rest, **kwargs), lazy)


_AS_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHECKED_AT_ONCE = 2**20  # elements; in blocks, since the copies made of each are large


def checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Return two numbers that change if a tensor is written.

    They are the sum of its elements' bits read as integers, and the same sum weighted by position.
    Integer overflow is harmless, since it is deterministic, and NaNs compare equal this way. For a
    parameter that was gathered from shards, both are computed from this process's shard.
    """
    # The exit of a torch.no_grad() block would run the pending program, which calls this function,
    # and so would a call with a tensor that `unwritten.py` watches.
    with torch.set_grad_enabled(False), torch._C.DisableTorchFunctionSubclass():
        plain = getattr(tensor, "_koila_gathered_of", tensor).detach()
        if plain.is_complex():
            plain = torch.view_as_real(plain.resolve_conj())
        bits = plain.reshape(-1)
        n_together = 8 // bits.element_size() or 1  # elements that are read as one integer
        is_even = bits.numel() % n_together == 0 == bits.storage_offset() % n_together
        is_even = is_even and bits.is_contiguous()  # what was expanded is not
        bits = bits.view(torch.int64 if is_even else _AS_INTS[bits.element_size()])
        sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
        for start in range(0, bits.numel(), _CHECKED_AT_ONCE):
            block = bits[start : start + _CHECKED_AT_ONCE].to(torch.int64)
            stop = start + block.numel()
            places = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=bits.device)
            sums += torch.stack((block.sum(), (block * places).sum()))
    first, second = sums.tolist()
    return first, second
