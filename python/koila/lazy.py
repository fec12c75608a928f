# SPDX-License-Identifier: Apache-2.0
"""lazy(): make the tensors of a batch lazy, in any containers."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import functools
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch
import torch.utils.data

from koila import _core, loaders
from koila.patches import install
from koila.recording import flush
from koila.reporting import reports
from koila.running.numbers import settle_outdated
from koila.staged import aliases

_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")
_D = TypeVar("_D")
_F = TypeVar("_F", bound=Callable[..., Any])
_WHOLE = -1
_PART = -2  # returned by rows_dim() if the rows are a part of a dim


_is_off: contextvars.ContextVar[bool] = contextvars.ContextVar("koila.off", default=False)


class _Default(int):
    """The default dim of the rows; with it, tensors that are lazy already stay as they are."""


DIM_0 = _Default(0)


class _State(threading.local):
    is_warned = False  # a call in a worker of a DataLoader was warned of


_state = _State()


class _Off:
    """The result of off(): a block to enter, or a decorator."""

    def __init__(self) -> None:
        self._is_entered = False
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._is_entered = True
        self._before.append(_is_off.get())
        _is_off.set(True)

    def __exit__(self, *error: object) -> None:
        _is_off.set(self._before.pop())

    def __call__(self, func: _F) -> _F:
        self._is_entered = True

        @functools.wraps(func)
        def call(*args: Any, **options: Any) -> Any:
            with off():
                return func(*args, **options)

        return call  # type: ignore[return-value]

    def __del__(self) -> None:
        if not self._is_entered:
            warnings.warn(
                "koila.off() alone changes nothing: write `with koila.off():` before the block",
                stacklevel=2,
            )


def off() -> _Off:
    """Switch koila off for a block, in this context: `lazy` returns its arguments unchanged.

    Warns:
        UserWarning: it is called without `with`, which changes nothing.

    Examples:
        >>> import torch, koila
        >>> with koila.off():
        ...     koila.is_lazy(koila.lazy(torch.ones(2)))
        False
    """
    return _Off()


def _refuse_call(self: torch.Tensor, *args: Any, **options: Any) -> None:
    raise TypeError("LazyTensor: it is a type to check for; koila.lazy(tensor) makes a lazy tensor")


_core.LazyTensor.__init__ = _refuse_call  # type: ignore[assignment]


def is_lazy(obj: object) -> bool:
    """Return whether `obj` is a lazy tensor.

    Examples:
        >>> import torch, koila
        >>> koila.is_lazy(koila.lazy(torch.ones(2)))
        True
    """
    return type(obj) is _core.LazyTensor


def _kind(obj: object) -> str:
    kind = type(obj)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _map(fn: Callable[[torch.Tensor, Any, str], Any], obj: Any, batch: Any, path: str) -> Any:
    """Rebuild `obj` with `fn(tensor, batch, path)` in place of each tensor."""
    if isinstance(obj, torch.Tensor):
        return fn(obj, batch, path)
    if isinstance(obj, Mapping):
        items = {
            key: _map(fn, item, _entry(batch, key), f"{path}[{key!r}]") for key, item in obj.items()
        }
        return _rebuild_mapping(obj, items)
    if isinstance(obj, torch.nn.utils.rnn.PackedSequence):
        raise TypeError(
            f"lazy: {path} is a PackedSequence, whose samples are interleaved; make the padded "
            "tensor lazy and pack that"
        )
    if isinstance(obj, tuple | list) and not isinstance(obj, torch.Size):
        parts = [_map(fn, item, _entry(batch, i), f"{path}[{i}]") for i, item in enumerate(obj)]
        if isinstance(obj, tuple) and hasattr(obj, "_fields"):
            return type(obj)(*parts)
        return parts if type(obj) is list else type(obj)(parts)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        rebuilt = copy.copy(obj)
        for field in dataclasses.fields(obj):
            if not hasattr(obj, field.name):
                continue  # a field with init=False may not be set yet
            item = getattr(obj, field.name)
            value = _map(fn, item, _entry(batch, field.name), f"{path}.{field.name}")
            object.__setattr__(rebuilt, field.name, value)
        return rebuilt
    return obj


def map_tensors(fn: Callable[[torch.Tensor], Any], obj: Any) -> Any:
    """Rebuild `obj`, containers as `lazy` takes them, with `fn(tensor)` in place of each tensor."""
    return _map(lambda tensor, batch, path: fn(tensor), obj, None, "input")


def map_with_dims(fn: Callable[[torch.Tensor, int | None], Any], objs: Any, batch: Any) -> Any:
    """Rebuild `objs`, arguments of `lazy`, with `fn(tensor, dim)` in place of each tensor. `dim` is
    that of the samples, which `batch` gives; None: the tensor has none."""
    batch = (batch,) if len(objs) == 1 and not hasattr(batch, "__index__") else batch

    def call(tensor: torch.Tensor, leaf_batch: Any, path: str) -> Any:
        dim = _dim_of(tensor, leaf_batch, path)
        return fn(tensor, None if dim == _WHOLE else dim)

    return _map(call, objs, batch, "input")


def _entry(batch: Any, key: Any) -> Any:
    """Return the part of `batch` for one entry. A number, or None, applies to all entries."""
    if batch is None or hasattr(batch, "__index__"):
        return batch
    if isinstance(batch, Mapping):
        if key not in batch:
            raise ValueError(f"lazy: batch= has no entry for {key!r}")
        return batch[key]
    if isinstance(batch, tuple | list) and isinstance(key, int):
        if key >= len(batch):
            raise ValueError(
                f"lazy: batch= has {len(batch)} entries, there is none for number {key}"
            )
        return batch[key]
    if dataclasses.is_dataclass(batch):
        return getattr(batch, key)
    raise ValueError(f"lazy: batch= must be ints, None, or structured like the objects: {batch!r}")


def _rebuild_mapping(obj: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(obj) is dict:
        return items
    try:
        rebuilt = copy.copy(obj)
        rebuilt.update(items)  # type: ignore[attr-defined]
    except (TypeError, AttributeError):
        return type(obj)(items)  # type: ignore[call-arg]
    return rebuilt


def _dim_of(tensor: torch.Tensor, batch: Any, path: str) -> int:
    """Return the dim of the rows, or _WHOLE."""
    if batch is None or tensor.dim() == 0:
        return _WHOLE
    if isinstance(batch, bool | torch.Tensor) or not hasattr(batch, "__index__"):
        raise ValueError(f"lazy: batch= for {path} must be an int or None, not {batch!r}")
    dim: int = operator.index(batch)  # numpy's integers too
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"lazy: batch={batch} is not a dim of {path}, which has shape {tuple(tensor.shape)}"
        )
    return dim % tensor.dim()


def _shapes_of(objs: Any) -> list[tuple[int, ...]]:
    """Return the shapes of all tensors with dims in containers."""
    shapes: list[tuple[int, ...]] = []
    map_tensors(lambda one: shapes.append(() if one.is_nested else tuple(one.shape)), objs)
    return [shape for shape in shapes if shape]


def _advice_on_dims(objs: Any) -> str:
    """Say what to give as batch= for the tensors in `objs`, if all have a dim of one size."""
    shapes = _shapes_of(objs)
    sizes = [n for n in (shapes[0] if shapes else ()) if all(n in shape for shape in shapes)]
    if not sizes:
        return (
            "give as many samples of each; if they are in other dims, give the dim of the samples "
            "for each, as batch=(1, 0), or None for a tensor that is the same for all samples"
        )
    dims, n = min((tuple(shape.index(n) for shape in shapes), n) for n in sizes)
    chosen = dims[0] if len(set(dims)) == 1 else dims
    return f"if the batch has {n} samples, write batch={chosen}"


def _plain_rows(objs: tuple[Any, ...], batch: Any) -> tuple[list[int], int] | None:
    """Return the dim of the rows of each object, and their number, if that is the same in all, and
    all are plain tensors with dims; None: they have to be looked through, or are not valid."""
    dims: list[int] = []
    n_rows = -1
    for obj in objs if type(batch) in (int, _Default) else ():
        if type(obj) is not torch.Tensor:
            return None
        n_dims = obj.dim()
        if not -n_dims <= batch < n_dims or n_rows not in (-1, n_here := obj.size(batch)):
            return None
        n_rows = n_here
        dims.append(batch % n_dims)
    return (dims, n_rows) if dims else None


def _as_asked(lazy_tensor: Any, batch: Any, dim: int, path: str) -> torch.Tensor:
    """Return a lazy as it is, if its rows are in dim `dim` already; else its real tensor, which is
    then made lazy anew. Raise a ValueError if it is still to be computed."""
    dim_before = _core.rows_dim(lazy_tensor)
    if isinstance(batch, _Default) or dim_before == dim:
        same: torch.Tensor = lazy_tensor
        return same
    real = _core.real(lazy_tensor)
    if real is not None:
        return real
    was = {_WHOLE: "without samples", _PART: "with its samples in a part of a dim"}
    how = was.get(dim_before, f"with batch={dim_before}")
    raise ValueError(
        f"lazy: {path} is lazy already, {how}, and its graph waits to be run, which batch={batch} "
        "cannot change; give batch= where the batch enters the program, or make its number lazy: "
        f"koila.lazy(copy.deepcopy(x.detach()), batch={batch})"
    )


def _warn_in_worker() -> None:
    worker = torch.utils.data.get_worker_info()
    if worker is not None and worker.id == 0 and not _state.is_warned:  # warn in one worker only
        _state.is_warned = True
        warnings.warn(
            "koila.lazy: called in a worker of a DataLoader, from which tensors come back plain: "
            "what is made of them runs whole; call lazy() on the batch in the training loop",
            stacklevel=3,
        )


def _begin(n_rows: int) -> int:
    """Begin another batch of `n_rows` rows; return its axis."""
    if not _core.is_empty():
        flush.flush_no_grad("lazy() of another batch")
        settle_outdated(is_over=True)
    reports.begin_batch(n_rows)
    return _core.new_axis()


@overload
def lazy(obj: _A, /, *, batch: Any = ...) -> _A: ...
@overload
def lazy(obj: _A, other: _B, /, *, batch: Any = ...) -> tuple[_A, _B]: ...
@overload
def lazy(obj: _A, other: _B, third: _C, /, *, batch: Any = ...) -> tuple[_A, _B, _C]: ...
@overload
def lazy(obj: _A, o: _B, p: _C, q: _D, /, *, batch: Any = ...) -> tuple[_A, _B, _C, _D]: ...
@overload
def lazy(*objs: Any, batch: Any = ...) -> Any: ...
def lazy(*objs: Any, batch: Any = DIM_0) -> Any:
    """Make the tensors in `objs` lazy: calls on them are recorded and run when a value is needed.

    Args:
        objs: tensors, or tuples, lists, dicts, mappings, namedtuples and dataclasses of them,
            nested as you like; other objects pass through. Or one DataLoader, or another iterable
            of batches: then its batches are made lazy.
        batch: the dim of the samples, by default 0: an int for all tensors, or a structure like
            that of `objs` with an int or None for each. A 0-dim tensor, or one marked None, is the
            same for all samples. A tensor that is lazy already stays as it is, unless another dim
            is given: then it is made lazy anew, or refused if it is still to be computed.
            The default for a loader is dim 0, or dim 1 where that is as long as the batch, and None
            for other tensors.

    Returns:
        The same structure with lazy tensors: one object for one argument, else a tuple. If it has a
        tensor twice, it gets the same lazy twice. For a DataLoader a copy of it, of its type.

    Warns:
        UserWarning: `objs` has no tensor, or an int that is a dim of them; or the call is in a
            worker of a DataLoader, from which tensors return as plain ones.

    Raises:
        ValueError: the tensors disagree on the number of samples; `batch` is no dim of a tensor, or
            not the dim of the samples of a lazy that is still to be computed.

    Examples:
        >>> import torch, koila
        >>> x, y = koila.lazy(torch.ones(4, 3), torch.zeros(4), batch=0)
        >>> (x.sum(1) - y).mean().item()
        3.0
    """
    if _is_off.get():
        return objs[0] if len(objs) == 1 else objs
    if len(sys.modules) != install.n_modules_seen:
        install.refresh()
    plain = _plain_rows(objs, batch)
    if plain:
        _warn_in_worker()
        dims, n_rows = plain
        axis = _begin(n_rows)
        found: dict[int, torch.Tensor] = {}  # a tensor that is passed twice becomes one lazy
        for obj, dim in zip(objs, dims, strict=True):
            if id(obj) not in found:
                aliases.note_others(obj)
                found[id(obj)] = _core.input(obj, dim, axis, n_rows)
        made = tuple(map(found.__getitem__, map(id, objs)))
        return made[0] if len(objs) == 1 else made

    whole = objs[0] if len(objs) == 1 else objs
    if loaders.is_loader(whole):
        return loaders.lazy_loader(whole, functools.partial(of_loader, batch=batch))
    rows: dict[str, int] = {}
    n_tensors = 0

    def look(tensor: torch.Tensor, leaf_batch: Any, path: str) -> torch.Tensor:
        nonlocal n_tensors
        n_tensors += 1
        try:
            dim = _dim_of(tensor, leaf_batch, path)
        except ValueError as error:
            raise ValueError(f"{error}; {_advice_on_dims(whole)}") from None
        if dim != _WHOLE:
            rows[path] = tensor.size(dim)  # a nested tensor has no shape
        return tensor

    _map(look, whole, batch, "input")
    ints = [obj for obj in objs if type(obj) is int]
    n_dims = max(map(len, _shapes_of(whole)), default=0) if ints else 0
    ints = [one for one in ints if -n_dims <= one < n_dims]
    if ints:
        warnings.warn(
            f"koila.lazy: {ints[0]} is no tensor and is returned as it is; to name the dim of the "
            f"samples, write batch={ints[0]}",
            stacklevel=2,
        )
    if n_tensors == 0:
        what = ", ".join(map(_kind, objs)) or "nothing"
        warnings.warn(
            f"koila.lazy: no tensor is in what it was given ({what}): it is returned as it is, and "
            "what is made of it runs whole; give it tensors, such as torch.as_tensor(...)",
            stacklevel=2,
        )
        return whole
    _warn_in_worker()
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"{path}: {n}" for path, n in rows.items())
        advice = _advice_on_dims(whole)
        if type(whole) is list and not isinstance(whole[0], torch.Tensor):
            advice = f"a list is one batch; of a list of batches, give iter(batches), or {advice}"
        raise ValueError(f"lazy: the tensors disagree on the batch size ({listed}); {advice}")
    axis = _begin(max(rows.values(), default=0))
    wrapped: dict[tuple[int, int], torch.Tensor] = {}

    def wrap(tensor: torch.Tensor, leaf_batch: Any, path: str) -> torch.Tensor:
        dim = _dim_of(tensor, leaf_batch, path)
        if is_lazy(tensor):
            tensor = _as_asked(tensor, leaf_batch, dim, path)
            if is_lazy(tensor):
                return tensor
        key = id(tensor), dim
        if key not in wrapped:
            aliases.note_others(tensor)
            wrapped[key] = _core.input(tensor, dim, axis, rows.get(path, 0))
        return wrapped[key]

    return _map(wrap, whole, batch, "input")


def _can_be_lazy(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_nested
    return is_plain and tensor.layout == torch.strided


def of_loader(data: Any, n_rows: int | None, batch: Any = DIM_0) -> Any:
    """Make a batch of a loader lazy, as `lazy` does. Tensors that cannot be lazy (sparse ones,
    packed sequences, ...) stay as they are; so does all of `data` if no tensor has rows. `n_rows`:
    the rows of a full batch, if known."""
    if _is_off.get():
        return data
    if not isinstance(batch, _Default):
        return lazy(data, batch=batch)
    found: dict[int, torch.Tensor] = {}

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, _core.LazyTensor) and not tensor.requires_grad:
            tensor = _core.read(tensor)  # of a data set that was drawn while a batch was in use
        if _can_be_lazy(tensor):
            found[id(tensor)] = tensor
        return tensor

    plain = data
    try:
        plain = map_tensors(look, data)
    except TypeError:  # a container that cannot be rebuilt
        found.clear()
    dims = dict(zip(found, loaders.row_dims(found.values(), n_rows), strict=True))
    if all(dim is None for dim in dims.values()):
        loaders.counts.n_plain += 1
        return data
    if len(sys.modules) != install.n_modules_seen:
        install.refresh()
    n_rows = next(found[key].size(dim) for key, dim in dims.items() if dim is not None)
    axis = _begin(n_rows)
    made: dict[int, torch.Tensor] = {}
    for key, tensor in found.items():
        if (dim := dims[key]) is not None:
            aliases.note_others(tensor)
            made[key] = _core.input(tensor, dim, axis, tensor.size(dim))
    loaders.note_batch(axis, n_rows)
    return map_tensors(lambda tensor: made.get(id(tensor), tensor), plain)


def of_draw(noise: torch.Tensor) -> torch.Tensor:
    """Make noise lazy if it has as many rows as the last batch of a loader.

    What is computed from plain noise (a generator's images) would be plain, and a step that begins
    with it would run whole. If the number of rows is equal by chance, no number is wrong.
    """
    axis, n_rows = loaders.last_batch()
    is_like_batch = (
        n_rows > 1
        and _can_be_lazy(noise)
        and not noise.is_meta
        and noise.dim() > 0
        and noise.size(0) == n_rows
        and not noise.requires_grad
        and not torch._C._functorch.is_functorch_wrapped_tensor(noise)
    )
    if not is_like_batch or _is_off.get() or loaders.is_fetching():
        return noise
    aliases.note_others(noise)
    return _core.input(noise, 0, axis, n_rows)
