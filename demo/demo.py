# SPDX-License-Identifier: Apache-2.0
"""Train a model whose batch does not fit, three times from the same seed:

    plain            all the memory there is
    plain, limited   the operating system's limit is less than the batch needs: it dies
    koila, limited   the same limit and the same script with one line more: it finishes

and compare what they used and what they learned. `make demo`, or `make demo ARGS="--device cuda"`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TRAIN = Path(__file__).with_name("train.py")
MIB = 2**20
UNITS = {"MiB": MIB, "GiB": 2**30}

# What float32 sums in another order may differ by after a few steps.
LOSS_TOLERANCE = 1e-4
PARAMETER_TOLERANCE = 1e-4


@dataclass
class Run:
    """One child process: how it ended, and what it said."""

    name: str
    bytes_limit: int | None
    seconds: float
    error: str | None
    steps: list[dict[str, Any]]
    parameters: dict[str, torch.Tensor]

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def bytes_peak(self) -> int:
        return max(step["bytes_peak"] for step in self.steps)

    @property
    def seconds_of_steps(self) -> float:
        return sum(step["seconds"] for step in self.steps)


def size(text: str) -> int:
    """Read "384MiB" or "4GiB"."""
    number, unit = text[:-3], text[-3:]
    if unit not in UNITS or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 384MiB or 4GiB")
    return int(float(number) * UNITS[unit])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory-limit", type=size, help="default: 384MiB; on CUDA 4GiB")
    parser.add_argument("--rows", type=int, help="rows of a batch; default: 48, on CUDA 1024")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    is_cpu = torch.device(args.device).type == "cpu"
    args.memory_limit = args.memory_limit or (384 * MIB if is_cpu else 4096 * MIB)
    args.rows = args.rows or (48 if is_cpu else 1024)
    return args


def run(name: str, args: argparse.Namespace, bytes_limit: int | None, *flags: str) -> Run:
    """Run the training script in a process of its own."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "parameters.pt"
        command = [sys.executable, str(TRAIN), *flags, f"--device={args.device}"]
        command += [f"--rows={args.rows}", f"--steps={args.steps}", f"--seed={args.seed}"]
        command += [f"--save={saved}"]
        if bytes_limit is not None:
            command.append(f"--memory-limit={bytes_limit}")
        start = time.perf_counter()
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        error = None
        if child.returncode != 0:
            said = re.findall(r"^[\w.]+(?:Error|Exit|Interrupt).*", child.stderr, re.MULTILINE)
            error = said[-1] if said else f"ended with status {child.returncode}"
        steps = [json.loads(line) for line in child.stdout.splitlines()]
        parameters = torch.load(saved, map_location="cpu") if saved.exists() else {}
        return Run(name, bytes_limit, seconds, error, steps, parameters)


def row(cells: list[str]) -> str:
    return "".join(f"{cell:<18}" if i == 0 else f"{cell:>12}" for i, cell in enumerate(cells))


def table(runs: list[Run], n_steps: int) -> str:
    """One line for each run."""
    heads = ["", "limit MiB", "peak MiB", "seconds", "chunks"]
    lines = [row([*heads, *(f"loss {i + 1}" for i in range(n_steps))])]
    for each in runs:
        limit = "none" if each.bytes_limit is None else f"{each.bytes_limit / MIB:.0f}"
        if each.error is not None:
            lines.append(row([each.name, limit]) + f"   died in step {len(each.steps) + 1}:")
            lines.append(f"    {each.error}")
            continue
        counts = sorted({step["chunks"] for step in each.steps})
        chunks = "-".join(str(count) for count in counts)
        cells = [each.name, limit, f"{each.bytes_peak / MIB:.0f}", f"{each.seconds_of_steps:.1f}"]
        lines.append(row([*cells, chunks, *(f"{loss:.6f}" for loss in each.losses)]))
    return "\n".join(lines)


def differences(one: Run, other: Run) -> tuple[float, float]:
    """The largest difference of a loss, and of a final parameter."""
    loss = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
    names = one.parameters.keys() | other.parameters.keys()
    parameter = max(
        float((one.parameters[name] - other.parameters[name]).abs().max()) for name in names
    )
    return loss, parameter


def verdict(plain: Run, limited: Run, lazy: Run) -> tuple[list[str], list[str], str]:
    """Which promises were broken, what could not be shown on this machine, and what was shown."""
    broken, missing, shown = [], [], ""
    if plain.error is not None:
        missing.append(f"the plain run, without a limit, failed: {plain.error}")
    if limited.error is None:
        missing.append("the plain run fits into the limit; choose a lower --memory-limit")
    if lazy.error is not None:
        broken.append(f"the koila run died: {lazy.error}")
    elif lazy.bytes_limit is not None and lazy.bytes_peak > lazy.bytes_limit:
        broken.append("the koila run used more than the limit")
    counts = {step["chunks"] for step in lazy.steps}
    if len(counts) > 1:
        broken.append(f"equal steps ran in {min(counts)} to {max(counts)} chunks")
    if plain.error is None and lazy.error is None:
        loss, parameter = differences(plain, lazy)
        if loss > LOSS_TOLERANCE or parameter > PARAMETER_TOLERANCE:
            broken.append(
                f"a loss differs by {loss:.1e} and a parameter by {parameter:.1e}: more than "
                "rounding"
            )
        shown = (
            f"under {(lazy.bytes_limit or 0) / MIB:.0f} MiB, where the plain script dies, the same "
            f"script with koila trains in {lazy.bytes_peak / MIB:.0f} MiB. Without a limit the "
            f"plain script takes {plain.bytes_peak / MIB:.0f} MiB; its losses differ from koila's "
            f"by at most {loss:.1e}, its final parameters by {parameter:.1e}."
        )
    return broken, missing, shown


def main() -> None:
    args = arguments()
    start = time.perf_counter()
    plain = run("plain", args, None)
    limited = run("plain, limited", args, args.memory_limit)
    lazy = run("koila, limited", args, args.memory_limit, "--koila")
    print(table([plain, limited, lazy], args.steps))
    print(f"{time.perf_counter() - start:.0f} s in all\n")
    broken, missing, shown = verdict(plain, limited, lazy)
    if broken:
        sys.exit("Failed: " + "; ".join(broken))
    if missing:
        sys.exit("Nothing was shown: " + "; ".join(missing))
    print(f"Shown: {shown}")


if __name__ == "__main__":
    main()
