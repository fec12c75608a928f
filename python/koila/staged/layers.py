# SPDX-License-Identifier: Apache-2.0
"""Find the layer that each recorded call belongs to, and the bytes that layers keep for backward.

Recording does not note modules, so they are inferred. A call that reads a parameter belongs to the
module that owns the parameter. Any other call belongs to the module without parameters that follows
in an nn.Sequential, if that has the name of the op, such as nn.ReLU; else to the layer of the call
before it, if both come from one line of a forward(), or from any one line and more of the model
follows; else to a module around one of its neighbours, if the line is in the forward() of that
module; else to the innermost module that contains both neighbours.
"""

from __future__ import annotations

import gc
import heapq
import inspect
import itertools
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import NamedTuple

import torch
from torch import nn

from koila import _core
from koila.basics import lines
from koila.messages.layer_table import Layer
from koila.staged.facts import ONCE, Node, name_of_call, where_of_node
from koila.staged.program import Program


class _Owner(NamedTuple):
    """A module, named by its path from a root module."""

    root: int  # the index of the root
    path: str


class _Modules:
    """All living modules below roots that own parameters of a program, by their paths."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        wanted = {id(parameter) for parameter in parameters}
        objects = gc.get_objects()
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, nn.Module)}
        found = [one for one in objects if type(one) in kinds]
        children = {id(child) for m in found for child in m.__dict__.get("_modules", {}).values()}
        self.roots: list[nn.Module] = []
        #: By the id of a parameter: the modules that own it; several if it is shared.
        self.owners: dict[int, list[_Owner]] = {}
        self.modules: dict[_Owner, nn.Module] = {}
        for root in found:
            if id(root) in children or "_parameters" not in root.__dict__:
                continue
            self._add(root, wanted)

    def _add(self, root: nn.Module, wanted: set[int]) -> None:
        """Add a root and its modules, if it owns a wanted parameter that no root before it owns."""
        number, paths = len(self.roots), dict[_Owner, nn.Module]()
        owners: dict[int, list[_Owner]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            paths[_Owner(number, path)] = module
            for parameter in module.__dict__.get("_parameters", {}).values():
                if id(parameter) in wanted and id(parameter) not in self.owners:
                    owners.setdefault(id(parameter), []).append(_Owner(number, path))
        if owners:
            self.roots.append(root)
            self.owners.update(owners)
            self.modules.update(paths)

    def owner(self, parameter: torch.Tensor, row: str) -> _Owner | None:
        """Return the module that reads a parameter in a call with this row; None: no module.

        Of several owners it is the embedding if the row is "embedding", else one that is none: a
        table shared by an embedding and the last linear layer is common.
        """
        owners = self.owners.get(id(parameter), [])
        for owner in owners:
            if isinstance(self.modules[owner], nn.Embedding) == (row == "embedding"):
                return owner
        return owners[0] if owners else None

    def around(self, owner: _Owner) -> Iterator[_Owner]:
        """Yield a module, then the modules that contain it, the innermost first."""
        path = owner.path
        while True:
            yield _Owner(owner.root, path)
            if not path:
                return
            path = path.rpartition(".")[0]

    def name(self, owner: _Owner) -> str:
        """Return the path of a module. If there are several roots, the class of its root precedes
        it, with a number where others have the same class: "Encoder#2.layers.0"."""
        kinds = [type(root).__name__ for root in self.roots]
        root = kinds[owner.root]
        if kinds.count(root) > 1:
            root += f"#{kinds[: owner.root + 1].count(root)}"
        parts = [root] if len(self.roots) > 1 else []
        parts += [owner.path] if owner.path else []
        return ".".join(parts) or root

    def kind(self, owner: _Owner) -> str:
        return type(self.modules[owner]).__name__


def _is_in(where: str, module: nn.Module) -> bool:
    """Tell whether a line, such as "model.py:40", is in the forward() of a module."""
    forward = getattr(type(module), "forward", None)
    code = getattr(inspect.unwrap(forward) if forward is not None else None, "__code__", None)
    if not isinstance(code, CodeType) or code.co_filename.startswith(lines.INSIDE):
        return False
    file, _, line = where.rpartition(":")
    if file != lines.name_of_file(code.co_filename) or not line.isdigit():
        return False
    last = max((last for _, _, last in code.co_lines() if last), default=0)
    return code.co_firstlineno <= int(line) <= last


def _is_derivative(program: Program, node: Node) -> bool:
    """Tell whether a call is a recorded `autograd.grad` (`derived.py`), which is in no module."""
    return program.row_of(node) == "gradient_of"


def _parameters(program: Program, node: Node) -> Iterator[torch.Tensor]:
    """Yield the parameters that a call reads; none for a derivative, which reads many calls'."""
    for import_id in () if _is_derivative(program, node) else node.imports:
        if import_id >= 0:
            real = program.info(program.imports[import_id].value).real
            if isinstance(real, nn.Parameter):
                yield real


class _Place(NamedTuple):
    """A call with the line that made it and the module that it belongs to, if that is known."""

    node: Node
    where: str
    owner: _Owner | None


def _places(program: Program) -> tuple[_Modules, list[_Place]]:
    """Return the modules of a program, and the place of each of its calls, in order."""
    nodes = [node for _, node in sorted(program.nodes.items())]
    modules = _Modules(tensor for node in nodes for tensor in _parameters(program, node))
    found: list[_Place] = []
    for node in nodes:
        owners = (modules.owner(p, program.row_of(node)) for p in _parameters(program, node))
        owner = next((owner for owner in owners if owner is not None), None)
        found.append(_Place(node, where_of_node(node), owner))
    following: list[_Owner | None] = []
    for place in reversed(found):
        last = following[-1] if following else None
        following.append(place.owner if place.owner is not None else last)
    following.reverse()
    previous: _Place | None = None
    for i, place in enumerate(found):
        if place.owner is None and not _is_derivative(program, place.node):
            row = program.row_of(place.node)
            found[i] = place = place._replace(
                owner=_owner_of(modules, place, row, previous, following[i])
            )
        previous = place
    return modules, found


def _owner_of(
    modules: _Modules, place: _Place, row: str, previous: _Place | None, following: _Owner | None
) -> _Owner | None:
    """Return the module of a call with the op `row` that reads no parameter; None: not known.
    `following` is the module of the next call that reads a parameter."""
    if place.node.is_for_chunks and following is not None:
        return following  # it computes a part of the next call
    before = previous.owner if previous is not None else None
    if previous is not None and before is not None and previous.where == place.where:
        named = _next_in_sequential(modules, before, row)
        if named is not None:
            return named
        goes_on = following is not None and following.root == before.root
        if goes_on or any(_is_in(place.where, modules.modules[o]) for o in modules.around(before)):
            return before
        return None  # a call of the script on what the model returned
    for near in (before, following):
        for owner in modules.around(near) if near is not None else ():
            if _is_in(place.where, modules.modules[owner]):
                return owner
    return _around_both(before, following)


def _next_in_sequential(modules: _Modules, before: _Owner, row: str) -> _Owner | None:
    """Return the module without parameters that follows `before` in an nn.Sequential around it and
    has the name of an op; None: there is none before the next module with parameters."""
    for owner, parent in itertools.pairwise(modules.around(before)):
        if not isinstance(modules.modules[parent], nn.Sequential):
            return None
        names = list(modules.modules[parent]._modules)
        for name in names[names.index(owner.path.rpartition(".")[2]) + 1 :]:
            found = _Owner(parent.root, f"{parent.path}.{name}" if parent.path else name)
            module = modules.modules[found]
            if type(module).__name__.lower() == row.replace("_", ""):
                return found
            if next(module.parameters(), None) is not None:
                return None
    return None


def _around_both(before: _Owner | None, following: _Owner | None) -> _Owner | None:
    """Return the innermost module, below the root, that contains both modules; None: there is none.
    It serves calls made by functions in other files, such as activations."""
    if before is None or following is None or before.root != following.root:
        return None
    pairs = zip(before.path.split("."), following.path.split("."), strict=False)
    common = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    path = ".".join(common)
    return _Owner(before.root, path) if path else None


def _source(program: Program, value: int) -> int:
    """Return the value that a view is a view of, through views of views; else the value itself."""
    while (view := program.info(value).view) is not None:
        value = view[2]
    return value


def _kept(program: Program) -> dict[int, list[tuple[int, bool]]]:
    """Return the bytes that autograd saves for backward in a whole run, without the leaves: by the
    id of the call that made them, pairs of bytes and whether they grow with the samples."""
    kept: dict[int, list[tuple[int, bool]]] = {}
    seen: set[int] = set()

    def keep(value: int) -> None:
        source = _source(program, value)
        info, maker = program.info(source), program.node_of(source)
        if maker is not None and info.storage not in seen:
            seen.add(info.storage)
            n_bytes = program.bytes_of(source)
            kept.setdefault(maker.id, []).append((n_bytes, info.place is not None))

    for node in program.nodes.values():
        if node.is_for_chunks or not node.is_kept:
            continue
        inputs, saves = _core.node(node.id)[5:7]
        in_bits, out_bits, extra, is_extra_rows, fixed, *_ = saves
        read = (value for k, value in enumerate(inputs) if k >= 64 or in_bits >> k & 1)
        made = (value for k, value in enumerate(node.outs) if k >= 64 or out_bits >> k & 1)
        for value in (*read, *made):
            if value >= 0:
                keep(value)
        kept.setdefault(node.id, []).extend([(extra, is_extra_rows), (fixed, False)])
    return kept


def largest_kept(program: Program, most: int) -> list[tuple[int, int, bool]]:
    """Return the `most` largest tensors that autograd saves for backward, the largest first: the id
    of the call that made it, its bytes for the whole batch, and whether they grow with it."""
    found = (
        (node, n_bytes, is_rows)
        for node, amounts in _kept(program).items()
        for n_bytes, is_rows in amounts
        if n_bytes > 0
    )
    return heapq.nlargest(most, found, key=lambda one: one[1])


def rows_of(program: Program) -> int:
    """Return the number of samples of the program's batch; of several batches, of the largest."""
    return max(program.axes.values(), default=1)


def of(program: Program) -> tuple[Layer, ...]:
    """Return the layers of a program, in the order of their first calls."""
    modules, places = _places(program)
    kept = _kept(program)
    rows = rows_of(program)
    calls: dict[_Owner | str, list[Node]] = {}
    for node, where, owner in places:
        calls.setdefault(where if owner is None else owner, []).append(node)
    found = []
    for key, nodes in calls.items():
        name, kind = (key, "") if isinstance(key, str) else (modules.name(key), modules.kind(key))
        amounts = [amount for node in nodes for amount in kept.get(node.id, [])]
        n_bytes = sum(n for n, _ in amounts)
        per_sample = sum(n for n, is_rows in amounts if is_rows) / rows
        is_once = all(node.mode == ONCE and not program.takes_rows(node) for node in nodes)
        is_whole = is_once or any(map(program.joins_rows, nodes))
        found.append(Layer(name, kind, len(nodes), n_bytes, per_sample, is_whole))
    return tuple(found)


class Names:
    """The names of the layers of a program's calls, found once for a message with several names."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._modules, places = _places(program)
        owners = {place.node.id: place.owner for place in places}
        self._names = {i: self._modules.name(o) for i, o in owners.items() if o is not None}

    def of_call(self, node_id: int) -> str:
        """Return the name of the layer that a call belongs to; empty if it is in no module."""
        return self._names.get(node_id, "")

    def of_value(self, value: int) -> str:
        """Describe a value by the call that made it, such as "the output of layer 'encoder.0'
        (conv2d, model.py:40)"."""
        node = self._program.node_of(_source(self._program, value))
        if node is None:
            return "an input"
        layer = self.of_call(node.id)
        made = f"the output of layer {layer!r}" if layer else "the result"
        return f"{made} ({name_of_call(node.id)}, {where_of_node(node)})"

    def of_parameter(self, parameter: torch.Tensor) -> str:
        """Return the path of a parameter, such as "fc.weight"; its shape if no module owns it."""
        modules = self._modules if id(parameter) in self._modules.owners else _Modules([parameter])
        for owner in modules.owners.get(id(parameter), []):
            for name, one in modules.modules[owner].named_parameters(recurse=False):
                if one is parameter:
                    return repr(f"{owner.path}.{name}" if owner.path else name)
        what = "a parameter" if isinstance(parameter, nn.Parameter) else "a tensor that you made"
        return f"{what} of shape {list(parameter.shape)}"
