"""Calls that are neither recorded nor simply run on real tensors: one function each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from koila import _core, meta
from koila.errors import KoilaError

LazyTensor = _core.LazyTensor


def _is_pending(obj: Any) -> bool:
    return type(obj) is LazyTensor and _core.real(obj) is None


def _stand_in(obj: Any) -> Any:
    """A tensor without memory that answers like a pending lazy; None where that is not known."""
    if type(obj) is not LazyTensor:
        return obj
    real = _core.real(obj)
    if real is not None:
        return real
    description = _core.describe(obj)
    if description is None:
        return None
    dtype, shape, strides, requires_grad, _ = description
    return None if strides is None else meta.stand_in(dtype, shape, strides, requires_grad)


def query(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer from metadata; nothing is computed where strides are known."""
    stand_ins = tuple(_stand_in(arg) for arg in args)
    if any(new is None and old is not None for new, old in zip(stand_ins, args, strict=True)):
        return _core.live(func, args, kwargs, True)
    return func(*stand_ins, **kwargs)


def _device_type(name: str) -> Callable[..., Any]:
    def answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return bool(args[0].device.type == name)

    return answer


def is_leaf(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    real = _core.real(args[0])
    return bool(real.is_leaf) if real is not None else not args[0].requires_grad


def grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    real = _core.real(args[0])
    return None if real is None else func(real)


def requires_grad_(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _core.live(func, args, kwargs, True)
    return args[0]


def backward(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tensor.backward and torch.autograd.backward: run the program, then torch's own backward."""
    try:
        _core.live(func, args, kwargs, True)
    finally:
        _core.note_backward()


def autograd_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.autograd.grad: the gradients are plain tensors."""
    try:
        return _core.live(func, args, kwargs, True)
    finally:
        if not kwargs.get("create_graph") and not kwargs.get("retain_graph"):
            _core.note_backward()


def represent(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return repr_lazy(args[0])


def repr_lazy(lazy: Any) -> str:
    """What debuggers show: the number where it is there, and never a computation."""
    try:
        real = _core.real(lazy)
    except KoilaError:
        return "LazyTensor(failed)"
    if real is not None:
        return f"LazyTensor({real!r})"
    shape = tuple(lazy.shape)
    grad_text = ", requires_grad=True" if lazy.requires_grad else ""
    return f"LazyTensor(pending, shape={shape}, dtype={lazy.dtype}, device={lazy.device}{grad_text})"


def str_lazy(lazy: Any) -> str:
    """What print shows: the number."""
    return str(_core.force(lazy))


Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

HANDLERS: dict[str, Handler] = {
    "__repr__": represent,
    "backward": backward,
    "grad": grad,
    "is_leaf": is_leaf,
    "requires_grad_": requires_grad_,
    "is_cpu": _device_type("cpu"),
    "is_cuda": _device_type("cuda"),
    "is_meta": _device_type("meta"),
    "is_mps": _device_type("mps"),
    "is_xla": _device_type("xla"),
    "is_xpu": _device_type("xpu"),
    "is_ipu": _device_type("ipu"),
    "is_maia": _device_type("maia"),
    "is_mtia": _device_type("mtia"),
    "is_vulkan": _device_type("vulkan"),
}
