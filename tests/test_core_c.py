# SPDX-License-Identifier: Apache-2.0
"""Run the C tests of the core, tests/core/test_*.c, under ASAN, UBSAN and leak detection."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = sorted((ROOT / "tests" / "core").glob("test_*.c"))
CC = [
    "gcc",
    "-std=c11",
    "-g",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    f"-I{ROOT / 'koila_c' / 'core'}",
    f"-I{ROOT / 'tests' / 'core'}",
]
SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


@pytest.fixture(scope="module")
def core_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core as a library, so that a test links only the files it uses."""
    folder = tmp_path_factory.mktemp("core")
    sources = sorted((ROOT / "koila_c" / "core").glob("*.c"))
    subprocess.run([*CC, "-c", *sources], cwd=folder, check=True)
    library = folder / "libcore.a"
    subprocess.run(["ar", "rcs", library, *sorted(folder.glob("*.o"))], check=True)
    return library


def run(source: Path, library: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    program = folder / source.stem
    subprocess.run([*CC, source, library, "-lm", "-o", program], check=True)
    # Not the preloads of `make sanitize`: the program brings its own sanitizers.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(
        [program], env=environment | SANITIZERS, capture_output=True, text=True, timeout=900
    )


@pytest.mark.rotated
@pytest.mark.parametrize("source", TESTS, ids=lambda source: source.stem)
def test_c(source: Path, core_library: Path, tmp_path: Path) -> None:
    result = run(source, core_library, tmp_path)
    assert result.returncode == 0, result.stderr


def test_two_tapes_on_two_threads(tmp_path: Path) -> None:
    """ThreadSanitizer has a build of its own: it does not go with the others."""
    sources = sorted((ROOT / "koila_c" / "core").glob("*.c"))
    options = [option for option in CC if not option.startswith(("-fsanitize", "-fno-sanitize"))]
    program = tmp_path / "threads"
    test = ROOT / "tests" / "core" / "test_threads.c"
    subprocess.run(
        [*options, "-fsanitize=thread", *sources, test, "-lm", "-o", program], check=True
    )
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}

    def run_it(*before: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*before, program], env=environment, capture_output=True, text=True, timeout=900
        )

    ran = run_it()
    if "unexpected memory mapping" in ran.stderr:  # addresses are more random than it can bear
        ran = run_it("setarch", os.uname().machine, "-R")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("CHECK(kl_alloc_n_blocks() == 7);", "not true: kl_alloc_n_blocks() == 7"),
        ("CHECK(kl_alloc_zeroed(1, 8) != NULL);", "LeakSanitizer: detected memory leaks"),
        ("char *p = kl_alloc_zeroed(1, 8); kl_alloc_free(p); *p = 1;", "heap-use-after-free"),
        ("volatile int i = INT_MAX; i = i + 1;", "signed integer overflow"),
    ],
)
def test_a_fault_is_found(body: str, words: str, core_library: Path, tmp_path: Path) -> None:
    source = tmp_path / "fault.c"
    includes = '#include <limits.h>\n#include "alloc.h"\n#include "check.h"\n'
    source.write_text(includes + f"int main(void) {{ {body} return check_result(); }}\n")
    result = run(source, core_library, tmp_path)
    assert result.returncode != 0
    assert words in result.stderr
