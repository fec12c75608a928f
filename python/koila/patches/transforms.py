# SPDX-License-Identifier: Apache-2.0
"""Patch the transforms of torch.func and what differentiates the user's functions: they would wrap
the empty placeholder of a lazy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from koila import _core
from koila.patches import patching
from koila.planning import unsplit


def patch() -> None:
    """Make the patches of this module."""
    vmap: Any = torch._functorch.vmap
    transforms: Any = torch._functorch.eager_transforms
    functional: Any = torch.func
    live = functools.partial(patching.live_if_lazy, is_plain=True)
    live_transform = functools.partial(live, run=unsplit.transform)
    # vmap and the transforms would wrap the placeholder of a lazy before any call is dispatched.
    patching.wrap(vmap, ("_add_batch_dim",), live)
    patching.wrap(torch._functorch.apis, ("vmap_impl",), live_transform)
    names = "grad_impl grad_and_value_impl vjp_impl _vjp_with_argnums jvp_impl _jvp_with_argnums"
    patching.wrap(transforms, names.split(), live_transform, may_lack=True)
    for owner in (transforms, functional):
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
    patching.wrap(
        torch.autograd,
        ("gradcheck", "gradgradcheck"),
        lambda original: live(patching.returning_tensors(original)),
    )


@patching.wrapper
def _transformed(original: Any, args: Any, kwargs: Any) -> Any:
    """Transform a function such that it gets real tensors."""
    return patching.live_if_lazy(original(*args, **kwargs), True, unsplit.transform)


def _counting(count: Callable[[int], None], step: int) -> Callable[[Any], Any]:
    """Return a wrapper of functions that enter (1) or leave (-1) what the recorder counts."""
    return lambda original: patching.then(original, lambda *_, **__: count(step))
