# SPDX-License-Identifier: Apache-2.0
"""The parts of this thread that have not run backward yet (`cut.py`), and the writes that they must
notice.

A script that keeps predictions with their graphs has one part for each. A write must not take
longer for that. So each part knows the memory that it depends on, and the others are passed over.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from koila import _core
from koila.basics import surroundings
from koila.basics.table import Func
from koila.recording.cut import Copy, Cut
from koila.running import arrays, visible
from koila.staged import aliases, meta
from koila.staged.facts import Info


class _State(threading.local):
    """The parts of this thread."""

    def __init__(self) -> None:
        self.cuts: weakref.WeakSet[Cut] = weakref.WeakSet()


_state = _State()


def add(cut: Cut) -> None:
    """Note a part that was just cut off."""
    _state.cuts.add(cut)


def that_depend_on(tensors: Iterable[torch.Tensor]) -> list[Cut]:
    """Return the parts that may have read or handed out the memory of one of these tensors."""
    if not _state.cuts:
        return []
    asked = set(map(aliases.memory_of, tensors))
    if None in asked:  # a tensor that has no memory of its own: no part is sure not to read it
        return list(_state.cuts)
    asked.add(None)
    return [cut for cut, memory in _memories() if not memory.isdisjoint(asked)]


def _memories() -> list[tuple[Cut, frozenset[StorageWeakRef | None]]]:
    """Return each part with the memory that it reads or has handed out; none once it has run
    backward. None among it stands for a tensor that has no memory of its own."""
    found = []
    for cut in list(_state.cuts):
        memory = cut.memory
        if memory is None:
            alive, read = cut.alive(), cut.on_tape(_memory_of_leaves) or ()
            handed = [one.memory for one in (*alive, *cut.others)] if alive else ()
            memory = cut.memory = frozenset((*read, *handed))
        if memory:
            found.append((cut, memory))
        else:  # it has run backward, and the script holds what it handed out
            _state.cuts.discard(cut)
    return found


def _memory_of_leaves() -> set[StorageWeakRef | None]:
    """Return the memory of the tensors that entered this thread's tape."""
    reals = {id(real): real for real in _core.reals()}
    return set(map(aliases.memory_of, reals.values()))


@surroundings.in_outside
def before_write(func: Func, given: Any) -> list[tuple[Cut, dict[int, Copy]]]:
    """Copy the arguments of a call that is about to run, where parts read them: the call may write
    them, and the parts read them again in their backward. Return the copies, for `after_write`.

    Weights of a custom autograd function are not copied: it computes their gradient, so it does
    not write them.
    """
    arrays.compare_gone()
    is_custom = isinstance(getattr(func, "__self__", None), type)
    tensors = [t for t in tensors_in(given) if not (is_custom and t.requires_grad and t.is_leaf)]
    return [(cut, cut.copy_what_it_reads(tensors)) for cut in that_depend_on(tensors)]


@surroundings.in_outside
def after_write(kept: list[tuple[Cut, dict[int, Copy]]]) -> None:
    """After the call, keep those copies whose originals it has written."""
    for cut, copies in kept:
        cut.keep_what_it_reads(copies)


def keep_copies(func: Func, tensors: tuple[torch.Tensor, ...]) -> Callable[[], None] | None:
    """Copy tensors that parts read, before they are written. Return what to call after that."""
    if not _state.cuts:
        return None
    kept = [(cut, copies) for cut, copies in before_write(func, tensors) if copies]
    return functools.partial(after_write, kept) if kept else None


def read_later(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return those of the tensors that pending calls with a graph read, or parts."""
    is_pending = _core.pending_bytes(True) > 0
    written = tuple(tensors) if is_pending or _state.cuts else ()
    read = _memory_of_leaves() if is_pending else set()
    read.update(*(cut.memory or () for cut in that_depend_on(written)))
    return tuple(one for one in written if aliases.memory_of(one) in read)


def watch_handed_out(lazy: _core.LazyTensor) -> None:
    """Watch for writes through .data, which torch's version counter misses, if a lazy shares memory
    with a value that a part handed out.

    After such a write, eager's backward uses the written numbers of the saved tensor. The part
    recomputes the value, and gets the old ones.
    """
    visible.watch(lazy)
    value, tensor = _core.id(lazy), _core.real(lazy)
    if value is not None and tensor is None:
        tensor = Info.of(Info.of(value).base).real
    if tensor is not None:
        _watch_roots(tensor)


def _watch_roots(tensor: torch.Tensor) -> None:
    for cut in [cut for cut in _state.cuts if cut.freed]:
        cut.keep_memory_of(tensor)
    cuts = that_depend_on((tensor,))
    roots = [one for cut in cuts for one in (*cut.alive(), *cut.others) if not one.watched]
    memory = aliases.memory_of(tensor) if roots else None
    for one in roots:
        if memory is not None and one.memory == memory:
            one.watch(tensor)


def is_read(tensor: torch.Tensor) -> bool:
    """Return whether pending calls, or parts that have not run backward yet, read this memory."""
    return bool(_core.leaves_of(tensor)) or bool(that_read(tensor))


def that_read(tensor: torch.Tensor) -> dict[Cut, list[int]]:
    """Return the parts that have yet to run backward and read this memory, with leaves in it."""
    found: dict[Cut, list[int]] = {}
    for cut in that_depend_on((tensor,)):
        leaves = cut.on_tape(_core.leaves_of, tensor)
        if leaves:
            found[cut] = leaves
    return found


def watch(tensor: torch.Tensor) -> None:
    """Note that x.data was taken of a tensor: a write through it changes no version. From now on a
    checksum detects such a write to a tensor that a part of this thread reads or handed out, or
    that a hook may read."""
    visible.watch(tensor)
    _watch_roots(tensor)
    for cut in that_depend_on((tensor,)):
        cut.on_tape(watch_here, tensor)


def watch_here(tensor: torch.Tensor) -> None:
    """As `watch`, for the leaves of this thread's current tape, and for the computed numbers that
    pending calls read: after a write they are computed again."""
    watched = _core.notes().setdefault("watched", {})
    for leaf in _core.leaves_of(tensor):
        real = Info.of(leaf).real
        assert real is not None
        if leaf not in watched:
            watched[leaf] = meta.checksum(real)
    left = _core.left_numbers(True)
    memory = aliases.memory_of(tensor) if left else None
    for value, number in left:
        is_same = memory is not None and aliases.memory_of(number) == memory
        if is_same and value not in watched:
            watched[value] = meta.checksum(number)


def tensors_in(given: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among nested arguments, and the real tensors of lazies."""
    for one in meta.tensors(given):
        if type(one) is not _core.LazyTensor:
            yield one
        elif (real := _core.real(one)) is not None:
            yield real
