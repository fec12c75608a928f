# SPDX-License-Identifier: Apache-2.0
"""How results of calls without a row lie in memory: what meta kernels say of it is what runs."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import koila
import opcalls
from koila.recording import functions
from koila.staged import meta
from sanitizers import fewer

D = torch.float64
ROWS = {name for row in koila._core.op_table() for name in (row["name"], *row["aliases"])}


def is_asked_of_meta(func: Any) -> bool:
    """Whether a call without a row is asked of meta tensors: as the table of functions says."""
    name = getattr(func, "__name__", "")
    if not isinstance(func, functions._C_CALLABLES) or name in ROWS:
        return False
    schemas = functions._schemas(name)
    words = [word for schema in schemas for word in (*schema.arguments, *schema.returns)]
    is_pure = bool(schemas) and all(word.alias_info is None for word in words)
    return is_pure and not functions.plain.draws(name) and name not in functions.META_UNRELIABLE


class Compared(TorchFunctionMode):
    """Holds what is said of each call that is made to what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.n_said = 0
        self.wrong: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_asked_of_meta(func):
            return result
        said = meta.infer(func, args, kwargs)
        outs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        for (_, shape, strides, _, _), out in zip(said[1] if said else (), outs, strict=False):
            if strides is None or 0 in shape or shape != out.shape:
                continue
            self.n_said += 1
            pairs = zip(strides, out.stride(), out.shape, strict=True)
            if any(said != seen and size > 1 for said, seen, size in pairs):
                self.wrong.append(f"{func.__name__}: {strides}, and is {out.stride()}, {shape}")
        return result


def run(op: Any, mode: Compared, n_samples: int) -> None:
    for dtype in (D, torch.float32, torch.int64, torch.complex128, torch.bool):
        if dtype not in op.dtypes:
            continue
        try:
            samples = list(
                itertools.islice(op.sample_inputs_func(op, "cpu", dtype, False), n_samples)
            )
        except (RuntimeError, ImportError):
            continue
        for sample, variant in itertools.product(samples, opcalls.VARIANTS.values()):
            first, others = variant
            for func in filter(None, (op.op, op.method_variant)):
                refusals = contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError)
                with refusals, torch.no_grad():
                    args = opcalls.changed(sample.args, others)
                    kwargs = opcalls.changed(sample.kwargs, others)
                    given = opcalls.changed(sample.input, first)
                    with mode:
                        func(given, *args, **kwargs)


def is_left_out(op: Any) -> bool:
    return "jiterator" in op.name or "scaled_dot" in op.name


@pytest.mark.rotated
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", op_db, ids=lambda op: op.formatted_name)
def test_op(op: Any) -> None:
    mode = Compared()
    if not is_left_out(op):
        run(op, mode, fewer(20, 2))
    assert not mode.wrong, mode.wrong[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(meta.LAID_OUT_OTHERWISE))
def test_exceptions_are_such(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nothing is said of is another than it would say."""
    monkeypatch.setattr(meta, "LAID_OUT_OTHERWISE", meta.LAID_OUT_OTHERWISE - {name})
    monkeypatch.setattr(meta, "_cache", {})
    mode = Compared()
    for op in op_db:
        if op.name.replace(".", "_") == name:
            run(op, mode, 40)
    assert any(text.startswith(name) for text in mode.wrong)


def test_a_layout_that_was_not_said_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it gives is not what views and copies of it were recorded by."""
    monkeypatch.setattr(meta, "LAID_OUT_OTHERWISE", frozenset())
    monkeypatch.setattr(meta, "_cache", {})
    h = torch.linalg.eig(koila.lazy(torch.randn(2, 5, 5, dtype=D)) * 2)[1]
    with pytest.raises(koila.KoilaError, match=r"linalg_eig.*lies in memory otherwise"):
        h.abs().sum().item()


def test_nothing_is_said_of_turned_values() -> None:
    """isin() of them lies row by row, and its meta kernel says otherwise."""
    h = torch.randn(6, 4, dtype=D)
    assert torch.isin(h.T, h).stride() != torch.isin(h.to("meta").T, h.to("meta")).stride()
    x = koila.lazy(h)
    for other in (x, x[:1]):
        assert koila._core.describe(torch.isin(x.T, other))[2] is None
        assert torch.isin(x.T, other).tolist() == torch.isin(h.T, h[: len(other)]).tolist()
