# SPDX-License-Identifier: Apache-2.0
"""The extension: it is there, exports one symbol, and a sanitized run is really sanitized."""

import importlib.util
import subprocess

import pytest


def extension_path() -> str:
    spec = importlib.util.find_spec("koila._core")
    assert spec is not None and spec.origin is not None, "not built: run `make build`"
    return spec.origin


def symbols(*options: str) -> set[str]:
    command = ["nm", "--dynamic", "--format=just-symbols", *options, extension_path()]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split("@")[0] for line in listing.split()}


def test_only_the_init_function_is_exported() -> None:
    assert symbols("--defined-only") == {"PyInit__core"}


@pytest.mark.sanitize
def test_sanitizers_are_linked_exactly_in_a_sanitized_run(is_sanitized: bool) -> None:
    undefined = symbols("--undefined-only")
    assert ("__asan_init" in undefined) == is_sanitized
    assert any(name.startswith("__ubsan_handle") for name in undefined) == is_sanitized
