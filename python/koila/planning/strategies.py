# SPDX-License-Identifier: Apache-2.0
"""The strategies to schedule a step, each with the bytes it needs and the time it takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from koila.memory import estimates, offload
from koila.planning import second_axis
from koila.planning.missing import Missing
from koila.planning.policies import Families, Policies
from koila.staged import hooks
from koila.staged.cache import remember
from koila.staged.program import Program
from koila.staged.schedule import AS_IT_IS, WITHOUT_CHECKPOINTS, Op, Policy, Strategy

# The share of the allowed memory to plan with: predictions do not know how allocators round, nor
# the buffers inside kernels.
CHUNK_SHARE = 0.9
# Values of a Strategy's fields that are tried: n_pieces of rows, of a second axis, n_segments.
_PIECES = 2, 4, 8, 16, 32
_PIECES_ALONG = 2, 4, 8, 16, 32, 64
SEGMENTS = 2, 3, 4, 6, 8, 12, 16, 32, 64
#: The numbers of chunks for which a strategy is made that frees just what is missing then, and how
#: many of these strategies are measured.
_CHUNKS = 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256
_N_MEASURED = 3
DEAR = 1.1  # with a higher cost, other strategies are looked for
# The fixed time of a call on a chunk, forward and backward, expressed as the bytes of results that
# calls compute in that time. Measured on a CPU; an accelerator computes a hundred times as many.
# With four times as much, networks of batch normalizations took up to 23 % longer under limits, and
# with a fourth up to 29 %.
_CALL = 2**16
_CALL_ON_ACCELERATOR = 2**23
# The time to run the segments of a body forward once more, as a share of the step's time.
_AGAIN = 0.35
# Each chunk reads the inputs without rows, such as weights, and adds to their gradients. This takes
# the time in which calls compute this share of their bytes.
_GIVEN = 1 / 8


class Option(NamedTuple):
    """A strategy for running a program, its predicted memory and its number of calls a chunk."""

    strategy: Strategy
    estimate: estimates.Estimate
    n_calls: int

    def rows(self, allowed: float) -> int:
        """Return the rows of the largest chunk that fits with room to spare; 0 if none does."""
        return self.estimate.largest_chunk(CHUNK_SHARE * allowed)

    @property
    def least(self) -> float:
        """The bytes that it needs in the chunks that need least."""
        return self.estimate.least[1]

    @property
    def n_chunks(self) -> int:
        """The number of these chunks."""
        return -(-self.estimate.rows // self.estimate.least[0])


class Fitting(NamedTuple):
    """A strategy that fits, with the most rows that its chunks may have."""

    option: Option
    rows: int


def can_offload(program: Program) -> bool:
    """Tell whether activations can be offloaded to other memory than that which is short."""
    return all(map(offload.is_worth_it, devices_of(program)))


_IN_PIECES = tuple(Strategy(n_pieces=n_pieces) for n_pieces in _PIECES)


@dataclasses.dataclass
class _Results:
    """Results of measuring and cutting a program for its strategies, kept to be found once."""

    options: dict[Strategy, Option]
    #: By `Strategy.cuts`: the segments of all bodies; 0: the program cannot run so.
    n_cut: dict[tuple[int, bool], int] = dataclasses.field(default_factory=dict)
    #: By strategy: the values between bodies that it offloads, frees or recomputes.
    freed: dict[Strategy, frozenset[int]] = dataclasses.field(default_factory=dict)
    #: By whether the script's checkpoints are ignored: the policies that are tried, and by policies
    #: the time that they add.
    families: dict[bool, Families] = dataclasses.field(default_factory=dict)
    prices: dict[tuple[bool, bytes], float] = dataclasses.field(default_factory=dict)
    #: By storage: the bytes of the activations that bodies keep for backward; None: not found yet.
    left: dict[int, int] | None = None
    along: list[Strategy] | None = None  # the strategies along a second axis; None: not found yet


#: The programs of the last steps. The key has a program's sizes, and the bytes at each moment of
#: its plain schedule: these differ also where other graphs, gradients or drawn numbers exist.
_seen: dict[tuple[object, ...], _Results] = {}
_N_SEEN = 4
#: Of programs with more bytes of moments than this, nothing is remembered for later steps.
_MOST_MOMENTS = 2**17


def _results_of(program: Program, is_graph: bool) -> _Results:
    """Return the results for a program: its own, or those of an earlier step with the same key."""
    results: _Results | None = program.measured.get(is_graph)
    if results is not None:
        return results
    estimate = estimates.estimate(program, is_graph)
    traits = program.last_body, program.is_tail_linear, program.has_checkpoints, *program.devices
    key = *program.sizes, is_graph, *traits, *hooks.hooked(), estimate.moments, estimate.whole
    is_kept = estimate.again is None and len(estimate.moments) <= _MOST_MOMENTS
    results = _seen.pop(key, None) if is_kept else None  # hashing many moments takes long
    results = results or _Results({AS_IT_IS: Option(AS_IT_IS, estimate, program.n_nodes)})
    if is_kept:
        remember(_seen, key, results, _N_SEEN)  # the newest is the last
    program.measured[is_graph] = results
    return results


class Strategies:
    """The strategies to run a program.

    A strategy is measured once, and not at all if the measure of another rules it out: it cannot
    fit in more rows than a strategy that saves more memory, nor cost less than in these rows.
    """

    def __init__(self, program: Program, is_graph: bool) -> None:
        self._program, self._is_graph = program.cut_for(AS_IT_IS), is_graph
        self._results = _results_of(self._program, is_graph)
        self._is_back = is_graph and bool(program.roots)
        self._can_offload = can_offload(program)

    def option(self, strategy: Strategy) -> Option:
        """Return a strategy with what it needs."""
        options = self._results.options
        if strategy not in options:
            cut = self._program.cut_for(strategy)
            whole = options[AS_IT_IS].estimate.whole
            estimate = estimates.estimate(cut, self._is_graph, strategy, whole=whole)
            options[strategy] = Option(strategy, estimate, cut.n_calls(strategy))
        return options[strategy]

    def cost(self, option: Option, rows: int) -> float:
        """Estimate the time of a step that is run in a strategy, in chunks of `rows` rows: as a
        multiple of that of the calls alone, each made once."""
        return self._price(option.strategy, option.n_calls, -(-option.estimate.rows // rows))

    def _price(self, strategy: Strategy, n_calls: int, n_chunks: int) -> float:
        """Return the cost of a strategy with so many calls a chunk and chunks."""
        amounts = self._program.amounts
        is_cpu = all(device.type == "cpu" for device in self._program.devices)
        of_chunk = n_calls * (_CALL if is_cpu else _CALL_ON_ACCELERATOR) + _GIVEN * amounts.given
        is_again = strategy.n_segments > 1 or (
            strategy.n_segments == 1 and self._program.has_checkpoints
        )
        more = _AGAIN * is_again + self._price_of_policies(strategy)
        return (1 + more) * (1 + n_chunks * of_chunk / max(1, amounts.made))

    def _price_of_policies(self, strategy: Strategy) -> float:
        prices, key = self._results.prices, (strategy.n_segments == 0, strategy.policies)
        if key not in prices:
            prices[key] = self._policies(strategy).price(strategy.policies)
        return prices[key]

    def _policies(self, strategy: Strategy) -> Policies:
        """Return the policies for bodies cut as for a strategy with one segment, or none."""
        base = Strategy(min(1, strategy.n_segments))
        return Policies(self._program.cut_for(base), self._is_back, base)

    def _families(self, base: Strategy = AS_IT_IS) -> Families:
        families, is_uncut = self._results.families, base.n_segments == 0
        if is_uncut not in families:
            families[is_uncut] = self._policies(base).families()
        return families[is_uncut]

    def offloading(self) -> Strategy:
        """Return the strategy that offloads all that bodies leave for each other; as it is, if
        nothing can be offloaded."""
        policies = self._families().offloading if self._can_offload else []
        return Strategy(policies=policies[-1]) if policies else AS_IT_IS

    # The strategies that there may be; `is_there` tells whether one is of use for the program.

    def all(self) -> Iterator[Strategy]:
        """Yield the strategies that need no second axis; all give the same numbers."""
        yield AS_IT_IS
        if not self._is_back:
            yield self.offloading()
            return
        yield from self.recomputing()
        offloading = self.offloading()
        some = self._families().offloading if offloading != AS_IT_IS else []
        yield from (Strategy(policies=policies) for policies in some)
        yield from _IN_PIECES
        for n_segments in SEGMENTS:
            yield from (Strategy(n_segments), offloading._replace(n_segments=n_segments))
        if self._program.has_checkpoints:
            yield from self.recomputing(WITHOUT_CHECKPOINTS)

    def recomputing(self, base: Strategy = AS_IT_IS) -> Iterator[Strategy]:
        """Yield the strategies that free activations which cheap calls can recompute, then those
        that keep a part of the activations between bodies and recompute the others."""
        rematerializing, recomputing, _ = self._families(base)
        for policies in (*rematerializing, *recomputing):
            yield base._replace(policies=policies)

    def larger_chunks(self) -> tuple[Strategy, ...]:
        """Return the strategies that fit more rows, for a program that fits in chunks as it is."""
        return _IN_PIECES if self._is_back else ()

    def along(self, allowed: float = math.inf) -> list[Strategy]:
        """Return the strategies that run the head in parts of a second axis, and the calls before
        it in segments; none if they certainly take more than `allowed` bytes."""
        results, program = self._results, self._program
        if self._holds(AS_IT_IS) > allowed:
            return []
        if results.along is None:
            results.along = []
            by_head: dict[tuple[int, ...], second_axis.Found | None] = {}
            n_before = self._n_cut(AS_IT_IS)
            is_able = self._is_back and program.is_tail_linear
            for n_segments in (1, *SEGMENTS) if is_able else ():
                strategy = Strategy(n_segments, n_pieces=_PIECES[0])
                if self._n_cut(strategy) <= n_before:
                    continue
                n_before, cut = self._n_cut(strategy), program.cut_for(strategy)
                head = tuple(cut.last_segment.nodes)
                if head not in by_head:
                    by_head[head] = second_axis.find(cut, cut.last_segment)
                found = by_head[head]
                for n_pieces in _PIECES_ALONG:
                    if found is not None and found.is_in(n_pieces):
                        pieces = strategy._replace(n_pieces=n_pieces)
                        results.along.append(
                            pieces._replace(second_size=found.n, second_dim=found.dim)
                        )
        return results.along

    def _n_cut(self, strategy: Strategy) -> int:
        """Return a strategy's entry in `_Results.n_cut`."""
        n_cut = self._results.n_cut
        if strategy.cuts not in n_cut:
            cut = self._program.cut_for(strategy)
            # In one that is not stageable, a segment would write what another made.
            n_cut[strategy.cuts] = cut.n_cut if cut.unstageable is None else 0
        return n_cut[strategy.cuts]

    def _freed(self, strategy: Strategy) -> frozenset[int]:
        """Return a strategy's entry in `_Results.freed`."""
        freed = self._results.freed
        if strategy not in freed and not self._n_cut(strategy):
            freed[strategy] = frozenset()
        if strategy not in freed:
            schedule = self._program.cut_for(strategy).schedule(self._is_back, strategy)
            freed[strategy] = frozenset(
                schedule.values_of(Op.STORE, Op.RECOMPUTE) | schedule.cheap_values.keys()
            )
        return freed[strategy]

    def is_there(self, strategy: Strategy) -> bool:
        """Tell whether a strategy does something that no strategy before it in its list does."""
        if strategy.second_size or strategy == AS_IT_IS:
            return True
        if strategy.n_pieces > 1:
            return self._n_cut(strategy) > self._n_cut(AS_IT_IS)
        if strategy.n_segments <= 1:
            return self._n_cut(strategy) > 0
        shorter = max(n for n in (1, *SEGMENTS) if n < strategy.n_segments)
        return self._n_cut(strategy) > self._n_cut(Strategy(shorter))

    # Bounds of a strategy's bytes and cost, found without measuring it.

    def _saving_more(self, strategy: Strategy) -> Strategy | None:
        """Return a strategy that needs no more bytes in chunks of any size; None: none is known."""
        if strategy.n_pieces > 1:
            some = self.along() if strategy.second_size else _IN_PIECES
            alike = (one for one in some if one.n_segments == strategy.n_segments)
            return max(alike, key=lambda one: one.n_pieces)
        offloading = self.offloading()
        is_same = strategy.n_segments <= 1 and strategy.policies != offloading.policies
        return offloading if is_same and offloading != AS_IT_IS else None

    def _left(self) -> dict[int, int]:
        """Return `_Results.left`."""
        if self._results.left is None:
            by_storage: dict[int, int] = {}
            self._results.left = by_storage
            stored = self._program.crossing(True) if self._is_back else set()
            offloading = Strategy(
                policies=self._program.policies(dict.fromkeys(stored, Policy.OFFLOAD))
            )
            schedule = self._program.schedule(True, offloading)
            for step in schedule.steps[: schedule.n_forward] if stored else ():
                stored -= set(step.values) if step.op == Op.FREE else set()
            for value in stored:
                storage, n_bytes = self._program.info(value).storage, self._program.bytes_of(value)
                by_storage[storage] = max(n_bytes, by_storage.get(storage, 0))
        return self._results.left

    def _holds(self, strategy: Strategy) -> int:
        """Return bytes that a step certainly holds between its forward and its backward pass: what
        bodies leave for backward, but for what the strategy frees, recomputes or offloads."""
        left = self._left()
        if not left:
            return 0
        base = strategy._replace(
            n_segments=min(1, strategy.n_segments), n_pieces=1, second_size=0, second_dim=0
        )
        freed = self._freed(base) if base != AS_IT_IS else ()
        return sum(left.values()) - sum(left.get(self._program.info(v).storage, 0) for v in freed)

    def _most_rows(self, strategy: Strategy, allowed: float) -> int:
        """Return rows that the chunks of a strategy that differs in its policies cannot exceed: it
        saves no more, at any moment, than the values that it frees."""
        base = self.option(Strategy(strategy.n_segments)).estimate
        freed = {self._program.info(value).storage for value in self._freed(strategy)}
        n_bytes = sum(self._left().get(storage, 0) for storage in freed)
        return base.largest_chunk(CHUNK_SHARE * allowed + n_bytes)

    def _n_calls(self, strategy: Strategy) -> int:
        option = self._results.options.get(strategy)
        return (
            self._program.cut_for(strategy).n_calls(strategy) if option is None else option.n_calls
        )

    def _least_price(self, strategy: Strategy) -> float:
        """Return a cost that no strategy like this is below."""
        return self._price(strategy, self._program.n_nodes, 1)

    # The search.

    def _fitting(self, strategy: Strategy, allowed: float, price: float) -> Fitting | None:
        """Return a strategy with the rows that fit; None: none do, or it is not below `price`."""
        if self._holds(strategy) > CHUNK_SHARE * allowed or not self.is_there(strategy):
            return None
        if strategy.n_pieces == 1 and strategy.n_segments <= 1:
            most_rows = self._most_rows(strategy, allowed)
            if most_rows == 0:
                return None
            n_chunks = -(-self.option(AS_IT_IS).estimate.rows // most_rows)
            if self._price(strategy, self._n_calls(strategy), n_chunks) >= price:
                return None
        more = self._saving_more(strategy)
        if more is not None and more != strategy:
            most = self._fitting(more, allowed, math.inf)
            if most is None:
                return None
            n_chunks = -(-most.option.estimate.rows // most.rows)
            if self._price(strategy, self._n_calls(strategy), n_chunks) >= price:
                return None
        option = self.option(strategy)
        rows = option.rows(allowed)
        is_cheaper = rows > 0 and self.cost(option, rows) < price
        return Fitting(option, rows) if is_cheaper else None

    def cheapest(
        self, some: Iterable[Strategy], allowed: float, found: Fitting | None = None
    ) -> Fitting | None:
        """Return the cheapest of some strategies that fits; `found` if none is cheaper."""
        price = math.inf if found is None else self.cost(*found)
        for strategy in sorted(some, key=self._least_price):
            if self._least_price(strategy) >= price:
                break
            cheaper = self._fitting(strategy, allowed, price)
            if cheaper is not None:
                found, price = cheaper, self.cost(*cheaper)
        return found

    def enough(self, allowed: float, found: Fitting | None = None) -> Fitting | None:
        """Return a strategy that frees only as many boundary values as the memory that is missing
        needs; `found` if none was found that fits and is cheaper."""
        bases = (AS_IT_IS, WITHOUT_CHECKPOINTS)[: 1 + self._program.has_checkpoints]
        for base in bases if self._is_back else ():
            found = self._enough(base, allowed, found)
        return found

    def _enough(self, base: Strategy, allowed: float, found: Fitting | None) -> Fitting | None:
        """Return a strategy with the cuts of `base` that fits and is cheaper than `found`; else
        that."""
        estimate = self.option(base).estimate
        missing = Missing(self._program.cut_for(base), self._policies(base), self._can_offload)
        budgets = dict.fromkeys((n for n in _CHUNKS if n <= estimate.rows), CHUNK_SHARE * allowed)
        #: By number of chunks: price, strategy, spare bytes.
        chosen: dict[int, tuple[float, Strategy, float]] = {}
        hopeless: set[int] = set()  # numbers of chunks in which it fits with no policies
        for _ in range(_N_MEASURED if missing.options else 0):
            most = math.inf if found is None else self.cost(*found)
            best = min((price for price, *_ in chosen.values()), default=most)
            for n_chunks in budgets:
                if self._price(base, self._program.n_nodes, n_chunks) >= min(best, most):
                    break  # no policies make this many chunks cheaper
                if n_chunks in chosen or n_chunks in hopeless:
                    continue
                peaks = estimate.peaks(-(-estimate.rows // n_chunks))
                made = missing.choose(peaks, budgets[n_chunks])
                if made is None:
                    hopeless.add(n_chunks)
                    continue
                policies, spare = made
                strategy = base._replace(policies=policies)
                price = self._price(strategy, self._program.n_nodes, n_chunks)
                chosen[n_chunks] = price, strategy, spare
                best = min(best, price)
            if not chosen:
                break
            n_chunks = min(chosen, key=chosen.__getitem__)
            price, strategy, spare = chosen.pop(n_chunks)
            if price >= most:
                break
            option, rows = self.option(strategy), -(-estimate.rows // n_chunks)
            fits = option.rows(allowed)
            if fits > 0 and (found is None or self.cost(option, fits) < self.cost(*found)):
                found = Fitting(option, fits)
            if fits > 0:
                break
            # The next choice frees so much more as this one needs more than was predicted.
            budgets[n_chunks] -= option.estimate.peak(rows)[0] - CHUNK_SHARE * allowed + spare
        return found

    def least(self) -> Option:
        """Return the strategy that needs the fewest bytes of those that were measured, after
        measuring those that may need the fewest."""
        offloading = self.offloading()
        least = min(self.option(AS_IT_IS).least, self.option(offloading).least)
        if self._is_back:
            some = [_IN_PIECES[-1]]
            for base in (AS_IT_IS, WITHOUT_CHECKPOINTS)[: 1 + self._program.has_checkpoints]:
                some += self.recomputing(base) if offloading == AS_IT_IS else ()
            for strategy in some:
                if self._holds(strategy) < least and self.is_there(strategy):
                    least = min(least, self.option(strategy).least)
            if self._holds(offloading) < least:
                self._measure_segments(offloading)
        measured = [
            one
            for strategy, one in self._results.options.items()
            if strategy == AS_IT_IS or self._n_cut(strategy) > 0
        ]
        return min(measured, key=lambda one: (one.least, self._least_price(one.strategy)))

    def _measure_segments(self, base: Strategy) -> None:
        """Measure the numbers of segments around the one that needs the fewest bytes. With more
        segments, bytes first fall and then grow: so the numbers are doubled until bytes do not
        fall, and then those between the neighbors of the best one are measured."""
        best, n_cut, falling, stop = self.option(base).least, self._n_cut(base), [1], SEGMENTS[-1]
        for n in (n for n in SEGMENTS if n.bit_count() == 1):
            strategy = base._replace(n_segments=n)
            if self._n_cut(strategy) > n_cut:
                n_cut = self._n_cut(strategy)
                if self.option(strategy).least >= best:
                    stop = n
                    break
                best = self.option(strategy).least
                falling.append(n)
        for n in SEGMENTS:
            strategy = base._replace(n_segments=n)
            if falling[-2:][0] < n < stop and self.is_there(strategy):
                self.option(strategy)


_CPU = torch.device("cpu")


def devices_of(program: Program) -> list[torch.device]:
    """Return the accelerators that a program computes on; only the CPU if it uses none. A batch may
    be on the CPU when it becomes lazy, and be moved by a call of the program."""
    others = [device for device in program.devices if device.type != "cpu"]
    return sorted(others, key=str) if others else [_CPU]
