# SPDX-License-Identifier: Apache-2.0
"""Say why a call is not recorded, and what to do about it."""

from __future__ import annotations

import functools

import torch
from torch.utils import _pytree as pytree

from koila.basics import surroundings, table
from koila.basics.table import Args, Func, Words
from koila.reporting import reports
from koila.running import kept_casts

_DYNAMIC = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_COMPILED = torch.jit.ScriptFunction, torch.jit.ScriptModule, torch._C.ScriptMethod


def why(func: Func, args: Args, kwargs: Words | None) -> str:
    """Return why a call is not recorded, and what to do about it: a text that follows "since"."""
    name, owner = reports.name_of(func), getattr(func, "__self__", None)
    seen = surroundings.of_call()
    if seen:
        return f"{seen}; make the call without them"
    if func is torch.utils.checkpoint.checkpoint or owner is _REENTRANT:
        return "koila needs no checkpoint, and leaves this one to torch; call its function directly"
    if owner is _FULL_BACKWARD_HOOK:
        return (
            "a full backward hook of a module gets real tensors; hook the module's output instead, "
            "with output.register_hook() in a forward hook"
        )
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return "a custom autograd.Function gets real tensors; write it with torch's own calls"
    if isinstance(func, _COMPILED) or isinstance(owner, _COMPILED):
        return "compiled code gets real tensors; call the function that it was compiled from"
    if name.endswith("="):
        return "both tensors then share memory; write the values instead, with copy_()"
    is_write = name == "setitem" or name.endswith("_")
    if is_write and args and type(args[0]) is torch.Tensor:
        return (
            "it writes into a plain tensor; make that with h.new_zeros(...) of a lazy h, or join "
            "the values with torch.stack"
        )
    if name == "setitem":
        return _why_op("__setitem__", args, kwargs or {})
    if not table.schemas(name):
        return "koila cannot look into it, so it gets real tensors; call it where these are small"
    return _why_op(name, args, kwargs or {})


_REENTRANT = torch.utils.checkpoint.CheckpointFunction
#: What a module with such a hook calls on its inputs and outputs.
_FULL_BACKWARD_HOOK = torch.nn.modules._functions.BackwardHookFunction


def _why_op(name: str, args: Args, kwargs: Words) -> str:
    """Return why a call of an op of torch is not recorded."""
    tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    if any(one.layout is not torch.strided for one in tensors):
        return "it is given a sparse tensor; give it dense ones"
    if any(map(kept_casts.is_written, tensors)):
        return (
            "a weight was written in a block of torch.autocast, which goes on with the old one; "
            "write it after the block"
        )
    if any(one.numel() == 0 for one in tensors):
        if tensors[0].numel() == 0:
            return "a tensor that it is given is empty; leave empty batches out"
        return (
            "an index, or another tensor beside its first one, is empty; make the call only where "
            "something is chosen"
        )
    if _is_dynamic(name):
        return (
            "the size of its result depends on numbers, which have to be known first; torch.where "
            "and products with a mask keep sizes"
        )
    if name not in table.ROWS:
        return "koila has no rule for it; write it with other calls of torch"
    return "koila's rule for it does not cover such arguments; write it with other calls of torch"


@functools.cache
def _is_dynamic(name: str) -> bool:
    """Return whether torch says that the sizes of an op's results depend on numbers."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    return any(_DYNAMIC & set(getattr(packet, one).tags) for one in overloads)
