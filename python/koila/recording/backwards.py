# SPDX-License-Identifier: Apache-2.0
"""backward() and autograd.grad() of lazies, in chunks where possible."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from koila import _core
from koila.basics import engine, surroundings
from koila.basics.rows import as_new
from koila.basics.table import Args, Func, Words, words_of
from koila.memory import order
from koila.planning import unsplit
from koila.recording import handed_out, replicated, sharded, within
from koila.reporting import reports
from koila.running import derived, replay


def _listed(obj: Any) -> list[Any]:
    return list(obj) if isinstance(obj, tuple | list) else [obj]


def _gradients(given: Any, roots: list[Any]) -> list[Any]:
    """Return the gradients of roots as a list; None for each if none were given."""
    return [None] * len(roots) if given is None else _listed(given)


def _reals(obj: Any) -> list[Any]:
    """Replace lazies by their real tensors, or by None while they are pending."""
    return [_core.real(one) if type(one) is _core.LazyTensor else one for one in _listed(obj)]


#: Sends gradients on from cuts, given the inputs that get them (None: all leaves).
Finish = Callable[[Any, list[torch.Tensor], list[torch.Tensor]], Any]


def _in_chunks(words: Words, roots: list[Any], gradients: list[Any], finish: Finish) -> Any:
    """Run backward() or autograd.grad(), whose arguments are `words`, in chunks; return
    NotImplemented if the program has to run whole. A gradient that is None stands for ones."""
    is_other = words.get("create_graph") or words.get("is_grads_batched")
    is_other = is_other or words.get("grad_variables") is not None
    if is_other or surroundings.of_backward() or len(gradients) != len(roots):
        return NotImplemented
    inputs = None if words.get("inputs") is None else _reals(words["inputs"])
    if inputs is not None and not (inputs and all(isinstance(t, torch.Tensor) for t in inputs)):
        return NotImplemented
    is_retained = bool(words.get("retain_graph"))
    return replay.differentiate(
        roots, gradients, is_retained, inputs, functools.partial(finish, inputs)
    )


class _Thread(threading.local):
    #: Why backward() is refused on this thread; empty: it is not.
    refusal = ""


_thread = _Thread()


@contextlib.contextmanager
def refused(why: str) -> Iterator[None]:
    """Wrap a block in which, on this thread, backward() raises a ValueError before it runs."""
    _thread.refusal = why
    try:
        yield
    finally:
        _thread.refusal = ""


def backward(func: Func, args: Args, kwargs: Words) -> None:
    """Run Tensor.backward or torch.autograd.backward."""
    if _thread.refusal:
        raise ValueError(_thread.refusal)
    with reports.Asking("backward()"):
        _backward(func, args, kwargs)
    if sharded.kept:
        sharded.free_gathered()
    if replicated.waiting:
        replicated.visit()


_OF_TENSOR = tuple("self gradient retain_graph create_graph inputs".split())
_OF_TENSORS = tuple("tensors grad_tensors retain_graph create_graph grad_variables inputs".split())


def _backward(func: Func, args: Args, kwargs: Words) -> None:
    names = _OF_TENSOR if func is torch.Tensor.backward else _OF_TENSORS
    words = words_of(names, args, kwargs)
    roots = _listed(words[names[0]])
    gradients = _gradients(words.get(names[1]), roots)
    if words.get("inputs") is not None:
        handed_out.refuse_inner(_listed(words["inputs"]), "backward")
    replay.settle_leaves()

    def finish(inputs: Any, cuts: list[torch.Tensor], found: list[torch.Tensor]) -> None:
        is_retained = bool(words.get("retain_graph"))
        if cuts:
            engine.backward(cuts, found, is_retained=is_retained, inputs=inputs or ())

    if _in_chunks(words, roots, gradients, finish) is not NotImplemented:
        return
    is_decided = reports.is_decided()
    if is_decided and _is_of_a_number(words, roots, gradients):
        _run_whole(roots[0], bool(words.get("retain_graph")))
        return
    _refuse_roots(roots, gradients)
    left = None if is_decided else _tell_why(func, words, names[0])
    try:
        unsplit.run(func, args, kwargs, left)
    finally:
        _core.note_backward()


def _is_of_a_number(words: Words, roots: list[Any], gradients: list[Any]) -> bool:
    """Tell whether a backward starts from one lazy number, to leaves, and makes no graph."""
    root: Any = roots[0] if len(roots) == 1 and gradients[0] is None else None
    is_lazy = type(root) is _core.LazyTensor and root.requires_grad
    is_number: bool = is_lazy and root.numel() == 1 and root.dtype.is_floating_point
    is_usual = words.get("inputs") is None and words.get("grad_variables") is None
    return is_number and is_usual and not words.get("create_graph")


def _run_whole(root: _core.LazyTensor, is_retained: bool) -> None:
    """Run the pending calls on the whole batch, and the backward of a number that they make."""
    try:
        real = _core.force(root)
        order.move((real,))
        engine.backward((real,), (torch.ones_like(real),), is_retained=is_retained)
        _core.release()
    finally:
        _core.note_backward()


def _refuse_roots(roots: list[Any], given: list[Any]) -> None:
    """Raise torch's own error if a backward cannot start, before anything runs for it."""

    def is_refused(root: Any, sent: Any) -> bool:
        if not is_pending(root):
            return False
        has_start = root.numel() == 1 if sent is None else sent.shape == root.shape
        return not (root.requires_grad and has_start)

    def as_large(lazy: Any) -> torch.Tensor:
        number = torch.zeros((), dtype=lazy.dtype, device=lazy.device)
        return number.requires_grad_(lazy.requires_grad).expand(lazy.shape)

    is_plain = {torch.Tensor, type(None)}.issuperset(map(type, given))
    if is_plain and len(given) == len(roots) and any(map(is_refused, roots, given)):
        with torch.enable_grad():
            stand_ins = [as_large(one) if is_pending(one) else one for one in roots]
        torch.autograd.backward(stand_ins, given)


def _tell_why(func: Func, words: Words, root: str, cause: str = "") -> unsplit.Left | None:
    """Report why a backward cannot run in chunks, and check that it fits whole. Return the memory
    that is left, if it is not known how much the backward needs; None: it fits. The argument `root`
    has the roots; `cause`: why a gradient with create_graph=True could not be recorded."""
    outputs, is_deep = _listed(words[root]), bool(words.get("create_graph"))
    if not (is_deep or any(map(is_pending, outputs))):
        return None
    why = "it starts from other tensors too, or in a way that is not run in chunks"
    if seen := surroundings.of_backward():
        why = seen
    elif words.get("create_graph"):
        why = f"create_graph=True keeps autograd's graph of the whole batch{cause}"
    elif words.get("is_grads_batched"):
        why = "is_grads_batched=True runs it under vmap"
    elif any(map(is_pending, _listed(words.get("inputs")))):
        why = "inputs= has a value that is still to be computed"
    inputs = None if words.get("inputs") is None else _listed(words["inputs"])
    return unsplit.check(func, why, unsplit.Derivative(outputs, inputs, is_deep))


GRAD_WORDS = tuple("outputs inputs grad_outputs retain_graph create_graph only_inputs".split())


def autograd_grad(func: Func, args: Args, kwargs: Words) -> Any:
    """Run torch.autograd.grad. Gradients with a graph (create_graph=True) are recorded if possible;
    others are plain tensors."""
    words, cause = words_of(GRAD_WORDS, args, kwargs), ""
    replay.settle_leaves()
    if words.get("create_graph") and not words.get("is_grads_batched"):
        outputs = _listed(words["outputs"])
        gradients = _gradients(words.get("grad_outputs"), outputs)
        recorded = derived.record(outputs, _listed(words["inputs"]), gradients)
        if not isinstance(recorded, str):
            return recorded
        cause = f" where {recorded}"
    with reports.Asking("autograd.grad()"):
        found = _through_parts(func, words)
        if found is not None:
            return found
        handed_out.refuse_inner(_listed(words["inputs"]), "grad")
        return _autograd_grad(func, args, kwargs, words, cause)


def _through_parts(func: Func, words: Words) -> tuple[Any, ...] | None:
    """Return gradients of values that a part handed out and has read itself; None if they are not
    such values, or it cannot be done."""
    if words.get("create_graph") or words.get("is_grads_batched"):
        return None
    others = {name: value for name, value in words.items() if name not in ("outputs", "inputs")}
    others.update(allow_unused=True, materialize_grads=False)

    def find(tensors: list[torch.Tensor]) -> Any:
        args = words["outputs"], tensors
        return _autograd_grad(func, args, others, words_of(GRAD_WORDS, args, others), "")

    inputs = _listed(words["inputs"])
    found = within.gradients(inputs, find)
    if found is None or None not in found:
        return None if found is None else tuple(found)
    if words.get("materialize_grads"):
        pairs = zip(found, inputs, strict=True)
        return tuple(torch.zeros_like(one) if g is None else g for g, one in pairs)
    if words.get("allow_unused"):
        return tuple(found)
    raise RuntimeError(
        "One of the differentiated Tensors appears to not have been used in the graph. Set "
        "allow_unused=True if this is the desired behavior."
    )


def _autograd_grad(func: Func, args: Args, kwargs: Words, words: Words, cause: str) -> Any:
    roots = _listed(words["outputs"])
    gradients = _gradients(words.get("grad_outputs"), roots)

    def finish(inputs: Any, cuts: list[torch.Tensor], found: list[torch.Tensor]) -> Any:
        made = torch.autograd.grad(
            cuts,
            inputs,
            found,
            retain_graph=words.get("retain_graph") or None,
            allow_unused=words.get("allow_unused"),
            materialize_grads=words.get("materialize_grads") or False,
        )
        # `deliver` gives a leaf its gradient through a view of the leaf, which makes the gradient a
        # view, too. torch refuses a write with a graph to a view that was taken without one.
        return tuple(one if one is None or not one._is_view() else as_new(one) for one in made)

    found = _in_chunks(words, roots, gradients, finish)
    if found is not NotImplemented:
        return found
    if not words.get("is_grads_batched"):  # batched gradients have one dim more than the roots
        _refuse_roots(roots, gradients)
    left = None if reports.is_decided() else _tell_why(func, words, "outputs", cause)
    try:
        return unsplit.run(func, args, kwargs, left)
    finally:
        if not kwargs.get("create_graph") and not kwargs.get("retain_graph"):
            _core.note_backward()


def is_pending(obj: Any) -> bool:
    return type(obj) is _core.LazyTensor and _core.real(obj) is None
