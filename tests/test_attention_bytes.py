# SPDX-License-Identifier: Apache-2.0
"""What is said of attention that torch composes of other calls is what these take, within 5 %:
kept for backward, and at the worst moment forward and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.profiler import profile
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function

from koila import _core
from profiled import noted

BATCH, HEADS = 2, 4
#: Lengths of queries and of keys, features of these and of values.
SIZES = [(96, 96, 16, 16), (40, 160, 32, 8), (160, 40, 8, 64)]
MASKS = ["none", "causal", "bool", "added", "for each", "wanted"]


def made(kind: str, n_queries: int, n_keys: int, dtype: torch.dtype) -> Tensor | None:
    """A mask of some kind."""
    if kind == "bool":
        return torch.rand(n_queries, n_keys) > 0.2
    if kind == "added":
        return torch.randn(n_queries, n_keys, dtype=dtype)
    if kind in ("for each", "wanted"):
        mask = torch.randn(BATCH, HEADS, n_queries, n_keys, dtype=dtype)
        return mask.requires_grad_(kind == "wanted")
    return None


def peaks(given: list[Tensor], words: dict[str, Any], seed: Tensor) -> tuple[int, int, int]:
    """Bytes, beside those given: left by the call, and at most in it and in its backward."""
    wanted = [one for one in given if one.requires_grad]
    with profile(profile_memory=True) as profiled:
        out = F.scaled_dot_product_attention(*given[:3], **words)
        with record_function("mark"):
            pass
        loss = (out * seed).sum()
        del out
        with record_function("mark"):
            pass
        torch.autograd.grad(loss, wanted)
    now, most, at_marks, tops = 0, 0, [], []
    for name, n_bytes in noted(profiled):
        now += n_bytes
        most = max(most, now)
        if name == "mark":
            at_marks.append(now)
            tops.append(most)
            most = now
    return at_marks[0], tops[0], most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("is_grouped", [False, True], ids=["", "grouped"])
@pytest.mark.parametrize("is_strided", [False, True], ids=["", "strided"])
@pytest.mark.parametrize("size", SIZES)
def test_composed(
    size: tuple[int, ...],
    is_strided: bool,
    is_grouped: bool,
    kind: str,
    p: float,
    dtype: torch.dtype,
) -> None:
    n_queries, n_keys, width, n_values = size
    n_heads = HEADS // 2 if is_grouped else HEADS
    shapes = [(HEADS, n_queries, width), (n_heads, n_keys, width), (n_heads, n_keys, n_values)]
    given = [torch.randn(BATCH, *shape, dtype=dtype) for shape in shapes]
    if is_strided:
        given = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in given]
    given = [one.requires_grad_() for one in given]
    mask = made(kind, n_queries, n_keys, dtype)
    words: dict[str, Any] = {
        "attn_mask": mask,
        "dropout_p": p,
        "is_causal": kind == "causal",
        "enable_gqa": is_grouped,
    }
    seed = torch.randn(BATCH, HEADS, n_queries, n_values, dtype=dtype)
    given += [] if mask is None else [mask]
    with sdpa_kernel(SDPBackend.MATH):
        said: Any = _core.infer("scaled_dot_product_attention", tuple(given[:3]), words)["saves"]
        left, forward, backward = peaks(given, words, seed)
    there = sum(one.nbytes for one in given)
    gradients = sum(one.nbytes for one in given if one.requires_grad)
    kept = there + said["bytes_extra"] + seed.nbytes  # which is as large as the result
    assert 0.95 <= kept / (there + left) <= 1.05
    assert 0.95 <= (kept + said["bytes_workspace"]) / (there + forward) <= 1.05
    assert 0.95 <= (kept + gradients + said["bytes_backward"]) / (there + backward) <= 1.05
