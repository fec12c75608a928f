# SPDX-License-Identifier: Apache-2.0
"""The table of reductions over the batch: by name or function, how each is split into chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from koila.reductions import batch_softmax, norms, scans
from koila.reductions.extremes import Extreme, LogSumExp, Norm, Prod, Shares, Starts
from koila.reductions.losses import Again, Classes, CrossEntropy, Loss, RowLoss
from koila.reductions.reduction import Reduction
from koila.reductions.sums import Mean, Moments, Sum, Var

REDUCTIONS: dict[str, Reduction] = {
    "SUM": Sum(),
    "COUNT": Sum(),
    "MEAN": Mean(),
    "VAR": Var(),
    "AMAX": Extreme(),
    "LOGSUMEXP": LogSumExp(),
    "NORM": Norm(),
    "PROD": Prod(),
    "ALL": Again(torch.all),
    "ANY": Again(torch.any),
    "LOSS": Loss(),
    "ROW_LOSS": RowLoss(),
    "CROSS_ENTROPY": CrossEntropy(),
    "CLASSES": Classes(),
}
#: The same for functions of koila that only chunks call.
OF_CALLS: dict[Callable[..., Any], Reduction] = {
    batch_softmax.shares: Shares(),
    norms.batch_moments: Moments(),
    **dict.fromkeys(scans.STARTS, Starts()),
}
