# SPDX-License-Identifier: Apache-2.0
"""config(progress=True): a bar for what runs in chunks for long."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

import koila
from koila.reporting import progress


class FakeBar:
    """What tqdm.auto.tqdm makes."""

    made: list[FakeBar]

    def __init__(self, total: int, **words: object) -> None:
        self.total, self.n, self.is_closed = total, 0, False
        FakeBar.made.append(self)

    def update(self, n: int) -> None:
        self.n += n

    def close(self) -> None:
        self.is_closed = True


def step(is_failing: bool = False) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
    with koila.config(chunks=4, progress=True):
        out = model(koila.lazy(torch.randn(12, 6)))
        if is_failing:
            out.register_hook(lambda gradient: 1 / 0)
        out.pow(2).mean().backward()
        assert koila.report().n_chunks == 4


@pytest.mark.parametrize("is_failing", [False, True])
def test_tqdm(monkeypatch: pytest.MonkeyPatch, is_failing: bool) -> None:
    """It counts up to its total at most, and is closed, though a hook failed."""
    fake = types.ModuleType("tqdm.auto")
    fake.tqdm = FakeBar  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", fake)
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0.0)
    FakeBar.made = []
    if is_failing:
        with pytest.raises(ZeroDivisionError):
            step(True)
    else:
        step()
    assert FakeBar.made and all(bar.is_closed for bar in FakeBar.made)
    assert all(0 < bar.n <= bar.total for bar in FakeBar.made)
    assert is_failing or FakeBar.made[-1].n >= 0.7 * FakeBar.made[-1].total


def test_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0.0)
    step()
    shown = capsys.readouterr().err
    assert "koila: 50 % of this step" in shown and shown.endswith("\r")


def test_a_short_step_shows_none(capsys: pytest.CaptureFixture[str]) -> None:
    step()
    assert capsys.readouterr().err == ""


def test_it_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="progress must be True, False or None, not 3"):
        koila.config(progress=3)  # type: ignore[arg-type]
    with koila.config(progress=True):
        assert repr(koila.config()) == "koila.config(progress=True)"
