# SPDX-License-Identifier: Apache-2.0
"""A value that one loss's backward went through, and another loss still reads: its gradient may be
asked for, its hooks are called, and nothing goes back through it a second time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila
from chunked import split
from koila import _core

N_ROWS = 5
#: What comes first: two losses of one value, and the backward of the first.
BEGIN = "h = lin(x).tanh(); "
#: What runs then; `see` notes the gradient that a hook is given, `out` what is found.
PROGRAMS = {
    "the gradient of the value": "m = h.pow(2).sum(); l = head(h).sum(); l.backward()\n"
    "out += torch.autograd.grad(m, h)",
    "with a graph": "m = h.abs().max(); l = head(h).pow(2).sum(); l.backward()\n"
    "out += torch.autograd.grad(m, h, create_graph=True)",
    "twice": "m = h.exp().sum(); l = head(h).pow(2).sum(); l.backward()\n"
    "out += torch.autograd.grad(m, h, retain_graph=True); out += torch.autograd.grad(m, h)\n"
    "out += [m, h]",
    "a hook of it": "h.register_hook(lambda g: (see(g), g * 2)[1]); m = h.pow(2).sum()\n"
    "l = head(h).sum(); l.backward(); out += torch.autograd.grad(m, h)",
    "a hook that is removed": "k = h.register_hook(lambda g: (see(g), g * 2)[1])\n"
    "m = h.pow(2).sum(); l = head(h).sum(); l.backward(); k.remove()\n"
    "out += torch.autograd.grad(m, h)",
    "a hook for what comes later": "h.register_hook(lambda g: (see(g), g * 2)[1])\n"
    "l = head(h).sum(); l.backward(); out += torch.autograd.grad(h.sin().sum(), h)",
    "kept for what comes later": "h.retain_grad(); l = head(h).sum(); m = h.pow(2).sum()\n"
    "l.backward()\ntry: m.backward()\nexcept RuntimeError as e: out.append(str(e)[:40])",
    "kept, where another backward came first": "h.retain_grad(); l = head(h.detach()).sum()\n"
    "l = l + lin.weight.sum(); l.backward(); m = h.pow(2).sum(); m.backward()",
    "a view that the other loss reads": "v = h[:, :2]; m = v.pow(2).sum()\n"
    "l = head(h).pow(2).sum() + v.sum(); l.backward(); out += torch.autograd.grad(m, v)",
    "a view, kept": "v = h[:, :2]; v.retain_grad(); h.retain_grad(); m = v.pow(2).sum()\n"
    "l = head(h).pow(2).sum(); l.backward(); out += torch.autograd.grad(m, h)",
    "a view with hooks": "v = h[:, :2]; v.register_hook(lambda g: (see(g), g * 3)[1])\n"
    "h.register_hook(see); m = v.pow(2).sum(); l = head(h).pow(2).sum() + v.sum(); l.backward()\n"
    "out += torch.autograd.grad(m, v)",
    "kept in chunks, and then in a whole run": "h.retain_grad(); m = h.pow(2).sum()\n"
    "l = head(h).pow(2).sum(); l.backward(retain_graph=True); see(h.grad)\n"
    "m.backward(create_graph=True)",
    "a root that keeps its gradient": "h.retain_grad(); q = lin(x)\n"
    "torch.autograd.grad(h, list(lin.parameters()), torch.ones_like(h), retain_graph=True)",
    "a root whose graph goes on from a number": "h.grad_fn.register_prehook(\n"
    "    lambda g: (see(g[0]), (g[0] * 0.5,))[1])\n"
    "v = head(h); v.retain_grad()\n"
    "out += torch.autograd.grad(v, h, torch.ones_like(v), retain_graph=True)",
    "backward of the other": "m = h.pow(2).sum(); l = head(h).sum(); l.backward(); m.backward()",
    "a weight behind it": "m = h.pow(2).sum(); l = head(h).sum(); l.backward()\n"
    "torch.autograd.grad(m, lin.weight, allow_unused=True)",
    "a weight behind it, of the same": "l = head(h).pow(2).sum(); l.backward()\n"
    "torch.autograd.grad(l, lin.weight, allow_unused=True)",
    "the value itself, of the same": "l = head(h).pow(2).sum(); l.backward()\n"
    "torch.autograd.grad(l, h, allow_unused=True)",
    "a weight behind it, added to": "m = h.pow(2).sum(); l = head(h).sum(); l.backward()\n"
    "m.backward(inputs=[lin.weight])",
    "a weight behind it and beside it": "m = h.pow(2).sum() + lin.weight.exp().sum()\n"
    "l = head(h).sum(); l.backward(); torch.autograd.grad(m, lin.weight)",
    "a weight that is not behind it": "m = head(h).pow(2).sum(); l = h.sin().sum(); l.backward()\n"
    "out += torch.autograd.grad(m, head.weight)",
    "a weight that has nothing to do with it": "m = h.pow(2).sum(); l = head(h).sum()\n"
    "l.backward(); m.backward(inputs=[other.weight], retain_graph=True)\n"
    "out += [torch.autograd.grad(m, other.weight, allow_unused=True)[0]]",
    "a weight is changed": "m = h.pow(2).sum(); l = head(h).sum(); l.backward()\n"
    "with torch.no_grad(): lin.weight.mul_(0.5)\nout += torch.autograd.grad(m, h)",
    "backward of the other, of a value that is gone": "a, b = h.sin().sum(), h.cos().pow(2).sum()\n"
    "del h; a.backward(); b.backward()",
    "twice through what keeps nothing": "k = x + lin.weight.sum(); a, b = k.sum(), (k * 2).sum()\n"
    "del k; a.backward(); b.backward()",
    "part of the weights": "m = h.pow(2).sum(); l = head(h).sum()\n"
    "l.backward(inputs=[head.weight]); m.backward()",
}


def step(text: str, lazy: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    lin, head, other = (nn.Linear(n, 4).double() for n in (3, 4, 4))
    seen: list[Tensor] = []
    out: list[Any] = []

    def see(gradient: Tensor) -> None:
        seen.append(torch.tensor(gradient.tolist()))

    env: dict[str, Any] = {"torch": torch, "lin": lin, "head": head, "other": other, "see": see}
    env.update(x=lazy(torch.randn(N_ROWS, 3, dtype=torch.float64)), out=out)
    try:
        exec(BEGIN + text, env)
    except RuntimeError as error:
        out.append(str(error)[:40])
    kept = [env[name].grad for name in "hv" if name in env and env[name].retains_grad]
    weights = [p.grad for p in (*lin.parameters(), *head.parameters(), *other.parameters())]
    return {"seen": seen, "out": out, "kept": kept, "weights": weights}


@pytest.mark.rotated("chunks")
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, N_ROWS])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name: str, chunks: int) -> None:
    want = step(PROGRAMS[name], lambda x: x)
    with koila.config(chunks=chunks):
        got = step(PROGRAMS[name], koila.lazy)
    for key in want:
        assert len(got[key]) == len(want[key]), key
        for value, wanted in zip(got[key], want[key], strict=True):
            if isinstance(wanted, Tensor):
                torch.testing.assert_close(
                    torch.tensor(value.tolist(), dtype=wanted.dtype), wanted, rtol=1e-10, atol=1e-14
                )
            else:
                assert value == wanted, key


@pytest.mark.parametrize("is_lazy", [False, True])
def test_after_the_step(is_lazy: bool) -> None:
    """A loss whose gradient would go on through a graph that a backward freed: within its step it
    can be differentiated up to there, and later it is refused. Whoever keeps such losses from step
    to step would keep the program of each."""
    torch.manual_seed(1)
    lin, head = nn.Linear(3, 4).double(), nn.Linear(4, 4).double()
    given = torch.randn(N_ROWS, 3, dtype=torch.float64)
    x = koila.lazy(given)
    with koila.config(chunks=2):
        h = lin(x).tanh()
        loss = h.pow(2).sum()
        head(h).sum().backward()
        (found,) = torch.autograd.grad(loss, h, retain_graph=True)
        torch.testing.assert_close(found + 0, 2 * h.detach() + 0, rtol=1e-10, atol=1e-13)
        if is_lazy:
            koila.lazy(given)
        else:
            torch.optim.SGD(lin.parameters(), 0.1).step()
        with pytest.raises(koila.StaleError, match="only the number of this value is left"):
            torch.autograd.grad(loss, h, allow_unused=True)


def test_losses_that_are_kept_keep_no_program() -> None:
    lin = nn.Linear(3, 4).double()
    optimizer = torch.optim.SGD(lin.parameters(), 0.1)
    kept = []
    with split(2):
        for _ in range(3):
            h = lin(koila.lazy(torch.randn(N_ROWS, 3, dtype=torch.float64)))
            kept.append(h.pow(2).mean())
            h.sum().backward()
            optimizer.step()
            assert all(_core.real(loss) is not None for loss in kept[:-1])
    assert [loss.item() > 0 for loss in kept] == [True] * 3
