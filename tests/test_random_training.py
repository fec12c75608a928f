# SPDX-License-Identifier: Apache-2.0
"""Random training scripts: in any number of chunks, and by default, they give eager's numbers."""

from __future__ import annotations

import pytest

import random_training
from chunked import Watched

pytestmark = pytest.mark.sanitize

#: Scripts that differ still, by seed.
KNOWN: dict[int, str] = {}


@pytest.mark.rotated
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_scripts(first: int) -> None:
    """More of them: python tests/random_training.py --count 5000. Most are cut."""
    n_run = n_cut = n_refused = 0
    for seed in range(first, first + 10):
        if seed in KNOWN:
            continue
        program = random_training.write(seed)
        wanted = random_training.wanted_of(program)
        if wanted is None:
            continue
        n_run += 1
        for chunks in (None, 1, 3, 99, 2 if seed % 2 else 7):
            with Watched(chunks).on() as seen:
                found = random_training.failure(program, chunks, wanted)
            assert not seen.wrong, f"seed {seed}: {seen.wrong}\n{program}"
            n_cut += seen.n_cut > 0
            n_refused += found is not None and found.is_refusal
            if found is None or found.is_refusal:
                continue
            is_wrong = found.kind != "number" or random_training.is_conditioned(program, wanted)
            assert not is_wrong, f"seed {seed}, {chunks} chunks: {found.text}\n{program}"
    assert n_run >= 8
    assert n_cut > 2 * n_run  # three of the counts ask for chunks
    assert n_refused < n_run
