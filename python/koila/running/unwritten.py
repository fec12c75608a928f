# SPDX-License-Identifier: Apache-2.0
"""Watch the tensors that a pending call will write: the running statistics of a normalization.

Plain torch would read such a tensor as it was before the call. So while the call is pending, the
`__class__` of the tensor is a subclass whose `__torch_function__` first runs the pending program
and then the plain call. The tensor stays the same object, and gets its own class back when it is
written. Other tensors of the same memory (those of a state dict) are watched too.

    net(koila.lazy(real))           # recorded: net.norm.running_mean will be written
    net(fake)                       # torch.batch_norm(fake, ...) reads it: the write comes first
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from koila import _core
from koila.basics import holders
from koila.staged import meta

_writes: weakref.WeakSet[Write] = weakref.WeakSet()  # of all tapes
_n_writes: dict[int, int] = {}  # id of a tensor -> how many pending calls will write it
_run: Callable[[str], None] | None = None  # runs what is pending on this thread
#: Called with the ids of the watched tensors that a call reads before they are written.
on_read: Callable[[set[int]], None] | None = None
#: Methods and attributes whose result a write does not change.
_NO_NUMBERS = frozenset(
    """device dim dtype element_size get_device grad grad_fn is_complex is_contiguous is_cpu is_cuda
    is_floating_point is_leaf is_meta is_nested is_quantized is_sparse itemsize layout nbytes ndim
    nelement numel requires_grad shape size stride __len__""".split()
)
_WHY = "plain torch, on a tensor that a recorded call is to write"


def begin(run: Callable[[str], None]) -> None:
    """Start watching. `run` runs what is pending when a tensor that it will write is read."""
    global _run
    _run = run


def end() -> None:
    """Stop watching, and give all tensors their own classes back."""
    global _run
    _run = None
    for write in list(_writes):
        write.end()


# Classes ------------------------------------------------------------------------------------------


def _torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run a plain torch call after the pending writes of the tensors it is given."""
    if _core.LazyTensor in types:
        return NotImplemented  # it will be recorded, after the call that writes
    words = kwargs or {}
    is_own = _own.n_blocks > 0 or _core.is_busy()  # as `_is_own`, in the place that runs most often
    if not (is_own or _asks_no_number(func)):
        found = note_read((args, words))
        _make([write for write in _writes if not found or write.writes(found)])
        return func(*args, **words)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **words)


def note_read(given: Any) -> set[int]:
    """Return the ids of the watched tensors among the arguments of a call; call `on_read`."""
    found = _among(given)
    if on_read is not None and found:
        on_read(found)
    return found


class _Own(threading.local):
    n_blocks = 0


_own = _Own()


class reading(contextlib.ContextDecorator):
    """Let this thread read the watched tensors as they are in a block, to run the pending calls."""

    def __enter__(self) -> None:
        _own.n_blocks += 1

    def __exit__(self, *_: Any) -> None:
        _own.n_blocks -= 1


def _is_own() -> bool:
    return _own.n_blocks > 0 or _core.is_busy()


def _asks_no_number(func: Any) -> bool:
    """Return whether a write does not change the result of a call."""
    is_getter = getattr(func, "__name__", "") == "__get__"
    return getattr(func.__self__ if is_getter else func, "__name__", "") in _NO_NUMBERS


@functools.cache
def _watched(kind: type) -> type | None:
    """Return the class of watched tensors whose own class is `kind`. Return None for a class with a
    `__torch_function__` of its own: it is not watched."""
    return subclass_of(kind, _torch_function, _koila_own_class=kind)


def subclass_of(kind: type, function: Callable[..., Any], **members: Any) -> type | None:
    """Return a subclass of a tensor's class with this `__torch_function__` and these members; None:
    the class has one of its own."""
    own = kind.__dict__.get("__torch_function__", torch._C._disabled_torch_function_impl)
    if kind is not torch.Tensor and own is not torch._C._disabled_torch_function_impl:
        return None
    members |= {"__torch_function__": classmethod(function), "__module__": kind.__module__}
    return type(kind)(kind.__name__, (kind,), members)


def _is_watched(obj: Any) -> bool:
    return id(obj) in _n_writes and hasattr(type(obj), "_koila_own_class")


def _among(given: Any) -> set[int]:
    """Return the ids of the watched tensors in the arguments of a call."""
    return set(map(id, filter(_is_watched, meta.leaves(given))))


# Writes -------------------------------------------------------------------------------------------


class Write:
    """A pending call that will write some tensors. Its tape keeps this object until then."""

    def __init__(self, tape: object, tensors: list[torch.Tensor]) -> None:
        self.tape = tape
        self.tensors: list[torch.Tensor] = []
        for tensor in tensors:
            kind = _watched(getattr(type(tensor), "_koila_own_class", type(tensor)))
            if kind is not None:
                self.tensors.append(tensor)
                _n_writes[id(tensor)] = _n_writes.get(id(tensor), 0) + 1
                tensor.__class__ = kind
        _writes.add(self)

    def end(self) -> None:
        """Watch the tensors no longer: the call has run, or never will."""
        while self.tensors:
            tensor = self.tensors.pop()
            _n_writes[id(tensor)] -= 1
            if not _n_writes[id(tensor)]:
                del _n_writes[id(tensor)]
                tensor.__class__ = type(tensor)._koila_own_class  # type: ignore[attr-defined]

    def writes(self, ids: set[int]) -> bool:
        """Return whether the call will write one of the tensors with these ids."""
        return any(id(tensor) in ids for tensor in self.tensors)

    def __del__(self) -> None:
        if self.tensors:
            self.end()


def watch(tape: object, node: int, tensors: list[torch.Tensor]) -> None:
    """Watch tensors that a call, recorded now on this thread's tape as `node`, will write."""
    if _run is None:
        return
    writes: dict[int, Write] = _core.notes().setdefault("unwritten", {})
    writes[node] = Write(tape, [*tensors, *_others_of(tensors)])


def note_written(nodes: set[int] | None = None) -> None:
    """Stop watching for calls of this thread's tape that have run (None: all calls)."""
    writes: dict[int, Write] = _core.notes().get("unwritten", {})
    for node in list(writes) if nodes is None else nodes & writes.keys():
        writes.pop(node).end()


def make(ids: set[int]) -> None:
    """Run the programs that will write tensors with these ids."""
    if _run is not None:
        _make([write for write in _writes if write.writes(ids)])


def make_elsewhere(tensor: torch.Tensor) -> None:
    """Run the programs of other tapes, such as another thread's, that will write a tensor which a
    call on this tape is to read or write: theirs were called first."""
    if _run is not None and not _is_own():
        own = list(map(id, _core.notes().get("unwritten", {}).values()))
        _make([write for write in _writes if id(write) not in own and write.writes({id(tensor)})])


def _make(writes: list[Write]) -> None:
    """Run the programs that these writes belong to."""
    assert _run is not None
    for tape in {id(write.tape): write.tape for write in writes if write.tensors}.values():
        try:
            _core.held(tape, _run, (_WHY,), {})
        finally:  # also if it raised: the next plain call must not run it again
            _core.held(tape, note_written, (), {})


# Functions that do not call __torch_function__ ----------------------------------------------------


def unseen() -> Iterator[tuple[Any, str]]:
    """Yield owner and name of functions that need `written_first`: they do not call a tensor's
    `__torch_function__`, or write other tensors before they read a watched one."""
    yield from ((torch, "tensor"), (torch, "asarray"), (torch.Tensor, "set_"))
    yield from ((torch.utils.dlpack, "to_dlpack"), (torch._C, "_to_dlpack"), (torch.jit, "script"))
    yield from ((torch.nn.Module, "load_state_dict"), (torch.nn.Module, "_apply"))
    yield torch.nn.parallel.DistributedDataParallel, "_sync_buffers"
    names = """all_gather all_reduce all_to_all broadcast gather isend irecv recv reduce scatter
    send reduce_scatter all_gather_into_tensor reduce_scatter_tensor all_to_all_single
    _broadcast_coalesced"""
    for name in names.split():
        if hasattr(torch.distributed, name):
            yield torch.distributed, name


#: Those of them whose arguments are not the tensors that they read.
_READ_OTHERS = ("script", "load_state_dict", "_apply", "_sync_buffers")


def written_first(original: Callable[..., Any], reads_others: bool = False) -> Callable[..., Any]:
    """Return `original`, wrapped so that pending writes of the tensors that it uses run first; all
    writes, if it reads others than its arguments."""
    reads_others = reads_others or getattr(original, "__name__", "") in _READ_OTHERS
    # torch.jit.script looks up names in a caller's frame, `_frames_up` above; this adds a frame.
    code = getattr(original, "__code__", None)
    has_frames = code is not None and "_frames_up" in code.co_varnames

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if _n_writes and not _is_own():
            found = _among((args, kwargs))
            _make([write for write in _writes if reads_others or write.writes(found)])
        if has_frames:
            kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
        return original(*args, **kwargs)

    return patched


# Other tensors of the same memory -----------------------------------------------------------------


class _Others(NamedTuple):
    """The other tensors with the memory of a tensor, found by going through all objects."""

    of: weakref.ref[torch.Tensor]
    n_holders: int  # references to the storage when they were looked for
    found: list[weakref.ref[torch.Tensor]]

    def are_all(self, of: torch.Tensor, n_holders: int) -> bool:
        """Return whether no other tensor can share the memory since then."""
        is_same = self.of() is of and self.n_holders == n_holders
        return is_same and all(ref() is not None for ref in self.found)


_others: dict[int, _Others] = {}  # by id of the tensor
_N_OTHERS = 4096


def _others_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the other tensors that share memory with `tensors`."""
    with torch._C.DisableTorchFunctionSubclass():
        shared = list(filter(holders.is_shared, tensors))
        if not shared:
            return []
        lists = (_others.get(id(tensor)) for tensor in shared)
        if not all(
            others is not None and others.are_all(tensor, holders.n_holders(tensor))
            for tensor, others in zip(shared, lists, strict=True)
        ):
            _look_for(shared)
    found = [ref() for tensor in shared for ref in _others[id(tensor)].found]
    ids = set(map(id, tensors))
    return [one for one in found if one is not None and id(one) not in ids]


def _look_for(tensors: list[torch.Tensor]) -> None:
    """Go through all objects of the garbage collector for tensors with the memory of `tensors`."""
    if len(_others) > _N_OTHERS:
        _others.clear()
    by_storage: dict[int, list[weakref.ref[torch.Tensor]]] = {}
    for tensor in tensors:
        found = by_storage.setdefault(tensor.untyped_storage()._cdata, [])
        _others[id(tensor)] = _Others(weakref.ref(tensor), holders.n_holders(tensor), found)
    for one in gc.get_objects():
        kind = type(one)  # not isinstance(): __class__ may be a property with side effects
        if not issubclass(kind, torch.Tensor) or kind is _core.LazyTensor:
            continue
        try:
            key = one.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):
            continue  # a sparse, opaque or fake tensor has no storage
        if key in by_storage:
            by_storage[key].append(weakref.ref(one))
