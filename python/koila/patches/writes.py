# SPDX-License-Identifier: Apache-2.0
"""Let koila see when plain torch writes a tensor in place: pending calls that read the tensor run
first, and parts that were cut off keep a copy of it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from koila import _core
from koila.patches import patching
from koila.recording import bridge

#: Methods that change flags of a tensor, and not its numbers.
_NO_WRITES = ("requires_grad_", "detach_")
#: The operators that write: `x += y`.
_OPERATORS = tuple(
    f"__i{name}__" for name in "add sub mul div floordiv mod and or xor lshift rshift".split()
)


def patch() -> None:
    """Go before each method of a tensor that writes it."""
    for name, descriptor in vars(torch._C.TensorBase).items():
        is_named = name.endswith("_") and not name.endswith("__")
        if name in _NO_WRITES or not (is_named or name in _OPERATORS):
            continue
        before = functools.partial(bridge.before_plain_write, descriptor)
        patching.replace_in_c(descriptor, before, True)
    item: Any = torch.Tensor.__setitem__
    if not _core.before_set_item(functools.partial(bridge.before_plain_write, item)):
        raise RuntimeError(f"koila cannot go before {item!r} of this torch")
    name = "embedding_renorm_"  # F.embedding(..., max_norm=...) calls it
    patching.replace(torch, name, going_before(getattr(torch, name)))


@patching.wrapper
def going_before(original: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that writes its first argument: what is pending reads the tensor first, and
    parts keep a copy."""
    if _core.is_busy() or patching.holds_lazy(args):
        return original(*args, **kwargs)
    after = bridge.before_plain_write(original, args[0])
    result = original(*args, **kwargs)
    if after is not None:
        after()
    return result
