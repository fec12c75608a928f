# SPDX-License-Identifier: Apache-2.0
"""Patch what traces, compiles or transforms the user's functions, or differentiates them: it would
see the empty placeholder of a lazy. It gets real tensors, and calls on lazies that a traced
function refers to run at once."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor

from koila import _core
from koila.basics import lines
from koila.messages.errors import KoilaError
from koila.patches import patching
from koila.planning import logs, planner, unsplit
from koila.reporting import reports
from koila.running import unwritten

_eval_frame: Any = torch._C._dynamo.eval_frame


class _State(threading.local):
    found = ""  # the first lazy that dynamo found while it compiled for the last call


_state = _State()


def patch() -> None:
    """Make the patches of this module."""
    for owner, name in (
        (torch._C, "_create_function_from_trace"),
        (torch._C, "_create_function_from_trace_with_dict"),
        (torch._C, "_create_graph_by_tracing"),
        (torch._C.ScriptModule, "_create_method_from_trace"),
        (torch._C.ScriptModule, "_create_method_from_trace_with_dict"),
        (torch.fx.experimental.proxy_tensor._MakefxTracer, "trace"),
    ):
        # In a trace a pending write would run where torch looks for the user's line.
        original = unwritten.written_first(getattr(owner, name), True)
        patching.replace(owner, name, _counted(patching.live_if_lazy(original, True)))
    _patch_scripts()
    _patch_transforms()
    export = patching.live_if_lazy(patching.returning_tensors(torch.export.export), True)
    patching.replace(torch, "compile", _refreshed(torch.compile, "torch.compile"))
    patching.replace(torch.export, "export", _refreshed(export, "torch.export"))


def _refreshed(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `original`, which imports dynamo, wrapped to patch dynamo first, and to raise if
    dynamo fails after it found a lazy."""

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module("torch._dynamo")
        refresh()
        _state.found = ""
        try:
            return original(*args, **kwargs)
        except Exception as error:
            _refuse_found(error, name)
            raise

    return patched


@patching.wrapper
def _counted(original: Any, args: Any, kwargs: Any) -> Any:
    """Run a function such that calls on lazies that a traced function refers to run at once."""
    _core.count_interpreters(1)
    try:
        return original(*args, **kwargs)
    finally:
        _core.count_interpreters(-1)


def _patch_scripts() -> None:
    """A TorchScript function would see only the placeholders of lazies: of its arguments, and of
    the results of Python functions that it calls."""
    owners: list[Any] = [torch.jit.ScriptFunction]
    if hasattr(torch.jit, "_script"):
        owners.append(torch._C.ScriptMethod)
    for owner in owners:
        call = patching.returning_tensors(owner.__call__)
        # A program that runs in chunks is cut before the call.
        live = patching.live_if_lazy(call, False, _core.live_with_all)
        patching.replace(owner, "__call__", live)


def _patch_transforms() -> None:
    """Patch torch.func: it would wrap the placeholder of a lazy before any call is dispatched."""
    vmap: Any = torch._functorch.vmap
    transforms: Any = torch._functorch.eager_transforms
    live = functools.partial(patching.live_if_lazy, is_plain=True)
    live_transform = functools.partial(live, run=unsplit.transform)
    patching.wrap(vmap, ("_add_batch_dim",), live)
    patching.wrap(torch._functorch.apis, ("vmap_impl",), live_transform)
    names = "grad_impl grad_and_value_impl vjp_impl _vjp_with_argnums jvp_impl _jvp_with_argnums"
    patching.wrap(transforms, names.split(), live_transform, may_lack=True)
    for owner in (transforms, torch.func):
        patching.wrap(owner, ("functionalize",), _transformed)
    # In a transform, or on a level of forward-mode AD, calls on lazies run at once.
    for owner in (vmap, transforms):
        for name, step in (("increment", 1), ("decrement", -1)):
            kinds = (f"_{kind}_{name}_nesting" for kind in ("vmap", "grad", "jvp", "func"))
            counting = _counting(_core.count_interpreters, step)
            patching.wrap(owner, kinds, counting, may_lack=True)
    for name, step in (("enter_dual_level", 1), ("exit_dual_level", -1)):
        counting = _counting(_core.count_dual_levels, step)
        patching.wrap(torch.autograd.forward_ad, (name,), counting)
    for name in ("gradcheck", "gradgradcheck"):
        check = patching.returning_tensors(getattr(torch.autograd, name))
        patching.replace(torch.autograd, name, live(check))


@patching.wrapper
def _transformed(original: Any, args: Any, kwargs: Any) -> Any:
    """Transform a function such that it gets real tensors."""
    return patching.live_if_lazy(original(*args, **kwargs), True, unsplit.transform)


def _counting(count: Callable[[int], None], step: int) -> Callable[[Any], Any]:
    """Return a wrapper of functions that enter (1) or leave (-1) what the recorder counts."""
    return lambda original: patching.then(original, lambda *_, **__: count(step))


def refresh() -> None:
    """Patch dynamo, once the script has imported it."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None or hasattr(frames._TorchDynamoContext.__call__, "__wrapped__"):
        return
    classes = getattr(torch._dynamo.config, "nontraceable_tensor_subclasses", None)
    if classes is not None:
        classes.add(_core.LazyTensor)
    context: Any = frames._TorchDynamoContext
    make = context.__call__

    def compile_function(self: Any, fn: Any) -> Any:
        made = make(self, fn)
        _give_tensors(made)
        return made

    patching.replace(context, "__call__", compile_function)
    for code in make.__code__.co_consts:  # of functions that were compiled before
        if isinstance(code, types.CodeType) and set(code.co_freevars) >= _IN_WRAPPER:
            for made in gc.get_referrers(code):
                _give_tensors(made)
    _leave_uncompiled()
    builder = importlib.import_module("torch._dynamo.variables.builder").VariableBuilder
    wrap = builder._wrap

    def note_lazy(self: Any, value: Any) -> Any:
        if type(value) is _core.LazyTensor and not _state.found:
            name = getattr(self.source, "name", "?")
            _state.found = name() if callable(name) else name
            logs.note_uncompiled(_state.found)
        return wrap(self, value)

    patching.replace(builder, "_wrap", note_lazy)


_COMPILED = "torch.compile compiles it as it is"
#: Variables of the function that dynamo returns for a compiled function: it calls `fn`.
_IN_WRAPPER = {"fn", "callback"}


def _keeps_numbers(callback: Any) -> bool:
    """Return whether a compiled function computes what the function itself computes: its backend is
    one of torch's. A backend of the user's may compute anything."""
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    backend = frames.innermost_backend(callback)
    if getattr(backend, "compiler_name", "") == "inductor":
        return True
    compiler = getattr(backend, "compiler_fn", backend)
    compilers = importlib.import_module("torch._dynamo.backends.registry")._COMPILER_FNS.values()
    return any(compiler is one for one in compilers) and compiler.__module__.startswith("torch.")


def _give_tensors(made: Any) -> None:
    """Let a compiled function call the user's with real tensors in place of lazies, or uncompiled
    where that gives the same numbers, so that koila records its calls. A script may have compiled
    it before it had koila, so what dynamo returned stays, and its variable is set."""
    names = made.__code__.co_freevars if isinstance(made, types.FunctionType) else ()
    if not set(names) >= _IN_WRAPPER:
        return
    cell = made.__closure__[names.index("fn")]
    original = cell.cell_contents
    set_callback, holds_lazy, plain = _eval_frame.set_eval_frame, patching.holds_lazy, torch.Tensor
    target = inspect.unwrap(original)  # of a module of torch a function that calls it
    owner = target if isinstance(target, torch.nn.Module) else getattr(target, "__self__", None)
    # torch.cond and its kin compile functions of torch, which must run compiled.
    is_users = owner is not None or not str(getattr(target, "__module__", "")).startswith("torch.")
    callback = made.__closure__[names.index("callback")].cell_contents
    is_recorded = is_users and _keeps_numbers(callback)

    @functools.wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        callback = set_callback(None)  # else koila's own work is compiled too
        for arg in (*args, *kwargs.values()) if kwargs else args:
            if type(arg) is not plain and holds_lazy(arg):
                if is_recorded and not planner.is_whole():
                    logs.log_uncompiled(run.__name__)
                    return original(*args, **kwargs)
                reports.note_at_once(run, _COMPILED)
                logs.log_at_once(run, _COMPILED)
                is_plain = _core.set_in_function(None)
                return _core.live_with_all(run, (callback, *args), kwargs, is_plain)
        return run(callback, *args, **kwargs)

    def run(callback: Any, *args: Any, **kwargs: Any) -> Any:
        _state.found = ""
        set_callback(callback)
        try:
            return original(*args, **kwargs)
        except Exception as error:
            set_callback(None)
            _refuse_found(error)
            raise
        finally:
            set_callback(None)

    run.__name__ = type(owner).__name__ if owner is not None else reports.name_of(original)
    _let_run(call, is_inner_too=False)
    cell.cell_contents = call


def _refuse_found(error: Exception, name: str = "torch.compile") -> None:
    """Raise if dynamo failed after it found a lazy."""
    exc: Any = importlib.import_module("torch._dynamo.exc")
    if isinstance(error, exc.TorchDynamoException) and _state.found:
        raise KoilaError(
            f"{name} ({lines.user_line()}) fails since the function refers to a lazy tensor "
            f"({_state.found}). Pass that tensor as an argument (to torch.cond and its kin as "
            "an operand), or refer to a plain copy, copy.deepcopy(x.detach())"
        ) from error


def _let_run(function: Any, is_inner_too: bool) -> None:
    """Let dynamo run a function as it is, and not compile it where a compiled function calls it;
    nor what the function calls, if `is_inner_too`."""
    kinds: Any = importlib.import_module("torch._dynamo.types")
    inner = kinds.FrameAction.SKIP if is_inner_too else kinds.FrameAction.DEFAULT
    strategy = kinds.FrameExecStrategy(kinds.FrameAction.SKIP, inner)
    _eval_frame.set_code_exec_strategy(function.__code__, strategy)


def _leave_uncompiled() -> None:
    """Let dynamo run koila's functions as they are: where a compiled function refers to a lazy, it
    would compile them, and the calls that they run."""
    for name, module in list(sys.modules.items()):
        owners = list(vars(module).values()) if name.split(".")[0] == "koila" else []
        classes = [vars(one).values() for one in owners if isinstance(one, type)]
        for one in [*owners, *(member for members in classes for member in members)]:
            function = one.__func__ if isinstance(one, staticmethod | classmethod) else one
            if isinstance(function, types.FunctionType) and _is_own(function.__code__):
                _let_run(function, is_inner_too=True)


def _is_own(code: types.CodeType) -> bool:
    return code.co_filename.startswith(lines.INSIDE[0])
