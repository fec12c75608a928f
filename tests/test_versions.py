# SPDX-License-Identifier: Apache-2.0
"""A torch that koila was not tried with is told of once, when koila is imported."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import koila
from koila import _core
from koila.reporting import versions


def test_this_torch_is_a_tested_one(caplog: pytest.LogCaptureFixture) -> None:
    versions.note_untested(torch.__version__)
    versions.note_untested("2.13.1+cu128")
    assert caplog.messages == []


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0a0+git0123456", "3.0"])
def test_another_is_told(version: str, caplog: pytest.LogCaptureFixture) -> None:
    versions.note_untested(version)
    assert len(caplog.messages) == 1
    assert version in caplog.text and "2.13" in caplog.text


def test_it_is_told_at_import() -> None:
    code = "import torch; torch.__version__ = '2.99.0'; import koila; koila.reporting.versions"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.count("2.99.0") == 1


OLDER = """
import torch
import torch.nn.functional as F
names = "_skip_one_hop_torch_function _get_cudnn_depthwise_kernel _set_cudnn_depthwise_kernel"
for name in names.split():
    delattr(torch._C, name)
import koila
x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
def run(x):
    y = F.max_pool1d((1 - x)[:, None], 2) + F.max_pool1d(x[:, None], 2, return_indices=True)[0]
    return y.sum((1, 2)), torch.unique((x > 0).all(1)), 2 ** x
with koila.config(chunks=3):
    got = [one.clone() for one in run(koila.lazy(x))]
    assert koila.report().n_chunks == 3
assert all(map(torch.equal, got, run(x)))
"""


def test_torch_before_2_13_enters_functions_in_another_way() -> None:
    """Those that ask twice whether to dispatch, and those that close over themselves."""
    ran = subprocess.run([sys.executable, "-c", OLDER], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# Names of torch that may be gone in another -------------------------------------------------------

GONE = [
    "torch.overrides.enable_reentrant_dispatch",
    "torch._C._is_alias_of",
    "torch._C._set_grad_enabled",
    "torch._C._is_any_autocast_enabled",
    "torch.get_autocast_dtype",
    "torch._functorch.vmap._add_batch_dim",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "torch._C._create_graph_by_tracing",
    "torch._C._get_sdp_priority_order",
    "torch._C._jit_get_schemas_for_operator",
    "torch.jit._builtins._register_builtin",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
    "torch._C._FunctionBase",
    "torch._C._storage_Use_Count",
    "torch._C._current_graph_task_id",
]


@pytest.mark.parametrize("names", [GONE[i::4] for i in range(4)], ids=lambda names: names[0])
def test_a_name_that_is_gone_is_told(names: list[str]) -> None:
    """Each in a child of one process that has imported torch: its import is the slow part."""
    code = f"""
import os, sys, torch, torch.utils.checkpoint, torch._functorch.vmap, torch.nn.utils.spectral_norm
for name in {names!r}:
    owner, _, last = name.rpartition(".")
    pid = os.fork()
    if pid == 0:
        exec(f"del {{name}}")
        before = torch.tensor, torch.no_grad.__exit__
        try:
            import koila
        except RuntimeError as error:
            is_told = type(error).__name__ == "KoilaError" and last in str(error)
            is_told = is_told and "2.10" in str(error) and "2.13" in str(error)
            is_left = (torch.tensor, torch.no_grad.__exit__) == before
            print(error, file=sys.stderr)
            os._exit(0 if is_told and is_left else 1)
        print("imported without", name, file=sys.stderr)
        os._exit(2)
    if os.waitpid(pid, 0)[1] != 0:
        sys.exit(name)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_a_symbol_that_is_gone_is_told(tmp_path: Path) -> None:
    """A copy of the extension asks for a name that libtorch does not have."""
    path = tmp_path / Path(_core.__file__).name
    path.write_bytes(
        Path(_core.__file__).read_bytes().replace(b"aoti_torch_get_dim", b"aoti_torch_get_dix")
    )
    code = f"""
import importlib.util, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "koila._core":
            return importlib.util.spec_from_file_location(name, {str(path)!r})

sys.meta_path.insert(0, Finder())
try:
    import koila
except RuntimeError as error:
    assert type(error).__name__ == "KoilaError" and "aoti_torch_get_dix" in str(error), error
    assert "2.10" in str(error), error
else:
    sys.exit("imported")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_other_errors_are_as_they_are() -> None:
    with pytest.raises(AttributeError, match="nothing"), versions.explained():
        koila.nothing  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ModuleNotFoundError), versions.explained():
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401


def test_slow_ways_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "koila")
    versions.note_slow_ways({"one way": True, "another way": True})
    assert caplog.messages == []
    versions.note_slow_ways({"one way": False, "another way": True, "a third": False})
    (message,) = caplog.messages
    assert "one way; a third" in message


# What the package says of itself ------------------------------------------------------------------


def test_its_version() -> None:
    """One source: the package's; setuptools reads it from there."""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    project = tomllib.loads(text)
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "koila.__version__"
    assert koila.__version__[0].isdigit()
    try:
        installed = importlib.metadata.version("koila-c")
    except importlib.metadata.PackageNotFoundError:
        return
    assert installed == koila.__version__


def test_its_public_names() -> None:
    assert dir(koila) == sorted([*koila.__all__, "__version__"])
    for name in dir(koila):
        assert getattr(koila, name) is not None
