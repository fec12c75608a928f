# SPDX-License-Identifier: Apache-2.0
"""verify(): run a step whole and in chunks, and compare the results."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from koila import _core
from koila.basics.config import config
from koila.messages.words import count
from koila.reporting import reports

#: How far two runs may differ by rounding, as multiples of the dtype's eps: relative to the largest
#: entry of the tensor, or to that of all tensors of its kind, since a gradient may be nothing but
#: rounding (that of a bias before a batch norm is 0).
_ROUNDING, _ROUNDING_OF_KIND = 2**12, 2**4
#: They may also differ by this multiple of the change that a whole run shows if the last bit of its
#: activations changes: a batch norm of equal samples divides rounding by the root of its eps.
_TIMES_LAST_BIT = 2**4
_MOST_SHOWN = 10


@dataclass(frozen=True)
class Difference:
    """The difference of two runs in one tensor.

    Attributes:
        name: "gradient of 0.weight", "buffer of 1.running_mean", "result of 0"; and "parameter of
            0.weight" if the step leaves no gradient.
        largest: the largest difference of two entries, divided by the largest entry of the whole
            run; nan if the shape or dtype differs, or if only one run has the tensor.
        is_rounding: whether sums in another order can explain the difference.
        is_only_rounding: whether the tensor itself is little but rounding, so that `largest` says
            nothing, such as the gradient of a bias before a batch norm, which is 0.
    """

    name: str
    largest: float
    is_rounding: bool
    is_only_rounding: bool = False

    def __str__(self) -> str:
        note = "  (itself little but rounding)" if self.is_only_rounding else ""
        return f"{self.largest:9.2e}  {self.name}{note if self.is_rounding else '  (differs)'}"


@dataclass(frozen=True)
class Verification:
    """The results of a step, whole and in chunks, compared. It prints as a text.

    Attributes:
        n_chunks: the most chunks in which a part of the second run ran; 1: it could not be cut.
        differences: one for each tensor, the largest first.
        first_module: the first module, in the order of the forward, whose output differs by more
            than rounding; None: none does.
        n_sensitive: the number of tensors that differ by more than rounding usually explains, but
            change as much when the last bit of the activations changes.
    """

    n_chunks: int
    differences: tuple[Difference, ...]
    first_module: str | None = None
    n_sensitive: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs by more than rounding."""
        return all(one.is_rounding for one in self.differences) and self.first_module is None

    def __str__(self) -> str:
        n = len(self.differences)
        verdict = "equal up to rounding" if self.is_equal else "NOT equal"
        runs = f"whole and in {count(self.n_chunks, 'chunk')}"
        if self.n_chunks == 1:
            runs = "nothing ran in chunks, so both runs were whole"
        lines = [f"{runs}: {verdict}, of {n} tensors"]
        if self.first_module is not None:
            lines.append(f"the first module whose output differs: {self.first_module}")
        if self.n_sensitive:
            lines.append(
                f"{self.n_sensitive} of them are little but rounding: the whole step changes them "
                "as much if activations change in their last bit"
            )
        shown = self.differences[:_MOST_SHOWN]
        lines.append("largest difference of two entries, divided by the largest entry:")
        lines += map(str, shown)
        if n > len(shown):
            lines.append(f"and {count(n - len(shown), 'tensor')} more, which differ less")
        return "\n".join(lines)

    __repr__ = __str__


def verify(step: Callable[[], Any], *owners: Any, chunks: int = 4) -> Verification:
    """Run a step whole and in chunks, and compare its results, gradients and buffers.

    Parameters, gradients, buffers, optimizers and random number generators are restored.

    Args:
        step: runs forward and backward on a lazy batch. If it ends with zero_grad(), parameters are
            compared in place of gradients; an optimizer such as Adam makes rounding large in these.
        owners: the modules and optimizers that the step changes; by default those that `step`
            names, and those named by functions of its file that it calls.
        chunks: the number of chunks.

    Raises:
        TypeError: `step` is no function.
        ValueError: there is no module, or the step uses no lazy tensor.

    Examples:
        >>> import torch, koila
        >>> model = torch.nn.Linear(3, 1)
        >>> def step():
        ...     model(koila.lazy(torch.ones(8, 3))).pow(2).mean().backward()
        >>> koila.verify(step, chunks=2).is_equal
        True
    """
    if not callable(step):
        raise TypeError(f"verify: step must be a function, which runs a step, not {step!r}")
    found = list(owners) or _named_by(step)
    modules = [one for one in found if isinstance(one, nn.Module)]
    if not modules:
        raise ValueError(
            "verify: the step names no module whose results could be compared: give the modules "
            "and optimizers that it changes, as in verify(step, model, optimizer)"
        )
    optimizers = [one for one in found if isinstance(one, torch.optim.Optimizer)]
    whole, whole_outputs, _ = _run(step, modules, optimizers, 1)
    cut, cut_outputs, n_chunks = _run(step, modules, optimizers, chunks)
    left, outputs = _Pair(whole, cut), _Pair(whole_outputs, cut_outputs)
    result = _verification(n_chunks, left, outputs)
    if result.is_equal:
        return result
    again, again_outputs, _ = _run(step, modules, optimizers, 1)
    if not _verification(1, _Pair(whole, again), _Pair(whole_outputs, again_outputs)).is_equal:
        return result  # two whole runs differ too: the step is not deterministic
    with _last_bits_changed(modules):
        changed, changed_outputs, _ = _run(step, modules, optimizers, 1)
    left, outputs = left._replace(changed=changed), outputs._replace(changed=changed_outputs)
    small = {one.name for one in result.differences if one.is_rounding}
    result = _verification(n_chunks, left, outputs)
    n_sensitive = sum(one.is_rounding and one.name not in small for one in result.differences)
    return dataclasses.replace(result, n_sensitive=n_sensitive)


class _Pair(NamedTuple):
    """The tensors, by name, of a whole run, of one in chunks, and of a whole run with the last bit
    of its activations changed."""

    whole: dict[str, Tensor]
    cut: dict[str, Tensor]
    changed: dict[str, Tensor] = {}  # noqa: RUF012

    def last_bit(self, name: str) -> float:
        """Return how much a changed last bit changes a tensor; 0: unknown."""
        whole, changed = self.whole.get(name), self.changed.get(name)
        if whole is None or changed is None or whole.shape != changed.shape:
            return 0.0
        return _size(whole - changed) if whole.is_floating_point() else 0.0


def _verification(n_chunks: int, left: _Pair, outputs: _Pair) -> Verification:
    """Compare the results of two runs (`left`), and the outputs of their modules."""
    sizes: dict[str, float] = {}
    for name, value in left.whole.items():
        kind = name.partition(" of ")[0]
        sizes[kind] = max(sizes.get(kind, 0.0), _size(value))
    differences = [
        _compare(name, left, sizes.get(name.partition(" of ")[0], 0.0))
        for name in dict.fromkeys([*left.whole, *left.cut])
    ]
    names = iter(outputs.whole)
    first = next((name for name in names if not _compare(name, outputs).is_rounding), None)
    differences.sort(key=lambda one: (one.is_rounding, -one.largest))
    return Verification(n_chunks, tuple(differences), first)


@contextlib.contextmanager
def _last_bits_changed(modules: list[nn.Module]) -> Iterator[None]:
    """Change, in a block, the last bit of the modules' inputs and of the outputs of the modules
    inside, up or down at random."""
    generator = torch.Generator().manual_seed(0)

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        signs = torch.randint(2, tuple(value.shape), generator=generator) * 2 - 1
        factors = 1 + torch.finfo(value.dtype).eps * signs.to(value.device)
        return value * factors.to(value.dtype)

    def before(module: nn.Module, args: Any) -> Any:
        return tuple(map(change, args))

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return change(output)

    inner = (child for module in modules for child in module.modules())
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_pre_hook(before))
        for leaf in {child for child in inner if next(child.children(), None) is None}:
            stack.enter_context(leaf.register_forward_hook(after))
        yield


def _named_by(step: Callable[..., Any]) -> list[Any]:
    """Return the modules and optimizers that a function names, and those that functions of its file
    name which it names."""
    found, functions, seen = list[Any](), [step], set[int]()
    while functions:
        function = functions.pop(0)
        values: list[Any] = []
        while isinstance(function, functools.partial):
            values += [*function.args, *function.keywords.values()]
            function = function.func
        owner = getattr(function, "__self__", None)
        values += [owner, *vars(owner).values()] if hasattr(owner, "__dict__") else []
        plain = inspect.unwrap(getattr(function, "__func__", function))
        if inspect.isfunction(plain) and id(plain) not in seen:
            seen.add(id(plain))
            variables = inspect.getclosurevars(plain)
            values += [*variables.nonlocals.values(), *variables.globals.values()]
            functions += [
                one
                for one in values
                if inspect.isfunction(one) and one.__globals__ is plain.__globals__
            ]
        found += [one for one in values if isinstance(one, nn.Module | torch.optim.Optimizer)]
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def restored_buffers(step: Callable[..., Any]) -> Iterator[None]:
    """Restore the buffers of the modules that a function names at the end of a block."""
    modules = [one for one in _named_by(step) if isinstance(one, nn.Module)]
    with _restored(modules, [], is_all=False):
        yield


def _run(
    step: Callable[[], Any],
    modules: list[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    chunks: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Run a step. Return its results, gradients and buffers by name, the outputs of modules, and
    the number of chunks."""
    outputs: dict[str, Any] = {}
    with _restored(modules, optimizers), _outputs_of(modules, outputs):
        n_batches = reports.n_batches()
        with config(chunks=chunks, memory_limit=None), reports.observed_by(reports.Observer()):
            returned = step()
            ran = reports.report()
            if not ran.programs and reports.n_batches() == n_batches:
                raise ValueError(
                    "verify: the step uses no lazy tensor, so it would only be compared with "
                    "itself: make the batch lazy in the step, as in x, y = koila.lazy(x, y)"
                )
            n_chunks = max((one.n_chunks for one in ran.programs), default=1)
            seen = {name: _number(value) for name, value in outputs.items()}
            left = {f"result of {i}": _number(one) for i, one in enumerate(_tensors(returned))}
        for prefix, module in _prefixes(modules):
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    left[f"gradient of {prefix}{name}"] = parameter.grad.detach().clone()
                else:
                    left[f"parameter of {prefix}{name}"] = parameter.detach().clone()
            for name, buffer in module.named_buffers():
                left[f"buffer of {prefix}{name}"] = buffer.detach().clone()
    return left, seen, n_chunks


def _prefixes(modules: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for i, module in enumerate(modules):
        yield (f"{i}:" if len(modules) > 1 else ""), module


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, tuple | list) else [value]
    return [one for one in values if isinstance(one, Tensor)]


def _number(value: Tensor) -> Tensor:
    return (_core.read(value) if type(value) is _core.LazyTensor else value).detach().clone()


@contextlib.contextmanager
def _outputs_of(modules: list[nn.Module], outputs: dict[str, Any]) -> Iterator[None]:
    """Keep the output of each call of each module in a block, by name."""

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for one in _tensors(output)[:1]:
                n = sum(key.partition("#")[0] == name for key in outputs)
                outputs[f"{name}#{n}" if n else name] = one

        return hook

    with contextlib.ExitStack() as stack:
        for prefix, module in _prefixes(modules):
            for name, child in module.named_modules():
                if next(child.children(), None) is None:
                    label = f"{prefix}{name or type(child).__name__}"
                    stack.enter_context(child.register_forward_hook(keep(label)))
        yield


@contextlib.contextmanager
def _restored(
    modules: list[nn.Module], optimizers: list[torch.optim.Optimizer], is_all: bool = True
) -> Iterator[None]:
    """Restore everything at the end of a block; with `is_all` False only buffers."""
    tensors = [buffer for module in modules for buffer in module.buffers()]
    tensors += [p for module in modules for p in module.parameters()] if is_all else []
    values = [tensor.detach().clone() for tensor in tensors]
    grads = [None if t.grad is None else t.grad.detach().clone() for t in tensors]
    held = [tensor.grad for tensor in tensors]
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value, grad, kept in zip(tensors, values, grads, held, strict=True):
                    tensor.copy_(value)
                    if kept is not None and grad is not None:
                        kept.copy_(grad)
                    tensor.grad = kept
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)


def _size(value: Tensor) -> float:
    """Return the largest absolute value of the finite entries."""
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _compare(name: str, pair: _Pair, of_kind: float = 0.0) -> Difference:
    whole, cut = pair.whole.get(name), pair.cut.get(name)
    if whole is None or cut is None or whole.shape != cut.shape or whole.dtype != cut.dtype:
        return Difference(name, float("nan"), False)
    if torch.equal(whole, cut) or whole.numel() == 0:
        return Difference(name, 0.0, True)
    if not (whole.is_floating_point() or whole.is_complex()):
        return Difference(name, float((whole != cut).double().mean()), False)
    if not torch.equal(whole.isfinite(), cut.isfinite()):
        return Difference(name, float("nan"), False)
    size, largest = _size(whole), _size(whole - cut)
    usual = _ROUNDING * size * torch.finfo(whole.dtype).eps
    of_others = _ROUNDING_OF_KIND * of_kind * torch.finfo(whole.dtype).eps
    allowed = max(usual, of_others, _TIMES_LAST_BIT * pair.last_bit(name))
    ratio = largest / size if size > 0 else largest
    return Difference(name, ratio, largest <= allowed, usual < largest <= allowed)
