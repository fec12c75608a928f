# SPDX-License-Identifier: Apache-2.0
"""The result of koila.plan(): the bytes of a step at each of its moments, predicted before it runs.

The moments are those of `measure.c`, by which the number of chunks is chosen. A plan can be written
to files: a picture, a card, JSON, a trace for Chrome and Perfetto, a snapshot for torch's memory
viewer.
"""

from __future__ import annotations

import dataclasses
import html as escaping
import importlib
import itertools
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koila.messages import cards
from koila.messages.words import size

#: The phases of a step, in order.
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer's step"


@dataclass(frozen=True)
class Moment:
    """A call of a step, forward or backward, and the bytes alive while it runs, without those that
    existed before the step.

    Attributes:
        phase: "forward" or "backward".
        call: the name of the call, such as "conv2d".
        where: its line, such as "model.py:40".
        layer: the path of its module; empty if it is in none.
        activations: bytes of results that later calls or the backward read.
        outputs: bytes of results that the script holds.
        gradients: bytes of gradients, those of parameters included.
        temporaries: bytes that are allocated only while the call runs.
    """

    phase: str
    call: str
    where: str
    layer: str
    activations: int
    outputs: int
    gradients: int
    temporaries: int

    @property
    def n_bytes(self) -> int:
        """The sum of all kinds of bytes."""
        return self.activations + self.outputs + self.gradients + self.temporaries

    def __str__(self) -> str:
        layer = f" of layer {self.layer!r}" if self.layer else ""
        return f"the {self.phase} of {self.call}{layer} ({self.where})"


@dataclass(frozen=True)
class Value:
    """A result of a call that autograd saves for backward.

    Attributes:
        call: the name of the call, such as "relu".
        where: its line, such as "model.py:40".
        layer: the path of its module; empty if it is in none.
        n_bytes: bytes for the whole batch.
        in_chunk: bytes for one chunk.
    """

    call: str
    where: str
    layer: str
    n_bytes: int
    in_chunk: int


@dataclass(frozen=True)
class MemoryPlan:
    """The predicted memory of a step. It prints as a text, and shows as a card in a notebook.

    Attributes:
        fits: whether the step fits; if not, all numbers are for the chunks that need least.
        n_chunks: the number of chunks.
        n_samples: the samples of a chunk.
        n_bytes: the peak bytes of the step, beside what exists before it.
        whole: the peak bytes if the whole batch ran at once.
        allowed: the bytes that the step may use.
        there: by kind, the bytes that exist before the step: parameters, optimizer state, ...
        phases: the peak bytes of each phase: forward, backward, optimizer's step. The last are the
            bytes of gradients and new optimizer state, without the optimizer's temporaries.
        worst: the moment with the most bytes.
        largest: the ten largest values that are kept for backward.
        moments: all moments, in the order of the step; equal chunks are listed once.
        costs: what is recomputed or offloaded, and what that costs; empty if nothing is.
        summary: the numbers as sentences.
    """

    fits: bool
    n_chunks: int
    n_samples: int
    n_bytes: int
    whole: int
    allowed: int
    there: Mapping[str, int]
    phases: Mapping[str, int]
    worst: Moment
    largest: tuple[Value, ...]
    moments: tuple[Moment, ...] = dataclasses.field(repr=False)
    costs: str = ""
    summary: tuple[str, ...] = ()

    def categories(self) -> dict[str, int]:
        """Return the bytes at the worst moment by category, including what existed before the step:
        the largest first, without empty categories."""
        own = {
            "activations": self.worst.activations,
            "results that your script holds": self.worst.outputs,
            "gradients": self.worst.gradients,
            "temporaries": self.worst.temporaries,
        }
        for name, n_bytes in self.there.items():
            own[name] = own.get(name, 0) + n_bytes
        found = sorted(own.items(), key=lambda entry: -entry[1])
        return {name: n_bytes for name, n_bytes in found if n_bytes > 0}

    def lines(self) -> list[str]:
        """Return the lines that it prints above the table of values."""
        phases = ", ".join(f"{name} {size(n)}" for name, n in self.phases.items())
        categories = ", ".join(f"{name} {size(n)}" for name, n in self.categories().items())
        found = [*self.summary, f"by phase: {phases}"]
        found.append(f"worst moment: {self.worst}: {size(self.n_bytes)} more than is in use now")
        return [*found, f"all that is there then: {categories}"]

    def table(self) -> list[tuple[str, ...]]:
        """Return the largest values: call, layer, line, bytes of the whole batch and of a chunk."""
        rows = [
            (one.call, one.layer, one.where, size(one.n_bytes), size(one.in_chunk))
            for one in self.largest
        ]
        return [("kept for backward", "layer", "line", "whole batch", "at once"), *rows]

    def __str__(self) -> str:
        rows = self.table() if self.largest else []
        widths = [max(len(row[i]) for row in rows) for i in range(5)] if rows else []
        listed = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join((*self.lines(), *listed))

    def __repr__(self) -> str:
        ends = ".html, .json, .trace.json, .pickle or .txt"
        return f"{self}\n(print() leaves this line out; .save('plan.svg') saves it, or {ends})"

    def _repr_html_(self) -> str:
        return cards.html("koila.plan", self.lines(), picture=self.svg(), rows=self.table())

    def svg(self) -> str:
        """Return a picture of the bytes over the step, as SVG: categories, phases, the limit."""
        return _svg(self)

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers, in types that JSON knows."""
        return {**dataclasses.asdict(self), "categories": self.categories()}

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, in the format of its suffix.

        Args:
            path: `.svg` is the picture, `.html` the card, `.json` the numbers; `.trace.json` opens
                in Chrome's trace viewer and in Perfetto, with a counter of memory, `.pickle` in
                torch's memory viewer; `.txt` is the text.

        Raises:
            ValueError: the suffix is none of these.
        """
        path = Path(path)
        if path.name.endswith(".pickle"):
            path.write_bytes(pickle.dumps(_snapshot(self)))
            return
        formats: dict[str, Callable[[], str]] = {
            ".trace.json": lambda: json.dumps(_trace(self)),
            ".json": lambda: json.dumps(self.as_dict(), indent=1),
            ".svg": self.svg,
            ".html": lambda: _HEAD + self._repr_html_(),
            ".txt": self.__str__,
        }
        for end, make in formats.items():
            if path.name.endswith(end):
                path.write_text(make(), encoding="utf-8")
                return
        raise ValueError(
            f"plan.save: {path.name!r} has no ending that says the format: {', '.join(formats)} or "
            ".pickle; for another picture, save what plan.plot() draws with matplotlib"
        )

    def plot(self, axes: Any = None) -> Any:
        """Draw the bytes over the step with matplotlib, which must be installed.

        Args:
            axes: the axes to draw on; None: new ones.

        Returns:
            The axes.
        """
        pyplot = importlib.import_module("matplotlib.pyplot")  # an optional dependency

        axes = axes if axes is not None else pyplot.subplots()[1]
        columns = _columns(self.moments)
        series = [[getattr(one, kind) / 2**20 for one in columns] for kind in KINDS]
        axes.stackplot(
            range(len(columns)),
            series,
            labels=list(KINDS),
            colors=list(KINDS.values()),
            step="post",
        )
        n, update = len(columns), self.phases.get(OPTIMIZER, 0)
        if update:
            axes.bar(n, update / 2**20, max(1, n / 7), align="edge", color="0.6", label=OPTIMIZER)
        if self.allowed <= 3 * self.n_bytes:
            axes.axhline(self.allowed / 2**20, color="#c0392b", linestyle="--", label="left")
        axes.set_xlabel("the calls of the step, in order")
        axes.set_ylabel("MiB")
        axes.legend(loc="upper left")
        return axes


#: The areas of the picture from bottom to top: the attribute of a moment, and the color.
KINDS = {
    "activations": "#4c8dd6",
    "outputs": "#57a773",
    "gradients": "#d9822b",
    "temporaries": "#a87bc4",
}
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 760, 300, 70, 30, 40
#: The width of the bar for the optimizer's step, with the room for its name.
_BAR = 100
#: The head of an HTML page that follows the reader's choice of light or dark.
_HEAD = (
    "<!doctype html><meta charset='utf-8'><meta name='color-scheme' content='light dark'>"
    "<title>koila.plan</title>"
)
#: The most columns of a picture: more moments are grouped, and the worst of each group is drawn.
_MOST_COLUMNS = 240
#: The length of every moment in a trace, in microseconds; real times are not known.
_TICK = 10


def _columns(moments: Sequence[Moment]) -> list[Moment]:
    """Return at most `_MOST_COLUMNS` moments, in order; the worst of all is one of them."""
    n = min(len(moments), _MOST_COLUMNS)
    edges = [len(moments) * i // n for i in range(n + 1)]
    return [max(moments[a:b], key=lambda one: one.n_bytes) for a, b in itertools.pairwise(edges)]


def _layers_of(columns: Sequence[Moment]) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yield each kind of bytes with the lower and upper edges of its area, in bytes by column."""
    lower = [0] * len(columns)
    for kind in KINDS:
        upper = [low + getattr(one, kind) for low, one in zip(lower, columns, strict=True)]
        yield kind, lower, upper
        lower = upper


def _area(lower: Sequence[float], upper: Sequence[float], x: Callable[[int], float]) -> str:
    """Return the points of an area whose edges go from column to column in steps."""
    above = [(x(i + k), up) for i, up in enumerate(upper) for k in (0, 1)]
    below = [(x(i + k), low) for i, low in enumerate(lower) for k in (0, 1)]
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in (*above, *reversed(below)))


def _svg(plan: MemoryPlan) -> str:
    """Draw the bytes over the step, with a line at the bytes left unless these are far more."""
    columns = _columns(plan.moments)
    near = plan.allowed <= 3 * plan.n_bytes
    update = plan.phases.get(OPTIMIZER, 0)
    top = 1.08 * max(plan.n_bytes, plan.allowed if near else 0, update, 1)
    width, height = _WIDTH - _LEFT - 10 - (_BAR if update else 0), _HEIGHT - _TOP - _BOTTOM

    def x(i: int) -> float:
        return _LEFT + width * i / len(columns)

    def y(n_bytes: float) -> float:
        return _TOP + height * (1 - n_bytes / top)

    def text(at: float, line: float, words: str, anchor: str = "start") -> str:
        return (
            f"<text x='{at:.0f}' y='{line:.0f}' text-anchor='{anchor}' fill='currentColor'>"
            f"{escaping.escape(words)}</text>"
        )

    made = [
        f"<svg xmlns='http://www.w3.org/2000/svg' class='koila-plan' viewBox='0 0 {_WIDTH} "
        f"{_HEIGHT}' width='100%' style='max-width:{_WIDTH}px' role='img' "
        "font-family='system-ui, sans-serif' font-size='12'>",
        f"<title>{escaping.escape(' '.join(plan.summary[:1]))}</title>",
        "<style>svg.koila-plan:root {color: #333; background: #fff}",
        "@media (prefers-color-scheme: dark) {",
        "svg.koila-plan:root {color: #ddd; background: #1b1b1b}}",
        "</style>",
    ]
    for kind, lower, upper in _layers_of(columns):
        if any(high > low for low, high in zip(lower, upper, strict=True)):
            points = _area([y(one) for one in lower], [y(one) for one in upper], x)
            made.append(f"<polygon fill='{KINDS[kind]}' points='{points}'/>")
    if update:
        made.append(
            f"<rect x='{_WIDTH - 10 - _BAR}' y='{y(update):.1f}' width='{_BAR}' "
            f"height='{y(0) - y(update):.1f}' fill='currentColor' opacity='.35'>"
            f"<title>{OPTIMIZER}: gradients, state, temporaries, {size(update)}</title></rect>"
        )
        made.append(text(_WIDTH - 12, _HEIGHT - _BOTTOM + 16, OPTIMIZER, "end"))
    shown = [kind for kind in KINDS if any(getattr(one, kind) for one in columns)]
    for i, kind in enumerate(shown):
        at = _LEFT + 150 * i
        made.append(f"<rect x='{at}' y='8' width='10' height='10' fill='{KINDS[kind]}'/>")
        made.append(text(at + 15, 17, kind))
    for share in (0.25, 0.5, 0.75, 1.0):
        line = y(top * share / 1.08)
        made.append(
            f"<path d='M{_LEFT} {line:.1f}H{_WIDTH - 10}' stroke='currentColor' opacity='.15'/>"
        )
        made.append(text(_LEFT - 6, line + 4, size(top * share / 1.08), "end"))
    if near:
        line = y(plan.allowed)
        made.append(
            f"<path d='M{_LEFT} {line:.1f}H{_WIDTH - 10}' stroke='#c0392b' stroke-dasharray='6 4'/>"
        )
        made.append(text(_WIDTH - 12, line - 5, f"{size(plan.allowed)} left", "end"))
    for phase, group in itertools.groupby(enumerate(columns), key=lambda one: one[1].phase):
        begin = next(group)[0]
        made.append(
            f"<path d='M{x(begin):.1f} {_HEIGHT - _BOTTOM}v6' stroke='currentColor' opacity='.5'/>"
        )
        if begin + 8 < len(columns) or begin == 0:
            made.append(text(x(begin) + 3, _HEIGHT - _BOTTOM + 16, phase))
    made.append(text(_LEFT, _HEIGHT - 6, "the calls of the step, in order; one chunk of each part"))
    return "\n".join([*made, "</svg>"])


def _trace(plan: MemoryPlan) -> dict[str, Any]:
    """Return a trace for Chrome's viewer and Perfetto: a slice for each call, a counter of memory.
    Each call takes the same time, since nothing has run."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "koila.plan"}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "calls"}},
    ]
    for i, one in enumerate(plan.moments):
        counts = {kind: getattr(one, kind) for kind in KINDS}
        args = {"line": one.where, "layer": one.layer, "bytes": one.n_bytes}
        at = {"pid": 1, "tid": 1, "ts": _TICK * i}
        name = f"{one.call} ({one.phase})"
        events.append({"ph": "X", "name": name, "cat": one.phase, "dur": _TICK, "args": args, **at})
        events.append({"ph": "C", "name": "memory", "args": counts, **at})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Blocks:
    """Simulates allocated blocks for torch's memory viewer: the last allocated are freed first."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.live: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        self._address = 1 << 20

    def set(self, kind: str, n_bytes: int, frames: list[dict[str, Any]], time: int) -> None:
        """Allocate or free blocks, so that `n_bytes` of a kind are allocated from `time` on."""
        blocks = self.live[kind]
        less = sum(block["size"] for block in blocks) - n_bytes
        while less > 0:
            block = blocks.pop()
            for action in ("free_requested", "free_completed"):
                self.events.append({**block, "action": action, "time_us": time})
            less -= block["size"]
            if less < 0:  # the block was larger: allocate the rest again
                self._alloc(kind, -less, block["frames"], time)
                return
        if less < 0:
            self._alloc(kind, -less, frames, time)

    def _alloc(self, kind: str, n_bytes: int, frames: list[dict[str, Any]], time: int) -> None:
        block = {"addr": self._address, "size": n_bytes, "stream": 0, "frames": frames}
        self._address += n_bytes
        self.live[kind].append(block)
        self.events.append({**block, "action": "alloc", "time_us": time})


def _snapshot(plan: MemoryPlan) -> dict[str, Any]:
    """Return a snapshot for torch's memory viewer, as `torch.cuda.memory._snapshot` makes of a run.

    Each kind of bytes allocates a block when it grows, and frees blocks when it shrinks.
    """
    blocks = _Blocks()
    for i, one in enumerate(plan.moments):
        file, _, line = one.where.rpartition(":")
        named = {"filename": file, "line": int(line) if line.isdigit() else 0}
        for kind in KINDS:
            frames = [{**named, "name": f"{kind}: {one}"}]
            blocks.set(kind, getattr(one, kind), frames, _TICK * i)
    allocated = [
        {
            "address": block["addr"],
            "size": block["size"],
            "requested_size": block["size"],
            "state": "active_allocated",
            "frames": block["frames"],
        }
        for kind in KINDS
        for block in blocks.live[kind]
    ]
    segments = [
        {
            "device": 0,
            "address": block["address"],
            "total_size": block["size"],
            "allocated_size": block["size"],
            "active_size": block["size"],
            "requested_size": block["size"],
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": block["frames"],
            "blocks": [block],
        }
        for block in allocated
    ]
    return {
        "segments": segments,
        "device_traces": [blocks.events],
        "allocator_settings": {},
        "external_annotations": [],
    }
