# SPDX-License-Identifier: Apache-2.0
"""Lazy batches for PyTorch: the same numbers as a machine with unlimited memory."""

from koila.reporting import versions

with versions.explained():
    from koila._core import LazyTensor
    from koila.basics.config import config, read_environment
    from koila.forecast import plan
    from koila.largest import largest_batch
    from koila.lazy import is_lazy, lazy, off
    from koila.memory import budget, storages
    from koila.messages.errors import KoilaError, MemoryLimitError, StaleError
    from koila.messages.memory_plan import MemoryPlan
    from koila.notebook import load_ipython_extension as load_ipython_extension
    from koila.notebook import unload_ipython_extension as unload_ipython_extension
    from koila.patches import install
    from koila.planning.explain import Explanation, explain
    from koila.recording import functions
    from koila.reporting.report_types import Report
    from koila.reporting.reports import report
    from koila.verify import verify

    versions.check_alone(__file__)
    versions.check()
    storages.check_layout()
    read_environment()
    budget.keep_fewer_kernels()
    functions.register_all()
    install.install()

versions.note_untested()

__version__ = "0.2.0.dev0"

__all__ = [
    "Explanation",
    "KoilaError",
    "LazyTensor",
    "MemoryLimitError",
    "MemoryPlan",
    "Report",
    "StaleError",
    "config",
    "explain",
    "is_lazy",
    "largest_batch",
    "lazy",
    "off",
    "plan",
    "report",
    "verify",
]


def __dir__() -> list[str]:
    """Return the public names. The modules can be imported, but are not part of the public API."""
    return [*__all__, "__version__"]
