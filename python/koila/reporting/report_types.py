# SPDX-License-Identifier: Apache-2.0
"""The types of koila.report(): how programs ran, as numbers and as text."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from koila.messages import cards
from koila.messages.layer_table import Layer
from koila.messages.layer_table import table as layers_table
from koila.messages.words import count, hint_to_save, size, sizes

#: A step keeps the reports of its last programs, at most this many.
MOST_PROGRAMS = 1000
_MOST_LISTED = 5
_MOST_STAGES = 10
_MOST_PRINTED = 12
#: A report tells of so many batches of which nothing was computed; one or two may be in use.
_MANY_UNUSED = 3
DUNDER = re.compile(r"^__(\w+)__$")


@dataclass(frozen=True)
class Whole:
    """A call that ran on the whole batch, or made others run on it.

    Attributes:
        call: the name of the call.
        line: the line of the script that made it, such as "train.py:40".
        why: why it does not run in chunks.
        n_bytes: bytes of the results for the whole batch, without views.
        n_calls: how many calls made these results: this one and those that run whole because of it.
            0: the calls ran in chunks, and their results were put together for a call that cannot
            be recorded.
        is_recorded: the call is one of these; otherwise it is a call that needs their results.
    """

    call: str
    line: str
    why: str
    n_bytes: int
    n_calls: int = 1
    is_recorded: bool = True

    def __str__(self) -> str:
        if self.n_calls == 0:
            n_bytes = size(self.n_bytes)
            return f"{self.call} ({self.line}) took {n_bytes} of the whole batch: {self.why}"
        if not self.is_recorded:
            made = f"{count(self.n_calls, 'call')} with {size(self.n_bytes)} of results"
            return f"{self.call} ({self.line}) made {made} run whole: {self.why}"
        return f"{self.made('made')}: {self.why}"

    def made(self, verb: str) -> str:
        """Describe the call and the bytes of its results; `verb` is "made" or "makes"."""
        others = f", with {count(self.n_calls - 1, 'other call')}," if self.n_calls > 1 else ""
        return f"{self.call} ({self.line}){others} {verb} {size(self.n_bytes)} whole"


@dataclass(frozen=True)
class Stage:
    """A part of a program: recorded calls that ran chunk by chunk, or once on the whole batch.

    Attributes:
        number: its position in the order in which parts run, from 1.
        n_calls: the number of its recorded calls; 0 if it only adds up results of the chunks, or
            only counts what a mean in a later part divides by.
        n_chunks: the number of chunks; 1 for a part on the whole batch.
        n_rows: the samples of the largest chunk; None for a part on the whole batch.
        passes: how often each chunk ran forward and backward, in words.
        why: why each chunk ran forward twice; empty if it did not.
    """

    number: int
    n_calls: int
    n_chunks: int
    n_rows: int | None
    passes: str
    why: str = ""

    def __str__(self) -> str:
        calls = f"part {self.number}: {count(self.n_calls, 'call')}"
        if self.n_calls == 0 and self.n_rows is None:
            return f"part {self.number}: adds up the results of the chunks"
        if self.n_calls == 0:
            calls = f"part {self.number}: the divisor of a later mean"
        if self.n_rows is None:
            return f"{calls} on the whole batch"
        chunks = f"{count(self.n_chunks, 'chunk')} of {count(self.n_rows, 'sample')}"
        why = f": {self.why}" if self.why else ""
        return f"{calls} in {chunks}, {self.passes}{why}"


class _Limit:
    """A field that may be given as a function, which is called when the field is read first."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, report: object | None, owner: type) -> float | None:
        if report is None:
            return None  # the default of the field
        value = vars(report)[self._name]
        if callable(value):
            value = vars(report)[self._name] = value()
        found: float | None = value
        return found

    def __set__(self, report: object, value: float | Callable[[], float] | None) -> None:
        vars(report)[self._name] = value


@dataclass(frozen=True)
class ProgramReport:
    """How one program ran: recorded calls that ran together, since something needed a number.

    Attributes:
        what: the call that made it run, such as "backward()" or "item()".
        line: the line of that call, such as "train.py:40".
        n_calls: the recorded calls that ran; 0 if all had run before.
        n_bytes: bytes of their results, for the whole batch.
        n_chunks: the number of chunks; 1: whole, as it was written; 0: it failed.
        n_rows: samples of the largest chunk; None if it ran whole.
        n_tries: how often it was tried; more than 1 if memory ran out and smaller chunks followed.
        bytes_predicted: its predicted peak, beside what existed before. None if it was not
            predicted, since the program certainly fits or config(chunks=) decided.
        bytes_allowed: the bytes that it was allowed.
        bytes_whole: its predicted peak for a whole run.
        bytes_measured: its measured peak, beside what existed before: on a GPU of tensors, on the
            CPU, under a limit, of the process's resident private memory. None if it was not
            measured: on the CPU without a limit, or for programs below 1 MiB, and on a GPU if its
            allocator had a higher peak before.
        why: why it ran whole, or failed; empty if it ran in chunks.
        stages: its parts, if it ran in chunks.
        whole: the calls that ran on the whole batch although they read samples of it.
        strategy: what saved memory beside chunks, and what it costs; empty: nothing did.
        layers: the layers and the bytes that they keep for backward, if the program was planned.
        least_limit: the least memory_limit, in bytes, that works; None if no limit was set.
    """

    what: str
    line: str
    n_calls: int = 0
    n_bytes: int = 0
    n_chunks: int = 1
    n_rows: int | None = None
    n_tries: int = 1
    bytes_predicted: float | None = None
    bytes_allowed: float | None = None
    bytes_measured: int | None = None
    why: str = ""
    stages: tuple[Stage, ...] = ()
    whole: tuple[Whole, ...] = ()
    strategy: str = ""
    bytes_whole: float | None = None
    layers: tuple[Layer, ...] = ()
    least_limit: _Limit = _Limit()

    def changed(self, **values: Any) -> ProgramReport:
        """Return a copy with other values of some fields, without reading the least limit."""
        made = object.__new__(ProgramReport)
        vars(made).update(vars(self), **values)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "least_limit": self.least_limit}

    def _lines(self) -> Iterator[str]:
        yield f"{self.what} at {self.line}: {self._summary()}"
        memory = self.memory()
        if memory:
            yield f"    {memory}"
        yield from (f"    {stage}" for stage in self.stages[:_MOST_STAGES])
        if len(self.stages) > _MOST_STAGES:
            yield f"    and {count(len(self.stages) - _MOST_STAGES, 'more part')}"
        yield from (f"    whole: {entry}" for entry in self.whole[:_MOST_LISTED])
        if len(self.whole) > _MOST_LISTED:
            yield f"    whole: {count(len(self.whole) - _MOST_LISTED, 'call')} more"

    def memory(self) -> str:
        """Describe the bytes predicted, left and measured; may be empty for whole runs."""
        measured = "not measured" if self.bytes_measured is None else size(self.bytes_measured)
        if self.bytes_predicted is None or self.bytes_allowed is None:
            why = "config(chunks=) sets the number of chunks, so no memory was predicted"
            took = f"; measured: {measured}" if self.bytes_measured is not None else ""
            return why + took if self.n_rows is not None else ""
        predicted, left = sizes(self.bytes_predicted, self.bytes_allowed)
        whole = f"whole needs {size(self.bytes_whole)}; " if self.bytes_whole is not None else ""
        text = f"{whole}predicted {predicted} of {left} left, measured: {measured}"
        if self.least_limit is None:
            return text
        return f"{text}; least limit that works: {size(self.least_limit)}"

    def _summary(self) -> str:
        if self.n_chunks == 0:
            return f"failed: {self.why}"
        if self.n_calls == 0:
            return self.why
        results = f" with {size(self.n_bytes)} of results" if self.n_bytes else ""
        calls = count(self.n_calls, "call") + results
        if self.n_chunks == 1 and self.n_rows is None:
            is_unknown = self.n_bytes > 0 and self.bytes_predicted is None
            return f"{calls}, whole: {self.why}" + ("; no memory was predicted" * is_unknown)
        tries = f", at try {self.n_tries}" if self.n_tries > 1 else ""
        samples = count(self.n_rows or 0, "sample")
        strategy = f", {self.strategy}" if self.strategy else ""
        return f"{calls}, in {count(self.n_chunks, 'chunk')} of {samples}{strategy}{tries}"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__


#: The values of ProgramReport.what for a backward pass.
BACKWARDS = frozenset(("backward()", "autograd.grad()"))
WHAT = operator.attrgetter("what")


#: The text of a report if nothing lazy ran.
NOTHING_RAN = (
    "nothing lazy ran in the last step (koila.lazy() changes nothing in place: use what it returns)"
)


@dataclass(frozen=True)
class Report:
    """The programs that a step ran. Printing it shows all of them.

    Attributes:
        programs: their reports, in the order they ran: reads, a teacher, backward(), a metric.
        training: the last step before this one with a backward; None: there was none.
        evaluation: the last step before this one without a backward; None: there was none.
        n_unused: the batches that lazy() made after this step, and of which nothing was computed.

    The other attributes are those of its main program, whose calls make the most bytes; see
    ProgramReport. If nothing lazy ran, n_chunks is 0.
    """

    programs: tuple[ProgramReport, ...] = ()
    training: Report | None = None
    evaluation: Report | None = None
    n_unused: int = 0

    @property
    def main(self) -> ProgramReport | None:
        """The program whose calls make the most bytes; None: nothing lazy ran.

        Calls that a read ran without a graph run again in backward(), where the calls of the read
        itself are missing. So it is the last program that makes at least half of the most bytes.
        """
        most = max(reversed(self.programs), key=lambda ran: ran.n_bytes, default=None)
        if most is None or not most.stages:
            return most
        return next(ran for ran in reversed(self.programs) if 2 * ran.n_bytes >= most.n_bytes)

    @property
    def n_chunks(self) -> int:
        return self.main.n_chunks if self.main is not None else 0

    @property
    def n_rows(self) -> int | None:
        return self.main.n_rows if self.main is not None else None

    @property
    def n_tries(self) -> int:
        return self.main.n_tries if self.main is not None else 0

    @property
    def bytes_predicted(self) -> float | None:
        return self.main.bytes_predicted if self.main is not None else None

    @property
    def bytes_allowed(self) -> float | None:
        return self.main.bytes_allowed if self.main is not None else None

    @property
    def bytes_measured(self) -> int | None:
        return self.main.bytes_measured if self.main is not None else None

    def __str__(self) -> str:
        return "\n".join((*self.lines(), *layers_table(self.layers)))

    def __repr__(self) -> str:
        return f"{self}\n{hint_to_save('report.txt')}" if self.programs else str(self)

    def lines(self) -> list[str]:
        """Return the text, line by line: the programs, and for a step without a backward also the
        last training step."""
        if not self.programs:
            lines = [NOTHING_RAN]
        else:
            lines = [f"the last step ran {count(len(self.programs), 'pass')}"]
        alike = [(text, len(list(ran))) for text, ran in itertools.groupby(map(str, self.programs))]
        if len(alike) > _MOST_PRINTED:
            alike = alike[-_MOST_PRINTED:]
            lines[0] += f"; the last {sum(times for _, times in alike)}:"
        lines += [text if times == 1 else f"{times} times: {text}" for text, times in alike]
        before = self.training.main if self.training is not None else None
        if self.programs and not self.is_training and before is not None:
            lines.append(f"the last training step before it: {before}")
        if self.programs and self.n_unused >= _MANY_UNUSED:
            lines.append(
                f"since then lazy() made {self.n_unused} batches of which nothing was computed: "
                "use what koila.lazy() returns"
            )
        return lines

    @property
    def is_training(self) -> bool:
        """Whether the step had a backward."""
        return not BACKWARDS.isdisjoint(map(WHAT, self.programs))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the main program of the last training step, with the bytes they keep."""
        steps = (self, self.training)
        mains = (one.main for one in steps if one is not None)
        return next((one.layers for one in mains if one is not None and one.layers), ())

    def _repr_html_(self) -> str:
        return cards.html("koila.report", self.lines(), self.layers)
