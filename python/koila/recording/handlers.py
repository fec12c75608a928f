# SPDX-License-Identifier: Apache-2.0
"""Handlers of torch calls on lazies that are neither just recorded nor just run on tensors."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from koila import _core
from koila.basics import devices, enter, surroundings
from koila.basics.table import Args, Func, Handler, Words, words_of
from koila.planning import left_plain, unsplit
from koila.random import generators
from koila.recording import (
    caught,
    composed,
    graph_names,
    handed_out,
    inplace_views,
    masks,
    packed,
    parts,
    traced,
)
from koila.recording.backwards import backward, is_pending
from koila.reductions import batch_softmax, norms, scans
from koila.reporting import reports
from koila.running import arrays, replay
from koila.staged import hooks, leaves, meta

LazyTensor = _core.LazyTensor


#: Questions whose answer depends on the strides of a tensor.
_OF_LAYOUT = frozenset(("stride", "is_contiguous", "dim_order"))


def _stand_in(obj: Any, is_of_layout: bool) -> Any:
    """Return a tensor without memory that answers as a pending lazy; None: it is not known yet."""
    if type(obj) is not LazyTensor:
        return obj
    real = _core.real(obj)
    if real is not None:
        return real
    description = _core.describe(obj)
    if description is None:
        return None
    dtype, shape, strides, requires_grad, _ = description
    if strides is None and is_of_layout:
        return None
    return meta.stand_in(dtype, shape, strides, requires_grad)


def query(func: Func, args: Args, kwargs: Words) -> Any:
    """Answer from metadata. Nothing is computed unless the strides are asked for and not known."""
    is_of_layout = getattr(func, "__name__", "") in _OF_LAYOUT
    stand_ins = tuple(_stand_in(arg, is_of_layout) for arg in args)
    if any(new is None and old is not None for new, old in zip(stand_ins, args, strict=True)):
        return _core.live_with_all(func, args, kwargs, True)
    return func(*stand_ins, **kwargs)


def matrix_transpose(func: Func, args: Args, kwargs: Words) -> Any:
    """Record x.mT as x.transpose(-2, -1)."""
    is_matrix = args[0].dim() >= 2
    return args[0].transpose(-2, -1) if is_matrix else _core.live(func, args, kwargs, True)


def is_leaf(func: Func, args: Args, kwargs: Words) -> bool:
    real = _core.real(args[0])
    if real is None:
        return not args[0].requires_grad or leaves.is_leaf(args[0])
    return bool(real.is_leaf)


def grad(func: Func, args: Args, kwargs: Words) -> Any:
    real = _core.real(args[0])
    return hooks.retained(args[0]) if real is None else func(real)


def on_itself(func: Func, args: Args, kwargs: Words) -> Any:
    """Run a call that changes the tensor itself and returns it: requires_grad_, share_memory_."""
    _core.live_with_all(func, args, kwargs, True)
    return args[0]


def require_grad(func: Func, args: Args, kwargs: Words) -> Any:
    """Record x.requires_grad_() of a pending value, or run it on a tensor that is there: calls that
    have read it stay as they were recorded."""
    words = words_of(("self", "requires_grad"), args, kwargs)
    lazy, flag = words.pop("self"), words.pop("requires_grad", True)
    is_asked = not words and len(args) <= 2 and type(flag) is bool
    if is_asked and lazy.requires_grad is flag:
        return lazy
    can_require = lazy.is_floating_point() or lazy.is_complex()
    if is_asked and can_require and not lazy.requires_grad and is_pending(lazy):
        if leaves.begin(lazy):
            return lazy
        _core.read(lazy)
    real = _core.leave(lazy) if is_asked else None
    if real is None:
        return on_itself(func, args, kwargs)
    real.requires_grad_(flag)
    _core.release()
    return lazy


def _empty_like(lazy: torch.Tensor) -> torch.Tensor:
    """Return an empty plain tensor of its dtype and device, for calls that use no more of it."""
    return torch.empty(0, dtype=lazy.dtype, device=lazy.device)


def of_type(func: Func, args: Args, kwargs: Words) -> Any:
    """Answer from the dtype and the device alone: is_cuda, get_device()."""
    return func(_empty_like(args[0]), *args[1:], **kwargs)


def new(func: Func, args: Args, kwargs: Words) -> Any:
    """Run x.new(2, 3), which uses only the type of x. x.new(other), on a graph, runs live."""
    if type(args[0]) is not LazyTensor or any(
        isinstance(argument, torch.Tensor) for argument in (*args[1:], *kwargs.values())
    ):
        return _core.live_with_all(func, args, kwargs, False)
    return of_type(func, args, kwargs)


def type_of(func: Func, args: Args, kwargs: Words) -> Any:
    """Run x.type(), which returns a text, or record x.type(text) or x.type(torch.DoubleTensor) as a
    cast. Calling it on an empty tensor tells which, and the dtype."""
    answer = of_type(func, args, kwargs)
    if isinstance(answer, str):
        return answer
    words = words_of(("self", "dtype", "non_blocking"), args, kwargs)
    words.update(device=answer.device, dtype=answer.dtype)
    return words.pop("self").to(**words)


def enter_python(func: Func, args: Args, kwargs: Words) -> Any:
    """Enter a Python function of torch whose row declined the call, to record the calls in it."""
    is_python = isinstance(func, types.FunctionType)
    return enter.enter(func, (), args, kwargs) if is_python else NotImplemented


def detach_(func: Func, args: Args, kwargs: Words) -> Any:
    """Run x.detach_(), which does nothing to a tensor that requires no gradient."""
    if is_pending(args[0]) and not args[0].requires_grad:
        return args[0]
    return _core.live_with_all(func, args, kwargs, False)


def register_post_hook(func: Func, args: Args, kwargs: Words) -> Any:
    """Run Tensor.register_post_accumulate_grad_hook, which is for leaves."""
    replay.settle_leaves()
    return of_tensor(func, args, kwargs)


def register_hook(func: Func, args: Args, kwargs: Words) -> Any:
    """Run Tensor.register_hook. For a tensor that was handed out at a cut, register the hook in the
    part that was cut off, where its whole gradient arrives."""
    replay.settle_leaves()
    real = _core.real(args[0]) if type(args[0]) is LazyTensor else None
    if real is not None:
        handed_out.note_hook(real)
        args = (args[0], *(handed_out.until_written(real, hook) for hook in args[1:]))
    whole = handed_out.whole_gradient_of(real) if real is not None else None
    if whole is None:
        handed_out.refuse_inner(args[:1], "register_hook")  # its whole gradient arrives nowhere
        return hooks.register(func, args, kwargs)
    return _core.held(whole, hooks.register, (func, (whole, *args[1:]), kwargs), {})


def retain_grad(func: Func, args: Args, kwargs: Words) -> None:
    """Run Tensor.retain_grad."""
    replay.settle_leaves()
    handed_out.refuse_inner(args[:1], "retain_grad")
    real = _core.real(args[0])
    if real is not None:
        handed_out.note_hook(real)
    hooks.retain(func, args, kwargs)


def to_numpy(func: Func, args: Args, kwargs: Words) -> Any:
    """Run numpy() or __array__, which torch refuses for tensors that require a gradient."""
    if args[0].requires_grad and not kwargs.get("force"):
        func(torch.empty(0, requires_grad=True, device="cpu"), *args[1:], **kwargs)
    with reports.Asking("numpy()"):
        number = _core.read(args[0])
    left_plain.note_read("numpy()", args[0], number)
    array = func(number, *args[1:], **kwargs)
    shared = getattr(array, "base", None)
    if isinstance(shared, torch.Tensor):  # no copy: the call above watches its memory for writes
        arrays.note(args[0], number, shared)
        parts.watch_handed_out(args[0])
    return array


def reduce(func: Func, args: Args, kwargs: Words) -> Any:
    """Run copy.copy() or pickle, which make a leaf with the `requires_grad` of the original."""
    with reports.Asking(reports.name_of(func)):
        number = _core.read(args[0])
    left_plain.note_read(reports.call_of(func), args[0], number)
    if args[0].requires_grad and not number.requires_grad:
        number = number.detach().requires_grad_()
    return func(number, *args[1:], **kwargs)


def deepcopy(func: Func, args: Args, kwargs: Words) -> Any:
    """Run copy.deepcopy(), which torch refuses for a value that has a gradient function."""
    if args[0].requires_grad and not args[0].is_leaf:
        func(torch.empty(0, requires_grad=True).view_as(torch.empty(0)), *args[1:], **kwargs)
    return reduce(func, args, kwargs)


def live(func: Func, args: Args, kwargs: Words) -> Any:
    """Run a call that needs the real autograd graph, such as registering a hook, at once."""
    return _core.live_with_all(func, args, kwargs, True)


def of_tensor(func: Func, args: Args, kwargs: Words) -> Any:
    """Answer from the real tensor if there is one, as of an input: nothing runs for that."""
    real = _core.real(args[0])
    return live(func, args, kwargs) if real is None else func(real, *args[1:], **kwargs)


def _is_view(lazy: LazyTensor) -> bool:
    """Return whether a value was recorded as a view of another."""
    value = _core.id(lazy)
    return value is None or _core.value(value)[9] is not None


def of_memory(func: Func, args: Args, kwargs: Words) -> Any:
    """Answer _is_view or storage_offset. A pending value that is no view needs no computing."""
    lazy = args[0]
    is_known = is_pending(lazy) and _core.describe(lazy) is not None
    if not is_known or _core.held(lazy, _is_view, (lazy,), {}):
        return of_tensor(func, args, kwargs)
    return of_type(func, args, kwargs)


def of_node(func: Func, args: Args, kwargs: Words) -> Any:
    """Answer grad_fn: of a pending value a stand-in, which runs the program once it is used."""

    def whole(lazy: Any) -> Any:
        if is_pending(lazy):
            unsplit.check(func, "a node of autograd's graph is of the whole batch")
        return _core.live(func, (lazy,), {}, True)

    description = _core.describe(args[0]) if is_pending(args[0]) else None
    is_there = description is not None and description[3]
    if is_there and leaves.is_leaf(args[0]):
        return None
    if is_there:
        return hooks.PendingNode(args[0], whole)
    return handed_out.node_of(args[0], of_graph(func, args, kwargs))


def of_graph(func: Func, args: Args, kwargs: Words) -> Any:
    """Answer a question about a tensor's place in autograd's graph, in which a pending value
    without a gradient has none."""
    description = _core.describe(args[0]) if is_pending(args[0]) else None
    if description is not None and not description[3]:
        return of_type(func, args, kwargs)
    return of_tensor(func, args, kwargs)


def in_transform(func: Func, args: Args, kwargs: Words) -> Any:
    """Run a call inside a transform, a trace or the capture of a CUDA graph at once: its tensors
    mean nothing outside. What was recorded before the transform runs first, and outside of it."""
    is_ours = surroundings.is_transforming() or get_proxy_mode() is not None
    if not (is_ours or devices.is_capturing()):
        return NotImplemented  # the transform is another thread's
    with surroundings.outside():
        _core.live(_nothing, (args, kwargs), {}, True)
    return _core.live(func, args, kwargs, True)


def _nothing(*_: Any) -> None:
    """Do nothing; called live, it makes its arguments real."""


def repr_lazy(lazy: Any) -> str:
    """Return the repr, with the number if it is available. It never computes, and never waits for
    another thread: debuggers call it."""
    try:
        real, description = _core.real(lazy), _core.describe(lazy)
    except Exception:  # the error of the call that should have computed it
        return "LazyTensor(failed)"
    if real is not None:
        return f"LazyTensor({real!r})"
    shape = tuple(lazy.shape)
    grad_text = ", requires_grad=True" if description is not None and description[3] else ""
    return (
        f"LazyTensor(pending, shape={shape}, dtype={lazy.dtype}, device={lazy.device}{grad_text}; "
        "koila.explain(it) says how it will run)"
    )


def str_lazy(lazy: Any) -> str:
    """Return the text that print() shows; it computes the number."""
    with reports.Asking("print()"):
        number = _core.read(lazy)
    return str(graph_names.as_in_eager(lazy, number))


def format_lazy(func: Func, args: Args, kwargs: Words) -> str:
    """Run Tensor.__format__: of a single number as of a float, of others as `str` has it."""
    if args[0].dim() > 0:
        return object.__format__(args[0], *args[1:], **kwargs)
    with reports.Asking("format()"):
        number = _core.read(args[0])
    return str(func(number, *args[1:], **kwargs))


def rrelu(func: Func, args: Args, kwargs: Words) -> Any:
    """Draw the slopes of rrelu() in training, one for each negative number, and record the product
    of the input with them."""
    words: dict[str, Any] = {"lower": 1 / 8, "upper": 1 / 3, "training": False, "generator": None}
    words |= words_of(("input", "lower", "upper", "training", "generator"), args, kwargs)
    x = words["input"]
    if not words["training"] or words["generator"] is not None or type(x) is not LazyTensor:
        return NotImplemented
    real = _core.read(x).detach()
    slopes = torch.empty_like(real, memory_format=torch.contiguous_format)
    generators.make_way()
    nn: Any = torch._C._nn
    nn.rrelu_with_noise(real, slopes, words["lower"], words["upper"], True)
    return x.contiguous() * _core.like(slopes, x)  # torch's result is contiguous


def poisson(func: Func, args: Args, kwargs: Words) -> Any:
    """Run poisson() on the read input: how often it draws depends on the numbers."""
    x = args[0] if args else kwargs.get("input")
    if type(x) is not LazyTensor or len(args) > 1 or "generator" in kwargs:
        return NotImplemented
    real = _core.read(x).detach()
    generators.make_way()
    drawn = _core.like(torch.poisson(real), x)
    return drawn + x * 0 if x.requires_grad and torch.is_grad_enabled() else drawn


#: Ops by name: the handlers that replace torch's functions, most of which have no row.
HANDLERS: dict[str, Handler] = {
    "numpy": to_numpy,
    "__array__": to_numpy,
    "__reduce__": reduce,
    "__reduce_ex__": reduce,
    "__deepcopy__": deepcopy,
    "register_hook": register_hook,
    "register_post_accumulate_grad_hook": register_post_hook,
    "retain_grad": retain_grad,
    "grad_fn": of_node,
    "_backward_hooks": of_graph,
    "output_nr": of_graph,
    "_version": of_tensor,
    "storage_offset": of_memory,
    "_is_view": of_memory,
    "detach_": detach_,
    "__repr__": lambda func, args, kwargs: repr_lazy(args[0]),
    "__format__": format_lazy,
    "backward": backward,
    "grad": grad,
    "mT": matrix_transpose,
    "get_device": of_type,
    "is_leaf": is_leaf,
    "new": new,
    "requires_grad_": require_grad,
    "share_memory_": on_itself,
    "index_select": packed.index_select,
    **{f"is_{kind}": of_type for kind in "cpu cuda meta mps xla xpu ipu maia mtia vulkan".split()},
}

#: Ops by name: the handler to try if the row of an op declines a call, before it runs at once.
DECLINED: dict[str, Handler] = {
    "__getitem__": masks.select,
    "__setitem__": masks.assign,
    "batch_norm": norms.record,
    "embedding_bag": enter_python,
    **dict.fromkeys(batch_softmax.CALLS, batch_softmax.record),
    **dict.fromkeys(scans.SCANS, scans.record),
    "masked_scatter": masks.masked_scatter,
    "masked_select": masks.masked_select,
    "rrelu": rrelu,
    "poisson": poisson,
    "_pack_padded_sequence": packed.pack,
    "_pad_packed_sequence": packed.pad,
    **dict.fromkeys(packed.LAYERS, packed.layer),
    "type": type_of,
    **composed.HANDLERS,
    **dict.fromkeys(traced.NAMES, traced.record),
    **dict.fromkeys(caught.OPS, caught.record),
    **dict.fromkeys(inplace_views.NAMES, inplace_views.record),
}
