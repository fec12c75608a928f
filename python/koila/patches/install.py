# SPDX-License-Identifier: Apache-2.0
"""Every patch of torch that koila makes, for calls that torch does not dispatch. Each can be undone
and has a test."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from typing import Any

import torch
import torch.functional
import torch.overrides
import torch.utils._device
import torch.utils.checkpoint
from torch.distributions import Distribution, Geometric
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from koila import _core
from koila.basics import engine, lines, surroundings, switches
from koila.memory import optimizers, order, storages
from koila.messages.errors import HiddenFrames
from koila.patches import attributes, patching, tracers
from koila.planning import left_plain, optimizer_steps
from koila.random import generators, plain
from koila.recording import bridge, flush, handed_out, handlers, replicated, sharded
from koila.reporting import reports
from koila.running import checkpoints, custom_functions, kept_casts, numbers, unwritten
from koila.staged import aliases


def _patch_function_apply() -> None:
    """Replace `apply` of custom functions in C: a script may have taken it before it had koila."""

    def apply(cls: Any, args: tuple[Any, ...], words: dict[str, Any] | None) -> Any:
        original, kwargs = own.__get__(None, cls), words or {}
        if torch._C._are_functorch_transforms_active():
            return original(*args, **kwargs)
        original = custom_functions.in_forward(original)
        if patching.holds_lazy(args) or patching.holds_lazy(kwargs):
            if checkpoints.is_transparent(cls, args) and not surroundings.of_call():
                return checkpoints.run(*args, begin=bridge.begin_checkpoint)
            if replicated.is_sink(cls, args):
                return replicated.behind_outputs(*args)
            with HiddenFrames():
                return custom_functions.run_live(original, args, kwargs)
        return original(*args, **kwargs)

    own = patching.replace_in_c(vars(torch._C._FunctionBase)["apply"], apply)
    patching.replace(engine.Function, "apply", own)
    node = torch.autograd.function.BackwardCFunction
    patching.wrap(node, ("apply", "apply_boxed"), custom_functions.in_backward, may_lack=True)


def _patch_engine() -> None:
    """Wrap the function by which backward() and autograd.grad() of plain tensors enter torch's
    engine. Backwards of lazy tensors do not come here: koila calls the engine itself."""
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    @functools.wraps(run)
    def in_eagers_order(roots: Any, *args: Any, **words: Any) -> Any:
        order.move(roots)  # the nodes of calls that ran later than they were recorded
        return run(roots, *args, **words)

    # A lazy may be given as the gradient of a plain tensor: the engine would read its placeholder.
    with_real_gradients = patching.live_if_lazy(in_eagers_order, True, _core.live_with_all)

    def noted(roots: Any, *args: Any, **words: Any) -> Any:
        is_backward = words.get("accumulate_grad")  # and not autograd.grad()
        if is_backward and not lines.is_of_koila():
            left_plain.note(roots)
        return with_real_gradients(roots, *args, **words)

    patching.replace(autograd, "_engine_run_backward", noted)


def _patch_node_hooks() -> None:
    graph: Any = torch._C._autograd
    if hasattr(graph, "_push_node_creation_hook"):
        patching.replace(graph, "_push_node_creation_hook", surroundings.push_node_hook)
        patching.replace(graph, "_pop_node_creation_hook", surroundings.pop_node_hook)


def _patch_checkpoint() -> None:
    module: Any = torch.utils.checkpoint
    name, patch = "_checkpoint_without_reentrant_generator_impl", checkpoints.patched
    if not hasattr(module, name):
        name, patch = name.removesuffix("_impl"), checkpoints.patched_before_2_14
    original, begin = getattr(module, name), bridge.begin_checkpoint
    patching.replace(module, name, patch(original, patching.holds_lazy, begin))


def _patch_factories() -> None:
    """torch.tensor(x) and its kin copy or share a tensor without calling __torch_function__."""
    # torch.set_default_device() applies to a set of functions that is built at its first use. Build
    # it now, of torch's own functions, which the patched ones call.
    torch.utils._device._device_constructors()
    patching.wrap(torch, ("tensor", "scalar_tensor"), patching.read_if_lazy)
    patching.wrap(torch, ("as_tensor", "asarray"), patching.same_if_lazy)
    live = functools.partial(patching.live_if_lazy, is_plain=True)
    layouts = ("coo", "csr", "csc", "bsr", "bsc", "compressed")
    patching.wrap(torch, (f"sparse_{layout}_tensor" for layout in layouts), live)
    for owner in (torch, torch.utils.dlpack, torch._C):
        patching.wrap(owner, ("to_dlpack", "_to_dlpack"), live, may_lack=True)


def _patch_grad_modes() -> None:
    """Run what was recorded in a block without gradients when the block ends."""
    for mode in (torch.no_grad, torch.inference_mode):
        original = mode.__exit__

        def leave(self: Any, *exc: Any, _original: Any = original) -> Any:
            result = _original(self, *exc)
            if exc[0] is None and torch.is_grad_enabled():
                flush.flush_no_grad("the end of a block without gradients")
                sharded.free_gathered()
            return result

        patching.replace(mode, "__exit__", leave)


@patching.wrapper
def _real_in_evaluation(original: Any, args: Any, kwargs: Any) -> Any:
    """Run the forward of a module on real tensors in evaluation: without gradients it calls a fused
    kernel, but not if it sees a tensor subclass."""
    module, *given = args
    if not module.training and (patching.holds_lazy(given) or patching.holds_lazy(kwargs)):
        return _core.live_with_all(original, args, kwargs, False)
    return original(*args, **kwargs)


_OF_GENERATORS = """get_state set_state manual_seed seed clone_state graphsafe_get_state
graphsafe_set_state get_offset set_offset""".split()


@patching.wrapper
def _drawing_first(original: Any, args: Any, kwargs: Any) -> Any:
    """Let recorded random calls draw before the state of a generator is read or set."""
    is_shared = args[0] is torch.default_generator or args[0].device.type != "cpu"
    if is_shared and not _core.is_busy() and _core.has_draw(False):
        generators.make_way()
    return original(*args, **kwargs)


def _patch_switches() -> None:
    """Let calls run with the switches they were recorded with: note torch's switches when they are
    set, and run what was recorded before a setting changes that koila does not note."""

    noting = functools.partial(patching.then, after=lambda *_, **__: switches.note())

    patching.wrap(torch._C, switches.SETTERS, noting, may_lack=True)
    # Attributes of torch.backends refer to the unpatched functions.
    patching.wrap(torch.backends.ContextProp, ("__set__",), noting)
    # For a thread; they change last bits.
    patching.wrap(torch, ("set_num_threads", "set_flush_denormal"), patching.flush_first)
    with contextlib.suppress(ImportError):  # the module selects kernels written in Python
        native: Any = type(importlib.import_module("torch.backends.python_native"))
        for name in ("dispatch_keys", "operations"):
            patching.wrap(native, (f"enable_{name}", f"disable_{name}"), patching.flush_first)
    patching.wrap(torch, ("autocast_increment_nesting",), kept_casts.beginning)
    patching.wrap(torch, ("clear_autocast_cache",), kept_casts.ending)
    switches.note()


def _patch_graphs() -> None:
    """A CUDA graph captures what runs: pending calls run before it, and none is recorded in it."""
    graph: Any = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = patching.flush_first(begin)(self, *args, **kwargs)
        _core.count_interpreters(1)
        return result

    def capture_end(self: Any) -> Any:
        _core.count_interpreters(-1)
        return end(self)

    patching.replace(graph, "capture_begin", capture_begin)
    patching.replace(graph, "capture_end", capture_end)
    # Flush before the stream changes: readers on the first stream would not wait for the second.
    patching.wrap(torch.cuda.graph, ("__enter__",), patching.flush_first)


def _patch_set() -> None:
    """Tensor.set_ is not dispatched, and would read or replace the placeholder's memory. Pending
    calls run first, since set_ counts as a write to all views of the old memory. A tensor that was
    set to the memory of another, as copy.copy() does, has a version counter of its own."""
    original = patching.live_if_lazy(torch.Tensor.set_, False)

    def patched(*args: Any, **kwargs: Any) -> Any:
        if patching.holds_lazy(args[:1]) and not _core.is_busy():
            _core.flush()
        result = original(*args, **kwargs)
        if type(args[0]) in (torch.Tensor, torch.nn.Parameter) and args[0].device.type != "meta":
            attributes.share(args[0])
            aliases.noted(args[0])
        return result

    patching.replace(torch.Tensor, "set_", patched)


def _patch_as_subclass() -> None:
    """Tensor.as_subclass is not dispatched: a lazy stays lazy as a tensor, else the call runs."""
    live = patching.live_if_lazy(torch.Tensor.as_subclass, True)

    def patched(tensor: Any, cls: Any) -> Any:
        is_lazy = type(tensor) is _core.LazyTensor
        return tensor.view_as(tensor) if is_lazy and cls is torch.Tensor else live(tensor, cls)

    patching.replace(torch.Tensor, "as_subclass", patched)


def _patch_variable() -> None:
    """torch.autograd.Variable(x), which detaches x, is not dispatched: record the detach()."""
    own: Any = torch.autograd.Variable.__new__

    def make(cls: Any, *args: Any, **words: Any) -> Any:
        data = args[0] if args else words.get("data")
        if type(data) is not _core.LazyTensor:
            return own(cls, *args, **words)
        # Torch checks the other arguments, and warns of outdated ones.
        empty = torch.empty(0, dtype=data.dtype, device=data.device)
        args, words = ((empty, *args[1:]), words) if args else ((), words | {"data": empty})
        checked = own(cls, *args, **words)
        made = data.detach()
        return made.requires_grad_() if checked.requires_grad else made

    patching.replace(torch.autograd.Variable, "__new__", make)


def _patch_nodes() -> None:
    """Functions that pass a node of autograd's graph to C++ need a real one."""
    graph: Any = torch.autograd.graph
    live = functools.partial(patching.live_if_lazy, is_plain=True)
    with_all = functools.partial(live, run=_core.live_with_all)
    # Its users ask only whether backward visits the node.
    patching.wrap(graph, ("_get_grad_fn_or_grad_acc",), with_all)
    original = graph.register_multi_grad_hook  # it asks the engine which backward is running

    @functools.wraps(original)
    def register(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        handed_out.refuse_inner(tensors, "register_multi_grad_hook")
        return original(tensors, *args, **kwargs)

    patching.replace(graph, original.__name__, live(register))
    patching.wrap(graph, ("get_gradient_edge",), live)


def _patch_handler() -> None:
    """Pass calls of torch's Python functions, such as F.relu, on without torch's search for the
    class that overrides them, in the modules whose functions are called most."""
    handle = _core.handler(torch.overrides.handle_torch_function)
    owners: tuple[Any, ...] = (torch._tensor, torch.functional, functional)
    for owner in owners:
        patching.replace(owner, "handle_torch_function", handle)


@patching.wrapper
def _naming_a_tensor(original: Any, args: Any, kwargs: Any) -> Any:
    """Run a check of torch.distributions, whose errors name the class of a value: they say of a
    lazy what they say of a tensor."""
    try:
        return original(*args, **kwargs)
    except ValueError as error:
        said = (str(arg) for arg in error.args)
        error.args = tuple(arg.replace("(LazyTensor of", "(Tensor of") for arg in said)
        raise


def _patch_optimizers() -> None:
    """Note each optimizer when it is made or copied: its first step will make state. Note the
    buckets of each DistributedDataParallel module."""
    optimizers.look_for_all()

    def noting(note: Any) -> Any:
        return functools.partial(patching.then, after=lambda self, *_, **__: note(self))

    patching.wrap(torch.optim.Optimizer, ("__init__", "__setstate__"), noting(optimizers.note_made))
    patching.wrap(DistributedDataParallel, ("__init__",), noting(storages.note_buckets))


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Let pending calls read the parameters that an optimizer changes."""
    kept_casts.forget(optimizers.written_by(optimizer))
    bridge.before_step(optimizer)
    optimizer_steps.report_over_limit(optimizer)
    optimizers.note_step(optimizer)
    reports.note_step(optimizer)


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    bridge.after_step(optimizer)
    kept_casts.note_written(optimizers.written_by(optimizer))
    sharded.free_gathered()
    numbers.settle_outdated(is_over=True)


#: The number of modules that were imported when `refresh` looked last.
n_modules_seen = 0


def refresh() -> None:
    """Patch FSDP and dynamo, once the script has imported them. Nothing is new while the number of
    modules is `n_modules_seen`."""
    global n_modules_seen
    n_modules = len(sys.modules)
    sharded.patch(patching.replace, patching.holds_lazy)
    tracers.refresh()
    n_modules_seen = n_modules  # not if a patch has failed: the next call tries again


def install() -> None:
    """Make every patch, or none; called when koila is imported."""
    if patching.undo:
        return
    try:
        _install()
    except BaseException:
        uninstall()
        raise


def _install() -> None:
    lazy_type: Any = _core.LazyTensor
    lazy_type.__repr__ = handlers.repr_lazy
    lazy_type.__str__ = handlers.str_lazy
    unwritten.begin(flush.flush)
    _patch_handler()
    _patch_function_apply()
    _patch_checkpoint()
    _patch_node_hooks()
    _patch_factories()
    _patch_grad_modes()
    nn = torch.nn
    for module in (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder):
        patching.wrap(module, ("forward",), _real_in_evaluation)
    attributes.patch()
    patching.wrap(Distribution, ("__init__", "_validate_sample"), _naming_a_tensor)
    patching.wrap(Geometric, ("__init__",), _naming_a_tensor)
    _patch_set()
    _patch_as_subclass()
    _patch_variable()
    patching.wrap(torch._C.Generator, _OF_GENERATORS, _drawing_first)
    _patch_switches()
    _patch_graphs()
    _patch_nodes()
    replicated.patch(patching.replace, patching.holds_lazy)
    _patch_engine()
    tracers.patch()
    for owner, name in unwritten.unseen():
        patching.wrap(owner, (name,), unwritten.written_first)
    _patch_optimizers()
    patching.undo.append(register_optimizer_step_pre_hook(_before_step).remove)
    patching.undo.append(register_optimizer_step_post_hook(_after_step).remove)


def uninstall() -> None:
    """Undo every patch, newest first."""
    global n_modules_seen
    while patching.undo:
        patching.undo.pop()()
    plain.unwatch_all()
    unwritten.end()
    sharded.end()
    n_modules_seen = 0
