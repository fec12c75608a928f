# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel with find_unused_parameters=True.

With that, DDP walks the graph of the outputs after a forward, to find the parameters that were not
used. It puts the outputs through a function, so that backward visits all used parameters, with or
without a gradient, since DDP waits for each of them. For recorded outputs there is no graph yet:
the tape tells which parameters they were computed from, and after a backward those parameters that
got no gradient are visited. So no recorded call has to run early.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.parallel.distributed
from torch.autograd.graph import get_gradient_edge

from koila import _core
from koila.basics import engine, surroundings

Replace = Callable[[Any, str, Any], None]
Holds = Callable[[Any], bool]

_module: Any = torch.nn.parallel.distributed
#: By DDP module: the parameters that the backward of its last outputs has to visit.
waiting: weakref.WeakKeyDictionary[Any, _Visits] = weakref.WeakKeyDictionary()


class _Visits:
    """The parameters that a forward's outputs were made of, and which backward has visited."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = {id(one): one for one in parameters}
        self.nodes = {key: get_gradient_edge(one).node for key, one in self.parameters.items()}
        self.seen: set[int] = set()
        self.hooks = [
            node.register_hook(functools.partial(self._see, key))
            for key, node in self.nodes.items()
        ]

    def _see(self, key: int, *_: Any) -> None:
        self.seen.add(key)

    def end(self) -> None:
        """Stop noting visits."""
        for hook in self.hooks:
            hook.remove()

    def go(self) -> None:
        """Visit the parameters that a backward has left out."""
        self.end()
        left = [one for key, one in self.parameters.items() if key not in self.seen]
        if left:
            with torch.enable_grad():
                root = _Visit.apply(*(one.view_as(one) for one in left))
            engine.backward([root], [torch.ones_like(root)])


class _Visit(engine.Function):
    """Visits tensors in its backward, without a gradient."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.n_tensors = len(tensors)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, ...]:
        n_tensors: int = ctx.n_tensors
        return (None,) * n_tensors


def _behind(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors that a value was computed from, without running recorded calls."""
    if type(tensor) is not _core.LazyTensor:
        return [tensor] if isinstance(tensor, torch.Tensor) else []
    real, value = _core.real(tensor), _core.id(tensor)
    if real is not None:
        return [real]
    return [] if value is None else _core.behind(value)[0]


def _parameters_of(outputs: Iterable[Any]) -> Iterator[torch.Tensor]:
    for one in itertools.chain.from_iterable(map(_behind, outputs)):
        if one.grad_fn is not None:
            yield from engine.leaves_behind([one])
        elif one.requires_grad:
            yield one


def is_sink(function: Any, args: tuple[Any, ...]) -> bool:
    """Return whether this is DDP's function for outputs, and `behind_outputs` can replace it."""
    is_theirs = function is _module._DDPSink and not args[0]().static_graph
    return is_theirs and not surroundings.of_call()


def behind_outputs(module: Callable[[], Any], *outputs: Any) -> tuple[Any, ...]:
    """Replace torch's function: note the parameters that backward has to visit."""
    model = module()
    if torch.is_grad_enabled():
        before = waiting.pop(model, None)
        if before is not None:
            before.end()
        waiting[model] = _Visits(_parameters_of(outputs))
    if not model._ddp_sink_clone:
        return outputs
    return tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in outputs)


def visit() -> None:
    """After a backward (not inside of another one), visit the parameters that it left out."""
    if len(waiting) and torch._C._current_graph_task_id() == -1:
        for model, visits in list(waiting.items()):
            if visits.seen:
                del waiting[model]
                visits.go()


def patch(replace: Replace, holds_lazy: Holds) -> None:
    """Patch the function by which DDP finds the tensors in its outputs: for recorded outputs it
    returns the parameters that they were computed from."""
    original = _module._find_tensors

    def find(obj: Any) -> Any:
        if not holds_lazy(obj):
            return original(obj)
        if surroundings.of_call():
            return _core.live_with_all(original, (obj,), {}, True)
        with torch.enable_grad():
            return [one.view_as(one) for one in _parameters_of(original(obj))]

    replace(_module, original.__name__, find)
