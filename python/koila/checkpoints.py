"""torch.utils.checkpoint: its body is recorded once, as a region of the program, whose calls run
again before their backward.

But a body that updates statistics does so in both of torch's runs. Those of batch normalizations
are moved once more when the program has gone back (norms.Again); a body with others is left to
torch, at once. So is one that is not to draw the same numbers again (preserve_rng_state=False).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import handle_torch_function

from koila import _core, explain, norms, plan, surroundings


class _State(threading.local):
    groups: tuple[norms.Group, ...] = ()  # of the bodies that this thread is recording
    modules: dict[int, nn.Module] = {}  # noqa: RUF012  by their running mean


_state = _State()


def _modules_in(obj: Any, depth: int = 3) -> Iterator[nn.Module]:
    """The modules that a function can call: its own, those it is bound to or has captured."""
    if isinstance(obj, nn.Module):
        yield from obj.modules()
    elif isinstance(obj, list | tuple):
        for item in obj:
            yield from _modules_in(item, depth - 1)
    elif callable(obj) and depth > 0:
        inside = [getattr(obj, "__self__", None), getattr(obj, "func", None)]
        inside += [*getattr(obj, "args", ()), *(getattr(obj, "__defaults__", None) or ())]
        if inspect.isfunction(obj):
            captured = inspect.getclosurevars(obj)
            inside += [*captured.nonlocals.values(), *captured.globals.values()]
        for item in inside:
            if item is not None and not inspect.isclass(item) and not inspect.ismodule(item):
                yield from _modules_in(item, depth - 1)


def _updates(module: nn.Module) -> bool:
    if not module.training:
        return False
    hooks = module._forward_pre_hooks.values()
    return (
        (isinstance(module, _NormBase) and module.track_running_stats)
        or isinstance(module, _SpectralNorm)
        or any(isinstance(hook, SpectralNorm) for hook in hooks)
    )


def _updates_statistics(body: Callable[..., Any]) -> bool:
    return any(map(_updates, _modules_in(body)))


def _can_record(body: Callable[..., Any]) -> bool:
    """Whether what a body updates are batch normalizations that are trained: all of them have a
    part in what torch makes again."""
    found = list(filter(_updates, _modules_in(body)))
    return not plan.is_whole() and all(
        isinstance(module, _BatchNorm)
        and module.running_mean is not None
        and module.weight is not None
        and module.weight.requires_grad
        for module in found
    )


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, *words: Any) -> Any:
    """torch.batch_norm while a body is recorded."""
    args: tuple[Any, ...] = (x, weight, bias, mean, *words)
    module = _state.modules.get(id(mean)) if _state.groups else None
    if module is None or type(x) is not _core.LazyTensor or not words[1]:
        return _plain_batch_norm(*args)
    again = norms.Again(words[2])
    again.module, again.groups = module, _state.groups
    call: Any = handle_torch_function
    return call(norms.batch_norm, (x,), *args[:6], again, *args[7:])


_torch: Any = torch
_plain_batch_norm: Callable[..., Any] = torch.batch_norm
_n_recording = 0
_numbers = itertools.count(1)


@contextlib.contextmanager
def _region() -> Iterator[None]:
    """What is recorded is the body of a checkpoint: what autograd keeps of it is made again."""
    before = _core.set_region(next(_numbers) if torch.is_grad_enabled() else 0)
    try:
        yield
    finally:
        _core.set_region(before)


@contextlib.contextmanager
def _recording(body: Callable[..., Any]) -> Iterator[None]:
    """A block in which a body that updates statistics is recorded."""
    global _n_recording
    outer = _state.groups, _state.modules
    found: Any = filter(_updates, _modules_in(body))
    _state.groups = (*outer[0], norms.Group())
    _state.modules = {**outer[1], **{id(module.running_mean): module for module in found}}
    _n_recording += 1
    _torch.batch_norm = _batch_norm
    try:
        yield
    finally:
        _state.groups, _state.modules = outer
        _n_recording -= 1
        if _n_recording == 0:
            _torch.batch_norm = _plain_batch_norm


def run(body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Record the body of a reentrant checkpoint."""
    is_again = torch.is_grad_enabled() and _updates_statistics(body)
    with _region(), _recording(body) if is_again else contextlib.nullcontext():
        return body(*args)


def is_transparent(cls: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of an autograd function is a reentrant checkpoint to be recorded.

    It gives no gradient where none of its inputs needs one: that is left to torch too.
    """
    if cls is not torch.utils.checkpoint.CheckpointFunction or plan.is_whole():
        return False
    if not torch.is_grad_enabled():
        return True  # it runs once
    if not args[1]:
        return False  # as `patched`
    needs = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    return needs and _can_record(args[0])


def checkpoint(args: Any, kwargs: Any) -> Any:
    """The arguments of a checkpoint that is left to torch, which saves them as C++ has them."""
    return args, kwargs


def patched(original: Callable[..., Any], holds_lazy: Callable[[Any], bool]) -> Callable[..., Any]:
    """The generator that torch puts around the body of a checkpoint that is not reentrant.

    Where the body is left to torch, its calls run at once, since torch's hooks on saved tensors are
    on: torch keeps what it would keep, and makes the rest again.
    """

    @functools.wraps(original)
    def generator(
        body: Callable[..., Any], preserve: bool, context_fn: Any, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        is_ours = holds_lazy(args) or holds_lazy(kwargs)
        is_recorded = is_ours and not plan.is_whole() and not surroundings.of_call()
        is_recorded = is_recorded and context_fn is torch.utils.checkpoint.noop_context_fn
        is_again = is_recorded and torch.is_grad_enabled() and _updates_statistics(body)
        # Without preserve_rng_state what torch runs again draws other numbers, and moves on the
        # generator: the gradient is of those.
        draws_again = is_recorded and torch.is_grad_enabled() and not preserve
        if draws_again or (is_again and not _can_record(body)):
            explain.log_live(torch.utils.checkpoint.checkpoint)
            is_recorded = is_again = False
        if not is_recorded:
            if is_ours and torch.is_grad_enabled():
                args, kwargs = _core.live_with_all(checkpoint, (args, kwargs), {}, True)
            yield from original(body, preserve, context_fn, *args, **kwargs)
            return
        # What it makes of plain tensors at once keeps what it saves: to have that again torch would
        # run all of the body, in the midst of a backward.
        with _region(), _recording(body) if is_again else contextlib.nullcontext():
            yield

    return generator
