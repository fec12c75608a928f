# SPDX-License-Identifier: Apache-2.0
"""report(): what the last step ran, program by program, and what of it ran whole and why.

A step begins with lazy(): but not while gradients gather for an optimizer that has yet to step, so
all parts of an accumulated batch belong to one step. Two optimizers that share a batch, as a GAN's
may, share its step. A script that makes its batch lazy once and for all begins a step where an
optimizer steps again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from koila.basics.lines import user_line
from koila.memory import budget, resident
from koila.messages.errors import hide_frames
from koila.messages.layer_table import Layer
from koila.messages.words import count, size, sizes
from koila.reporting.report_types import DUNDER, MOST_PROGRAMS, ProgramReport, Report, Whole

_logger = logging.getLogger("koila")

_N_WATCHED = 4  # parameters of each group


#: What a user does not know by its name.
_KNOWN_AS = {"_is_all_true": "the check of a distribution's arguments"}
_TRANSFORMS = {
    "grad_impl": "torch.func.grad",
    "grad_and_value_impl": "torch.func.grad_and_value",
    "vjp_impl": "torch.func.vjp",
    "_vjp_with_argnums": "torch.func.vjp",
    "jvp_impl": "torch.func.jvp",
    "_jvp_with_argnums": "torch.func.jvp",
    "vmap_impl": "torch.func.vmap",
}


def call_of(func: Callable[..., Any]) -> str:
    """What asks for numbers, as it is told: "item()"."""
    name = name_of(func)
    return _KNOWN_AS.get(name, f"{name}()")


def name_of(func: Callable[..., Any]) -> str:
    """What a user calls it: of an attribute its name, of a custom function its class."""
    name = str(getattr(func, "__name__", func))
    owner: Any = getattr(func, "__self__", None)
    if name == "__get__" and owner is not None:
        return str(getattr(owner, "fget", owner).__name__)  # a property may have no name
    is_custom = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    known = _TRANSFORMS.get(name, name)
    return f"{owner.__name__}.{name}" if is_custom else DUNDER.sub(r"\1", known)


@dataclass(frozen=True)
class Decision:
    """Why a program is about to run whole, and what was predicted for it."""

    why: str
    bytes_predicted: float | None = None
    bytes_allowed: float | None = None
    whole: tuple[Whole, ...] = ()
    layers: tuple[Layer, ...] = ()
    least_limit: float | None = None


class _State(threading.local):
    def __init__(self) -> None:
        self.programs: deque[ProgramReport] = deque(maxlen=MOST_PROGRAMS)
        self.n_noted = 0  # of this thread
        self.n_steps = 0  # of optimizers
        self.n_rows = 0  # of the batch that lazy() made last
        self.is_over = False  # the next program is the first of another step
        self.n_at_backward = -1  # n_noted when a backward of this step began; -1: none did
        self.n_at_step = -1  # when an optimizer stepped last in it
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.gradients: dict[int, list[Any]] = {}  # before the first backward of this step
        self.stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # in this step
        self.asked: str | None = None
        self.peak: resident.Peak | None = None  # of the process, while what was asked for runs
        self.decision: Decision | None = None
        self.reason = ""
        self.training: Report | None = None  # the last step that had a backward
        self.evaluation: Report | None = None  # the last that had none


_state = _State()
_ways: dict[str, tuple[int, int | None, str]] = {}  # how a line's program ran last, as was logged


class Observer:
    """Is told of all that runs, on whatever thread."""

    def note_program(self, ran: ProgramReport) -> None:
        """A program has run, and its report is not changed any more."""

    def note_step(self) -> None:
        """An optimizer steps."""

    def note_plain(self, line: str) -> None:
        """A backward of plain tensors is about to run."""


_observers: list[Observer] = []


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """A block of which an observer is told; at its end a step of this thread is over, and report()
    is of it until another begins."""
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
    """Begin a step with the programs noted last."""
    over = tuple(itertools.islice(_state.programs, max(0, len(_state.programs) - n_kept)))
    if over and Report(over).is_training:
        _state.training = Report(over)
    elif over:
        _state.evaluation = Report(over)
    while len(_state.programs) > n_kept:
        ran = _state.programs.popleft()
        for observer in _observers:
            observer.note_program(ran)
    _state.is_over = False
    _state.n_at_backward = _state.n_at_step = -1
    _state.stepped.clear()


def _gradients() -> dict[int, list[Any]]:
    """What a few gradients are now of the parameters that optimizers of this thread step."""
    found: dict[int, list[Any]] = {}
    for optimizer in _state.optimizers:
        groups = (group["params"] for group in optimizer.param_groups)
        grads = (p.grad for params in groups for p in params[:_N_WATCHED])
        found[id(optimizer)] = [g if g is None else (id(g), g._version) for g in grads]
    return found


def _is_gathering() -> bool:
    """Whether this step's gradients gather for an optimizer that has yet to step."""
    if _state.n_at_backward < 0 or _state.n_at_step >= 0:
        return False
    before = _state.gradients
    return any(key in before and now != before[key] for key, now in _gradients().items())


def begin_batch(n_rows: int) -> None:
    """lazy() makes another batch, of so many rows."""
    _state.n_rows = n_rows
    if _state.programs and not _state.is_over:
        _state.is_over = not _is_gathering()


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer is about to step, and what was pending has run."""
    if optimizer in _state.stepped:
        _begin(_state.n_noted - _state.n_at_step)
    for observer in _observers:
        observer.note_step()
    _state.optimizers.add(optimizer)
    _state.stepped.add(optimizer)
    _state.n_steps += 1
    _state.n_at_step = _state.n_noted


def note_plain(line: str) -> int:
    """A backward of plain tensors is about to run; the rows of the last lazy batch, 0 before it."""
    for observer in _observers:
        observer.note_plain(line)
    return _state.n_rows


def note_backward() -> None:
    """A backward is about to run."""
    if _state.is_over:
        _begin(0)
    if _state.n_at_backward < 0:
        _state.gradients = _gradients()
    _state.n_at_backward = _state.n_noted


def note(ran: ProgramReport) -> None:
    """Remember how a program was run, and log it: INFO where it is run otherwise than before."""
    if _state.is_over:
        _begin(0)
    _state.programs.append(ran)
    _state.n_noted += 1
    if _logger.isEnabledFor(logging.DEBUG):
        _logger.debug("step %d: %s", _state.n_steps + 1, ran)
    if ran.n_calls == 0 or ran.bytes_predicted is None or ran.bytes_allowed is None:
        return
    way = ran.n_chunks, ran.n_rows, ran.way
    if _ways.get(ran.line) != way and _logger.isEnabledFor(logging.INFO):
        _ways[ran.line] = way
        many = f"{count(ran.n_chunks, 'chunk')} of {ran.n_rows or 0}"
        how = many + (f", {ran.way}" if ran.way else "") if ran.stages else "whole"
        needs, has = sizes(ran.bytes_predicted, ran.bytes_allowed)
        passes = max((stage.passes for stage in ran.stages), default="1 forward")
        forwards = passes.partition(",")[0]
        text = "step %d (%s): %s, %s of %s, %s"
        _logger.info(text, _state.n_steps + 1, ran.line, how, needs, has, forwards)


def note_left(what: str, line: str, made: str) -> None:
    """A call made a plain tensor of lazies, or wrote one; told once a step for each line."""
    told = () if _state.is_over else _state.programs
    if not any(ran.what == what and ran.line == line and ran.why == made for ran in told):
        note(ProgramReport(what, line, why=made))


def is_decided() -> bool:
    """Whether it is known why the program that is about to run runs whole."""
    return _state.decision is not None


def give_reason(why: str) -> None:
    """Remember why the next call needs what waits whole."""
    _state.reason = why


def decide(decision: Decision | None) -> None:
    """Remember why the program that is about to run runs whole."""
    _state.decision = decision


def asked() -> str:
    """What made a program run."""
    return _state.asked or "a read"


def note_whole(
    func: Callable[..., Any] | None,
    n_calls: int,
    n_bytes: int,
    error: type[BaseException] | None = None,
) -> None:
    """Pending calls have run as they were written.

    Args:
        func: the call that needed them, if any.
        n_calls: how many ran.
        n_bytes: what they made.
        error: what the last of them raised.
    """
    decision, _state.decision = _state.decision, None
    reason, _state.reason = _state.reason, ""
    line = user_line()
    what = asked() if func is None or _state.asked is not None else call_of(func)
    if error is not None:
        why = f"{error.__name__} after {count(n_calls - 1, 'call')}"
        note(ProgramReport(what, line, n_calls, n_chunks=0, why=why))
    elif n_calls > 0:
        decision = decision or _undecided(func, line, n_calls, n_bytes, reason)
        note(
            ProgramReport(
                what,
                line,
                n_calls,
                n_bytes,
                bytes_predicted=decision.bytes_predicted,
                bytes_allowed=decision.bytes_allowed,
                why=decision.why,
                whole=decision.whole,
                layers=decision.layers,
                least_limit=decision.least_limit,
            )
        )


def note_at_once(func: Callable[..., Any], why: str) -> None:
    """A call runs where it stands, on the whole batch; those that follow each other for one reason
    are told as one program."""
    last = _state.programs[-1] if _state.programs and not _state.is_over else None
    if last is not None and last.why == why:
        _state.programs[-1] = dataclasses.replace(last, n_calls=last.n_calls + 1)
    else:
        note(ProgramReport(call_of(func), user_line(), 1, why=why))


def note_handed_out(func: Callable[..., Any], n_bytes: int) -> None:
    """The program that ran last was cut for a call that cannot be recorded.

    Args:
        func: the call.
        n_bytes: of the numbers that the user can reach there.
    """
    why = "it is not recorded, and the program is cut before it"
    entry = Whole(name_of(func), user_line(), why, n_bytes, 0, False)
    if _state.programs and n_bytes:
        ran = _state.programs.pop()
        _state.programs.append(dataclasses.replace(ran, whole=(*ran.whole, entry)))


def _undecided(
    func: Callable[..., Any] | None, line: str, n_calls: int, n_bytes: int, reason: str
) -> Decision:
    """Why calls ran whole without a plan: something needed them as eager has them."""
    if func is None:
        return Decision("it has to have run before what follows")
    why = reason or "it needs its arguments with their graph, and is not recorded"
    name = name_of(func)
    return Decision(f"for {name}", whole=(Whole(name, line, why, n_bytes, n_calls, False),))


def ran_before() -> list[Whole]:
    """What in this step could not be recorded and made all before it run whole, by its bytes."""
    found = [one for ran in _state.programs for one in ran.whole if not one.is_recorded]
    return sorted(found, key=lambda one: -one.n_bytes)


#: What runs in less is not measured.
_LEAST_MEASURED = 2**20
#: Beyond what is allowed: what an allocator rounds up, and what libraries take besides tensors.
_ROUNDING = 1.05
_over: set[str] = set()  # the lines that were told of


def measure(n_bytes: float) -> None:
    """A program is planned that may take so many bytes: look at what it takes under a limit."""
    is_told = _state.asked is not None and _state.peak is None
    if not is_told or n_bytes < _LEAST_MEASURED or not budget.is_limited():
        return
    if not budget.is_bound() or budget.slack() == budget.SLACK:  # else it takes what is short
        _state.peak = resident.Peak()


def _note_measured(n_noted: int) -> None:
    """Of the last programs, the one that was thought to take most took what was measured."""
    peak, _state.peak = _state.peak, None
    if peak is None:
        return
    n_bytes = peak.stop()
    budget.trim(peak.at_end)
    ran = list(_state.programs)
    last = ran[max(0, len(ran) - n_noted) :] if n_noted > 0 else []
    found = max(last, key=lambda one: one.bytes_predicted or 0.0, default=None)
    if n_bytes is None or found is None or found.bytes_allowed is None:
        return
    if found.bytes_measured is None:
        found_at = len(ran) - 1 - ran[::-1].index(found)
        _state.programs[found_at] = dataclasses.replace(found, bytes_measured=n_bytes)
    if n_bytes > _ROUNDING * found.bytes_allowed + budget.SLACK and found.line not in _over:
        _over.add(found.line)
        budget.fix_malloc()
        _logger.warning(
            "%s at %s took %s of memory, where %s were left and %s were predicted: libraries and "
            "Python take some beside tensors; set a lower memory_limit to make room for that",
            found.what,
            found.line,
            size(n_bytes),
            size(found.bytes_allowed),
            size(found.bytes_predicted or 0.0),
        )


class Asking:
    """What makes programs run inside it; if that fails, it is noted as such."""

    def __init__(self, what: str, idle: str = "") -> None:
        self.what, self.idle = what, idle  # idle: what is said where no call had to run
        self.is_outermost = _state.asked is None
        self.n_before = _state.n_noted

    def __enter__(self) -> None:
        if self.is_outermost:
            _state.asked = self.what
            _state.decision = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.is_outermost:
            _state.asked = None
            _note_measured(_state.n_noted - self.n_before)
            is_told = _state.n_noted > self.n_before and _state.programs[-1].n_chunks == 0
            if error is not None:
                hide_frames(error)  # the user's outer ones are added on the way out
            if error is not None and not is_told:
                why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                note(ProgramReport(self.what, user_line(), n_chunks=0, why=why))
            elif error is None and self.idle and _state.n_noted == self.n_before:
                note(ProgramReport(self.what, user_line(), why=self.idle))


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """A block whose programs are a part of one that is noted itself."""
    known = vars(_state).copy()
    _state.__init__()  # type: ignore[misc]
    try:
        yield
    finally:
        vars(_state).update(known)


def report() -> Report:
    """What the last step of this thread ran: what was recorded since lazy() made its batch.

    Returns:
        A report that prints well. Its attributes say how the main program was run.

    Example:
        >>> import torch, koila
        >>> with koila.config(chunks=3):
        ...     koila.lazy(torch.ones(7, 2)).sum().item()
        14.0
        >>> koila.report().n_chunks, koila.report().n_rows
        (3, 3)
    """
    return Report(tuple(_state.programs), _state.training, _state.evaluation)
