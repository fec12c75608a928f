# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that run live, on the whole batch: autograd keeps no saved tensor of their calls. As
in torch's checkpoint, the first unpack of one in backward runs the calls of the function again.

A checkpoint inside of another one treats the values that it reads of the outer one as saved
tensors: recomputing the inner one first recomputes the outer one.

The *body* of a checkpoint is its function as recorded calls, and its *region* the number of it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from koila import _core
from koila.basics import generator_state, lines, surroundings, switches
from koila.basics.rows import is_alias
from koila.memory import outside
from koila.messages.errors import KoilaError, let_go
from koila.random import draws
from koila.reductions import norms
from koila.running import module_state
from koila.running.repeated import Call, Layout, Memory, OfPart, Ref
from koila.staged import aliases, meta
from koila.staged.aliases import version_of
from koila.staged.facts import is_data
from koila.staged.meta import map_nested


def refuse_inputs() -> NoReturn:
    """Raise: a backward for some tensors alone reaches a reentrant checkpoint."""
    raise KoilaError(
        "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or "
        "passing an `inputs` parameter to .backward(): a tensor that only its function reads "
        "gets no gradient. Set use_reentrant=False, or call .backward() without passing the "
        "`inputs` argument."
    )


class _Kept(aliases.Kept):
    """A tensor from outside of a checkpoint's body, as the body read it."""

    __slots__ = ("name", "needs_gradient")

    def __init__(self, tensor: Tensor, name: str) -> None:
        is_shared = aliases.is_shared(tensor)
        super().__init__(tensor.detach(), is_shared)  # of the same version, without its graph
        self.needs_gradient = tensor.requires_grad
        self.name = name  # the first call that read it
        _kept.add(self)

    def get(self) -> Tensor:
        """Return the tensor, for the body's second run. Raise a KoilaError if it was written
        since."""
        if self.is_written():
            refuse_written(self.tensor.shape, self.name)
        return self.tensor.detach().requires_grad_(self.needs_gradient)


_kept: weakref.WeakSet[_Kept] = weakref.WeakSet()


def watch(tensor: Tensor) -> None:
    """Note that x.data was taken of a tensor: writes through it change no version. A checksum of
    each kept tensor in this memory detects them. A sparse tensor has no memory of its own."""
    if not (_kept or alive) or aliases.memory_of(tensor) is None:
        return
    for kept in list(_kept):
        if kept.checksum is None and is_alias(kept.tensor, tensor):
            kept.watch()
    for body in list(alive.values()):
        body.keep_memory_of(tensor)


def refuse(what: str) -> NoReturn:
    """Raise: a checkpoint's function has a side effect, which torch would repeat, and koila not."""
    raise KoilaError(
        f"checkpoint: its function {what} ({lines.user_line()}). torch runs it once more in "
        "backward, and that too; koila runs it once. Leave it out of the checkpoint, or run it "
        "whole: koila.config(chunks=1)"
    )


def refuse_written(shape: Iterable[int], name: str) -> NoReturn:
    """Raise that a tensor was written which a call of a checkpoint's body (`name`) needs again."""
    raise KoilaError(
        f"checkpoint: a tensor of shape {list(shape)} that {name} in its function keeps, or that "
        "the function reads, was written before backward, where torch runs that once more; koila "
        "runs it once. Write it after backward, or run it whole: koila.config(chunks=1)"
    )


_OTHER = (
    "checkpoint: its calls saved something else when they were made once more in backward. Leave "
    "them out of the checkpoint"
)


class Handle:
    """Stands for a tensor of a body that can be recomputed: one that a call saved for backward, or
    that an inner body reads."""

    __slots__ = tuple(
        "__weakref__ body is_pinned like memory needs_gradient tensor version".split()
    )

    def __init__(self, body: Body, tensor: Tensor, needs_gradient: bool = False) -> None:
        self.body = body
        self.like = tensor.shape, tensor.dtype, tensor.device
        self.needs_gradient = needs_gradient
        self.tensor: Tensor | None = None
        self.version: int | None = None
        self.is_pinned = False  # the tensor is kept, and not recomputed
        self.memory: Layout | None = None  # of the tensor that a custom function saved

    def set(self, tensor: Tensor) -> None:
        """Provide the tensor, computed by the body's second run."""
        if self.is_pinned and self.tensor is not None:
            return
        if (tensor.shape, tensor.dtype, tensor.device) != self.like:
            raise KoilaError(_OTHER)
        self.tensor = tensor.detach()
        self.version = version_of(tensor)
        self.is_pinned = self.body.tree.is_settled

    def get(self) -> Tensor:
        """Return the tensor, recomputed if necessary, and keep it no longer unless it is pinned."""
        if self.body.is_reentrant and not torch.autograd._is_checkpoint_valid():
            refuse_inputs()
        if self.tensor is None:
            self.body.recompute()
        tensor = self.tensor
        if tensor is None:
            raise KoilaError(_OTHER)
        if self.is_pinned and version_of(tensor) != self.version:
            refuse_written(tensor.shape, "a call")
        # A part that the second run needs may read it while the run goes on.
        self.tensor = tensor if self.is_pinned or self.body.is_running else None
        return tensor.detach().requires_grad_(self.needs_gradient)


def _fill(handles: Iterable[weakref.ref[Handle]], tensor: Tensor) -> None:
    for handle in handles:
        if (one := handle()) is not None:
            one.set(tensor)


class _Tree:
    """What the body of an outermost checkpoint and the bodies inside of it share."""

    def __init__(self) -> None:
        self.bodies: weakref.WeakSet[Body] = weakref.WeakSet()
        self.outer: dict[int, int] = {}  # region -> the region around it
        self.keys: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id of a tensor
        self.n_keys = 0
        self.kept: dict[int, _Kept | OfPart] = {}  # key -> a tensor from outside of all bodies
        self.memories: dict[int, Memory] = {}  # of parts, by address of the storage
        self.results: list[weakref.ref[Tensor]] = []  # of custom functions
        self.watched: set[int] = set()  # addresses of storages of which x.data was taken
        self.versions: dict[int, int | None] = {}  # key -> of a tensor that is computed again
        self.makers: dict[int, int] = {}  # key -> the region that made the tensor
        self.storages: set[int] = set()  # of the tensors that a body read and did not make
        self.is_settled = False  # one of these is written: saved tensors are kept from now on
        self.has_norms = False  # a body has normalizations, which update statistics in each run

    def key_of(self, tensor: Tensor) -> int | None:
        before, key = self.keys.get(id(tensor), (None, -1))
        return key if before is not None and before() is tensor else None

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """Return the memory of a tensor if a part makes it, with this dtype; else None."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        memory = self.memories.get(tensor.untyped_storage()._cdata)
        is_same = memory is not None and not memory.ref.expired() and memory.dtype == tensor.dtype
        return memory if is_same else None

    def forget_if_written(self, tensor: Tensor) -> None:
        """Forget how to compute a tensor again if it was written after it was made: computing it
        again would give the numbers from before that write."""
        key = self.key_of(tensor)
        if key is not None and self.versions.get(key, version_of(tensor)) != version_of(tensor):
            del self.keys[id(tensor)]
        memory = self.memory_of(tensor)
        if memory is not None and version_of(tensor) != 0:
            self.memories.pop(tensor.untyped_storage()._cdata)

    def new_key(self, tensor: Tensor) -> int:
        self.n_keys += 1
        self.keys[id(tensor)] = weakref.ref(tensor), self.n_keys
        return self.n_keys

    def settle(self) -> None:
        """Recompute now what all bodies saved, and keep it: one of them is about to write a tensor
        that they would read again."""
        if not self.is_settled:
            self.is_settled = True
            for body in list(self.bodies):
                body.recompute()


class _Env(dict[int, Tensor]):
    """The tensors of a body's second run, by key. What a part makes is made at the first read."""

    def __init__(self, entered: dict[int, _Kept | OfPart | Handle]) -> None:
        super().__init__()
        self.entered = entered

    def __missing__(self, key: int) -> Tensor:
        self[key] = self.entered[key].get()
        return self[key]


class _StopError(Exception):
    """Everything that was asked for is recomputed."""


class Body:
    """The calls of a checkpoint's function, including those of checkpoints inside of it."""

    def __init__(self, region: int, outer: Body | None) -> None:
        self.region = region
        self.outer = outer
        self.tree: _Tree = outer.tree if outer is not None else _Tree()
        self.tree.bodies.add(self)
        self.tree.outer[region] = outer.region if outer is not None else 0
        #: It is, or is in, the body of a reentrant checkpoint.
        self.is_reentrant: bool = region % 2 == 1 or (outer is not None and outer.is_reentrant)
        self.is_running = False  # its second run goes on
        self.calls: list[Call] = []
        #: By key, the last call that reads or makes it; it is not there for the call that runs.
        self.last: dict[int, int] = {}
        #: By key, tensors from outside of this body.
        self.entered: dict[int, _Kept | OfPart | Handle] = {}
        self.saved: list[weakref.ref[Handle]] = []  # in the order in which autograd saved them
        self.handed: dict[int, list[weakref.ref[Handle]]] = {}  # key -> what inner bodies read
        #: Leaves, without their graphs, to which the backward of a reentrant body sends gradients.
        self.leaves: list[Tensor] = []
        #: The modules that the function can call, as they were when it was recorded.
        self.modules: list[module_state.ModuleState] = (
            _core.notes().get("modules", {}).get(region, [])
        )

    def read(self, tensor: Tensor, name: str) -> Ref:
        """Note that a call of the body reads a tensor; return a reference to the tensor."""
        self.tree.forget_if_written(tensor)
        key = self.tree.key_of(tensor)
        if key is None:
            key, memory = self.tree.new_key(tensor), self.tree.memory_of(tensor)
            kept = _Kept(tensor, name) if memory is None else OfPart(tensor, memory)
            self.tree.kept[key] = kept
            if memory is not None:
                self.tree.versions[key] = version_of(tensor)
        self.need(key, tensor)
        return Ref(key)

    def makes(self, key: int) -> bool:
        """Return whether a call of this body, or of one inside, made the tensor of a key."""
        maker = self.tree.makers.get(key, 0)
        while maker not in (0, self.region):
            maker = self.tree.outer[maker]
        return maker == self.region

    def need(self, key: int, tensor: Tensor) -> None:
        """Note that this body, or one inside, reads a tensor, which may come from outside of it."""
        if key in self.entered or self.makes(key):
            return
        self.tree.storages.add(tensor.untyped_storage()._cdata)
        if self.outer is not None:
            self.outer.need(key, tensor)
        if key in self.tree.kept:
            self.entered[key] = self.tree.kept[key]
        elif self.outer is not None:
            handle = self.entered[key] = Handle(self.outer, tensor, tensor.requires_grad)
            self.outer.handed.setdefault(key, []).append(weakref.ref(handle))

    def add(self, call: Call, reads: Iterable[int]) -> None:
        """Add a call that has run to this body and to those around it."""
        keys = [*reads, *(key for key in call.outs if key is not None)]
        body: Body | None = self
        while body is not None:
            body.last.update(dict.fromkeys(keys, len(body.calls)))
            body.calls.append(call)
            body = body.outer

    def keep_memory_of(self, tensor: Tensor) -> None:
        """Keep the tensors that custom functions saved in the memory of `tensor`, of which x.data
        was taken. In eager mode a write through x.data changes these tensors, so the numbers that
        would be computed again are not theirs."""
        tree, storage = self.tree, tensor.untyped_storage()._cdata
        saved = [one for ref in self.saved if (one := ref()) is not None]
        for handle in saved:
            if handle.memory is not None and handle.memory.is_of(tensor) and not handle.is_pinned:
                handle.tensor, handle.is_pinned = handle.memory.taken_of(tensor), True
                handle.version = version_of(tensor)
        tree.watched.add(storage)
        tree.memories.pop(storage, None)
        for name, (ref, key) in list(tree.keys.items()):
            alive = ref() if key in tree.versions else None
            if alive is not None and alive.untyped_storage()._cdata == storage:
                del tree.keys[name]

    def save(self, tensor: Tensor) -> Handle:
        """Return what autograd keeps in place of a tensor that a call of the body saves."""
        handle = Handle(self, tensor)
        self.saved.append(weakref.ref(handle))
        if self.tree.is_settled:
            handle.set(tensor)
        return handle

    def recompute(self) -> None:
        """Run the calls once more, until all that they saved, and that inner bodies read, is
        provided to its handles."""
        module_state.check(self.modules)
        left = set(self.handed)
        env = _Env(self.entered)
        for key, one in self.entered.items():
            if key in left or not isinstance(one, OfPart):
                env[key] = one.get()
        n_saved = 0

        def give(keys: Iterable[int | None]) -> None:
            for key in left.intersection(keys):
                if key in env:
                    _fill(self.handed[key], env[key])
                    left.discard(key)
            if not left and n_saved == len(self.saved):
                raise _StopError

        def pack(tensor: Tensor) -> None:
            nonlocal n_saved
            _fill(self.saved[n_saved : n_saved + 1], tensor)
            n_saved += 1
            give(())

        own, others = saved_tensors_hooks(pack, _unasked), saved_tensors_hooks(_drop, _unasked)
        self.is_running = True
        try:
            with _making(self.calls):
                give(list(env))
                for i, call in enumerate(self.calls):
                    with own if call.region == self.region else others:
                        call.make(env)
                    give(call.outs)
                    for key in [key for key in env if self.last.get(key, -1) <= i]:
                        del env[key]
        except _StopError as error:
            let_go(error)
        finally:
            self.is_running = False
            env.clear()  # a traceback may keep the hooks, and so this frame, alive


def _drop(_: Tensor) -> None:
    """Save nothing: an inner body has handles of its own for what its calls save."""


def _unasked(_: None) -> NoReturn:
    raise AssertionError("nobody differentiates what is made again")


@contextlib.contextmanager
def _making(calls: list[Call]) -> Iterator[None]:
    """Let a block run calls once more, and restore the generators that they draw from."""
    generators = {generator for call in calls for generator, _ in call.states}
    states = [(one, generator_state.get(one)) for one in generators]
    try:
        with surroundings.making_calls():
            yield
    finally:
        for generator, state in states:
            generator_state.set_to(generator, state)


# Live calls ---------------------------------------------------------------------------------------

alive: weakref.WeakValueDictionary[int, Body] = weakref.WeakValueDictionary()


def body_of(region: int) -> Body:
    body = alive.get(region)
    if body is None:
        around = _core.notes().get("around", {}).get(region, ())  # regions that began on this tape
        outer = body_of(around[-2]) if len(around) > 1 else None
        body = alive[region] = Body(region, outer)
    _core.notes().setdefault("live", {})[region] = body  # keep it: more calls of it may follow
    return body


def note_leaf(region: int, leaf: Tensor) -> None:
    """Note that the backward of a reentrant body, which runs live, will send a gradient to a leaf,
    maybe through plain calls."""
    (alive.get(region) or body_of(region)).leaves.append(leaf.detach())


class _Live(NamedTuple):
    """A call that is about to run live."""

    node: int
    outs: range
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_random: bool
    writes: int  # a bit for each input that it writes

    @property
    def again(self) -> norms.Again | None:
        """The momentum of a batch_norm that updates its statistics again in the second run."""
        found = (one for one in self.args if isinstance(one, norms.Again))
        return next(found, None)

    def written(self) -> list[Tensor]:
        """Return the tensors that it writes; all its tensors if it is not known which."""
        tensors = meta.tensors((self.args, self.kwargs))
        if len(tensors) != len(_core.node(self.node)[5]):
            return tensors if self.writes else []
        return [one for k, one in enumerate(tensors) if self.writes >> k & 1]

    def start(self) -> list[tuple[torch.Generator, Any]]:
        """Return the generator that it draws from, if any, and the state in which its draws
        start."""
        return [draws.start_of(self.node, self.outs[0])] if self.is_random else []

    @contextlib.contextmanager
    def noted(self, body: Body) -> Iterator[None]:
        """Let it run in a block as a call of `body`: note its inputs, results and saved tensors."""
        func, row, _, where, *_ = _core.node(self.node)
        name = f"{row or getattr(func, '__name__', 'a call')} ({where})"
        tree, again = body.tree, self.again
        refs: list[Ref] = []

        def refer(tensor: Tensor) -> Ref:
            refs.append(body.read(tensor, name))
            return refs[-1]

        args, kwargs = map_nested((self.args, self.kwargs), Tensor, refer)
        written = [] if again is not None else self.written()
        if tree.storages.intersection(one.untyped_storage()._cdata for one in written):
            tree.settle()
        tree.has_norms = tree.has_norms or again is not None
        if tree.has_norms and tree.is_settled:
            refuse("writes what it did not make, and moves running statistics")
        states = self.start()
        has_own = any(isinstance(one, torch.Generator) for one in self.kwargs.values())
        is_kept = any(state is None or has_own for _, state in states)
        context = switches.Context.current(_core.value(self.outs[0])[10])
        with contextlib.nullcontext() if is_kept else saved_tensors_hooks(body.save, Handle.get):
            yield
        made = [_core.value(out)[5] for out in self.outs]
        for one in made if body.is_reentrant else ():
            node: Any = one.grad_fn if one is not None else None
            if node is not None:
                node.metadata[outside.IN_REENTRANT] = True
        outs = [None if one is None else tree.key_of(one) for one in made]
        for k, one in enumerate(made):
            if one is not None and outs[k] is None:
                key = outs[k] = tree.new_key(one)
                tree.makers[key] = body.region
                if is_kept:
                    tree.kept[key] = _Kept(one, name)
                    del tree.makers[key]
        if not is_kept and any(key is not None for key in outs):
            call = Call(body.region, func, args, kwargs, context, outs, again, states)
            body.add(call, (ref.key for ref in refs))


def keep(i: int, region: int, first_out: int, n_outs: int, call: Any, *words: Any) -> Any:
    """Prepare for a call that is about to run live.

    Return an entered block (the caller leaves it after the call) if the call is in a checkpoint of
    number `region`; else None. If it takes x.data, watch that memory.
    """
    func, args, kwargs = call
    if is_data(func):
        watch(args[0])
    if not region:
        return None
    live = _Live(i, range(first_out, first_out + n_outs), func, args, kwargs, *words)
    block = live.noted(body_of(region))
    block.__enter__()
    return block
