# SPDX-License-Identifier: Apache-2.0
"""Patches of attributes of tensors: methods that write in place, x.data and x.numpy(), whose writes
torch does not count, attributes that are set to a lazy, and parameters made of one.

Before plain torch writes a tensor, pending calls that read it run, and parts that were cut off keep
a copy of it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from koila import _core
from koila.basics import lines
from koila.basics.threads import in_turn
from koila.messages.errors import KoilaError
from koila.patches import patching
from koila.planning import left_plain
from koila.recording import bridge, parts
from koila.reporting import reports
from koila.running import kept_casts, read_numbers, recomputed
from koila.staged import aliases

#: Methods that change flags of a tensor, and not its numbers.
_NO_WRITES = ("requires_grad_", "detach_")
#: The operators that write: `x += y`.
_OPERATORS = tuple(
    f"__i{name}__" for name in "add sub mul div floordiv mod and or xor lshift rshift".split()
)


def patch() -> None:
    """Make the patches of this file."""
    _patch_data()
    _patch_setters()
    _patch_parameter()
    _patch_writes()


def share(tensor: torch.Tensor) -> None:
    """Watch the memory of a plain tensor for writes that torch does not count."""
    if _core.leaves_of(tensor) or _core.left_numbers(True):
        _watch(tensor)
    parts.watch(tensor)
    recomputed.watch(tensor)


@in_turn
def _watch(tensor: torch.Tensor) -> None:
    if not _core.is_busy():
        parts.watch_here(tensor)


def _patch_writes() -> None:
    """Go before each method of a tensor that writes it."""
    for name, descriptor in vars(torch._C.TensorBase).items():
        is_named = name.endswith("_") and not name.endswith("__")
        if name in _NO_WRITES or not (is_named or name in _OPERATORS):
            continue
        before = functools.partial(bridge.before_plain_write, descriptor)
        patching.replace_in_c(descriptor, before, True)
    item: Any = torch.Tensor.__setitem__
    if not _core.before_set_item(functools.partial(bridge.before_plain_write, item)):
        raise RuntimeError(f"koila cannot go before {item!r} of this torch")
    patching.undo.append(functools.partial(_core.before_set_item, None))
    name = "embedding_renorm_"  # F.embedding(..., max_norm=...) calls it
    patching.replace(torch, name, going_before(getattr(torch, name)))


@patching.wrapper
def going_before(original: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that writes its argument: pending calls read it first, parts keep a copy."""
    if _core.is_busy() or patching.holds_lazy(args):
        return original(*args, **kwargs)
    after = bridge.before_plain_write(original, args[0])
    result = original(*args, **kwargs)
    if after is not None:
        after()
    return result


def _patch_data() -> None:
    """Watch x.data and x.numpy(): writes through them change numbers and no version counter."""
    original: Any = torch._C.TensorBase.data

    def get(self: torch.Tensor) -> Any:
        if type(self) is _core.LazyTensor:  # call it directly, with torch's own getter
            parts.watch_handed_out(self)
            real = _core.real(self)
            if real is not None:
                read_numbers.watch(real)
                share(real)
            return self.__torch_function__(original.__get__, (type(self),), (self,), {})
        share(self)
        kept_casts.note_written((self,))  # most who ask for it write it
        return aliases.noted(original.__get__(self))

    def numpy(self: torch.Tensor, args: tuple[Any, ...], words: dict[str, Any] | None) -> Any:
        array = own_numpy.__get__(self)(*args, **(words or {}))
        shared = getattr(array, "base", None)
        if type(self) is not _core.LazyTensor and isinstance(shared, torch.Tensor):
            share(self)  # the array is no copy: torch counts no write to it
            aliases.noted(shared)
        return array

    own_numpy = patching.replace_in_c(torch._C.TensorBase.numpy, numpy)

    @going_before
    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        original.__set__(tensor, value)

    def is_put(self: torch.Tensor, value: Any) -> bool:
        """Set the data of a lazy's real tensor, and return True, if no pending call reads it."""
        if type(self) is not _core.LazyTensor or _core.is_busy():
            return False
        real = _core.leave(self)
        if real is None or _core.leaves_of(real):
            return False
        original.__set__(real, value)
        _core.release()
        return True

    def put(self: torch.Tensor, value: Any) -> None:
        if type(value) is _core.LazyTensor:
            value = _number_of(value, "data")  # first: it may be computed from `self`
        share(value)
        if not is_put(self, value):
            set_data(self, value)
            aliases.noted(self)

    get.__name__ = "data"  # the name in messages
    patching.replace(torch.Tensor, "data", property(get, put))


def _number_of(lazy: Any, attribute: str) -> Any:
    """Return the number of a lazy, to set it as an attribute of a plain tensor.

    Both then share memory, as in torch. So no call on the lazy, or on others that share this
    memory, is recorded any more.
    """

    def itself(number: torch.Tensor) -> torch.Tensor:
        return number

    with reports.Asking(f".{attribute} ="):
        number = _core.read(lazy)
    if attribute == "data":
        left_plain.note_read(".data =", lazy, number)
    left = number if _core.is_busy() else _core.leave(lazy)
    if left is None:
        itself.__name__ = f".{attribute} ="
        left = _core.live_with_all(itself, (lazy,), {}, True)
    if _core.left_numbers(True) and not _core.is_busy():
        parts.watch_here(left)  # an array of it may be written at any time
    return left


def _patch_setters() -> None:
    """`p.grad = lazy`, `z.real = lazy`: torch looks for __torch_function__ on the tensor whose
    attribute is set, and not on the value."""

    def put_gradient(descriptor: Any, tensor: torch.Tensor, lazy: Any) -> None:
        if lazy.requires_grad:
            _core.live_with_all(descriptor.__set__, (tensor, lazy), {}, True)
        else:
            descriptor.__set__(tensor, _number_of(lazy, "grad"))

    def put_part(descriptor: Any, tensor: torch.Tensor, lazy: Any) -> None:
        descriptor.__get__(tensor).copy_(lazy)

    # Ops by name: attributes that are set.
    for names, put in (("grad", "_grad"), put_gradient), (("real", "imag"), put_part):
        for descriptor in map(vars(torch._C.TensorBase).__getitem__, names):
            patching.replace_in_c(descriptor, functools.partial(put, descriptor))


def _patch_parameter() -> None:
    """A parameter made of a lazy is a plain one: torch looks at the type of `lazy.detach()`."""
    make: Any = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) is _core.LazyTensor:
            data = _number_of(data, "data").detach()
        return make(cls, data, requires_grad)

    patching.replace(torch.nn.Parameter, "__new__", staticmethod(functools.wraps(make)(new)))

    swap: Any = torch.utils.swap_tensors

    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        if patching.holds_lazy((t1, t2)):
            raise KoilaError(
                f"torch.utils.swap_tensors ({lines.user_line()}) cannot swap a lazy tensor, to "
                "which recorded calls refer; swap a plain copy, copy.deepcopy(x.detach())"
            )
        swap(t1, t2)

    patching.replace(torch.utils, "swap_tensors", swap_tensors)
