# SPDX-License-Identifier: Apache-2.0
"""torch's switches: settings of the process that say how calls compute. A recorded call runs later
with those that were on when it was made.

Which kernels attention may use, determinism, TF32 and its kin, oneDNN and cuDNN, the default dtype.
Each setting met has a number, which the recorder keeps with a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.backends.opt_einsum

from koila import _core

_C: Any = torch._C


class Switch(NamedTuple):
    """One of torch's settings.

    Attributes:
        setter: the function of torch._C, or the attribute of torch.backends, that changes it.
        get: its value; an exception: torch does not say.
        set: give it a value, as `get` returns it.
    """

    setter: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]


Setting = tuple[Any, ...]

_KERNELS = ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3", "fa4")
#: Switches X of torch._C with a function _get_X and one _set_X.
_PAIRS = (
    "float32_matmul_precision cublas_allow_tf32 cudnn_allow_tf32 onednn_allow_tf32 "
    "cublas_allow_fp16_reduced_precision_reduction cublas_allow_bf16_reduced_precision_reduction "
    "cublas_allow_fp16_accumulation cpu_allow_fp16_reduced_precision_reduction "
    "math_sdp_allow_fp16_bf16_reduction cudnn_enabled cudnn_benchmark cudnn_deterministic "
    "cudnn_depthwise_kernel mkldnn_enabled mkldnn_deterministic nnpack_enabled miopen_immediate "
    "deterministic_fill_uninitialized_memory blas_preferred_backend linalg_preferred_backend "
    "rocm_fa_preferred_backend sm_carveout_experimental qengine cublaslt_prefer_grouped_gemm "
    "native_aot_enabled native_aot_unconditional_masked"
).split()
#: Where float32 may be computed with less: a backend, and what it computes.
_PRECISIONS = (
    ("generic", "all"),
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "conv", "rnn", "matmul")),
)


def _pair(name: str, get: str, set_: str) -> Switch:
    getter, setter = getattr(_C, get), getattr(_C, set_)
    return Switch(name, getter, lambda value: setter(*value if type(value) is tuple else (value,)))


def _determinism() -> tuple[bool, bool]:
    return (
        _C._get_deterministic_algorithms(),
        _C._get_deterministic_algorithms_warn_only(),
    )


def _make() -> tuple[Switch, ...]:
    """All that this torch has, as they are before koila patches them."""
    made = [
        _pair(f"_set_{name}", f"_get_{name}", f"_set_{name}")
        for name in _PAIRS
        if hasattr(_C, f"_set_{name}")
    ]
    made += [
        _pair(f"_set_sdp_use_{kernel}", f"_get_{kernel}_sdp_enabled", f"_set_sdp_use_{kernel}")
        for kernel in _KERNELS
        if hasattr(_C, f"_set_sdp_use_{kernel}")
    ]
    if hasattr(_C, "_cuda_set_cudnn_benchmark_limit"):  # a torch for GPUs
        names = (f"_cuda_{verb}_cudnn_benchmark_limit" for verb in ("set", "get", "set"))
        made.append(_pair(*names))
    order, determine = _C._set_sdp_priority_order, _C._set_deterministic_algorithms
    default, precise = _C._set_default_dtype, _C._set_fp32_precision_setter
    made += [
        Switch(
            "_set_sdp_priority_order",
            lambda: tuple(map(int, _C._get_sdp_priority_order())),
            lambda value: order(list(value)),
        ),
        Switch(
            "_set_deterministic_algorithms",
            _determinism,
            lambda value: determine(value[0], warn_only=value[1]),
        ),
        Switch("_set_default_dtype", torch.get_default_dtype, default),
    ]
    for where in _PRECISIONS:
        get = functools.partial(_C._get_fp32_precision_getter, *where)
        made.append(Switch("_set_fp32_precision_setter", get, functools.partial(precise, *where)))
    for name in ("enabled", "strategy"):
        einsum: Any = torch.backends.opt_einsum
        get, set_ = getattr(einsum, f"_get_{name}"), getattr(einsum, f"_set_{name}")
        made.append(Switch(f"opt_einsum.{name}", get, set_))
    return tuple(made)


SWITCHES = _make()
#: Functions of torch._C after which the setting may be another.
SETTERS = {switch.setter for switch in SWITCHES if switch.setter.startswith("_")}
SETTERS.add("_set_default_tensor_type")  # which sets the default dtype
_met: dict[Setting, int] = {}


#: What torch does not tell: the old and the new name of one switch were both used.
UNKNOWN = object()


def value_of(switch: Switch) -> Any:
    """The value of a switch, or UNKNOWN."""
    try:
        return switch.get()
    except RuntimeError:
        return UNKNOWN


def now() -> Setting:
    """Which setting is on."""
    return tuple(map(value_of, SWITCHES))


def note() -> None:
    """Tell the recorder which setting is on."""
    setting = now()
    _core.note_switches(_met.setdefault(setting, len(_met)), _C._get_flash_sdp_enabled())


def choose(number: int) -> None:
    """Put a setting on: a replay goes on with a call that was recorded under it."""
    put_on(next(setting for setting, i in _met.items() if i == number))


def put_on(setting: Setting) -> None:
    """Put a setting on that `now` told."""
    for _ in range(2):  # to set one may change others
        for switch, value in zip(SWITCHES, setting, strict=True):
            if value is not UNKNOWN and value_of(switch) != value:
                switch.set(value)
