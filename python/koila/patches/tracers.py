# SPDX-License-Identifier: Apache-2.0
"""Patch what traces or compiles the user's functions: it would see the empty placeholder of a
lazy. It gets real tensors, and calls on lazies that a traced function refers to run at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor

from koila import _core
from koila.patches import patching


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
        patching.replace(owner, name, _counted(patching.live_if_lazy(getattr(owner, name), True)))
    _patch_scripts()


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original`, wrapped so that calls on lazies in it run at once: a traced function may
    refer to some."""

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        _core.count_interpreters(1)
        try:
            return original(*args, **kwargs)
        finally:
            _core.count_interpreters(-1)

    return patched


def _patch_scripts() -> None:
    """A TorchScript function would see only the placeholder of a lazy."""
    patching.replace(
        torch.jit.ScriptFunction,
        "__call__",
        patching.cut_if_lazy(torch.jit.ScriptFunction.__call__),
    )
    if hasattr(torch.jit, "_script"):
        script_method = torch._C.ScriptMethod
        patching.replace(script_method, "__call__", patching.cut_if_lazy(script_method.__call__))
