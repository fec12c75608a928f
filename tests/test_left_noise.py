# SPDX-License-Identifier: Apache-2.0
"""A backward of plain tensors alone, beside lazy batches, is told where it takes much."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from torch import nn

import koila
from koila.planning import left_plain


def test_plain_noise_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """With the lines of the backward and of the noise, and what to do. Made lazy,
    it runs in chunks, and nothing is told: nor where all runs whole, or takes little."""
    caplog.set_level(logging.WARNING, "koila")
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))
    for is_lazy, n_rows, chunks in (
        (False, 600, 4),
        (True, 600, 4),
        (False, 600, 1),
        (False, 20, 4),
    ):
        left_plain._by_line.clear()
        with koila.config(chunks=chunks):
            real = koila.lazy(torch.ones(n_rows, 64), batch=0)
            noise = torch.randn(real.shape[0], 8)
            drawn_at = sys._getframe().f_lineno - 1
            noise = koila.lazy(noise, batch=0) if is_lazy else noise
            real.mean().item()
            generator(noise).square().mean().backward()
            told_at = sys._getframe().f_lineno - 1
        is_told = (is_lazy, n_rows, chunks) == (False, 600, 4)
        text = str(koila.report())
        assert (f"{__file__}:{told_at}: nothing in it is lazy" in text) == is_told
        assert (f"({__file__}:{drawn_at})" in text and "koila.lazy(noise)" in text) == is_told
        assert ("python -m koila" in caplog.text) == is_told
        caplog.clear()
