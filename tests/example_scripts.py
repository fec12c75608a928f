# SPDX-License-Identifier: Apache-2.0
"""Runs a script of examples/ without koila and in three chunks: the losses are the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import koila
from koila.reporting import reports
from koila.summary import Summary

FOLDER = Path(__file__).parent.parent / "examples"
#: How each script that needs torch alone is made small.
OF_TORCH = {
    "contrastive": "--batch-size 14",
    "distillation": "--batch-size 14",
    "gan": "--batch-size 14",
    "image_classifier": "--batch-size 14",
    "language_model": "--batch-size 7 --length 12",
    "lstm": "--batch-size 10 --words 50",
}
#: Those of libraries, which the zoo has.
OF_THE_ZOO = {
    "finetune_transformers": "--batch-size 28 --length 24",
    "lightning_classifier": "--batch-size 14",
}


def _imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_equals_plain_torch(name: str, options: str) -> None:
    """The loss of three steps, on which the gradients of those before tell, in float64."""
    main = _imported(name).main
    argv = ["--steps", "3", "--memory-limit", "", *options.split()]
    summary = Summary()
    torch.set_default_dtype(torch.float64)
    try:
        with koila.off():
            want = main(argv)
        with reports.observed_by(summary), koila.config(chunks=3):
            got = main(argv)
    finally:
        torch.set_default_dtype(torch.float32)
    assert summary.most_chunks == 3
    assert summary.n_failed == 0
    assert got == pytest.approx(want, rel=1e-9, abs=0)
