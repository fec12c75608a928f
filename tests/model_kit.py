"""What the models of runs and bytes ask of a staged program; the core finds it in its own way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

import random_writes
from koila.program import Node, Program, Run


def kept_of(program: Program) -> set[int]:
    """Values that must be there whole at the end, for the wanted ones to be had from them."""
    return {value for value in range(program.n_values) if program.made(value).is_kept}


def tail_runs(program: Program) -> list[Run]:
    """The joints after the last body through which the gradient comes."""
    assert program.last_body is not None
    return [run for run in program.runs if not run.is_body and run.stage > program.last_body]


def read_last(program: Program) -> list[set[int]]:
    """For each run, the values made by others that nobody reads after it."""
    last: dict[int, int] = {}
    for at, run in enumerate(program.runs):
        read = (program.imports[number].value for number in run.imports)
        combined = (node.first_out for node in run.combined)
        last.update(dict.fromkeys((*read, *combined), at))
    found: list[set[int]] = [set() for _ in program.runs]
    for value, at in last.items():
        if not program.is_leaf(value) and value not in program.runs[at].exports:
            found[at].add(value)
    return found


def is_fused(program: Program, run: Run) -> bool:
    """Whether the run's backward can follow each chunk's forward at once."""
    if not program.is_tail_linear or run.stage != program.last_body:
        return False
    same = [r for r in program.runs if r.stage == run.stage and r.has_gradient]
    return len(same) == 1


def as_written(program: Program) -> Run:
    """The whole program as one run, in the order of the calls: what a live run does."""
    nodes = sorted(i for i, node in program.nodes.items() if not node.is_for_chunks)
    run = Run(-1, 0, -1, nodes=nodes, has_gradient=True)
    made = {v for i in nodes for v in program.nodes[i].outs}
    run.imports = [n for n, entry in enumerate(program.imports) if entry.value not in made]
    run.exports = sorted(made & {*program.wanted, *program.roots})
    return run


def written_in(program: Program, run: Run) -> set[int]:
    """Values whose memory a node of the run writes: they are kept to the end of the run."""
    storages = {
        program.info(program.nodes[i].first_out).storage
        for i in run.nodes
        if program.nodes[i].writes
    }
    if not storages:
        return set()
    return {
        v for i in run.nodes for v in program.nodes[i].outs if program.info(v).storage in storages
    }


def readers_of(program: Program, value: int) -> list[Node]:
    """The nodes that read a value."""
    numbers = {n for n, entry in enumerate(program.imports) if entry.value == value}
    nodes = program.nodes.values()
    return [node for node in nodes if not node.is_open and numbers.intersection(node.imports)]


@contextlib.contextmanager
def each_held(check: Callable[[Program], Iterable[int]]) -> Iterator[list[int]]:
    """Check each program that is made; what the checks returned, how much there was to compare."""
    made: list[int] = []
    original = Program.__init__

    def init(program: Program, *args: Any, **kwargs: Any) -> None:
        original(program, *args, **kwargs)
        made.extend(check(program))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "__init__", init)
        yield made


def run_random(first: int) -> None:
    """Run twenty random programs in chunks: several batches, reads in the middle, writes, views,
    draws, failures."""
    for seed in range(first, first + 20):
        program = random_writes.write(seed)
        if random_writes.wanted_of(program) is not None:
            assert random_writes.failure(program, 3) is None
