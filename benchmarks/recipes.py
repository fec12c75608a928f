# SPDX-License-Identifier: Apache-2.0
"""What the recipes of docs/recipes cost: the peak and the time of a step, over those without koila.

    python -m benchmarks.recipes

A recipe's script defines `train_step` and `batch`, and sets the limit that the step then has. Each
is run in a process of its own. "Peak" is what torch's allocator hands out at most during the step,
"time" a ratio within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import koila
from benchmarks.bench import interleave, parser, prepare, publish, ratio, seconds_of, table
from benchmarks.bench_limits import peak_of

PAGES = Path(__file__).parent.parent / "docs/recipes"
SCRIPT = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def script_of(page: Path) -> str:
    """Return the first block of Python of a page."""
    found = SCRIPT.search(page.read_text())
    return found[1] if found is not None else ""


def recipes() -> list[str]:
    """Return the names of the pages whose script trains."""
    pages = sorted(PAGES.glob("*.md"))
    return [page.stem for page in pages if "def train_step(" in script_of(page)]


def without_koila(step: Callable[[], Any]) -> None:
    with koila.off():
        step()


def row(name: str, args: argparse.Namespace) -> list[str]:
    """Measure one recipe."""
    prepare(args)
    names: dict[str, Any] = {"__name__": "recipe"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(script_of(PAGES / f"{name}.md"), name, "exec"), names)
    step = partial(names["train_step"], *names["batch"])
    ways: dict[str, Callable[[], Any]] = {"plain": partial(without_koila, step), "koila": step}
    peaks = {}
    for way, work in ways.items():
        work()
        peaks[way] = peak_of(work)
    timed = {way: partial(seconds_of, work, args) for way, work in ways.items()}
    times = interleave(timed, args.rounds)
    step()
    chunks = [ran.n_chunks for ran in koila.report().programs]
    return [
        name,
        f"{peaks['plain'] / 2**20:.0f} MiB",
        f"{peaks['koila'] / 2**20:.0f} MiB",
        f"{ratio(times, 'koila', 'plain'):.2f}",
        ", ".join(map(str, chunks)),
    ]


def main() -> None:
    args = parser(__doc__).parse_args()
    rows = []
    for name in recipes():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(row, (name, args)))
    heads = ["recipe", "peak of plain", "peak", "time over plain", "chunks of each pass"]
    publish(args, "What the recipes cost", [table(heads, rows)])


if __name__ == "__main__":
    main()
