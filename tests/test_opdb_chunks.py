"""Every op of torch's `op_db` in chunks leaves the whole's numbers behind, to 1e-10.

Each op runs in a child of its own: some of torch's kernels crash on parts that do not fit together,
and that shall be one failing test.
"""

from __future__ import annotations

import pytest

import opdb
import opdb_chunks
from brute import in_child
from koila import _core

HAS_ROWS = hasattr(_core, "op_table")


@pytest.mark.skipif(not HAS_ROWS, reason="this koila has no op table: it cannot split")
@pytest.mark.parametrize("name", opdb.OPS if HAS_ROWS else [])
def test_equals_the_whole(name: str) -> None:
    """Values, written inputs, gradients and kinds of error are the whole's at any chunk count."""
    report = in_child(lambda: opdb_chunks.check_op(opdb.OPS[name]), seconds=300)
    assert not report.differing, "\n".join(report.differing)


def test_chunk_counts() -> None:
    """Two, three and one row each, without repeating one."""
    assert opdb_chunks.chunk_counts(2) == [2]
    assert opdb_chunks.chunk_counts(3) == [2, 3]
    assert opdb_chunks.chunk_counts(5) == [2, 3, 5]
