# SPDX-License-Identifier: Apache-2.0
"""What torch's profiler tells of the memory of some work, for tests and benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd.profiler import profile


def noted(profiled: profile) -> Iterator[tuple[str, int]]:
    """The calls that were noted, by name, and the bytes that were allocated or freed in between.

    Only the frees of what was allocated while it was profiled are among them. The profiler tells
    that of an older block only where its address had been handed out under an earlier profile, and
    then with the size it had at that time: what ran before would decide. What another thread frees
    it does not see: that is known when the address is handed out again.
    """
    results: Any = profiled.kineto_results
    events, levels = [], [results.experimental_event_tree()]
    while levels:
        for event in levels.pop():
            levels.append(event.children)
            events.append((event.start_time_ns, event))
    events.sort(key=lambda timed: timed[0])
    allocated: dict[int, int] = {}
    for _, event in events:
        if event.tag.name == "TorchOp":
            yield event.name, 0
        elif event.tag.name == "Allocation":
            block = event.extra_fields
            if block.ptr in allocated:
                yield "", -allocated.pop(block.ptr)
            if block.alloc_size > 0:
                allocated[block.ptr] = block.alloc_size
                yield "", block.alloc_size


def bytes_over_time(work: Callable[[], Any]) -> list[int]:
    """The bytes that were there after each allocation and each free of some work, beyond those
    before; what it returns is there to the end."""
    with profile(profile_memory=True) as profiled:
        made = work()
    del made
    return list(itertools.accumulate(n_bytes for name, n_bytes in noted(profiled) if not name))
