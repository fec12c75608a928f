# SPDX-License-Identifier: Apache-2.0
"""Every entry of torch's `op_db` through koila in one chunk equals torch, bit for bit."""

from __future__ import annotations

import pytest

import opdb
import sanitizers

N_SAMPLES = sanitizers.fewer(None, 1)


@pytest.mark.rotated
@pytest.mark.sanitize
@pytest.mark.parametrize("name", opdb.OPS)
def test_equals_torch(name: str) -> None:
    """Values, layouts, gradients, written inputs, errors and the generator's end are torch's."""
    report = opdb.check_op(opdb.OPS[name], n_samples=N_SAMPLES)
    assert not report.differing, "\n".join(report.differing)
    assert not report.not_repeated, "\n".join(report.not_repeated)


def test_not_repeated_is_current() -> None:
    """Each op that is compared without its values exists, and torch gives it a reason."""
    assert opdb.NOT_REPEATED.keys() <= opdb.OPS.keys()
    assert set(opdb.NOT_REPEATED.values()) == opdb.HOW_OF.keys()
