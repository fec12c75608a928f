# SPDX-License-Identifier: Apache-2.0
"""Libraries that train in several processes: five steps in three chunks equal the library's own, in
less memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo import libraries  # noqa: F401 - the libraries can be imported

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
SCRIPT = str(Path(__file__).with_name("in_processes.py"))
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [
    "accelerate.commands.launch",
    *("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
]
KOILA = ["-m", "koila", "--chunks", "3"]
Made = dict[str, dict[tuple[str, str], dict[str, torch.Tensor]]]


def launch(folder: Path, *words: str) -> str:
    """What a launcher and its processes say."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", *words],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr[-8000:]
    return ended.stderr


def made(folder: Path, mode: str) -> Made:
    return {path.suffixes[0]: torch.load(path) for path in folder.glob(f"{mode}.*.pt")}


def assert_equal(got: Made, want: Made) -> None:
    assert got.keys() == want.keys() == {".0", ".1"}
    for rank, of_libraries in got.items():
        for case, found in of_libraries.items():
            wanted: Any = dict(want[rank][case])
            assert found.keys() == wanted.keys()
            assert found.pop("peak") < 0.6 * wanted.pop("peak")
            for name, value in wanted.items():
                torch.testing.assert_close(
                    found[name], value, rtol=1e-9, atol=1e-11, msg=f"{case} {name}"
                )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the numbers of the libraries alone, and of those with koila in the script."""
    folder = tmp_path_factory.mktemp("processes")
    launch(folder, *TORCHRUN, SCRIPT, str(folder), "trainer,accelerate", "plain", "lazy")
    return folder


def test_callback_and_loaders(plain: Path) -> None:
    """The script asserts that the reports are of training steps, in three chunks."""
    assert_equal(made(plain, "lazy"), made(plain, "plain"))


@pytest.mark.parametrize(
    ("library", "launcher"), [("trainer", TORCHRUN), ("accelerate", ACCELERATE)]
)
def test_launcher(library: str, launcher: list[str], plain: Path, tmp_path: Path) -> None:
    """Nothing in the script is changed. The first process says what it did."""
    said = launch(tmp_path, *launcher, *KOILA, SCRIPT, str(tmp_path), library, "launched")
    assert len(re.findall("passes ran in chunks, in 3 chunks at most", said)) == 1
    of_library = {
        rank: {case: found for case, found in of_rank.items() if case[0] == library}
        for rank, of_rank in made(plain, "plain").items()
    }
    assert_equal(made(tmp_path, "launched"), of_library)
