"""Build koila._core from every C file of the core and the binding."""

import glob
import os

from setuptools import Extension, setup

WARNINGS = (
    "-Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wcast-qual -Werror"
).split()
SANITIZERS = "-fsanitize=address,undefined -fno-omit-frame-pointer".split()

flags = ["-std=c11", "-fvisibility=hidden"]
links = []
if os.environ.get("KOILA_DEV") == "1":
    flags += [*WARNINGS, "-UNDEBUG"]
if os.environ.get("KOILA_SANITIZE") == "1":
    flags += SANITIZERS
    links += SANITIZERS

setup(
    name="koila",
    packages=["koila"],
    package_dir={"": "python"},
    ext_modules=[
        Extension(
            "koila._core",
            sorted(glob.glob("koila_c/*/*.c")),
            depends=glob.glob("koila_c/*/*.h") + glob.glob("koila_c/*/*.def"),
            extra_compile_args=flags,
            extra_link_args=links,
        )
    ],
)
