"""Random numbers of a program in chunks: one grid for every run, one generator state for each draw.

The first run of a program pins the grid of its random calls. Their draws are then set up in program
order, call by call over all chunks, before anything runs: where the kernel draws in the order of
memory, as dropout on the CPU does, a program in chunks draws eager's own numbers and leaves its
generator state. Where it does not (in attention or a recurrent layer, on CUDA) each call and
chunk gets a seed of its own, drawn from the generator: reproducible, no two the same. Each later
run of a chunk puts the state back first, and so sees the same numbers; a live run too.
"""

from __future__ import annotations

import hashlib
import os
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
    from koila.program import Program, Run

Cell = tuple[int, int | None]
#: Where the files are that are not the user's.
INSIDE = tuple(f"{Path(module).parent}{os.sep}" for module in (__file__, torch.__file__))
# How often they draw depends on values, not on sizes alone. None: an operator without a row.
BY_VALUE = {None, "poisson", "rrelu"}

# As they were before koila patched them: for all others what was recorded draws before they answer.
_get_state = torch._C.Generator.get_state
_set_state = torch._C.Generator.set_state
_manual_seed = torch._C.Generator.manual_seed


def pinned_grids() -> dict[int, list[Bounds]]:
    """The grids that earlier runs of this program drew with."""
    memo = _core.memo()
    return dict(memo.get("grids", {})) if memo.get("cells") else {}


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that calls on a device draw from where none is named."""
    if device.type == "cuda":
        torch.cuda.init()  # a program may be the first to use it, and has no generators before
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _seed_from(generator: torch.Generator) -> int:
    """Draw a seed from a generator. On CUDA no kernel runs: the generator's place is hashed."""
    if generator.device.type != "cuda":
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # in fours, as CUDA's generator asks
    text = f"{generator.initial_seed()} {offset}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _states() -> dict[torch.device, torch.Tensor]:
    """The states of the generators that a plain call may draw from."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    return {device: _get_state(generator_of(device)) for device in devices}


def note_recorded() -> None:
    """A random call was recorded and none was pending: remember where the generators are."""
    _core.memo()["recorded_states"] = _states()


def check_undisturbed() -> None:
    """Warn where something else drew between the record of a random call and its run."""
    states = _core.memo().pop("recorded_states", {})
    if any(not torch.equal(state, _get_state(generator_of(d))) for d, state in states.items()):
        warnings.warn(
            "koila: random numbers were drawn between a recorded random call and its run "
            f"({user_line()}); the program's own draws come later than eager's and differ from "
            "them",
            stacklevel=2,
        )


def user_line() -> str:
    """The innermost line of the stack that is neither koila's nor torch's: "model.py:40"."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown line"


def _set(generator: torch.Generator, cell: torch.Tensor | int) -> None:
    if isinstance(cell, int):
        _manual_seed(generator, cell)
    else:
        _set_state(generator, cell)


def _call(_: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _as_it_is(tensor: Any, *_: Any) -> Any:
    return tensor


def run_alone(
    i: int, n_rows: int, given: dict[int, torch.Tensor], n_values: int, is_grad_off: bool
) -> list[Any]:
    """Run one call on the tensors given for its inputs; all values after it, by number."""
    env: list[Any] = [None] * n_values
    for value, tensor in given.items():
        env[value] = tensor
    import_of = {i: (0,) * len(_core.node(i)[5])}  # not looked at: env has all inputs
    _core.run(
        [i], [()], env, [], import_of, n_rows, is_grad_off, _call, _as_it_is, set(), _as_it_is
    )
    return env


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
        env = run_alone(i, -1, {value: tensor for value, _, tensor in inputs}, n_values, False)
        return env[first_out] if n_outs == 1 else tuple(env[out] for out in outs)
    cells: dict[Cell, torch.Tensor | int] = memo["cells"]
    generator = generator_of(_core.value(first_out)[10])
    before = _get_state(generator)

    def run(chunk: int | None, n_rows: int, given: dict[int, torch.Tensor]) -> list[Any]:
        _set(generator, cells[i, chunk])
        env = run_alone(i, n_rows, given, n_values, False)
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
        _set_state(generator, before)
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
    """The draws of one program, kept with the program: a state, or a seed, for each cell."""

    def __init__(self, program: Program, grids: dict[int, list[Bounds]]) -> None:
        self.program = program
        self.grids = grids
        self.before: dict[torch.device, torch.Tensor] = {}
        self.after: dict[torch.device, torch.Tensor] = {}
        self.cells: dict[Cell, torch.Tensor | int] = _core.memo().setdefault("cells", {})
        self.new_cells: list[Cell] = []
        self.run_of: dict[int, Run] = {}

    def _device(self, i: int) -> torch.device:
        return self.program.info(self.program.nodes[i].first_out).device

    def prepare(self) -> None:
        """Set up every draw that has not been made yet."""
        check_undisturbed()
        for run in self.program.runs:
            self.run_of.update((i, run) for i in run.nodes if self.program.nodes[i].is_random)
        for device in {torch.device("cpu"), *map(self._device, self.run_of)}:
            self.before[device] = _get_state(generator_of(device))
        for i in sorted(self.run_of):
            self._draw(i, self.run_of[i])
        self.after = {device: _get_state(generator_of(device)) for device in self.before}

    def _draw(self, i: int, run: Run) -> None:
        device = self._device(i)
        generator = generator_of(device)
        is_in_order = device.type == "cpu" and not self.program.nodes[i].draws_inside
        is_in_order = is_in_order and _core.node(i)[1] not in BY_VALUE
        for chunk in range(len(self.grids[run.axis]) if run.is_body else 1):
            cell = (i, chunk if run.is_body else None)
            if cell in self.cells:
                continue
            self.new_cells.append(cell)
            if is_in_order:
                self.cells[cell] = _get_state(generator)
                self._advance(i, run, chunk)
            else:
                self.cells[cell] = _seed_from(generator)

    def _advance(self, i: int, run: Run, chunk: int) -> None:
        """Let one call draw, on stand-ins: only sizes and types matter. They are ones, which are
        legal as weights, as probabilities and as deviations."""
        program = self.program
        node = program.nodes[i]
        stand_ins: dict[int, torch.Tensor] = {}
        n_rows = -1
        if run.is_body:
            start, stop = self.grids[run.axis][chunk]
            n_rows = stop - start
        for number in node.imports:
            if number < 0:
                continue
            entry = program.imports[number]
            info = program.info(entry.value)
            shape = info.shape
            if run.is_body and entry.place is not None:
                shape = rows.chunk_shape(shape, entry.place, n_rows)
            stand_ins[entry.value] = torch.ones(shape, dtype=info.dtype, device=info.device)
        run_alone(i, n_rows, stand_ins, len(program.values), True)

    def restore(self, i: int, chunk: int | None) -> None:
        """Put the generator where it was before this call drew for this chunk."""
        _set(generator_of(self._device(i)), self.cells[i, chunk])

    def commit(self) -> None:
        """Leave the generators as the last draw of the program left them."""
        self._put(self.after if self.new_cells else self.before)
        for i, _ in self.new_cells:
            _core.note_drawn(i)
        if self.cells:
            _core.memo()["grids"] = dict(self.grids)

    def roll_back(self) -> None:
        for cell in self.new_cells:
            self.cells.pop(cell, None)
        self._put(self.before)

    @staticmethod
    def _put(states: dict[torch.device, torch.Tensor]) -> None:
        for device, state in states.items():
            _set_state(generator_of(device), state)
