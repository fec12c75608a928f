# SPDX-License-Identifier: Apache-2.0
"""Run a training script of the zoo: plain, and with `python -m koila`: as it is, in four chunks,
and with half of the memory that its tensors take in the plain run.

What has to be equal: each number that the script prints, the tensors that it saves, and at the end
the parameters of its optimizers. Each run is a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import random
import re
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import koila.__main__
from allocations import Allocations
from koila.memory import budget, storages
from zoo.entries import Entry
from zoo.run_one import in_a_fork, is_equal

CHUNKS = 4
SHARE = 0.5
SECONDS = 60
#: How much further than a nudge of the last place rounding in another order may move a number.
NUDGES = 100
TOLERANCES = {"float64": 1e-8, "float32": 1e-4}
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d+(?:\.(\d+))?(?:e([-+]\d+))?|nan|inf)(?!\w)")


class _Noted:
    """What a script leaves behind: what it saved, and the parameters that its optimizers step."""

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.saved: list[Tensor] = []

    @contextlib.contextmanager
    def noting(self, is_nudged: bool) -> Iterator[None]:
        """A block in which optimizers and saved files are noted; and where it is asked for each
        parameter is changed by about one unit in its last place when its optimizer is made."""
        optimizer: Any = torch.optim.Optimizer
        begin, save = optimizer.__init__, torch.save

        def begin_noted(made: Any, *args: Any, **words: Any) -> None:
            begin(made, *args, **words)
            if is_nudged:
                _nudge(made)
            self.optimizers.append(made)

        def save_noted(data: Any, *args: Any, **words: Any) -> None:
            leaves = [leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor)]
            self.saved += [leaf.detach().clone() for leaf in leaves]
            save(data, *args, **words)

        optimizer.__init__, torch.save = begin_noted, save_noted
        try:
            yield
        finally:
            optimizer.__init__, torch.save = begin, save

    def numbers(self) -> dict[str, Tensor]:
        parameters = [
            parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        kinds = {"parameter": parameters, "saved": self.saved}
        return {
            f"{kind}.{i}": value.detach()
            for kind, values in kinds.items()
            for i, value in enumerate(values)
        }


def _nudge(optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(5)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            with torch.no_grad():
                parameter.add_(parameter * noise * torch.finfo(parameter.dtype).eps)


def _run(
    path: Path, dtype: str, words: list[str] | None, is_nudged: bool = False
) -> dict[str, Any]:
    """One run, in this process: what it printed, left behind, took, and what koila said.

    Args:
        words: of the launcher, before the script; None: a plain run.
    """
    torch.set_default_dtype(getattr(torch, dtype))
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    printed, said, noted, memory = io.StringIO(), io.StringIO(), _Noted(), Allocations()
    found: dict[str, Any] = {}
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(said),
            noted.noting(is_nudged),
        ):
            start = time.perf_counter()
            gc.collect()
            gc.freeze()
            with memory:
                gc.enable()  # there is no garbage but the script's own
                if words is None:
                    sys.argv = [str(path)]
                    sys.path[0] = str(path.parent)
                    runpy.run_path(str(path), run_name="__main__")
                else:
                    status = koila.__main__.main([*words, "--report", str(report), str(path)])
            found["seconds"] = time.perf_counter() - start
        with memory:
            pass
        if words is not None:
            told = json.loads(report.read_text())
            found["n_chunks"], found["allowed"] = told["most_chunks"], told["memory_limit"]
    lines = said.getvalue().splitlines()
    found["said"] = [line.removeprefix("koila: ") for line in lines if line.startswith("koila: ")]
    if status != 0:
        others = [line for line in lines if not line.startswith("koila: ")]
        found["error"] = (others or ["?"])[-1][:300]
    return found | {
        "printed": printed.getvalue(),
        "numbers": noted.numbers(),
        "peak": memory.peak,
    }


def _limited(path: Path, dtype: str, n_bytes: int) -> dict[str, Any]:
    storages.look_again(True)
    there = budget.taken(torch.device("cpu"), [])
    return _run(path, dtype, ["--memory-limit", str(there + n_bytes)])


def _printed(text: str) -> tuple[str, list[float], list[float]]:
    """The words of a text, its numbers, and of each the unit of its last place."""
    found = list(_NUMBER.finditer(text))
    units = [10.0 ** (int(each[2] or 0) - len(each[1] or "")) for each in found]
    units = [unit if each[1] else 0.0 for unit, each in zip(units, found, strict=True)]
    return _NUMBER.sub("#", text), [float(each[0]) for each in found], units


def _gap(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    is_same = (one == other) | (one.isnan() & other.isnan())
    if is_same.all():
        return 0.0
    gap = (one.double() - other.double()).abs().masked_fill(is_same, 0.0).max().item()
    return gap if gap == gap else float("inf")


def difference(wanted: dict[str, Any], nudged: dict[str, Any], got: dict[str, Any]) -> float:
    """The largest relative difference of what two runs printed and left behind, beyond the last
    printed place, and beyond what rounding explains (see zoo/run_loop.py)."""
    words, numbers, units = _printed(wanted["printed"])
    other_words, others, _ = _printed(got["printed"])
    if words != other_words or wanted["numbers"].keys() != got["numbers"].keys():
        return float("inf")
    moved = _printed(nudged["printed"])[1]
    worst = 0.0
    for one, other, third, unit in zip(numbers, others, moved, units, strict=True):
        gap = _gap(torch.tensor(one), torch.tensor(other)) - 1.01 * unit
        gap -= NUDGES * max(0.0, abs(third - one) - 1.01 * unit)
        worst = max(worst, gap / (abs(one) or 1.0))
    for name, value in wanted["numbers"].items():
        gap = _gap(value, got["numbers"][name])
        gap -= NUDGES * _gap(value, nudged["numbers"][name])
        largest = value.double().nan_to_num(0, 0, 0).abs().max().item() if value.numel() else 0.0
        worst = max(worst, gap / max(largest, 1e-3))
    return worst


def _plain(path: Path) -> tuple[dict[str, Any], str]:
    """The plain run, in float64 where the script lets it."""
    try:
        return in_a_fork(functools.partial(_run, path, "float64", None), SECONDS), "float64"
    except RuntimeError:
        return in_a_fork(functools.partial(_run, path, "float32", None), SECONDS), "float32"


def run_script(entry: Entry, result: dict[str, Any]) -> None:
    """Add to `result` what came of each run."""
    assert entry.script is not None
    plain, dtype = _plain(entry.script)
    singles = any(value.dtype == torch.float32 for value in plain["numbers"].values())
    result["dtype"] = "float32" if singles else dtype
    result["tolerance"] = TOLERANCES[result["dtype"]]
    result["plain"] = {"peak": plain["peak"], "seconds": plain["seconds"]}

    run = functools.partial(_run, entry.script, dtype)
    first = in_a_fork(functools.partial(run, []), SECONDS)
    line: dict[str, Any] = {"said": first["said"], "seconds": first["seconds"]}
    result["one chunk"] = line
    if "error" in first:
        line["error"] = first["error"]
    else:
        is_same = first["printed"] == plain["printed"]
        line["is_equal"] = is_same and is_equal(plain["numbers"], first["numbers"])
        if not line["is_equal"]:
            line["difference"] = difference(plain, plain, first)
    allowed = int(SHARE * plain["peak"])
    works = {
        "chunks": functools.partial(run, ["--chunks", str(CHUNKS)]),
        "limit": functools.partial(_limited, entry.script, dtype, allowed),
    }
    for name, work in works.items():
        line = {}
        result[name] = line
        try:
            got = in_a_fork(work, SECONDS)
        except RuntimeError as error:
            line["error"] = str(error)
            continue
        for kept in ("peak", "seconds", "n_chunks", "said"):
            line[kept] = got[kept]
        line["whole"] = [said for said in got["said"] if said.startswith("whole batch")]
        if name == "limit":
            line["allowed"] = allowed
        if "error" in got:
            line["error"] = got["error"]
        else:
            line["difference"] = difference(plain, plain, got)
            if result["tolerance"] < line["difference"] < float("inf"):
                nudged = in_a_fork(functools.partial(run, None, is_nudged=True), SECONDS)
                line["difference"] = difference(plain, nudged, got)
