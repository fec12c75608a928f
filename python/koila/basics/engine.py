# SPDX-License-Identifier: Apache-2.0
"""Call torch's autograd engine directly, without `torch.autograd.backward` and `grad`.

These functions first compare the sizes of gradients symbolically, for which they import sympy. That
takes half a second and some 40 MiB, which a first step under a limit may not have.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from koila import _core
from koila.basics.rows import as_new

_run: Any = torch.autograd.graph._engine_run_backward


def _accumulate_grad() -> type:
    """Return the type AccumulateGrad, also if koila is imported under no_grad or inference mode."""
    with torch._C._InferenceMode(False), torch.enable_grad():
        leaf = torch.ones((), dtype=torch.float32, device="cpu", requires_grad=True)
        return type(torch.autograd.graph.get_gradient_edge(leaf).node)


ACCUMULATE_GRAD = _accumulate_grad()


def nodes_behind(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield each node of the autograd graphs of tensors once."""
    steps: list[Any] = [node for t in tensors if (node := t.grad_fn) is not None]
    seen: set[Any] = set()
    while steps:
        node = steps.pop()
        if node not in seen:
            seen.add(node)
            yield node
            steps += [following for following, _ in node.next_functions if following is not None]


def leaves_behind(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each leaf of the autograd graphs of tensors once."""
    for node in nodes_behind(tensors):
        if type(node) is ACCUMULATE_GRAD:
            yield getattr(node, "variable")  # noqa: B009  torch's stubs do not know it


class _Direct(torch.autograd.function.FunctionMeta):
    """Lets autograd's node call `backward` itself."""

    def __init__(cls: Any, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> None:
        super().__init__(name, bases, members)  # type: ignore[no-untyped-call]
        if isinstance(cls.backward, types.FunctionType):  # not a class method
            cls._backward_cls.apply = cls.backward


class Function(torch.autograd.Function, metaclass=_Direct):
    """A base for koila's own autograd functions, whose calls cost less.

    torch's `apply` checks all arguments in Python for transforms of functorch, and koila's patch of
    it for lazy tensors; that of the node looks for the function to call. koila's need neither.
    """

    apply: Any = vars(torch._C._FunctionBase)["apply"]


class Instead(Function):
    """Replace a tensor by another one's numbers, in its memory; the gradient goes to the first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return as_new(other)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


#: A block in which nothing changes: of a mode that is in force already.
AS_IT_IS = contextlib.nullcontext()


def as_recorded(leaves: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Wrap a block in which leaves require a gradient that did so when calls on them were recorded,
    although the user has frozen them since.

    As in an eager graph made before the freezing, they get a gradient only if they require one
    again when it arrives.
    """
    frozen = [leaf for leaf in leaves if not leaf.requires_grad and not leaf.is_inference()]
    return _thawed(frozen) if frozen else AS_IT_IS


@contextlib.contextmanager
def _thawed(frozen: list[torch.Tensor]) -> Iterator[None]:
    with torch._C.DisableTorchFunctionSubclass():
        for leaf in frozen:
            leaf.requires_grad_()
        try:
            yield
        finally:
            for leaf in frozen:
                leaf.requires_grad_(False)


def thawed(leaf: torch.Tensor) -> torch.Tensor:
    """Return an alias, on a graph, of a leaf that was frozen after a call on it was recorded."""
    with torch._C._InferenceMode(False), torch.enable_grad(), as_recorded([leaf]):
        alias: torch.Tensor = torch.ops.aten.alias.default(leaf)
    return alias


def call_for_torch(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function for torch's C++: in it, calls on lazies run at once and return tensors."""
    before = _core.set_in_function(True)
    try:
        return func(*args, **kwargs)
    finally:
        _core.set_in_function(before)


def bound(run: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` as a method in place of `apply`, a method of the class of a custom function."""
    run.__name__ = apply.__name__
    return types.MethodType(run, apply.__self__)  # type: ignore[attr-defined]


def is_in_hook() -> bool:
    """Tell whether torch's engine is running a node on this thread that is not koila's: then a hook
    or a backward of the user is running."""
    node: Any = torch._C._current_autograd_node()
    function = getattr(node, "_forward_cls", None)
    return node is not None and not getattr(function, "runs_program", False)


def getters(inputs: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], bool]:
    """Return a function that tells whether a gradient of a tensor reaches one of `inputs`."""
    wanted: set[tuple[Any, int | None]] = {(id(t), None) for t in inputs}
    wanted.update((t.grad_fn, t.output_nr) for t in inputs if t.grad_fn is not None)

    def gets(tensor: torch.Tensor) -> bool:
        if (id(tensor), None) in wanted:
            return True
        steps: list[Any] = [(tensor.grad_fn, tensor.output_nr)] if tensor.grad_fn else []
        seen: set[Any] = set()
        while steps:
            step = steps.pop()
            if step in wanted or (id(getattr(step[0], "variable", None)), None) in wanted:
                return True
            if step[0] is not None and step[0] not in seen:
                seen.add(step[0])
                steps += step[0].next_functions
        return False

    return gets


#: Runs a backward pass for a tuple of outputs and one of their gradients, without a frame here.
run_backward: Callable[..., Any] = functools.partial(
    _run,
    keep_graph=False,
    create_graph=False,
    inputs=(),
    allow_unreachable=True,
    accumulate_grad=True,
)


def backward(
    outputs: Sequence[torch.Tensor | GradientEdge],
    gradients: Sequence[torch.Tensor],
    *,
    is_retained: bool = False,
    inputs: Sequence[torch.Tensor] = (),
) -> None:
    """Run a backward pass from outputs with these gradients, and accumulate the gradients of
    leaves: of all, or of `inputs` alone if there are any. `is_retained`: keep the graphs."""
    run_backward(tuple(outputs), tuple(gradients), keep_graph=is_retained, inputs=tuple(inputs))


def gradients_of(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    is_graph: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Run a backward pass from outputs with these gradients. Return the gradients of `inputs`; None
    for those it does not reach. If `is_graph` (create_graph), they have a graph themselves, and the
    graphs are kept."""
    found: tuple[torch.Tensor | None, ...] = _run(
        tuple(outputs),
        tuple(gradients),
        is_graph,
        is_graph,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found
