"""Calls for the rows of ops_nn.def; see samples.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SAMPLES: dict[str, Callable[[], Any]] = {}
