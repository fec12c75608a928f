# SPDX-License-Identifier: Apache-2.0
"""The generator of the CPU is moved past draws as the draws themselves would move it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from koila import _core
from koila.random import noise_drawn
from koila.staged import noise

pytestmark = pytest.mark.sanitize

KINDS: list[tuple[str, torch.dtype, tuple[Any, ...]]] = [
    ("bernoulli_", torch.float32, (0.9,)),
    ("bernoulli_", torch.float64, (0.3,)),
    ("bernoulli_", torch.bfloat16, (0.5,)),
    ("uniform_", torch.float32, ()),
    ("uniform_", torch.float64, (-1.0, 1.0)),
    ("normal_", torch.float32, ()),
    ("normal_", torch.float64, (1.0, 2.0)),
    ("exponential_", torch.float32, ()),
    ("log_normal_", torch.float32, ()),
    ("random_", torch.int64, (7,)),
    ("random_", torch.int64, (1 << 40,)),
]


def bytes_of(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().tolist())


@pytest.mark.parametrize("method, dtype, values", KINDS)
def test_as_drawn(method: str, dtype: torch.dtype, values: tuple[Any, ...]) -> None:
    some = random.Random(method)
    for seed in range(60):
        n = some.choice([1, 15, 16, 511, 512, 513, some.randint(1, 20_000)])
        one = noise.Noise(method, {}, values, (n,), (1,), dtype, None, False)
        drawn, moved = (torch.Generator().manual_seed(seed) for _ in range(2))
        n_before = some.randint(0, 700)
        for generator in (drawn, moved):
            torch.empty(n_before).uniform_(generator=generator)
            if seed % 2:  # it keeps the second of a pair
                torch.empty(1, dtype=torch.float64).normal_(generator=generator)
        one.fill(torch.empty(n, dtype=dtype), drawn)
        noise_drawn.advance(one, n, moved)
        assert torch.equal(drawn.get_state(), moved.get_state()), (seed, n)


@pytest.mark.skipif(
    not noise.is_serial(noise.Noise("bernoulli_", {}, (0.5,), (1,), (1,), torch.bool, None, False)),
    reason="a library draws",
)
def test_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    one = noise.Noise("bernoulli_", {}, (0.9,), (10_000,), (1,), torch.float32, None, False)
    noise_drawn.advance(one, 10_000, torch.Generator())
    filled: list[int] = []
    fill = noise.Noise.fill

    def noting(self: noise.Noise, tensor: torch.Tensor, generator: Any) -> torch.Tensor:
        filled.append(tensor.numel())
        return fill(self, tensor, generator)

    monkeypatch.setattr(noise.Noise, "fill", noting)
    noise_drawn.advance(one, 10_000, torch.Generator())
    assert sum(filled) < 32


def test_what_is_no_state_is_refused() -> None:
    state = bytes_of(torch.Generator())
    assert _core.skip_words(state, 0) == state
    bad = [b"", state[:5000], state[:8] + b"\0" * 4 + state[12:], state[:16] + b"\7" + state[17:]]
    for one in bad:
        with pytest.raises(ValueError, match="skip_words: not a state"):
            _core.skip_words(one, 1)
    with pytest.raises(TypeError):
        _core.skip_words("state", 1)  # type: ignore[arg-type]
