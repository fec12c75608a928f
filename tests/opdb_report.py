# SPDX-License-Identifier: Apache-2.0
"""Print what koila makes of torch's `op_db`.

    PYTHONPATH=python python tests/opdb_report.py [name ...]

Ends with status 1 where an op differs from torch.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable

import torch
from torch.testing._internal.opinfo.core import OpInfo

import opdb
from koila import _core


def spellings(op: OpInfo) -> set[str]:
    """Return the names under which the op table may have an op: `linalg.norm`, `linalg_norm`."""
    words = op.name.split(".")
    names = {op.name, op.aten_name, words[-1], "_".join(words[-2:])}
    return names | {alias.name for alias in op.aliases}


def names_with_row() -> set[str]:
    """Return every name and alias in koila's op table."""
    return {name for row in _core.op_table() for name in (row["name"], *row["aliases"])}


def names_without_row() -> list[str]:
    """Return the names of op_db that no row of the op table goes by.

    Functions written in Python have none and need none: koila records what they call.
    """
    table = names_with_row()
    return sorted({op.name for op in opdb.OPS.values() if not spellings(op) & table})


def _show(title: str, names: Iterable[str]) -> None:
    counts = Counter(name.split("[")[0] for name in names)
    if counts:
        print(f"\n{title}: {counts.total()} in {len(counts)} ops")
        print("  " + ", ".join(f"{name} ({n})" for name, n in sorted(counts.items())))


def report(names: Iterable[str]) -> opdb.Report:
    """Run the ops of those names, print the table, return all that was seen."""
    start = time.perf_counter()
    total = opdb.Report()
    n_ops = n_differing = 0
    for name in names:
        found = opdb.check_op(opdb.OPS[name])
        n_ops += 1
        n_differing += bool(found.differing)
        total.add(found)
    print(f"{n_ops} entries of op_db, torch {torch.__version__}, koila in one chunk")
    print(f"{total.same:7} calls: the same, bit for bit")
    print(f"{total.same_error:7} calls: the same error, {len(total.late_error)} of them at a read")
    print(f"{len(total.values_skipped):7} calls: the same but for values torch does not repeat")
    print(f"{len(total.no_tensor):7} calls: without a tensor")
    print(f"{len(total.not_repeated):7} calls: not repeated by torch, unexpectedly")
    print(f"{len(total.differing):7} calls: different, in {n_differing} ops")
    print(f"{time.perf_counter() - start:7.0f} s")
    _show("Values not repeated by torch", total.values_skipped)
    _show("The same error, but at a read", total.late_error)
    _show("Without a tensor", total.no_tensor)
    _show("Without a dtype on the CPU", total.no_dtype)
    _show("Unexpectedly not repeated by torch", total.not_repeated)
    _show("Different", total.differing)
    for line in total.differing:
        print("  " + line.splitlines()[0])
    return total


def main() -> int:
    """Report on the ops named on the command line, or on all."""
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(opdb.OPS)
    total = report(names)
    if hasattr(_core, "op_table"):
        missing = names_without_row()
        print(f"\nWithout a row: {len(missing)} names\n  " + ", ".join(missing))
    return bool(total.differing or total.not_repeated)


if __name__ == "__main__":
    raise SystemExit(main())
