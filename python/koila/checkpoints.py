"""torch.utils.checkpoint: its body is recorded once, as any other code is; what torch runs again in
backward is koila's own affair.

But a body that updates statistics does so in both of torch's runs. It is left to torch, at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from koila import _core, explain, plan


class _State(threading.local):
    n_live = 0


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


def is_transparent(cls: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of an autograd function is a reentrant checkpoint to be recorded.

    It gives no gradient where none of its inputs needs one: that is left to torch too.
    """
    if cls is not torch.utils.checkpoint.CheckpointFunction or plan.is_whole():
        return False
    needs = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    return needs and torch.is_grad_enabled() and not _updates_statistics(args[0])


def is_live() -> bool:
    """Whether this thread is in the body of a checkpoint that is left to torch."""
    return _state.n_live > 0


@contextlib.contextmanager
def _live() -> Iterator[None]:
    _state.n_live += 1
    _core.count_interpreters(1)
    try:
        yield
    finally:
        _core.count_interpreters(-1)
        _state.n_live -= 1


def _pair(args: Any, kwargs: Any) -> Any:
    return args, kwargs


def patched(original: Callable[..., Any], holds_lazy: Callable[[Any], bool]) -> Callable[..., Any]:
    """The generator that torch puts around the body of a checkpoint that is not reentrant."""

    @functools.wraps(original)
    def generator(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        is_ours = holds_lazy(args) or holds_lazy(kwargs)
        if not is_ours or not _updates_statistics(body):
            yield from original(body, *args, **kwargs)
            return
        explain.log_live(torch.utils.checkpoint.checkpoint)
        args, kwargs = _core.live(_pair, (args, kwargs), {}, True)
        with _live():
            yield from original(body, *args, **kwargs)

    return generator
