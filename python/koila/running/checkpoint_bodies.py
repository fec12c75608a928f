# SPDX-License-Identifier: Apache-2.0
"""The modules that a checkpoint's function can call, and the tensors that it may write."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from koila import _core
from koila.random import generators, plain
from koila.running import recomputed
from koila.running.module_state import names_in
from koila.staged import aliases
from koila.staged.facts import Info


def words_in(code: types.CodeType) -> set[str]:
    """As `names_in`, with texts, among which are the keywords of calls."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    consts = itertools.chain(
        *(const if isinstance(const, tuple) else (const,) for const in code.co_consts)
    )
    texts = (const for const in consts if isinstance(const, str))
    return set(code.co_names).union(texts, *map(words_in, inner))


def _inside(obj: Any, names: set[str]) -> Iterator[Any]:
    """Yield the objects that an object refers to and that code with these names can reach."""
    if isinstance(obj, dict):
        yield from obj.values()
    elif isinstance(obj, list | tuple | set):
        yield from obj
    elif isinstance(obj, types.FunctionType):
        yield from obj.__defaults__ or ()
        yield from (obj.__kwdefaults__ or {}).values()
        for cell in obj.__closure__ or ():
            with contextlib.suppress(ValueError):  # the cell is still empty
                yield cell.cell_contents
        yield from (obj.__globals__[name] for name in names & obj.__globals__.keys())
    elif isinstance(obj, types.MethodType):
        yield from (obj.__func__, obj.__self__)
    elif isinstance(obj, functools.partial):
        yield from (obj.func, *obj.args, *obj.keywords.values())
    else:
        attributes = getattr(obj, "__dict__", {})
        yield from (attributes[name] for name in names & attributes.keys())
        if isinstance(call := getattr(type(obj), "__call__", None), types.FunctionType):  # noqa: B004
            yield call


class Reached(NamedTuple):
    """What a checkpoint's function can reach: its arguments, and what it is bound to, captures or
    names."""

    modules: list[nn.Module]
    tensors: list[Tensor]  # lazies, and plain ones without a gradient; no buffers of the modules
    words: frozenset[str]  # of functions that are no methods of the modules


def reached_by(objs: Iterable[Any]) -> Reached:
    """Return what functions and their arguments, `objs`, can reach."""
    found = list(_reached_by(objs, set(), 4))
    modules = [one for one in found if isinstance(one, nn.Module)]
    inside = (one for module in modules for one in vars(module).values())
    tensors = {id(one): one for one in (*found, *inside) if isinstance(one, Tensor)}
    return Reached(
        modules,
        [one for one in tensors.values() if _is_lazy(one) or not one.requires_grad],
        frozenset(one for one in found if isinstance(one, str)),
    )


def _reached_by(
    objs: Iterable[Any], names: set[str], depth: int
) -> Iterator[nn.Module | Tensor | str]:
    for obj in objs:
        if isinstance(obj, nn.Module):
            yield from obj.modules()
        elif isinstance(obj, Tensor):
            yield obj
        elif depth > 0 and not isinstance(obj, type | types.ModuleType | str):
            inner, function = names, obj.__func__ if isinstance(obj, types.MethodType) else obj
            if isinstance(function, types.FunctionType):
                inner = names | names_in(function.__code__)
                yield from words_in(function.__code__)
            yield from _reached_by(list(_inside(obj, inner)), inner, depth - 1)


def norm_calling(mean: Tensor) -> nn.Module | None:
    """Return the batch norm module on the Python stack whose running mean this is, or None."""
    frame = sys._getframe(2)
    for _ in range(16):
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, _NormBase) and module.running_mean is mean:
            return module
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def updates(module: nn.Module) -> bool:
    """Return whether it is a module of torch that updates its own buffers when it is called."""
    if not module.training:
        return False
    hooks = module._forward_pre_hooks.values()
    return (
        (isinstance(module, _NormBase) and module.track_running_stats)
        or isinstance(module, _SpectralNorm)
        or any(isinstance(hook, SpectralNorm) for hook in hooks)
    )


def _is_torchs(name: str) -> bool:
    return name.startswith("torch.nn.")


_IN_PLACE = re.compile(r"[a-z0-9]_$")


@functools.cache
def _written_by(kind: type) -> frozenset[str]:
    """Return the names in those methods of a class (forward, and what it names) that may write in
    place: they name a function with a trailing underscore, or store to an item or attribute."""
    names: set[str] = set()
    for method in _methods_of(kind):
        named = names_in(method.__code__)
        if any(map(_IN_PLACE.search, named)) or _STORES & set(method.__code__.co_code[::2]):
            names |= named
    return frozenset(names)


@functools.cache
def _methods_of(kind: type) -> frozenset[types.FunctionType]:
    """Return the methods of a class that are not torch's: forward, and those that it names."""
    seen, left = set(), ["forward"]
    while left:
        method = getattr(kind, left.pop(), None)
        if not isinstance(method, types.FunctionType) or _is_torchs(method.__module__):
            continue
        if method not in seen:
            seen.add(method)
            left.extend(names_in(method.__code__))
    return frozenset(seen)


#: The opcodes of `x[i] = y`, `x[i:j] = y` (its own from CPython 3.12 on) and `x.y = z`. `x[i] += y`
#: and `x.y += z` end with one of them.
_STORES = {dis.opmap.get(name) for name in ("STORE_SUBSCR", "STORE_SLICE", "STORE_ATTR")}


def seems_to_write(module: nn.Module) -> bool:
    """Return whether a method of a user's module names one of its buffers and writes something."""
    is_torchs = isinstance(module, _BatchNorm) or _is_torchs(type(module).__module__)
    if is_torchs or not module._buffers:
        return False
    kind: Any = type(module)
    return not _written_by(kind).isdisjoint(module._buffers)


@functools.cache
def _counted_by(kind: type) -> frozenset[str]:
    """Return the names of attributes that a method of a class sets to a result of operators on
    their own old value, in one statement: `self.n += 1`, `self.tau = max(self.tau * 0.9, 0.1)`."""
    names: set[str] = set()
    for method in _methods_of(kind):
        is_changed: dict[str, bool] = {}  # the attributes that the statement has read so far
        for step in dis.get_instructions(method):
            if step.opname == "LOAD_ATTR":
                is_changed[step.argval] = False
            elif step.opname == "BINARY_OP":
                is_changed = dict.fromkeys(is_changed, True)
            elif step.opname == "STORE_ATTR" and is_changed.get(step.argval):
                names.add(step.argval)
            if step.opname.startswith(("STORE_", "POP_", "RETURN_")):
                is_changed = {}
    return frozenset(names)


def seems_to_count(module: nn.Module) -> bool:
    """Return whether a user's module seems to update a number of its own, such as `self.step`."""
    kind: Any = type(module)
    if _is_torchs(kind.__module__):
        return False
    own = (vars(module).get(name) for name in _counted_by(kind))
    return any(isinstance(one, int | float) and not isinstance(one, bool) for one in own)


def draws(words: Iterable[str]) -> bool:
    """Return whether code with these names and texts seems to call a function that draws random
    numbers; attention draws only with a `dropout_p`."""
    if "dropout_p" in words:
        return True
    return any(plain.draws(word) for word in words if word != "scaled_dot_product_attention")


def seems_to_draw(module: nn.Module) -> bool:
    """Return whether a module seems to draw random numbers: one of torch in which dropout is on, or
    one whose methods name a function that draws."""
    kind: Any = type(module)
    if isinstance(module, _DropoutNd | nn.RReLU):
        return module.training and getattr(module, "p", 1) > 0
    own = {name: value for name, value in vars(module).items() if isinstance(value, int | float)}
    rates = [rate for name, rate in own.items() if "drop" in name]
    if _is_torchs(kind.__module__):
        return module.training and any(rate > 0 for rate in rates)
    named = _words_of(kind)
    is_off = (rates and not any(rates)) or ("training" in named and not module.training)
    return not is_off and draws(named.difference(own, module._modules))


@functools.cache
def _words_of(kind: type) -> frozenset[str]:
    """Return the words in the methods of a class that its forward leads to."""
    return frozenset().union(*(words_in(method.__code__) for method in _methods_of(kind)))


@contextlib.contextmanager
def without_draws() -> Iterator[None]:
    """Raise at the end of a block that records a checkpoint's function if it drew random
    numbers."""
    generators.make_way()  # those before it draw first
    before = generators.states()
    yield
    generators.make_way()
    after = generators.states()
    if after.keys() != before.keys() or not all(map(torch.equal, before.values(), after.values())):
        recomputed.refuse("draws random numbers with preserve_rng_state=False")


def why_left(found: Reached, is_preserving: bool) -> str:
    """Return why a checkpoint's function, which can reach what was `found`, is left to torch, and
    what to do; empty: it is recorded. `is_preserving`: whether preserve_rng_state=True.

    The only buffers it may update are statistics of batch norms with a trained weight: torch's
    second run of the function certainly reaches these.
    """
    hint = "koila needs no checkpoint: call its function directly"
    if not is_preserving and (draws(found.words) or any(map(seems_to_draw, found.modules))):
        return f"preserve_rng_state=False draws other random numbers in backward; {hint}"
    are_known = not any(map(seems_to_write, found.modules)) and all(
        isinstance(module, _BatchNorm)
        and module.running_mean is not None
        and module.weight is not None
        and module.weight.requires_grad
        for module in filter(updates, found.modules)
    )
    if any(map(seems_to_count, found.modules)):
        return f"a module in it updates a number of its own, again in backward; {hint}"
    return "" if are_known else f"a module in it updates a buffer, again in backward; {hint}"


class Guarded(NamedTuple):
    """A buffer of a module, or a tensor that a function can reach, with its version at a moment: of
    a lazy the number of its value."""

    module: nn.Module | None
    name: str
    tensor: Tensor
    version: int | None

    def is_written(self, region: int) -> bool:
        """Return whether it was written in the body of a checkpoint, the last that began."""
        now: Any = self.tensor if self.module is None else self.module._buffers.get(self.name)
        if now is self.tensor and _is_lazy(now):
            return any(_is_written_in(region, one) for one in {self.version, _core.id(now)})
        return now is not self.tensor or aliases.version_of(now) != self.version

    def __str__(self) -> str:
        """Return its name for messages."""
        if self.module is None:
            return f"a tensor of shape {list(self.tensor.shape)} that it has not made"
        return f"{type(self.module).__name__}.{self.name}"


def _is_lazy(tensor: Tensor) -> bool:
    return type(tensor) is _core.LazyTensor


def _version_of(tensor: Tensor) -> int | None:
    return _core.id(tensor) if _is_lazy(tensor) else aliases.version_of(tensor)


def _number_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor of a lazy, if it has one or its number is known."""
    if not _is_lazy(tensor):
        return None
    value = _core.id(tensor)
    if value is None:
        return _core.real(cast("_core.LazyTensor", tensor))
    info = Info.of(value)
    return info.result if info.real is None else info.real


def _is_written_in(region: int, value: int | None) -> bool:
    """Return whether a recorded call of a body, the last that began, writes the memory of a value.
    Calls of bodies in it have larger numbers."""
    written = None if value is None else _core.writer_from(0, value)
    while written is not None and value is not None and written[1] < region:
        written = _core.writer_from(written[0] + 1, value)
    return written is not None


def guarded_in(found: Reached, given: tuple[Any, ...]) -> list[Guarded]:
    """Return what the function of a checkpoint must not write, as it is now: buffers and tensors.

    Left out are lazies that are arguments (`given`), since torch sees that they were written, and
    the batch counts of batch norms, which are updated again after backward. Their statistics are
    too, and stay in this list since they are written without a new version.
    """
    buffers = [
        Guarded(module, name, tensor, _version_of(tensor))
        for module in dict.fromkeys(found.modules)
        for name, tensor in module._buffers.items()
        if tensor is not None and not (isinstance(module, _BatchNorm) and tensor.dim() == 0)
    ]
    arguments = {id(one) for one in given if type(one) is _core.LazyTensor}
    others = [one for one in found.tensors if id(one) not in arguments]
    others += [number for number in map(_number_of, others) if number is not None]
    return [*buffers, *(Guarded(None, "", one, _version_of(one)) for one in others)]
