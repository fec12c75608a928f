# SPDX-License-Identifier: Apache-2.0
"""Sum up a run in ten lines, for the launcher and for notebooks."""

from __future__ import annotations

import collections
import json
import math
import resource
from typing import Any

import torch

from koila import loaders
from koila.basics.config import get
from koila.messages.words import count, size
from koila.reporting import reports
from koila.reporting.report_types import ProgramReport

#: The largest number of lines about calls that ran whole.
_MOST_WHOLE = 4
#: Bytes: smaller results of calls on the whole batch (labels, masks, numbers) are left out.
_LEAST_WHOLE = 2**16


def _rounded_up(n_bytes: float | None) -> int | None:
    return None if n_bytes is None else math.ceil(n_bytes)


class Summary(reports.Observer):
    """Adds up the programs that ran; messages call a program a pass (a backward, an evaluation)."""

    def __init__(self) -> None:
        self._before = loaders.counts.n_batches, loaders.counts.n_plain
        self.n_batches = 0  # of loaders
        self.n_plain = 0  # of these, the batches in which no tensor has samples
        self.n_steps = 0  # optimizer steps
        self.n_programs = 0
        self.n_in_chunks = 0
        self.n_failed = 0
        self.has_error = False  # the script, or the cell, ended with an error
        self.most_chunks = 0
        self.why_whole = ""  # why the largest program that ran whole did so
        self._largest_whole = 0  # the bytes that it made
        self.bytes_predicted: float | None = None  # None: nothing was predicted
        self.bytes_allowed: float | None = None
        self.bytes_measured: int | None = None
        self.least_limit: float | None = None  # the least with which all of them run
        #: (call, line, reason) of a call on the whole batch -> how often, and the largest bytes.
        self.whole: dict[tuple[str, str, str], list[int]] = {}
        self.plain: collections.Counter[str] = collections.Counter()  # backwards of plain tensors
        self.last: collections.deque[ProgramReport] = collections.deque(maxlen=64)

    def end(self) -> None:
        """Count the batches, at the end of the run."""
        self.n_batches = loaders.counts.n_batches - self._before[0]
        self.n_plain = loaders.counts.n_plain - self._before[1]

    def note_step(self) -> None:
        self.n_steps += 1

    def note_plain(self, line: str) -> None:
        """Count a backward of plain tensors."""
        self.plain[line] += 1

    def note_program(self, ran: ProgramReport) -> None:
        self.last.append(ran)
        if ran.n_chunks == 0:
            self.n_failed += 1
        elif ran.n_calls > 0:
            self.n_programs += 1
            is_cut = bool(ran.stages) and (ran.n_chunks > 1 or ran.n_rows is not None)
            if not is_cut and ran.n_bytes >= self._largest_whole:
                self._largest_whole, self.why_whole = ran.n_bytes, ran.why
            self.n_in_chunks += is_cut
            self.most_chunks = max(self.most_chunks, ran.n_chunks if is_cut else 1)
        predicted = ran.bytes_predicted
        if predicted is not None and predicted >= (self.bytes_predicted or 0.0):
            self.bytes_predicted = predicted
            self.bytes_allowed = ran.bytes_allowed
        if ran.bytes_measured is not None:
            self.bytes_measured = max(self.bytes_measured or 0, ran.bytes_measured)
        if ran.least_limit is not None:
            self.least_limit = max(self.least_limit or 0.0, ran.least_limit)
        for one in ran.whole:
            if one.n_bytes >= _LEAST_WHOLE:
                counts = self.whole.setdefault((one.call, one.line, one.why), [0, 0])
                counts[0] += 1
                counts[1] = max(counts[1], one.n_bytes)

    def lines(self) -> list[str]:
        """Return at most ten lines: steps, chunks, memory, and what ran on the whole batch."""
        if self.n_programs == 0:
            failed = f"{count(self.n_failed, 'pass')} failed; see the errors above"
            return [failed if self.n_failed else self._why_nothing()]
        batches = count(self.n_batches, "batch")
        steps = count(self.n_steps, "optimizer step")
        lines = [f"{batches} of data loaders, {steps}"]
        if self.n_failed:
            lines.append(f"{count(self.n_failed, 'pass')} failed; see the errors above")
        if self.n_in_chunks == 0:
            everything = "everything else" if self.n_failed else "everything"
            how = "fitted into memory and ran whole" if get("chunks") is None else "ran whole"
            why = f" ({self.why_whole})" if get("chunks") is not None and self.why_whole else ""
            lines.append(f"{everything} {how}, as without koila{why}")
        else:
            passes = count(self.n_programs, "pass")
            most = count(self.most_chunks, "chunk")
            lines.append(f"{self.n_in_chunks} of {passes} ran in chunks, in {most} at most")
        lines.append(self._memory())
        if self.plain:
            (line, n), *others = self.plain.most_common()
            where = f"{line}, {count(n, 'time')}" + (
                f", and {len(others)} others" if others else ""
            )
            lines.append(
                f"whole batch: a backward ({where}): nothing in it is lazy, since its inputs are "
                "not batches of a data loader as it returned them; call koila.lazy() on them"
            )
        if self.n_in_chunks:
            most_first = sorted(self.whole.items(), key=lambda item: -item[1][1])
            for (call, line, why), (n, n_bytes) in most_first[:_MOST_WHOLE]:
                times = "once" if n == 1 else f"{n} times"
                lines.append(f"whole batch: {call} ({line}), {size(n_bytes)}, {times}: {why}")
            if len(most_first) > _MOST_WHOLE:
                lines.append(f"whole batch: {len(most_first) - _MOST_WHOLE} more calls")
        return lines

    def _why_nothing(self) -> str:
        if self.has_error:
            return "nothing was computed with a lazy batch before the error"
        if self.n_batches == 0:
            return (
                "nothing was made lazy, as no torch.utils.data.DataLoader handed out a batch: call "
                "x, y = koila.lazy(x, y) on your batches"
            )
        if self.n_plain == self.n_batches:
            return (
                f"nothing was made lazy: in none of {self.n_batches} batches is a tensor with "
                "samples; call koila.lazy() on what your model is given"
            )
        if self.n_batches == 1:
            return "1 batch was made lazy, and nothing was computed with it"
        return f"{self.n_batches} batches were made lazy, and nothing was computed with them"

    def _memory(self) -> str:
        parts = []
        limit, least = get("memory_limit"), self.least_limit
        if limit is not None:
            if least is not None and not self.n_failed:
                least = min(least, limit)  # it is a prediction, and this limit was enough
            works = f", the least that works is {size(least)}" if least is not None else ""
            parts.append(f"the limit is {size(limit)}{works}")
        if self.bytes_predicted:
            parts.append(f"a step needed {size(self.bytes_predicted)} at most")
            if self.bytes_allowed is not None:
                parts[-1] += f", {size(self.bytes_allowed)} were left for it"
        if self.bytes_measured is not None:
            parts.append(f"measured {size(self.bytes_measured)}")
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            peak = torch.cuda.max_memory_allocated()
            parts.append(f"the GPU's peak {size(peak)}")
        else:
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            parts.append(f"the process's peak {size(resident)}")
        return f"memory: {'; '.join(parts)}"

    def as_json(self) -> str:
        """Return all of it as JSON: the counts, what ran whole, and the last programs."""
        whole = [
            {"call": call, "line": line, "why": why, "times": n, "bytes": n_bytes}
            for (call, line, why), (n, n_bytes) in self.whole.items()
        ]
        facts: dict[str, Any] = {
            "batches": self.n_batches,
            "steps": self.n_steps,
            "programs": self.n_programs,
            "in_chunks": self.n_in_chunks,
            "failed": self.n_failed,
            "most_chunks": self.most_chunks,
            "bytes_predicted": _rounded_up(self.bytes_predicted),
            "bytes_allowed": _rounded_up(self.bytes_allowed),
            "bytes_measured": self.bytes_measured,
            "least_limit": _rounded_up(self.least_limit),
            "plain_backwards": dict(self.plain),
            "memory_limit": get("memory_limit"),
            "whole": whole,
            "last_programs": [str(ran) for ran in self.last],
        }
        return json.dumps(facts, indent=2)
