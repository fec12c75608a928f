# SPDX-License-Identifier: Apache-2.0
"""The least memory_limit under which a program runs, for reports.

To find it takes longer than to plan the program. So it is found when somebody reads it in a report,
from what the core knew of the program, without its tensors, which are gone by then.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import NamedTuple

from koila import _core
from koila.planning import limits
from koila.staged.program import Program

#: So many programs are kept to be measured, for the reports of the last steps.
_N_KEPT = 3


class _Asking:
    """What a report holds: called, it returns the least limit, in bytes."""

    def __init__(self, before: limits.Before, needed: Needed) -> None:
        self._before, self._needed = before, needed
        needed.asking.add(self)

    def __call__(self) -> float:
        limit, _, stepping = self._before
        return limits.in_tenths(limit + max(stepping, self._needed.n_bytes()))


class Needed:
    """The least bytes in which programs of one kind run. When they are asked for first, `find`,
    given a program and whether it is differentiated, finds them."""

    def __init__(self, find: Callable[[Program, bool], float]) -> None:
        self._find = find
        self._found: float | None = None
        self._kept: tuple[Program, bool] | None = None  # with whether it is differentiated
        self.asking = weakref.WeakSet[_Asking]()

    def keep(self, program: Program, is_graph: bool, is_printed: bool) -> None:
        """Keep what is needed to find the bytes later. If the print of the program does not tell
        all that they depend on (`is_printed`), find them now."""
        if self._found is not None or self._kept is not None:
            return
        if not is_printed:
            self._found = self._find(program, is_graph)
            return
        self._kept = program.without_tensors(), is_graph
        _kept.append(self)
        while len(_kept) > _N_KEPT:
            _kept.pop(0)._let_go()

    def n_bytes(self) -> float:
        """Return the bytes."""
        if self._found is None:
            assert self._kept is not None, "it is kept while a report asks for it"
            program, is_graph = self._kept
            tape = _core.new_tape(program.cache.arrays)
            self._found = _core.held(tape, self._find, (program, is_graph), {})
            self._kept = None
            with contextlib.suppress(ValueError):  # it is just being let go of
                _kept.remove(self)
        assert self._found is not None
        return self._found

    def _let_go(self) -> None:
        if self.asking and self._found is None:
            self.n_bytes()  # a report that may be read holds it
        self._kept = None


#: Those that keep a program, the oldest first.
_kept: list[Needed] = []


class LeastLimit(NamedTuple):
    """The least limit of a kind of programs."""

    whole: float  # the bytes that the program took whole
    taken: float  # the bytes that other tensors took, and those of state that optimizers will make
    before: limits.Before  # what the limit is for beside it
    needed: Needed

    def for_report(self) -> _Asking:
        """Return what a report holds."""
        return _Asking(self.before, self.needed)
