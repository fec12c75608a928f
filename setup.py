# SPDX-License-Identifier: Apache-2.0
"""Build koila._core; all else is in pyproject.toml. Needs a C compiler and setuptools, never torch.

KOILA_DEV=1       warnings are errors, asserts are on, and _core has what only tests call
KOILA_SANITIZE=1  AddressSanitizer and UndefinedBehaviorSanitizer, asserts and what only tests call
KOILA_COVERAGE=1  gcov counters, and what only tests call
"""

import os
import shlex
import subprocess
import sysconfig
import tempfile
from glob import glob

from setuptools import Extension, setup

compile_args = ["-std=c11", "-fvisibility=hidden", "-O3"]
link_args: list[str] = []


def can_link_with_flto() -> bool:
    """Whether the compiler links what it compiles with -flto: some installations of gcc lack the
    program for it, and clang needs a linker that fits it. Tried on a function of one line.
    """
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    with tempfile.TemporaryDirectory() as folder:
        source, compiled = os.path.join(folder, "one.c"), os.path.join(folder, "one.o")
        with open(source, "w") as file:
            file.write("int one(void);\nint one(void) { return 1; }\n")
        flags = ["-fPIC", "-flto=auto"]
        commands = [
            [*shlex.split(compiler), *flags, "-c", source, "-o", compiled],
            [*shlex.split(compiler), *flags, "-shared", compiled, "-o", compiled + ".so"],
        ]
        try:
            for command in commands:
                subprocess.run(command, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return False
    return True


# A call is recorded by many small functions in several files: together they cost a tenth less.
is_instrumented = "1" in (os.environ.get("KOILA_SANITIZE"), os.environ.get("KOILA_COVERAGE"))
if not is_instrumented and can_link_with_flto():
    compile_args += ["-flto=auto"]
    link_args += ["-flto=auto", "-O3"]

if os.environ.get("KOILA_DEV") == "1":
    compile_args += [
        "-Wall",
        "-Wextra",
        "-Wshadow",
        "-Wstrict-prototypes",
        "-Wmissing-prototypes",
        "-Wvla",
        "-Wwrite-strings",
        "-Wconversion",
        "-Wcast-qual",
        "-Werror",
        "-UNDEBUG",
    ]

if os.environ.get("KOILA_SANITIZE") == "1":
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    # Python's own flags hold -fwrapv, which would hide signed overflow.
    compile_args += [*sanitizers, "-fno-wrapv", "-fno-omit-frame-pointer", "-O1", "-g", "-UNDEBUG"]
    link_args += sanitizers

if os.environ.get("KOILA_COVERAGE") == "1":
    compile_args += ["--coverage", "-O0"]
    link_args += ["--coverage"]

folders = ["koila_c/core", "koila_c/binding"]
macros: list[tuple[str, str | None]] = []
if is_instrumented or os.environ.get("KOILA_DEV") == "1":
    folders.append("tests/binding")  # what only tests call
    macros.append(("KL_TESTS", None))

core = Extension(
    "koila._core",
    sources=sorted(path for folder in folders for path in glob(f"{folder}/*.c")),
    # Without these, editing a header or a row of ops.def rebuilds nothing.
    depends=sorted(glob("koila_c/*/*.h") + glob("koila_c/*/*.def") + glob("tests/binding/*.h")),
    include_dirs=folders,
    define_macros=macros,
    libraries=["dl", "m", "pthread"],
    extra_compile_args=compile_args,
    extra_link_args=link_args,
)

setup(ext_modules=[core])
