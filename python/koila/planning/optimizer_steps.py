# SPDX-License-Identifier: Apache-2.0
"""Report an optimizer's step that takes more than `config(memory_limit=)`."""

from __future__ import annotations

import torch

from koila.basics import config
from koila.basics.lines import script_line
from koila.memory import budget, optimizers, storages
from koila.messages.words import size, sizes
from koila.planning import limits, logs
from koila.reporting import reports
from koila.reporting.report_types import ProgramReport


def report_over_limit(optimizer: torch.optim.Optimizer) -> None:
    """Report the step that an optimizer is about to make, if it takes more than the limit: its
    state and its temporaries are beside parameters and gradients, and chunks change none of them.
    It is logged once for each line."""
    limit = config.get("memory_limit")
    stepping = [] if limit is None else list(optimizers.written_by(optimizer))
    if limit is None or not stepping:
        return
    coming, temporary = optimizers.of_step(optimizer)
    storages.note_leaves(stepping)
    held = stepping + optimizers.state()
    needed = budget.taken(stepping[0].device, held) + coming + temporary
    if needed <= limit:
        return
    least, now = limits.in_tenths(needed), config.settings()
    words = now.assigned(f"{least / 2**20:.1f}MiB")
    takes, allowed = sizes(needed, limit)
    is_fusible = temporary > 0 and "fused" in optimizer.defaults
    fused = f", or fused=True for the optimizer: {size(temporary)} less" if is_fusible else ""
    why = (
        f"with all that is in use it takes {takes}, and the limit is {allowed}; chunks do not "
        f"change that: set {words}{fused}"
    )
    what, line = f"{type(optimizer).__name__}.step()", script_line()
    reports.note(ProgramReport(what, line, why=why, least_limit=least))
    logs.log_once(f"step {line}", "%s at %s: %s", what, line, why)
