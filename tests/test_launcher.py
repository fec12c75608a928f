# SPDX-License-Identifier: Apache-2.0
"""python -m koila: a script as it is, with lazy batches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import koila
from koila.__main__ import main
from koila.reporting.report_types import ProgramReport, Stage
from koila.summary import Summary

PYTHON = Path(__file__).parent.parent / "python"

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

assert __name__ == "__main__"
torch.manual_seed(0)
data = TensorDataset(torch.randn(600, 64), torch.randint(4, (600,)))
model = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for x, y in DataLoader(data, batch_size=256, shuffle=True):
    x = x.to("cpu")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
print(sys.argv, f"{loss.item():.4f}", f"{sum(p.double().sum() for p in model.parameters()):.3f}")
if sys.argv[1:] == ["fail"]:
    def fail():
        raise ValueError("no")
    fail()
if sys.argv[1:2] == ["exit"]:
    sys.exit(int(sys.argv[2]))
"""


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(PYTHON), str(folder)])
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script prints without koila, with the arguments `--lr 3`."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "train.py").write_text(SCRIPT)
    ran = run(folder, "train.py", "--lr", "3")
    assert ran.returncode == 0
    return ran.stdout


@pytest.fixture
def refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Returns what is said of words that are refused: a process of its own would not say more,
    since no script has run."""
    monkeypatch.chdir(folder)

    def refuse(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(list(words))
        said = capsys.readouterr()
        assert (end.value.code, said.out) == (2, "")
        return said.err

    return refuse


def test_a_script_is_the_same(folder: Path, plain: str) -> None:
    """In chunks, with its arguments, and as a module; and what was done is told."""
    ran = run(folder, "-m", "koila", "--chunks", "4", "--report", "r.json", "train.py", "--lr", "3")
    assert ran.stdout == plain
    assert ran.returncode == 0, ran.stderr
    lines = ran.stderr.splitlines()
    assert "koila: 3 batches of data loaders, 3 optimizer steps" in lines
    assert any(
        re.fullmatch(r"koila: 3 of \d passes ran in chunks, in 4 chunks .*", line) for line in lines
    )
    assert len(lines) <= 10
    told = json.loads((folder / "r.json").read_text())
    assert (told["batches"], told["steps"], told["most_chunks"]) == (3, 3, 4)
    assert told["bytes_predicted"] is None
    assert any("so no memory was predicted" in ran for ran in told["last_programs"])
    module = run(folder, "-m", "koila", "--chunks", "4", "-m", "train", "--lr", "3")
    assert module.stdout == run(folder, "-m", "train", "--lr", "3").stdout
    assert "in 4 chunks at most" in module.stderr


def test_a_limit(folder: Path) -> None:
    """As an option, and in the environment, also without the launcher."""
    ran = run(folder, "-m", "koila", "--memory-limit", "2MiB", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert "passes ran in chunks" in ran.stderr
    wanted = run(folder, "train.py").stdout
    found = re.search(r"the limit is 2.0 MiB, the least that works is ([\d.]+) (\w+)", ran.stderr)
    assert found is not None, ran.stderr
    least = run(folder, "-m", "koila", "--memory-limit", f"{found[1]}{found[2]}", "train.py")
    assert least.returncode == 0, least.stderr
    assert (ran.stdout, least.stdout) == (wanted, wanted)
    known = run(folder, "-m", "koila", "train.py", KOILA_MEMORY_LIMIT="2MiB")
    assert "the limit is 2.0 MiB" in known.stderr
    wrong = run(folder, "-c", "import koila", KOILA_MEMORY_LIMIT="much")
    assert "KOILA_MEMORY_LIMIT='much'" in wrong.stderr
    assert "is no size" in wrong.stderr
    launched = run(folder, "-m", "koila", "train.py", KOILA_MEMORY_LIMIT="12 gigs")
    assert launched.returncode == 1
    (line,) = launched.stderr.splitlines()
    assert line == (
        "python -m koila: error: KOILA_MEMORY_LIMIT='12 gigs': it is no size; write for example "
        '"512MiB", "4G" or "80%"'
    )


def test_how_it_ends(folder: Path, refused: Callable[..., str]) -> None:
    """With the script's own status, and of an error the script's own lines."""
    ended = run(folder, "-m", "koila", "train.py", "exit", "3")
    assert ended.returncode == 3
    assert "koila: 3 batches" in ended.stderr
    failed = run(folder, "-m", "koila", "train.py", "fail")
    assert failed.returncode == 1
    files = re.findall(r'File "([^"]+)", line', failed.stderr)
    assert files == ["train.py", "train.py"]
    assert "ValueError: no" in failed.stderr
    asked = run(folder, "-m", "koila", "missing.py")
    assert asked.returncode == 2
    assert "python -m koila: error:" in asked.stderr
    for words in ([], ["--chunks", "2", "--memory-limit", "1G", "train.py"], ["missing.py"]):
        assert "python -m koila: error:" in refused(*words)


@pytest.mark.parametrize(
    "lines",
    [
        "raise ValueError('no')",
        "next(iter(DataLoader(torch.ones(4, 2))))\nraise ValueError('no')",
        "import argparse; argparse.ArgumentParser().parse_args(['--no'])",
    ],
)
def test_a_script_that_ends_with_an_error_before_anything_ran(folder: Path, lines: str) -> None:
    """Then what to change in it is not said: nothing is known of it."""
    start = "import torch\nfrom torch.utils.data import DataLoader\n"
    (folder / "other.py").write_text(start + lines)
    ran = run(folder, "-m", "koila", "other.py")
    assert ran.returncode == (2 if "argparse" in lines else 1)
    (said,) = [line for line in ran.stderr.splitlines() if line.startswith("koila: ")]
    assert said.endswith("before the error")
    assert "koila.lazy(" not in ran.stderr


@pytest.mark.parametrize("option", ["--memory-limit", "--chunks", "--report", "-m"])
def test_an_option_without_its_value(
    folder: Path, refused: Callable[..., str], option: str
) -> None:
    """The script's name is not taken for the value, and what to write is said."""
    following = [[], ["--progress", "train.py"]] + ([] if option == "-m" else [["train.py"]])
    for words in following:
        said = refused(option, *words).splitlines()[-1]
        found = f"'{words[0]}' stands where it should" if words else "nothing follows it"
        example = f"write for example python -m koila {option} "
        assert f"error: {option} takes a value, and {found}: {example}" in said
    assert (folder / "train.py").read_text() == SCRIPT


def test_a_report_is_not_lost_for_want_of_a_folder(refused: Callable[..., str]) -> None:
    """It is said before the script runs."""
    said = refused("--report", "no/r.json", "train.py")
    assert "error: --report no/r.json: there is no folder 'no'" in said


@pytest.mark.parametrize("name", ["nothere", "no.there", "json.nothere", "xml"])
def test_a_module_that_is_not_there(folder: Path, name: str) -> None:
    """Python's own message and status."""
    plain, ran = run(folder, "-m", name), run(folder, "-m", "koila", "-m", name)
    assert (ran.returncode, ran.stderr) == (plain.returncode, plain.stderr) and plain.stderr


def test_a_module_that_imports_one_that_is_not_there(folder: Path) -> None:
    (folder / "broken.py").write_text("import nothere")
    broken = run(folder, "-m", "koila", "-m", "broken")
    assert broken.returncode == 1 and 'broken.py", line 1' in broken.stderr


def test_after_a_refusal_the_least_limit_is_that_of_the_refused(folder: Path) -> None:
    """The step that ran before, without the optimizer's state, needed less."""
    script = SCRIPT.replace(
        "SGD(model.parameters(), 0.1, momentum=0.9)", "Adam(model.parameters())"
    )
    (folder / "adam.py").write_text(script)
    ran = run(folder, "-m", "koila", "--memory-limit", "1.4MiB", "adam.py")
    assert ran.returncode == 1
    refused = re.search(r"MemoryLimitError: at least ([\d.]+ MiB) are needed", ran.stderr)
    told = re.search(r"the least that works is ([\d.]+ MiB)", ran.stderr)
    assert refused is not None and told is not None, ran.stderr
    assert told[1] == refused[1]
    assert "koila: 1 pass failed" in ran.stderr
    again = run(folder, "-m", "koila", "--memory-limit", told[1].replace(" ", ""), "adam.py")
    assert again.returncode == 0, again.stderr


def test_a_refusal_names_what_set_the_limit(folder: Path) -> None:
    """And what it says to write there works."""
    for words, variables, told in (
        (("--memory-limit", "1MiB"), {}, r"set (--memory-limit) (\S+)"),
        ((), {"KOILA_MEMORY_LIMIT": "1MiB"}, r"set (KOILA_MEMORY_LIMIT)=(\S+)"),
    ):
        ran = run(folder, "-m", "koila", *words, "train.py", **variables)
        found = re.search(f"needed and (.*) is 1.0+ MiB: {told}", ran.stderr)
        assert ran.returncode == 1 and found is not None, ran.stderr
        assert found[1] == found[2]
        again = run(folder, "-m", "koila", "train.py", KOILA_MEMORY_LIMIT=found[3])
        assert again.returncode == 0, again.stderr


def test_chunks_that_were_asked_for_and_not_made_are_told_why() -> None:
    summary = Summary()
    why = "in the chunks that were asked for it would take more"
    summary.note_program(ProgramReport("item()", "train.py:1", n_calls=1, n_bytes=4, why="it fits"))
    summary.note_program(ProgramReport("backward()", "train.py:2", n_calls=2, n_bytes=64, why=why))
    with koila.config(chunks=3):
        assert f"everything ran whole, as without koila ({why})" in summary.lines()


def test_the_least_limit_is_no_more_than_one_that_was_enough() -> None:
    summary = Summary()
    summary.note_program(ProgramReport("backward()", "t.py:1", n_calls=2, least_limit=2.0**21))
    with koila.config(memory_limit=2**20):
        assert "the limit is 1.0 MiB, the least that works is 1.0 MiB" in "".join(summary.lines())
        summary.note_program(ProgramReport("backward()", "t.py:1", n_chunks=0, why="too large"))
        assert "the limit is 1.0 MiB, the least that works is 2.0 MiB" in "".join(summary.lines())


def test_the_versions(folder: Path) -> None:
    done = run(folder, "-m", "koila", "--version", "train.py")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == f"koila {koila.__version__}, torch {torch.__version__}\n"


def test_a_bar_for_progress_takes_no_word(folder: Path, plain: str) -> None:
    """What follows is the script, with its own arguments."""
    ran = run(folder, "-m", "koila", "--chunks=2", "--progress", "train.py", "--lr", "3")
    assert ran.stdout == plain
    assert "in 2 chunks at most" in ran.stderr


def test_a_number_that_is_read_whole_is_no_pass_in_chunks() -> None:
    """Though it has parts, as what was read of a mask has."""
    summary = Summary()
    parts = (Stage(1, 2, 1, 64, "1 forward"),)
    summary.note_program(ProgramReport("bool()", "train.py:1", n_calls=2, stages=parts))
    assert "everything fitted into memory and ran whole, as without koila" in summary.lines()
    summary.note_program(
        ProgramReport("item()", "train.py:2", n_calls=2, n_chunks=2, n_rows=32, stages=parts)
    )
    assert "1 of 2 passes ran in chunks, in 2 chunks at most" in summary.lines()


def test_what_failed_has_not_fitted() -> None:
    summary = Summary()
    summary.note_program(ProgramReport("backward()", "train.py:1", n_calls=2))
    summary.note_program(ProgramReport("backward()", "train.py:1", n_chunks=0, why="too large"))
    failed, fitted = summary.lines()[1:3]
    assert failed == "1 pass failed; see the errors above"
    assert fitted == "everything else fitted into memory and ran whole, as without koila"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_of_several_processes_tells(folder: Path, rank: str) -> None:
    """torchrun numbers its processes: all run in chunks, and the first says so."""
    words = ("-m", "koila", "--chunks", "3", "--report", "report.json", "train.py")
    ended = run(folder, *words, RANK=rank)
    assert ended.returncode == 0
    assert ended.stdout
    assert ("koila:" in ended.stderr) == (folder / "report.json").exists() == (rank == "0")


def test_a_script_without_a_loader_is_told_so(folder: Path) -> None:
    (folder / "other.py").write_text("import torch; print(torch.ones(3).sum().item())")
    ran = run(folder, "-m", "koila", "other.py")
    assert ran.stdout == "3.0\n"
    assert "no torch.utils.data.DataLoader handed out a batch" in ran.stderr


NOISE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Rows(Dataset):
    def __len__(self):
        return 500

    def __getitem__(self, i):
        assert type(torch.rand(250)) is torch.Tensor  # as many as the batch has, by chance
        return torch.full((6,), float(i))


torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 2000), nn.ReLU(), nn.Linear(2000, 6))
frozen = nn.Linear(6, 1)
optimizer = torch.optim.SGD(generator.parameters(), 1e-3)
for real in DataLoader(Rows(), batch_size=250):
    for noise in (
        torch.randn(250, 8),
        torch.rand(real.shape[0], 8),
        torch.normal(torch.zeros(250, 8), 1.0),
        torch.randint(3, (250,)).unsqueeze(1).expand(-1, 8) / 3,
    ):
        optimizer.zero_grad()
        loss = frozen(generator(noise)).pow(2).mean()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.5f}")
    draws = [torch.randn(7), torch.randn(250, out=torch.empty(250)), torch.empty(250).normal_()]
    draws.append(torch.randn(250, requires_grad=True))
    print([type(draw).__name__ for draw in draws])
    generator(torch.ones(3, 8)).sum().backward()
"""


def test_a_step_that_begins_with_noise(folder: Path) -> None:
    """A generator's: the noise has the rows of the batch. What else is plain is told."""
    (folder / "noise.py").write_text(NOISE)
    plain = run(folder, "noise.py")
    assert plain.returncode == 0, plain.stderr
    ran = run(folder, "-m", "koila", "--chunks", "4", "--report", "r.json", "noise.py")
    assert ran.stdout == plain.stdout, ran.stderr
    told = json.loads((folder / "r.json").read_text())
    assert (told["steps"], told["in_chunks"], told["most_chunks"]) == (8, 8, 4)
    (line,) = told["plain_backwards"]
    number = NOISE.splitlines().index("    generator(torch.ones(3, 8)).sum().backward()") + 1
    assert line.endswith(f"noise.py:{number}")
    assert told["plain_backwards"][line] == 2
    assert "whole batch: a backward (noise.py:" in ran.stderr
    assert "nothing in it is lazy" in ran.stderr
    whole = run(folder, "-m", "koila", "noise.py")
    assert whole.stdout == plain.stdout
    assert "2 times): nothing in it is lazy" in whole.stderr  # and none of the others
