# SPDX-License-Identifier: Apache-2.0
"""Give the random calls of a program the numbers that eager mode draws, in its order, however late
the program runs and in however many chunks.

A recorded random call *waits* until the generator has advanced past its draws. All calls of a
program advance it, in program order and over all rows, before anything runs; or earlier, if a plain
call is about to draw (`plain.py`). The generator state at which each call starts is kept, and those
at which its last chunk started and ended. From these the state for any chunk is computed, and set
before the chunk runs. So a chunk that runs again, in the same or other chunks, and a call that runs
live later, get the same numbers. Noise that cannot be drawn chunk by chunk is drawn whole and cut
(`noise.py`).

On CUDA each call and chunk gets a seed of its own, drawn from the generator: reproducible, and no
two alike. If only the call itself can tell how many numbers it draws, each chunk keeps a state. In
both cases the chunks are *pinned*: later runs of the program must use the same ones.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from typing import TYPE_CHECKING, Any

import torch

from koila import _core
from koila.basics import generator_state, rows
from koila.basics.rows import Bounds
from koila.basics.table import Args, Func, Words
from koila.messages.errors import KoilaError
from koila.random import generators, noise_drawn
from koila.staged import noise, one_call
from koila.staged.noise import noises_of

if TYPE_CHECKING:
    from koila.staged.facts import Run
    from koila.staged.program import Program

Cell = tuple[int, int | None]  # a call, and the first row of a chunk (None: the whole batch)
Spot = tuple[int, torch.Tensor]  # a row of a call, and the generator state for drawing from it on


def pinned_grids() -> dict[int, list[Bounds]]:
    """Return, by axis, the chunks in which earlier runs of this program drew, if other chunks would
    draw other numbers."""
    return dict(_core.notes().get("grids", {}))


def is_pinning(i: int, first_out: int) -> bool:
    """Tell whether a call by rows draws other numbers in other chunks."""
    return noises_of(i, first_out) is None


def bytes_kept() -> int:
    """Return the bytes of generator states that earlier runs of this program keep."""
    cells = _core.notes().get("cells")
    return sum([one.nbytes for one in cells.values() if torch.is_tensor(one)]) if cells else 0


def bytes_whole(i: int, first_out: int) -> int:
    """Return the bytes of noise that a call draws whole, to be cut into chunks; 0 if chunks draw
    their own; -1 if each chunk keeps a generator state."""
    noises = noises_of(i, first_out)
    if noises is None:
        return -1
    return 0 if is_by_chunks(noises, [1, 1]) else sum(one.n_bytes for one in noises)


def why_others(i: int, first_out: int) -> str:
    """Return why a random call draws other numbers in chunks than eager; empty: it does not."""
    device = _core.value(first_out)[10]
    is_other = is_pinning(i, first_out)
    return f"in chunks it draws other numbers than eager on {device}" if is_other else ""


def start_of(i: int, out: int) -> tuple[torch.Generator, torch.Tensor | None]:
    """Return the generator that a call draws from, and the state at which its draws start; None for
    the state if it drew from seeds (on CUDA). `out` is its first output."""
    generator = generators.generator_of(_core.value(out)[10])
    notes = _core.notes()
    cells: dict[Cell, torch.Tensor | int] = notes.get("cells", {})
    start = cells.get((i, None), notes.get("starts", {}).get(i))
    if isinstance(cells.get((i, 0)), int) or isinstance(start, int):
        return generator, None
    return generator, generator_state.get(generator) if start is None else start


def run_again(
    i: int,
    axis: int,
    inputs: list[tuple[int, rows.Place | None, torch.Tensor]],
    first_out: int,
    n_outs: int,
    is_written: bool,
    n_values: int,
) -> Any:
    """Run a call live that drew random numbers in an earlier run, with the same numbers. Running
    statistics that it wrote then are not written again.

    `inputs` are (value, place of its rows, tensor). `is_written`: the call writes the first of them
    in place. `n_values`: of the tape.
    """
    notes = _core.notes()
    outs = range(first_out, first_out + n_outs)
    if i in notes.get("effects", ()):  # its statistics were written: run on copies of them
        env = one_call.run(i, -1, {value: tensor for value, _, tensor in inputs}, n_values, False)
        return env[first_out] if n_outs == 1 else tuple(env[out] for out in outs)
    cells: dict[Cell, torch.Tensor | int] = notes.get("cells", {})
    starts: dict[int, torch.Tensor] = notes.get("starts", {})
    generator = generators.generator_of(_core.value(first_out)[10])
    before = generator_state.get(generator)

    def run(cell: Any, n_rows: int, tensors: dict[int, torch.Tensor]) -> list[Any]:
        generators.set_to(generator, cell)
        env = one_call.run(i, n_rows, tensors, n_values, False)
        return [env[out] for out in outs]

    try:
        if not isinstance(cells.get((i, 0)), int):  # not seeded by chunk: one run draws the same
            cell = cells[i, None] if (i, None) in cells else starts[i]
            results = run(cell, -1, {value: tensor for value, _, tensor in inputs})
            return results[0] if is_written or n_outs == 1 else tuple(results)
        bounds: list[Bounds] = notes["grids"][axis]
        parts = [
            run(cells[i, one[0]], one[1] - one[0], _cut_inputs(inputs, bounds, one, is_written))
            for one in bounds
        ]
    finally:
        generator_state.set_to(generator, before)
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
    """Return the inputs of a call on the chunk `one`; a written one is a copy."""
    found = {
        value: tensor if place is None else rows.cut(tensor, place, bounds[-1][1], one)
        for value, place, tensor in inputs
    }
    if is_written:
        found[inputs[0][0]] = found[inputs[0][0]].clone()
    return found


def _gather(parts: list[torch.Tensor], value: int) -> torch.Tensor:
    """Concatenate the chunks of a value, in the memory layout of a chunk."""
    place = _core.value(value)[3]
    if place is None:
        return parts[0]
    return rows.in_order_of(rows.gather(parts, place), parts[0])


class Draws:
    """The random draws of one run of a program in chunks, `grids`, by axis. `hooked` are the states
    of generators after hooks that drew during the program."""

    def __init__(
        self,
        program: Program,
        grids: dict[int, list[Bounds]],
        hooked: dict[torch.device, torch.Tensor],
    ) -> None:
        self.program = program
        self.grids = grids
        self.hooked = hooked
        #: The states of the generators before the program's draws, and after them.
        self.before: dict[torch.device, torch.Tensor] = {}
        self.after: dict[torch.device, torch.Tensor] = {}
        notes = _core.notes()
        #: By call: the state at which its draws start; kept over all runs of the tape.
        self.starts: dict[int, torch.Tensor] = notes.setdefault("starts", {})
        #: By call and chunk: its seed, or its state if that cannot be computed from `starts`. Those
        #: of the last committed run, and those of this run.
        self.old_cells: dict[Cell, torch.Tensor | int] = notes.get("cells", {})
        self.cells: dict[Cell, torch.Tensor | int] = {}
        self.spots: dict[int, list[Spot]] = {}  # by call: where its last chunk started and ended
        #: By call and rows: a digest of the state after the first draw of these.
        self.ends: dict[tuple[int, Bounds | None], bytes] = notes.setdefault("ends", {})
        self.new_starts: list[int] = []  # the calls that had not drawn before this run
        self.has_seeded = False
        self.run_of: dict[int, Run] = {}  # by random call: its run
        self.noises: dict[int, list[noise.Noise]] = {}  # by call: what it draws, if that is known
        self.whole: dict[int, list[torch.Tensor]] = {}  # by call: noise drawn whole, to be cut

    def _device(self, i: int) -> torch.device:
        return self.program.info(self.program.node(i).first_out).device

    def prepare(self) -> None:
        """Advance the generators past all draws of the program, and keep the states in between."""
        generators.check_undisturbed()
        if not self.program.is_drawing:
            return
        for run in self.program.runs:
            self.run_of.update((i, run) for i in run.nodes if self.program.node(i).is_random)
        for device in {torch.device("cpu"), *map(self._device, self.run_of)}:
            self.before[device] = generator_state.get(generators.generator_of(device))
        for i in sorted(self.run_of):
            self._draw(i, self.run_of[i])
        self.after = {
            device: generator_state.get(generators.generator_of(device)) for device in self.before
        } | self.hooked

    def _draw(self, i: int, run: Run) -> None:
        """Advance the generator past the draws of one call, unless that has been done before, and
        prepare what its chunks need to draw."""
        generator = generators.generator_of(self._device(i))
        here = generator_state.get(generator)
        has_drawn = i in self.starts  # an earlier run, or `generators.move_on`, advanced past it
        if has_drawn:
            generator_state.set_to(generator, self.starts[i])
        else:
            self.starts[i] = here
            self.new_starts.append(i)
        node = self.program.node(i)
        noises = noises_of(i, node.first_out)
        if noises is not None:
            self.noises[i] = noises
        if generator.device.type != "cpu" and (run.is_body or not has_drawn):
            self._seed(i, run, generator)
        elif noises is None and run.is_body:
            self._find_chunks(i, run, has_drawn, generator)
        elif noises is not None and run.is_body and not is_by_chunks(noises, self._sizes(run)):
            self.whole[i] = [one.draw(generator) for one in noises]
        elif not has_drawn:
            generators.advance(i, node.first_out, len(node.outs), generator)
        if has_drawn:
            generator_state.set_to(generator, here)

    def _sizes(self, run: Run) -> list[int]:
        """Return the number of rows of each chunk."""
        return [stop - start for start, stop in self.grids[run.axis]]

    def _seed(self, i: int, run: Run, generator: torch.Generator) -> None:
        """Give each chunk of a call a seed: that of an earlier run, or a new one."""
        for start in [start for start, _ in self.grids[run.axis]] if run.is_body else [None]:
            if (i, start) in self.old_cells:
                self.cells[i, start] = self.old_cells[i, start]
            else:
                self.cells[i, start] = generators.seed_from(generator)
                self.has_seeded = True

    def _find_chunks(self, i: int, run: Run, has_drawn: bool, generator: torch.Generator) -> None:
        """Find the state at which each chunk of a call starts, by running the call chunk by chunk.
        If the call has not drawn before, the generator ends behind its last chunk."""
        bounds = self.grids[run.axis]
        for start, stop in bounds:
            cell = self.old_cells.get((i, start))
            if cell is not None:
                generators.set_to(generator, cell)
            self.cells[i, start] = generator_state.get(generator)
            if not has_drawn if stop == bounds[-1][1] else (i, stop) not in self.old_cells:
                self._draw_alone(i, stop - start)

    def _draw_alone(self, i: int, n_rows: int) -> None:
        """Run a call on a chunk of stand-ins, only to advance the generator."""
        entries = (self.program.imports[k] for k in self.program.node(i).imports if k >= 0)
        tensors = {one.value: one_call.stand_in(one.value, one.place, n_rows) for one in entries}
        one_call.run(i, n_rows, tensors, self.program.n_values, True)

    def _go_to(self, i: int, row: int, generator: torch.Generator) -> None:
        """Set the generator to the state from which the numbers of a row of a call are drawn.

        It is computed from the nearest known state before it: where the last chunk started or
        ended, or where the call starts. Chunks run in order, and may run again before the next one,
        so that is mostly the state itself.
        """
        (noise_of_call,) = self.noises[i]
        if noise_of_call.place is None:  # all rows share the numbers
            row = 0
        at, state = max(
            (spot for spot in ((0, self.starts[i]), *self.spots.get(i, ())) if spot[0] <= row),
            key=lambda spot: spot[0],
        )
        if at < row:
            own = torch.Generator()  # another thread may draw from the shared one meanwhile
            own.set_state(state)
            share = noise_of_call.n_elements // noise_of_call.n_rows
            noise_drawn.advance(noise_of_call, share * (row - at), own)
            state = own.get_state()
        generator_state.set_to(generator, state)
        self.spots[i] = [(row, state)]

    def call(self, i: int, chunk: int | None, func: Func, args: Args, kwargs: Words) -> Any:
        """Run a random call on a chunk (None: on the whole batch) with the numbers of its rows."""
        if chunk is None:
            return self._call_cell(i, None, func, args, kwargs)
        bounds = self.grids[self.run_of[i].axis]
        if i not in self.whole:
            return self._call_cell(i, bounds[chunk], func, args, kwargs)
        drawn: list[torch.Tensor] = []
        for one, whole in zip(self.noises[i], self.whole[i], strict=True):
            assert one.place is not None
            drawn.append(rows.cut(whole, one.place, bounds[-1][1], bounds[chunk]))
        return noise_drawn.call_given(func, args, kwargs, drawn)

    def _call_cell(
        self, i: int, bounds: Bounds | None, func: Func, args: Args, kwargs: Words
    ) -> Any:
        """Run a random call with the generator at the state of the rows `bounds` (None: all)."""
        generator = generators.generator_of(self._device(i))
        cell = self.cells.get((i, bounds[0] if bounds is not None else None))
        if cell is not None or bounds is None:
            generators.set_to(generator, self.starts[i] if cell is None else cell)
        else:
            self._go_to(i, bounds[0], generator)
        # The layout of an input may differ from a whole run's, also for a call that runs once.
        noises = self.noises.get(i)
        if noises and not noise.fits(noises[0], args):
            drawn = [one.draw(generator, tuple(args[0].shape)) for one in noises]
            result = noise_drawn.call_given(func, args, kwargs, drawn)
        else:
            result = func(*args, **kwargs)
        if threading.active_count() > 1:  # another thread may have drawn in between
            self._check_alone(i, bounds, generator)
        elif cell is None and bounds is not None and self.noises[i][0].place is not None:
            self.spots[i].append((bounds[1], generator_state.get(generator)))
        return result

    def _check_alone(self, i: int, bounds: Bounds | None, generator: torch.Generator) -> None:
        """Raise a KoilaError unless a draw left the generator in the same state as the first draw
        of these rows. torch releases Python's lock before it draws, so another thread may draw
        after the state was set and before this call draws from it."""
        if generator.device.type != "cpu":
            return
        state = generator_state.get(generator)
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
        """Record the draws of this run as final: later runs of these calls draw the same."""
        self.leave()
        if not self.program.is_drawing:
            generators.let_go()
            return
        for i in self.new_starts:
            _core.note_drawn(i)
        notes = _core.notes()
        others = {cell: kept for cell, kept in self.old_cells.items() if cell[0] not in self.run_of}
        notes["cells"] = {**others, **self.cells}
        pinning = {
            run.axis for i, run in self.run_of.items() if run.is_body and i not in self.noises
        }
        notes.setdefault("grids", {}).update({axis: self.grids[axis] for axis in pinning})
        if self.new_starts or self.has_seeded:
            generators.note_drawn()
        generators.let_go()

    def leave(self) -> None:
        """Set the generators to the state after the program's last draw."""
        if self.after:
            self._put(self.after)
            self.after = {}

    def enter(self) -> None:
        """Go on after hooks of the user, which began at the state of `leave` and may have drawn."""
        for device in self.before:
            self.hooked[device] = generator_state.get(generators.generator_of(device))
        self.after = self.hooked.copy()

    def roll_back(self) -> None:
        """Undo the draws of this run: reset the generators, and forget the states of new calls."""
        for i in self.new_starts:
            self.starts.pop(i, None)
        for cell in [cell for cell in self.ends if cell[0] in self.new_starts]:
            del self.ends[cell]
        self._put(self.before)

    @staticmethod
    def _put(states: dict[torch.device, torch.Tensor]) -> None:
        for device, state in states.items():
            generator_state.set_to(generators.generator_of(device), state)


def is_by_chunks(noises: list[noise.Noise], sizes: list[int]) -> bool:
    """Tell whether chunks of these sizes, drawn one after another, get eager mode's numbers."""
    return len(noises) == 1 and noise.is_in_order(noises[0], sizes)
