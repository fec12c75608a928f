# SPDX-License-Identifier: Apache-2.0
"""Register for each of torch's callables how a call with a lazy tensor is handled."""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from koila import _core
from koila.basics import (
    devices,
    engine,
    enter,
    holders,
    lines,
    rows,
    surroundings,
    switches,
    table,
    threads,
)
from koila.basics.table import Handler
from koila.memory import order
from koila.messages import errors
from koila.planning import left_plain
from koila.random import draws, generators, plain
from koila.recording import (
    backwards,
    bridge,
    flush,
    handlers,
    inplace_views,
    masks,
    outs,
    packed,
    parts,
    scalars,
    written,
)
from koila.reductions import batch_softmax, calls, norms, scans
from koila.reporting import reports, versions
from koila.running import derived, numbers, recomputed, replay, unwritten
from koila.staged import aliases, hooks, leaves, meta

OP, LIVE, READ, ENTER, HANDLER = range(5)

# They return a Python object, or a tensor that leaves torch: they need the number now. A function
# that can return a tensor with a gradient, or write its input, must not be here: a test checks.
READS = frozenset(
    """item tolist __bool__ __float__ __int__ __index__ __complex__ __long__
    __nonzero__ is_nonzero equal allclose _is_all_true _is_any_true data_ptr
    untyped_storage storage _typed_storage storage_type
    __dlpack__ __dlpack_device__ __cuda_array_interface__ is_set_to is_shared
    __dir__ __array_wrap__ is_pinned has_names is_coalesced q_scale q_zero_point qscheme
    is_inference""".split()
)

# Their answer follows from metadata: they are called on a stand-in without memory.
QUERIES = frozenset(
    """is_floating_point is_complex is_signed is_contiguous stride element_size
    itemsize nbytes layout is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_conj is_neg
    is_distributed is_same_size numel nelement dim ndimension size shape dtype ndim names
    dim_order __len__ is_tensor""".split()
)

# Ops by name: on meta tensors these return other metadata than on real ones.
META_UNRELIABLE = frozenset(
    """native_batch_norm embedding_bag _embedding_bag batch_norm quantize_per_tensor
    quantize_per_channel quantize_per_tensor_dynamic""".split()
)

NAMESPACES = (
    torch,
    torch.Tensor,
    torch._C.TensorBase,
    torch._C._VariableFunctions,
    *(getattr(torch._C, name) for name in "_nn _linalg _fft _special _nested _sparse".split()),
    torch.nn.functional,
    torch.functional,
    torch.linalg,
    torch.fft,
    torch.special,
    torch.autograd,
    torch._VF,
)

_C_CALLABLES = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)


#: Python functions with a row of their own, which is not that of the C function of the same name:
#: that one takes other arguments.
PYTHON_ROWS = frozenset(("embedding_bag",))


class Entry(NamedTuple):
    """What the table of torch's callables says of one."""

    kind: int
    name: str  # torch's name for it
    handler: Handler | None = None  # HANDLER: its replacement; an OP may have one too
    has_meta: bool = False  # OP: its schema neither writes nor aliases: meta tensors can infer it
    returns_list: bool = False  # its schema returns a list of tensors
    is_random: bool = False
    row: str | None = None  # OP: its row of the op table
    container: type | None = None  # of several outputs: tuple, or one of torch.return_types


def _schemas(name: str) -> list[Any]:
    """Return torch's schemas of a callable that take a tensor: aten::split is also for str."""
    found = table.schemas(name)
    return [one for one in found if any("Tensor" in str(word.type) for word in one.arguments)]


def _row_of(func: Callable[..., Any], name: str) -> str | None:
    """Return the row of a callable. A method with another order of arguments has its own row."""
    if isinstance(func, types.MethodDescriptorType) and f"Tensor_{name}" in table.ROWS:
        return f"Tensor_{name}"
    is_meant = name not in PYTHON_ROWS or isinstance(func, types.FunctionType)
    return name if name in table.ROWS and is_meant else None


def _register_op(func: Callable[..., Any], name: str) -> None:
    schemas = _schemas(name)
    is_random = plain.draws(name)
    words = [word for schema in schemas for word in (*schema.arguments, *schema.returns)]
    is_pure = bool(schemas) and all(word.alias_info is None for word in words)
    returns = [[str(one.type) for one in schema.returns] for schema in schemas]
    returns_list = bool(schemas) and all(types == ["List[Tensor]"] for types in returns)
    has_meta = is_pure and not is_random and name not in META_UNRELIABLE
    row = _row_of(func, name)
    container = getattr(torch.return_types, name, tuple)
    instead = scalars.instead(name, handlers.DECLINED.get(name))
    if row is not None and table.ROWS[row]["kind"] == "INPLACE":
        instead = written.instead(instead)
    entry = Entry(OP, name, instead, has_meta, returns_list, is_random, row, container)
    _core.register(func, entry)


def _register_own(func: Any, name: str, row: str, handler: Handler | None = None) -> None:
    """Register a function of koila's that is recorded by a row."""
    _core.register(func, Entry(OP, name, handler, row=row, container=tuple))


def _register_unrecorded(func: Any, name: str) -> bool:
    """Register a callable if it is never recorded as it is. Return whether it was."""
    handler = handlers.HANDLERS.get(name)
    if handler is None and name in READS:
        _core.register(func, Entry(READ, name))
        return True
    handler = handlers.query if handler is None and name in QUERIES else handler
    if handler is not None:
        _core.register(func, Entry(HANDLER, name, handler))
    return handler is not None


def _register(func: Any, name: str) -> None:
    if isinstance(func, types.FunctionType):
        enter.note(func)
    if _register_unrecorded(func, name):
        return
    if isinstance(func, _C_CALLABLES) or name in PYTHON_ROWS or name == "unflatten":
        _register_op(func, name)  # unflatten's Python method reports itself again when entered
    elif isinstance(func, types.FunctionType):
        _core.register(func, Entry(ENTER, name))


def _overridable() -> Iterable[tuple[str, Any]]:
    """Yield the name and the value of each attribute of `NAMESPACES`, callable or not. Of a static
    or class method, yield the function."""
    for namespace in NAMESPACES:
        for name in dir(namespace):
            func = inspect.getattr_static(namespace, name, None)
            if isinstance(func, staticmethod | classmethod):
                func = func.__func__
            if isinstance(func, _C_CALLABLES) and not isinstance(namespace, type):
                func = getattr(namespace, name)
            yield name, func


def _names() -> dict[Any, str]:
    """Return the name of each callable. Builtins of one C function are equal (torch.spmm is
    torch.mm): the name with a row is taken."""
    names: dict[Any, str] = {}
    for name, func in _overridable():
        if callable(func) and not isinstance(func, type):
            own = getattr(func, "__name__", name)
            if func not in names or own in table.ROWS:
                names[func] = own
    return names


def _accessors() -> Iterable[tuple[str, Any]]:
    for owner in (torch._C.TensorBase, torch.Tensor):
        for name, member in vars(owner).items():
            if isinstance(member, types.GetSetDescriptorType | property):
                yield name, member


def _blocked_halves() -> Iterator[torch.dtype]:
    """Yield the 16-bit dtypes whose convolutions oneDNN runs on this CPU, in its blocked layout;
    torch unfolds the inputs of others."""
    names = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    for dtype, name in names.items():
        ask = getattr(torch.ops.mkldnn, name, None)  # torch may be built without oneDNN
        if ask is not None and ask():
            yield dtype


def _most() -> str:
    """Return the newest instruction set that the environment lets oneDNN use; "": no limit."""
    names = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"
    return next((os.environ[name].upper() for name in names if name in os.environ), "")


def _tiled_halves() -> Iterator[torch.dtype]:
    """Yield those dtypes whose kernels take channels last: bfloat16 with AMX, float16 always."""
    is_allowed = _most() in ("", "ALL", "DEFAULT") or "AMX" in _most()
    has_amx = torch.cpu._is_amx_tile_supported() and is_allowed
    return (dtype for dtype in _blocked_halves() if dtype is torch.float16 or has_amx)


def _emulated_halves() -> tuple[torch.dtype, ...]:
    """Return those dtypes whose numbers this CPU computes in float32: bfloat16 with an AVX-512 that
    is older than it."""
    has_own = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    is_emulated = torch.cpu._is_avx512_supported() and not has_own
    return (torch.bfloat16,) if is_emulated else ()


def _block_width() -> int:
    """Return the number of channels in a block of oneDNN's layouts on this CPU.

    Do not run a kernel to find out: at its first kernel oneDNN reads from the environment how many
    kernels to cache, and the user may still set that.
    """
    is_narrow = _most() == "AVX" or _most().startswith(("SSE", "AVX2"))
    return 16 if torch.cpu._is_avx512_supported() and not is_narrow else 8


def _run_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call of koila's own at once if it cannot be recorded."""
    return _core.live(func, args, kwargs, False)


def register_all() -> None:
    """Fill the C module's table; called once, when koila is imported."""
    _core.bind(
        lines.INSIDE,
        calls.bits_of_all(),
        {
            "koila_error": errors.KoilaError,
            "kept_error": errors.kept,
            "error_again": errors.again,
            "broken_promise": errors.broken_promise,
            "changed_leaf": errors.changed_leaf,
            "parse": table.parse,
            "with_stride": rows.with_stride,
            "meta_infer": meta.infer,
            "refusal": surroundings.in_outside(meta.refusal),
            "is_row_range": meta.is_row_range,
            "size_method": meta.size_method,
            "checksum": meta.checksum,
            "draw_like": meta.draw_like,
            "note_draw": generators.note_recorded,
            "check_run": bridge.check_run,
            "thawed": engine.thawed,
            "move_on": generators.move_on,
            "skip_one_hop": enter.enter,
            "own_of": enter.own_of,
            "read": replay.read,
            "in_transform": handlers.in_transform,
            "run_again": draws.run_again,
            "bind_hooks": hooks.bind,
            "bridge": bridge.call,
            "before_write": parts.before_write,
            "after_write": parts.after_write,
            "runs_at_once": bridge.runs_at_once,
            "leave": surroundings.leave,
            "note_ran": reports.note_whole,
            "note_gap": order.note_gap,
            "note_run": order.note_run,
            "keep": recomputed.keep,
            "device_of": devices.meant,
            "wait_for_copy": devices.wait_for_copy,
            "choose_switches": switches.choose,
            "record_out": outs.record,
            "settle": numbers.settle_outdated,
            "is_out_of_memory": errors.is_out_of_memory,
            "hide_frames": errors.hide_frames,
            "note_write": unwritten.watch,
            "note_written": unwritten.note_written,
            "write_elsewhere": unwritten.make_elsewhere,
            "aliased": aliases.by_storage,
            "note_leaf": aliases.note_leaf,
            "is_worker": threads.is_autograd_worker,
            "autograd_key": int(surroundings.AUTOGRAD),
            "note_left": left_plain.note_left,
            "is_in_hook": engine.is_in_hook,
            "make_room": flush.make_room,
            "name_of_file": lines.name_of_file,
        },
    )
    _core.set_blocks(
        _block_width(), tuple(_blocked_halves()), tuple(_tiled_halves()), _emulated_halves()
    )
    for func, name in _names().items():
        _register(func, name)
    item = torch.ops.aten._local_scalar_dense.default  # torch's argument parser calls it
    _core.register(item, Entry(READ, "item"))
    _core.register(torch.autograd.grad, Entry(HANDLER, "grad", backwards.autograd_grad))
    # It writes no number. It takes the row of zero_(), the write that reads and saves least.
    _register_own(inplace_views.touch, "touch", "zero_")
    _register_own(norms.batch_moments, "batch_norm", "var_mean")
    _register_own(norms.batch_norm, "batch_norm", "batch_norm", norms.record)
    _register_own(batch_softmax.shares, "softmax", "var_mean")
    for name, call in batch_softmax.CALLS.items():
        _register_own(call, name, name, batch_softmax.run_whole)
    for name, layer in packed.LAYERS.items():
        _register_own(layer, name, f"packed_{name}", _run_whole)
    _register_own(packed.select_index, "index_select", "index_select")
    _register_own(leaves.as_leaf, "requires_grad_", leaves.ROW, leaves.decline)
    _register_own(derived.gradient_of, "grad", "gradient_of", _run_whole)
    _register_own(masks.select_masked, "__getitem__", "select_masked", _run_whole)
    for call, scan in scans.STARTS.items():
        _register_own(call, "starts", "prod" if scan.run is torch.cumprod else "sum")
    for call, name in scans.CALLS.items():
        _register_own(call, name, name, batch_softmax.run_whole)
    for name, member in _accessors():
        getter = member.fget if isinstance(member, property) else member
        if _register_unrecorded(getter, name):
            continue
        if name == "data":  # like detach(), but writes through it change no version
            _register_own(getter, name, "detach")
        elif name in table.ROWS:
            _register_own(getter, name, name)
        elif name == "T":  # the row t() is for up to two dims; beyond, torch itself warns
            _register_own(getter, name, "t")
    for _, name, wrapper in plain.wrappers():  # functions that replace torch's while koila is on
        _register_op(wrapper, name)
    own = vars(_core.LazyTensor)
    methods = (name for name in vars(torch._C.TensorBase) if name in table.ROWS)
    _core.install_slots(tuple(name for name in methods if name not in own and name[0] != "_"))
    versions.note_slow_ways(
        {
            "lazies are made anew each time": _core.is_recycling(),
            "gradients are copied only where others hold them": holders.counts_holders(),
        }
    )
