# SPDX-License-Identifier: Apache-2.0
"""Random numbers of a program: eager's own, in eager's order, however late it runs and in however
many chunks.

A recorded random call *waits* until the generator has moved past its draws. That is done in program
order, for all calls over all rows before anything runs, or earlier, where a plain call is about to
draw (`plain.py`). Where each call starts is kept, and where its last chunk started and ended: from
that it is found where a chunk starts, and the generator is put there before it runs. So a chunk
that runs again, in these or in other chunks, or a call that runs live later, sees the same numbers.
What cannot be drawn chunk by chunk is drawn whole and cut (`noise.py`). On CUDA each call and chunk
gets a seed of its own, drawn from the generator: reproducible, no two the same; and of what only
the call itself knows how to draw each chunk keeps a state. That *pins* the chunks: later runs of
the program have the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from koila import _core
from koila.basics import rows
from koila.basics.rows import Bounds
from koila.messages.errors import KoilaError
from koila.random import generators, noise_drawn
from koila.staged import noise
from koila.staged.noise import noises_of

if TYPE_CHECKING:
    from koila.staged.facts import Run
    from koila.staged.program import Program

Cell = tuple[int, int | None]  # a call, and the first row of a chunk; None: all rows
Spot = tuple[int, torch.Tensor]  # a row of a call, and the state in which its numbers start


def pinned_grids() -> dict[int, list[Bounds]]:
    """The grids that earlier runs of this program drew with, by axis, where others would draw other
    numbers."""
    return dict(_core.memo().get("grids", {}))


def is_pinning(i: int, first_out: int) -> bool:
    """Whether a call by rows draws other numbers in other chunks."""
    return noises_of(i, first_out) is None


def bytes_kept() -> int:
    """Bytes of the states that earlier runs of this program left."""
    cells = _core.memo().get("cells", {}).values()
    return sum(cell.nbytes for cell in cells if isinstance(cell, torch.Tensor))


def bytes_whole(i: int, first_out: int) -> int:
    """Bytes of a call's noise where it is drawn whole, and cut for the chunks; -1: each chunk keeps
    a state."""
    noises = noises_of(i, first_out)
    if noises is None:
        return -1
    return 0 if is_by_chunks(noises, [1, 1]) else sum(one.n_bytes for one in noises)


def why_others(i: int, first_out: int) -> str:
    """Why a random call draws other numbers in chunks than eager, or nothing."""
    noises = noises_of(i, first_out)
    if noises is None:
        return f"in chunks it draws other numbers than eager on {_core.value(first_out)[10]}"
    if all(map(noise.is_eagers, noises)):
        return ""
    return "in chunks it may draw other numbers than eager: how memory lies is not known"


def start_of(i: int, out: int) -> tuple[torch.Generator, torch.Tensor | None]:
    """The generator that a call draws from, which makes a value, and the state in which its numbers
    start; None: it drew in parts, each from a seed."""
    generator = generators.generator_of(_core.value(out)[10])
    memo = _core.memo()
    cells: dict[Cell, torch.Tensor | int] = memo.get("cells", {})
    known = cells.get((i, None), memo.get("starts", {}).get(i))
    if isinstance(cells.get((i, 0)), int) or isinstance(known, int):
        return generator, None
    return generator, noise.get_state(generator) if known is None else known


def run_again(
    i: int,
    axis: int,
    inputs: list[tuple[int, rows.Place | None, torch.Tensor]],
    first_out: int,
    n_outs: int,
    is_written: bool,
    n_values: int,
) -> Any:
    """Run a call live that ran in chunks before: what it drew may be known, and must stay what it
    is; what it wrote is written.

    Returns:
        What the call returns.
    """
    memo = _core.memo()
    outs = range(first_out, first_out + n_outs)
    if i in memo.get("effects", ()):  # on copies of the statistics
        env = generators.run_alone(
            i, -1, {value: tensor for value, _, tensor in inputs}, n_values, False
        )
        return env[first_out] if n_outs == 1 else tuple(env[out] for out in outs)
    cells: dict[Cell, torch.Tensor | int] = memo.get("cells", {})
    starts: dict[int, torch.Tensor] = memo.get("starts", {})
    generator = generators.generator_of(_core.value(first_out)[10])
    before = noise.get_state(generator)

    def run(cell: Any, n_rows: int, given: dict[int, torch.Tensor]) -> list[Any]:
        generators.set_to(generator, cell)
        env = generators.run_alone(i, n_rows, given, n_values, False)
        return [env[out] for out in outs]

    try:
        if not isinstance(cells.get((i, 0)), int):  # eager's own numbers, in chunks too
            cell = cells[i, None] if (i, None) in cells else starts[i]
            results = run(cell, -1, {value: tensor for value, _, tensor in inputs})
            return results[0] if is_written or n_outs == 1 else tuple(results)
        bounds: list[Bounds] = memo["grids"][axis]
        parts = [
            run(cells[i, one[0]], one[1] - one[0], _cut_inputs(inputs, bounds, one, is_written))
            for one in bounds
        ]
    finally:
        noise.set_state(generator, before)
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
    """The draws of one program, kept with the program."""

    def __init__(self, program: Program, grids: dict[int, list[Bounds]]) -> None:
        self.program = program
        self.grids = grids
        self.before: dict[torch.device, torch.Tensor] = {}
        self.after: dict[torch.device, torch.Tensor] = {}
        memo = _core.memo()
        self.starts: dict[int, torch.Tensor] = memo.setdefault("starts", {})
        #: Of the last run that was committed; `cells` are of this one.
        self.old_cells: dict[Cell, torch.Tensor | int] = memo.get("cells", {})
        #: A seed, or a state, where it is not found from where the call starts.
        self.cells: dict[Cell, torch.Tensor | int] = {}
        self.spots: dict[int, list[Spot]] = {}  # where a call's last chunk started and ended
        #: Digests of the states in which cells ended.
        self.ends: dict[tuple[int, Bounds | None], bytes] = memo.setdefault("ends", {})
        self.new_starts: list[int] = []
        self.has_seeded = False
        self.run_of: dict[int, Run] = {}
        self.noises: dict[int, list[noise.Noise]] = {}
        self.whole: dict[int, list[torch.Tensor]] = {}  # noise that is cut for each chunk

    def _device(self, i: int) -> torch.device:
        return self.program.info(self.program.node(i).first_out).device

    def prepare(self) -> None:
        """Move the generator past every draw that has not been made yet, and keep its states."""
        generators.check_undisturbed()
        if not self.program.is_drawing:
            return
        for run in self.program.runs:
            self.run_of.update((i, run) for i in run.nodes if self.program.node(i).is_random)
        for device in {torch.device("cpu"), *map(self._device, self.run_of)}:
            self.before[device] = noise.get_state(generators.generator_of(device))
        for i in sorted(self.run_of):
            self._draw(i, self.run_of[i])
        self.after = {
            device: noise.get_state(generators.generator_of(device)) for device in self.before
        }

    def _draw(self, i: int, run: Run) -> None:
        generator = generators.generator_of(self._device(i))
        here = noise.get_state(generator)
        is_late = i in self.starts
        if is_late:
            noise.set_state(generator, self.starts[i])
        else:
            self.starts[i] = here
            self.new_starts.append(i)
        node = self.program.node(i)
        noises = noises_of(i, node.first_out)
        if noises is not None:
            self.noises[i] = noises
        if generator.device.type != "cpu" and (run.is_body or not is_late):
            self._seed(i, run, generator)
        elif noises is None and run.is_body:
            self._find_chunks(i, run, is_late, generator)
        elif noises is not None and run.is_body and not is_by_chunks(noises, self._sizes(run)):
            self.whole[i] = [one.draw(generator) for one in noises]
        elif not is_late:
            generators.advance(i, node.first_out, len(node.outs), generator)
        if is_late:
            noise.set_state(generator, here)

    def _sizes(self, run: Run) -> list[int]:
        return [stop - start for start, stop in self.grids[run.axis]]

    def _seed(self, i: int, run: Run, generator: torch.Generator) -> None:
        for start in [start for start, _ in self.grids[run.axis]] if run.is_body else [None]:
            if (i, start) in self.old_cells:
                self.cells[i, start] = self.old_cells[i, start]
            else:
                self.cells[i, start] = generators.seed_from(generator)
                self.has_seeded = True

    def _find_chunks(self, i: int, run: Run, is_late: bool, generator: torch.Generator) -> None:
        """Find where each chunk of a call starts; a call that is not late is drawn to its end."""
        bounds = self.grids[run.axis]
        for start, stop in bounds:
            cell = self.old_cells.get((i, start))
            if cell is not None:
                generators.set_to(generator, cell)
            self.cells[i, start] = noise.get_state(generator)
            if not is_late if stop == bounds[-1][1] else (i, stop) not in self.old_cells:
                self._draw_alone(i, stop - start)

    def _draw_alone(self, i: int, n_rows: int) -> None:
        """Make a call for a chunk for its draws alone."""
        entries = [
            self.program.imports[import_id]
            for import_id in self.program.node(i).imports
            if import_id >= 0
        ]
        given = {
            entry.value: generators.stand_in(entry.value, entry.place, n_rows) for entry in entries
        }
        generators.run_alone(i, n_rows, given, self.program.n_values, True)

    def _go_to(self, i: int, row: int, generator: torch.Generator) -> None:
        """Put the generator where the numbers for a row of a call start.

        Chunks run in order, and again before the next ones: so that is where the last one started
        or ended, or where the call starts.
        """
        (noise_of_call,) = self.noises[i]
        if noise_of_call.place is None:  # one draw serves all rows
            row = 0
        at, state = max(
            (spot for spot in ((0, self.starts[i]), *self.spots.get(i, ())) if spot[0] <= row),
            key=lambda spot: spot[0],
        )
        if at < row:
            own = torch.Generator()  # nobody else draws from it
            own.set_state(state)
            share = noise_of_call.n_elements // noise_of_call.n_rows
            noise_drawn.advance(noise_of_call, share * (row - at), own)
            state = own.get_state()
        noise.set_state(generator, state)
        self.spots[i] = [(row, state)]

    def call(
        self,
        i: int,
        chunk: int | None,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Make a random call for a chunk (None: whole), with the numbers that are its own."""
        if chunk is None:
            return self._call_cell(i, None, func, args, kwargs)
        bounds = self.grids[self.run_of[i].axis]
        if i not in self.whole:
            return self._call_cell(i, bounds[chunk], func, args, kwargs)
        given: list[torch.Tensor] = []
        for one, whole in zip(self.noises[i], self.whole[i], strict=True):
            assert one.place is not None
            given.append(rows.cut(whole, one.place, bounds[-1][1], bounds[chunk]))
        return noise_drawn.call_given(func, args, kwargs, given)

    def _call_cell(
        self,
        i: int,
        bounds: Bounds | None,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Make a random call with the generator where the rows of `bounds` (None: all) start."""
        generator = generators.generator_of(self._device(i))
        cell = self.cells.get((i, bounds[0] if bounds is not None else None))
        if cell is not None or bounds is None:
            generators.set_to(generator, self.starts[i] if cell is None else cell)
        else:
            self._go_to(i, bounds[0], generator)
        given: list[torch.Tensor] = []
        noises = self.noises.get(i)  # what runs once may be given what lies otherwise, too
        if noises and not noise.fits(noises[0], args):
            given = [one.draw(generator, tuple(args[0].shape)) for one in noises]
        result = (
            noise_drawn.call_given(func, args, kwargs, given) if given else func(*args, **kwargs)
        )
        if threading.active_count() > 1:  # another may have drawn since
            self._check_alone(i, bounds, generator)
        elif cell is None and bounds is not None and self.noises[i][0].place is not None:
            self.spots[i].append((bounds[1], noise.get_state(generator)))
        return result

    def _check_alone(self, i: int, bounds: Bounds | None, generator: torch.Generator) -> None:
        """Hold a cell to where it left the generator when it ran first.

        torch lets go of Python's lock before it draws: another thread's plain draw can come between
        the state that is put back and the numbers that are drawn from it.

        Raises:
            KoilaError: the cell drew other numbers than before.
        """
        if generator.device.type != "cpu":
            return
        state = noise.get_state(generator)
        text = ctypes.string_at(state.data_ptr(), state.nbytes)
        end = hashlib.blake2b(text, digest_size=16).digest()
        if self.ends.setdefault((i, bounds), end) == end:
            return
        raise KoilaError(
            f"{_core.node(i)[3]}: another thread drew random numbers while this call did, so its "
            "chunks did not draw the same in both of their runs; draw in one thread at a time, or "
            "give the other thread a torch.Generator of its own"
        )

    def commit(self) -> None:
        """Note what was drawn; nothing of it is drawn again."""
        self.leave()
        for i in self.new_starts:
            _core.note_drawn(i)
        memo = _core.memo()
        others = {cell: kept for cell, kept in self.old_cells.items() if cell[0] not in self.run_of}
        memo["cells"] = {**others, **self.cells}
        pinning = {
            run.axis for i, run in self.run_of.items() if run.is_body and i not in self.noises
        }
        memo.setdefault("grids", {}).update({axis: self.grids[axis] for axis in pinning})
        if self.new_starts or self.has_seeded:
            generators.note_drawn()
        generators.let_go()

    def leave(self) -> None:
        """Leave the generators as the last draw of the program left them: what others draw from now
        on comes after it."""
        self._put(self.after)
        self.after = {}

    def roll_back(self) -> None:
        for i in self.new_starts:
            self.starts.pop(i, None)
        for cell in [cell for cell in self.ends if cell[0] in self.new_starts]:
            del self.ends[cell]
        self._put(self.before)

    @staticmethod
    def _put(states: dict[torch.device, torch.Tensor]) -> None:
        for device, state in states.items():
            noise.set_state(generators.generator_of(device), state)


def is_by_chunks(noises: list[noise.Noise], sizes: list[int]) -> bool:
    """Whether a call draws eager's numbers where its chunks, of so many rows, draw in turn."""
    return len(noises) == 1 and noise.is_in_order(noises[0], sizes)
