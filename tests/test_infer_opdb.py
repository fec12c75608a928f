# SPDX-License-Identifier: Apache-2.0
"""What the rows say of every call that the samples of op_db make, against torch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import opcalls
from sanitizers import fewer

# Many samples of float64; of the others, which differ in dtypes only, a few.
N_SAMPLES = {
    torch.float64: 100,
    torch.float32: 3,
    torch.float16: 3,
    torch.bfloat16: 3,
    torch.complex128: 3,
    torch.int64: 6,
    torch.uint8: 3,
    torch.bool: 3,
}
# A chunk of one row crashes the process inside torch; jiterator needs a GPU.
LEFT_OUT = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "nn.functional.scaled_dot_product_attention",
}

CHECKER = opcalls.Checker()


def samples(op: Any, dtype: torch.dtype) -> list[Any]:
    """What op_db has for a dtype; nothing where its own code does not run on this machine."""
    has_grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    n = fewer(N_SAMPLES[dtype], dtype in (torch.float64, torch.int64))
    try:
        # op.sample_inputs looks through the whole stack for a test of torch's own, at each sample.
        return list(itertools.islice(op.sample_inputs_func(op, "cpu", dtype, has_grad), n))
    except (RuntimeError, ImportError):
        return []


def calls(op: Any, sample: Any, names: list[str]) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield function, method and in-place method with each variant of the sample's tensors."""
    for name in names:
        first, others = opcalls.VARIANTS[name]
        args = opcalls.changed(sample.args, others)
        kwargs = opcalls.changed(sample.kwargs, others)
        for func in filter(None, (op.op, op.method_variant)):
            yield func, opcalls.changed(sample.input, first), args, kwargs
        if op.inplace_variant is not None and isinstance(sample.input, torch.Tensor):
            yield op.inplace_variant, first(sample.input.clone()), args, kwargs


@pytest.mark.rotated
@pytest.mark.sanitize
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", op_db, ids=lambda op: op.formatted_name)
def test_op(op: Any) -> None:
    if op.name in LEFT_OUT or "jiterator" in op.name:
        return
    for dtype in N_SAMPLES:
        if dtype not in op.dtypes:
            continue
        for sample in samples(op, dtype):
            names = list(opcalls.VARIANTS) if dtype == torch.float64 else ["as it is", "transposed"]
            names = names[: fewer(len(names), 1)]
            for func, first, args, kwargs in calls(op, sample, names):
                # What torch refuses is no business of this test; what a row says wrongly is.
                refusals = contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError)
                with refusals, opcalls.checking(CHECKER):
                    func(first, *args, **kwargs)
