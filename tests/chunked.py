# SPDX-License-Identifier: Apache-2.0
"""What ran while a test asked for chunks, and the assertion that it was cut.

A comparison with eager holds as well where nothing is cut, and then says nothing of chunks. So who
asks for them is watched: each program that has rows must run in as many chunks as were asked for,
or rows if there are fewer, each body in all of them, and its products, convolutions, attention and
their kin by rows. A test of what cannot be so says why, and is held to that as well.
"""

from __future__ import annotations

import contextlib
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch

import koila
from koila import _core
from koila.recording import backwards
from koila.running import replay
from koila.staged.facts import ONCE, Node
from koila.staged.program import Program

#: Rows of the op table that a model spends its time in.
HEAVY = frozenset(
    "addbmm addmm addmv baddbmm bilinear bmm einsum linear matmul mm mv conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d embedding embedding_bag gru gru_cell lstm "
    "lstm_cell rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell scaled_dot_product_attention".split()
)
#: What autograd calls the same.
HEAVY_BACK = ("Addmm", "Baddbmm", "Bmm", "Convolution", "Embedding", "Mkldnn", "Mm", "Scaled")

#: How many chunks were asked for, and said not to be had. `mutants.py` looks.
SAID_WHOLE: set[int] = set()

BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def name_of(node: int) -> str:
    """Return the name of a recorded call's row, or of its function."""
    func, row, *_ = _core.node(node)
    return str(row or getattr(func, "__name__", "call"))


def line_of(node: int) -> str:
    """Return where a call was made, in words: call n, file:line."""
    return str(_core.node(node)[3])


def has_heavy_history(tensor: torch.Tensor | None) -> bool:
    """Tell whether a layer of a model is in the graph of a tensor."""
    stack, seen = [tensor.grad_fn if tensor is not None else None], set[Any]()
    while stack:
        step = stack.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        if step.name().startswith(HEAVY_BACK):
            return True
        stack += [following for following, _ in step.next_functions]
    return False


def unseen(function: Any) -> Any:
    """Give a function's frames to koila, whose messages name the innermost line that is not its."""
    function.__code__ = function.__code__.replace(co_filename=replay.__file__)
    return function


class _Now(threading.local):
    """What a thread is running."""

    def __init__(self) -> None:
        self.is_staging = False
        self.program: Program | None = None  # that is being staged
        self.done: dict[tuple[int, int, int], set[int]] = {}  # stage, axis, segment -> chunks


class Watched:
    """What ran while it was on.

    `names` are the calls that ran by rows and `lines` where they were made, `whole` what ran whole
    although it has rows, and `wrong` what ran in another number of chunks than was asked for;
    `known` are the lines of all calls that have a row in the op table.
    """

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.n_cut = 0
        self.names: set[str] = set()
        self.lines: set[str] = set()
        self.known: set[str] = set()
        self.whole: set[str] = set()
        self.wrong: set[str] = set()
        self._now = _Now()
        self._given: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def on(self) -> Iterator[Watched]:
        """Watch what a block runs."""
        with contextlib.ExitStack() as stack:
            for owner, name, watch in (
                (replay.Replay, "run_nodes", self._run_nodes),
                (replay, "Program", self._make),
                (replay, "_stage", self._stage),
                (replay, "attempt", self._attempt),
                (_core, "live", self._live),
                (backwards, "_run_whole", self._run_whole),
                (_core, "input", self._input),
            ):
                changed = self._around(getattr(owner, name), watch)
                stack.enter_context(unittest.mock.patch.object(owner, name, changed))
            yield self

    @staticmethod
    def _around(original: Callable[..., Any], watch: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **kwargs: Any) -> Any:
            return watch(original, *args, **kwargs)

        unseen(around)
        return around

    @unseen
    def _input(self, original: Any, tensor: torch.Tensor, *args: Any) -> Any:
        if tensor.grad_fn is not None:  # a graph of its own behind it
            self._given[id(tensor)] = tensor
        return original(tensor, *args)

    @unseen
    def _make(self, original: Any, *args: Any, **kwargs: Any) -> Program:
        program: Program = original(*args, **kwargs)
        if self._now.is_staging:  # it holds tensors
            self._now.program = program
        self.known.update(line_of(node) for node in program.nodes if _core.node(node)[1])
        return program

    @unseen
    def _run_nodes(
        self, original: Any, step: Any, run: Any, chunk: int, *args: Any, **kwargs: Any
    ) -> Any:
        if run.is_body:
            self._now.done.setdefault((run.stage, run.axis, run.segment), set()).add(chunk)
        return original(step, run, chunk, *args, **kwargs)

    @unseen
    def _stage(self, original: Any, *args: Any) -> Any:
        self._now.program, self._now.is_staging = None, True
        is_pending = _core.pending_bytes(False) > 0
        try:
            staged = original(*args)
            has_run = staged is not None or not is_pending
            if not has_run and (self._now.program is None or has_rows(self._now.program)):
                self.whole.add("a program")
        finally:
            self._now.program, self._now.is_staging = None, False
        return staged

    @unseen
    def _attempt(self, original: Any, program: Program, *args: Any) -> Any:
        self._look_at(program)
        before, self._now.done = self._now.done, {}  # a hook may run another program
        try:
            done = original(program, *args)
        except BaseException:
            self.n_cut += bool(self._now.done)  # it was cut, as far as it came
            raise
        finally:
            mine, self._now.done = self._now.done, before
        if done is None:
            self.whole.add("a program that was begun in chunks")
            return None
        self.n_cut += bool(mine)
        for axis, rows in program.axes.items():
            grid = done[0].grids[axis]
            if len(grid) != min(self.chunks, rows) or grid[-1][1] != rows:
                self.wrong.add(f"{rows} rows ran as {grid}")
        for run in program.runs:
            ran = mine.get((run.stage, run.axis, run.segment), set())
            if run.is_body and ran != set(range(len(done[0].grid_of(run)))):
                self.wrong.add(f"stage {run.stage} ran in chunks {sorted(ran)}")
        return done

    def _look_at(self, program: Program) -> None:
        for run in program.runs:
            if run.is_body:
                self.names.update(map(name_of, run.nodes))
                self.lines.update(map(line_of, run.nodes))
        for node in program.nodes.values():
            if is_barrier(program, node) and name_of(node.id) in HEAVY:
                self.whole.add(f"{name_of(node.id)}, which runs once")
        for number in {entry.value for entry in program.imports if entry.place is not None}:
            info = program.info(number)
            is_given = id(info.real) in self._given
            if program.is_leaf(number) and not is_given and has_heavy_history(info.real):
                self.whole.add(f"what made {list(info.shape)}, which entered a program")

    @unseen
    def _live(self, original: Any, func: Any, *args: Any) -> Any:
        if func in BACKWARD:
            self.whole.add("a backward")
        return original(func, *args)

    @unseen
    def _run_whole(self, original: Any, *args: Any) -> Any:
        self.whole.add("a backward")
        return original(*args)


def is_barrier(program: Program, node: Node) -> bool:
    """Tell whether a call runs once although it reads rows."""
    reads = (program.imports[number].value for number in node.imports if number >= 0)
    return node.mode == ONCE and any(program.info(v).place is not None for v in reads)


def has_rows(program: Program) -> bool:
    """Tell whether a program reads a batch."""
    return any(program.info(entry.value).place is not None for entry in program.imports)


@contextlib.contextmanager
def split(
    chunks: int | None, *, whole: str = "", partly: str = "", rows: tuple[str, ...] = ()
) -> Iterator[None]:
    """Run a step in this many chunks, and assert that it was; None leaves koila to choose.

    Args:
        chunks: how many.
        whole: why nothing of it can be cut; then nothing must be.
        partly: why some of it can be cut and some cannot; then it must be so.
        rows: names of calls, by their rows in the op table, that must run by rows.
    """
    if chunks is None:
        yield
        return
    if whole:
        SAID_WHOLE.add(chunks)
    with koila.config(chunks=chunks), Watched(chunks).on() as seen:
        yield
    if chunks == 1:
        assert seen.n_cut == 0, "one chunk is the user's own program"
        return
    assert not seen.wrong, f"asked for {chunks} chunks: {'; '.join(sorted(seen.wrong))}"
    if whole:
        assert seen.n_cut == 0, f"it is cut ({sorted(seen.names)}), and said to be whole: {whole}"
        return
    assert seen.n_cut > 0, f"nothing was cut; whole: {sorted(seen.whole)}"
    if partly:
        assert seen.whole, f"all of it is cut, and said to be whole in part: {partly}"
    else:
        assert not seen.whole, f"ran whole: {'; '.join(sorted(seen.whole))}"
    assert set(rows) <= seen.names, f"not by rows: {sorted(set(rows) - seen.names)}"
