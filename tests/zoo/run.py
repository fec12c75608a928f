# SPDX-License-Identifier: Apache-2.0
"""Run the zoo: each entry in a process of its own, a line of JSON for each, and a table at the end.

    make zoo                                    all of it: an hour and more on two cores
    make zoo ARGS="--only timm/ --jobs 2"       what has this in its name
    make zoo ARGS="--only script/"              the scripts, with a table of their own
    make zoo ARGS="--device cuda"               models of libraries on a GPU
    make zoo ARGS="--date 2026-11-24"           twelve models, four loops and three scripts of a day

What is in the file of results already is not run again: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import datetime
import json
import os
import queue
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from zoo import known  # noqa: E402
from zoo.entries import Entry, all_entries  # noqa: E402

N_MODELS, N_LOOPS, N_SCRIPTS = 12, 4, 3
#: Where a script takes more than this share of the plain memory, its user is told why.
MOST_OF_PLAIN = 0.8
#: Beyond the limit: what the plan of a step may be wrong by.
SLACK_SHARE, SLACK_BYTES = 1.05, 2**16
#: By the dtype of the model, and of what a library computes within.
TOLERANCES = {"float64": 1e-9, "float64, float32 within": 1e-6, "float32": 1e-4}


def choose(date: datetime.date, entries: dict[str, Entry]) -> list[str]:
    """The entries of a day: over time all of them, on one day the same for everybody."""
    chance = random.Random(date.toordinal())
    models = sorted(name for name, entry in entries.items() if entry.build is not None)
    loops = sorted(name for name, entry in entries.items() if entry.loop is not None)
    # Those of torch alone are part of the suite.
    scripts = sorted(
        name
        for name, entry in entries.items()
        if entry.script is not None and entry.library != "torch"
    )
    return [
        *chance.sample(models, N_MODELS),
        *chance.sample(loops, N_LOOPS),
        *chance.sample(scripts, min(N_SCRIPTS, len(scripts))),
    ]


#: A process that asked for GPUs in another way cannot be forked.
_OF_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class Server:
    """A process that forks one for each entry, so that libraries are imported once."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, str(HERE / "run_one.py"), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | _OF_CUDA,
        )

    def run(self, name: str, seconds: float) -> dict[str, Any]:
        """Run an entry; what goes wrong with its process is its result."""
        assert self._child.stdin is not None and self._child.stdout is not None
        print(seconds, name, file=self._child.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._child.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.stdout.close()
        self._child.wait()


def faults(result: dict[str, Any]) -> list[str]:
    """What of a result is a broken promise."""
    if "error" in result:
        return [f"plain torch or the zoo: {result['error']}"]
    found = []
    first = result["one chunk"]
    if "error" in first:
        found.append(f"one chunk: {first['error']}")
    if first.get("is_equal") is False:
        found.append(f"one chunk differs by {first['difference']:.1e}")
    for name in ("chunks", "limit"):
        line = result.get(name, {})
        if "error" in line:
            if "MemoryLimitError" not in line["error"] or name != "limit":
                found.append(f"{name}: {line['error']}")
            continue
        allowed = result.get("tolerance", TOLERANCES[result["dtype"]])
        if line["difference"] > allowed:
            found.append(f"{name}: differs by {line['difference']:.1e}")
        # A loop by hand, too, has a chunk's gradient beside the sum of those of the chunks before.
        second = result["plain"].get("largest gradient", 0) if name == "chunks" else 0
        if line["peak"] > SLACK_SHARE * result["plain"]["peak"] + SLACK_BYTES + second:
            found.append(f"{name}: above plain torch's peak")
        if name == "limit" and line["peak"] > SLACK_SHARE * line["allowed"] + SLACK_BYTES:
            found.append(f"limit: took {line['peak']:,} bytes of {line['allowed']:,}")
        is_much = line["peak"] > MOST_OF_PLAIN * result["plain"]["peak"]
        if "said" in line and is_much and not line["whole"]:
            found.append(f"{name}: saved little, and nothing says why")
    return found


def _cells(result: dict[str, Any]) -> list[str]:
    plain, chunks, limit = (result.get(key, {}) for key in ("plain", "chunks", "limit"))
    if "error" in result:
        return [result["name"], "", "", "", "", "", result["error"][:60]]
    first = result["one chunk"]
    equal = {True: "bits", False: "DIFFERS"}.get(first.get("is_equal"), "skipped")
    share = time = difference = "error"
    if "peak" in chunks:
        share = f"{chunks['peak'] / max(1, plain['peak']):.2f}"
        time = f"{chunks['seconds'] / max(1e-9, plain['seconds']):.2f}"
        difference = f"{chunks['difference']:.0e}"
    under = "refused" if "error" in limit else ""
    if "peak" in limit:
        under = f"{limit['peak'] / max(1, limit['allowed']):.2f}"
    what = "; ".join(faults(result)) or (chunks.get("whole") or [""])[0][:60]
    return [result["name"], equal, difference, share, time, under, what]


def _script_cells(result: dict[str, Any]) -> list[str]:
    if "error" in result:
        return [result["name"], *[""] * 8, result["error"][:60]]
    plain = result["plain"]
    cells = [result["name"].partition("/")[2], f"{plain['peak'] / 2**20:.0f} MiB"]
    cells.append("bits" if result["one chunk"].get("is_equal") else "DIFFERS")
    for name in ("chunks", "limit"):
        line = result[name]
        if "difference" not in line:
            cells += ["error", "", ""]
            continue
        cells.append(f"{line['n_chunks']}: {line['difference']:.0e}")
        cells.append(f"{line['peak'] / plain['peak']:.2f}")
        cells.append(f"{line['seconds'] / plain['seconds']:.1f}")
    told = [result[name].get("error", "") for name in ("one chunk", "chunks", "limit")]
    told += result["limit"].get("whole", []) + result["chunks"].get("whole", [])
    what = "; ".join(faults(result)) or next(filter(None, told), "")
    return [*cells, what.replace("|", "/")[:150]]


def script_table(results: list[dict[str, Any]]) -> str:
    """A line for each script."""
    heads = ["script", "plain", "one chunk", "four: difference", "peak", "time"]
    heads += ["half: difference", "peak", "time", "remarks"]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for result in sorted(results, key=lambda each: each["name"]):
        lines.append("| " + " | ".join(_script_cells(result)) + " |")
    return "\n".join(lines)


def table(results: list[dict[str, Any]]) -> str:
    """A line for each entry, and what they come to."""
    heads = ["name", "one chunk", "six: difference", "peak", "time", "of limit", "remarks"]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for result in sorted(results, key=lambda each: each["name"]):
        lines.append("| " + " | ".join(_cells(result)) + " |")
    wrong = [result for result in results if faults(result)]
    refused = [r for r in results if "error" in r.get("limit", {})]
    libraries = collections.Counter(result.get("library", "?") for result in results)
    shares = sorted(
        result["chunks"]["peak"] / result["plain"]["peak"]
        for result in results
        if "peak" in result.get("chunks", {}) and result["plain"]["peak"]
    )
    lines.append("")
    lines.append(", ".join(f"{name}: {count}" for name, count in sorted(libraries.items())))
    lines.append(f"{len(results)} entries, {len(wrong)} with a fault, {len(refused)} refused")
    if shares:
        middle = shares[len(shares) // 2]
        lines.append(f"peak in six chunks over plain torch's: median {middle:.2f}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="what a name must have in it")
    parser.add_argument("--date", type=datetime.date.fromisoformat, help="this day's selection")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="where models of libraries run")
    parser.add_argument("--seconds", type=float, default=300.0, help="for one entry")
    parser.add_argument("--results", type=Path, default=Path("build/zoo.jsonl"))
    parser.add_argument("--again", action="store_true", help="forget the results there are")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    entries = all_entries()
    if args.device != "cpu":
        os.environ["KOILA_ZOO_DEVICE"] = args.device
        entries = {name: entry for name, entry in entries.items() if entry.build is not None}
    names = choose(args.date, entries) if args.date else list(entries)
    if args.only:
        names = [name for name in names if any(part in name for part in args.only)]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    if args.again:
        args.results.unlink(missing_ok=True)
    done: dict[str, dict[str, Any]] = {}
    if args.results.exists():
        lines = args.results.read_text().splitlines()
        done = {result["name"]: result for result in map(json.loads, lines)}
    waiting = queue.SimpleQueue[str]()
    for name in names:
        if name not in done:
            waiting.put(name)
    lock = threading.Lock()

    def work(file: TextIO) -> None:
        server = Server()
        try:
            while True:
                result = server.run(waiting.get_nowait(), args.seconds)
                with lock:
                    done[result["name"]] = result
                    print(json.dumps(result), file=file, flush=True)
                    said = "; ".join(faults(result)) or "as plain torch"
                    print(f"{result['name']}: {said}", flush=True)
        except queue.Empty:
            pass
        finally:
            server.close()

    with (
        args.results.open("a") as file,
        concurrent.futures.ThreadPoolExecutor(args.jobs) as pool,
    ):
        for worker in [pool.submit(work, file) for _ in range(args.jobs)]:
            worker.result()
    results = [done[name] for name in names]
    scripts = [each for each in results if each["name"].startswith("script/")]
    if scripts:
        print(script_table(scripts))
    if len(results) > len(scripts):
        print(table([each for each in results if each not in scripts]))
    unknown = [
        each["name"] for each in results if faults(each) and each["name"] not in known.FAULTS
    ]
    if unknown:
        sys.exit(f"broken promises that {known.__file__} does not explain: {', '.join(unknown)}")


if __name__ == "__main__":
    main()
