# SPDX-License-Identifier: Apache-2.0
"""Hooks of weights to which no gradient comes, though the node of a part that was cut off leads
there: torch's engine goes through all inputs of a node."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import koila
from oracle import Lazy, assert_seen, eager, tell
from stories import each_split_further, rows
from test_bridge import Square


@each_split_further
def test_where_no_gradient_comes(chunks: int | None) -> None:
    def story(lazy: Lazy) -> Any:
        net, head = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        told: list[Tensor] = []

        def hook(gradient: Tensor) -> Tensor:
            told.append(gradient.sum())
            return gradient.clamp(-1, 1)

        handles = [p.register_hook(hook) for p in (*head.parameters(), *net.parameters())]
        for _ in range(2):
            h = net(lazy(rows(4)))
            beside = Square.apply(head(h))  # type: ignore[no-untyped-call]
            h.square().sum().backward()
        n_called = len(told)
        handles[0].remove()
        (beside.detach() + head(h.detach())).square().sum().backward()
        found = [p.grad for p in (*net.parameters(), *head.parameters())]
        return n_called, sorted(float(t) for t in told), found

    want, _ = tell(story, eager)
    with koila.config(chunks=chunks):
        got, _ = tell(story, koila.lazy)
    assert_seen(got, want, "hooks", exact_bits=False)
