# SPDX-License-Identifier: Apache-2.0
"""Draw docs/memory.svg: the bytes that tensors take during a step, plain and with koila.

    PYTHONPATH=python:. python docs/picture.py

A language model's step on a batch of 32 texts runs twice: as it is, and under a limit of a third of
what that took at its peak. The bytes are those that torch's allocator hands out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd.profiler import profile

import koila
from demo.model import GPT
from koila.memory import budget

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 300, 64, 34, 40
MIB = 2**20
# All can be read on a white page and on a dark one: a page need not be as the system says.
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #7a7a7a }
.axis { stroke: #8a8a8a; stroke-width: 1 }
polygon { stroke-width: 1.5 }
.plain { fill: #d9742b33; stroke: #d9742b }
.koila { fill: #1f77b455; stroke: #1f77b4 }
text.plain, text.koila { font-weight: 600; stroke: none }
text.plain { fill: #c9651d }
text.koila { fill: #2b7fc0 }
.limit { stroke: #7a7a7a; stroke-dasharray: 5 4 }
"""

Curve = list[tuple[float, float]]  # seconds, bytes beyond what was there


def record(work: Callable[[], object]) -> Curve:
    """How many bytes more are there than before, over time."""
    with profile(profile_memory=True) as profiled:
        work()
    events = [e for e in profiled.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    now, curve = 0, [(0.0, 0.0)]
    for event in events:
        now += event.nbytes()
        curve.append(((event.start_ns() - events[0].start_ns()) / 1e9, float(now)))
    return curve


def thinned(curve: Curve, seconds: float) -> Curve:
    """The highest moment of each of so many parts of the time."""
    parts: dict[int, tuple[float, float]] = {}
    for moment in curve:
        part = int(600 * moment[0] / seconds)
        parts[part] = max(parts.get(part, (0.0, -1.0)), moment, key=lambda one: one[1])
    return [parts[part] for part in sorted(parts)]


def draw(plain: Curve, lazy: Curve, limit: float) -> str:
    seconds = max(plain[-1][0], lazy[-1][0])
    most = 1.08 * max(n_bytes for _, n_bytes in plain)

    def at(moment: tuple[float, float]) -> str:
        x = LEFT + (WIDTH - LEFT - 10) * moment[0] / seconds
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * max(moment[1], 0.0) / most
        return f"{x:.1f},{y:.1f}"

    def shape(curve: Curve, name: str) -> str:
        points = [(0.0, 0.0), *thinned(curve, seconds), (curve[-1][0], 0.0)]
        return f'<polygon class="{name}" points="{" ".join(map(at, points))}"/>'

    def peak_of(curve: Curve, name: str, words: str, y: int) -> str:
        text = f"{words}: {max(n_bytes for _, n_bytes in curve) / MIB:.0f} MiB at its peak"
        return f'<text class="{name}" x="{WIDTH - 10}" y="{y}" text-anchor="end">{text}</text>'

    base, (_, y) = HEIGHT - BOTTOM, at((0.0, limit)).split(",")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Bytes of tensors during one training step, plain and with koila</title>",
        f"<style>{STYLE}</style>",
        shape(plain, "plain"),
        shape(lazy, "koila"),
        f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH - 10}" y2="{base}"/>',
        f'<line class="axis" x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{base}"/>',
        f'<line class="limit" x1="{LEFT}" y1="{y}" x2="{WIDTH - 10}" y2="{y}"/>',
        f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">limit</text>',
        f'<text x="{LEFT - 6}" y="{base + 4}" text-anchor="end">0</text>',
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 14}" text-anchor="end">time of one step</text>',
        f'<text x="{LEFT}" y="20">bytes of tensors beyond weights and batch</text>',
        peak_of(plain, "plain", "plain", 20),
        peak_of(lazy, "koila", "with koila", 40),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(64, length=128, width=128, n_heads=4, n_blocks=4)
    x, y = torch.randint(0, 64, (2, 32, 128)).unbind()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.loss(x, y).backward()
        model.zero_grad(set_to_none=True)

    step(x, y)
    plain = record(lambda: step(x, y))
    limit = max(n_bytes for _, n_bytes in plain) / 3
    with koila.config(memory_limit=int(limit) + budget.taken(x.device, model.parameters())):
        step(*koila.lazy(x, y))
        lazy = record(lambda: step(*koila.lazy(x, y)))
        print(koila.report().n_chunks, "chunks")
    path = Path(__file__).parent / "memory.svg"
    path.write_text(draw(plain, lazy, limit))
    print(path, *(f"{max(n for _, n in one) / MIB:.0f} MiB" for one in (plain, lazy)))


if __name__ == "__main__":
    main()
