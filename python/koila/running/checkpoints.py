# SPDX-License-Identifier: Apache-2.0
"""torch.utils.checkpoint: its body is recorded once, as a region of the program, whose calls run
again before their backward.

But a body that updates statistics does so in both of torch's runs. Those of batch normalizations
are moved once more when the program has gone back (norms.Again); a body with others, or with a
module that seems to write a buffer of its own, is left to torch, at once. So is one that is not to
draw the same numbers again (preserve_rng_state=False). What a body turns out to write all the same
is refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import handle_torch_function

from koila import _core
from koila.basics import lines, surroundings
from koila.memory import outside
from koila.messages.errors import KoilaError
from koila.planning import explain, planner
from koila.reductions import norms
from koila.running import checkpoint_bodies, recomputed, unwritten
from koila.staged.facts import Node
from koila.staged.program import Program


class _State(threading.local):
    def __init__(self) -> None:
        self.moved: set[int] = set()  # ids of statistics that backward moves once more

    groups: tuple[norms.Group, ...] = ()  # of the bodies that this thread is recording
    around: tuple[int, ...] = ()  # the regions of these, the outermost first
    has_reentrant = False  # this thread has recorded such a body


_state = _State()


def _norm_calling(mean: Tensor) -> nn.Module | None:
    """The batch normalization on the stack whose running mean this is."""
    frame = sys._getframe(2)
    for _ in range(16):
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, _NormBase) and module.running_mean is mean:
            return module
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def _note_read(ids: set[int]) -> None:
    """Plain torch asks for statistics that are still to be written."""
    if any(not ids.isdisjoint(group.moved) for group in _state.groups):
        recomputed.refuse("reads running statistics after it has moved them")


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, *words: Any) -> Any:
    """torch.batch_norm while a body is recorded."""
    args: tuple[Any, ...] = (x, weight, bias, mean, *words)
    if not _state.groups or mean is None or not words[1]:
        return _plain_batch_norm(*args)
    needs = any(one is not None and one.requires_grad for one in (x, weight, bias))
    if not (needs and torch.is_grad_enabled()):
        recomputed.refuse("moves the statistics of a normalization of which no gradient is asked")
    if type(x) is not _core.LazyTensor:  # recorded as well: what backward moves is of the program
        x = _core.input(x, -1, _core.new_axis(), 0)
    module = _norm_calling(mean)
    again = norms.Again(words[2])
    again.groups, again.running = _state.groups, (mean, words[0])
    for group in _state.groups:
        group.moved.update(map(id, again.running))
    _state.moved.update(map(id, again.running))
    counted: Any = None if module is None else module.num_batches_tracked
    again.n_batches = counted
    again.is_mean = module is not None and module.momentum is None
    call: Any = handle_torch_function
    return call(norms.batch_norm, (x,), x, *args[1:6], again, *args[7:])


_torch: Any = torch
_plain_batch_norm: Callable[..., Any] = torch.batch_norm
_n_recording = 0
_numbers, _ends = itertools.count(1), itertools.count(1)


@contextlib.contextmanager
def _region(is_reentrant: bool) -> Iterator[int]:
    """What is recorded is the body of a checkpoint: what autograd keeps of it is made again.
    Without gradients that is nothing, and it belongs to the body around it."""
    if not torch.is_grad_enabled():
        yield 0
        return
    number = 2 * next(_numbers) + is_reentrant
    for group in _state.groups:
        group.regions.add(number)
    before = _core.set_region(number)
    try:
        yield number
    finally:
        _core.set_region(before)


@functools.cache
def _has_modes(kind: type) -> bool:
    """Whether forward asks if it is in training."""
    forward = getattr(kind, "forward", None)
    if not isinstance(forward, types.FunctionType):
        return False
    return "training" in checkpoint_bodies.names_in(forward.__code__)


def _hooks_of(module: nn.Module) -> tuple[int, ...]:
    """The ids of the hooks that a call of a module calls."""
    kinds: Any = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return tuple(key for hooks in kinds for key in hooks)


def _note_modes(region: int, found: list[nn.Module]) -> None:
    """Keep, with the tape, in which mode the modules of a body are, and which hooks they have."""
    modes = [
        (module, module.training if _has_modes(kind) else None, _hooks_of(module))
        for module, kind in ((module, cast("Any", type(module))) for module in found)
    ]
    _core.memo().setdefault("modes", {})[region] = modes


@contextlib.contextmanager
def _recording(
    found: list[nn.Module], is_reentrant: bool, given: tuple[Any, ...]
) -> Iterator[None]:
    """A block in which a body is recorded that torch would run again, on what it is given."""
    global _n_recording
    outer, buffers, group = _state.groups, checkpoint_bodies.buffers_of(found), norms.Group()
    around = _state.around
    _state.groups = (*outer, group)
    _n_recording += 1
    _torch.batch_norm, unwritten.on_read = _batch_norm, _note_read
    try:
        with _region(is_reentrant) as region:
            _note_modes(region, found)
            _state.around = (*around, region)
            _core.memo().setdefault("around", {})[region] = _state.around
            _state.has_reentrant |= is_reentrant
            lazies = [one for one in given if type(one) is _core.LazyTensor]
            before = [_core.id(one) for one in lazies]
            yield
            after = map(_core.id, lazies)  # the body may have been the first to read
            ids = (b if a is None else a for a, b in zip(before, after, strict=True))
            kept = [value for value in ids if value is not None]
            plain = {id(one) for one in given if isinstance(one, Tensor)}.difference(
                map(id, lazies)
            )
            _core.memo().setdefault("given", {})[region] = kept, plain
    finally:
        group.index = next(_ends)
        _state.groups, _state.around = outer, around
        _n_recording -= 1
        if _n_recording == 0:
            _torch.batch_norm, unwritten.on_read = _plain_batch_norm, None
    for buffer in buffers:
        if buffer.is_written():
            recomputed.refuse(f"writes {type(buffer.module).__name__}.{buffer.name}")


def run(body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Record the body of a reentrant checkpoint."""
    if not torch.is_grad_enabled():
        with _region(True):
            return body(*args)
    with _recording(list(checkpoint_bodies.modules_in([body, *args])), True, args):
        return body(*args)


def is_transparent(cls: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of an autograd function is a reentrant checkpoint to be recorded.

    It gives no gradient where none of its inputs needs one: that is left to torch too.
    """
    if cls is not torch.utils.checkpoint.CheckpointFunction or planner.is_whole():
        return False
    if not torch.is_grad_enabled():
        return True  # it runs once
    if not args[1]:
        return False  # as `patched`
    needs = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    found = list(checkpoint_bodies.modules_in([args[0], *args[2:]])) if needs else []
    # Such hooks begin when torch runs the body again: before, it has no graph to put them on.
    is_hooked = any(module._backward_hooks or module._backward_pre_hooks for module in found)
    return needs and not is_hooked and checkpoint_bodies.can_record(found)


def reached(program: Program) -> set[int]:
    """The regions of which backward asks what torch would make again."""
    return {node.region for node in program.nodes.values() if node.region and node.is_kept}


def write_what_is_moved() -> None:
    """A part that was cut off goes back, and moves statistics of its checkpoints once more: calls
    that were recorded after the part move them first."""
    unwritten.make(_state.moved)


def around(region: int) -> tuple[int, ...]:
    """The regions of the bodies that a region is in, the outermost first, and itself; of one that
    began on another tape itself alone."""
    known: dict[int, tuple[int, ...]] = _core.memo().get("around", {})
    return known.get(region, (region,) if region else ())


def recording() -> int:
    """The region of the body that this thread is recording; 0: of none."""
    return _state.around[-1] if _state.around else 0


def check(program: Program, has_inputs: bool) -> None:
    """Raise where a program is to be differentiated otherwise than torch's checkpoints allow."""
    regions = reached(program) if program.has_checkpoints else set()
    if has_inputs and any(region % 2 for region in regions):
        recomputed.refuse_inputs()
    if _state.has_reentrant or program.has_checkpoints:
        _check_hooks(program)
    known = _core.memo().get("modes", {}) if regions else {}
    for module, was, hooks in (one for region in regions for one in known.get(region, ())):
        change = ""
        if was is not None and module.training != was:
            change = f"was set to {'training' if module.training else 'evaluation'}"
        elif _hooks_of(module) != hooks:
            change = "got or lost a hook"
        if change:
            raise KoilaError(
                f"checkpoint: {type(module).__name__} in its function {change} between forward and "
                f"backward ({lines.user_line()}), where torch runs that once more; koila runs "
                "it once. Do that after backward, or run it whole: koila.config(chunks=1)"
            )


Passes = dict[int, tuple[Tensor, set[int]]]


def _pass_to(value: int, real: Tensor | None, region: int) -> int:
    """The pass that comes to what a call of a region reads: of what the function of a reentrant
    checkpoint is given, that which comes to the checkpoint."""
    for one in reversed(around(region)):
        if one % 2:
            values, plain = _given(one)
            if value not in values and id(real) not in plain:
                return one
    return 0


def passes(program: Program) -> Passes:
    """By id, the tensors that entered a program or the graphs of such, and the passes of torch's
    engine that come to them: that of backward, and one for each reentrant checkpoint."""
    by_value: dict[int, set[int]] = defaultdict(set)
    for node in program.nodes.values():
        if any(map(program.needs_gradient, node.outs)):
            for value in (program.imports[i].value for i in node.imports if i >= 0):
                by_value[value].add(_pass_to(value, program.info(value).real, node.region))
    found: Passes = {}

    def note(one: Any, own: set[int]) -> None:
        found.setdefault(id(one), (one, set()))[1].update(own)

    for value, own in by_value.items():
        real = program.info(value).real
        if real is None or not real.requires_grad:
            continue
        note(real, own)
        for end in outside.ends(real):
            if isinstance(end, Tensor):
                note(end, own)
            else:  # a part that was cut off, which goes back by itself
                for one, its in end.leaf_passes().values():
                    note(one, its)
    return found


def _check_hooks(program: Program) -> None:
    """Raise where torch calls a hook of a leaf oftener than koila does: each pass of its engine
    does so, and each reentrant checkpoint is gone back through by one of its own."""
    for real, own in passes(program).values():
        if len(own) > 1 and (real._backward_hooks or real._post_accumulate_grad_hooks):
            raise KoilaError(
                f"checkpoint: a tensor of shape {list(real.shape)} has a hook, and is read in a "
                f"checkpoint with use_reentrant=True and outside of it ({lines.user_line()}). "
                "torch calls the hook with the gradient of each alone; koila calls it with their "
                "sum. "
                "Set use_reentrant=False, or run it whole: koila.config(chunks=1)"
            )


class Body(NamedTuple):
    """What a checkpoint's function, with those of checkpoints in it, reads and did not make."""

    region: int
    nodes: list[Node]
    given: list[int]  # to the outermost: torch keeps these, and sees it where they were written
    read: set[int]


def bodies(program: Program) -> Iterator[Body]:
    """What torch would read again where backward reaches a checkpoint, to run its function; of
    nested ones the outer first."""
    regions = reached(program) if program.has_checkpoints else set()
    ends = {one for region in regions for one in around(region)}
    found: dict[int, list[Node]] = defaultdict(list)
    for node in program.nodes.values() if ends else ():
        for region in around(node.region):  # a body may have begun on another tape
            if region in ends:
                found[region].append(node)
    for region, nodes in found.items():
        reads = {program.imports[i].value for node in nodes for i in node.imports if i >= 0}
        made = {out for node in nodes for out in node.outs}
        # What a body inside is given is made again too.
        given = _given(region)[0] if around(region) == (region,) else []
        yield Body(region, nodes, given, reads.difference(made))


def _given(region: int) -> tuple[list[int], set[int]]:
    """What a body is given: values, and ids of plain tensors."""
    given: dict[int, tuple[list[int], set[int]]] = _core.memo().get("given", {})
    return given.get(region, ([], set()))


def is_made_again(program: Program, value: int, reading: int, writing: int) -> bool:
    """Whether a value that a call of the region `reading` reads, and one of `writing` wrote since,
    is made once more, without that write, before torch needs it.

    A body makes again what it made. What else it reads, torch has kept, or finds as it is by then;
    but of a body that is reentrant torch makes all anew, with the bodies in it.
    """
    maker = program.node_of(value)
    made_in = around(maker.region) if maker is not None else ()
    again = [one for one in around(reading)[:-1] if one % 2] + [*around(reading)[-1:]]
    return not {*made_in}.intersection(again).issubset(around(writing))


#: What goes up to its body, and on when that has returned.
Generator = Callable[..., Iterator[None]]


def checkpoint(args: Any, kwargs: Any) -> Any:
    """The arguments of a checkpoint that is left to torch, which saves them as C++ has them."""
    return args, kwargs


def patched(original: Generator, holds_lazy: Callable[[Any], bool]) -> Generator:
    """The generator that torch puts around the body of a checkpoint that is not reentrant.

    Where the body is left to torch, its calls run at once, since torch's hooks on saved tensors are
    on: torch keeps what it would keep, and makes the rest again.
    """

    @functools.wraps(original)
    def generator(
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        preserve_rng_state: bool = True,
        context_fn: Any = torch.utils.checkpoint.noop_context_fn,
        **words: Any,
    ) -> Iterator[None]:
        is_ours = holds_lazy(args) or holds_lazy(kwargs)
        is_recorded = is_ours and not planner.is_whole() and not surroundings.of_call()
        is_recorded = is_recorded and context_fn is torch.utils.checkpoint.noop_context_fn
        is_again = is_recorded and torch.is_grad_enabled()
        found = (
            list(checkpoint_bodies.modules_in([body, *args, *kwargs.values()])) if is_again else []
        )
        # Without preserve_rng_state what torch runs again draws other numbers, and moves on the
        # generator: the gradient is of those.
        if is_again and not (preserve_rng_state and checkpoint_bodies.can_record(found)):
            explain.log_live(torch.utils.checkpoint.checkpoint)
            is_recorded = is_again = False
        if not is_recorded:
            if is_ours and torch.is_grad_enabled():
                args, kwargs = _core.live_with_all(checkpoint, (args, kwargs), {}, True)
            words |= {"preserve_rng_state": preserve_rng_state, "context_fn": context_fn}
            yield from original(body, args, kwargs, **words)
            return
        # What it makes of plain tensors at once keeps what it saves: to have that again torch would
        # run all of the body, in the midst of a backward.
        with _recording(found, False, args) if is_again else _region(False):
            yield

    return generator


def patched_before_2_14(original: Generator, holds_lazy: Callable[[Any], bool]) -> Generator:
    """As `patched`, where torch hands on the arguments of the body one by one, behind its own."""
    names = "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"

    def flat(body: Any, args: Any, kwargs: Any, **words: Any) -> Iterator[None]:
        return original(body, *(words[name] for name in names), *args, **kwargs)

    around_body = patched(flat, holds_lazy)

    @functools.wraps(original)
    def generator(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        own, given = args[: len(names)], args[len(names) :]
        return around_body(body, given, kwargs, **dict(zip(names, own, strict=True)))

    return generator
