# SPDX-License-Identifier: Apache-2.0
"""Free the large tensors that custom functions in checkpoints read and return, and compute them
again in backward, as torch's checkpoint does.

A part (`cut.py`) that was cut off in the function of a checkpoint hands out tensors to a custom
function, which saves them; the next part reads what it returned. torch's checkpoint would keep
neither. So autograd keeps a handle for what the custom function saved (`recomputed.py`), and parts
get a stand-in without memory for such a leaf. Before backward needs one, the part before runs
forward once more, and then the custom function. This starts from the values that were handed out
with it and were made outside of the checkpoint, which are kept.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from koila import _core
from koila.basics import engine
from koila.basics.rows import without_memory
from koila.recording.cut import Cut, Freed
from koila.recording.handed_out import Root
from koila.running import checkpoints, custom_functions, freed_graphs, recomputed, replay
from koila.running.repeated import Layout
from koila.staged.program import Program


class SecondRun:
    """Runs a part that was cut off in a checkpoint once more, for the values that it handed out."""

    def __init__(self, cut: Cut, numbers: dict[int, torch.Tensor]) -> None:
        # It holds no root: autograd's graph may lead from one back to what holds this object.
        self.cut = weakref.ref(cut)
        #: What these values are made of: handed out with them, and made outside of the checkpoint.
        self.numbers = numbers
        self.n_readers: dict[int, int] = {}
        #: Numbers that were computed, each with the number of readers that have yet to take it.
        self.found: dict[int, tuple[torch.Tensor, int]] = {}

    def add_reader(self, value: int) -> Callable[[], torch.Tensor]:
        """Return a function that returns the number of a value, for one more reader of it."""
        self.n_readers[value] = self.n_readers.get(value, 0) + 1
        return functools.partial(self.take, value)

    def take(self, value: int) -> torch.Tensor:
        """Return the number of a value, computed with those of all others that have readers."""
        if value not in self.found:
            self._run()
        number, n_left = self.found.pop(value)
        if n_left > 1:
            self.found[value] = number, n_left - 1
        return number

    def _run(self) -> None:
        cut = self.cut()
        roots = {root.value: root for root in cut.alive()} if cut is not None else {}
        if cut is None or not roots.keys() >= self.n_readers.keys():
            raise freed_graphs.used_up()
        unwanted = [root.lazy for value, root in roots.items() if value not in self.n_readers]
        numbers = cut.on_tape(self._numbers, cut, roots, tuple(unwanted))
        if numbers is None:  # it runs whole, and its backward too
            for root in roots.values():
                _core.describe(root.lazy)  # raises if what it was computed from was written
            made, _ = cut.whole
            numbers = {value: made[id(root.lazy)].detach() for value, root in roots.items()}
        self.found = {value: (numbers[value], n) for value, n in self.n_readers.items()}

    def _numbers(
        self, cut: Cut, roots: dict[int, Root], unwanted: tuple[Any, ...]
    ) -> dict[int, torch.Tensor] | None:
        try:
            for value, number in self.numbers.items():
                if value in roots and not roots[value].how_written():
                    _core.deliver(value, number, False)
            cut.fill(Program([], unwanted=unwanted).entered)
            return replay.compute_again(unwanted)
        finally:
            forget_numbers(cut)


def forget_numbers(cut: Cut) -> None:
    """Let the values of a part have no number any more."""
    lazies = cut.roots

    def forget() -> None:
        _core.set_wanted(lazies, False)
        try:
            _core.forget_left()
        finally:
            _core.set_wanted(lazies, True)

    if lazies:  # none if they failed
        _core.held(lazies[0], forget, (), {})


def is_read() -> bool:
    """Return whether pending calls read a tensor that can be freed once they have run."""
    results = custom_functions.results() if _core.can_cut() else ()
    return any(_core.leaves_of(one) for one in results)


def note(cut: Cut, handed: dict[int, torch.Tensor]) -> None:
    """Prepare a part that was just cut off: free the tensors it reads that can be computed again,
    and keep what is needed to compute again the tensors it handed out (`handed`, by value)."""
    roots = cut.roots
    if roots and (recomputed.alive or checkpoints.outermost()):
        _core.held(roots[0], _note, (cut, roots[0], handed), {})


def _note(cut: Cut, lazy: Any, handed: dict[int, torch.Tensor]) -> None:
    program = Program([])
    _free_leaves(cut, lazy, program)
    region = checkpoints.outermost()
    if not region:
        return
    values = [root.value for root in cut.alive()]
    nodes = {value: program.node_of(value) for value in values}
    inside = {
        value
        for value, node in nodes.items()
        if node is not None and checkpoints.around(node.region)[:1] == (region,)
    }
    try:
        for value in inside.symmetric_difference(values):
            _core.deliver(value, handed[value].detach(), False)
        entered = {one.value for one in Program([]).imports} if inside else set()
    finally:
        forget_numbers(cut)
    numbers = {value: handed[value].detach() for value in values if value in entered - inside}
    second = SecondRun(cut, numbers)
    for value in inside:
        if handed[value].storage_offset() == 0:
            add = functools.partial(second.add_reader, value)
            custom_functions.add_memory(region, handed[value], add)


def _free_leaves(cut: Cut, lazy: Any, program: Program) -> None:
    made: dict[int, torch.Tensor] = {}
    for value in dict.fromkeys(one.value for one in program.imports):
        real = program.info(value).real
        if real is None or not real.requires_grad or real.is_leaf or real._backward_hooks:
            continue
        get = custom_functions.way_to(real)
        if get is not None:
            if id(real) not in made:
                zeros = without_memory(real.shape, real.dtype, real.device)
                made[id(real)] = engine.Instead.apply(real, zeros)
            cut.freed[value] = Freed(made[id(real)], Layout(real), get)
            _core.replace_leaf(lazy, value, made[id(real)])
    for group in cut.groups if made else ():
        group.leaves = [made.get(id(leaf), leaf) for leaf in group.leaves]
