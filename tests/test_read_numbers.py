# SPDX-License-Identifier: Apache-2.0
"""A read gives the user a tensor in whose memory calls of before saved what their backward needs.
If it is written, a backward has eager's gradient, raises eager's error, or is refused; it never has
the gradient of the old numbers, as a part that computes them again would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import koila

F64 = torch.float64
GIVEN = [
    "k = x * 2; b = k",
    "b = x * 2; k = b[:]",
    "b = x * 2; k = b.t()",
    "b = x.tanh(); k = b[1:]",
]
CALLS = [
    "h = b @ w",
    "h = k.reshape(-1, 4) @ w",
    "h = b @ w + k.sum()",
    "h = b * w[0]",
    "h = b + w[0]",
]
READS = ["h.sum().item()", "k.sum().item()", "(k.detach() + 0).sum().item()", ""]
WRITES = [
    "k.data.mul_(2)",
    "k.data[0].zero_()",
    "d.mul_(2)",
    "with torch.no_grad(): k.mul_(2)",
    "k.data.numpy()[0] = 1",
    "k.data.sum()",
]


def outcome(lazy: Any, given: str, call: str, read: str, write: str) -> Tensor | str:
    torch.manual_seed(0)
    w = torch.randn(4, 4, dtype=F64, requires_grad=True)
    env = {"x": lazy(torch.randn(6, 4, dtype=F64)), "w": w, "torch": torch}
    before = "d = k.data" if write.startswith("d.") else ""
    text = "\n".join((given, before, call, "del b", read, write, "h.pow(2).mean().backward()"))
    try:
        exec(text, env)
    except koila.StaleError:
        return "refused"
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
        return "raised"
    assert w.grad is not None
    return w.grad


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [None, 1, 2, 3, 6])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("given", GIVEN)
def test_what_was_given_is_written(
    given: str, call: str, read: str, write: str, chunks: int | None
) -> None:
    wanted = outcome(lambda x: x, given, call, read, write)
    with koila.config(**({} if chunks is None else {"chunks": chunks})):  # type: ignore[arg-type]
        found = outcome(lambda x: koila.lazy(x, batch=0), given, call, read, write)
    if isinstance(found, Tensor):
        assert isinstance(wanted, Tensor), "eager raises"
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)
    elif found == "raised":
        assert wanted == "raised"
    else:
        is_unseen = ".data" in write or write.startswith("d.")
        assert is_unseen and write != "k.data.sum()" and chunks not in (None, 1)
