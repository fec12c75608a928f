# SPDX-License-Identifier: Apache-2.0
"""Networks of batch normalizations under limits on memory: eager's numbers, and half its memory."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import koila
from allocations import Allocations
from chunked import split
from koila import ways
from limits import there
from norm_networks import NETWORKS, SIZE, Network
from oracle import assert_seen

CROSSING = "of activations between passes"


class Outcome(NamedTuple):
    """What a step gave, and the bytes that it took beside what was there and the gradients."""

    seen: list[Tensor | None]
    peak: int


class Trial:
    """Steps of one network from the same weights, statistics and seed."""

    def __init__(self, network: Network) -> None:
        torch.manual_seed(0)
        self.network = network
        self.model: nn.Module = network.make().double()
        self.batch = (
            torch.randn(network.n_rows, 3, SIZE, SIZE, dtype=torch.float64),
            torch.arange(network.n_rows) % 5,
        )
        self.state = {name: value.clone() for name, value in self.model.state_dict().items()}

    def n_gradients(self) -> int:
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    def run(self, is_lazy: bool, **options: int) -> Outcome:
        self.model.load_state_dict(self.state)
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        memory = Allocations()
        with memory:
            pass
        with koila.config(**options), memory:
            x, y = koila.lazy(*self.batch) if is_lazy else self.batch
            told = self.network.step(self.model, x, y)
        losses = [torch.tensor(float(loss)) for loss in told]
        gradients = [p.grad for p in self.model.parameters()]
        n_bytes = sum(g.nbytes for g in gradients if g is not None)
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        return Outcome([*losses, *gradients, *buffers], memory.peak - n_bytes)


@functools.cache
def eager_of(name: str) -> Outcome:
    trial = Trial(NETWORKS[name])
    trial.run(False)  # kernels that are compiled, and kept
    return trial.run(False)


@pytest.mark.parametrize("name", NETWORKS)
def test_asked_for(name: str) -> None:
    """Without a limit what crosses stays in memory, and eight chunks take half of eager's."""
    trial, network = Trial(NETWORKS[name]), NETWORKS[name]
    with split(8):
        got = trial.run(True, chunks=8)
    assert_seen(got.seen, eager_of(name).seen, name, exact_bits=False)
    share = got.peak / eager_of(name).peak
    assert share <= network.share, f"{share:.2f} of eager's peak"


@pytest.mark.parametrize("share", [0.5, 0.25])
@pytest.mark.parametrize("name", NETWORKS)
def test_limits(name: str, share: float) -> None:
    """It runs, and says what became of what crosses."""
    trial = Trial(NETWORKS[name])
    trial.run(True, chunks=2)
    limit = trial.n_gradients() + int(share * eager_of(name).peak)
    got = trial.run(True, memory_limit=int(there()) + limit)
    assert_seen(got.seen, eager_of(name).seen, name, exact_bits=False)
    for ran in koila.report().programs:
        assert ran.n_chunks > 1 and ran.n_tries == 1
        assert ran.bytes_predicted is not None and ran.bytes_predicted <= limit
        assert not ran.whole


@pytest.mark.parametrize("share", [0.5, 0.28])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_explain(share: float, is_offloaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept, made again and offloaded, and what that costs."""
    monkeypatch.setattr(ways, "can_offload", lambda program: is_offloaded)
    trial = Trial(NETWORKS["2d"])
    limit = trial.n_gradients() + int(share * eager_of("2d").peak)
    with koila.config(memory_limit=int(there()) + limit):
        x, y = koila.lazy(*trial.batch)
        text = koila.explain(nn.functional.cross_entropy(trial.model(x), y), full=True)
    again = "offloaded meanwhile (a copy each way)"
    again = again if is_offloaded else "recomputed (one more forward)"
    assert (f"{CROSSING} kept" in text) == (share == 0.5 or not is_offloaded)
    assert (f"{CROSSING} {again}" in text) == (share < 0.5)
