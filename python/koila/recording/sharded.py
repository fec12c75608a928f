# SPDX-License-Identifier: Apache-2.0
"""Parameters that torch shards over processes, and gathers before a module runs.

Collective calls are made where torch makes them, whatever the number of chunks: no process waits
for another that needs more of them.

Where fully_shard (FSDP2) lets go of a module's gathered parameters after its forward, recorded
calls run before that, up to the end of the module, and the program is cut there (`bridge.py`).
Torch's own hooks gather the parameters again when the gradient of its outputs comes, and reduce
their gradients when that of its inputs is there.

Where it keeps them gathered (`reshard_after_forward=False`, and the root module), recorded calls
run later: what they read stays gathered until they ran. Torch's own code reduces the gradients, at
the end of the backward that delivers those of the whole batch.

FullyShardedDataParallel (FSDP1) frees the flat tensor that its parameters are views of, before
recorded calls run, and DeepSpeed's engine wants to be inside of torch's backward when the gradient
of the loss comes: they are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from koila import _core
from koila.basics.lines import user_line
from koila.messages.errors import KoilaError
from koila.recording import bridge
from koila.staged import hooks, meta

Replace = Callable[[Any, str, Any], None]
Holds = Callable[[Any], bool]

_FSDP = "torch.distributed.fsdp"
_patched: set[type] = set()
#: Parameters that torch let go of while calls wait that read them, by id, and what frees them.
_kept: dict[int, tuple[Any, Callable[[Any], None]]] = {}


class _Freed:
    """A parameter that was let go of, which parts read that have still to go back."""

    def __init__(self) -> None:
        self.parts: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self.numbers = (0, 0)  # of this process's shard, as it was let go

    def let_go(self, parameter: Any) -> None:
        """It is about to be freed."""
        self.parts.update(bridge.parts_that_read(parameter._unsharded_param))
        if self.parts:
            self.numbers = _numbers_of(parameter)

    def take_again(self, parameter: Any) -> None:
        """It is gathered: with the same numbers, unless it was written. An optimizer, or a write
        through .data, leaves no other trace."""
        is_same = not self.parts or self.numbers == _numbers_of(parameter)
        for part, leaves in self.parts.items():
            part.take_again(leaves, is_same)


def _numbers_of(parameter: Any) -> tuple[int, int]:
    return meta.checksum(parameter.sharded_param._local_tensor)


_freed: weakref.WeakKeyDictionary[Any, _Freed] = weakref.WeakKeyDictionary()


def patch(replace: Replace, holds_lazy: Holds) -> None:
    """Patch the classes of those modules that are imported by now: to import them takes longer than
    to import torch."""
    module: Any = sys.modules.get(f"{_FSDP}._fully_shard._fsdp_state")
    if module is not None and module.FSDPState not in _patched:
        _patched.add(module.FSDPState)
        _patch_states(module.FSDPState, replace)
        _patch_groups(module.FSDPParamGroup, replace)
        _patch_parameters(sys.modules[module.FSDPParamGroup.__module__], replace)
    for name, of_class, error in _REFUSED:
        kind: Any = getattr(sys.modules.get(name), of_class, None)
        if kind is not None and kind not in _patched:
            _patched.add(kind)
            _refuse(kind, error, replace, holds_lazy)


def end() -> None:
    """The patches were undone."""
    _patched.clear()


def let_go() -> None:
    """Free the gathered parameters that torch let go of, and no call waits to read any more."""
    for key, (parameter, free) in list(_kept.items()):
        if not bridge.is_read(parameter._unsharded_param):
            del _kept[key]
            if parameter.sharded_state.name != "UNSHARDED":
                free(parameter)


def _is_let_go(group: Any) -> bool:
    """Whether torch lets go of a group's parameters after a forward, and gathers them again for a
    backward."""
    is_let_go: bool = group._reshard_after_forward
    return is_let_go


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    """Those in what a module is given, or returns."""
    for one in tree_leaves(given):
        if isinstance(one, torch.Tensor):
            yield one
        elif dataclasses.is_dataclass(one) and not isinstance(one, type):
            yield from _tensors([getattr(one, field.name) for field in dataclasses.fields(one)])


def _is_any_lazy(tensors: Iterable[torch.Tensor]) -> bool:
    return any(type(tensor) is _core.LazyTensor for tensor in tensors)


def _patch_states(states: Any, replace: Replace) -> None:
    """Hooks on a module's outputs tell torch that gradients are coming. Of calls that run in chunks
    the parameters' own gradients tell that."""
    register = states._register_pre_backward_hook
    finish = states._root_post_backward_final_callback

    @functools.wraps(register)
    def registered(self: Any, output: Any) -> Any:
        outputs = list(_tensors(output))
        if not _is_any_lazy(outputs):
            return register(self, output)
        if any(map(_is_let_go, self._fsdp_param_groups)):
            _core.live_with_all(functools.partial(register, self), (outputs,), {}, True)
            for parameter in _parameters(self, True):
                for part in _freed[parameter].parts:
                    part.before[id(self)] = functools.partial(_gather_again, self)
        if torch.is_grad_enabled():
            for parameter in (one._unsharded_param for one in _parameters(self, False)):
                if parameter.requires_grad and not hasattr(parameter, "_koila_reduces"):
                    parameter._koila_reduces = True
                    parameter.register_post_accumulate_grad_hook(_Reduce(self))
            for lazy in outputs if not all(map(_is_let_go, self._fsdp_param_groups)) else ():
                if type(lazy) is _core.LazyTensor:
                    hooks.register_live(lazy, self._pre_backward)
        return output

    @functools.wraps(finish)
    def finished(self: Any) -> None:
        finish(self)
        let_go()

    replace(states, register.__name__, registered)
    replace(states, finish.__name__, finished)


def _parameters(state: Any, is_let_go: bool) -> Iterator[Any]:
    """Those that are let go of after a forward, or those that stay gathered."""
    for group in state._fsdp_param_groups:
        if _is_let_go(group) == is_let_go:
            yield from group.fsdp_params


def _gather_again(state: Any) -> None:
    """A part goes back. The gradient of another value than a module's output may have come first,
    which torch is not told of."""
    if any(one.sharded_state.name != "UNSHARDED" for one in _parameters(state, True)):
        state._pre_backward(None)


class _Reduce:
    """A gathered parameter has its gradient: when all have theirs, torch reduces them."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __call__(self, _: torch.Tensor) -> None:
        for group in self.state._fsdp_param_groups:  # what came before was reduced without this one
            state = type(group._training_state)
            if group._training_state == state.POST_BACKWARD:
                group._training_state = state.IDLE
        self.state._register_root_post_backward_final_callback()


def fully_shard(outputs: Any) -> None:
    """The end of the forward of a module whose parameters are let go of; reports name it so."""


def _patch_groups(groups: Any, replace: Replace) -> None:
    """What waits runs before its parameters are let go of. What keeps its parameters is not cut for
    a function that tells torch when the inputs of a module have their gradients."""
    register = groups._register_post_backward_hook
    leave = groups.post_forward

    @functools.wraps(register)
    def registered(self: Any, args: Any, kwargs: Any) -> Any:
        if not _is_let_go(self) and _is_any_lazy(_tensors((args, kwargs))):
            return args, kwargs
        return register(self, args, kwargs)

    @functools.wraps(leave)
    def left(self: Any, module: Any, given: Any, output: Any) -> Any:
        outputs = list(_tensors(output))
        if not _is_any_lazy(outputs):
            return leave(self, module, given, output)
        if _is_let_go(self):
            _core.live_with_all(fully_shard, (outputs,), {}, True)
        for parameter in self.fsdp_params:
            if _is_let_go(self):
                _freed.setdefault(parameter, _Freed())
                parameter._unsharded_param._koila_shard = parameter.sharded_param
            elif _freed.pop(parameter, None) is not None:
                del parameter._unsharded_param._koila_shard
        return leave(self, module, given, output)

    replace(groups, register.__name__, registered)
    replace(groups, leave.__name__, left)


def _patch_parameters(module: Any, replace: Replace) -> None:
    """What is read stays gathered, where torch does not gather it again."""
    parameters = module.FSDPParam
    free, gather = parameters.free_unsharded_param, parameters.to_unsharded

    @functools.wraps(free)
    def let_go_of(self: Any) -> None:
        gathered, freed = getattr(self, "_unsharded_param", None), _freed.get(self)
        if gathered is not None:
            is_kept = _core.leaves_of(gathered) if freed is not None else bridge.is_read(gathered)
            if is_kept:
                gathered._koila_gathered_of = self.sharded_param._local_tensor
                bridge.watch(gathered)
                bridge.watch_here(gathered)
                _kept[id(self)] = self, free
                return
            if freed is not None:
                freed.let_go(self)
        free(self)

    @functools.wraps(gather)
    def gathered(self: Any) -> None:
        gather(self)
        if self in _freed:
            _freed[self].take_again(self)

    replace(parameters, free.__name__, let_go_of)
    replace(parameters, gather.__name__, gathered)


def _of_fsdp1() -> KoilaError:
    return KoilaError(
        f"FullyShardedDataParallel ({user_line()}): its parameters are views of one flat "
        "tensor that is freed after each forward, before recorded calls run; use "
        "torch.distributed.fsdp.fully_shard(module) in its place, which koila runs in "
        "chunks"
    )


def _of_deepspeed() -> KoilaError:
    return KoilaError(
        f"DeepSpeedEngine ({user_line()}): its backward() is to be inside of torch's own when the "
        "gradient of the loss comes; use DistributedDataParallel or "
        "torch.distributed.fsdp.fully_shard(module), which koila runs in chunks, or DeepSpeed's "
        "gradient_accumulation_steps and batches that are not lazy"
    )


#: Modules, their classes, and what is raised where those get what is lazy.
_REFUSED = (
    (f"{_FSDP}.fully_sharded_data_parallel", "FullyShardedDataParallel", _of_fsdp1),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", _of_deepspeed),
)


def _refuse(
    kind: Any, error: Callable[[], KoilaError], replace: Replace, holds_lazy: Holds
) -> None:
    original = kind.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if holds_lazy(args) or holds_lazy(kwargs):
            raise error()
        return original(self, *args, **kwargs)

    replace(kind, "forward", forward)
