# SPDX-License-Identifier: Apache-2.0
"""What hooks of values see while a program runs backward in chunks.

In eager the forward pass is over when the first hook is called: all values have their numbers, the
running statistics are written, and the generator is behind the draws. A step in chunks does this at
its commit. So before a hook is called, it is done as far as the step has got. A hook that would see
anything else than in eager is refused.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from koila import _core
from koila.basics.engine import leaves_behind
from koila.basics.rows import as_new
from koila.memory import offload
from koila.messages.errors import KoilaError
from koila.running import overwritten, unwritten
from koila.running.numbers import Numbers
from koila.staged import aliases, hooks, meta
from koila.staged.facts import Info, name_of_call
from koila.staged.program import Program

if TYPE_CHECKING:
    from koila.running.stages import Stages


class _Now(threading.local):
    def __init__(self) -> None:
        self.steps: list[Stages] = []  # whose hooks this thread is calling


_now = _Now()


def call_hooks(stages: Stages, value: int, gradient: torch.Tensor) -> torch.Tensor:
    """Call the hooks of a value with its gradient, of all rows, and return what they make of it."""
    if not hooks.is_any():
        return gradient
    if not hooks.is_called(value, stages.hooked):
        made = hooks.apply(value, gradient, stages.hooked)
        return offload.get(made, gradient.device)
    stages.tracked.settle()
    values = list(_computed(stages))
    show(stages, Numbers(stages.program, stages.boundary, False, values))
    if stages.leaves is None:
        first = _first_readers(stages.program)
        stages.leaves = [(leaf, reader, _Undelivered(leaf)) for leaf, reader in first]
        _keep_leaves(stages)
    _now.steps.append(stages)
    try:
        with _undelivered(stages, value), hooks.visible(stages.hooked):
            made = hooks.apply(value, gradient, stages.hooked)
    finally:
        _now.steps.pop()
    stages.draws.enter()
    node = stages.program.node_of(value)
    _check(stages, stages.program.n_stages if node is None else node.stage)
    if _core.retained(value) is None:
        stages.hooked.gradients[value] = _offloaded(made)
    return made


#: A gradient with fewer bytes is not offloaded: it would save little memory.
_FEW_BYTES = 2**16
_ID = operator.attrgetter("id")  # of a node


def _offloaded(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy of a gradient that takes no memory of its device; or the gradient itself, if it
    is small or no file can hold it."""
    is_dense = type(gradient) is torch.Tensor and gradient.layout == torch.strided
    is_large = is_dense and gradient.nbytes >= _FEW_BYTES
    if not is_large or not offload.is_worth_it(gradient.device):
        return gradient
    try:
        return offload.put(gradient)
    except MemoryError:
        return gradient


def _computed(stages: Stages) -> Iterator[int]:
    """Yield the values that the user can reach and nobody has read, if the step has computed them
    and keeps them whole."""
    program = stages.program
    for value in program.wanted:
        info, is_whole = Info.of(value), program.is_kept(value)
        if info.result is not None or info.is_uncertain:
            continue
        boundary = stages.boundary.get(value if is_whole else info.base)
        is_kept = boundary is not None and boundary.is_whole
        if is_kept or (not is_whole and Info.of(info.base).real is not None):
            yield value


def show(stages: Stages, numbers: Numbers) -> None:
    """Write the running statistics, set the generators to the state after the forward pass, and let
    lazies show these numbers. Their calls stay on the tape, since the step may be run again."""
    write_statistics(stages)
    stages.draws.leave()
    for value, number, _ in numbers.found:
        shown = number.detach() if number.requires_grad else number
        stages.kept[value] = aliases.Kept(shown, False)
        _core.deliver(value, shown, False)


def _keep_leaves(stages: Stages) -> None:
    """Note the tensors that entered the step, to see whether a hook writes them."""
    watched = _core.notes().get("watched", {})
    for value in stages.program.read_until:
        real = Info.of(value).real if value not in stages.kept else None
        if real is not None and not real.is_inference():
            stages.kept[value] = aliases.Kept(real, value in watched)


def watch(tensor: torch.Tensor) -> None:
    """Note that a hook took x.data of a tensor: writes through it change no version."""
    for kept in (one for stages in _now.steps for one in stages.kept.values()):
        memories = [aliases.memory_of(one) for one in (tensor, kept.tensor)]
        is_same = memories[0] is not None and memories[0] == memories[1]
        if type(tensor) is _core.LazyTensor or is_same:
            kept.watch()


def _check(stages: Stages, stage: int) -> None:
    """Raise if a hook has written a tensor that the backward of this stage, or of one before it,
    may read again: eager's has what it saved."""
    for value, kept in stages.kept.items():
        if stages.program.read_until.get(value, stage + 1) <= stage and kept.is_written():
            node = stages.program.node_of(value)
            what = f"a tensor of shape {list(kept.tensor.shape)}"
            if node is not None:
                what = f"the result of {name_of_call(node.id)} ({_core.node(node.id)[3]})"
            raise KoilaError(
                f"a hook of a value has written {what} in place, which the program may read again "
                "when it goes on backward; write it after backward(), or run it whole: "
                "koila.config(chunks=1)"
            )


# Gradients that eager would have delivered --------------------------------------------------------


class _Undelivered(torch.Tensor):
    """Stands for the `.grad` of a leaf that eager has delivered when a hook is called, and that a
    step in chunks delivers at its end."""

    @staticmethod
    def __new__(cls, leaf: torch.Tensor) -> _Undelivered:
        of_leaf: Any = {"dtype": leaf.dtype, "device": leaf.device, "strides": leaf.stride()}
        made: _Undelivered = torch.Tensor._make_wrapper_subclass(cls, leaf.shape, **of_leaf)
        return made

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        _refuse_gradient()

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        _refuse_gradient()


def _refuse_gradient() -> NoReturn:
    raise KoilaError(
        "a hook of a value uses the .grad of a tensor that only later calls read: in chunks, "
        "backward() writes it at its end; use it after backward(), or in a hook of that tensor "
        "(register_post_accumulate_grad_hook), or run it whole: koila.config(chunks=1)"
    )


@contextlib.contextmanager
def _undelivered(stages: Stages, value: int) -> Iterator[None]:
    """Refuse uses of the `.grad` of leaves in a block that calls the hooks of a value, where eager
    has delivered their gradient: all calls that read them come after the one that made it."""
    node = stages.program.node_of(value)
    after = -1 if node is None else node.id
    late = [(leaf, mark) for leaf, first, mark in stages.leaves or () if first > after]
    before = [leaf.grad for leaf, _ in late]
    for leaf, mark in late:
        leaf.grad = mark
    is_as_left = True
    try:
        yield
    finally:
        for (leaf, mark), gradient in zip(late, before, strict=True):
            is_same = leaf.grad is mark
            is_as_left = is_as_left and is_same
            if is_same:
                leaf.grad = gradient
    if not is_as_left:
        _refuse_gradient()


def _first_readers(program: Program) -> list[tuple[torch.Tensor, int]]:
    """Return the leaves of autograd's graph behind a program, each with the first call through
    which it gets a gradient."""
    first: dict[int, tuple[torch.Tensor, int]] = {}
    for i, node in sorted(program.nodes.items()):
        if not any(map(program.needs_gradient, node.outs)):
            continue
        for value in program.reads(node):
            real = program.info(value).real
            if real is not None and program.is_leaf(value) and program.needs_gradient(value):
                for leaf in [real] if real.is_leaf else leaves_behind([real]):
                    first.setdefault(id(leaf), (leaf, i))
    return list(first.values())


# Statistics ---------------------------------------------------------------------------------------


def write_statistics(stages: Stages) -> None:
    """Write the side effects of the program's calls (running statistics), each of them once, in
    however many runs."""
    program = stages.program
    if not (program.has_effects or stages.tracked.moves):
        return
    done: set[int] = _core.notes().setdefault("effects", set())
    fresh = [n for n in program.moving if n.id not in done]
    written = set[int]().union(*map(program.moved_by, fresh))
    ids = set(map(_ID, fresh))
    unwritten.note_written(ids)
    stages.tracked.write(done)
    with torch.set_grad_enabled(False):
        for value, (real, copy) in stages.scratch.items():
            if value in written:
                as_new(real).copy_(copy)
                _core.refresh_leaf(value)
    watched = _core.notes().get("watched", {})
    for value in written.intersection(watched):  # this write is not the user's
        leaf = program.info(value).real
        watched[value] = None if leaf is None else meta.checksum(leaf)
    overwritten.note_moved(program, written)
    done.update(ids)
