# SPDX-License-Identifier: Apache-2.0
"""The module koila._core: loaded once, with a signature and a text for each function."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

import koila
from binding_kit import batch, in_a_child, pending
from koila import _core
from koila.patches import install
from koila.recording import functions

core: Any = _core
FUNCTIONS = {name: entry for name, entry in vars(_core).items() if inspect.isbuiltin(entry)}


def python(script: str) -> str:
    """What a script of its own writes; what it raises is raised."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_a_signature_and_a_text(name: str) -> None:
    signature = inspect.signature(FUNCTIONS[name])
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_ONLY}
    text = FUNCTIONS[name].__doc__
    assert text and text[0] != " " and text.rstrip().endswith((".", "dict"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_as_many_arguments_as_they_say(name: str) -> None:
    """One more is a TypeError, and changes nothing."""
    many = [object()] * (len(inspect.signature(FUNCTIONS[name]).parameters) + 1)
    lazy = pending()
    with pytest.raises(TypeError):
        FUNCTIONS[name](*many)
    assert lazy.tolist() == (batch() * 2).tolist()


def test_what_is_in_it() -> None:
    names = {name for name in vars(_core) if not name.startswith("__")}
    assert names == {*FUNCTIONS, "LazyTensor"}
    assert core.LazyTensor is type(koila.lazy(batch()))


def test_it_is_imported_as_often_as_one_likes() -> None:
    again = importlib.import_module("koila._core")
    assert again is _core
    kept = pending()
    assert importlib.reload(_core) is _core
    assert kept.tolist() == (batch() * 2).tolist()
    assert type(pending()) is type(kept)


def test_it_cannot_live_twice() -> None:
    """A second module would have classes of its own, and the first's lazies would be nobody's."""

    def work() -> None:
        kept = pending()
        del sys.modules["koila._core"]
        for _ in range(2):
            with pytest.raises(ImportError, match="cannot live twice in a process"):
                importlib.import_module("koila._core")
        assert kept.tolist() == (batch() * 2).tolist()
        assert pending().tolist() == (batch() * 2).tolist()

    in_a_child(work)


def test_it_can_be_the_first_import() -> None:
    """Before torch and before koila's own files; and koila twice installs its patches once."""
    said = python(
        "import koila._core, torch, koila, importlib\n"
        "once = torch.tensor\n"
        "importlib.reload(koila)\n"
        "assert torch.tensor is once\n"
        "x = koila.lazy(torch.ones(2, 2))\n"
        "print((x * 2).sum().item(), torch.tensor(x).sum().item())\n"
    )
    assert said == "8.0 4.0\n"


def test_without_torch_it_says_so() -> None:
    said = python(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('koila._core', {_core.__file__!r})\n"
        "try:\n"
        "    importlib.util.module_from_spec(spec)\n"
        "    spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert "torch" in said


def test_numpy_is_not_needed() -> None:
    said = python(
        "import sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "sys.modules['numpy'] = None\n"
        "import torch, koila\n"
        "print((koila.lazy(torch.ones(4, 2)) * 2).sum().item())\n"
    )
    assert said == "16.0\n"


def test_what_is_bound_must_be_complete() -> None:
    with pytest.raises(TypeError):
        core.bind(1, 2, 3)
    with pytest.raises(TypeError):
        core.bind(*[None] * 13, ["no", "tuple"], 0)
    assert pending().tolist() == (batch() * 2).tolist()


def test_patches_come_off_and_on_again() -> None:
    """All that is patched is torch's own again, and lazies are right both ways."""

    def work() -> None:
        patched = torch.tensor, torch.no_grad.__exit__, torch.nn.TransformerEncoder.forward
        install.uninstall()
        plain = torch.tensor, torch.no_grad.__exit__, torch.nn.TransformerEncoder.forward
        assert not any(one is other for one, other in zip(patched, plain, strict=True))
        assert pending().tolist() == (batch() * 2).tolist()
        install.install()
        assert torch.as_tensor(pending()).tolist() == (batch() * 2).tolist()

    in_a_child(work)


def test_a_bias_is_added_to_a_copy_where_bfloat16_is_emulated() -> None:
    """By a transposed convolution: so it takes its result once more."""
    half = torch.bfloat16
    real = tuple(functions._blocked_halves()), tuple(functions._tiled_halves())
    x, weight = torch.zeros(4, 64, 8, 8, dtype=half), torch.zeros(64, 16, 4, 4, dtype=half)
    taken = []
    try:
        for emulated in ((), (half,)):
            _core.set_blocks(16, (half,), (), emulated)
            given = x, weight, torch.zeros(16, dtype=half), 2, 1
            taken.append(core.infer("conv_transpose2d", given, {})["saves"]["bytes_workspace"])
    finally:
        _core.set_blocks(functions._block_width(), *real, functions._emulated_halves())
    assert taken[1] - taken[0] == 4 * 16 * 16 * 16 * half.itemsize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_convolutions_go_by_blocks_or_by_patches(dtype: torch.dtype) -> None:
    """What a kernel takes beside its result depends on the CPU; that of patches is float64's."""
    real = tuple(functions._blocked_halves()), tuple(functions._tiled_halves())
    real = *real, functions._emulated_halves()

    def taken(dtype: torch.dtype, *blocked: torch.dtype, is_tiled: bool = False) -> tuple[int, int]:
        """Bytes for all rows, and for one whatever the number of rows."""
        _core.set_blocks(16, blocked, blocked if is_tiled else (), ())
        x, weight = torch.zeros(4, 8, 16, 16, dtype=dtype), torch.zeros(8, 8, 3, 3, dtype=dtype)
        saves = core.infer("conv2d", (x, weight), {})["saves"]
        return saves["bytes_workspace"], saves["bytes_row"]

    try:
        install = taken(dtype)
        assert install == (4 * 14 * 14 * 72 * 2, 0)
        assert taken(torch.float64) == (4 * install[0], 0)
        in_blocks, in_tiles = taken(dtype, dtype), taken(dtype, dtype, is_tiled=True)
        assert in_blocks[1] == 0 < in_tiles[1]
        assert max(in_blocks[0], in_tiles[0]) < install[0]
    finally:
        _core.set_blocks(functions._block_width(), *real)
