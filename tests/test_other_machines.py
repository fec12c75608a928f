# SPDX-License-Identifier: Apache-2.0
"""Tests that compare bits pass with the kernels of other processors, and with two threads.

torch chooses its kernels by the instructions of the processor, and a sum over many elements by the
number of threads: neither may decide whether a test passes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: What compares bits: of two batches, of two programs, of a read with a slice; and whole programs.
TESTS = [
    "binding/test_py_rows.py",
    "test_bits_of_passes.py",
    "test_counterexamples.py",
    "test_draws_order.py::test_draws_in_inference_mode_are_eagers",
    "test_tables.py::test_what_is_passed_on_keeps_its_gradient",
]
OLDEST = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("kernels", "n_threads"),
    [(OLDEST, 1), (OLDEST, 2), (AVX2, 2), ({}, 2)],
    ids=["oldest", "oldest-threads", "avx2-threads", "threads"],
)
def test_bits_do_not_depend_on_the_processor(kernels: dict[str, str], n_threads: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "--threads", str(n_threads), *TESTS],
        cwd=HERE,
        env={**os.environ, **kernels, "OMP_NUM_THREADS": str(n_threads)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
