# SPDX-License-Identifier: Apache-2.0
"""Cut the program before a call that cannot be recorded, and continue recording after it.

Such a call (a custom autograd function, compiled code, an op whose shape depends on numbers) needs
real tensors on a real autograd graph. So the program runs in chunks, forward and without a graph,
and all values that the user can reach are *handed out*: each becomes a real tensor on a node
`HandedOut`, behind which nodes `OfLeaves` lead to the parameters and other leaves that it was
computed from. What was recorded up to here is now a *part* (`cut.py`), with a tape of its own. When
autograd's engine gets to the first `OfLeaves`, all gradients of the part's values have arrived, and
the part runs in chunks, forward and backward. So the graph shows the leaves of each value, and each
leaf gets one gradient.

Everything in reach is handed out at once. So two parts have no call in common, and a call runs
forward once more than it would have without the cut.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from koila import _core
from koila.basics import engine, lines, surroundings
from koila.basics.table import Args, Func, Words
from koila.basics.threads import in_turn
from koila.memory import optimizers
from koila.messages.errors import HiddenFrames
from koila.planning import logs, planner, steps, unsplit
from koila.random import generators
from koila.recording import flush, freed, parts, reasons
from koila.recording.cut import Cut
from koila.recording.handed_out import Group, HandedOut, Memory, OfLeaves, Root, apply, note_view
from koila.reporting import reports
from koila.running import arrays, checkpoints, kept_casts, replay, unwritten, views, visible
from koila.staged import aliases, hooks
from koila.staged.facts import Info, is_data
from koila.staged.program import Program

#: By an optimizer whose step is running: what to call after the step.
_after_step: WeakKeyDictionary[torch.optim.Optimizer, Callable[[], None]] = WeakKeyDictionary()
#: Buffers that a part reads are copied when it is cut off, since plain torch may write them unseen:
#: if they have at most `_SMALL` bytes, or 1 / `_SHARE` of the bytes that are handed out.
_SMALL, _SHARE = 2**18, 8
#: If the pending calls make at least these bytes, and their graph would keep no more than a part
#: reads, they run on the whole batch, and the program is not cut.
_WORTH = 2**18


def check_run(is_drawing: bool) -> None:
    """Raise if a live run of all pending calls would not be what eager does: call hooks less often,
    or draw other random numbers."""
    checkpoints.check_live()
    if _core.notes():
        arrays.check_live()
    if is_drawing:
        generators.check_live()


def runs_at_once(func: Func) -> bool:
    """Return whether a call must run now, because the user's code observes it (a hook, a mode).
    Report it, and log it once."""
    why = surroundings.of_call()
    if why:
        reports.note_at_once(func, why)
        logs.log_at_once(func, why)
    return bool(why)


def call(func: Func, args: Args, kwargs: Words | None, has_graph: bool, is_plain: bool) -> Any:
    """Run a call that cannot be recorded, and that has pending values among its arguments. Return
    what it returns, with lazies in place of tensors unless `is_plain`.

    If the program runs in chunks, cut it before the call. Otherwise run all that was recorded on
    the whole batch, and log that. `has_graph`: a pending value requires a gradient.
    """
    with HiddenFrames():
        unwritten.note_read((args, kwargs))
        replay.settle_leaves()
        is_large = has_graph and not planner.is_whole() and _core.pending_bytes(False) >= _WORTH
        is_cheap = is_large and _core.won_whole() >= 0
        why = "" if planner.is_whole() else reasons.why(func, args, kwargs)
        is_cut = not is_cheap and not planner.is_whole() and _cut(func, why)
        if is_cheap:
            cheap = "its graph keeps no more than a part that reads its inputs again"
            reports.give_reason(f"{why}; {cheap}")
        elif has_graph and not is_cut:
            unsplit.check(func, why or reasons.why(func, args, kwargs))
        if not is_cut and any(map(_core.leaves_of, parts.tensors_in((args, kwargs)))):
            _core.flush()  # pending calls read memory that this call may write
        return _core.live(func, args, kwargs, is_plain)


def begin_checkpoint() -> None:
    """Cut the program before the function of a checkpoint if it has read what a custom function
    returned in the one before. Else one part would be of two checkpoints, and its backward would
    need what both have freed at once."""
    if not checkpoints.outermost() and freed.is_read():
        _cut(
            torch.utils.checkpoint.checkpoint, "the one before has read a custom function's result"
        )


@in_turn
def before_plain_write(func: Func, tensor: torch.Tensor) -> Callable[[], None] | None:
    """Let pending calls read a tensor that plain torch is about to write in place, and let parts
    keep a copy of it. A program in chunks is cut before the write; others run. Return what to call
    after the write, or None."""
    if _core.leaves_of(tensor):
        _make_way(func, "a write of plain torch")
    after = parts.keep_copies(func, (tensor,))
    return kept_casts.after_write(tensor, after) if tensor.requires_grad else after


@in_turn
def before_step(optimizer: torch.optim.Optimizer) -> None:
    """Run pending calls before an optimizer writes parameters. If a backward that is still to come
    has to read these as they were, the program is cut before the step, and its part keeps copies.
    Call `after_step` after the step."""
    _after_step.pop(optimizer, None)  # of a step that raised
    func, what = type(optimizer).step, "an optimizer's step"
    after: Callable[[], None] | None
    if _core.is_busy():  # in a hook of the user's: nothing can run or be cut
        before = [(one, aliases.version_of(one)) for one in optimizers.written_by(optimizer)]
        for one, _ in before:
            visible.watch(one)
        after = functools.partial(_note_unseen, before)
    else:
        given = parts.read_later(optimizers.written_by(optimizer))
        if not any(map(_core.leaves_of, given)):
            flush.flush(what)
        elif not _make_way(func, what) and not planner.is_whole():
            for one in given:
                parts.watch_here(one)  # a later backward of these calls would read what is written
        after = parts.keep_copies(func, given) if given else None
    if after is not None:
        _after_step[optimizer] = after


def after_step(optimizer: torch.optim.Optimizer) -> None:
    """Keep the copies of the parameters that an optimizer has written in its step."""
    after = _after_step.pop(optimizer, None)
    if after is not None:
        after()


def _note_unseen(before: list[tuple[torch.Tensor, int | None]]) -> None:
    """After the step of an optimizer that changed no versions, as a fused one: refuse a backward of
    pending calls that would read the new parameters. `before`: with their versions."""
    for one, version in before:
        if aliases.version_of(one) == version:
            aliases.lose(_core.leaves_of(one))


def _make_way(func: Func, what: str) -> bool:
    """Cut the program before a write to a tensor that pending calls read. If that is not possible,
    run the calls, with a graph or else without one. Return whether the program was cut."""
    if not planner.is_whole() and _cut(func, "it writes a tensor that calls before it read"):
        return True
    if not _run_whole(func):
        flush.flush(what)
    return False


def _run_whole(func: Func) -> bool:
    """Run pending calls on the whole batch if one has a hook: such a program cannot be cut. Return
    False if there is no hook or no graph, or they do not fit. Then the caller computes their
    numbers in chunks, without a graph."""
    if planner.is_whole() or not hooks.is_any() or not _core.pending_bytes(True):
        return False  # what has no graph is not read again in a backward
    if not unsplit.fits():
        return False
    why = "it writes a tensor that calls with a hook read before"
    logs.log_live(func, why)
    reports.give_reason(why)
    _core.flush()
    return True


@surroundings.in_outside
def _cut(func: Any, why: str) -> bool:
    if hooks.is_any() or not _core.can_cut():
        return False
    generators.make_way()
    if not replay.read(False, func):
        return False
    reached = _core.reached()
    if reached is None:
        return False
    numbers = dict(reached)
    sharing: dict[int, list[int]] = defaultdict(list)
    for value in numbers:
        sharing[Info.of(value).storage].append(value)
    # One value for each storage is handed out: the only one in reach, or that of the whole
    # storage. The others become views of it.
    wholes = {
        value: values[0] if len(values) == 1 else Info.of(values[0]).base
        for values in sharing.values()
        for value in values
    }
    roots = {whole: numbers.get(whole) for whole in wholes.values() if Info.of(whole).requires_grad}
    for value, whole in wholes.items():
        if whole in roots and roots[whole] is None:
            roots[whole] = _memory(numbers[value], Info.of(whole))
    if any(number is None for number in roots.values()):
        return False
    cut = Cut(f"{reports.name_of(func)} ({lines.user_line()})")
    made = {value: Root(cut, value, number) for value, number in roots.items()}
    handed = _handed_out(cut, made)
    for value, root in made.items():
        root.note(handed[value])
    others = {value: numbers[value] for value, whole in wholes.items() if whole not in roots}
    program = Program([]) if len(roots) + len(others) < len(wholes) else None
    taken: dict[int, torch.Tensor] = {}  # a view of a view is taken of that view, as recorded
    for value, whole in wholes.items():
        if value not in handed and value not in others:
            assert program is not None
            with torch.enable_grad():  # repeat its views, so that writes show in both
                others[value] = views.take(program, value, handed[whole], -1, True, taken)
            note_view(others[value], made[whole], value, program.n_values)
            if _is_data(value):
                made[whole].watch(handed[whole])
    if any(others[value].requires_grad != Info.of(value).requires_grad for value in others):
        return False
    for value, number in (*others.items(), *_core.left_numbers(False)):
        cut.others.append(Memory(value))
        cut.others[-1].note(number)
    with steps.cutting():
        lazies = _core.hand_out(list(handed.items()), list(others.items()))
    for root, lazy in zip(made.values(), lazies, strict=True):
        root.lazy = lazy
    n_bytes = sum(tensor.nbytes for tensor in handed.values())
    reports.note_handed_out(func, why, n_bytes)
    if made:
        cut.early = cut.copy_what_it_reads([None], max(_SMALL, n_bytes // _SHARE))
        parts.add(cut)
        checkpoints.note_cut()
        freed.note(cut, handed)
    return True


def _handed_out(cut: Cut, roots: dict[int, Root]) -> dict[int, torch.Tensor]:
    """Return the handed-out tensor of each value, on nodes that lead to the leaves that the value
    was computed from."""
    leaves: dict[int, torch.Tensor] = {}
    made_of: dict[int, list[int]] = defaultdict(list)  # id of a leaf -> values computed from it
    has_derivatives = "recipes" in _core.notes()
    leaves_of = unsplit.leaves_behind(Program(list(roots)), roots) if has_derivatives else None
    for value in roots:
        behind = {id(leaf): leaf for leaf in reversed(_core.behind(value)[0])}
        if leaves_of is not None:
            behind = {key: leaf for key, leaf in behind.items() if key in leaves_of[value]}
        leaves.update(behind)
        for leaf in behind:
            made_of[leaf].append(value)
    together: dict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
    for key, values in made_of.items():
        together[tuple(values)].append(leaves[key])
    stand_ins: dict[int, list[torch.Tensor]] = {value: [] for value in roots}
    with torch.enable_grad(), engine.as_recorded(leaves.values()):
        for behind_of, group in together.items():
            cut.groups.append(Group(behind_of, group))
            like = [roots[value].number for value in behind_of]
            made = apply(OfLeaves, cut, cut.groups[-1], like, *group)
            for value, stand_in in zip(behind_of, made, strict=True):
                stand_ins[value].append(stand_in)
        none = torch.zeros((), device="cpu", requires_grad=True)  # for leaves that are gone
        return {
            value: apply(HandedOut, root, bool(stand_ins[value]), *(stand_ins[value] or [none]))
            for value, root in roots.items()
        }


def _is_data(value: int) -> bool:
    """Return whether a value is x.data, or a view of that."""
    view = Info.of(value).view
    while view is not None and not is_data(_core.node(view[0])[0]):
        view = Info.of(view[2]).view
    return view is not None


def _memory(number: torch.Tensor, info: Info) -> torch.Tensor | None:
    """Return the tensor that a number is a view of, if it has the shape and dtype of `info`."""
    base = number._base
    is_whole = base is not None and (base.shape, base.dtype) == (info.shape, info.dtype)
    return base if is_whole else None
