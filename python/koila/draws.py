"""Random numbers of a program in chunks: one grid for every run, one generator state for each draw.

The first run of a program pins the grid of its random calls. Their draws are then set up in program
order, call by call over all chunks, before anything runs: where the kernel draws in the order of
memory, as dropout on the CPU does, a program in chunks draws eager's own numbers and leaves its
generator state. Where it does not (in attention or a recurrent layer, on CUDA) each call and
chunk gets a seed of its own, drawn from the generator: reproducible, no two the same. Each later
run of a chunk puts the state back first, and so sees the same numbers.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from koila import _core, rows
from koila.errors import KoilaError
from koila.rows import Bounds

if TYPE_CHECKING:
    from koila.program import Run
    from koila.replay import Replay

Cell = tuple[int, int | None]
# How often they draw depends on values, not on sizes alone. None: an operator without a row.
BY_VALUE = {None, "multinomial", "poisson", "rrelu"}

# Taken before they are patched: for all others, what waits is drawn before the generator answers.
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
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _seed_from(generator: torch.Generator) -> int:
    """Draw a seed from a generator. On CUDA no kernel runs: the generator's place is hashed."""
    if generator.device.type != "cuda":
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator))
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
            "koila: random numbers were drawn, or the generator was set, between a recorded "
            f"random call and its run ({user_line()}); the program's own draws come later than "
            "eager's and differ from them",
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


class Drawn(NamedTuple):
    """How a call drew: what each later run of it must repeat."""

    device: torch.device
    first: torch.Tensor | int  # the generator's state before it, or a seed
    last: torch.Tensor | None  # the state after it; None where a whole run is sure to be the same
    is_in_order: bool  # a whole run draws what the chunks drew, if it ends in the same state


def again(i: int) -> Callable[[], None] | None:
    """A call runs whole: let it draw what it drew in an earlier run in chunks.

    Returns:
        None if it has not drawn yet; else what is to be called when it has drawn.

    Raises:
        KoilaError: the same numbers cannot be drawn whole.
    """
    drawn: Drawn | None = _core.memo().get("drawn", {}).get(i)
    if drawn is None:
        return None
    text = (
        f"{_core.node(i)[3]}: this call drew its random numbers in chunks when a value was read, "
        "and what is asked for now must run whole, where it would draw others; read the value "
        "after backward(), or set koila.config(chunks=1)"
    )
    if not drawn.is_in_order:
        raise KoilaError(text)
    generator = generator_of(drawn.device)
    resume = _get_state(generator)
    _set(generator, drawn.first)

    def finish() -> None:
        is_same = drawn.last is None or torch.equal(_get_state(generator), drawn.last)
        _set_state(generator, resume)
        if not is_same:
            raise KoilaError(text)

    return finish


def _set(generator: torch.Generator, cell: torch.Tensor | int) -> None:
    if isinstance(cell, int):
        _manual_seed(generator, cell)
    else:
        _set_state(generator, cell)


class Draws:
    """The draws of one program, kept with the program: a state, or a seed, for each cell."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.before: dict[torch.device, torch.Tensor] = {}
        self.after: dict[torch.device, torch.Tensor] = {}
        self.cells: dict[Cell, torch.Tensor | int] = _core.memo().setdefault("cells", {})
        self.new_cells: list[Cell] = []
        self.drawn: dict[int, Drawn] = _core.memo().setdefault("drawn", {})
        self.new_drawn: list[int] = []
        self.run_of: dict[int, Run] = {}

    def _device(self, i: int) -> torch.device:
        program = self.replay.program
        return program.info(program.nodes[i].first_out).device

    def prepare(self) -> None:
        """Set up every draw that has not been made yet."""
        check_undisturbed()
        for run in self.replay.program.runs:
            self.run_of.update(
                (i, run) for i in run.nodes if self.replay.program.nodes[i].is_random
            )
        for device in {torch.device("cpu"), *map(self._device, self.run_of)}:
            self.before[device] = _get_state(generator_of(device))
        for i in sorted(self.run_of):
            self._draw(i, self.run_of[i])
        self.after = {device: _get_state(generator_of(device)) for device in self.before}

    def _draw(self, i: int, run: Run) -> None:
        device = self._device(i)
        generator = generator_of(device)
        is_in_order = device.type == "cpu" and not self.replay.program.nodes[i].is_fused
        is_in_order = is_in_order and _core.node(i)[1] not in BY_VALUE
        for chunk in range(len(self.replay.grids[run.axis]) if run.is_body else 1):
            cell = (i, chunk if run.is_body else None)
            if cell in self.cells:
                continue
            self.new_cells.append(cell)
            if is_in_order:
                self.cells[cell] = _get_state(generator)
                self._advance(i, run, chunk)
            else:
                self.cells[cell] = _seed_from(generator)
        if i not in self.drawn:
            self.drawn[i] = self._describe(i, run, is_in_order)
            self.new_drawn.append(i)

    def _describe(self, i: int, run: Run, is_in_order: bool) -> Drawn:
        device = self._device(i)
        if not run.is_body or len(self.replay.grids[run.axis]) == 1:
            first = self.cells[i, 0 if run.is_body else None]
            return Drawn(device, first, None, True)
        # Few normal numbers are made from the same uniform ones in another way than many.
        is_normal = "norm" in str(_core.node(i)[1]) or "randn" in str(_core.node(i)[1])
        last = _get_state(generator_of(device))
        return Drawn(device, self.cells[i, 0], last, is_in_order and not is_normal)

    def _advance(self, i: int, run: Run, chunk: int) -> None:
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
        if node.writes and node.n_outs == 2:  # the base of the view that is written
            base = node.imports[-1]
            env[program.imports[base].value] = imports[base]

        def run_other(_: int, func: Any, args: Any, kwargs: Any) -> Any:
            return func(*args, **kwargs)

        _core.run([i], [()], env, imports, program.import_of, n_rows, True, run_other, _never_cut)

    def restore(self, i: int, chunk: int | None) -> None:
        """Put the generator where it was before this call drew for this chunk."""
        _set(generator_of(self._device(i)), self.cells[i, chunk])

    def commit(self) -> None:
        """Leave the generators as the last draw of the program left them."""
        self._put(self.after if self.new_cells else self.before)
        for i in self.run_of:
            _core.note_drawn(i)
        if self.cells:
            _core.memo()["grids"] = dict(self.replay.grids)

    def roll_back(self) -> None:
        for cell in self.new_cells:
            self.cells.pop(cell, None)
        for i in self.new_drawn:
            self.drawn.pop(i, None)
        self._put(self.before)

    @staticmethod
    def _put(states: dict[torch.device, torch.Tensor]) -> None:
        for device, state in states.items():
            _set_state(generator_of(device), state)
