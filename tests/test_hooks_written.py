# SPDX-License-Identifier: Apache-2.0
"""Hooks and kept gradients of tensors that are written in place: a hook stays with the value it was
registered on, retain_grad() goes with the tensor to its new graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from chunked import split
from limits import there
from training_lines import hook_on

N_ROWS = 5

#: What runs after `h = lin(x)`; `see` notes the gradient that a hook is given, `l` is the loss.
PROGRAMS = {
    "kept, written twice": "h.retain_grad(); h.mul_(2); h.mul_(3); l = h.sum()",
    "kept, read and written": "h.retain_grad(); k = h + 1; k.retain_grad(); h.mul_(2)\n"
    "l = k.sum() + h.pow(2).sum()",
    "kept again": "h.retain_grad(); h.mul_(2); h.retain_grad(); h.mul_(2); l = h.sum()",
    "kept, then another tensor of that name": "h.retain_grad(); h += x[:, :1]; h = h * 2\n"
    "h.retain_grad(); h /= 3; l = h.pow(2).sum()",
    "hooks before and after": "h.register_hook(see); h.mul_(2); h.register_hook(see); h.mul_(3)\n"
    "l = h.pow(2).sum()",
    "hooks that change it": "h.register_hook(lambda q: q * 2); h[:, 0].mul_(2)\n"
    "h.register_hook(lambda q: q + 1); h[:, 1] = 0; h.register_hook(see); l = h.pow(2).sum()",
    "a hook and kept": "h.register_hook(lambda q: q * 9); h.retain_grad(); h.mul_(2); l = h.sum()",
    "a view that is not read again": "v = h[:, 0]; v.retain_grad(); h.retain_grad(); h.mul_(2)\n"
    "l = h.sum()",
    "a view that is read again": "v = h[:, 0]; v.retain_grad(); h.retain_grad(); h.mul_(2)\n"
    "l = h.sum() + v.pow(2).sum()",
    "a view that was read before": "v = h[:, 0]; v.retain_grad(); k = v * 3; h.mul_(2)\n"
    "l = h.sum() + k.sum()",
    "a view read before and after": "v = h[:, 0]; v.retain_grad(); k = v * 3; h.mul_(2)\n"
    "l = h.sum() + v.sum() * 5 + k.sum()",
    "a view that is written": "v = h[:, 0]; v.retain_grad(); h.retain_grad(); v.mul_(2)\n"
    "l = h.sum() + v.sum()",
    "a view of a view is written": "v = h[:, :2]; u = v[:, 0]; h.retain_grad(); v.retain_grad()\n"
    "u.retain_grad(); u.mul_(2); l = u.sum() * 3 + h.sum() + v.sum() * 5",
    "kept after a view was written": "v = h[:, :2]; u = v[:, 0]; u.mul_(2); h.retain_grad()\n"
    "v.retain_grad(); u.retain_grad(); l = u.sum() * 3 + h.sum() + v.sum() * 5",
    "hooks on views": "v = h[:, 0]; v.register_hook(see); h.register_hook(see); k = v * 3\n"
    "h.mul_(2); l = h.sum() + v.sum() * 5 + k.sum()",
    "a hook on a view that is written": "v = h[:, 0]; v.register_hook(see); k = v * 3; v.mul_(2)\n"
    "l = v.sum() + k.sum()",
    "hooks after a view was written": "v = h[:, 0]; v.mul_(2); a = v.sum(); h.register_hook(see)\n"
    "v.register_hook(see); l = a + v.sum() * 3 + h.sum()",
    "a hook on a view that was written and read": "v = h.view(-1); v[0] = 0; k = v * 3\n"
    "v.register_hook(see); l = k.sum() + v.pow(2).sum()",
    "parts are written": "h[:, 0].mul_(2); h[:, 1] = 0; h.retain_grad(); h[:, 2].add_(h[:, 3])\n"
    "h.register_hook(see); l = h.pow(2).sum()",
    "written without a graph": "h.retain_grad(); h.register_hook(see)\n"
    "with torch.no_grad(): h.mul_(2)\nh.register_hook(lambda q: q + 1); l = h.pow(2).sum()",
    "a part written without a graph": "h.register_hook(lambda q: q * 2)\n"
    "with torch.no_grad(): h[:, 0].mul_(2)\nh.register_hook(lambda q: q + 1)\n"
    "h.register_hook(see); h.retain_grad(); l = h.pow(2).sum()",
    "written detached": "h.retain_grad(); h.register_hook(lambda q: q * 2); h.detach().mul_(2)\n"
    "h.register_hook(lambda q: q + 1); h.register_hook(see); l = h.pow(2).sum()",
    "a view of what is written without a graph": "v = h[:, 0]; v.retain_grad(); k = v * 3\n"
    "with torch.no_grad(): h.mul_(2)\nl = h.sum() + k.sum() + v.sum()",
    "overwritten": "h.retain_grad(); h.zero_(); h.add_(lin(x[:, :3])); l = h.pow(2).sum()",
    "copied into": "h.retain_grad(); h.copy_(lin(x) * 3); l = h.sum()",
    "two backwards": "h.retain_grad(); l = h.sum(); l.backward(retain_graph=True)\n"
    "see(h.grad); h.mul_(2); l = h.sum()",
    "two backwards and a view": "v = h.view(-1); v.retain_grad(); k = v * 3; h.mul_(2)\n"
    "(h.sum() + k.sum()).backward(retain_graph=True); see(v.grad); l = v.pow(2).sum()",
    "read before it is written": "h.retain_grad(); see(h.sum()); h.mul_(2); l = h.sum()",
    "read after it was written": "h.retain_grad(); h.mul_(2); see(h.sum()); h.mul_(2); l = h.sum()",
    "let go of": "h.retain_grad(); h.mul_(2); l = h.pow(2).sum(); del h",
}
#: Run as they were written: eager's backward is given what `.data` wrote into what it kept.
BEHIND = {
    "a hook, and then .data": "h.register_hook(lambda q: (see(q), q * 2)[1]); h.data.mul_(0.5)\n"
    "l = h.pow(2).sum()",
    "a hook on a view, and then .data": "v = h[:, :2]\n"
    "v.register_hook(lambda q: (see(q), q * 2)[1]); h.data.mul_(0.5); l = v.pow(2).sum() + h.sum()",
    "a hook on a view, and then its .data": "v = h[:, :2]; v.retain_grad()\n"
    "v.register_hook(lambda q: (see(q), q * 2)[1]); v.data.mul_(0.5); v.data.add_(1)\n"
    "l = v.pow(2).sum() + h.sum()",
    "a hook between two": "v = h[:, :2]; v.data.mul_(0.5)\n"
    "v.register_hook(lambda q: (see(q), q * 2)[1]); h.data.mul_(0.5); l = v.pow(2).sum() + h.sum()",
    ".data of what was kept, two backwards": "h = h.tanh(); k = h * 3; h.data.mul_(0.5)\n"
    "l = k.pow(2).sum(); l.backward(retain_graph=True)",
    ".data between two backwards": "h = h.tanh(); h.retain_grad(); l = (h * 3).pow(2).sum()\n"
    "l.backward(retain_graph=True); h.data.mul_(0.5)",
    ".data after a read": "h = h.tanh(); k = h * 3; see(k); h.data.mul_(0.5); l = k.pow(2).sum()",
}
#: Runs as it was written: hooks from before such a call are called with those from after it.
TURNED = {
    "turned over and kept": "h.retain_grad(); h.t_(); l = h.pow(2).sum()",
    "turned over with hooks": "h.register_hook(see); h.t_(); h.register_hook(see)\n"
    "l = h.pow(2).sum()",
}
#: Run as they were written: after a write to its base without a graph, torch gives a view another
#: node, which its hook is not on.
WITHOUT_A_GRAPH = {
    "a view with a hook": "v = h[:, :3]; v.grad_fn; v.register_hook(see); k = v * 1\n"
    "d = v.detach(); d.mul_(.5); l = (k * v.detach()).sum() + v.pow(2).sum()",
    "a view with a hook that changes it": "v = h.t(); v.grad_fn; k = v + 1\n"
    "v.register_hook(lambda q: q * 2); h.detach().add_(1.0); l = (k + v.exp()).sum()",
}
#: Run as they were written: a program with hooks is not cut before what it has read is written.
WEIGHTS = {
    "a hook, and then the weight's .data": "h.register_hook(lambda q: (see(q), q * 2)[1])\n"
    "lin.weight.data.clamp_(-.2, .2); l = h.std(0).sum()",
    "a hook, and then the weight": "h.register_hook(see)\n"
    "with torch.no_grad(): lin.weight.mul_(.5)\nl = h.pow(2).sum()",
    "a hook, and then another weight": "h.register_hook(lambda q: q * 2)\n"
    "lin.weight.data = lin.weight.data * 2; l = h.pow(2).sum()",
    "kept, and then the bias": "h.retain_grad(); torch.nn.init.ones_(lin.bias); l = h.pow(2).sum()",
}


def step(text: str, lazy: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    lin = nn.Linear(3, 4).double()
    x = lazy(torch.randn(N_ROWS, 3, dtype=torch.float64))
    seen: list[Tensor] = []

    def see(gradient: Tensor) -> None:
        seen.append(torch.tensor(gradient.tolist()))

    env: dict[str, Any] = {"torch": torch, "lin": lin, "x": x, "h": lin(x), "see": see}
    exec(text, env)
    env["l"].backward()
    found = {name: env[name].grad for name in "hvuk" if name in env and env[name].requires_grad}
    return {**found, "seen": seen, "weight": lin.weight.grad, "bias": lin.bias.grad}


@pytest.mark.rotated("chunks")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("name", [*PROGRAMS, *TURNED, *BEHIND, *WITHOUT_A_GRAPH, *WEIGHTS])
def test_hooks_and_writes(name: str, chunks: int) -> None:
    text = {**PROGRAMS, **TURNED, **BEHIND, **WITHOUT_A_GRAPH, **WEIGHTS}[name]
    want = step(text, lambda x: x)
    is_first_cut = name in (".data between two backwards", ".data after a read")
    whole = "h.t_()" if name in TURNED else ".data" if name in BEHIND else ""
    whole = "without a graph" if name in WITHOUT_A_GRAPH else whole
    partly = "calls with a hook read before" if name in WEIGHTS else whole if is_first_cut else ""
    with split(chunks, whole="" if is_first_cut else whole, partly=partly):
        got = step(text, koila.lazy)
    assert {k for k in got if got[k] is None} == {k for k in want if want[k] is None}
    assert len(got["seen"]) == len(want["seen"])
    pairs = [(got[k], want[k]) for k in want if isinstance(want[k], Tensor)]
    for value, wanted in [*pairs, *zip(got["seen"], want["seen"], strict=True)]:
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-14)


def test_a_weight_that_is_written_under_a_tight_limit() -> None:
    """Where the whole batch does not fit, the numbers are computed, and the backward is refused."""
    first, last = nn.Linear(16, 16), nn.Linear(16, 1024)
    x = torch.randn(4096, 16)
    with koila.config(memory_limit=there() + 8 * 2**20):
        h = first(koila.lazy(x))
        h.register_hook(lambda q: q * 2)
        loss = last(h).tanh().pow(2).mean()
        last.weight.data.mul_(0.5)
        assert loss.item() > 0
        with pytest.raises(koila.StaleError, match="was changed in place after"):
            loss.backward()


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_hook_on_a_view_that_was_written_before(chunks: int) -> None:
    """The view was handed out at a cut. Eager registers the hook on a new node, which no gradient
    of the calls before the write arrives at."""

    def step(lazy: Any) -> Tensor:
        torch.manual_seed(0)
        net, head = nn.Linear(6, 4).double(), nn.Linear(4, 4).double()
        v = net(lazy(torch.randn(N_ROWS, 6).double())).unsqueeze(-1).mul(2).flatten(1)
        with torch.autograd.graph.save_on_cpu():
            c = head(v)
        v[:, :2].detach().mul_(0.9)
        hook_on(v, lambda q: q * 0.5)
        c.tanh().sum().backward()
        assert net.weight.grad is not None
        return net.weight.grad

    want = step(lambda x: x)
    with koila.config(chunks=chunks):
        if chunks > 1:
            with pytest.raises(koila.KoilaError, match="on a view that was written since"):
                step(koila.lazy)
            return
        torch.testing.assert_close(step(koila.lazy), want, rtol=0, atol=0)
