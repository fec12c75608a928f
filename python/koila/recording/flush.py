# SPDX-License-Identifier: Apache-2.0
"""Run pending calls before something that they must not see: an optimizer's step, another batch."""

from __future__ import annotations

import torch

from koila import _core
from koila.basics import config
from koila.basics.threads import in_turn
from koila.memory import budget
from koila.random import generators
from koila.reporting import reports
from koila.running import replay


@in_turn
def flush(why: str) -> None:
    """Run what is pending, in chunks or whole; do nothing during a replay."""
    if not _core.is_busy():
        _flush(why, False)


def _flush(why: str, is_no_grad_only: bool) -> None:
    with reports.Asking(why):
        if not replay.read_all(is_no_grad_only):
            _core.flush()


def flush_no_grad(why: str) -> None:
    """Run the pending values that the user can reach and that no backward can come to.

    Those have no gradient in their history, or the outputs are gone that lead to it: a metric added
    up in a loop without no_grad() would otherwise keep all batches until somebody reads it.
    """
    if _core.has_stranded():
        flush(why)
    if _core.has_no_grad() or _core.has_draw(False):
        _flush_no_grad(why)


def make_room(n_bytes: int) -> None:
    """Run those values if pending calls alone hold `n_bytes`, a large part of the memory that is
    left, such as the noise of a sampler's earlier steps."""
    if config.get("memory_limit") is None:
        is_small = budget.is_ample(4 * n_bytes)
    else:
        is_small = 15 * n_bytes <= budget.least_left()
    if not is_small and not torch.is_grad_enabled():
        flush_no_grad("a loop without gradients")


@in_turn
def _flush_no_grad(why: str) -> None:
    if _core.is_busy():
        return
    is_lighter = generators.let_go()
    if _core.has_no_grad():
        _flush(why, True)
    elif is_lighter:
        _core.close()
