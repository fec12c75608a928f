# SPDX-License-Identifier: Apache-2.0
"""Custom autograd functions in the functions of checkpoints: backward calls them once more.

They run live, also if the program runs in chunks (`bridge.py`). Autograd then keeps handles in
place of what they save (`recomputed.py`), in the body of the outermost checkpoint.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from koila import _core
from koila.basics import engine, generator_state, lines, surroundings, switches
from koila.messages.errors import KoilaError
from koila.random import generators
from koila.running import checkpoints, custom_memory, recomputed
from koila.running.recomputed import Body, Handle
from koila.running.repeated import Call, Layout, Memory, OfPart, Ref
from koila.staged import meta
from koila.staged.aliases import version_of
from koila.staged.meta import map_nested


def in_forward(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return `apply` of a custom function, such that calls in its forward on lazies, which it did
    not get as arguments, run at once and return tensors: autograd, in C++, gets what it returns."""

    def run(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = engine.call_for_torch(apply, *args, **kwargs)
        lazies = [one for one in meta.leaves(made) if type(one) is _core.LazyTensor]
        if lazies:
            with torch._C.DisableTorchFunctionSubclass():
                for lazy in lazies:  # forget what autograd noted on it: it may be used again
                    torch.Tensor.detach_(lazy)
            raise KoilaError(
                f"{cls.__name__}: its forward returns a lazy tensor that it did not get as an "
                f"argument ({lines.user_line()}), and its gradient would be lost. Return a clone "
                "of it, or pass it as an argument"
            )
        return made

    return engine.bound(run, apply)


def in_backward(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return `apply` of the node of custom functions, such that calls in its backward on lazies run
    at once and return tensors, with a graph too: autograd gets what it returns."""

    @functools.wraps(apply)
    def run(node: Any, *grads: Any) -> Any:
        return engine.call_for_torch(_in_tensors, apply, node, *grads)

    return run


def _in_tensors(func: Callable[..., Any], /, *args: Any) -> Any:
    """Call a function, and return tensors in place of lazies that it returns."""
    made = func(*args)
    if isinstance(made, tuple | list):
        return tuple(map(_as_tensor, made))
    return _as_tensor(made)


def _as_tensor(made: Any) -> Any:
    return made.view_as(made) if type(made) is _core.LazyTensor else made


def run_live(apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run `apply` of a custom function on real tensors. In the forward of another one, return
    tensors."""
    apply = custom_memory.counted(_in_body(apply))
    return _core.live_with_all(apply, args, kwargs, _core.set_in_function(None))


def _in_body(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return `apply` of a custom function, such that autograd keeps nothing that can be computed
    again if this thread is recording the body of a checkpoint."""
    region = checkpoints.outermost()
    if not region or surroundings.of_call():
        return apply

    def run(_: Any, *args: Any, **kwargs: Any) -> Any:
        if not meta.tensors((args, kwargs)):
            return apply(*args, **kwargs)
        return _run(recomputed.body_of(region), apply, args, kwargs)

    return engine.bound(run, apply)


def _run(body: Body, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a custom function. Backward calls it again for what it has saved, unless it writes its
    inputs or returns their memory."""
    tree, refs, handles = body.tree, list[Ref](), list[Handle]()
    tensors = meta.tensors((args, kwargs))
    if any(one.untyped_storage()._cdata in tree.watched for one in tensors):
        return func(*args, **kwargs)
    name = f"{func.__self__.__name__}.apply"  # type: ignore[attr-defined]

    def refer(tensor: Tensor) -> Ref:
        refs.append(body.read(tensor, name))
        return refs[-1]

    def pack(tensor: Tensor) -> Handle:
        handles.append(Handle(body, tensor))
        handles[-1].tensor, handles[-1].version = tensor.detach(), version_of(tensor)
        handles[-1].memory = Layout(tensor)
        return handles[-1]

    words, named = map_nested((args, kwargs), Tensor, refer)
    context = switches.Context.current(tensors[0].device)
    own = dict.fromkeys(generators.generator_of(one.device) for one in tensors)
    own[torch.default_generator] = None
    states = [(one, generator_state.get(one)) for one in own]
    before = list(map(version_of, tensors))
    with saved_tensors_hooks(pack, Handle.get):
        made = func(*args, **kwargs)
    results = made if isinstance(made, tuple | list) else (made,)
    found = [one if isinstance(one, Tensor) else None for one in results]
    memories = {one.untyped_storage()._cdata for one in tensors}
    is_again = not tree.is_settled and before == list(map(version_of, tensors))
    for one in found:
        is_again = is_again and (one is None or one.untyped_storage()._cdata not in memories)
    for handle in handles:
        handle.tensor, handle.is_pinned = None if is_again else handle.tensor, not is_again
    if not is_again:
        return made
    body.saved += map(weakref.ref, handles)
    outs: list[int | None] = []
    for one in found:
        key = None if one is None else tree.new_key(one)
        if one is not None and key is not None:
            tree.makers[key], tree.versions[key] = body.region, version_of(one)
            tree.results.append(weakref.ref(one))
        outs.append(key)
    call = Call(body.region, func, words, named, context, outs, None, states)
    body.add(call, (ref.key for ref in refs))
    return made


def add_memory(region: int, whole: Tensor, add_reader: Callable[[], Callable[[], Tensor]]) -> None:
    """Note a tensor that a part, which was cut off in the body of a checkpoint (the outermost one:
    `region`), has handed out. `add_reader` returns, for one more reader, a function that computes
    the tensor again."""
    memory = Memory(whole, add_reader)
    recomputed.body_of(region).tree.memories[whole.untyped_storage()._cdata] = memory


def results() -> Iterator[Tensor]:
    """Yield the results of custom functions in the bodies of checkpoints."""
    for body in list(recomputed.alive.values()):
        yield from (one for ref in body.tree.results if (one := ref()) is not None)


def way_to(tensor: Tensor) -> Callable[[], Tensor] | None:
    """Return a function that computes a tensor again which a custom function in a checkpoint, or a
    part cut off in one, has made; None if none has."""
    ways = (_way_in(body, tensor) for body in list(recomputed.alive.values()))
    return next((way for way in ways if way is not None), None)


def _way_in(body: Body, tensor: Tensor) -> Callable[[], Tensor] | None:
    tree = body.tree
    if tree.is_settled or body.outer is not None:
        return None
    tree.forget_if_written(tensor)
    key, memory = tree.key_of(tensor), tree.memory_of(tensor)
    if memory is not None:
        return OfPart(tensor, memory).get
    if key is None or key not in tree.versions or tree.makers[key] != body.region:
        return None
    handle = Handle(body, tensor, tensor.requires_grad)
    body.handed.setdefault(key, []).append(weakref.ref(handle))
    return handle.get
