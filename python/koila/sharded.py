# SPDX-License-Identifier: Apache-2.0
"""Parameters that torch shards over processes, and gathers before a module runs.

fully_shard (FSDP2) lets go of gathered parameters after a module's forward. Recorded calls run
later: what they read stays gathered until they ran. So each group of parameters is gathered once
for a forward, however many chunks it runs in, and no process waits for another that needs more of
them. Torch's own code reduces the gradients, at the end of the backward that delivers those of the
whole batch.

FullyShardedDataParallel (FSDP1) frees the flat tensor that its parameters are views of, before
recorded calls run: it is refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from koila import bridge
from koila.errors import KoilaError
from koila.lines import user_line

Replace = Callable[[Any, str, Any], None]
Holds = Callable[[Any], bool]

_FSDP = "torch.distributed.fsdp"
_patched: set[type] = set()
#: Parameters that torch let go of while calls wait that read them, by id, and what frees them.
_kept: dict[int, tuple[Any, Callable[[Any], None]]] = {}


def patch(replace: Replace, holds_lazy: Holds) -> None:
    """Patch the classes of those modules that are imported by now: to import them takes longer than
    to import torch."""
    module: Any = sys.modules.get(f"{_FSDP}._fully_shard._fsdp_state")
    if module is not None and module.FSDPState not in _patched:
        _patched.add(module.FSDPState)
        _patch_states(module.FSDPState, replace, holds_lazy)
        _patch_groups(module.FSDPParamGroup, replace, holds_lazy)
    module = sys.modules.get(f"{_FSDP}.fully_sharded_data_parallel")
    if module is not None and module.FullyShardedDataParallel not in _patched:
        _patched.add(module.FullyShardedDataParallel)
        _refuse(module.FullyShardedDataParallel, replace, holds_lazy)


def end() -> None:
    """The patches were undone."""
    _patched.clear()


def let_go() -> None:
    """Free the gathered parameters that torch let go of, and no call waits to read any more."""
    for key, (parameter, free) in list(_kept.items()):
        if not _is_read(parameter):
            del _kept[key]
            if parameter.sharded_state.name != "UNSHARDED":
                free(parameter)


def _is_read(parameter: Any) -> bool:
    gathered = getattr(parameter, "_unsharded_param", None)
    return gathered is not None and bridge.is_read(gathered)


def _gathered(state: Any) -> Iterator[torch.Tensor]:
    for group in state._fsdp_param_groups:
        yield from (parameter._unsharded_param for parameter in group.fsdp_params)


def _patch_states(states: Any, replace: Replace, holds_lazy: Holds) -> None:
    """Hooks on a module's outputs tell torch that gradients are coming. Of recorded calls the
    parameters' own gradients tell that."""
    register = states._register_pre_backward_hook
    finish = states._root_post_backward_final_callback

    @functools.wraps(register)
    def registered(self: Any, output: Any) -> Any:
        if not holds_lazy(output):
            return register(self, output)
        if torch.is_grad_enabled():
            for parameter in _gathered(self):
                if parameter.requires_grad and not hasattr(parameter, "_koila_reduces"):
                    parameter._koila_reduces = True  # type: ignore[attr-defined]
                    parameter.register_post_accumulate_grad_hook(_Reduce(self))
        return output

    @functools.wraps(finish)
    def finished(self: Any) -> None:
        finish(self)
        let_go()

    replace(states, register.__name__, registered)
    replace(states, finish.__name__, finished)


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


def _patch_groups(groups: Any, replace: Replace, holds_lazy: Holds) -> None:
    """What waits keeps its parameters, and is not cut for a function that tells torch when the
    inputs of a module have their gradients."""
    register = groups._register_post_backward_hook
    parameters: Any = sys.modules[groups.__module__].FSDPParam
    free = parameters.free_unsharded_param

    @functools.wraps(register)
    def registered(self: Any, args: Any, kwargs: Any) -> Any:
        if holds_lazy(args) or holds_lazy(kwargs):
            return args, kwargs
        return register(self, args, kwargs)

    @functools.wraps(free)
    def freed(self: Any) -> None:
        if _is_read(self):
            _kept[id(self)] = self, free
        else:
            free(self)

    replace(groups, register.__name__, registered)
    replace(parameters, free.__name__, freed)


def _refuse(kind: Any, replace: Replace, holds_lazy: Holds) -> None:
    original = kind.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if holds_lazy(args) or holds_lazy(kwargs):
            raise KoilaError(
                f"FullyShardedDataParallel ({user_line()}): its parameters are views of one flat "
                "tensor that is freed after each forward, before recorded calls run; use "
                "torch.distributed.fsdp.fully_shard(module) in its place, which koila runs in "
                "chunks"
            )
        return original(self, *args, **kwargs)

    replace(kind, "forward", forward)
