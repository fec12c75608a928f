"""Random numbers of a program in chunks: one grid for every run, one generator state for each draw.

The first run of a program pins the grid of its random calls. Their draws are then set up in
program order,
call by call over all chunks, before anything runs: where the kernel draws in order, a program
in chunks
draws eager's own numbers and leaves eager's generator state. Each later run of a chunk puts the
state
back first, and so sees the same numbers.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from koila import _core, rows
from koila.rows import Bounds

if TYPE_CHECKING:
    from koila.replay import Replay

Cell = tuple[int, int | None]


def pinned_grids() -> dict[int, list[Bounds]]:
    """The grids that earlier runs of this program drew with."""
    memo = _core.memo()
    return dict(memo.get("grids", {})) if memo.get("cells") else {}


def note_recorded() -> None:
    """A random call was recorded and none was pending: remember where the generator is."""
    _core.memo()["recorded_state"] = torch.get_rng_state()


def check_undisturbed() -> None:
    """Warn where something else drew between the record of a random call and its run."""
    state = _core.memo().pop("recorded_state", None)
    if state is not None and not torch.equal(state, torch.get_rng_state()):
        warnings.warn(
            "koila: random numbers were drawn, or the generator was set, between a recorded "
            f"random call and its run ({user_line()}); the program's own draws come later than "
            "eager's and "
            "differ from them",
            stacklevel=2,
        )


def user_line() -> str:
    """The innermost line of the stack that is neither koila's nor torch's: "model.py:40"."""
    inside = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown line"


def _never_cut(tensor: torch.Tensor, number: int) -> torch.Tensor:
    raise AssertionError("a random call alone cuts nothing that was made in its run")


class Draws:
    """The generator states of one program, kept with the program."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.before = torch.get_rng_state()
        self.cells: dict[Cell, torch.Tensor] = _core.memo().setdefault("cells", {})
        self.new_cells: list[Cell] = []
        self.after: torch.Tensor | None = None

    def prepare(self) -> None:
        """Draw for every call that has not drawn yet, keeping the state before each draw."""
        check_undisturbed()
        for run in self.replay.program.runs:
            run_nodes = [i for i in run.nodes if self.replay.program.nodes[i].is_random]
            for i in run_nodes:
                self._runs[i] = run
        for i in sorted(self._runs):
            self._draw(i)
        self.after = torch.get_rng_state()

    @property
    def _runs(self) -> dict[int, Any]:
        if not hasattr(self, "_run_of"):
            self._run_of: dict[int, Any] = {}
        return self._run_of

    def _draw(self, i: int) -> None:
        run = self._runs[i]
        n_chunks = len(self.replay.grids[run.axis]) if run.is_body else 1
        for chunk in range(n_chunks):
            cell = (i, chunk if run.is_body else None)
            if cell in self.cells:
                continue
            self.cells[cell] = torch.get_rng_state()
            self.new_cells.append(cell)
            self._advance(i, run, chunk)

    def _advance(self, i: int, run: Any, chunk: int) -> None:
        """Let one call draw, on stand-ins: only sizes and types matter."""
        program = self.replay.program
        node = program.nodes[i]
        env: list[Any] = [None] * len(program.values)
        imports: list[Any] = [None] * len(program.imports)
        n_rows = -1
        if run.is_body:
            start, stop = self.replay.grids[run.axis][chunk]
            n_rows = stop - start
        for number in node.imports:
            if number < 0:
                continue
            entry = program.imports[number]
            info = program.info(entry.value)
            shape = info.shape
            if run.is_body and entry.place is not None:
                shape = rows.chunk_shape(shape, entry.place, n_rows)
            imports[number] = torch.zeros(shape, dtype=info.dtype)

        def run_other(_: int, func: Any, args: Any, kwargs: Any) -> Any:
            return func(*args, **kwargs)

        _core.run([i], [()], env, imports, program.import_of, n_rows, True, run_other, _never_cut)

    def restore(self, i: int, chunk: int | None) -> None:
        """Put the generator where it was before this call drew for this chunk."""
        torch.set_rng_state(self.cells[i, chunk])

    def commit(self) -> None:
        """Leave the generator as the last draw of the program left it."""
        if self.after is not None and self.new_cells:
            torch.set_rng_state(self.after)
        else:
            torch.set_rng_state(self.before)
        if self.cells:
            _core.memo()["grids"] = dict(self.replay.grids)

    def roll_back(self) -> None:
        for cell in self.new_cells:
            self.cells.pop(cell, None)
        torch.set_rng_state(self.before)
