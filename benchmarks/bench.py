# SPDX-License-Identifier: Apache-2.0
"""Shared by the benchmarks: interleaved rounds, medians, tables that say where they were made."""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

import koila


def parser(description: str | None) -> argparse.ArgumentParser:
    """What every benchmark can be told."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("--device", default="cpu")
    made.add_argument("--rounds", type=int, default=9, help="measurements of each variant")
    made.add_argument("--threads", type=int, help="torch's threads; default: torch's own choice")
    made.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the process's own time: for a machine that others use too, with --threads 1",
    )
    made.add_argument("--out", type=Path, help="write the tables to this Markdown file too")
    return made


def prepare(args: argparse.Namespace) -> None:
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def where(args: argparse.Namespace) -> str:
    """One line: the machine and the versions."""
    parts = [f"{_cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"]
    if torch.device(args.device).type == "cuda":
        parts.append(torch.cuda.get_device_name(args.device))
    parts.append(f"Python {platform.python_version()}")
    parts.append(f"torch {torch.__version__}")
    parts.append(f"koila {koila.__version__}" if hasattr(koila, "__version__") else "koila")
    return " · ".join(parts)


def sync(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], args: argparse.Namespace) -> float:
    """Time one call, without the garbage collector and with the device idle before and after."""
    clock = time.process_time if args.cpu_time else time.perf_counter
    gc.collect()
    gc.disable()
    try:
        sync(args.device)
        start = clock()
        work()
        sync(args.device)
        return clock() - start
    finally:
        gc.enable()


def interleave(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure each variant once a round, every other round in reverse order, after a warm-up round.

    Neighbours in time meet the same disturbances, so ratios are taken within a round.
    """
    for measure in variants.values():
        measure()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        names = list(variants)
        for name in names if number % 2 == 0 else reversed(names):
            times[name].append(variants[name]())
    return times


def ratio(times: Mapping[str, Sequence[float]], over: str, under: str) -> float:
    """The median over rounds of one variant's time over another's."""
    pairs = zip(times[over], times[under], strict=True)
    return statistics.median(a / b for a, b in pairs)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, first column to the left, the others to the right."""
    cells = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        parts = (
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(parts)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(heads), line(rule), *(line(row) for row in rows)])


def publish(args: argparse.Namespace, title: str, parts: Sequence[str]) -> None:
    """Print the tables, and write them to --out with the command that made them."""
    print("\n\n".join([where(args), *parts]))
    if args.out is not None:
        module = sys.modules["__main__"].__spec__
        name = module.name if module is not None else Path(sys.argv[0]).name
        words = [word for word in sys.argv[1:] if word != "--out" and word != str(args.out)]
        command = " ".join(["python -m", name, *words])
        head = f"# {title}\n\n`{command}`\n\n{where(args)}"
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n\n".join([head, *parts]) + "\n")
