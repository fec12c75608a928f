# SPDX-License-Identifier: Apache-2.0
"""Find the calls of a program that run on the whole batch, and the reasons."""

from __future__ import annotations

from koila import _core
from koila.reporting.report_types import Whole
from koila.staged.facts import Node, name_of_call, where_of_node
from koila.staged.program import Program


def why_once(node: Node) -> str:
    """Return why a call that reads rows runs once; empty if no reason is known."""
    _, row, reason, *_ = _core.node(node.id)
    return reason or ("" if row else f"there is no rule for {name_of_call(node.id)}")


def made_whole(program: Program) -> tuple[Whole, ...]:
    """Return the calls that compute on the whole batch, the largest first. Each entry is a call
    that reads rows, with the calls that run once only because of it."""
    caused: dict[int, list[Node]] = {}  # by the id of the call that reads rows
    cause_of: dict[int, int] = {}  # by value: the id of that call
    for node in program.once():
        reads = program.reads(node)
        cause = next((cause_of[value] for value in reads if value in cause_of), None)
        if program.takes_rows(node):
            continue  # a slice allocates nothing, and the calls on it run by rows
        if program.joins_rows(node) and why_once(node):
            cause = node.id
        if cause is not None:
            caused.setdefault(cause, []).append(node)
            cause_of.update(dict.fromkeys(node.outs, cause))
    found = [
        Whole(
            name_of_call(nodes[0].id),
            where_of_node(nodes[0]),
            why_once(nodes[0]),
            sum(map(program.bytes_made, nodes)),
            len(nodes),
        )
        for nodes in caused.values()
    ]
    return tuple(sorted(found, key=lambda one: -one.n_bytes))
