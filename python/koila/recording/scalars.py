# SPDX-License-Identifier: Apache-2.0
"""Read lazy tensors that are passed where torch takes a number: torch itself would read them."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from typing import Any

import torch

from koila import _core
from koila.basics import config, table
from koila.basics.table import Args, Func, Handler, Words
from koila.running import arrays

LazyTensor = _core.LazyTensor

_NUMBERS = frozenset("int SymInt number float Scalar".split())

#: The dtypes of which a tensor without dims, as an index, selects an entry.
_INTS = frozenset((torch.int8, torch.int16, torch.int32, torch.int64))

#: Ops by name: arguments that are numbers, also as tensors, although schemas do not say so.
_READ_TENSORS = {
    "narrow": "start",
    "repeat_interleave": "repeats",
    "tensor_split": "tensor_indices_or_sections",
}


def _is_number(lazy: Any) -> bool:
    """Return whether torch would use a lazy as a number, without __torch_function__."""
    return type(lazy) is LazyTensor and lazy.dim() == 0 and not lazy.requires_grad


#: What can be such a lazy, or hold one.
_HOLDERS = LazyTensor, tuple, list, slice


def _holds_number(obj: Any) -> bool:
    if isinstance(obj, tuple | list):
        return any(map(_holds_number, obj))
    if isinstance(obj, slice):
        return any(map(_is_number, (obj.start, obj.stop, obj.step)))
    return _is_number(obj)


def _read(obj: Any) -> Any:
    """Return the object with such lazies replaced by their numbers."""
    if isinstance(obj, tuple | list) and _holds_number(obj):
        return [_read(item) for item in obj]
    return _core.read(obj).item() if _is_number(obj) else obj


def _of_array(array: Any, is_saved: bool) -> torch.Tensor:
    """Return the tensor that torch makes of a NumPy array in an index, in memory of its own: the
    user may write the array before the call runs. `is_saved`: eager's autograd saves the index,
    which may be the array itself."""
    shared = torch.from_numpy(array)
    if shared.dtype not in (torch.int64, torch.uint8, torch.bool):
        return shared.to(torch.int64, copy=True)
    if shared.dtype is torch.uint8 or (shared.dtype is torch.bool and config.is_one_chunk()):
        return shared  # the call runs at once
    index = shared.clone()
    if is_saved:
        arrays.note_index(index, shared)
    return index


def _read_index(item: Any, is_saved: bool) -> Any:
    """Return an item of an index with numbers in place of lazies: in a slice, or where x[item] is a
    view since the item is an integer tensor without dims."""
    if isinstance(item, slice) and _holds_number(item):
        return slice(_read(item.start), _read(item.stop), _read(item.step))
    if type(item).__module__ == "numpy" and hasattr(item, "__array__") and item.ndim > 0:
        return _of_array(item, is_saved)
    if isinstance(item, range):  # torch converts it too: x[range(len(y)), y]
        return torch.tensor(list(item), dtype=torch.int64, device="cpu")
    if isinstance(item, list) and not item:
        return torch.tensor([], dtype=torch.int64, device="cpu")
    if not isinstance(item, torch.Tensor) or item.dim() != 0 or item.dtype not in _INTS:
        return item
    return _read(item) if type(item) is LazyTensor else item.item()


def _read_indexing(args: Args) -> tuple[Any, ...]:
    index = args[1]
    items = index if isinstance(index, tuple) else (index,)
    is_saved = torch.is_grad_enabled() and any(
        isinstance(one, torch.Tensor) and one.requires_grad for one in (args[0], *args[2:])
    )
    read = tuple(_read_index(item, is_saved) for item in items)
    if all(a is b for a, b in zip(read, items, strict=True)):
        return args
    return (args[0], read if isinstance(index, tuple) else read[0], *args[2:])


#: Stands for the positions behind those that a schema names.
_BEYOND = -1


@functools.cache
def _number_words(name: str) -> tuple[frozenset[int | str], int]:
    """Return the positions and keywords at which torch's schemas of a name allow a number, and no
    tensor; and how many positions they name. Numbers of a list may also be passed one by one, and
    so beyond them: x.view(2, 3)."""
    kinds: dict[int | str, set[str]] = defaultdict(set)
    n_positions = 0
    for schema in table.schemas(name):
        at = 0
        for argument in schema.arguments:
            text = str(argument.type)
            kind = text.removeprefix("Optional[").removeprefix("List[").rstrip("]")
            kind = "number" if _READ_TENSORS.get(name) == argument.name else kind
            kinds[argument.name].add(kind)
            if not argument.kwarg_only:
                kinds[at].add(kind)
                if at > 0 and "List" in text:
                    kinds[_BEYOND].add("int")
                at += 1
        n_positions = max(n_positions, at)
    numbers = (key for key, found in kinds.items() if found & _NUMBERS and "Tensor" not in found)
    return frozenset(numbers), n_positions


def _read_words(name: str, args: Args, kwargs: Words) -> tuple[tuple[Any, ...], dict[str, Any]]:
    numbers, n_positions = _number_words(name)
    if name in _READ_TENSORS and any(getattr(arg, "dtype", None) is torch.bool for arg in args[1:]):
        return args, kwargs  # torch does not take it for a number here
    places = (at if at < n_positions else _BEYOND for at in range(len(args)))
    return (
        tuple(_read(arg) if at in numbers else arg for at, arg in zip(places, args, strict=True)),
        {word: _read(arg) if word in numbers else arg for word, arg in kwargs.items()},
    )


def instead(name: str, handler: Handler | None) -> Handler:
    """Return the handler of calls of an op that cannot be recorded as they are: it makes the same
    call, which is recorded then, with numbers in place of lazy tensors where torch takes a number;
    if there are none, it calls the op's own handler."""

    def call(func: Func, args: Args, kwargs: Words) -> Any:
        given = (*args, *kwargs.values())
        read, words = args, kwargs  # the arguments, with numbers that were read
        if name in ("__getitem__", "__setitem__"):  # Ops by name: both have an index in brackets
            read = _read_indexing(args)
        else:
            for one in given:
                is_larger = type(one) is LazyTensor and one.dim() > 0
                if isinstance(one, _HOLDERS) and not is_larger and _holds_number(one):
                    read, words = _read_words(name, args, kwargs)
                    break
        is_same = read is args and words is kwargs
        if is_same or all(map(operator.is_, given, (*read, *words.values()))):
            return NotImplemented if handler is None else handler(func, args, kwargs)
        return func(*read, **words)

    return call
