"""The bytes that are live in one run, a body on a chunk or a joint, forward and backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from koila import _core
from koila.program import Node, Program, Run
from koila.sizes import Size, Sizes

# Their backward hands the gradient of the result on as it is: name of the row, and which inputs.
_HANDED_ON = {"add": (0, 1), "sub": (0,)}
# Made of two calls: the further value between them is kept, and has a gradient of its own.
_COMPOSED = ("cross_entropy_loss",)


@dataclass(frozen=True)
class Need:
    """Bytes at one moment: fixed + per_row * rows; and the node that runs then."""

    fixed: float
    per_row: float
    node: int

    def bytes(self, rows: int) -> float:
        return self.fixed + self.per_row * rows


def _plus(*sizes: Size) -> Size:
    return sum(size[0] for size in sizes), sum(size[1] for size in sizes)


@dataclass(frozen=True)
class _Kept:
    """What autograd keeps for a node: values, further bytes; and bytes while it runs."""

    row: str | None
    values: set[int]
    further: Size
    workspace: Size


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
    """A run as it goes through memory: forward(), and then back() through its graph."""

    def __init__(self, program: Program, run: Run, sizes: Sizes, is_graph: bool) -> None:
        self.program = program
        self.run = run
        self.sizes = sizes
        self.is_graph = is_graph and (run.has_gradient or not run.is_body)
        self.inside = {v for i in run.nodes for v in program.nodes[i].outs}
        self.inside.update(v for node in run.combined for v in node.outs)
        held = [*run.exports, *program.written_in(run)]  # to the end of the run
        self.held = {program.info(v).storage for v in held}
        self.storages = _Total()
        self.further = _Total()
        self.gradients = _Gradients()
        self.moments: list[Need] = []
        self.kept: dict[int, _Kept] = {}
        self.freed_by: dict[int, list[int]] = defaultdict(list)
        self.drops: dict[int, list[int]] = defaultdict(list)
        self.freed = 0.0
        self._find_lifetimes()

    # -- sizes and lifetimes -----------------------------------------------------------------------

    def _size(self, value: int) -> Size:
        return self.sizes.of(value) if self.run.is_body else (float(self.sizes.whole(value)), 0.0)

    def _numbers(self, node: Node) -> list[int]:
        return [number for number in node.imports if number >= 0]

    def _reads(self, node: Node) -> list[int]:
        return [self.program.imports[number].value for number in self._numbers(node)]

    def _has_gradient(self, node: Node) -> bool:
        return self.is_graph and any(self.program.needs_gradient(v) for v in node.outs)

    def _kept_for(self, node: Node) -> _Kept:
        detail = _core.node(node.id)
        rows, inputs = detail[4], detail[5]
        saved_inputs, saved_outputs, extra, is_rows, whole, workspace = detail[6]
        values = {v for k, v in enumerate(inputs) if v >= 0 and (k >= 64 or saved_inputs >> k & 1)}
        values |= {v for k, v in enumerate(node.outs) if saved_outputs >> k & 1}
        if detail[1] is None:
            values |= {v for v in inputs if v >= 0} | set(node.outs)
        by_rows = self.run.is_body and rows > 0
        split = by_rows and is_rows
        further = (float(whole), extra / rows) if split else (float(extra + whole), 0.0)
        scratch = (0.0, workspace / rows) if by_rows else (float(workspace), 0.0)
        if not self._has_gradient(node):
            return _Kept(detail[1], set(), (0.0, 0.0), scratch)
        return _Kept(detail[1], values, further, scratch)

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
        for storage, i in saved.items():
            if storage not in self.held:
                self.freed_by[i] += [storage, *self._clones_of(storage)]
        for storage, position in last_use.items():
            if storage not in saved and storage not in self.held:
                self.drops[position].append(storage)

    def _clones_of(self, storage: int) -> list[int]:
        """Keys of the clones that writes of this run make of a storage."""
        nodes = (self.program.nodes[i] for i in self.run.nodes if i in self.program.cloned)
        return [-1 - n.id for n in nodes if self.program.info(n.first_out).storage == storage]

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
            if i in self.run.parts:
                self.storages.add(-1 - i, self._terms(node))
            else:
                for value in node.outs:
                    self._hold(value)
            if i in self.program.cloned:
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
        is_loss = row is not None and row.endswith("_loss") and not row.startswith("cross_entropy")
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
        for i in reversed(self.run.nodes):
            node = self.program.nodes[i]
            if self._has_gradient(node):
                self._back_through(node)
        if self.run.nodes:
            self._note(self.run.nodes[0])  # the gradients of what was gathered are cut
        self.freed = before.fixed - self.live().fixed
        return self.moments

    def _back_through(self, node: Node) -> None:
        if node.id not in self.run.parts:
            for value in node.outs:
                self.gradients.put(value, self._size(value))
        kept = self.kept[node.id]
        more = [kept.workspace]
        if kept.row in _COMPOSED:
            more.append(kept.further)
        handed_on = self._handed_on(node)
        for k, number in enumerate(node.imports):
            value = self.program.imports[number].value if number >= 0 else -1
            if value < 0 or not self.program.needs_gradient(value):
                continue
            is_gathered = not self.run.is_body and not self._is_given(number)
            if value not in self.inside and not is_gathered:
                more.append(self._size(value))  # until it is added to what other chunks gave
                continue
            shared = node.first_out if k in handed_on else None
            size = self._size(value)
            if not self.gradients.put(value, size, shared):
                more += [size, size]  # the second gradient, and the sum
        self._note(node.id, _plus(*more))
        for value in node.outs:
            self.gradients.take(value)
        self.further.drop(node.id)
        for storage in self.freed_by[node.id]:
            self.storages.drop(storage)

    def _handed_on(self, node: Node) -> tuple[int, ...]:
        """The inputs whose gradient is the result's, or a view of it."""
        if node.n_outs != 1 or node.id in self.run.parts:
            return ()
        out = self.program.info(node.first_out)
        candidates = _HANDED_ON.get(self.kept[node.id].row or "", ())
        found = []
        for k, number in enumerate(node.imports):
            if number < 0:
                continue
            value = self.program.imports[number].value
            info = self.program.info(value)
            is_same = info.storage == out.storage or k in candidates
            if is_same and self._size(value) == self._size(node.first_out):
                found.append(k)
        return tuple(found)
