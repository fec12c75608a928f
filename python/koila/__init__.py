"""Lazy batches for PyTorch: the same numbers as a machine with unlimited memory."""

from koila import functions, patches, versions
from koila.config import config
from koila.errors import KoilaError, MemoryLimitError, StaleError
from koila.explain import explain
from koila.lazy import is_lazy, lazy, off
from koila.reports import Report, report

__all__ = [
    "KoilaError",
    "MemoryLimitError",
    "Report",
    "StaleError",
    "config",
    "explain",
    "is_lazy",
    "lazy",
    "off",
    "report",
]

versions.note_this()
functions.register_all()
patches.install()
