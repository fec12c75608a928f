# SPDX-License-Identifier: Apache-2.0
"""Record the function (the *body*) of a torch.utils.checkpoint once, as a *region* of the program
whose calls run again before their backward.

torch runs a body twice, so a body that updates statistics does so twice. Those of batch norms are
updated once more after the program's backward (norms.Again). A body with other statistics, or with
a module that seems to write a buffer of its own, is left to torch and runs at once; so is one whose
second run would draw other random numbers (preserve_rng_state=False). A recorded body that turns
out to write a buffer, or to draw these, is refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from koila import _core
from koila.basics import lines, surroundings
from koila.basics.enter import call_with_lazies
from koila.memory import outside
from koila.messages.errors import KoilaError
from koila.planning import logs, planner
from koila.reductions import norms
from koila.running import checkpoint_bodies, module_state, recomputed, unwritten
from koila.running.checkpoint_bodies import Reached
from koila.staged.facts import Info, Node
from koila.staged.program import Program


class _State(threading.local):
    def __init__(self) -> None:
        self.moved: set[int] = set()  # ids of statistics that are updated once more in backward

    groups: tuple[norms.Group, ...] = ()  # one for each body that this thread is recording
    around: tuple[int, ...] = ()  # the regions of these bodies, the outermost first
    has_reentrant = False  # this thread has recorded a body with use_reentrant=True


_state = _State()


def _note_read(ids: set[int]) -> None:
    """Refuse a plain read of statistics that the body being recorded has updated."""
    if any(not ids.isdisjoint(group.moved) for group in _state.groups):
        recomputed.refuse("reads running statistics after it has moved them")


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, *words: Any) -> Any:
    """Stand in for torch.batch_norm while a body is recorded: note that the second run of the body
    updates the statistics once more."""
    args: tuple[Any, ...] = (x, weight, bias, mean, *words)
    if not _state.groups or mean is None or not words[1]:
        return _plain_batch_norm(*args)
    needs = any(one is not None and one.requires_grad for one in (x, weight, bias))
    if not (needs and torch.is_grad_enabled()):
        recomputed.refuse("moves the statistics of a normalization of which no gradient is asked")
    is_lazy = type(x) is _core.LazyTensor
    real = _core.real(x) if is_lazy else x
    if real is not None and not (is_lazy and _core.rows_dim(x) >= 0):
        # Record the call all the same, for the program to update the statistics in backward.
        x = _core.input(real, -1, _core.new_axis(), 0)
    module = checkpoint_bodies.norm_calling(mean)
    if any(id(mean) in group.moved_before for group in _state.groups):
        # The part before would update them last, as its backward comes last.
        recomputed.refuse(
            "moves statistics of a normalization before and after a call that cannot be recorded"
        )
    again = norms.Again(words[2])
    again.groups, again.running = _state.groups, (mean, words[0])
    for group in _state.groups:
        group.moved.update(map(id, again.running))
    _state.moved.update(map(id, again.running))
    counted: Any = None if module is None else module.num_batches_tracked
    again.n_batches = counted
    again.is_mean = module is not None and module.momentum is None
    return call_with_lazies(norms.batch_norm, (x,), x, *args[1:6], again, *args[7:])


_torch: Any = torch
_plain_batch_norm: Callable[..., Any] = torch.batch_norm
_n_recording = 0
_numbers, _ends = itertools.count(1), itertools.count(1)


@contextlib.contextmanager
def _region(is_reentrant: bool) -> Iterator[int]:
    """Give the calls recorded in a block the number of a new region, which is yielded.

    The number is odd if the checkpoint is reentrant. Without gradients nothing has to be
    recomputed: the calls stay in the region around them, and 0 is yielded.
    """
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


@contextlib.contextmanager
def _recording(
    found: Reached, is_reentrant: bool, is_preserving: bool, given: tuple[Any, ...]
) -> Iterator[None]:
    """Record the body that runs in a block, which torch would run again in backward, with arguments
    `given`. `found`: what it can reach. Raise a KoilaError if it wrote a buffer of a module, or
    another tensor that it did not make."""
    global _n_recording
    outer, around, group = _state.groups, _state.around, norms.Group()
    guarded = checkpoint_bodies.guarded_in(found, given)
    _state.groups = (*outer, group)
    _n_recording += 1
    _torch.batch_norm, unwritten.on_read = _batch_norm, _note_read
    try:
        with _region(is_reentrant) as region:
            _core.notes().setdefault("modules", {})[region] = module_state.of(found.modules)
            _state.around = (*around, region)
            _core.notes().setdefault("around", {})[region] = _state.around
            _state.has_reentrant |= is_reentrant
            lazies = [one for one in given if type(one) is _core.LazyTensor]
            before = [_core.id(one) for one in lazies]
            with contextlib.nullcontext() if is_preserving else checkpoint_bodies.without_draws():
                yield
            after = map(_core.id, lazies)  # an argument may get a number at its first read
            ids = (b if a is None else a for a, b in zip(before, after, strict=True))
            kept = [value for value in ids if value is not None]
            plain = {id(one) for one in given if isinstance(one, Tensor)} - set(map(id, lazies))
            _core.notes().setdefault("given", {})[region] = kept, plain
    finally:
        group.index = next(_ends)
        _state.groups, _state.around = outer, around
        _n_recording -= 1
        if _n_recording == 0:
            _torch.batch_norm, unwritten.on_read = _plain_batch_norm, None
    for one in guarded:
        if one.is_written(region):
            recomputed.refuse(f"writes {one}")


def run(
    body: Callable[..., Any], is_preserving: bool, *args: Any, begin: Callable[[], None]
) -> Any:
    """Record the body of a reentrant checkpoint; `begin` is as in `patched`."""
    if not torch.is_grad_enabled():
        with _region(True):
            return body(*args)
    begin()
    with _recording(checkpoint_bodies.reached_by([body, *args]), True, is_preserving, args):
        return body(*args)


def is_transparent(cls: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call of an autograd function is a reentrant checkpoint to record.

    If none of its inputs requires a gradient, the checkpoint sends none to the weights either. It
    is then left to torch.
    """
    if cls is not torch.utils.checkpoint.CheckpointFunction or planner.is_whole():
        return False
    if not torch.is_grad_enabled():
        return True  # torch, too, runs it only once
    needs = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    found = checkpoint_bodies.reached_by([args[0], *args[2:]] if needs else ())
    # torch calls backward hooks only in its second run: the first one has no graph for them.
    is_hooked = any(one._backward_hooks or one._backward_pre_hooks for one in found.modules)
    return needs and not is_hooked and not checkpoint_bodies.why_left(found, args[1])


def note_cut() -> None:
    """Note that the program was cut in the bodies that this thread is recording."""
    for group in _state.groups:
        group.moved_before |= group.moved


def reached(program: Program) -> set[int]:
    """Return the regions whose saved tensors backward reads: torch would run these bodies again."""
    return {node.region for node in program.nodes.values() if node.region and node.is_kept}


def write_what_is_moved() -> None:
    """Run pending updates of statistics that a part updates once more in its backward: those
    updates were recorded after the part, and come first."""
    unwritten.make(_state.moved)


def around(region: int) -> tuple[int, ...]:
    """Return the regions around a region, the outermost first, and the region itself. If it began
    on another tape, return it alone."""
    regions: dict[int, tuple[int, ...]] = _core.notes().get("around", {})
    return regions.get(region, (region,) if region else ())


def recording() -> int:
    """Return the region of the body that this thread is recording; 0: none."""
    return _state.around[-1] if _state.around else 0


def outermost() -> int:
    """Return the region of the outermost body that this thread is recording; 0: none."""
    return _state.around[0] if _state.around else 0


def check(program: Program, has_inputs: bool) -> None:
    """Raise if torch's checkpoints would not allow this backward, or give another result in it.
    `has_inputs`: the gradients of some tensors alone are asked for."""
    if not (_state.has_reentrant or program.has_checkpoints):
        return
    regions = reached(program) if program.has_checkpoints else set()
    # A gradient that the function of a checkpoint itself asks for is of calls in it.
    ended = regions.difference(_state.around)
    if has_inputs and any(region % 2 for region in ended):
        recomputed.refuse_inputs()
    _check_hooks(passes(program))
    modules = _core.notes().get("modules", {}) if regions else {}
    module_state.check(one for region in regions for one in modules.get(region, ()))


#: Tensors, each with the passes of torch's engine that send a gradient to it: that of backward (0),
#: and one for each reentrant checkpoint.
Passes = list[tuple[Tensor, set[int]]]


def _pass_to(value: int, real: Tensor | None, region: int) -> int:
    """Return the pass of torch's engine that brings the gradient of a value which a call in a
    region reads. 0: that of the user's backward. Else the region (odd) of the innermost reentrant
    checkpoint whose function reads the value but does not get it as an argument."""
    for one in reversed(around(region)):
        if one % 2:
            values, plain = _given(one)
            if value not in values and id(real) not in plain:
                return one
    return 0


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _live_passes() -> dict[int, set[int]]:
    """Return, by the memory of a leaf, the reentrant checkpoints that have run live, and whose pass
    of torch's engine gets to it."""
    found: dict[int, set[int]] = defaultdict(set)
    for region, body in list(recomputed.alive.items()) if _state.has_reentrant else ():
        for leaf in body.leaves:
            found[_memory_of(leaf)].add(region)
    return found


def passes(program: Program) -> Passes:
    """Return the tensors that entered a program, or are leaves behind such tensors."""
    found: dict[int, tuple[Tensor, set[int]]] = {}
    live = _live_passes()
    parts: set[Any] = set()  # many tensors lead to the same part, and parts to the same parts

    def note(one: Any, own: set[int]) -> None:
        found.setdefault(id(one), (one, set()))[1].update(own)

    steps = own_passes(program)
    while steps:
        real, own = steps.pop()
        note(real, own)
        for end, is_behind in outside.ends(real):
            if isinstance(end, Tensor):
                note(end, (live[_memory_of(end)] if is_behind else None) or own)
            elif end not in parts:  # a part that was cut off has passes of its own
                parts.add(end)
                steps += end.leaf_passes()
    return list(found.values())


def own_passes(program: Program) -> Passes:
    """Return the tensors that entered a program and require a gradient."""
    by_value: dict[int, set[int]] = defaultdict(set)
    for node in program.nodes.values():
        if any(map(program.needs_gradient, node.outs)):
            for value in program.reads(node):
                by_value[value].add(_pass_to(value, program.info(value).real, node.region))
    reals = ((program.info(value).real, own) for value, own in by_value.items())
    return [(real, own) for real, own in reals if real is not None and real.requires_grad]


def check_live() -> None:
    """Do what `check` does for hooks, before pending calls run on the whole batch, with a graph.
    Note which leaves the pass of each reentrant checkpoint among them will get to."""
    if not _state.has_reentrant:
        return
    # A live run makes the graph of values that have numbers, too.
    found = passes(Program([v for v in Program([]).reached if Info.of(v).requires_grad]))
    _check_hooks(found)
    for leaf, own in found:
        for region in filter(None, own) if leaf.is_leaf else ():
            recomputed.note_leaf(region, leaf)


def _check_hooks(found: Passes) -> None:
    """Raise if torch would call a hook of a leaf more often than koila: once in each pass of its
    engine, and the backward of each reentrant checkpoint is a pass of its own."""
    for real, own in found:
        if len(own) > 1 and (real._backward_hooks or real._post_accumulate_grad_hooks):
            raise KoilaError(
                f"checkpoint: a tensor of shape {list(real.shape)} has a hook, and is read in a "
                f"checkpoint with use_reentrant=True and outside of it ({lines.user_line()}). "
                "torch calls the hook with the gradient of each alone; koila calls it with their "
                "sum. "
                "Set use_reentrant=False, or run it whole: koila.config(chunks=1)"
            )


class Body(NamedTuple):
    """The calls of a checkpoint's function, with those of checkpoints in it, and what they read."""

    region: int
    nodes: list[Node]
    given: list[int]  # arguments of an outermost body: torch saves these, and sees writes to them
    read: set[int]  # values that the calls read and did not make


def bodies(program: Program) -> Iterator[Body]:
    """Yield the bodies that torch would run again in this backward, outer ones first."""
    regions = reached(program) if program.has_checkpoints else set()
    ends = {one for region in regions for one in around(region)}
    found: dict[int, list[Node]] = defaultdict(list)
    for node in program.nodes.values() if ends else ():
        for region in around(node.region):  # a body may have begun on another tape
            if region in ends:
                found[region].append(node)
    for region, nodes in found.items():
        reads = {value for node in nodes for value in program.reads(node)}
        made = {out for node in nodes for out in node.outs}
        # The arguments of an inner body are recomputed, so writes to them do not matter.
        given = _given(region)[0] if around(region) == (region,) else []
        yield Body(region, nodes, given, reads.difference(made))


def _given(region: int) -> tuple[list[int], set[int]]:
    """Return the arguments of a body: value numbers of lazies, and ids of plain tensors."""
    given: dict[int, tuple[list[int], set[int]]] = _core.notes().get("given", {})
    return given.get(region, ([], set()))


def is_made_again(program: Program, value: int, reading: int, writing: int) -> bool:
    """Return whether torch would recompute a value, without a later write, before it needs it. A
    call in region `reading` reads the value, one in `writing` wrote it later.

    torch recomputes what the innermost body of a call made, and what a reentrant body around it
    made. Other values it has saved, or reads as they are by then.
    """
    maker = program.node_of(value)
    made_in = around(maker.region) if maker is not None else ()
    again = [one for one in around(reading)[:-1] if one % 2] + [*around(reading)[-1:]]
    return not {*made_in}.intersection(again).issubset(around(writing))


#: A generator function that yields once, where the body of the checkpoint runs.
Generator = Callable[..., Iterator[None]]


def checkpoint(args: Any, kwargs: Any) -> Any:
    """Return the arguments: called live, it makes lazies real for a checkpoint left to torch, which
    saves its arguments in C++."""
    return args, kwargs


def patched(
    original: Generator, holds_lazy: Callable[[Any], bool], begin: Callable[[], None]
) -> Generator:
    """Return a replacement of the generator that torch runs around a non-reentrant body. It records
    the body, after it has called `begin` if the body runs again, or leaves it to torch. In the
    latter case torch's saved-tensor hooks are on, so all calls run at once."""

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
        found = checkpoint_bodies.reached_by([body, *args, *kwargs.values()] if is_again else ())
        why = checkpoint_bodies.why_left(found, preserve_rng_state) if is_again else ""
        if why:
            logs.log_live(torch.utils.checkpoint.checkpoint, why)
            is_recorded = is_again = False
        if not is_recorded:
            if is_ours and torch.is_grad_enabled():
                args, kwargs = _core.live_with_all(checkpoint, (args, kwargs), {}, True)
            words |= {"preserve_rng_state": preserve_rng_state, "context_fn": context_fn}
            yield from original(body, args, kwargs, **words)
            return
        if is_again:
            begin()
        # torch's hooks stay off, so plain calls in the body keep what they save. To recompute that,
        # torch would have to run all of the body, in the middle of a backward.
        with _recording(found, False, preserve_rng_state, args) if is_again else _region(False):
            yield

    return generator


def patched_before_2_14(
    original: Generator, holds_lazy: Callable[[Any], bool], begin: Callable[[], None]
) -> Generator:
    """As `patched`, for a torch that passes the body's arguments one by one after its own."""
    names = "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"

    def flat(body: Any, args: Any, kwargs: Any, **words: Any) -> Iterator[None]:
        return original(body, *(words[name] for name in names), *args, **kwargs)

    around_body = patched(flat, holds_lazy, begin)

    @functools.wraps(original)
    def generator(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        own, given = args[: len(names)], args[len(names) :]
        return around_body(body, given, kwargs, **dict(zip(names, own, strict=True)))

    return generator
