# SPDX-License-Identifier: Apache-2.0
"""Parameters that are sharded over processes, and gathered before a module runs.

Collective calls are made where torch makes them, whatever the number of chunks: so no process waits
for another that makes more of them.

If fully_shard (FSDP2) frees a module's gathered parameters after its forward, the recorded calls
run before that, at the end of the module, and the program is cut there (`bridge.py`). torch's own
hooks gather the parameters again when the gradient of the module's outputs arrives, and reduce
their gradients when the gradient of its inputs is computed.

If the parameters stay gathered (`reshard_after_forward=False`, and the root module), recorded calls
run later, and the parameters that they read stay gathered until then. torch's own code reduces the
gradients, at the end of the backward that delivers those of the whole batch.

Refused are FullyShardedDataParallel (FSDP1), which frees the flat tensor behind its parameters
before recorded calls run, and DeepSpeed's engine, which has to be inside of torch's backward when
the gradient of the loss is computed.
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
from koila.recording import parts
from koila.staged import hooks, meta

Replace = Callable[[Any, str, Any], None]
Holds = Callable[[Any], bool]

_FSDP = "torch.distributed.fsdp"
_patched: set[type] = set()
#: By id: parameters that pending calls read when torch wanted to free them, and what frees them.
kept: dict[int, tuple[Any, Callable[[Any], None]]] = {}


class _Freed:
    """A freed parameter, and the parts that read it and have not run backward yet."""

    def __init__(self) -> None:
        self.parts: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self.numbers = (0, 0)  # checksum of this process's shard when it was freed

    def note_parts(self, parameter: Any) -> None:
        """Note, before the parameter is freed, which parts read it."""
        self.parts.update(parts.that_read(parameter._unsharded_param))
        if self.parts:
            self.numbers = _numbers_of(parameter)

    def take_again(self, parameter: Any) -> None:
        """Tell the parts that the parameter is gathered again, and whether with the same numbers.
        Only a checksum shows a write by an optimizer or through .data."""
        is_same = not self.parts or self.numbers == _numbers_of(parameter)
        for part, leaves in self.parts.items():
            part.take_again(leaves, is_same)


def _numbers_of(parameter: Any) -> tuple[int, int]:
    return meta.checksum(parameter.sharded_param._local_tensor)


_freed: weakref.WeakKeyDictionary[Any, _Freed] = weakref.WeakKeyDictionary()


def patch(replace: Replace, holds_lazy: Holds) -> None:
    """Patch the classes of those modules that are imported by now. Importing them would take longer
    than importing torch."""
    module: Any = sys.modules.get(f"{_FSDP}._fully_shard._fsdp_state")
    if module is not None and module.FSDPState not in _patched:
        _patched.add(module.FSDPState)
        _patch_states(module.FSDPState, replace)
        _patch_groups(module.FSDPParamGroup, replace)
        _patch_parameters(sys.modules[module.FSDPParamGroup.__module__], replace)
    for name, of_class, why in _REFUSED:
        kind: Any = getattr(sys.modules.get(name), of_class, None)
        if kind is not None and kind not in _patched:
            _patched.add(kind)
            _refuse(kind, why, replace, holds_lazy)


def end() -> None:
    """Forget which classes were patched: the patches were undone."""
    _patched.clear()


def free_gathered() -> None:
    """Free the gathered parameters that torch wanted to free, once no pending call reads them."""
    for key, (parameter, free) in list(kept.items()):
        if not parts.is_read(parameter._unsharded_param):
            del kept[key]
            if parameter.sharded_state.name != "UNSHARDED":
                free(parameter)


def _is_resharded(group: Any) -> bool:
    """Return whether torch frees a group's gathered parameters after a forward, and gathers them
    again for the backward."""
    return bool(group._reshard_after_forward)


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the arguments or results of a module."""
    for one in tree_leaves(given):
        if isinstance(one, torch.Tensor):
            yield one
        elif dataclasses.is_dataclass(one) and not isinstance(one, type):
            yield from _tensors([getattr(one, field.name) for field in dataclasses.fields(one)])


def _is_any_lazy(tensors: Iterable[torch.Tensor]) -> bool:
    return any(type(tensor) is _core.LazyTensor for tensor in tensors)


def _patch_states(states: Any, replace: Replace) -> None:
    """Patch the class that registers hooks on a module's outputs, which start torch's backward work
    for the module. For calls in chunks, hooks on the parameters' gradients start it."""
    register = states._register_pre_backward_hook
    finish = states._root_post_backward_final_callback

    def registered(self: Any, output: Any) -> Any:
        outputs = list(_tensors(output))
        if not _is_any_lazy(outputs):
            return register(self, output)
        if any(map(_is_resharded, self._fsdp_param_groups)):
            _core.live_with_all(functools.partial(register, self), (outputs,), {}, True)
            for parameter in _parameters(self, True):
                for part in _freed[parameter].parts:
                    part.before[id(self)] = functools.partial(_gather_again, self)
        if torch.is_grad_enabled():
            for parameter in (one._unsharded_param for one in _parameters(self, False)):
                if parameter.requires_grad and not hasattr(parameter, "_koila_reduces"):
                    parameter._koila_reduces = True
                    parameter.register_post_accumulate_grad_hook(_Reduce(self))
            for lazy in outputs if not all(map(_is_resharded, self._fsdp_param_groups)) else ():
                if type(lazy) is _core.LazyTensor:
                    hooks.register_live(lazy, self._pre_backward)
        return output

    def finished(self: Any) -> None:
        finish(self)
        free_gathered()

    replace(states, register.__name__, registered)
    replace(states, finish.__name__, finished)


def _parameters(state: Any, is_resharded: bool) -> Iterator[Any]:
    """Yield the parameters that are freed after a forward, or those that stay gathered."""
    for group in state._fsdp_param_groups:
        if _is_resharded(group) == is_resharded:
            yield from group.fsdp_params


def _gather_again(state: Any) -> None:
    """Gather the parameters before a part's backward. torch does so when the gradient of the
    module's output arrives, but that of another value of the part may arrive first."""
    if any(one.sharded_state.name != "UNSHARDED" for one in _parameters(state, True)):
        state._pre_backward(None)


class _Reduce:
    """Hook on a gathered parameter's gradient: torch reduces gradients as this backward ends."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __call__(self, _: torch.Tensor) -> None:
        for group in self.state._fsdp_param_groups:  # an earlier reduction missed this gradient
            state = type(group._training_state)
            if group._training_state == state.POST_BACKWARD:
                group._training_state = state.IDLE
        self.state._register_root_post_backward_final_callback()


def fully_shard(outputs: Any) -> None:
    """Do nothing: called live on the outputs of a module whose parameters are freed after its
    forward, it runs the recorded calls. Reports show its name."""


def _patch_groups(groups: Any, replace: Replace) -> None:
    """Patch the class of parameter groups: run pending calls before their parameters are freed.

    For groups that stay gathered, leave out torch's function that tells when the gradients of a
    module's inputs are computed: the program would be cut for it.
    """
    register = groups._register_post_backward_hook
    leave = groups.post_forward

    def registered(self: Any, args: Any, kwargs: Any) -> Any:
        if not _is_resharded(self) and _is_any_lazy(_tensors((args, kwargs))):
            return args, kwargs
        return register(self, args, kwargs)

    def left(self: Any, module: Any, given: Any, output: Any) -> Any:
        outputs = list(_tensors(output))
        if not _is_any_lazy(outputs):
            return leave(self, module, given, output)
        if _is_resharded(self):
            _core.live_with_all(fully_shard, (outputs,), {}, True)
        for parameter in self.fsdp_params:
            if _is_resharded(self):
                _freed.setdefault(parameter, _Freed())
                parameter._unsharded_param._koila_shard = parameter.sharded_param
            elif _freed.pop(parameter, None) is not None:
                del parameter._unsharded_param._koila_shard
        return leave(self, module, given, output)

    replace(groups, register.__name__, registered)
    replace(groups, leave.__name__, left)


def _patch_parameters(module: Any, replace: Replace) -> None:
    """Patch the class of parameters: those that pending calls read stay gathered."""
    parameters = module.FSDPParam
    free, gather = parameters.free_unsharded_param, parameters.to_unsharded

    def freeing(self: Any) -> None:
        gathered, freed = getattr(self, "_unsharded_param", None), _freed.get(self)
        if gathered is not None:
            is_kept = _core.leaves_of(gathered) if freed is not None else parts.is_read(gathered)
            if is_kept:
                gathered._koila_gathered_of = self.sharded_param._local_tensor
                parts.watch(gathered)
                parts.watch_here(gathered)
                kept[id(self)] = self, free
                return
            if freed is not None:
                freed.note_parts(self)
        free(self)

    def gathered(self: Any) -> None:
        gather(self)
        if self in _freed:
            _freed[self].take_again(self)

    replace(parameters, free.__name__, freeing)
    replace(parameters, gather.__name__, gathered)


#: Modules, their classes, and why these raise for lazy inputs.
_REFUSED = (
    (
        f"{_FSDP}.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "its parameters are views of one flat tensor that is freed after each forward, before "
        "recorded calls run; use torch.distributed.fsdp.fully_shard(module) in its place, which "
        "koila runs in chunks",
    ),
    (
        "deepspeed.runtime.engine",
        "DeepSpeedEngine",
        "its backward() is to be inside of torch's own when the gradient of the loss comes; use "
        "DistributedDataParallel or torch.distributed.fsdp.fully_shard(module), which koila runs "
        "in chunks, or DeepSpeed's gradient_accumulation_steps and batches that are not lazy",
    ),
)


def _refuse(kind: Any, why: str, replace: Replace, holds_lazy: Holds) -> None:
    original = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if holds_lazy(args) or holds_lazy(kwargs):
            raise KoilaError(f"{kind.__name__} ({user_line()}): {why}")
        return original(self, *args, **kwargs)

    replace(kind, "forward", forward)
