# SPDX-License-Identifier: Apache-2.0
"""What the logger `koila` says of calls that run on the whole batch, once for each line."""

from __future__ import annotations

import logging
from typing import Any

from koila.basics import config, lines
from koila.planning import planner, whole_calls
from koila.reporting import reports
from koila.reporting.report_types import ProgramReport
from koila.staged.facts import name_of_call, where_of_node
from koila.staged.program import Program

_logger = logging.getLogger("koila")
#: What was logged once, by the line or the reason.
logged: set[str] = set()

#: Calls on the whole batch are worth a warning if their results take at least this many bytes.
_FEW_BYTES = 2**16


def log_whole(program: Program) -> None:
    """Log, once for each line, that a call on the whole batch makes most of a program's memory.
    Small results, such as sorted lengths, are not worth a warning."""
    amounts = program.amounts
    if program.unstageable is not None:
        node, why = program.unstageable
        where = where_of_node(node)
        log_once(
            where, "%s makes all run on the whole batch (%s): %s", name_of_call(node.id), where, why
        )
    elif amounts.once >= _FEW_BYTES and 2 * amounts.once > max(amounts.entered, amounts.made):
        once = (n for n in program.once() if not program.takes_rows(n) and whole_calls.why_once(n))
        barrier = next(filter(program.joins_rows, once), None)
        if barrier is None:
            return
        where = where_of_node(barrier)
        log_once(
            where,
            "%s needs the whole batch (%s; %s), and %d of %d calls run on the whole batch with it: "
            "koila saves little memory here",
            name_of_call(barrier.id),
            whole_calls.why_once(barrier),
            where,
            amounts.n_once,
            program.n_nodes,
        )


def log_once(where: str, text: str, *words: Any, level: int = logging.WARNING) -> None:
    """Log a text, unless one was logged for `where` already."""
    if where not in logged:
        logged.add(where)
        _logger.log(level, text, *words)


def log_live(func: Any, why: str, leaves: bool = False) -> None:
    """Log, once for each line, that a call which cannot be recorded runs the pending calls
    whole.

    If what it returns leaves koila (`leaves`), log that even if all that is pending fits whole:
    what is computed from it may not.
    """
    where = lines.user_line()
    is_silent = config.is_one_chunk() if leaves else planner.is_whole()
    if where in logged or is_silent:
        return
    log_once(
        where,
        "%s cannot be recorded (%s), since %s: what was recorded before it runs now, on the whole "
        "batch, and koila saves no memory there",
        reports.name_of(func),
        where,
        why,
    )


def log_at_once(func: Any, why: str) -> None:
    """Log, once for each reason, that calls run at once on the whole batch instead of in chunks."""
    if not planner.is_whole():
        log_once(
            why,
            "%s is not recorded (%s), since %s: such calls run where they stand, on the whole "
            "batch, and koila saves no memory there",
            reports.name_of(func),
            lines.user_line(),
            why,
        )


def log_uncompiled(name: str) -> None:
    """Log once that koila records a function that torch.compile would compile."""
    where = lines.user_line()
    log_once(
        f"torch.compile {name}",
        "%s (%s) runs uncompiled, with the same numbers: koila cannot split what torch.compile "
        "compiles; koila.config(chunks=1) runs it compiled, on the whole batch",
        name,
        where,
    )


def note_uncompiled(name: str) -> None:
    """Note, in the report and once for each line in the log, that dynamo found a lazy which a
    compiled function refers to: it leaves the calls on it uncompiled."""
    where, why = lines.user_line(), f"it refers to a lazy tensor ({name}) that is not an argument"
    reports.note(ProgramReport("torch.compile", where, why=f"not all of it is compiled: {why}"))
    log_once(
        f"torch.compile {where} {name}",
        "torch.compile (%s) leaves calls uncompiled, so its backend may not be called: the "
        "function refers to a lazy tensor (%s); pass that tensor as an argument",
        where,
        name,
    )
