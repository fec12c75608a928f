# SPDX-License-Identifier: Apache-2.0
"""What recording one call costs, beside running it eagerly and beside torch's own dispatch.

    python -m benchmarks.bench_record

Each call has four floats and no gradient, which is eager's cheapest. The result is dropped at once,
as most values of a model are, while another value of the program is held: without one, each call
would be a program of its own, which begins and ends with it (the last row). Times are of the
thread's own clock, medians, without the loop around the call; ratios are taken within a round.
"""

from __future__ import annotations

import gc
import statistics
import time
import timeit
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import koila
from benchmarks.bench import interleave, parser, prepare, publish, ratio, sync, table
from koila import _core
from koila.recording.functions import HANDLER, Entry

CALLS = {
    "x + w": "x + w",
    "torch.add(x, w)": "torch.add(x, w)",
    "x = x + w (a chain)": "x = x + w",
    "x.view(4)": "x.view(4)",
    "x.detach()": "x.detach()",
    "torch.relu(x)": "torch.relu(x)",
    "F.linear(x, w)": "F.linear(x, w)",
    "x + w (a program)": "x + w",
}
HELD, ALONE = "x = first; held = x * w", "x = first"


class Nothing(torch.Tensor):
    """torch dispatches to a builtin that does next to nothing: what no handler can go below."""

    __torch_function__ = "".format


class Spy(torch.Tensor):
    """Keeps what torch hands to a handler."""

    seen: tuple[Any, ...] = ()

    @classmethod
    def __torch_function__(cls, *call: Any) -> None:
        cls.seen = call


def probe() -> None:
    """A callable that koila's table knows and that is never run."""


def measure(
    code: str, scope: Mapping[str, Any], number: int, device: str, setup: str = HELD
) -> float:
    """Nanoseconds for one run of `code`, the loop included."""
    _core.flush()
    gc.collect()
    sync(device)
    timer = timeit.Timer(code, setup, time.thread_time, dict(scope))
    seconds = timer.timeit(number)
    _core.flush()
    return seconds / number * 1e9


def scopes(device: str) -> dict[str, dict[str, Any]]:
    """The names a call meets: on plain tensors, on the do-nothing class, on lazies."""
    x, w = torch.randn(2, 2, device=device), torch.randn(2, 2, device=device)
    common = {"torch": torch, "F": F, "w": w, "kept": []}
    lazy = koila.lazy(x)
    return {
        "eager": {**common, "first": x},
        "dispatch": {**common, "first": x.as_subclass(Nothing)},
        "koila": {**common, "first": lazy},
    }


def handed_over(scope: Mapping[str, Any], lazy: torch.Tensor) -> tuple[Any, ...]:
    """What torch gives a handler for `torch.add(x, w)`, with the lazy in place of x."""
    spy = torch.zeros(2, 2, device=lazy.device).as_subclass(Spy)
    _ = torch.add(spy, scope["w"])
    func, _, args, *rest = Spy.seen
    swapped = tuple(lazy if isinstance(arg, Spy) else arg for arg in args)
    return func, (type(lazy),), swapped, (rest[0] if rest else None)


def calls_table(args: Any, run: Callable[[str, str, str], float]) -> str:
    rows = []
    for name, code in CALLS.items():
        setup = ALONE if "program" in name else HELD
        sides = ("eager", "dispatch", "koila")
        variants = {side: partial(run, side, code, setup) for side in sides}
        variants["eager again"] = variants["eager"]
        if "=" in code:
            del variants["dispatch"]  # its result is no tensor to go on with
        times = interleave(variants, args.rounds)
        medians = {side: statistics.median(times[side]) for side in times}
        rows.append(
            [
                f"`{name}`",
                f"{medians['eager']:.0f}",
                f"{medians['dispatch']:.0f}" if "dispatch" in medians else "",
                f"{medians['koila']:.0f}",
                f"{ratio(times, 'koila', 'eager'):.2f}",
                f"{ratio(times, 'eager again', 'eager'):.2f}",
            ]
        )
    heads = [
        "ns per call",
        "eager",
        "dispatch alone",
        "koila records",
        "koila / eager",
        "eager / eager",
    ]
    return table(heads, rows)


def parts_table(args: Any, spaces: Mapping[str, dict[str, Any]]) -> str:
    """Where the time of recording `torch.add(x, w)` goes, as far as Python can tell."""
    _core.register(probe, Entry(HANDLER, "probe", "".format))
    lazy = spaces["koila"]["first"]
    func, types, call_args, kwargs = handed_over(spaces["koila"], lazy)
    direct = {
        "record": type(lazy).__torch_function__,
        "format": "".format,
        "probe": probe,
        "f": func,
        "t": types,
        "a": call_args,
        "k": kwargs,
    }
    scope = {**spaces["koila"], **direct}

    def run(code: str, side: Mapping[str, Any] = scope) -> float:
        return measure(code, side, args.number, args.device)

    times = interleave(
        {
            "loop": partial(run, "pass"),
            "whole": partial(run, "torch.add(x, w)"),
            "dispatch": partial(run, "torch.add(x, w)", spaces["dispatch"]),
            "call": partial(run, "format(f, t, a, k)"),
            "look-up": partial(run, "record(probe, t, a, k)"),
            "recorder": partial(run, "record(f, t, a, k)"),
            "keep": partial(run, "kept.append(w)"),
            "kept": partial(run, "kept.append(torch.add(x, w))"),
        },
        args.rounds,
    )
    scope["kept"].clear()

    def median(one: str, less: str) -> float:
        pairs = zip(times[one], times[less], strict=True)
        return statistics.median(a - b for a, b in pairs)

    whole = median("whole", "loop")
    look_up = max(median("look-up", "call"), 0.0)
    dispatch = median("dispatch", "loop")
    recorder = median("recorder", "call")
    rows: list[tuple[str, float]] = [
        ("torch's dispatch to a handler that does nothing", dispatch),
        ("the recorder, called without torch's dispatch", recorder),
        ("- finding out what is done with the callable", look_up),
        ("- bind, infer, append, make the result", recorder - look_up),
        ("one inside the other, beyond the sum of both", whole - dispatch - recorder),
        ("`torch.add(x, w)` in all", whole),
        ("a result that is kept: a new object, not a recycled one", median("kept", "keep") - whole),
    ]
    return table(
        ["part of recording `torch.add(x, w)`", "ns"], [[name, f"{ns:.0f}"] for name, ns in rows]
    )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--number", type=int, default=2000, help="calls in one measurement")
    made.set_defaults(rounds=25)
    args = made.parse_args()
    prepare(args)
    spaces = scopes(args.device)

    def run(side: str, code: str, setup: str) -> float:
        empty = measure("pass", spaces[side], args.number, args.device, setup)
        return measure(code, spaces[side], args.number, args.device, setup) - empty

    parts = [calls_table(args, run), parts_table(args, spaces)]
    again = "again" if _core.is_recycling() else "no second time"
    recycled = f"Dead lazies are used {again}."
    publish(args, "Recording one call", [*parts, recycled])


if __name__ == "__main__":
    main()
