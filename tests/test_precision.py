# SPDX-License-Identifier: Apache-2.0
"""In half precision the chunks are as near to the truth as eager is, and as one chunk is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oracle import Outcome, run, run_lazy
from programs import PROGRAMS
from programs_kit import Program

N_ROWS = 64
NAMES = {
    "mlp-ce",
    "mlp-ce_sum",
    "mlp-ce_ignored",
    "mlp-ce_weights",
    "mlp-mse",
    "mlp-masked_mean",
    "mlp-rmse",
    "mlp-log_partition",
    "cnn-ce",
    "residual-ce",
    "encoder-ce",
    "gpt_by_hand-flat_ce_ignored",
    "gpt_fused-flat_ce_ignored",
    "unet-pixel_mse",
    "clip",
    "barlow",
}


def flat(outcome: Outcome) -> torch.Tensor:
    """Return all gradients of a step, in float64, end to end."""
    return torch.cat([g.double().flatten() for g in outcome.gradients.values() if g is not None])


@pytest.mark.rotated("chunks")
@pytest.mark.parametrize("chunks", [2, 3, 7, N_ROWS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.name in NAMES], ids=lambda program: program.name
)
def test_as_near_as_eager(program: Program, dtype: torch.dtype, chunks: int) -> None:
    """The error against float64 is at most one and a half times eager's."""
    how: Any = {"rounded": dtype, "dtype": dtype}
    truth = run(program, N_ROWS, rounded=dtype)
    want = run(program, N_ROWS, **how)
    got = run_lazy(program, N_ROWS, chunks=chunks, **how)
    assert got.loss.dtype == want.loss.dtype
    error = (flat(got) - flat(truth)).norm() / flat(truth).norm()
    eager_error = (flat(want) - flat(truth)).norm() / flat(truth).norm()
    assert error <= 1.5 * eager_error, f"gradient off by {error:.1e}, eager by {eager_error:.1e}"
    off, eager_off = (abs(float(o.loss) - float(truth.loss)) for o in (got, want))
    rounding = torch.finfo(dtype).eps * abs(float(truth.loss))
    assert off <= 1.5 * max(eager_off, rounding), f"loss off by {off:.1e}, eager by {eager_off:.1e}"
