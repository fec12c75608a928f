# SPDX-License-Identifier: Apache-2.0
"""Check what the rows say of real calls: shape, dtype, strides, alias, and places by brute force.

The oracle is torch itself. A place is checked without any rule: the inputs are cut as the row says,
torch runs on every chunk, and what comes out is put together as the row says.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import sanitizers
from koila import _core
from koila.recording.functions import PYTHON_ROWS
from koila.recording.masks import select_masked
from koila.recording.packed import LAYERS
from koila.reductions.partials import REDUCTIONS
from koila.reductions.reduction import Call
from koila.running.derived import gradient_of
from opchunks import (
    Place,
    assert_same,
    assignments,
    combine,
    join,
    partitions,
    run_chunk,
    tensors,
)

NAMESPACES = (
    torch.Tensor,
    torch._C.TensorBase,
    torch._C._VariableFunctions,
    torch._C._nn,
    torch._C._linalg,
    torch._C._special,
    torch._C._fft,
    types.SimpleNamespace(**{f"packed_{name}": call for name, call in LAYERS.items()}),
    types.SimpleNamespace(select_masked=select_masked, gradient_of=gradient_of),
    types.SimpleNamespace(as_leaf=lambda x: x.detach().requires_grad_()),
)
PLACED = {torch.float64, torch.complex128, torch.int64, torch.bool, torch.int32}
RANDOM_VALUES = {"empty_like", "new_empty"}  # uninitialised memory
# Composed of kernels that torch chooses by more than the call: what they keep is told from above.
ESTIMATED = frozenset(
    """lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell cdist ctc_loss
    packed_lstm packed_gru packed_rnn_tanh packed_rnn_relu
    scaled_dot_product_attention cosine_embedding_loss triplet_margin_loss poisson_nll_loss
    margin_ranking_loss gradient_of""".split()
)
#: Of operands that do not lie row by row these keep copies, which are not counted to the byte.
COPYING = frozenset({"cdist", "cross_entropy_loss", "group_norm", "nll_loss_nd"})


@functools.cache
def rows_by_callable() -> dict[Any, str]:
    """Map every C-level callable of torch that has a row to the row's name."""
    table: dict[Any, str] = {}
    for row in _core.op_table():
        for name in (row["name"], *row["aliases"]):
            if name.startswith("Tensor_"):
                table[getattr(torch.Tensor, name.removeprefix("Tensor_"))] = row["name"]
                continue
            for space in (torch.nn.functional,) if name in PYTHON_ROWS else NAMESPACES:
                found = getattr(space, name, None)
                if callable(found):  # x.real is none
                    table.setdefault(found, row["name"])
    for row in _core.op_table():
        if row["name"].startswith("Tensor_"):
            table[getattr(torch.Tensor, row["name"].removeprefix("Tensor_"))] = row["name"]
    return table


class Calls(TorchFunctionMode):
    """Enter Python functions, and hand every call of a C function to `check` before it runs."""

    def __init__(self, check: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.check = check
        self.entered: list[tuple[Any, int]] = []

    def __torch_function__(
        self, func: Any, types_: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mark = (func, len(args))
        if isinstance(func, types.FunctionType) and self.entered[-1:] != [mark]:
            self.entered.append(mark)
            try:
                with self:
                    return torch.overrides.redispatch_function(func, types_, args, kwargs)
            finally:
                self.entered.pop()
        return self.check(func, args, kwargs)


def describe(name: str, args: Any, kwargs: Any, places: Any = None, *, brief: bool = False) -> str:
    """Write a call down; briefly, without what its places cannot depend on."""

    def show(x: Any) -> str:
        if isinstance(x, torch.Tensor) and brief:
            is_index = not x.is_floating_point() and x.numel() <= 16
            return f"<{tuple(x.shape)} {x.tolist() if is_index else ''}>"
        if isinstance(x, torch.Tensor):
            return f"<{str(x.dtype)[6:]} {tuple(x.shape)} {x.stride()}{' grad' * x.requires_grad}>"
        if isinstance(x, (list, tuple)):
            return f"({', '.join(map(show, x))})"
        return repr(x)

    words = [show(a) for a in args] + [f"{k}={show(v)}" for k, v in kwargs.items()]
    return f"{name}({', '.join(words)}) places={places}"


#: By the name of a reduction: its number of parts.
N_PARTS = {name: n_parts for name, n_parts, *_ in _core.parts_table()}
#: Rows that are recorded as two calls where they couple rows; samples may have the second of them.
IN_TWO_CALLS = ("batch_norm", "softmax", "log_softmax", "cumprod", "cumsum", "logcumsumexp")


def check_classes(
    name: str, func: Any, args: Any, kwargs: Any, said: Any, rows: int, whole: torch.Tensor
) -> None:
    """Assert that the parts of chunks of classes, which are no calls of it, give the loss."""
    signature = next(row["call"] for row in _core.op_table() if row["name"] == name)
    reduction = REDUCTIONS["CLASSES"]

    def call_at(start: int) -> Callable[..., Call]:
        return lambda *args, **kwargs: Call(func, args, kwargs, signature, whole.dtype, start, rows)

    for sizes in partitions(rows):
        parts: list[list[torch.Tensor]] = [[] for _ in range(N_PARTS["CLASSES"])]
        start = 0
        for n in sizes:
            call = run_chunk(call_at(start), args, kwargs, said, rows, start, start + n)
            for of, part in zip(parts, reduction.partials(range(len(parts)), call), strict=True):
                of.append(part)
            start += n
        assert_same(reduction.combine(parts, call), whole, f"{name}: in chunks of {sizes}")


class Kept:
    """A tensor that torch keeps for backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Checker:
    """Check calls against torch, and count what was seen."""

    def __init__(self, rows: Container[str] | None = None) -> None:
        table = rows_by_callable()
        self.table = {f: row for f, row in table.items() if rows is None or row in rows}
        self.seen: set[str] = set()
        self.placed: set[str] = set()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.reasons: Counter[tuple[str, str]] = Counter()

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = self.table.get(func)
        if name is None:
            return func(*args, **kwargs)
        key = describe(name, args, kwargs) + str(torch.is_grad_enabled())
        if key in self.seen:
            return func(*args, **kwargs)
        self.seen.add(key)
        return self.check(name, func, args, kwargs)

    def check(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        said = _core.infer(name, tuple(args), kwargs)
        self.counts[name, said["status"]] += 1
        text = describe(name, args, kwargs)
        before = [(t, t.detach().clone()) for t in tensors((args, kwargs))]
        packed: list[weakref.ref[Kept]] = []

        def pack(tensor: torch.Tensor) -> Kept:
            kept = Kept(tensor)
            packed.append(weakref.ref(kept))
            return kept

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
                result = func(*args, **kwargs)
        except Exception as error:
            # A call that torch refuses must not be taken for legal unless only its values tell.
            self.counts[name, f"raises {type(error).__name__}, said {said['status']}"] += 1
            raise
        if said["status"] == "DECLINED":
            return result
        assert said["status"] == "OK", f"{text}: legal, but {said}"
        self.check_outs(name, text, said, args, kwargs, result)
        # A node that nothing leads to any more has let go again of what it kept.
        saved = [kept.tensor for one in packed if (kept := one()) is not None]
        self.check_saves(name, text, said, args, kwargs, result, saved)
        # Places do not depend on dtypes, and short floats are too coarse to compare sums.
        brief = describe(name, args, kwargs, brief=True)
        is_new = brief not in self.placed
        if is_new and all(t.dtype in PLACED and t.numel() <= 4000 for t, _ in before):
            self.placed.add(brief)
            values = {id(t): old for t, old in before}
            self.check_all_places(name, func, values, args, kwargs, result)
        return result

    def check_outs(
        self, name: str, text: str, said: dict[str, Any], args: Any, kwargs: Any, result: Any
    ) -> None:
        outs = [args[0]] if result is None else tensors(result)
        assert len(outs) == len(said["outs"]), f"{text}: {len(outs)} outputs, said {said}"
        kind, alias_input = said["alias"]
        inputs = [self.input(args, kwargs, where, entry) for where, entry, _ in said["inputs"]]
        for number, (out, (dtype, shape, strides, grad, _)) in enumerate(
            zip(outs, said["outs"], strict=True)
        ):
            what = f"{text}: output {number}, said {said['outs'][number]} {said['alias']}"
            assert str(out.dtype) == f"torch.{dtype}", f"{what}, is {out.dtype}"
            assert tuple(out.shape) == shape, f"{what}, is {tuple(out.shape)}"
            assert out.requires_grad == grad, f"{what}, is {out.requires_grad}"
            if strides is not None:
                assert out.stride() == strides, f"{what}, strides are {out.stride()}"
            source = inputs[number if alias_input is None else alias_input]
            memory = [t.untyped_storage()._cdata for t in inputs]
            if kind == "SAME":
                assert out is source, what
            elif kind == "VIEW":
                assert out is not source, what
                assert out.untyped_storage()._cdata == source.untyped_storage()._cdata, what
            elif kind == "NONE":
                assert out.untyped_storage()._cdata not in memory, what
            self.counts[name, "strides" if strides is not None else "no strides"] += 1

    @staticmethod
    def input(args: Any, kwargs: Any, where: Any, entry: Any) -> torch.Tensor:
        value = args[where] if isinstance(where, int) else kwargs[where]
        return value if entry is None else value[entry]

    def check_saves(
        self,
        name: str,
        text: str,
        said: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        saved: list[torch.Tensor],
    ) -> None:
        """Compare what the row says with what torch kept for backward, storage by storage."""
        inputs = [self.input(args, kwargs, where, entry) for where, entry, _ in said["inputs"]]
        if name in COPYING and not all(t.is_contiguous() for t in inputs):
            return
        outs = [args[0]] if result is None else tensors(result)
        own = {t.untyped_storage()._cdata for t in (*inputs, *outs)}
        kept = {t.untyped_storage()._cdata: t.numel() * t.element_size() for t in saved}

        def storages(values: list[torch.Tensor], mask: int) -> set[int]:
            chosen = [t for i, t in enumerate(values) if mask >> i & 1]
            return {t.untyped_storage()._cdata for t in chosen}

        told = storages(inputs, said["saves"]["inputs"]) | storages(outs, said["saves"]["outputs"])
        extra = sum(n for cdata, n in kept.items() if cdata not in own)
        names = {t.untyped_storage()._cdata: f"in{i}" for i, t in enumerate(inputs)}
        names |= {t.untyped_storage()._cdata: f"out{i}" for i, t in enumerate(outs)}
        actual = sorted(names[c] for c in kept if c in own)
        if name in ESTIMATED:
            assert set(kept) & own <= told and extra <= said["saves"]["bytes_extra"], (
                f"SAVES {text}: keeps {actual} and {extra} bytes, said {said['saves']}"
            )
            return
        assert (set(kept) & own, extra) == (told, said["saves"]["bytes_extra"]), (
            f"SAVES {text}: keeps {actual} and {extra} bytes, said {said['saves']}"
        )

    def check_all_places(
        self, name: str, func: Any, values: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        def old(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return values[id(x)].requires_grad_(x.requires_grad)
            if isinstance(x, (list, tuple)):
                return type(x)(map(old, x)) if type(x) in (list, tuple) else x
            return x

        old_args = tuple(map(old, args))
        old_kwargs = {k: old(v) for k, v in kwargs.items()}
        said = _core.infer(name, old_args, old_kwargs)
        inputs = [self.input(old_args, old_kwargs, w, e) for w, e, _ in said["inputs"]]
        outs = [args[0]] if result is None else tensors(result)
        outs = [t.detach().clone() for t in outs]
        for places, rows in assignments(inputs):
            self.check_place(name, func, old_args, old_kwargs, outs, places, rows)

    def check_place(
        self,
        name: str,
        func: Any,
        args: Any,
        kwargs: Any,
        outs: list[torch.Tensor],
        places: list[Place | None],
        rows: int,
    ) -> None:
        said = _core.infer(name, args, kwargs, places, [rows])
        text = describe(name, args, kwargs, places)
        if said["status"] == "DECLINED" and name in IN_TWO_CALLS:
            return
        assert said["status"] == "OK", f"{text}: {said}"
        self.counts[name, said["mode"]] += 1
        if said["mode"] == "ONCE":
            assert said["reason"], text
            assert not said["rewrites"] and not any(said["in_places"]), text
            self.reasons[name, said["reason"]] += 1
            return
        if sanitizers.IS_SANITIZED:
            return  # the row was asked; whether it is right the suite finds, which runs torch alone
        if said["reduce"] == "CLASSES":
            check_classes(name, func, args, kwargs, said, rows, outs[0])
            return
        is_random = name in RANDOM_VALUES or said["random"]
        for sizes in partitions(rows):
            parts: list[list[torch.Tensor]] = []
            start = 0
            for n in sizes:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # std of a single row
                    try:
                        chunk = run_chunk(func, args, kwargs, said, rows, start, start + n)
                    except Exception as error:
                        raise AssertionError(
                            f"{text}: {said}: chunk {start}+{n}: {error}"
                        ) from error
                parts.append(tensors(chunk) if not isinstance(chunk, torch.Tensor) else [chunk])
                start += n
            for number, whole in enumerate(outs):
                what = f"{text}: output {number} in chunks of {sizes}, said {said}"
                mine = [p[number] for p in parts]
                place = said["outs"][number][4]
                if said["mode"] == "REDUCE":
                    assert place is None, what
                    combined = combine(said, mine, sizes, kwargs)
                    assert mine[0].shape == whole.shape, what
                    if combined is not None:
                        assert_same(combined, whole, what)
                elif place is None:
                    for one in mine:
                        assert_same(one, whole, what) if not is_random else None
                elif is_random:
                    assert join(mine, place, sizes).shape == whole.shape, what
                else:
                    assert_same(join(mine, place, sizes), whole, what)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Give a tensor the memory order of its transpose, same values."""
    if x.dim() < 2 or x.layout != torch.strided:
        return x
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 4 or x.layout != torch.strided:
        return x
    return x.contiguous(memory_format=torch.channels_last)


def strided(x: torch.Tensor) -> torch.Tensor:
    """Give a tensor holes in memory."""
    if x.dim() < 1 or x.layout != torch.strided or x.numel() == 0:
        return x
    return torch.stack([x] * 2, -1)[..., 0]


def unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


def detached(x: torch.Tensor) -> torch.Tensor:
    return x.detach()


# What is done to the first input of a sample, and to the others.
VARIANTS = {
    "as it is": (unchanged, unchanged),
    "transposed": (transposed, transposed),
    "channels last": (channels_last, channels_last),
    "with holes": (strided, strided),
    "gradient of the first": (unchanged, detached),
    "gradient of the others": (detached, unchanged),
}


def changed(x: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to every tensor of plain containers."""
    if isinstance(x, torch.Tensor):
        return change(x)
    if type(x) in (list, tuple):
        return type(x)(changed(item, change) for item in x)
    if type(x) is dict:
        return {k: changed(v, change) for k, v in x.items()}
    return x


@contextlib.contextmanager
def checking(checker: Checker) -> Iterator[None]:
    with Calls(checker):
        yield
