# SPDX-License-Identifier: Apache-2.0
"""koila.report(): note how programs run, and which of them belong to the last step.

A step begins with lazy(), unless gradients accumulate for an optimizer that has yet to step: all
parts of an accumulated batch belong to one step. Two optimizers that share a batch, as those of a
GAN may, share its step. In a script that calls lazy() only once, a step begins when an optimizer
steps a second time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from koila.basics.lines import script_line, user_line
from koila.memory import budget, resident
from koila.messages.errors import hide_frames
from koila.messages.layer_table import Layer
from koila.messages.words import count, size, sizes
from koila.reporting.report_types import (
    BACKWARDS,
    DUNDER,
    MOST_PROGRAMS,
    ProgramReport,
    Report,
    Whole,
)

_logger = logging.getLogger("koila")

_N_WATCHED = 4  # the parameters of each group whose gradients are watched


#: Internal functions of torch, by the names that users know them by.
_KNOWN_AS = {"_is_all_true": "the check of a distribution's arguments"}
_TRANSFORMS = {
    "grad_impl": "torch.func.grad",
    "grad_and_value_impl": "torch.func.grad_and_value",
    "vjp_impl": "torch.func.vjp",
    "_vjp_with_argnums": "torch.func.vjp",
    "jvp_impl": "torch.func.jvp",
    "_jvp_with_argnums": "torch.func.jvp",
    "vmap_impl": "torch.func.vmap",
    "_engine_run_backward": "backward",
}


def call_of(func: Callable[..., Any]) -> str:
    """Return a call's name for reports, such as "item()"."""
    name = name_of(func)
    return _KNOWN_AS.get(name, name if name.endswith("=") else f"{name}()")


def name_of(func: Callable[..., Any]) -> str:
    """Return the name by which a user knows a function: of a property its attribute, of a method of
    a custom autograd.Function also its class."""
    name = str(getattr(func, "__name__", func))
    owner: Any = getattr(func, "__self__", None)
    if name == "__get__" and owner is not None:
        return str(getattr(owner, "fget", owner).__name__)  # a property may have no name
    is_custom = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    plain_name = _TRANSFORMS.get(name, name).removesuffix(".default")  # of an op, not of a function
    return f"{owner.__name__}.{name}" if is_custom else DUNDER.sub(r"\1", plain_name)


@dataclass(frozen=True)
class Decision:
    """Why a program is about to run whole, with the bytes predicted for it."""

    why: str
    bytes_predicted: float | None = None
    bytes_allowed: float | None = None
    whole: tuple[Whole, ...] = ()
    layers: tuple[Layer, ...] = ()
    least_limit: Callable[[], float] | None = None


class _State(threading.local):
    def __init__(self) -> None:
        self.programs: deque[ProgramReport] = deque(maxlen=MOST_PROGRAMS)
        self.n_noted = 0  # programs that this thread ran
        self.n_steps = 0  # steps of optimizers
        self.n_rows = 0  # rows of the batch that lazy() made last
        self.n_batches = 0  # that lazy() made
        self.n_used = 0  # those that lazy() had made when a program ran last
        self.is_over = False  # the next program begins another step
        self.n_at_backward = -1  # n_noted at the last backward of this step; -1: there was none
        self.n_at_step = -1  # n_noted when an optimizer last stepped in this step; -1: none did
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.gradients: dict[int, list[Any]] = {}  # `_gradients` before the step's first backward
        self.stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # in this step
        self.asked: str | None = None  # the call that makes programs run now
        self.peak: resident.Peak | None = None  # measures the process while that call runs
        self.decision: Decision | None = None
        self.reason = ""
        self.training: list[ProgramReport] = []  # of the last step with a backward
        self.evaluation: list[ProgramReport] = []  # of the last step without a backward


_state = _State()
#: By line and number of calls: the chunks, rows and strategy of the program that was logged last.
_strategies: dict[tuple[str, int], tuple[int, int | None, str]] = {}


class Observer:
    """Receives notes of all that runs, on any thread."""

    def note_program(self, ran: ProgramReport) -> None:
        """Receive the final report of a program that ran."""

    def note_step(self) -> None:
        """Note that an optimizer steps."""

    def note_plain(self, line: str) -> None:
        """Note that a backward of plain tensors is about to run."""


_observers: list[Observer] = []


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Wrap a block whose programs an observer receives. At its end the step of this thread is over;
    report() returns it until another step begins."""
    _begin(0)
    _observers.append(observer)
    try:
        yield
    finally:
        for ran in _state.programs:
            observer.note_program(ran)
        _state.is_over = bool(_state.programs)
        _observers.remove(observer)


def _begin(n_kept: int) -> None:
    """Begin a step; the last `n_kept` programs belong to it."""
    programs, over = _state.programs, []
    while len(programs) > n_kept:
        over.append(programs.popleft())
        for observer in _observers:
            observer.note_program(over[-1])
    if any([ran.what in BACKWARDS for ran in over]):
        _state.training = over
    elif over:
        _state.evaluation = over
    _state.is_over = False
    _state.n_at_backward = _state.n_at_step = -1
    _state.stepped.clear()


def _gradients() -> dict[int, list[Any]]:
    """Return, by optimizer of this thread, the identities and versions of a few of its
    gradients."""
    found: dict[int, list[Any]] = {}
    for optimizer in _state.optimizers:
        found[id(optimizer)] = [
            None if (grad := parameter.grad) is None else (id(grad), grad._version)
            for group in optimizer.param_groups
            for parameter in group["params"][:_N_WATCHED]
        ]
    return found


def _is_gathering() -> bool:
    """Tell whether gradients of this step accumulate for an optimizer that has yet to step."""
    if _state.n_at_backward < 0 or _state.n_at_step >= 0:
        return False
    return any(now != _state.gradients.get(key, now) for key, now in _gradients().items())


def begin_batch(n_rows: int) -> None:
    """Note that lazy() makes another batch, of `n_rows` rows."""
    _state.n_rows = n_rows
    _state.n_batches += 1
    if _state.programs and not _state.is_over:
        _state.is_over = not (_state.gradients and _is_gathering())


def n_batches() -> int:
    """Return how many batches lazy() made on this thread."""
    return _state.n_batches


def n_rows() -> int:
    """Return the rows of the last batch that lazy() made on this thread; 0: it made none."""
    return _state.n_rows


def is_batch_used() -> bool:
    """Tell whether anything has run since lazy() made its last batch."""
    return _state.n_used == _state.n_batches


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that an optimizer is about to step; all pending calls have run."""
    if optimizer in _state.stepped:
        _begin(_state.n_noted - _state.n_at_step)
    for observer in _observers:
        observer.note_step()
    _state.optimizers.add(optimizer)
    _state.stepped.add(optimizer)
    _state.n_steps += 1
    _state.n_at_step = _state.n_noted


def note_plain(line: str) -> int:
    """Note that a backward of plain tensors is about to run. Return the rows of the last batch that
    lazy() made; 0: it made none."""
    for observer in _observers:
        observer.note_plain(line)
    return _state.n_rows


def _note_backward() -> None:
    """Note that a backward is about to run."""
    if _state.is_over:
        _begin(0)
    if _state.n_at_backward < 0:
        _state.gradients = _gradients() if _state.optimizers else {}
    _state.n_at_backward = _state.n_noted


def note(ran: ProgramReport) -> None:
    """Add the report of a program, and log it: at INFO if it ran otherwise than before."""
    if _state.is_over:
        _begin(0)
    _state.programs.append(ran)
    _state.n_noted += 1
    _state.n_used = _state.n_batches
    if _logger.isEnabledFor(logging.DEBUG):
        _logger.debug("step %d: %s", _state.n_steps + 1, ran)
    if ran.n_calls == 0 or ran.bytes_predicted is None or ran.bytes_allowed is None:
        return
    strategy = ran.n_chunks, ran.n_rows, ran.strategy
    if _strategies.get((ran.line, ran.n_calls)) != strategy and _logger.isEnabledFor(logging.INFO):
        _strategies[ran.line, ran.n_calls] = strategy
        many = f"{count(ran.n_chunks, 'chunk')} of {ran.n_rows or 0}"
        how = many + (f", {ran.strategy}" if ran.strategy else "") if ran.stages else "whole"
        needs, has = sizes(ran.bytes_predicted, ran.bytes_allowed)
        passes = max((stage.passes for stage in ran.stages), default="1 forward")
        forwards = passes.partition(",")[0]
        text = "step %d (%s): %s, %s of %s, %s"
        _logger.info(text, _state.n_steps + 1, ran.line, how, needs, has, forwards)


def note_left(what: str, line: str, made: str) -> None:
    """Note, once a step for each line, that a call made or wrote a plain tensor of lazy ones."""
    noted = () if _state.is_over else _state.programs
    if not any(ran.what == what and ran.line == line and ran.why == made for ran in noted):
        note(ProgramReport(what, line, why=made))


def is_decided() -> bool:
    """Tell whether a decision is set for the program that is about to run whole."""
    return _state.decision is not None


def give_reason(why: str) -> None:
    """Set the reason why the next call makes the pending calls run whole."""
    _state.reason = why


def decide(decision: Decision | None) -> None:
    """Set the reason why the program that is about to run runs whole."""
    _state.decision = decision


def line_of(what: str) -> str:
    """Return the line to report for a call: of a backward that of the script, of a read that of the
    code that reads."""
    return script_line() if what in BACKWARDS else user_line()


def asked() -> str:
    """Return the call that makes programs run now."""
    return _state.asked or "a read"


#: Makes the report of a program that ran whole without a plan, which is the same in each step.
_unplanned = functools.lru_cache(2**8)(ProgramReport)


def note_whole(
    func: Callable[..., Any] | None,
    n_calls: int,
    n_bytes: int,
    error: type[BaseException] | None = None,
) -> None:
    """Note that pending calls have run whole, as they were written, for a call that needed them, if
    any. `n_bytes`: of their results. `error`: the type of the error that the last one raised."""
    decision, _state.decision = _state.decision, None
    reason, _state.reason = _state.reason, ""
    what = _state.asked or ("a read" if func is None else call_of(func))
    line = line_of(what)
    if error is not None:
        why = f"{error.__name__} after {count(n_calls - 1, 'call')}"
        note(ProgramReport(what, line, n_calls, n_chunks=0, why=why))
    elif n_calls > 0:
        decision = decision or _undecided(func, line, n_calls, n_bytes, reason)
        ran = _unplanned(what, line, n_calls, n_bytes, why=decision.why)
        if decision.bytes_predicted is not None or decision.whole:
            ran = ran.changed(**vars(decision))
        note(ran)


def note_at_once(func: Callable[..., Any], why: str) -> None:
    """Note that a call runs at once on the whole batch, without being recorded. Consecutive calls
    with the same reason make one report."""
    last = _state.programs[-1] if _state.programs and not _state.is_over else None
    if last is not None and last.why == why:
        _state.programs[-1] = last.changed(n_calls=last.n_calls + 1)
    else:
        note(ProgramReport(call_of(func), user_line(), 1, why=why))


def note_handed_out(func: Callable[..., Any], why: str, n_bytes: int) -> None:
    """Note that the last program was cut off before a call that cannot be recorded, and why.
    `n_bytes`: of the values that the user can reach at the cut."""
    why = f"it cannot be recorded, and the calls before it ran first, since {why}"
    entry = Whole(name_of(func), user_line(), why, n_bytes, 0, False)
    if _state.programs and n_bytes:
        ran = _state.programs.pop()
        _state.programs.append(ran.changed(whole=(*ran.whole, entry)))


def _undecided(
    func: Callable[..., Any] | None, line: str, n_calls: int, n_bytes: int, reason: str
) -> Decision:
    """Return why calls ran whole that were not planned: a call needed them on a real graph."""
    if func is None:
        return Decision("it has to have run before what follows")
    why = reason or "it needs its arguments with their graph, and is not recorded"
    name = name_of(func)
    return Decision(f"for {name}", whole=(Whole(name, line, why, n_bytes, n_calls, False),))


def ran_before() -> list[Whole]:
    """Return the calls of this step that could not be recorded and made others run whole, the
    largest first."""
    found = [one for ran in _state.programs for one in ran.whole if not one.is_recorded]
    return sorted(found, key=lambda one: -one.n_bytes)


#: Programs that need fewer bytes are not measured.
_LEAST_MEASURED = 2**20
#: A program may take this factor more than it was allowed, and budget.SLACK, before a warning:
#: allocators round up, and libraries take memory too.
_ROUNDING = 1.05
_over: set[str] = set()  # the lines for which a warning was logged


def measure(n_bytes: float) -> None:
    """Begin to measure the peak memory of the process before a program that may need `n_bytes`
    runs, if there is a limit."""
    is_wanted = _state.asked is not None and _state.peak is None
    if not is_wanted or n_bytes < _LEAST_MEASURED or not budget.is_limited():
        return
    # Not if the process has too little memory left for the sampling thread.
    if not budget.is_bound() or budget.slack() == budget.SLACK:
        _state.peak = budget.watch()


def _note_measured(peak: resident.Peak, n_noted: int) -> None:
    """Add the measured peak to the report of one of the last `n_noted` programs: that with the
    largest prediction."""
    _state.peak = None
    n_bytes = peak.stop()
    ran = list(_state.programs)
    last = ran[max(0, len(ran) - n_noted) :] if n_noted > 0 else []
    found = max(last, key=lambda one: one.bytes_predicted or 0.0, default=None)
    if n_bytes is None or found is None or found.bytes_allowed is None:
        return
    if found.bytes_measured is None:
        found_at = next(i for i, one in enumerate(ran) if one is found)
        _state.programs[found_at] = found.changed(bytes_measured=n_bytes)
    if n_bytes > _ROUNDING * found.bytes_allowed + budget.SLACK and found.line not in _over:
        _over.add(found.line)
        _logger.warning(
            "%s at %s took %s of memory, where %s were left and %s were predicted: libraries and "
            "Python take some beside tensors; set a lower memory_limit to make room for that",
            found.what,
            found.line,
            size(n_bytes),
            size(found.bytes_allowed),
            size(found.bytes_predicted or 0.0),
        )


#: The report's text for a backward that ran no recorded call.
_HAD_RUN = "all calls had run before, and left autograd's graph"


class Asking:
    """Wraps a call that makes programs run, and notes it as failed if it raises. `what` is the
    call, as reports show it: one of BACKWARDS is noted also if no program has to run."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        if self.what in BACKWARDS:
            _note_backward()
        self.is_outermost = _state.asked is None
        self.n_before = _state.n_noted
        if self.is_outermost:
            _state.asked = self.what
            _state.decision = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.is_outermost:
            _state.asked = None
            if _state.peak is not None:
                _note_measured(_state.peak, _state.n_noted - self.n_before)
            is_noted = _state.n_noted > self.n_before and _state.programs[-1].n_chunks == 0
            if error is not None:
                hide_frames(error)  # Python adds the user's outer frames as the error propagates
            if error is not None and not is_noted:
                why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                least = getattr(error, "least_limit", None)
                line = line_of(self.what)
                note(ProgramReport(self.what, line, n_chunks=0, why=why, least_limit=least))
            elif error is None and self.what in BACKWARDS and _state.n_noted == self.n_before:
                note(ProgramReport(self.what, line_of(self.what), why=_HAD_RUN))


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Wrap a block whose programs are part of another program, and are not noted themselves."""
    before = vars(_state).copy()
    _state.__init__()  # type: ignore[misc]
    try:
        yield
    finally:
        vars(_state).update(before)


def report() -> Report:
    """Report how the last step of this thread ran: all programs since lazy() made its batch.

    Returns:
        A report, which can be printed. Its attributes describe the main program.

    Examples:
        >>> import torch, koila
        >>> with koila.config(chunks=3):
        ...     koila.lazy(torch.ones(7, 2)).sum().item()
        14.0
        >>> koila.report().n_chunks, koila.report().n_rows
        (3, 3)
    """
    unused = _state.n_batches - _state.n_used
    before = (_state.training, _state.evaluation)
    training, evaluation = (Report(tuple(ran)) if ran else None for ran in before)
    return Report(tuple(_state.programs), training, evaluation, unused)
