# SPDX-License-Identifier: Apache-2.0
"""Raise where eager's backward would, since a saved tensor was written in place.

Chunks may still have the saved numbers, since a write to what another stage made goes to a clone.
So before a step is differentiated, the op table names the calls whose saved tensors were written,
and torch is asked on meta tensors whether the backward of the call really needs them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import torch

from koila import _core
from koila.messages.errors import StaleError
from koila.planning import unsplit
from koila.random import generators
from koila.running import checkpoints, derived, recomputed
from koila.staged.cache import remember
from koila.staged.facts import Info, Node, name_of_call
from koila.staged.program import NO_CALL, Program

_TEXT = (
    "one of the variables needed for gradient computation has been modified by an inplace operation"
)
_ELSEWHERE = "a call that is not recorded"


def check(program: Program) -> None:
    """Raise what eager's backward of a program raises for tensors written since they were saved."""
    for body in checkpoints.bodies(program) if program.has_checkpoints else ():
        for value in body.given:
            written = _core.writer_from(body.nodes[0].id, value)  # in the program or not
            if written is not None and not _is_uncounted(program, value):
                _refuse(program, value, "the checkpoint", written[0])
        for value in body.read:
            _check_read_again(program, value, body)
    call = NO_CALL
    # The core finds the next call after `call` of which something saved was written.
    while (found := _core.overwritten(program.handle, call)) is not None:
        call, values = found
        node = program.node(call)
        for value in dict.fromkeys(values):
            # If no later call wrote it, the call itself overwrote what it saved.
            writer, region = _core.writer_from(call + 1, value) or (call, node.region)
            is_recomputed = checkpoints.is_made_again(program, value, node.region, region)
            if is_recomputed or _is_uncounted(program, value):
                continue
            if _needs_as_before(program, node, value) and _is_gone_through(program, node):
                _refuse(program, value, _call(call), writer, _is_hidden(node, region))


def _check_read_again(program: Program, value: int, body: checkpoints.Body) -> None:
    """Raise where a call after a checkpoint writes what its function reads: torch runs the function
    again and reads the new numbers, without an error."""
    info, regions = program.info(value), {node.region for node in body.nodes}
    written = _core.writer_from(body.nodes[0].id, value) if info.base != value else None
    while written is not None and written[1] in regions:
        written = _core.writer_from(written[0] + 1, value)
    if written is None or checkpoints.is_made_again(program, value, body.region, written[1]):
        return
    _core.abandon()
    recomputed.refuse_written(info.shape, _reader(program, value, body.nodes))


def _reader(program: Program, value: int, body: Sequence[Node]) -> str:
    """Return the name and line of the first call of a checkpoint's function that reads a value."""
    return _call(next(node for node in body if value in program.reads(node)).id)


def _refuse(
    program: Program, value: int, keeps: str, writer: int, is_hidden: bool = False
) -> NoReturn:
    generators.move_on()  # later draws come after the program's, as in eager
    _core.abandon()
    if is_hidden:
        recomputed.refuse_written(program.info(value).shape, keeps)
    _raise(program, value, keeps, _call(writer))


def _raise(program: Program, value: int, keeps: str, writer: str) -> NoReturn:
    info = program.info(value)
    kind = torch.empty(0, dtype=info.dtype, device=info.device).type()
    raise RuntimeError(
        f"{_TEXT}: [{kind} {list(info.shape)}], which {keeps} keeps, was written by {writer}"
    )


def _is_hidden(node: Node, writing: int) -> bool:
    """Return whether a call is in a checkpoint and torch does not see that a call of the region
    `writing` wrote what it saves. torch sees only writes inside of a reentrant checkpoint."""
    is_seen = node.region % 2 and node.region in checkpoints.around(writing)
    return node.region != 0 and not is_seen


def check_leaves(
    program: Program, leaves: set[int], uncounted: Collection[int] = (), writing: int = 0
) -> None:
    """Raise what eager's backward raises where a call of a part saved one of `leaves`, which a call
    that is not in the part wrote since.

    Args:
        program: the program of a part that was cut off.
        leaves: values that were written: leaves, or values that were handed out.
        uncounted: those of `leaves` that were written through .data, without a new version.
        writing: the region in which, or after which, they were written.

    Raises:
        RuntimeError: torch's error.
        StaleError: a value in `uncounted` is needed. torch would mix new and old numbers.
    """
    for body in checkpoints.bodies(program):
        for value in leaves.intersection(body.read):
            if checkpoints.is_made_again(program, value, body.region, writing):
                continue
            if value in body.given and value not in uncounted:
                _raise(program, value, "the checkpoint", _ELSEWHERE)
            recomputed.refuse_written(
                program.info(value).shape, _reader(program, value, body.nodes)
            )
    for node in program.nodes.values():
        if not any(map(program.needs_gradient, node.outs)):
            continue
        for value in {*program.reads(node), *node.outs}:
            written = value if value in leaves else program.info(value).base  # a view of a leaf
            if written not in leaves:
                continue
            # A normalization does not need the running statistics that it updated itself.
            is_moved = value in uncounted and value in program.moved_by(node)
            is_again = checkpoints.is_made_again(program, value, node.region, writing)
            is_needed = not (is_moved or is_again) and _needs_as_before(program, node, value)
            if is_needed and _is_gone_through(program, node):
                info = program.info(value)
                is_other = value != written and _is_uncounted(program, value)
                if written in uncounted or is_other:
                    _refuse_uncounted(info, _call(node.id))
                if node.region:
                    recomputed.refuse_written(info.shape, _call(node.id))
                _raise(program, value, _call(node.id), _ELSEWHERE)


def _refuse_uncounted(info: Info, call: str) -> NoReturn:
    raise StaleError(
        f"{call} keeps a tensor of shape {list(info.shape)}, which was written "
        "through .data or by a fused optimizer before its backward; write it after backward()"
    )


def refuse_uncounted(program: Program, value: int) -> NoReturn:
    """Raise that a value which a call of a program reads was written through .data."""
    _refuse_uncounted(program.info(value), _reader(program, value, [*program.nodes.values()]))


def values_in(program: Program, storages: set[int]) -> set[int]:
    """Return the values of a program that are in these storages."""
    if not storages:
        return set()
    nodes = program.nodes.values()
    values = {value for node in nodes for value in (*program.reads(node), *node.outs)}
    return {value for value in values if program.info(value).storage in storages}


def note_moved(program: Program, values: Collection[int]) -> None:
    """Note the versions of running statistics that calls of a program have updated now."""
    versions: dict[int, tuple[int, int]] = _core.notes().setdefault("versions", {})
    program.infos.ask(values)
    for value in values:
        versions[value] = _version(program.infos[value])


def check_moved(roots: list[Any]) -> None:
    """Raise what eager's backward raises where running statistics were written after the call that
    updated them. A part that reads a copy of them checks the tensors itself (`cut.py`)."""
    versions: dict[int, tuple[int, int]] = _core.notes().get("versions", {})
    found = [(value, noted, _version(Info.of(value))) for value, noted in versions.items()]
    if written := {v for v, noted, now in found if now[0] == noted[0] and now[1] != noted[1]}:
        check_leaves(Program(roots), written)


def _version(info: Info) -> tuple[int, int]:
    """Return the id of a leaf's tensor, and its version."""
    real = info.real
    return id(real), -1 if real is None or real.is_inference() else real._version


def _is_gone_through(program: Program, node: Node) -> bool:
    """Return whether torch's backward visits a call: a recorded derivative may end before it."""
    nodes = unsplit.gone_through(program) if "recipes" in _core.notes() else None
    return nodes is None or node.id in nodes


def _is_uncounted(program: Program, value: int) -> bool:
    """Return whether x.data was taken of a value's storage: torch does not count writes to it."""
    return program.info(value).storage in program.uncounted


#: Results of `_needs` by all that is known of a call, since each step asks for the same calls.
_asked: dict[Any, bool] = {}
_N_ASKED = 1024


def _needs_as_before(program: Program, node: Node, value: int) -> bool:
    """As `_needs`, asked once for calls that are alike."""
    func, row, *_, reads, saves = _core.node(node.id)
    if row is None or row == "gradient_of":  # derivatives of different calls look alike
        return _needs(program, node, value)
    infos = (program.info(v) if v >= 0 else None for v in (*reads, *node.outs))
    # Autocast needs no key of its own: it shows in the dtype of the results.
    alike = tuple((i.dtype, i.shape, i.strides, i.requires_grad) if i else None for i in infos)
    key = func, row, alike, tuple(v == value for v in (*reads, *node.outs)), saves
    needs = _asked.get(key)
    if needs is None:
        needs = _needs(program, node, value)
        remember(_asked, key, needs, _N_ASKED)
    return needs


def _needs(program: Program, node: Node, value: int) -> bool:
    """Return whether torch's backward of a call raises if one of its values was written since. Run
    the call on stand-ins without memory, and its backward after a new version of the value."""
    env: list[Any] = [None] * program.n_values
    leaves = unsplit.enter(program, (v for v in _core.node(node.id)[5] if v >= 0), env)
    try:
        with derived.beside(()):  # a derivative cannot use the graph of stand-ins
            _core.run_alone(node.id, env, -1, False, unsplit.call_whole)
        torch.autograd.graph.increment_version(env[value])
        made = [env[v] for v in node.outs if env[v].requires_grad]
        ends = [leaf for leaf in leaves.values() if leaf.requires_grad]
        torch.autograd.grad(made, ends, [torch.empty_like(t) for t in made], allow_unused=True)
    except Exception as error:  # torch raises errors of many types here
        if _TEXT in str(error):
            return True
        _, row, *_, reads, (kept, kept_outs, *_) = _core.node(node.id)
        is_kept = any(v == value and kept >> k & 1 for k, v in enumerate(reads))
        is_kept |= any(v == value and kept_outs >> k & 1 for k, v in enumerate(node.outs))
        return row is not None and is_kept
    return False


def _call(i: int) -> str:
    return f"{name_of_call(i)} ({_core.node(i)[3]})"
