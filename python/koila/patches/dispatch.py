# SPDX-License-Identifier: Apache-2.0
"""Pass calls of torch's Python functions, such as F.relu, on to koila without torch's search for
the class that overrides them: where lazies are among plain tensors alone, it is theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.functional
import torch.overrides
from torch.nn import functional

from koila import _core
from koila.basics import enter
from koila.messages.errors import hide_frames
from koila.patches import patching

_handle = torch.overrides.handle_torch_function
_n_modes: Callable[[], int] = torch._C._len_torch_function_stack
_lazy: Any = _core.LazyTensor
_dispatch: Callable[..., Any] = _lazy.__torch_function__
_TYPES = (_core.LazyTensor,)
#: A lazy, and what overrides nothing beside one.
_OURS = frozenset((_core.LazyTensor, torch.Tensor, torch.nn.Parameter, type(None)))


def _handle_lazy(public_api: Any, relevant_args: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Replace torch.overrides.handle_torch_function."""
    if _n_modes() or not _OURS.issuperset(map(type, relevant_args)):
        return _handle(public_api, relevant_args, *args, **kwargs)
    try:
        return _dispatch(public_api, _TYPES, args, kwargs)
    except BaseException as error:
        hide_frames(error)
        raise


def patch() -> None:
    """Make the patches of this module, in the modules of torch whose functions are called most."""
    enter.handlers.add(_handle_lazy.__code__)
    owners: tuple[Any, ...] = (torch._tensor, torch.functional, functional)
    for owner in owners:
        patching.replace(owner, "handle_torch_function", _handle_lazy)
