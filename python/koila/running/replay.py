# SPDX-License-Identifier: Apache-2.0
"""Run and commit a staged program in chunks: a forward pass, a backward pass, and one commit.

Until the commit nothing that the user can see has changed. Gradients accumulate in detached
aliases, running statistics are written on copies, and an exception restores the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from koila import _core
from koila.basics import config, engine, surroundings, switches
from koila.basics.threads import in_turn
from koila.memory import estimates, heap
from koila.messages.errors import MemoryLimitError, StaleError
from koila.planning import explain, left_plain, logs, planner, plans, steps, unsplit
from koila.reporting import progress, reports
from koila.running import (
    arrays,
    checkpoints,
    deliver,
    freed_graphs,
    interpret,
    kept_casts,
    overwritten,
    read_numbers,
    sending,
    unwritten,
    visible,
)
from koila.running.attempt import attempt
from koila.running.boundary import take_total_gradients
from koila.running.numbers import Numbers, settle_outdated
from koila.running.prepared import outside_inference
from koila.running.stages import Stages
from koila.staged import hooks, leaves, trim
from koila.staged.facts import name_of_call
from koila.staged.program import Program


class Replay(Stages):
    """One try to run a step by its schedule, and its commit."""

    # -- the whole step ---------------------------------------------------------------------------

    def compute(self) -> None:
        """Run the schedule. Without roots that is the forward pass only, without graphs."""
        switches.blocks.drop()  # chunks make casts of their own
        self.draws.prepare()
        n_chunks = max(map(len, self.grids.values()), default=1)
        heap.fix_malloc_for(n_chunks)
        if config.get("progress"):
            self.bar = progress.Bar(progress.n_ticks(self.schedule.steps, n_chunks))
        try:
            interpret.Interpreter(self, self.schedule).go()
        finally:
            if self.bar is not None:
                self.bar.close()
            self.ready.clear()  # these and what they hold refer to each other: break the cycles
            self.awaiting.clear()

    def differentiate(
        self, gradients: list[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run the forward and backward passes.

        Args:
            gradients: of the program's roots, in their order.

        Returns:
            Pairs of a real tensor that entered the program and its gradient.
        """
        self.gradients = gradients
        for root, new in zip(self.program.roots, gradients, strict=True):
            self.roots[root] = self.roots[root] + new if root in self.roots else new
        self.compute()
        if len(gradients) == 1:  # torch calls the hooks of an only root, even with no leaf behind
            visible.call_hooks(self, self.program.roots[0], gradients[0])
        found, is_hooked, program = [], False, self.program
        leaves = [v for v in self.boundary if program.is_leaf(v) and program.needs_gradient(v)]
        totals = take_total_gradients(map(self.boundary.__getitem__, leaves))
        for value, gradient in zip(leaves, totals, strict=True):
            info = self.boundary[value].info
            real = info.real if info.real is not None else info.result
            if gradient is not None and real is not None:
                gradient = gradient if gradient.dtype is real.dtype else gradient.to(real.dtype)
                found.append((value, real, gradient))
                is_hooked |= bool(real._post_accumulate_grad_hooks or real._backward_hooks)
        if is_hooked:
            order = self._order_of_leaves()
            found.sort(key=lambda entry: order.get(entry[0], (0, 0)))
        return [(real, gradient) for _, real, gradient in found]

    def _order_of_leaves(self) -> dict[int, tuple[int, int]]:
        """Return a sort key for the leaves, so that their hooks run in torch's order.

        torch's backward goes from the last call to the first. It visits the leaves of one call in
        the order of its arguments, but those of a linear() in the reverse order: the bias first.
        The hooks of the leaf that is delivered last run first, so the key is the first call that
        reads a leaf, and its position there.
        """
        order: dict[int, tuple[int, int]] = {}
        for i, node in sorted(self.program.nodes.items()):
            step = 1 if _core.node(i)[1] == "linear" else -1
            for k, import_id in enumerate(node.imports):
                if import_id >= 0:
                    order.setdefault(self.program.imports[import_id].value, (i, step * k))
        return order

    # -- commit -----------------------------------------------------------------------------------

    def settle(self, is_graph_freed: bool) -> None:
        """Compute the numbers of the user's lazies and free all other values.

        This comes before gradients are delivered: graphs outside of the program then run backward
        and need the memory.

        Args:
            is_graph_freed: whether the graph is freed, so that a second backward raises.
        """
        self.tracked.settle()
        self.is_graph_freed = is_graph_freed
        self.numbers = Numbers(self.program, self.boundary, is_graph_freed)
        self.boundary.clear()

    def commit(self) -> None:
        """Make the results of the step visible: write running statistics, leave the generator in
        the state that eager would leave, and give the user's lazies their numbers."""
        _core.set_busy(True)
        try:
            self._commit()
        finally:
            _core.set_busy(False)
        trim.trim()

    def _commit(self) -> None:
        visible.write_statistics(self)
        if not self.is_forward:
            self.tracked.move_again()
        self.draws.commit()
        hooks.commit(self.hooked)
        if self.is_graph_freed:
            _core.spend(self.program.handle, False)
        self.numbers.deliver()
        if self.is_forward and not self.program.is_no_grad_only:
            _core.forget_left()  # later reads start from what was just delivered, not from these
        if not _core.close():
            self.numbers.leave()
            _core.close()  # end the calls whose only readers were values that left the tape


@unwritten.reading()
def _attempt(
    program: Program, planned: plans.Plan, run: Callable[[Replay], Any]
) -> tuple[Any] | None:
    """Run a program and commit it. Where memory runs out, `attempt` tries again in more chunks.

    Returns:
        A tuple of what `run` returned; None if the program has to run whole.
    """

    def go() -> tuple[Any] | None:
        done = attempt(program, planned, Replay, run)
        if done is None:
            return None
        replay, result, ran = done
        kept_casts.note_run(program.entered)
        replay.commit()
        del replay, done  # `keep` measures the memory that is left for the next step
        ran.keep(program)
        return (result,)

    with outside_inference():
        return _core.drawing(go) if program.is_drawing else go()


def _is_whole() -> bool:
    """Return whether the program runs whole, where that is known before staging it, and note why
    for the report."""
    why = planner.why_whole()
    if why is not None:
        reports.decide(why)
    return why is not None


@unwritten.reading()
def _stage(
    roots: list[torch.Tensor],
    is_no_grad_only: bool = False,
    gets: Callable[[torch.Tensor], bool] | None = None,
    unwanted: tuple[_core.LazyTensor, ...] = (),
    beside: Sequence[torch.Tensor] = (),
) -> tuple[Program, plans.Plan] | None:
    """Stage a program and plan it.

    Args:
        roots: what is differentiated; none for a read.
        is_no_grad_only: leave values with a gradient in their history.
        gets: whether a real tensor is to get a gradient; None: all are.
        unwanted: lazies whose numbers nobody is to get.
        beside: plain tensors that are differentiated together with the roots.

    Returns:
        The program and its plan, which has no chunks if nothing has to run. None if the program
        runs whole.
    """
    program = Program(roots, is_no_grad_only, gets=gets, unwanted=unwanted, beside=beside)
    if not program.n_nodes:
        return program, plans.Plan(0)
    arrays.check(program)
    if roots:
        read_numbers.check(program)
        # torch's engine is running if this is the backward of a part that was cut off.
        is_some = gets is not None or not torch.autograd._is_checkpoint_valid()
        checkpoints.check(program, is_some)
        left_plain.note_behind(program.entered)
    logs.log_whole(program)
    is_whole = program.unstageable is not None or not program.has_body
    cause = explain.cause_of_whole(program) if is_whole else explain.FITS_LATER
    try:
        if is_whole:
            needed = estimates.estimate(program, bool(roots)).whole
            unsplit.check_whole(program, cause, needed)
        is_live = program.unstageable is not None or (roots and is_whole)
        if is_live:
            steps.note_end(None)
        if is_live or not roots:
            planned = None if is_live else planner.plan_read(program, is_no_grad_only)
            if planned is None:
                reports.decide(cause)
            return (program, planned) if planned is not None else None
        planned = planner.plan(program, True)
        steps.note_end(planned.whole or None)
    except MemoryLimitError:
        _core.abandon()  # it runs again only if its values are asked for, as after out of memory
        raise
    if not planned.is_whole:
        freed_graphs.check_program(program.handle)
        overwritten.check(program)
        return program.cut_for(planned.strategy), planned
    decision = reports.Decision(
        planned.why,
        planned.predicted,
        planned.allowed,
        layers=explain.layers_of(program, planned),
        least_limit=planned.limit_for_report(),
    )
    reports.decide(decision)
    return None


def read(is_no_grad_only: bool = False, caller: Callable[..., Any] | None = None) -> bool:
    """Compute the pending values that the user can reach, in chunks.

    Args:
        is_no_grad_only: leave values with a gradient in their history.
        caller: the function that asks, for the report.

    Returns:
        False if the program has to run whole.
    """
    with reports.Asking("a read" if caller is None else reports.call_of(caller)):
        return read_all(is_no_grad_only)


@in_turn
@surroundings.in_outside
def read_all(is_no_grad_only: bool) -> bool:
    """As `read`, where the caller has noted for the report what asks."""
    if _core.is_empty():  # as at most steps of optimizers
        return True
    settle_outdated()
    if _is_whole():
        return False
    _core.check_leaves()
    staged = _stage([], is_no_grad_only)
    if staged is not None and staged[1].n_chunks == 0:
        return True

    def run(replay: Replay) -> None:
        replay.compute()
        replay.settle(False)

    done = _attempt(*staged, run) if staged is not None else None
    return done is not None


def _has_leaves(program: Program) -> bool:
    """Return whether the user holds a leaf in mid-program that has no number yet."""
    return "has_leaves" in _core.notes() and any(map(leaves.is_begun, program.wanted))


def settle_leaves() -> None:
    """Compute the leaves in mid-program that the user holds and may ask for the gradient of."""
    if "has_leaves" in _core.notes() and not _core.is_busy() and _core.has_no_grad():
        _settle_leaves()


@in_turn
def _settle_leaves() -> None:
    if _has_leaves(Program([], True)):
        with reports.Asking("requires_grad_()"):
            if not read_all(True):
                _core.flush()


@surroundings.in_outside
def compute_again(unwanted: tuple[_core.LazyTensor, ...]) -> dict[int, torch.Tensor] | None:
    """Compute the values of a part that was cut off once more, in chunks, without a graph.

    Args:
        unwanted: lazies of its tape whose numbers nobody needs.

    Returns:
        The numbers by value; None if the part has to run whole.
    """
    if planner.is_whole():
        return None
    _core.check_leaves()
    program = Program([], unwanted=unwanted)
    if program.unstageable is not None or not program.has_body:
        return None

    def run(replay: Replay) -> dict[int, torch.Tensor]:
        replay.compute()
        replay.settle(False)
        return {value: number for value, number, _ in replay.numbers.found}

    done = _attempt(program, planner.plan(program, False), run)
    return None if done is None else done[0]


def differentiate(
    roots: list[torch.Tensor],
    gradients: list[torch.Tensor | None],
    is_retained: bool,
    inputs: Sequence[torch.Tensor] | None,
    finish: Callable[[list[torch.Tensor], list[torch.Tensor]], Any],
) -> Any:
    """Differentiate the roots in chunks and deliver the gradients of the real tensors.

    Args:
        roots: lazies of one tape, and tensors beside it.
        gradients: of the roots; None stands for ones.
        is_retained: whether the roots can be differentiated again.
        inputs: the tensors that get a gradient; None: all.
        finish: given outputs and their gradients, calls torch's backward.

    Returns:
        What `finish` returns; NotImplemented if the program has to run whole.
    """

    def take(found: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        return deliver.deliver(found, finish)

    pending: list[torch.Tensor] = []
    others: list[torch.Tensor | None] = []
    beside: list[tuple[torch.Tensor, torch.Tensor]] = []
    for root, gradient in zip(roots, gradients, strict=True):
        real = _core.real(root) if type(root) is _core.LazyTensor else root
        if real is None:
            pending.append(root)
            others.append(gradient)
            continue
        sent = sending.number_of(gradient)
        if not (
            isinstance(real, torch.Tensor) and real.requires_grad and sending.is_fit(real, sent)
        ):
            return NotImplemented  # the whole run raises torch's own error
        beside.append((real, sending.filled(real, sent)))
    if not pending:
        return NotImplemented
    gets = engine.getters(inputs) if inputs else None
    words = pending, others, is_retained, gets, take, (), beside
    return _held(pending[0], _differentiate, words, {})


def gradients_of(
    roots: list[torch.Tensor],
    gradients: list[torch.Tensor | None],
    is_retained: bool,
    unwanted: tuple[_core.LazyTensor, ...],
    gets: Callable[[torch.Tensor], bool] | None,
) -> Any:
    """Differentiate the roots in chunks.

    Args:
        roots: lazies of one tape.
        gradients: of the roots.
        is_retained: whether they can be differentiated again.
        unwanted: lazies of that tape whose numbers nobody is to get.
        gets: whether a real tensor is to get a gradient; None: all are.

    Returns:
        Pairs of a real tensor and its gradient; NotImplemented if the program has to run whole.
    """
    words = roots, gradients, is_retained, gets, list, unwanted
    return _held(roots[0], _differentiate, words, {}) if roots else NotImplemented


#: Calls a function with the tape of a root in force, which may be another thread's or that of a
#: part that was cut off.
_held = surroundings.in_outside(_core.held)


def _refuse_outdated(roots: list[Any]) -> NoReturn:
    """Raise: a tensor was changed that calls read which this backward would have to run again."""
    program, name = Program(roots), "backward: a tensor"
    for node in program.nodes.values():
        for leaf in program.reads(node):
            real = program.info(leaf).real
            if real is not None and leaf not in _core.leaves_of(real):  # it lists those unchanged
                where = _core.node(node.id)[3]
                name = f"{name_of_call(node.id)} ({where}): a tensor of shape {list(real.shape)}"
    raise StaleError(
        f"{name} was changed in place after the value that is differentiated was computed with it; "
        "change it after backward()"
    )


def _differentiate(
    roots: list[Any],
    gradients: list[torch.Tensor | None],
    is_retained: bool,
    gets: Callable[[torch.Tensor], bool] | None,
    take: Callable[[list[tuple[torch.Tensor, torch.Tensor]]], Any],
    unwanted: tuple[_core.LazyTensor, ...] = (),
    beside: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> Any:
    notes = _core.notes()
    if "has_leaves" in notes:
        settle_leaves()
    for root in roots:
        if _core.real(root) is not None or not root.requires_grad:
            return NotImplemented
    all_such, some = _core.outdated(False)
    if all_such or some:
        if not {*all_such, *some}.isdisjoint(map(_core.id, roots)):
            _refuse_outdated(roots)
        settle_outdated()
    if "versions" in notes:
        with unwritten.reading():
            overwritten.check_moved(roots)
    if all(map(_core.is_pending_here, roots)) and _is_whole():
        _core.forget_left()
        return NotImplemented
    given = list(map(sending.number_of, gradients))
    if not all(map(sending.is_fit, roots, given)):
        return NotImplemented  # the whole run raises torch's own error
    if not all(map(_core.is_pending_here, roots)):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        _core.check_leaves()
        for root in roots:
            _core.describe(root)  # raises if a tensor that it was computed with was changed since
    _core.forget_left()
    staged = _stage(roots, False, gets, unwanted, [real for real, _ in beside])
    if staged is None or _has_leaves(staged[0]):
        return NotImplemented
    filled = list(map(sending.filled, roots, given))  # only now: a whole run makes its own
    given.clear()

    def run(replay: Replay) -> tuple[bool, Any]:
        found = [*replay.differentiate(filled), *beside]
        replay.settle(not is_retained)
        if deliver.goes_on(found, replay.is_graph_freed):
            return True, found
        replay.is_delivering = True  # from here the user's hooks run, so no try can follow
        visible.show(replay, replay.numbers)
        return False, take(found)

    done = _attempt(*staged, run)
    if done is None:
        return NotImplemented
    goes_on, result = done[0]
    del done, staged
    filled.clear()
    if goes_on:  # the graph behind runs now, after this program has freed all that it held
        result = take(result)
    _core.note_backward()
    return result
