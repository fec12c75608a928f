# SPDX-License-Identifier: Apache-2.0
"""Every op of torch's `op_db` in chunks leaves the whole's numbers behind, to 1e-10.

Each op runs in a child of its own: some of torch's kernels crash on parts that do not fit together,
and that shall be one failing test.
"""

from __future__ import annotations

import pytest

import opdb
import opdb_chunks
import opdb_whole
from brute import in_child


@pytest.mark.rotated
@pytest.mark.parametrize("name", opdb.OPS)
def test_equals_the_whole(name: str) -> None:
    """Values, written inputs, gradients and kinds of error are the whole's at any chunk count.

    And the op itself is cut in one of its samples, but for those that are known not to be.
    """
    report = in_child(lambda: opdb_chunks.check_op(opdb.OPS[name]), seconds=300)
    assert not report.differing, "\n".join(report.differing)
    assert report.verdict == opdb_whole.VERDICTS.get(name, opdb_chunks.CUT)


def test_what_is_whole_is_in_op_db() -> None:
    assert sorted(set(opdb_whole.VERDICTS) - set(opdb.OPS)) == []


def test_chunk_counts() -> None:
    """Two, three and one row each, without repeating one."""
    assert opdb_chunks.chunk_counts(2) == [2]
    assert opdb_chunks.chunk_counts(3) == [2, 3]
    assert opdb_chunks.chunk_counts(5) == [2, 3, 5]
