"""Which kernels attention may use: a setting of the process, with which a recorded call runs later.

`torch.nn.attention.sdpa_kernel` and the switches in `torch.backends.cuda` set it. Each setting met
has a number, which the recorder keeps with a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from koila import _core

Setting = tuple[tuple[bool, ...], tuple[int, ...]]

_KERNELS = tuple(
    kernel
    for kernel in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
    if hasattr(torch._C, f"_set_sdp_use_{kernel}")
)
#: Functions of torch._C after which the setting is another.
SETTERS = (*(f"_set_sdp_use_{kernel}" for kernel in _KERNELS), "_set_sdp_priority_order")
# As they were before koila patched them.
_originals: dict[str, Callable[..., Any]] = {name: getattr(torch._C, name) for name in SETTERS}
_met: list[Setting] = []


def note() -> None:
    """Tell the recorder which setting is in force."""
    flags = tuple(bool(getattr(torch._C, f"_get_{kernel}_sdp_enabled")()) for kernel in _KERNELS)
    setting = flags, tuple(map(int, torch._C._get_sdp_priority_order()))
    if setting not in _met:
        _met.append(setting)
    _core.note_attention(_met.index(setting), torch._C._get_flash_sdp_enabled())


def choose(setting: int) -> None:
    """Put a setting in force: a replay goes on with a call that was recorded under it."""
    flags, order = _met[setting]
    for kernel, flag in zip(_KERNELS, flags, strict=True):
        _originals[f"_set_sdp_use_{kernel}"](flag)
    _originals["_set_sdp_priority_order"](list(order))
