# SPDX-License-Identifier: Apache-2.0
"""The core is plain C11: it compiles without Python, without a warning and past -fanalyzer."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CORE = Path(__file__).parent.parent / "koila_c" / "core"
SOURCES = sorted(CORE.glob("*.c"))
FLAGS = [
    "-std=c11",
    "-O2",
    "-UNDEBUG",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wconversion",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-Wmissing-prototypes",
    "-Wvla",
    "-Wwrite-strings",
    "-Wcast-qual",
    "-Werror",
    f"-I{CORE}",
]


def complaints(source: Path, compiler: str, *flags: str) -> str:
    # Folders that the environment adds to the include path could hold Python.
    environment = {name: os.environ[name] for name in os.environ if not name.endswith("PATH")}
    environment["PATH"] = os.environ["PATH"]
    command = [compiler, *FLAGS, *flags, "-c", source, "-o", os.devnull]
    return subprocess.run(command, env=environment, capture_output=True, text=True).stderr


def analysis(source: Path) -> str:
    # Optimised first, a faulty call may be gone before the analyzer looks.
    return complaints(source, "gcc", "-O0", "-fanalyzer")


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_compiles_alone(source: Path) -> None:
    assert complaints(source, "gcc") == ""


@pytest.mark.skipif(shutil.which("clang") is None, reason="there is no clang on this machine")
def test_clang_agrees() -> None:
    assert "".join(complaints(source, "clang") for source in SOURCES) == ""


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_analyzer_is_content(source: Path) -> None:
    assert analysis(source) == ""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("#include <Python.h>\n", "Python.h"),
        ("int f(long n);\nint f(long n) { return n; }\n", "conversion"),
        (
            "#include <stdlib.h>\nvoid f(int *p);\nvoid f(int *p) { free(p); free(p); }\n",
            "double-free",
        ),
    ],
)
def test_a_fault_is_found(code: str, words: str, tmp_path: Path) -> None:
    source = tmp_path / "fault.c"
    source.write_text(code)
    assert words in analysis(source)
