# SPDX-License-Identifier: Apache-2.0
"""The tensors that a part (`cut.py`) hands out, and the autograd nodes behind them.

Each tensor is on a node `HandedOut`, which collects its gradient. It leads to nodes `OfLeaves`, one
for each group of leaves, which run the part's backward and return the gradients of their leaves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from koila import _core
from koila.basics.lines import user_line
from koila.basics.rows import as_new, set_memory, without_memory
from koila.messages.errors import KoilaError
from koila.staged import aliases, hooks
from koila.staged.facts import Info
from koila.staged.program import Program

_data: Any = torch._C.TensorBase.data  # torch's own attribute
#: Returns the number of the current pass of autograd's engine.
task: Callable[[], int] = torch._C._current_graph_task_id
#: The key in the metadata of a view's node for its `Root`, the number of the view's value, and
#: whether its call returned nothing else.
_VIEW = "koila: a view of what was handed out"


#: A `Cut`: `cut.py` imports this module.
Part = Any


class Memory:
    """The memory of a value whose number the user has, and that a part computes again."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.memory: StorageWeakRef | None = None
        self.watched: aliases.Kept | None = None  # the whole memory, once x.data was taken of it

    def note(self, tensor: torch.Tensor) -> None:
        """Note the tensor that the user has."""
        self.memory = StorageWeakRef(tensor.untyped_storage())

    def watch(self, tensor: torch.Tensor) -> None:
        """Watch the memory of this tensor for writes through x.data, which change no version."""
        if self.watched is None:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            set_memory(whole, tensor.untyped_storage())
            self.watched = aliases.Kept(whole, True)

    def how_written(self) -> str:
        """Return "uncounted" if it was written since it is watched, else ""."""
        return "uncounted" if self.watched is not None and self.watched.is_written() else ""


class Root(Memory):
    """A value that was handed out, and that needs a gradient."""

    def __init__(self, cut: Part, value: int, number: torch.Tensor | None) -> None:
        super().__init__(value)
        self.cut = cut
        self.number = number
        self.lazy: Any = None  # the value on the part's tape, until its backward
        self.tensor: Callable[[], torch.Tensor | None] = lambda: None  # as which it was handed out
        self.has_hook = False  # or it retains its gradient; or a view of it
        #: An empty tensor that shares the version counter of the tensor, but not its memory.
        self.counter, self.n_writes = torch.empty(0), 0
        cut.handed.append(weakref.ref(self))

    def note(self, tensor: torch.Tensor) -> None:
        """Note the tensor as which the value was handed out."""
        super().note(tensor)
        self.tensor = weakref.ref(tensor)
        self.counter = tensor.detach()
        _data.__set__(self.counter, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
        self.n_writes = self.counter._version

    def how_written(self) -> str:
        """Return how its memory was written since: "counted" by torch, "uncounted", or ""."""
        return "counted" if self.counter._version != self.n_writes else super().how_written()

    def is_inner(self, value: int) -> bool:
        """Return whether a call of the part reads `value` (this value or a view of it) to compute
        another value that was handed out: the gradient of that call never gets to the tensor."""
        others = (handed() for handed in self.cut.handed)
        return any(one not in (None, self) for one in others) and value in self.cut.inner


class Group:
    """Leaves that the same handed-out values were computed from; they share a node.

    Autograd's engine visits every leaf of a node, even if no gradient reaches it: it calls the
    hooks there, and raises if a graph there was freed. So the node of a value must not lead to a
    leaf that the value was not computed from.
    """

    def __init__(self, values: Iterable[int], leaves: Sequence[torch.Tensor]) -> None:
        self.values = frozenset(values)
        self.leaves = leaves
        self.n_leaves = len(leaves)
        self.node: Callable[[], Any] = lambda: None

    def asked_for(self) -> list[bool]:
        """Return, for each leaf, whether the current pass of the engine visits it."""
        node: Any = self.node()
        if node is None:
            return [False] * self.n_leaves
        return [_is_executed(following) for following, _ in node.next_functions]


def _is_executed(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch raises this for a leaf that is an input of autograd.grad()
        return True


class Pass:
    """One pass of autograd's engine through a part: the gradients that arrived at its values, and
    those computed from them for groups of leaves."""

    def __init__(self) -> None:
        self.given: list[tuple[Root, torch.Tensor]] = []
        self.found: dict[Group, list[torch.Tensor | None]] = {}

    def add(self, group: Group, gradients: list[torch.Tensor | None]) -> None:
        """Add gradients of the leaves of a group."""
        before = self.found.get(group, [None] * len(gradients))
        self.found[group] = [
            one if other is None else other if one is None else one + other
            for one, other in zip(before, gradients, strict=True)
        ]


def apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class Gradient(torch.autograd.Function):
    """The node behind gradients of leaves that were computed with create_graph=True.

    `tensors` are what they depend on: the gradients of the roots, and the leaves `behind` the
    roots. Those named in `gone` are detached, since the gradients do not depend on them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cut: Part,
        roots: Sequence[Root],
        leaves: Sequence[torch.Tensor],
        found: Sequence[torch.Tensor | None],
        behind: Sequence[torch.Tensor],
        gone: set[int],
        *tensors: torch.Tensor,
    ) -> tuple[Any, ...]:
        ctx.cut, ctx.roots, ctx.leaves, ctx.behind, ctx.gone = cut, roots, leaves, behind, gone
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[: len(roots)])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *seconds: torch.Tensor | None) -> tuple[Any, ...]:
        given, behind = ctx.saved_tensors, ctx.behind
        found = ctx.cut.go_back_twice(ctx.roots, ctx.leaves, behind, given, seconds)
        names = [*range(-1, -1 - len(given), -1), *map(id, behind)]
        for name, gradient in zip(names, found, strict=True):
            if gradient is not None and name in ctx.gone:
                raise KoilaError(
                    f"a second derivative, of shape {list(gradient.shape)}, is of a tensor that "
                    "the first was not made of: a mistake of koila's, please report it"
                )
        return (None,) * 6 + tuple(found)


class OfLeaves(torch.autograd.Function):
    """The node of a group of leaves. It returns a stand-in without memory for each value computed
    from them; its backward runs the part."""

    runs_program = True

    @staticmethod
    def forward(
        ctx: Any, cut: Part, group: Group, like: Sequence[torch.Tensor], *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.cut, ctx.group, group.node = cut, group, weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        return tuple(without_memory(one.shape, one.dtype, one.device) for one in like)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> tuple[Any, ...]:
        return None, None, None, *ctx.cut.go_back(ctx.group)


class HandedOut(torch.autograd.Function):
    """The node of a value that was handed out; its backward collects the gradient."""

    @staticmethod
    def forward(ctx: Any, root: Root, has_leaves: bool, *stand_ins: torch.Tensor) -> torch.Tensor:
        ctx.root, ctx.n, ctx.has_leaves = root, len(stand_ins), has_leaves
        ctx.set_materialize_grads(False)
        number, root.number = root.number, None
        assert number is not None
        return as_new(number)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, ...]:
        if gradient is not None and ctx.has_leaves:
            passes = ctx.root.cut.passes
            passes.setdefault(task(), Pass()).given.append((ctx.root, gradient))
        return None, None, *[gradient if ctx.has_leaves else None] * ctx.n


def _refusal(hook: Any) -> KoilaError:
    """Return the error for a hook on a node that replaces the graph of a part."""
    return KoilaError(
        f"{hook!r} cannot be registered on this grad_fn: the program was cut after the call that "
        "made the tensor, and the node stands for all calls before; register it on the tensor "
        "(Tensor.register_hook), or run it whole: koila.config(chunks=1)"
    )


def _refuse_hook(node: Any, hook: Any) -> None:
    raise _refusal(hook)


class _GradInputs:
    """Stands for the `grad_inputs` of a call before a cut, in hooks of the node behind its result:
    they exist in chunks only."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def _refuse(self, *_: Any) -> NoReturn:
        raise _refusal(self._hook)

    __getitem__ = __iter__ = __len__ = __bool__ = __eq__ = __repr__ = __add__ = __radd__ = _refuse


def _is_only_output(root: Root) -> bool:
    """Return whether the call that made a handed-out value returned nothing else. Then gradients
    that arrive at the value are those that arrive at the node of the call in eager. After the
    backward none arrives any more."""

    def is_one() -> bool:
        number = _core.real(root.lazy)
        if number is not None and number.grad_fn is not None:  # the part has run whole
            return len(number.grad_fn._input_metadata) == 1
        node = Program([root.lazy]).node_of(root.value)
        return node is not None and len(node.outs) == 1

    return root.lazy is None or _core.held(root.lazy, is_one, (), {})


def _refusal_of_view(hook: Any) -> KoilaError:
    return KoilaError(
        f"register_hook: {hook!r} is on a view that was written since: eager would call it with a "
        "part of the gradient, and the program was cut after the call that made the view; run it "
        "whole: koila.config(chunks=1)"
    )


def _until_written(
    root: Root, hook: Any, refusal: Callable[[Any], KoilaError] = _refusal
) -> Callable[..., Any]:
    """Return a hook of a handed-out value, or of its node, that refuses where eager would not call
    it.

    A write to a tensor that is a view gives it another node in eager, and gradients of later calls
    arrive at that one.
    """

    def is_a_view() -> bool:
        number = _core.real(root.lazy)  # if the part has run whole
        return Info.of(root.value).view is not None if number is None else number._is_view()

    is_view = root.lazy is not None and _core.held(root.lazy, is_a_view, (), {})

    def checked(*gradients: Any) -> Any:
        if is_view and root.counter._version != root.n_writes:  # before the hook, or after it
            raise refusal(hook)
        return hook(*gradients)

    return checked


def until_written(tensor: torch.Tensor, hook: Any) -> Any:
    """Return a hook of a tensor, as `_until_written` if the tensor was handed out."""
    root = root_of(tensor)
    return hook if root is None else _until_written(root, hook, _refusal_of_view)


def _register_prehook(node: Any, hook: Any) -> Any:
    """Register a hook that is called before the node of a handed-out value, with its gradient."""
    root: Root = node.root
    if not _is_only_output(root):
        raise _refusal(hook)
    root.has_hook = True
    if root.lazy is None or not root.is_inner(root.value):
        return torch._C._FunctionBase.register_prehook(node, _until_written(root, hook))
    checked = _until_written(root, hook)

    def of_value(gradient: torch.Tensor) -> Any:
        made = checked((gradient,))
        return next(iter(made)) if isinstance(made, tuple) else made

    words: Any = torch.Tensor.register_hook, (root.lazy, hooks.OfNode(of_value)), {}
    return _core.held(root.lazy, hooks.register, words, {})  # its whole gradient arrives there


def _register_posthook(node: Any, hook: Any) -> Any:
    """Register a hook that is called after the node of a handed-out value. It may use the value's
    gradient, but not what the call makes of it."""
    root: Root = node.root
    if not _is_only_output(root) or (root.lazy is not None and root.is_inner(root.value)):
        raise _refusal(hook)
    root.has_hook = True
    checked = _until_written(root, hook)

    def after(_: Any, gradients: Any) -> None:
        if checked(_GradInputs(hook), gradients) is not None:
            raise _refusal(hook)

    return torch._C._FunctionBase.register_hook(node, after)


for _class, _before, _after in (
    (HandedOut, _register_prehook, _register_posthook),
    (OfLeaves, _refuse_hook, _refuse_hook),
):
    _node_class: Any = _class._backward_cls
    _node_class.register_prehook, _node_class.register_hook = _before, _after


class ViewNode(hooks.PendingNode):
    """The `grad_fn` of a view of a handed-out value, where the gradients that arrive at the node
    are not those of eager."""

    register_hook = register_prehook = _refuse_hook


def node_of(lazy: Any, node: Any) -> Any:
    """Return the `grad_fn` to show of a lazy that has the real node `node`."""
    root, value, is_alone = _view_behind(node)
    is_same = root is None or (is_alone and not root.is_inner(value))
    return node if is_same else ViewNode(lazy, lambda _: node)


def _view_behind(node: Any) -> tuple[Root | None, int, bool]:
    """Return the handed-out value and the number of its view if `node` is of such a view, and
    whether the call that took the view returned nothing else."""
    none = None, -1, True
    found: tuple[Root | None, int, bool] = none if node is None else node.metadata.get(_VIEW, none)
    return found


def root_of(tensor: torch.Tensor) -> Root | None:
    """Return the `Root` of a tensor that was handed out; None for other tensors."""
    root = getattr(tensor.grad_fn, "root", None)
    return root if isinstance(root, Root) else None


def note_hook(tensor: torch.Tensor) -> None:
    """Note that a hook sees the gradient of a tensor if it, or its base, was handed out."""
    root = root_of(tensor) or _view_behind(tensor.grad_fn)[0]
    if root is not None:
        root.has_hook = True


def whole_gradient_of(tensor: torch.Tensor) -> Any:
    """Return the lazy, on a part's tape, that gets the whole gradient of a handed-out tensor.
    Return None if the tensor itself gets it, or was not handed out."""
    root = root_of(tensor)
    return root.lazy if root is not None and root.is_inner(root.value) else None


def note_view(tensor: torch.Tensor, root: Root, value: int, n_values: int) -> None:
    """Note on a tensor's node that it is a view of a handed-out value, `value` of `n_values`."""
    node: Any = tensor.grad_fn
    if node is not None:
        near = [v for v in (value - 1, value + 1) if 0 <= v < n_values]  # its call's other results
        view, *others = (Info.of(v).view for v in (value, *near))
        is_alone = all(other is None or view is None or other[0] != view[0] for other in others)
        node.metadata[_VIEW] = root, value, is_alone


def _inner_root(tensor: torch.Tensor) -> Root | None:
    """Return the `Root` behind a handed-out tensor, or a view of one, that its part has read."""
    root = root_of(tensor)
    value = -1 if root is None else root.value
    if root is None:
        root, value, _ = _view_behind(tensor.grad_fn)
    return root if root is not None and root.is_inner(value) else None


def refuse_inner(tensors: Iterable[Any], what: str) -> None:
    """Raise if a share of the gradient of one of these tensors stays in a part that was cut off."""
    for tensor in tensors:
        real = _core.real(tensor) if type(tensor) is _core.LazyTensor else tensor
        root = _inner_root(real) if isinstance(real, torch.Tensor) else None
        if root is not None:
            raise KoilaError(
                f"{what} ({user_line()}): the program was cut before {root.cut.before_call}, after "
                "this value was made and used, and only a part of its gradient comes here; run it "
                "whole: koila.config(chunks=1)"
            )
