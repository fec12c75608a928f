# SPDX-License-Identifier: Apache-2.0
"""All that torch lets a user put around calls, or set before them, and how it is treated.

A torch that brings something new fails here until somebody says, and tests, what becomes of it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.backends
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import koila
from koila import _core
from koila.basics import switches
from oracle import Lazy, assert_same_story, gradients

MODULES = [
    *"torch torch.autograd torch.autograd.graph torch.autograd.grad_mode".split(),
    *"torch.autograd.forward_ad torch.autograd.anomaly_mode torch.autograd.profiler".split(),
    *"torch.overrides torch.utils._python_dispatch torch.utils._device torch.random".split(),
    *"torch.utils.checkpoint torch.utils.deterministic torch.func torch.amp torch.cpu".split(),
    *"torch.nn.attention torch.nn.utils.parametrize torch.sparse torch.accelerator".split(),
    *(module.name for module in pkgutil.iter_modules(torch.backends.__path__, "torch.backends.")),
]
SETS = ("set_", "_set_", "use_", "enable_", "disable", "allow_", "flags")

# Kept with a call, and in force again when it runs: tests/binding/test_py_context.py, and below.
RECORDED = """
torch.amp.autocast_mode.autocast torch.autograd.grad_mode.enable_grad
torch.autograd.grad_mode.inference_mode torch.autograd.grad_mode.no_grad
torch.autograd.grad_mode.set_grad_enabled torch.set_autocast_cache_enabled
torch.set_autocast_cpu_dtype torch.set_autocast_cpu_enabled torch.set_autocast_dtype
torch.set_autocast_enabled torch.set_autocast_gpu_dtype torch.set_default_dtype
torch.set_default_tensor_type torch.set_deterministic_debug_mode
torch.set_float32_matmul_precision torch.use_deterministic_algorithms
torch.nn.attention._sdpa_kernel_variadic torch.nn.attention.sdpa_kernel
torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp torch.backends.cuda.enable_cudnn_sdp
torch.backends.cuda.enable_flash_sdp torch.backends.cuda.enable_math_sdp
torch.backends.cuda.enable_mem_efficient_sdp torch.backends.nnpack.flags
torch.backends.nnpack.set_flags
"""
# Calls inside run where they stand: tests/test_surroundings.py.
AT_ONCE = """
torch.autograd.forward_ad._set_fwd_grad_enabled torch.autograd.forward_ad.dual_level
torch.autograd.graph._CloneArgBeforeMutateMode torch.autograd.graph._swap_with_cloned
torch.autograd.graph.allow_mutation_on_saved_tensors torch.autograd.graph.save_on_cpu
torch.autograd.graph.node_creation_hook torch.utils.checkpoint._checkpoint_internal_hook
torch.autograd.graph.saved_tensors_hooks torch.utils._python_dispatch.BaseTorchDispatchMode
torch.utils._python_dispatch.TorchDispatchMode torch.utils.checkpoint._CachedTorchDispatchMode
torch.utils.checkpoint._CachingTorchDispatchMode torch.utils.checkpoint._checkpoint_hook
torch.utils.checkpoint._recomputation_hook
torch.utils.checkpoint._checkpoint_without_reentrant_generator
torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl
torch.testing._internal.logging_tensor.LoggingTensorMode
"""
# Torch asks it when a call is made, and koila's runs are outside of it: the same.
OUTSIDE = """
torch.autograd.graph.disable_saved_tensors_hooks torch.device torch.set_default_device
torch.utils._device.DeviceContext torch.utils._device.set_device
torch.overrides.BaseTorchFunctionMode torch.overrides.TorchFunctionMode
torch.overrides._enable_torch_function torch.overrides._pop_mode_temporarily
torch.utils._python_dispatch._disable_current_modes
torch.utils._python_dispatch._pop_mode_temporarily
"""
# What waits runs before: below, and of the generator tests/test_generator.py.
BEFORE = """
torch.set_flush_denormal torch.set_num_threads torch.random.fork_rng torch.random.set_rng_state
torch.utils.checkpoint.set_device_states torch.accelerator.graphs.Graph
torch.utils.checkpoint.GraphExecGroup
torch.backends.python_native.PythonNativeModule.disable_dispatch_keys
torch.backends.python_native.PythonNativeModule.disable_operations
torch.backends.python_native.PythonNativeModule.enable_dispatch_keys
torch.backends.python_native.PythonNativeModule.enable_operations
torch.backends.python_native.PythonNativeModule.operations_disabled
"""
# No number depends on it: of those that a user enters, below.
HARMLESS = """
torch.autograd.anomaly_mode.detect_anomaly torch.autograd.anomaly_mode.set_detect_anomaly
torch.set_anomaly_enabled torch.autograd.grad_mode._force_original_view_tracking
torch.autograd.grad_mode._unsafe_preserve_version_counter
torch.autograd.grad_mode.enforce_grad_layout_policy
torch.autograd.grad_mode.set_multithreading_enabled torch.autograd.graph._MultiHandle
torch.autograd.graph.set_override_stale_capture_stream
torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch
torch.autograd.profiler._set_active_cupti_profiler_observer
torch.autograd.profiler._set_active_cuspy_profiler_observer
torch.autograd.profiler._set_is_profiler_enabled torch.autograd.profiler.emit_itt
torch.autograd.profiler.emit_nvtx torch.autograd.profiler.profile
torch.autograd.profiler.record_function torch.backends.mha.set_fastpath_enabled
torch.backends.mkl.verbose torch.backends.mkldnn.verbose torch._tensor_str.set_printoptions
torch.nn.utils.parametrize.cached
torch.set_num_interop_threads torch.set_warn_always torch.sparse.check_sparse_tensor_invariants
torch.testing._internal.logging_tensor.capture_logs torch.utils.hooks.RemovableHandle
torch.utils._contextlib._DecoratorContextManager
torch.utils._contextlib._NoParamDecoratorContextManager
torch.utils.checkpoint.set_checkpoint_debug_enabled
torch.utils.checkpoint.set_checkpoint_early_stop
"""
# Of devices that are in no test, or of torch's own affairs: not around a user's calls here.
ELSEWHERE = """
torch.overrides.enable_reentrant_dispatch torch.backends.__allow_nonbracketed_mutation
torch.ExcludeDispatchKeyGuard torch.Stream torch._C.DisableTorchFunction
torch._C.DisableTorchFunctionSubclass torch.accelerator.device_index
torch.accelerator.set_device_index torch.accelerator.set_stream torch.cpu.StreamContext
torch.cpu.set_device torch.set_autocast_ipu_dtype torch.set_autocast_ipu_enabled
torch.set_autocast_xla_dtype torch.set_autocast_xla_enabled
"""
KNOWN = " ".join((RECORDED, AT_ONCE, OUTSIDE, BEFORE, HARMLESS, ELSEWHERE)).split()
#: Functions _set_X of torch._C that are no switches: of tensors, of tracers, of what is asked in
#: C++ alone, and those that the blocks above call.
NO_SWITCHES = """
autograd_fallback_mode backcompat_broadcast_warn backcompat_keepdim_warn cached_tensors_enabled
check_sparse_tensor_invariants conj default_mobile_cpu_allocator dispatch_mode
dtensor_allow_implicit_replication fwd_grad_enabled generator_metaclass grad_enabled
grad_layout_enforcement_enabled graph_exec_group graph_executor_optimize
meta_in_tls_dispatch_include multithreading_enabled neg only_lift_cpu_tensors
override_stale_capture_stream fake_constant print_stack_traces_on_fatal_signal
should_use_format_with_string_table skip_next_torch_function storage_access_error_msg
storage_data_ptr_access_error_msg tensor_metadata thread_name
throw_on_mutable_data_ptr torch_function_state tracing_state value_trace view_replay_enabled
warnAlways warn_deprecated_on_mutable_data_ptr warn_on_accumulate_grad_stream_mismatch
worker_pids worker_signal_handlers
""".split()


def is_block(obj: Any) -> bool:
    """Whether something can stand behind `with`."""
    if inspect.isclass(obj):
        return "__enter__" in dir(obj) and "__exit__" in dir(obj)
    original = vars(obj).get("__wrapped__") if inspect.isfunction(obj) else None
    return inspect.isgeneratorfunction(original)


def found() -> Iterator[str]:
    """What torch has of blocks and setters."""
    for name in MODULES:
        module = importlib.import_module(name)
        for key in dir(module):
            try:
                obj = inspect.getattr_static(module, key)
            except AttributeError:
                continue
            home = str(getattr(obj, "__module__", "") or "")
            if not callable(obj) or not home.startswith("torch") or "pybind11" in home:
                continue
            full = f"{home}.{getattr(obj, '__qualname__', key)}"
            if "pybind11" not in full and (is_block(obj) or key.startswith(SETS)):
                yield full


def test_nothing_that_torch_has_is_unknown() -> None:
    assert sorted(set(found()) - set(KNOWN)) == [], "say, and test, how it is treated"


def test_no_setter_of_c_is_unknown() -> None:
    there = {name.removeprefix("_set_") for name in dir(torch._C) if name.startswith("_set_")}
    known = {name.removeprefix("_set_") for name in switches.SETTERS}
    assert sorted(there - known - set(NO_SWITCHES)) == [], "say, and test, how it is treated"


def test_no_attribute_of_backends_is_unknown() -> None:
    """Each goes by a function that is a switch's."""
    unknown = []
    for name in MODULES:
        module: Any = importlib.import_module(name)
        for key, prop in vars(type(module)).items():
            setter = getattr(prop, "setter", None)
            if isinstance(prop, torch.backends.ContextProp) and callable(setter):
                own = str(getattr(setter, "__name__", setter))
                is_einsum = name.endswith("opt_einsum") and f"opt_einsum.{key}" in SETTERS
                if own not in SETTERS and "fp32" not in key and not is_einsum:
                    unknown.append(f"{name}.{key}: {own}")
    assert [one for one in unknown if "immutable" not in one and "mps" not in one] == []


SETTERS = {switch.setter for switch in switches.SWITCHES}

# Recorded -----------------------------------------------------------------------------------------

#: Another value of each switch that has one on every machine.
OTHERS: dict[str, Callable[[Any], Any]] = {
    "_set_float32_matmul_precision": lambda value: "high" if value != "high" else "highest",
    "_set_deterministic_algorithms": lambda value: (not value[0], value[1]),
    "_set_sdp_priority_order": lambda value: tuple(reversed(value)),
    "_set_default_dtype": lambda value: torch.float64,
    "_set_sm_carveout_experimental": lambda value: 3,
    "_set_cudnn_depthwise_kernel": lambda value: None,
    "_set_fp32_precision_setter": lambda value: "ieee",
    "opt_einsum.strategy": lambda value: "greedy",
}


def another(switch: switches.Switch) -> Any:
    """A value that it does not have now; None: there is none here."""
    value = switches.value_of(switch)
    if switch.setter in OTHERS:
        return OTHERS[switch.setter](value)
    if type(value) is bool:
        return not value
    return (not value[0], value[1]) if type(value) is tuple else None


class Values(TorchDispatchMode):
    """The values of a switch where tanh runs."""

    sees_koila = True

    def __init__(self, switch: switches.Switch) -> None:
        super().__init__()
        self.switch, self.seen = switch, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.tanh.default:
            self.seen.append(switches.value_of(self.switch))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("i", range(len(switches.SWITCHES)))
def test_a_switch_is_as_it_was_when_a_call_was_made(i: int, chunks: int) -> None:
    switch = switches.SWITCHES[i]
    before = switches.now()
    value = another(switch)
    try:
        switch.set(value)
    except (RuntimeError, ValueError, TypeError):
        value = before[i]
    finally:
        switches.choose(switches._numbers[before])
    if value is None or value == before[i]:
        pytest.skip("it cannot be set to another here")
    with koila.config(chunks=chunks), Values(switch) as values:
        x = koila.lazy(torch.ones(4, 2))
        first = x.tanh()
        try:
            switch.set(value)
            switches.note()
            was_set = switches.value_of(switch)
            second = x.tanh()
        finally:
            switches.choose(switches._numbers[before])
            switches.note()
        assert switches.now() == before
        assert _core.real(first) is None, "nothing has run for that"
        (first + second).sum().item()
    assert values.seen == [before[i], was_set] * chunks
    assert switches.now() == before


@pytest.mark.filterwarnings("ignore")
def test_what_users_call_is_noted() -> None:
    """By its public names: functions, attributes and blocks."""
    kernels: Any = torch.backends
    before = switches.now()
    with kernels.mkldnn.flags(enabled=False):
        assert switches._numbers[switches.now()] == noted()
    with kernels.cudnn.flags(enabled=False, deterministic=True):
        assert switches._numbers[switches.now()] == noted()
    enabled = kernels.opt_einsum.enabled
    kernels.opt_einsum.enabled = not enabled
    assert switches._numbers[switches.now()] == noted()
    kernels.opt_einsum.enabled = enabled
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert switches._numbers[switches.now()] == noted()
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("medium")
    assert switches._numbers[switches.now()] == noted()
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float64)
    assert switches._numbers[switches.now()] == noted()
    torch.set_default_dtype(torch.float32)
    assert switches.now()[-2:] == before[-2:]
    assert switches._numbers[switches.now()] == noted()


_noted: list[int] = []


@pytest.fixture(autouse=True)
def keep_what_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    original = _core.note_switches

    def note(setting: int, is_flash_allowed: bool) -> None:
        _noted.append(setting)
        original(setting, is_flash_allowed)

    monkeypatch.setattr(_core, "note_switches", note)


def noted() -> int:
    """The number of the setting that the recorder knows."""
    return _noted[-1]


# Before -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [lambda: torch.set_num_threads(1), lambda: torch.set_flush_denormal(False)]
)
def test_what_waits_runs_before(change: Callable[[], Any]) -> None:
    made = koila.lazy(torch.ones(4, 2)).tanh()
    assert _core.real(made) is None
    change()
    assert _core.real(made) is not None


def test_the_default_dtype_set_to_what_it_is_runs_nothing() -> None:
    made = koila.lazy(torch.ones(4, 2)).tanh()
    torch.set_default_dtype(torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)
    assert _core.real(made) is None


# Harmless -----------------------------------------------------------------------------------------

BLOCKS: dict[str, Callable[[], Any]] = {
    "detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "set_detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "_force_original_view_tracking": lambda: torch.autograd.grad_mode._force_original_view_tracking(
        True
    ),
    "enforce_grad_layout_policy": lambda: torch.autograd.grad_mode.enforce_grad_layout_policy(
        False
    ),
    "set_multithreading_enabled": lambda: torch.autograd.set_multithreading_enabled(False),
    "profile": lambda: torch.autograd.profiler.profile(),
    "record_function": lambda: torch.autograd.profiler.record_function("a step"),
    "cached": lambda: nn.utils.parametrize.cached(),
    "check_sparse_tensor_invariants": lambda: torch.sparse.check_sparse_tensor_invariants(),
    "set_checkpoint_early_stop": lambda: torch.utils.checkpoint.set_checkpoint_early_stop(False),
    "verbose": lambda: torch.backends.mkl.verbose(0),
}


def test_blocks_are_among_the_harmless() -> None:
    assert {name.rpartition(".")[2] for name in HARMLESS.split()} >= set(BLOCKS)


@pytest.mark.rotated("chunks")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_around_all", [False, True])
@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_harmless_block_changes_nothing(
    name: str, chunks: int | None, is_around_all: bool
) -> None:
    def story(lazy: Lazy) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        x = lazy(torch.linspace(-1, 1, 21, dtype=torch.float64).view(7, 3))
        with contextlib.ExitStack() as stack:
            with BLOCKS[name]():
                loss = model(x).square().mean()
                if is_around_all:
                    loss.backward()
            stack.callback(lambda: None if is_around_all else loss.backward())
        return loss, gradients(model)

    assert_same_story(story, chunks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunks", [None, 1, 2, 7])
def test_anomaly_mode_finds_what_it_finds_in_eager(chunks: int | None) -> None:
    def error_of(lazy: Lazy) -> str:
        weight = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        x: Tensor = lazy(torch.ones(7, 3, dtype=torch.float64))
        with (
            torch.autograd.detect_anomaly(check_nan=True),
            pytest.raises(RuntimeError, match="nan values") as raised,
        ):
            ((x * weight).sqrt() * 0).sum().backward()
        return str(raised.value)

    wanted = error_of(lambda batch: batch)
    with koila.config(chunks=chunks):
        assert error_of(koila.lazy) == wanted
