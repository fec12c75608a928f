"""Print what koila makes of torch's `op_db`: `python -m tests.opdb_report [name ...]`."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable

import torch

from koila import _core  # type: ignore[attr-defined]
from tests import opdb
