# SPDX-License-Identifier: Apache-2.0
"""Hooks of weights to which no gradient comes, though the node of a part that was cut off leads
there: torch's engine goes through all inputs of a node. And hooks that torch calls oftener than
once: a reentrant checkpoint goes back in a pass of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import koila
from koila.memory import outside
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


#: What torch calls the hook of `v` for once, and for each pass.
ONCE = (
    *("r(f, h)", "f(r(g, h))", "c(f, h) + f(h)", "r(lambda h: f(h) + f(h * 2), h)"),
    *("r(t, h)", "s(r(f, h))", "s(f(h)) + t(h)"),
    *("r(m, h, v.exp()) + f(h)", "r(m, h, v) + f(h)", "r(m, h, v.exp()) + m(h, v.sin())"),
    *("s(r(m, h, v)) + f(h)", "s(r(m, h, v.exp())) + s(t(h))", "s(c(t, h)) + s(h) * v"),
)
OFTENER = (
    "r(f, h) + f(h)",
    "r(f, h) + r(f, h * 2)",
    "r(f, h) + c(f, h)",
    "r(lambda h: r(f, h) + f(h), h)",
    "r(lambda h: c(f, h), h) + f(h)",
    "checkpoint(f, h, use_reentrant=False, preserve_rng_state=False) + r(f, h)",
    "r(t, h) + t(h)",  # where a plain call reads it
    "t(r(f, h))",
    "r(lambda h, e: f(m(h, e)), h, v.exp())",  # what it is given waits for the pass around it
    "f(s(r(f, h)))",  # and a part that was cut off
    "s(r(f, h)) + s(f(h * 2))",
    "s(r(t, h)) + s(h) * v",
    *("s(r(t, h)) + s(t(h))", "s(r(t, h)) + s(r(m, h, v))", "s(r(t, s(r(t, h))))"),
    "s(r(lambda h: c(t, h), h)) + s(h) * v",
    *("read(r(f, h)) + h * v", "read(r(t, h)) + r(t, h)", "read(r(f, h) + f(h))"),
)


def check_reentrant(text: str, is_after: bool, is_cut: bool) -> None:
    """Compare with eager what hooks of `v` are told. Not cut: a value has a hook, and a call that
    cannot be recorded comes last, so that all calls before it run on the whole batch."""

    def story(lazy: Lazy) -> Any:
        torch.manual_seed(0)
        w, v = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ([4, 4], [4]))
        told: list[Tensor] = []

        def hook(gradient: Tensor) -> Tensor:
            told.append(gradient.sum())
            return gradient.clamp(-1, 1)

        if is_after:
            v.register_post_accumulate_grad_hook(lambda p: told.append(p.grad.sum()))
        else:
            v.register_hook(hook)
        env = dict(checkpoint=checkpoint, f=lambda h: (h * v).tanh(), g=torch.sin)
        env |= dict(t=lambda h: (h * v.exp()).tanh(), s=Square.apply, v=v, m=torch.mul)
        env |= dict(read=lambda h: h if h.sum().item() else None)
        env["r"], env["c"] = (partial(checkpoint, use_reentrant=flag) for flag in (True, False))
        h = lazy(rows(4)) @ w
        if not is_cut:
            h.register_hook(lambda gradient: gradient * 0.5)
        made = eval(text, {**env, "h": h})
        (made if is_cut else made.T.cov().pow(2)).sum().backward()
        return told, w.grad, v.grad

    want, _ = tell(story, eager)
    for chunks in (1, 2, 3):
        with koila.config(chunks=chunks):
            if text in OFTENER and chunks > 1:
                with pytest.raises(koila.KoilaError, match="torch calls the hook with the grad"):
                    story(koila.lazy)
                koila._core.forget()
            else:
                got, _ = tell(story, koila.lazy)
                assert_seen(got, want, "hooks", exact_bits=False)


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("text", ONCE + OFTENER)
def test_reentrant_checkpoints(text: str, is_after: bool) -> None:
    check_reentrant(text, is_after, is_cut=True)


@pytest.mark.parametrize("text", ONCE + OFTENER)
def test_reentrant_checkpoints_before_a_call_that_runs_whole(text: str) -> None:
    """The graph of calls that run live has no passes of its own for reentrant checkpoints."""
    check_reentrant(text, False, is_cut=False)


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
@each_split_further
def test_hooks_of_modules_in_reentrant_checkpoints(chunks: int | None, kind: str) -> None:
    def story(lazy: Lazy) -> Any:
        net, head = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        told: list[Tensor] = []

        def hook(module: nn.Module, *gradients: Any) -> Any:
            told.append(gradients[-1][0].sum())
            return (gradients[0][0].clamp(-1, 1),)

        getattr(head, f"register_{kind}")(hook)
        made = checkpoint(head, net(lazy(rows(4))), use_reentrant=True)
        made[0] = 0.0
        made.square().sum().backward()
        return told, [p.grad for p in (*net.parameters(), *head.parameters())]

    want, _ = tell(story, eager)
    with koila.config(chunks=chunks):
        got, _ = tell(story, koila.lazy)
    assert_seen(got, want, "hooks", exact_bits=False)


@pytest.mark.parametrize("is_reached", [False, True])
@each_split_further
def test_a_value_that_leads_to_no_input_behind_a_graph_that_is_gone(
    chunks: int | None, is_reached: bool
) -> None:
    """Torch's engine visits only what leads to the inputs of autograd.grad, so the hook of another
    value is not called; the graph of the value before was freed by a backward."""

    def story(lazy: Lazy) -> Any:
        net, head = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        told: list[Tensor] = []

        def hook(gradient: Tensor) -> Tensor:
            told.append(gradient.sum())
            return gradient * 0.5

        h = net(lazy(rows(4)))
        h.pow(2).mean().backward()
        last = (head(h) if is_reached else h) * 2
        last.register_hook(hook)
        loss = last.pow(2).mean()
        return told, torch.autograd.grad(loss, list(head.parameters()), allow_unused=True)

    want, _ = tell(story, eager)
    with koila.config(chunks=chunks):
        got, _ = tell(story, koila.lazy)
    assert_seen(got, want, "hooks", exact_bits=False)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_many_parts_are_searched_once(is_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two values leads to the part before, whose two values lead to the one before that:
    the number of ways is a power of the number of parts."""
    searched: list[Tensor] = []
    ends = outside.ends

    def counted(tensor: Tensor) -> Any:
        searched.append(tensor)
        assert len(searched) <= 16 * n_parts**2
        return ends(tensor)

    monkeypatch.setattr(outside, "ends", counted)
    n_parts, v = 16, torch.ones(4, dtype=torch.float64, requires_grad=True)

    def body(h: Tensor) -> Tensor:
        made: Tensor = Square.apply(h * v)  # type: ignore[no-untyped-call]
        return made.sin() * h

    with koila.config(chunks=2):
        h = koila.lazy(rows(4).requires_grad_())
        for _ in range(n_parts):
            h = checkpoint(body, h, use_reentrant=is_reentrant)
        h.sum().backward()
    assert searched
