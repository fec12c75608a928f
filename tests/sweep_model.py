"""The bytes that are live in one run, forward and backward, in Python: what sweep.c is held to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import held
from held import Amount, Held
from koila import _core
from koila.program import REDUCE, Node, Program, Run
from model_kit import readers_of, written_in
from sizes_model import Size, Sizes

_NONE: Size = (0.0, 0.0)


class Need(NamedTuple):
    """Bytes at one moment: fixed + per_row * rows + per_chunk * chunks; the node that runs then."""

    fixed: float
    per_row: float
    node: int
    per_chunk: float = 0.0

    def bytes(self, rows: int, n_chunks: int) -> float:
        return self.fixed + self.per_row * rows + self.per_chunk * n_chunks


def _plus(*sizes: Size) -> Size:
    return sum(size[0] for size in sizes), sum(size[1] for size in sizes)


def _times(n: float, size: Size) -> Size:
    return n * size[0], n * size[1]


class _Kept(NamedTuple):
    """What autograd keeps for a node: values, further bytes; and bytes while it runs, and back."""

    row: str | None
    held: Held
    values: set[int]
    further: Size
    workspace: Size
    backward: Size


class _Total:
    """Bytes of a changing set of things, added up as it changes."""

    def __init__(self) -> None:
        self.sizes: dict[int, Size] = {}
        self.fixed = 0.0
        self.per_row = 0.0

    def add(self, key: int, size: Size) -> None:
        if key not in self.sizes:
            self.sizes[key] = size
            self.fixed += size[0]
            self.per_row += size[1]

    def drop(self, key: int) -> None:
        fixed, per_row = self.sizes.pop(key, (0.0, 0.0))
        self.fixed -= fixed
        self.per_row -= per_row


class _Gradients(_Total):
    """Gradients on their way: several values can share one, where it was handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer_of: dict[int, int] = {}
        self.n_users: dict[int, int] = defaultdict(int)

    def put(self, value: int, size: Size, shared: int | None = None) -> bool:
        """The gradient of a value arrives; False where one is there: the two are added up."""
        if value in self.buffer_of:
            return False
        buffer = self.buffer_of[shared] if shared is not None else value
        self.buffer_of[value] = buffer
        self.n_users[buffer] += 1
        self.add(buffer, size)
        return True

    def take(self, value: int) -> None:
        """The gradient of a value was used up."""
        buffer = self.buffer_of.pop(value, None)
        if buffer is not None:
            self.n_users[buffer] -= 1
            if self.n_users[buffer] == 0:
                self.drop(buffer)


class Sweep:
    """A run as it goes through memory: forward(), and then back() through its graph.

    Live: it is the program as it was written. Writes go where they say, and a parameter's gradient
    is the one that backward made, there from then on; in a stage it is added to those of others.
    """

    def __init__(
        self, program: Program, run: Run, sizes: Sizes, is_graph: bool, is_live: bool = False
    ) -> None:
        self.program = program
        self.is_live = is_live
        self.cloned = set() if is_live else program.cloned
        self.run = run
        self.sizes = sizes
        self.is_graph = is_graph and (run.has_gradient or not run.is_body)
        self.inside = {v for i in run.nodes for v in program.nodes[i].outs}
        self.inside.update(v for node in run.combined for v in node.outs)
        lasting = [*run.exports, *written_in(program, run)]  # to the end of the run
        self.held = {program.info(v).storage for v in lasting}
        self.cut = self._find_cut()
        self.storages = _Total()
        self.further = _Total()
        self.gradients = _Gradients()
        self.moments: list[Need] = []
        self.kept: dict[int, _Kept] = {}
        self.freed_by: dict[int, list[int]] = defaultdict(list)
        self.drops: dict[int, list[int]] = defaultdict(list)
        self.freed = 0.0
        self.n_to_come: Counter[int] = Counter()  # gradients that still come for a value
        self._find_lifetimes()

    # -- sizes and lifetimes -----------------------------------------------------------------------

    def _size(self, value: int) -> Size:
        if not self.run.is_body:
            return float(self.sizes.whole(value)), 0.0
        return self.cut.get(value) or self.sizes.of(value)

    def _find_cut(self) -> dict[int, Size]:
        """Whole values (plain tensors) of which a chunk is given its rows."""
        if not self.run.is_body or not self.run.nodes:
            return {}
        rows = _core.node(self.run.nodes[-1])[4]
        entries = [self.program.imports[number] for number in self.run.imports]
        return {
            entry.value: (0.0, self.sizes.whole(entry.value) / rows)
            for entry in entries
            if entry.place is not None and self.program.info(entry.value).place is None
        }

    def _numbers(self, node: Node) -> list[int]:
        return [number for number in node.imports if number >= 0 and not node.is_open]

    def _reads(self, node: Node) -> list[int]:
        return [self.program.imports[number].value for number in self._numbers(node)]

    def _has_gradient(self, node: Node) -> bool:
        return self.is_graph and any(self.program.needs_gradient(v) for v in node.outs)

    def _kept_for(self, node: Node) -> _Kept:
        detail = _core.node(node.id)
        rows, inputs = detail[4], detail[5]
        saved_inputs, saved_outputs, extra, is_rows, whole, forward, backward = detail[6]
        values = {v for k, v in enumerate(inputs) if v >= 0 and (k >= 64 or saved_inputs >> k & 1)}
        values |= {v for k, v in enumerate(node.outs) if saved_outputs >> k & 1}
        if detail[1] is None:
            values |= {v for v in inputs if v >= 0} | set(node.outs)
        by_rows = self.run.is_body and rows > 0
        split = by_rows and is_rows
        further = (float(whole), extra / rows) if split else (float(extra + whole), 0.0)
        scratch = (0.0, forward / rows) if by_rows else (float(forward), 0.0)
        back = (0.0, backward / rows) if by_rows else (float(backward), 0.0)
        found = held.of(detail[1])
        if node.id in self.run.parts:
            parts = held.parts_of(node.reduce, node.is_for_chunks)
            found = parts.held or found
            if parts.keeps is not None:
                values, further = set(), self._amount(node, parts.keeps)
        if found.forward != held.NONE:
            scratch = _plus(scratch, self._amount(node, found.forward))
        if not self._has_gradient(node):
            made = _NONE if found.is_stepwise else further
            return _Kept(detail[1], found, set(), _NONE, _plus(scratch, made), _NONE)
        return _Kept(detail[1], found, values, further, scratch, back)

    def _amount(self, node: Node, amount: Amount) -> Size:
        """Bytes of what a node holds in flight."""
        out = self._size(node.first_out)
        first = node.imports[0] if node.imports else -1
        operand = self.program.imports[first].value if first >= 0 else node.first_out
        into = self._size(operand)
        sizes = _plus(_times(amount.outs, out), _times(amount.ins, into))
        if amount.masks:
            value = max(node.first_out, operand, key=self.sizes.n_elements)
            itemsize = self.program.info(value).dtype.itemsize
            sizes = _plus(sizes, _times(amount.masks / itemsize, self._size(value)))
        return sizes

    def _find_lifetimes(self) -> None:
        saved: dict[int, int] = {}  # storage -> the first node that saves it: the last to need it
        last_use: dict[int, int] = {}
        for position, i in enumerate(self.run.nodes):
            node = self.program.nodes[i]
            self.kept[i] = self._kept_for(node)
            for value in self.kept[i].values:
                saved.setdefault(self.program.info(value).storage, i)
            for value in [*node.outs, *self._reads(node)]:
                last_use[self.program.info(value).storage] = position
        self.saved = saved
        clones = self._clones()
        for storage, i in saved.items():
            if storage not in self.held:
                self.freed_by[i] += [storage, *clones.get(storage, ())]
        for storage, position in last_use.items():
            if storage not in saved and storage not in self.held:
                self.drops[position].append(storage)

    def _clones(self) -> dict[int, list[int]]:
        """By storage: keys of the clones that writes of this run make of it."""
        clones: dict[int, list[int]] = defaultdict(list)
        for i in filter(self.cloned.__contains__, self.run.nodes):
            node = self.program.nodes[i]
            clones[self.program.info(node.first_out).storage].append(-1 - node.id)
        return clones

    # -- forward -----------------------------------------------------------------------------------

    def _hold(self, value: int) -> None:
        self.storages.add(self.program.info(value).storage, self._size(value))

    def _note(self, node: int, more: Size = (0.0, 0.0)) -> None:
        a, b, c = self.storages, self.further, self.gradients
        fixed = a.fixed + b.fixed + c.fixed + more[0]
        self.moments.append(Need(fixed, a.per_row + b.per_row + c.per_row + more[1], node))

    def _is_given(self, number: int) -> bool:
        """Whether what is read is there already; else a copy is made for this run."""
        entry = self.program.imports[number]
        if self.run.is_body:
            return self.sizes.is_view(entry)
        node = self.program.node_of(entry.value)
        return node is None or node.stage % 2 == 0 or self.program.info(entry.value).place is None

    def _enter(self) -> list[int]:
        """What the run is given; returns the storages of copies, which live to its end."""
        copies = []
        for number in self.run.imports:
            value = self.program.imports[number].value
            storage = self.program.info(value).storage
            if self._is_given(number):
                self.storages.add(storage, (0.0, 0.0))
            else:
                self._hold(value)
                copies.append(storage)
        for node in self.run.combined:
            for value in node.outs:
                self._hold(value)
        return copies

    def forward(self) -> list[Need]:
        """The moments of running the nodes in order."""
        self.moments = []
        copies = {storage: storage for storage in self._enter()}  # key -> the storage it is of
        for position, i in enumerate(self.run.nodes):
            node = self.program.nodes[i]
            is_parts = i in self.run.parts
            if is_parts or (self.is_live and node.mode == REDUCE):
                self.storages.add(-1 - i, self._terms(node))
            for value in () if is_parts else node.outs:
                self._hold(value)
            if i in self.cloned:
                self.storages.add(-1 - i, self._size(node.outs[-1]))
                copies[-1 - i] = self.program.info(node.first_out).storage
            self.further.add(i, self.kept[i].further)
            self._note(i, self.kept[i].workspace)
            for storage in self.drops[position]:
                if storage not in copies:
                    self.storages.drop(storage)
        for key, storage in copies.items():
            if storage not in self.saved and storage not in self.held:
                self.storages.drop(key)
        return self.moments

    def _terms(self, node: Node) -> Size:
        """A reduced loss lies in the memory of its terms."""
        row = self.kept[node.id].row
        reads = self._reads(node)
        is_loss = held.of(row).is_of_terms
        return max(map(self._size, reads), key=sum) if is_loss and reads else (0.0, 0.0)

    def live(self) -> Need:
        """What is live when forward() is done: saved for back(), or exported."""
        totals = (self.storages, self.further)
        node = self.run.nodes[-1] if self.run.nodes else 0
        return Need(sum(t.fixed for t in totals), sum(t.per_row for t in totals), node)

    # -- backward ----------------------------------------------------------------------------------

    def back(self, seeded: Iterable[int] = ()) -> list[Need]:
        """The moments of going back through the graph that forward() left.

        The gradients of the values `seeded` are there when it starts, and to its end.
        """
        self.moments = []
        before = self.live()
        for value in seeded:
            self.gradients.put(value, self._size(value))
            self.gradients.n_users[value] += 1
        nodes = [self.program.nodes[i] for i in reversed(self.run.nodes)]
        steps = [(node, self._wanted(node)) for node in nodes if self._has_gradient(node)]
        outside = (v for _, wanted in steps for _, v in wanted if v not in self.inside)
        self.n_to_come = Counter(outside)
        for node, wanted in steps:
            self._back_through(node, wanted)
        if self.run.nodes:
            self._note(self.run.nodes[0])  # the gradients of what was gathered are cut
        self.freed = before.fixed - self.live().fixed
        return self.moments

    def _back_through(self, node: Node, wanted: list[tuple[int, int]]) -> None:
        outs, kept = node.outs, self.kept[node.id]
        is_parts = node.id in self.run.parts
        if not is_parts:
            for value in outs:
                self.gradients.put(value, self._size(value))
        fixed, per_row = _plus(kept.backward, self._in_flight(node, kept.held, wanted))
        if held.of(kept.row).is_composed:
            fixed, per_row = _plus((fixed, per_row), kept.further)
        done = []
        for k, value in wanted:
            size, shared = self._size(value), None
            if value in self.inside or self._is_gathered(node.imports[k]):
                is_shared = not is_parts and self._is_handed_on(node, kept.held, k, value, size)
                shared = node.first_out if is_shared else None
            else:
                self.n_to_come[value] -= 1
                if self.n_to_come[value] == 0 and self._is_added(value):
                    done.append(value)
            if not self.gradients.put(value, size, shared):
                n = 1 if value in self.n_to_come else 2  # the second gradient, and the sum
                fixed += n * size[0]
                per_row += n * size[1]
        self._note(node.id, (fixed, per_row))
        for value in outs:
            self.gradients.take(value)
        for value in done:
            self.gradients.take(value)
        self.further.drop(node.id)
        for storage in self.freed_by.get(node.id, ()):
            self.storages.drop(storage)

    def _is_added(self, value: int) -> bool:
        """Whether the gradient of what entered is added to one there is: that of other chunks, or
        of the steps before."""
        real = self.program.info(value).real
        is_first = real is None or not real.is_leaf or real.grad is None
        return not (self.is_live and is_first)

    def _is_gathered(self, number: int) -> bool:
        """Whether a joint reads a value put together from chunks, whose gradient is cut again."""
        return not self.run.is_body and not self._is_given(number)

    def _wanted(self, node: Node) -> list[tuple[int, int]]:
        """The operands that need a gradient: which, and their values."""
        program, found = self.program, []
        for k, number in enumerate(node.imports):
            if number >= 0 and program.needs_gradient(value := program.imports[number].value):
                found.append((k, value))
        return found

    def _in_flight(self, node: Node, found: Held, wanted: list[tuple[int, int]]) -> Size:
        """What the formulas for some operands' gradients hold beside these, at most."""
        if found == held.NOTHING:
            return _NONE
        more = _NONE
        for amount in {found.backward[min(k, 2)] for k, _ in wanted} - {held.NONE}:
            more = max(more, self._amount(node, amount), key=sum)
        if found.turned and self._is_turned(node):
            more = _plus(more, _times(found.turned, self._size(node.first_out)))
        if not found.is_wide:
            return more
        n_elements = self.sizes.n_elements(node.first_out)
        narrow = [
            self._size(value)
            for k, value in wanted
            if k not in found.handed_on and self.sizes.n_elements(value) < n_elements
        ]
        if not narrow:
            return more
        # As large as the result, all of them, until they are summed one after the other.
        out, first = self._size(node.first_out), max(narrow, key=sum)
        return _plus(more, _times(len(narrow), out), _times(-1, _plus(*narrow)), first)

    def _is_turned(self, node: Node) -> bool:
        """Whether the gradient of a node's result is laid out otherwise than the result."""
        readers = readers_of(self.program, node.first_out)
        return any(held.of(_core.node(reader.id)[1]).turns for reader in readers)

    def _is_handed_on(self, node: Node, found: Held, k: int, value: int, size: Size) -> bool:
        """Whether an operand's gradient is the result's, or a view of it."""
        if node.n_outs != 1 or size != self._size(node.first_out):
            return False
        info = self.program.info
        return k in found.handed_on or info(value).storage == info(node.first_out).storage
