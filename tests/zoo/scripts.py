# SPDX-License-Identifier: Apache-2.0
"""The training scripts of `tests/scripts`, which know nothing of koila.

Each is a file as its author would write it, with its own arguments, losses and metrics; none has a
word of koila in it. One that names a library needs it; the others need torch alone.
"""

from __future__ import annotations

import re
from pathlib import Path

from zoo.entries import Entry

FOLDER = Path(__file__).parents[1] / "scripts"
#: By the name that a script imports: the library that decides on how it trains.
_LIBRARIES = {
    "pytorch_metric_learning": "pytorch-metric-learning",
    "sentence_transformers": "sentence-transformers",
    "diffusers": "diffusers",
    "lightning": "lightning",
    "peft": "peft",
    "timm": "timm",
    "torchmetrics": "torchmetrics",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "sklearn": "scikit-learn",
}


def _library(text: str) -> str:
    imported = re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)
    return next((name for module, name in _LIBRARIES.items() if module in imported), "torch")


def entries() -> list[Entry]:
    return [
        Entry(f"script/{path.stem}", _library(path.read_text()), script=path)
        for path in sorted(FOLDER.glob("*.py"))
    ]
