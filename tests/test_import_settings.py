# SPDX-License-Identifier: Apache-2.0
"""koila finds torch as it is laid out, whatever a script has set before it imports koila.

Self-tests at import look at tensors of their own. A default dtype, device or grad mode of the
user's must change nothing about these: if a self-test fails, koila refuses this torch.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

modes = {
    "fake": FakeTensorMode,
    "hooks": lambda: saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
    "no_hooks": lambda: disable_saved_tensors_hooks("of a test"),
}
dtype, device, mode = sys.argv[1:]
torch.set_default_dtype(getattr(torch, dtype))
torch.set_default_device(device)
with (modes.get(mode) or getattr(torch, mode))():
    import koila
from koila import _core
from koila.memory import budget
from torch.nn import functional as F

assert _core.is_recycling()

CPU = torch.device("cpu")
before = budget.taken(CPU, [])
held = torch.zeros(2**20, dtype=torch.float32, device=CPU)
assert budget.taken(CPU, []) == before + 4 * 2**20, "memory of others is counted"

kind = dict(dtype=torch.float64, device=CPU)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16, **kind),
    torch.nn.BatchNorm1d(16, **kind),
    torch.nn.GELU(),
    torch.nn.Dropout(0.3),
    torch.nn.Linear(16, 4, **kind),
)
x, y = torch.randn(12, 8, **kind), torch.arange(12, device=CPU) % 4


def step(x, y):
    torch.manual_seed(3)
    model.zero_grad()
    out = model(x)
    chosen = out[out.detach().sum(1) > 0]
    loss = F.cross_entropy(out, y) + out.new_zeros(4).add(out.std(0)).sum()
    loss = loss + chosen.pow(2).mean().sqrt()
    loss.backward()
    try:
        loss.backward()
    except RuntimeError as error:
        assert "second time" in str(error), error
    else:
        raise AssertionError("a second backward goes through")
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]


wanted = step(x, y)
for n_chunks in (1, 2, 3, 7, 12):
    with koila.config(chunks=n_chunks):
        got = step(*koila.lazy(x, y))
        assert koila.report().n_chunks == n_chunks, koila.report()
    for a, b in zip(got, wanted):
        torch.testing.assert_close(+a, b, rtol=1e-10, atol=1e-12)
"""

SETTINGS = [
    *((dtype, "cpu", "enable_grad") for dtype in ("float16", "bfloat16", "float32", "float64")),
    *((dtype, "meta", "enable_grad") for dtype in ("float16", "bfloat16", "float32", "float64")),
    ("float32", "cpu", "no_grad"),
    ("float64", "meta", "inference_mode"),
    *(("float32", "cpu", mode) for mode in ("fake", "hooks", "no_hooks")),
]


@pytest.mark.rotated
@pytest.mark.parametrize(("dtype", "device", "mode"), SETTINGS)
def test_imported_after_defaults_are_set(dtype: str, device: str, mode: str) -> None:
    words = [sys.executable, "-W", "ignore", "-c", SCRIPT, dtype, device, mode]
    run = subprocess.run(words, check=False, timeout=900, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
