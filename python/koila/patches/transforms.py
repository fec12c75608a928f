# SPDX-License-Identifier: Apache-2.0
"""Patch the transforms of torch.func and what differentiates the user's functions: they would wrap
the empty placeholder of a lazy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from koila.basics import surroundings
from koila.patches import patching
from koila.planning import unsplit


def patch() -> None:
    """Make the patches of this module."""
    _patch_functorch()
    _patch_transforms()
    _patch_dual_levels()
    for name in ("gradcheck", "gradgradcheck"):
        original: Any = getattr(torch.autograd, name)
        run = patching.live_if_lazy(patching.returning_tensors(original), True)
        patching.replace(torch.autograd, name, run)


def _patch_functorch() -> None:
    """vmap and the transforms of torch.func would wrap the empty placeholder of a lazy before any
    call is dispatched."""
    vmap: Any = torch._functorch.vmap
    patching.replace(vmap, "_add_batch_dim", patching.live_if_lazy(vmap._add_batch_dim, True))
    apis: Any = torch._functorch.apis
    patching.replace(
        apis, "vmap_impl", patching.live_if_lazy(apis.vmap_impl, True, unsplit.transform)
    )
    transforms: Any = torch._functorch.eager_transforms
    for name in (
        "grad_impl",
        "grad_and_value_impl",
        "vjp_impl",
        "_vjp_with_argnums",
        "jvp_impl",
        "_jvp_with_argnums",
    ):
        if hasattr(transforms, name):
            original = getattr(transforms, name)
            run = patching.live_if_lazy(original, True, unsplit.transform)
            patching.replace(transforms, name, run)
    functional: Any = torch.func
    for owner in (transforms, functional):
        patching.replace(owner, "functionalize", _transformed(owner.functionalize))


def _transformed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original`, which transforms a function, such that this gets real tensors."""

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return patching.live_if_lazy(original(*args, **kwargs), True, unsplit.transform)

    return patched


def _patch_transforms() -> None:
    """Count the active transforms for the recorder: inside of one, calls on lazies run at once."""
    for owner in (torch._functorch.vmap, torch._functorch.eager_transforms):
        for kind in ("vmap", "grad", "jvp", "func"):
            for name, step in (("increment", 1), ("decrement", -1)):
                full = f"_{kind}_{name}_nesting"
                if hasattr(owner, full):
                    patching.replace(owner, full, patching.counting(getattr(owner, full), step))


def _patch_dual_levels() -> None:
    """Count the levels of forward-mode AD for the recorder: inside of one, calls run at once."""
    levels: Any = torch.autograd.forward_ad
    for name, step in (("enter_dual_level", 1), ("exit_dual_level", -1)):
        patching.replace(levels, name, surroundings.count_duals(getattr(levels, name), step))
