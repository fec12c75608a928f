# SPDX-License-Identifier: Apache-2.0
"""The bytes that optimizers take: their state, and what a step allocates beside it."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch


class _Taken(NamedTuple):
    """How many tensors of a parameter's size an optimizer takes, from the options of a group.

    In a for-loop, what the update of one parameter allocates is freed only in the course of the
    next one. `foreach=True` updates all parameters at once. A fused kernel allocates nothing.
    """

    kept: Callable[[dict[str, Any]], int]  # for each parameter, from the first step on
    single: int  # allocated to update one parameter
    before: int  # of these, still there while the next parameter is updated
    foreach: int  # allocated for each parameter by foreach=True
    foreach_changed: int  # the same if weight decay or maximize=True changes the gradients
    is_decoupled: bool = False  # weight decay changes parameters, not their gradients


_TAKEN: dict[type[torch.optim.Optimizer], _Taken] = {
    torch.optim.Adam: _Taken(lambda group: 2 + bool(group["amsgrad"]), 2, 1, 1, 1),
    torch.optim.NAdam: _Taken(lambda _: 2, 2, 1, 1, 2),
    torch.optim.RAdam: _Taken(lambda _: 2, 2, 0, 1, 1),
    torch.optim.Adamax: _Taken(lambda _: 2, 1, 0, 1, 1),
    torch.optim.Adadelta: _Taken(lambda _: 2, 2, 1, 2, 3),
    torch.optim.Adafactor: _Taken(lambda _: 0, 1, 1, 1, 2, is_decoupled=True),
    torch.optim.Adagrad: _Taken(lambda _: 0, 1, 1, 2, 2),  # its state is there when it is made
    torch.optim.ASGD: _Taken(lambda _: 1, 0, 0, 1, 1),
    torch.optim.Muon: _Taken(lambda _: 1, 4, 0, 4, 4, is_decoupled=True),
    torch.optim.SGD: _Taken(lambda group: int(group["momentum"] != 0), 0, 0, 0, 1),
    torch.optim.RMSprop: _Taken(
        lambda group: 1 + (group["momentum"] > 0) + bool(group["centered"]), 1, 1, 1, 2
    ),
    torch.optim.Rprop: _Taken(lambda _: 2, 3, 0, 2, 2),
}

#: The optimizers that have made a step.
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
#: The optimizers that have made no step; None: those before koila's patches are to be found.
_to_step: weakref.WeakSet[torch.optim.Optimizer] | None = None


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Remember an optimizer that makes a step: `state` includes its state."""
    _stepped.add(optimizer)
    if _to_step is not None:
        _to_step.discard(optimizer)


def look_for_all() -> None:
    """From now on `note_made` is called for each new optimizer; look for the older ones."""
    global _to_step
    _to_step = None


def note_made(optimizer: torch.optim.Optimizer) -> None:
    """Remember an optimizer that was just made: `coming_state` includes its state to come."""
    if _to_step is not None:
        _to_step.add(optimizer)


def _all_to_step() -> list[torch.optim.Optimizer]:
    """Return the optimizers that have made no step. The first time it takes long, since it goes
    through all objects."""
    global _to_step
    if _to_step is None:
        kind = torch.optim.Optimizer
        found = (o for o in gc.get_objects() if issubclass(type(o), kind))
        _to_step = weakref.WeakSet(o for o in found if o not in _stepped)
    return list(_to_step) if len(_to_step) else []


def _taken_by(optimizer: torch.optim.Optimizer) -> _Taken | None:
    """Return what an optimizer takes; None: it is of no kind that is known."""
    return next((_TAKEN[kind] for kind in type(optimizer).__mro__ if kind in _TAKEN), None)


def coming_state(parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes of state that optimizers will make for parameters in their first step."""
    found = _all_to_step()
    if not found:
        return 0
    wanted = {id(parameter) for parameter in parameters}
    return sum([_coming_state_of(optimizer, wanted) for optimizer in found])


def _coming_state_of(optimizer: torch.optim.Optimizer, wanted: set[int]) -> int:
    """Return the bytes of state that an optimizer makes in its first step, for those of its
    parameters whose ids are `wanted`."""
    taken, n_bytes = _taken_by(optimizer), 0
    if taken is None:
        return 0
    for group in optimizer.param_groups:
        size = sum(p.nbytes for p in group["params"] if id(p) in wanted and p.requires_grad)
        n_bytes += taken.kept(group) * size
    return n_bytes


def gradients_to_come(parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the gradients that parameters do not have yet."""
    return sum(parameter.nbytes for parameter in parameters if parameter.grad is None)


def temporaries(parameters: Iterable[torch.Tensor]) -> int:
    """Return the most bytes that the step of one optimizer allocates to update parameters, beside
    the state that it keeps."""
    wanted = {id(parameter) for parameter in parameters}
    found = (*_stepped, *_all_to_step())
    return max((_temporaries_of(optimizer, wanted) for optimizer in found), default=0)


def _temporaries_of(optimizer: torch.optim.Optimizer, wanted: set[int]) -> int:
    """Return the most bytes that the step of an optimizer allocates to update those of its
    parameters whose ids are `wanted`."""
    taken = _taken_by(optimizer)
    if taken is None:
        return 0
    return max(
        _temporaries_of_group(taken, group, [p for p in group["params"] if id(p) in wanted])
        for group in optimizer.param_groups
    )


def _temporaries_of_group(
    taken: _Taken, group: dict[str, Any], parameters: list[torch.Tensor]
) -> int:
    if group.get("fused") or not parameters:
        return 0
    is_decoupled = group.get("decoupled_weight_decay", taken.is_decoupled)
    is_decayed = group.get("weight_decay", 0) != 0 and not is_decoupled
    is_changed = is_decayed or bool(group.get("maximize"))
    sizes = [parameter.nbytes for parameter in parameters]
    is_foreach = group.get("foreach", False)  # None: on a GPU
    if is_foreach or (is_foreach is None and parameters[0].is_cuda):
        return (taken.foreach_changed if is_changed else taken.foreach) * sum(sizes)
    single = taken.single + is_changed + bool(group.get("nesterov"))
    pairs = itertools.pairwise([0, *sizes])
    return max(single * size + min(single, taken.before) * last for last, size in pairs)


def written_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that the step of an optimizer writes."""
    for group in optimizer.param_groups:
        yield from (one for one in group["params"] if one.grad is not None)


def of_step(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return what the step that an optimizer is about to make takes: the bytes of state that it
    makes for good, and those that it allocates meanwhile."""
    written = {id(p): p for p in written_by(optimizer)}
    new = {key for key, p in written.items() if p not in optimizer.state}
    return _coming_state_of(optimizer, new), _temporaries_of(optimizer, set(written))


def state() -> list[torch.Tensor]:
    """Return the tensors that optimizers keep between steps."""
    return [
        tensor
        for optimizer in (list(_stepped) if len(_stepped) else ())
        for kept in optimizer.state.values()
        for tensor in kept.values()
        if isinstance(tensor, torch.Tensor)
    ]
