"""How much memory koila believes there is."""

from __future__ import annotations

import subprocess
import sys

LIMIT_SET_LATE = """
import resource
from koila import budget

before = budget.quick_free()
limit = budget._status()["VmData"] + 100 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
assert budget.quick_free() <= 100 * 2**20 < before, (before, budget.quick_free())
"""


def test_a_limit_of_the_process_counts_at_once() -> None:
    subprocess.run([sys.executable, "-c", LIMIT_SET_LATE], check=True)
