# SPDX-License-Identifier: Apache-2.0
"""Do the tests see it? One mistake at a time is put into a copy of the tree, and tests must fail.

`make mutants` runs all of `mutants_of_*.py`, `make mutants ARGS="live saves"` those of these names.
Each is a change of a few words, and names the tests that should notice: few, so that one takes a
minute at most, and ends at the first that fails. Those of the first two, by which nothing is cut,
are all tests of whole steps that ask for chunks, and nearly all must fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import mutants_of_c
import mutants_of_python
from mutant import Mutant
from only_chunks import WHOLE

ROOT = Path(__file__).parent.parent
#: Those by which nothing is cut come first.
MUTANTS = mutants_of_python.MUTANTS + mutants_of_c.MUTANTS
BUILT = "python/koila/_core*.so"


def copy_tree(to: Path) -> None:
    """Copy what is tracked, and what was built in place."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    built = [str(path.relative_to(ROOT)) for path in ROOT.glob(BUILT)]
    for name in [*listed.splitlines(), *built]:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def build(tree: Path) -> None:
    """Build the extension in place; unoptimized, in a third of the time."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--force"]
    environment = {**os.environ, "KOILA_COVERAGE": "1"}
    command += ["--build-temp", "build/mutant"]
    subprocess.run(command, cwd=tree, env=environment, check=True)


def run_tests(mutant: Mutant, tree: Path) -> tuple[int, list[str]]:
    """Run a mutant's tests; return how many failed, and the names of those that passed."""
    found = tree / "found.xml"
    found.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=no",
        "-p",
        "only_chunks",
        f"--junitxml={found}",
    ]
    if mutant.is_chunked:
        command += ["--only-chunks", "-n", os.environ.get("JOBS", "2")]
    else:
        command.append("-x")
    environment = {**os.environ, "PYTHONPATH": "tests", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *mutant.tests.split()],
        cwd=tree,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if done.returncode not in (0, 1) or not found.is_file():
        raise RuntimeError(f"{mutant.name}: pytest ended with {done.returncode}")
    n_failed, passed = 0, []
    for case in ElementTree.parse(found).iter("testcase"):
        ends = {child.tag for child in case}
        notes = {note.get("name") for note in case.iter("property")}
        if mutant.is_chunked and WHOLE in notes:
            continue
        if ends & {"failure", "error"}:
            n_failed += 1
        elif "skipped" not in ends:
            passed.append(f"{case.get('classname')}::{case.get('name')}")
    return n_failed, passed


def check(mutant: Mutant, tree: Path) -> bool:
    """Put a mutant into the tree, run its tests, print a line, and take it out again."""
    path = tree / mutant.path
    before = path.read_text()
    if before.count(mutant.text) != 1:
        print(f"{mutant.name:50s} its text is {before.count(mutant.text)} times in {mutant.path}")
        return False
    built = {} if path.suffix == ".py" else {so: so.read_bytes() for so in tree.glob(BUILT)}
    begun = time.monotonic()
    path.write_text(before.replace(mutant.text, mutant.instead))
    try:
        if built:
            build(tree)
        n_failed, passed = run_tests(mutant, tree)
    finally:
        path.write_text(before)
        for so, code in built.items():
            so.unlink()
            so.write_bytes(code)
    n_run = n_failed + len(passed)
    least = max(1.0, (mutant.share or 0.0) * n_run)
    is_caught = n_failed >= least
    verdict = "" if is_caught else f"  NOT CAUGHT, {least:.0f} have to fail"
    seconds = time.monotonic() - begun
    print(f"{mutant.name:50s} {n_failed:5d} of {n_run:5d} failed  {seconds:4.0f} s{verdict}")
    if not is_caught or os.environ.get("VERBOSE"):
        for name in passed:
            print(f"    passed: {name}")
    return is_caught


def main(names: list[str]) -> int:
    """Run the mutants whose names begin with one of the words, or all."""
    chosen = [m for m in MUTANTS if not names or any(m.name.startswith(name) for name in names)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        missed = [mutant.name for mutant in chosen if not check(mutant, tree)]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutants were caught")
    return len(missed) > 0 or not chosen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
