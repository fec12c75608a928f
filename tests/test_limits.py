# SPDX-License-Identifier: Apache-2.0
"""Steps under limits of the system, in processes of their own: nothing else takes memory there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent.parent
N_SHAPES = 30


def ask(*args: str) -> str:
    """Run Python in a process of its own and return the last line it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *args],
        cwd=HERE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


IMPORTS = """
import sys, torch, koila
from torch import nn
from torch.nn import functional as F
before = set(sys.modules)
layer, norm = nn.LSTM(6, 8, dropout=.2, num_layers=2), nn.BatchNorm1d(8)
x, y = koila.lazy(torch.randn(12, 3, 6), torch.arange(12) % 8)
x = F.dropout(x.transpose(0, 1), .5)
with koila.config(chunks=3):
    loss = F.cross_entropy(norm(F.dropout(layer(x)[0][-1], .5)), y).sqrt()
    loss.item()
    loss.backward()
koila.memory.offload.put(torch.randn(4, 6).t())
assert koila.report().n_chunks == 3
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] != "koila"))
"""


def test_a_step_imports_nothing() -> None:
    """Neither torch's compiler nor sympy: tens of MiB that a limit may not leave."""
    assert ask("-c", IMPORTS) == "[]"


META = """
import sys, torch, koila
x = koila.lazy(torch.rand(4, 3, 3))
q, r = torch.linalg.qr(x * 2)
torch.special.airy_ai(q @ r).sum().item()
print("torch._dynamo" in sys.modules)
"""


def test_calls_on_meta_tensors_do_not_import_torchs_compiler() -> None:
    """Of an op without a row in the op table, which koila counts the bytes of in a dispatch mode:
    the compiler takes a second and 70 MiB."""
    assert ask("-c", META) == "False"


def run_case(work: str, **task: Any) -> dict[str, Any]:
    """Run a case of the benchmark in its own process."""
    text = json.dumps({"work": work, **task})
    found: dict[str, Any] = json.loads(ask("-m", "benchmarks.bench_limits", "--child", text))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("name", ["MLP", "CNN, BatchNorm", "GPT, one text"])
def test_a_third_of_eagers_memory(name: str, tmp_path: Path) -> None:
    """`benchmarks/bench_limits.py` has more programs and limits."""
    out = str(tmp_path / "wanted.pt")
    peak = run_case("case", name=name, kind="none", n_bytes=0, out=out)["peak"]
    found = run_case("case", name=name, kind="process", n_bytes=int(0.3 * peak), out=out)
    assert "error" not in found, found["error"]
    assert found["far"] <= 1e-10
    assert min(found["chunks"]) > 3 or name == "GPT, one text"  # of which a row goes in pieces


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_random_shapes() -> None:
    """What oneDNN keeps for each shape stays within the limit, and nothing is refused for what is
    kept back."""
    eager = run_case("shapes", n_bytes=0, n_steps=1)
    limit = eager["there"] + int(0.2 * eager["peak"])
    found = run_case("shapes", n_bytes=limit, n_steps=N_SHAPES)
    assert found["errors"] == 0, found["error"]
    # A few kernels for shapes that came late, of 0.3 to 0.5 MiB each.
    assert max(found["data"]) <= max(found["data"][: N_SHAPES // 3]) + 2**21
    assert sum(n_rows < 8 for n_rows in found["rows"]) > N_SHAPES // 2, "in chunks"


KERNELS = """
import os, resource
resource.setrlimit(resource.RLIMIT_DATA, (SIZE, SIZE))
import koila
print(os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_kernels_that_are_kept() -> None:
    """A sixteenth of what is left at most, unless the environment says how many."""
    limited = KERNELS.replace("SIZE", str(2**30))
    assert 8 <= int(ask("-c", limited)) <= 2**30 // 16 // 2**20
    assert ask("-c", KERNELS.replace("SIZE", str(2**36))) == "None"
    asked = "import os; os.environ['DNNL_PRIMITIVE_CACHE_CAPACITY'] = '9'"
    assert ask("-c", asked + limited) == "None"
