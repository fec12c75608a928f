"""Random numbers of a program in chunks: one grid for every run, one generator state for each draw.

The first run of a program pins the grid of its random calls. Their draws are then set up in program
order, call by call over all chunks, before anything runs: where the kernel draws in order, a
program in chunks draws eager's own numbers and leaves eager's generator state. Each later run of a
chunk puts the state back first, and so sees the same numbers; a live run too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from koila import _core, rows
from koila.rows import Bounds

if TYPE_CHECKING:
    from koila.replay import Replay

Cell = tuple[int, int | None]

# Taken before they are patched: for all others, what waits is drawn before the generator answers.
_get_state = torch._C.Generator.get_state
_set_state = torch._C.Generator.set_state


def state() -> torch.Tensor:
    """Where the default generator is now."""
    return _get_state(torch.default_generator)


def set_state(wanted: torch.Tensor) -> None:
    _set_state(torch.default_generator, wanted)


def pinned_grids() -> dict[int, list[Bounds]]:
    """The grids that earlier runs of this program drew with."""
    memo = _core.memo()
    return dict(memo.get("grids", {})) if memo.get("cells") else {}


def note_recorded() -> None:
    """A random call was recorded and none was pending: remember where the generator is."""
    _core.memo()["recorded_state"] = state()


def check_undisturbed() -> None:
    """Warn where something else drew between the record of a random call and its run."""
    before = _core.memo().pop("recorded_state", None)
    if before is not None and not torch.equal(before, state()):
        warnings.warn(
            "koila: random numbers were drawn between a recorded random call and its run "
            f"({user_line()}); the program's own draws come later than eager's and differ from "
            "them",
            stacklevel=2,
        )


def user_line() -> str:
    """The innermost line of the stack that is neither koila's nor torch's: "model.py:40"."""
    inside = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown line"


def _call(_: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _as_it_is(tensor: torch.Tensor, _: int) -> torch.Tensor:
    return tensor


def _run_alone(
    i: int, n_rows: int, given: dict[int, torch.Tensor], n_values: int, is_grad_off: bool
) -> list[Any]:
    """Run one call on the tensors given for its inputs; all values after it, by number."""
    env: list[Any] = [None] * n_values
    for value, tensor in given.items():
        env[value] = tensor
    import_of = {i: (0,) * len(_core.node(i)[5])}  # not looked at: env has all inputs
    _core.run([i], [()], env, [], import_of, n_rows, is_grad_off, _call, _as_it_is)
    return env


def draw_again(
    i: int,
    axis: int,
    inputs: list[tuple[int, rows.Place | None, torch.Tensor]],
    first_out: int,
    n_outs: int,
    is_written: bool,
    n_values: int,
) -> Any:
    """Run a call live that drew in chunks before: its numbers may be known, and must stay theirs.

    Returns:
        What the call returns.
    """
    memo = _core.memo()
    cells: dict[Cell, torch.Tensor] = memo["cells"]
    before = state()
    outs = range(first_out, first_out + n_outs)

    def run(chunk: int | None, n_rows: int, given: dict[int, torch.Tensor]) -> list[Any]:
        set_state(cells[i, chunk])
        env = _run_alone(i, n_rows, given, n_values, False)
        return [env[out] for out in outs]

    try:
        if (i, None) in cells:
            results = run(None, -1, {value: tensor for value, _, tensor in inputs})
            return results[0] if is_written or n_outs == 1 else tuple(results)
        bounds: list[Bounds] = memo["grids"][axis]
        parts = [
            run(chunk, one[1] - one[0], _cut_inputs(inputs, bounds, one, is_written))
            for chunk, one in enumerate(bounds)
        ]
    finally:
        set_state(before)
    results = [_gather([part[k] for part in parts], out) for k, out in enumerate(outs)]
    if is_written:
        return inputs[0][2].copy_(results[0])
    return results[0] if n_outs == 1 else tuple(results)


def _cut_inputs(
    inputs: list[tuple[int, rows.Place | None, torch.Tensor]],
    bounds: list[Bounds],
    one: Bounds,
    is_written: bool,
) -> dict[int, torch.Tensor]:
    found = {
        value: tensor if place is None else rows.cut(tensor, place, bounds[-1][1], one)
        for value, place, tensor in inputs
    }
    if is_written:
        found[inputs[0][0]] = found[inputs[0][0]].clone()
    return found


def _gather(parts: list[torch.Tensor], value: int) -> torch.Tensor:
    place = _core.value(value)[3]
    if place is None:
        return parts[0]
    return rows.in_order_of(rows.gather(parts, place), parts[0])


class Draws:
    """The generator states of one program, kept with the program."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.before = state()
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
        self.after = state()

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
            self.cells[cell] = state()
            self.new_cells.append(cell)
            self._advance(i, run, chunk)

    def _advance(self, i: int, run: Any, chunk: int) -> None:
        """Let one call draw, on stand-ins: a row is RANDOM only where no value decides how much it
        draws. Ones, for they are legal as weights, as probabilities and as deviations."""
        program = self.replay.program
        node = program.nodes[i]
        stand_ins: dict[int, torch.Tensor] = {}
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
            stand_ins[entry.value] = torch.ones(shape, dtype=info.dtype)
        _run_alone(i, n_rows, stand_ins, len(program.values), True)

    def restore(self, i: int, chunk: int | None) -> None:
        """Put the generator where it was before this call drew for this chunk."""
        set_state(self.cells[i, chunk])

    def commit(self) -> None:
        """Leave the generator as the last draw of the program left it."""
        if self.after is not None and self.new_cells:
            set_state(self.after)
        else:
            set_state(self.before)
        for i, _ in self.new_cells:
            _core.note_drawn(i)
        if self.cells:
            _core.memo()["grids"] = dict(self.replay.grids)

    def roll_back(self) -> None:
        for cell in self.new_cells:
            self.cells.pop(cell, None)
        set_state(self.before)
