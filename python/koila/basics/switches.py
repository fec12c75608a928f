# SPDX-License-Identifier: Apache-2.0
"""torch's process-wide switches, which change how calls compute: a recorded call runs with those
that were set when it was made.

They are the kernels that attention may use, determinism, TF32 and other reduced precisions, oneDNN
and cuDNN, and the default dtype. A setting is the values of all switches. Each setting that occurs
has a number, which the recorder keeps with a call.

The block of torch.autocast that a call stands in counts as a switch: torch casts a weight once in
each, so calls of two blocks give it two gradients, which are rounded before they are added.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.backends.opt_einsum

from koila import _core

_C: Any = torch._C


class Switch(NamedTuple):
    """One of torch's switches.

    Attributes:
        setter: the name of the function of torch._C, or attribute of torch.backends, that sets it.
        get: returns its value; may raise a RuntimeError, see UNKNOWN.
        set: sets it to a value that `get` returned.
    """

    setter: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]


Setting = tuple[Any, ...]  # the value of each of SWITCHES

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
#: The arguments for which torch keeps a float32 precision: a backend, and a kind of op.
_PRECISIONS = (
    ("generic", "all"),
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "conv", "rnn", "matmul")),
)


def _pair(get: str, set_: str) -> Switch:
    getter, setter = getattr(_C, get), getattr(_C, set_)
    return Switch(set_, getter, lambda value: setter(*value if type(value) is tuple else (value,)))


#: Each number is a setting that the recorder keeps; so many blocks do not wait at once.
_N_BLOCKS = 64


class _Blocks:
    """The outermost blocks of autocast, by number."""

    number = -1  # of that in which calls are recorded now, or in which a replay runs them; or none
    cached = 0  # of that whose casts torch has
    last = 0  # of that which began last
    is_waited_for = False  # it has ended, and torch keeps its casts for calls that have to run

    def begin(self, is_pending: bool) -> None:
        """Begin a block. Unless calls with a gradient wait (`is_pending`), its number is 0, so that
        the steps of a loop are alike."""
        self.drop()
        self.last = self.last % _N_BLOCKS + 1 if is_pending else 0
        self.cached = self.last
        self._record_in(self.last)

    def end(self, is_pending: bool) -> None:
        """End a block. Torch's casts stay as long as calls of the block wait."""
        self.is_waited_for = True
        if not is_pending:
            self.drop()
        self._record_in(-1)

    def _record_in(self, number: int) -> None:
        self.number = number
        _note((*_current[0][:-1], number))

    def drop(self) -> None:
        """Drop the casts of a block that has ended."""
        if self.is_waited_for:
            _clear_casts()
        self.is_waited_for = False

    def choose(self, number: int) -> None:
        """Let the next calls of a replay have the casts of their own block. But in a block of the
        user's torch has that block's."""
        self.number = number
        if number not in (-1, self.cached) and autocast_nesting() == 1:  # that of the replay
            self.cached = number
            _clear_casts()


blocks = _Blocks()
_enter, _leave = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_clear_casts = torch.clear_autocast_cache


def autocast_nesting() -> int:
    """Return in how many blocks of autocast this thread is; a replay counts as one."""
    _enter()
    return _leave()


def _make() -> tuple[Switch, ...]:
    """Return all switches of this torch, with functions that koila has not patched yet."""
    pairs = [(f"_get_{name}", f"_set_{name}") for name in _PAIRS]
    pairs += [(f"_get_{one}_sdp_enabled", f"_set_sdp_use_{one}") for one in _KERNELS]
    pairs.append(("_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit"))
    made = [_pair(*pair) for pair in pairs if hasattr(_C, pair[1])]  # some builds lack some
    order, determine = _C._set_sdp_priority_order, _C._set_deterministic_algorithms
    is_on, only_warns = _C._get_deterministic_algorithms, _C._get_deterministic_algorithms_warn_only
    default, precise = _C._set_default_dtype, _C._set_fp32_precision_setter
    made += [
        Switch(
            "_set_sdp_priority_order",
            lambda: tuple(map(int, _C._get_sdp_priority_order())),
            lambda value: order(list(value)),
        ),
        Switch(
            "_set_deterministic_algorithms",
            lambda: (is_on(), only_warns()),
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
    made.append(Switch("autocast", lambda: blocks.number, blocks.choose))  # the last
    return tuple(made)


SWITCHES = _make()
#: The functions of torch._C that change switches.
SETTERS = {switch.setter for switch in SWITCHES if switch.setter.startswith("_")}
SETTERS.add("_set_default_tensor_type")  # it sets the default dtype
_numbers: dict[Setting, int] = {}
_settings: list[Setting] = []  # by number
_current: list[Setting] = []  # the setting that was noted or chosen last


#: The value of a switch that torch refuses to return, since it was set by its old and its new name.
UNKNOWN = object()


def value_of(switch: Switch) -> Any:
    """Return the value of a switch, or UNKNOWN."""
    try:
        return switch.get()
    except RuntimeError:
        return UNKNOWN


def now() -> Setting:
    """Return the current setting."""
    return tuple(map(value_of, SWITCHES))


def note() -> None:
    """Pass the number of the current setting to the recorder."""
    _note(now())


def _note(setting: Setting) -> None:
    _current[:] = [setting]
    number = _numbers.setdefault(setting, len(_settings))
    if number == len(_settings):
        _settings.append(setting)
    _core.note_switches(number, _C._get_flash_sdp_enabled())


def choose(number: int) -> None:
    """Restore the setting of this number, under which the next call of a replay was recorded."""
    setting = _settings[number]
    if setting[:-1] == _current[0][:-1]:
        blocks.choose(setting[-1])
    else:
        put_on(setting)
    _current[:] = [setting]


def put_on(setting: Setting) -> None:
    """Restore a setting that `now` returned."""
    for _ in range(2):  # twice, since setting one switch may change others
        for switch, value in zip(SWITCHES, setting, strict=True):
            if value is not UNKNOWN and value_of(switch) != value:
                switch.set(value)


class Context(NamedTuple):
    """The modes and switches that a call depends on besides its arguments."""

    is_grad: bool
    is_inference: bool
    casts: tuple[tuple[str, bool, torch.dtype], ...]  # autocast: device type, is on, dtype
    is_cache: bool  # of autocast
    switches: Setting

    @classmethod
    def current(cls, device: torch.device) -> Context:
        types = dict.fromkeys(("cpu", device.type))
        casts = (
            (one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in types
        )
        is_cache = torch.is_autocast_cache_enabled()
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return cls(*modes, tuple(casts), is_cache, now())

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Put this context in force for a block."""
        before = now()
        with contextlib.ExitStack() as stack:
            if self.switches[:-1] != before[:-1]:
                stack.callback(put_on, before)
                put_on((*self.switches[:-1], before[-1]))  # torch has no casts of the call's block
            for name, is_on, dtype in self.casts:
                was = torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)
                if was != (is_on, dtype) and (is_on or was[0]):
                    words: Any = {"enabled": is_on, "cache_enabled": self.is_cache}
                    stack.enter_context(torch.autocast(name, dtype, **words))
            if self.is_inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self.is_inference))
            stack.enter_context(torch.set_grad_enabled(self.is_grad))
            yield
