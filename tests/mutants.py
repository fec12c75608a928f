"""Do the tests see it? One mistake at a time is put into a copy of the tree, and tests must fail.

`make mutants` runs all of them, `make mutants ARGS="live saves"` those of these names. Each is a
change of a few words, and names the tests that should notice: few, so that all take minutes. Those
of the first two, by which nothing is cut, are all tests of whole steps that ask for chunks, and
nearly all must fail.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from only_chunks import WHOLE

ROOT = Path(__file__).parent.parent
#: Tests of whole steps that ask for a number of chunks.
STEPS = (
    "tests/test_step.py tests/test_step_gradients.py tests/test_step_inputs.py "
    "tests/test_counterexamples.py tests/test_counterexamples_rows.py "
    "tests/test_counterexamples_state.py tests/test_counterexamples_unseen.py "
    "tests/test_shared_memory.py tests/test_programs.py::test_same_as_eager "
    "tests/test_autocast.py tests/test_bad_input.py tests/test_cross.py tests/test_draws.py "
    "tests/test_draws_between.py tests/test_draws_order.py tests/test_factories.py "
    "tests/test_generator.py tests/test_held_outputs.py tests/test_hooks.py "
    "tests/test_masked_writes.py tests/test_one_call.py tests/test_out.py tests/test_precision.py "
    "tests/test_run_now.py tests/test_scalars.py tests/test_tail.py tests/test_inplace_views.py "
    "tests/test_views_again.py tests/test_written_after_read.py"
)
BUILT = "python/koila/_core*.so"
PROGRAMS = "tests/test_programs.py::test_same_as_eager"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake: a text of a file, once in it, and what stands in its place.

    `share` is how many of the tests must fail at least, None one test.
    """

    name: str
    path: str
    text: str
    instead: str
    tests: str
    share: float | None = None

    @property
    def is_chunked(self) -> bool:
        """Whether only tests that ask for chunks are run."""
        return self.share is not None


MUTANTS = [
    Mutant(
        "whole: everything is planned whole",
        "python/koila/plan.py",
        "def is_whole() -> bool:\n",
        "def is_whole() -> bool:\n    return True\n\n\ndef is_whole_unless_mutated() -> bool:\n",
        STEPS,
        0.95,
    ),
    Mutant(
        "live: every call runs at once",
        "python/koila/functions.py",
        "_core.register(func, OP, name, instead,",
        "_core.register(func, LIVE, name, None,",
        STEPS,
        0.95,
    ),
    Mutant(
        "grid: one chunk too few",
        "python/koila/replay.py",
        "grid(rows, planned.n_chunks, planned.unit))",
        "grid(rows, max(1, planned.n_chunks - 1), planned.unit))",
        "tests/test_step.py",
        0.9,
    ),
    Mutant(
        "saves: exp keeps nothing",
        "koila_c/core/ops.def",
        '(exp,                 "input",   same,        to_float,        rowwise, output, ',
        '(exp,                 "input",   same,        to_float,        rowwise, nothing,',
        "tests/test_ops.py tests/test_infer.py -k exp",
    ),
    Mutant(
        "place: a cumulative sum goes by rows",
        "koila_c/core/ops_move.def",
        "cumulate(1),       to_sum,       scan,              nothing, ",
        "cumulate(1),       to_sum,       rowwise,           nothing, ",
        "tests/test_ops.py tests/test_infer.py -k cumsum",
    ),
    Mutant(
        "divisor: a mean counts one term more",
        "python/koila/partials.py",
        "return count(n_reduced(x, dims(x, dim)))",
        "return count(n_reduced(x, dims(x, dim)) + 1)",
        "tests/test_partials.py -k mean",
    ),
    Mutant(
        "batch_norm: no gradient goes through the mean of the batch",
        "python/koila/norms.py",
        "of_mean = factor * of_bias",
        "of_mean = 0 * factor * of_bias",
        "tests/test_batch_norm.py -k test_models",
    ),
    Mutant(
        "drop: values are kept to the end of a chunk",
        "koila_c/core/program.c",
        "if (at != UINT32_MAX && !is_written) {",
        "if (at == 0 && !is_written) {",
        "tests/binding/test_py_stage.py",
    ),
    Mutant(
        "bytes: one result less in flight",
        "koila_c/core/ops_move.def",
        "BACK(7)",
        "BACK(6)",
        "tests/test_flight.py -k logcumsumexp",
    ),
    Mutant(
        "bytes: one result more in flight",
        "koila_c/core/ops.c",
        "#define BACK(n) HOLDS(.back_outs = EACH(n))",
        "#define BACK(n) HOLDS(.back_outs = EACH(n + 1))",
        "tests/test_flight.py -k sin",
    ),
    Mutant(
        "bytes: a gradient that meets another takes no sum",
        "koila_c/core/sweep.c",
        "return is_expanded || shared != KL_ID_NONE ? zero : size_of(sweep, value);",
        "return is_expanded || shared != KL_ID_NONE ? zero : zero;",
        "tests/test_bytes.py",
    ),
    Mutant(
        "bytes: what a body leaves is held for ever",
        "koila_c/core/measure.c",
        "step->held -= storage->bytes;",
        "step->held += 0;",
        "tests/test_bytes.py",
    ),
    Mutant(
        "draws: a chunk that runs again draws anew",
        "python/koila/draws.py",
        "        _set_state(generator, state)\n        self.spots[i] =",
        "        self.spots[i] = list() or",
        "tests/test_counterexamples.py -k two_dropouts",
    ),
    Mutant(
        "gradient: delivered twice",
        "python/koila/replay.py",
        "found.append((value, info.real, gradient.to(info.real.dtype)))",
        "found += [(value, info.real, gradient.to(info.real.dtype))] * 2",
        "tests/test_cross.py",
    ),
    Mutant(
        "gradient: what joints send back is lost",
        "python/koila/replay.py",
        "seed = self.cross[value].take_total_gradient()\n            if value in roots:",
        "seed = None\n            if value in roots:",
        f"{PROGRAMS} -k standardised",
    ),
    Mutant(
        "statistics: committed twice",
        "python/koila/replay.py",
        "without_version(real).copy_(copy)",
        "without_version(real).copy_(2 * copy - real)",
        f"{PROGRAMS} -k cnn_bn",
    ),
    Mutant(
        "views: not taken again after a write",
        "python/koila/views.py",
        "if view is None:",
        "if view is None or view[2] >= 0:",
        "tests/test_counterexamples_state.py tests/test_writes.py -k view",
    ),
    Mutant(
        "cut: a chunk begins a row too early",
        "python/koila/rows.py",
        "return tensor.narrow(dim, start * inner, (stop - start) * inner)",
        "return tensor.narrow(dim, max(0, start - 1) * inner, (stop - start) * inner)",
        f"{PROGRAMS} -k mlp-ce",
    ),
    Mutant(
        "counts: labels that a model makes are taken for known",
        "python/koila/partials.py",
        "counts = frozenset()  # labels",
        "counts = frozenset((1,))  # labels",
        "tests/test_tail.py",
    ),
    Mutant(
        "unwritten: plain torch waits for nothing",
        "python/koila/unwritten.py",
        "if not (_asks_no_number(func) or _is_own()):",
        "if _is_own():",
        "tests/test_unwritten.py",
    ),
    Mutant(
        "leaves: nobody looks whether they changed",
        "koila_c/binding/py_stale.c",
        "int changed = is_changed(&tape->values[leaf]);",
        "int changed = is_changed(&tape->values[leaf]) * 0;",
        "tests/binding/test_py_stale.py",
    ),
]


def copy_tree(to: Path) -> None:
    """Copy what is tracked, and what was built in place."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    built = [str(path.relative_to(ROOT)) for path in ROOT.glob(BUILT)]
    for name in [*listed.splitlines(), *built]:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def build(tree: Path) -> None:
    """Build the extension in place."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--force"]
    subprocess.run([*command, "--build-temp", "build/mutant"], cwd=tree, check=True)


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
