# SPDX-License-Identifier: Apache-2.0
"""Which calls of a program run on the whole batch, and why."""

from __future__ import annotations

from koila import _core
from koila.reporting.report_types import Whole
from koila.staged.facts import Node, name_of_node, where_of_node
from koila.staged.program import Program


def why_once(node: Node) -> str:
    """Why a call that reads rows runs once, or nothing."""
    _, row, reason, *_ = _core.node(node.id)
    return reason or ("" if row else f"there is no rule for {name_of_node(node)}")


def made_whole(program: Program) -> tuple[Whole, ...]:
    """The calls that make values of the whole batch, each with those that follow from it alone; the
    largest first."""
    caused: dict[int, list[Node]] = {}  # by the call that reads rows
    cause_of: dict[int, int] = {}  # of the values that they make
    for node in program.once():
        reads = (program.imports[import_id].value for import_id in node.imports if import_id >= 0)
        cause = next((cause_of[value] for value in reads if value in cause_of), None)
        if program.takes_rows(node):
            continue  # a slice makes nothing, and what follows goes by rows
        if program.joins_rows(node) and why_once(node):
            cause = node.id
        if cause is not None:
            caused.setdefault(cause, []).append(node)
            cause_of.update(dict.fromkeys(node.outs, cause))
    found = [
        Whole(
            name_of_node(nodes[0]),
            where_of_node(nodes[0]),
            why_once(nodes[0]),
            sum(map(program.bytes_made, nodes)),
            len(nodes),
        )
        for nodes in caused.values()
    ]
    return tuple(sorted(found, key=lambda one: -one.n_bytes))
