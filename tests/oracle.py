# SPDX-License-Identifier: Apache-2.0
"""The oracle of whole programs: PyTorch itself, unsplit, from the same seed.

A `Program` (see `programs.py`) is run as it stands and again with its batch made lazy, and what the
user could see afterwards is compared: the loss, every gradient, every buffer, the generator. A
*story* is the same for code that is not one forward and one backward: a function of `lazy` that
returns what its author would have looked at.

Everything here asserts; nothing returns a verdict.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import koila
from chunked import split
from koila.staged import layouts

#: Largest difference allowed, as a share of the largest entry of the tensor it is in.
TOLERANCE = 1e-10
#: What cancels to nothing (a bias before a BatchNorm) is compared with the largest gradient.
#: Three rows standardised by their own spread have left 1.1e-14 of that.
NOISE = 1e-13

#: Why a program has a barrier where a mask selects a number of the model's own values.
SHAPE_OF_VALUES = "shape depends on values"

Lazy = Callable[..., Any]
Watch = contextlib.AbstractContextManager[Any]


def eager(*objs: Any, batch: int = 0) -> Any:
    """Stand where `koila.lazy` stands and change nothing."""
    del batch
    return objs[0] if len(objs) == 1 else objs


def is_whole(chunks: int | None) -> bool:
    """Tell whether a small step runs in one chunk, where every bit is promised."""
    return chunks is None or chunks == 1


def plain(value: Tensor) -> Tensor:
    """Return a private plain copy of a tensor, lazy or not."""
    copied = copy.deepcopy(value.detach())
    assert not koila.is_lazy(copied), "a deep copy of a lazy tensor is a plain tensor"
    return copied


# Counting ---------------------------------------------------------------------------------------


class FlopCounter(TorchDispatchMode):
    """Count the multiplications of matrix products, convolutions and attention that really run.

    They are proportional to the rows, forward and backward, whatever the chunks: so their sum tells
    how often each row went through the model. Shape inference on meta tensors is not counted, nor
    are calls on two rows of stand-ins, which tell how memory lies.
    """

    sees_koila = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self._finds: list[Any] = []

    def __enter__(self) -> Self:
        found = layouts._found

        def uncounted(*args: Any) -> Any:
            before = self.flops
            result = found(*args)
            self.flops = before
            return result

        self._finds.append(found)
        layouts._found = uncounted
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exc: Any) -> None:
        layouts._found = self._finds.pop()
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None and args[0].device.type != "meta":
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


# One step of a program --------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """What a user can see after one step."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    inputs: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    generator: Tensor


def make_batch(program: Any, n_rows: int, *, input_gradients: bool = False) -> list[Any]:
    """Return the plain batch of a program, the same at every call."""
    generator = torch.Generator().manual_seed(n_rows)
    batch = list(program.batch(n_rows, generator))
    for value in batch if input_gradients else ():
        if isinstance(value, Tensor) and value.is_floating_point():
            value.requires_grad_()
    return batch


def make_lazy(lazy: Lazy, batch: list[Any], dims: tuple[int | None, ...]) -> list[Any]:
    """Make a batch lazy with one call for each dim its tensors hold the rows in."""
    result = list(batch)
    for dim in sorted({dim for dim in dims if dim is not None}):
        places = [i for i, d in enumerate(dims) if d == dim]
        made = lazy(*(batch[i] for i in places), batch=dim)
        for i, value in zip(places, made if len(places) > 1 else (made,), strict=True):
            result[i] = value
    return result


def run(
    program: Any,
    n_rows: int,
    lazy: Lazy = eager,
    *,
    seed: int = 0,
    input_gradients: bool = False,
    dtype: torch.dtype = torch.float64,
    rounded: torch.dtype = torch.float64,
    change: Callable[[nn.Module], None] | None = None,
    watch: tuple[Watch, Watch] = (contextlib.nullcontext(), contextlib.nullcontext()),
) -> Outcome:
    """Run one step of a program and return what can be seen after it.

    `change` is applied to the built model. The model and the floating part of the batch are given
    `dtype`, after they were rounded to `rounded`. `watch` are contexts for the step and for its
    backward().
    """
    model = program.build(seed).to(rounded).to(dtype)
    if change is not None:
        change(model)
    batch = make_batch(program, n_rows, input_gradients=input_gradients)
    batch = [_cast(_cast(value, rounded), dtype) for value in batch]
    torch.manual_seed(seed + 1)
    with watch[0]:
        loss = program.step(model, *make_lazy(lazy, batch, program.dims_of(batch)))
    with watch[1]:
        loss.backward()
    return Outcome(
        loss=plain(loss),
        gradients={n: _copy(p.grad) for n, p in model.named_parameters()},
        inputs={f"batch[{i}]": _copy(v.grad) for i, v in enumerate(batch) if isinstance(v, Tensor)},
        buffers={n: plain(b) for n, b in model.named_buffers()},
        generator=torch.get_rng_state(),
    )


@functools.cache
def run_eager(program: Any, n_rows: int, **options: Any) -> Outcome:
    """Run one step of a program without koila, once for all tests that compare with it."""
    return run(program, n_rows, **options)


@functools.cache
def flops_of_eager(program: Any, n_rows: int) -> tuple[int, int]:
    """Return what one step of a program multiplies forward, and backward."""
    forward, backward = FlopCounter(), FlopCounter()
    run(program, n_rows, watch=(forward, backward))
    return forward.flops, backward.flops


def run_lazy(program: Any, n_rows: int, *, chunks: int | None, **options: Any) -> Outcome:
    """Run one step of a program with its batch lazy, in a number of chunks."""
    with split(chunks, whole=program.whole, partly=program.partly):
        return run(program, n_rows, koila.lazy, **options)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if not _is_float(value):
        return value
    return value.detach().to(dtype).requires_grad_(value.requires_grad)


def _copy(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    assert not koila.is_lazy(gradient), "a gradient is a plain tensor"
    return plain(gradient)


# Comparing --------------------------------------------------------------------------------------


def largest_of(tree: Any) -> float:
    """Return the largest finite number in the floating tensors of a nested result."""
    sizes = [t.abs() for t in pytree.tree_leaves(tree) if _is_float(t) and not t.is_complex()]
    return max((float(s[s.isfinite()].max()) for s in sizes if s.isfinite().any()), default=0.0)


def assert_close(
    got: Tensor, want: Tensor, what: str, *, largest: float = 0.0, tolerance: float | None = None
) -> None:
    """Assert that two tensors agree to a share of their largest entry.

    The share is `TOLERANCE` in float64, and follows the precision of other dtypes. What is nothing
    but rounding has no size of its own: it may differ by the rounding of the `largest` number
    beside it.
    """
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, eager {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, eager {tuple(want.shape)}"
    if not want.is_floating_point():
        assert torch.equal(got, want), f"{what}: {got}, eager {want}"
        return
    finite = want.isfinite()
    size = float(want[finite].abs().max()) if finite.any() else 0.0
    if tolerance is None:
        coarse = 64 * torch.finfo(want.dtype).eps
        tolerance = TOLERANCE if want.dtype == torch.float64 else coarse
    noise = NOISE if want.dtype == torch.float64 else torch.finfo(want.dtype).eps
    bound = tolerance * size + noise * largest
    torch.testing.assert_close(
        got, want, rtol=0.0, atol=bound, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def assert_bits(got: Tensor, want: Tensor, what: str) -> None:
    """Assert that two tensors are the same bit for bit."""
    torch.testing.assert_close(
        got, want, rtol=0.0, atol=0.0, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def _assert_group(
    got: dict[str, Tensor | None], want: dict[str, Tensor | None], kind: str, *, exact_bits: bool
) -> None:
    assert got.keys() == want.keys(), f"{kind}: {got.keys()}, eager {want.keys()}"
    largest = largest_of(want)
    for name, wanted in want.items():
        what = f"{kind} {name}"
        value = got[name]
        if wanted is None or value is None:
            assert value is wanted, f"{what}: {value}, eager {wanted}"
        elif exact_bits:
            assert_bits(value, wanted, what)
        else:
            assert_close(value, wanted, what, largest=largest)


def assert_outcomes(
    got: Outcome, want: Outcome, *, exact_bits: bool = False, generator: bool = True
) -> None:
    """Assert that two outcomes are the same in every field, the generator only if so said."""
    (assert_bits if exact_bits else assert_close)(got.loss, want.loss, "loss")
    _assert_group(got.gradients, want.gradients, "gradient of", exact_bits=exact_bits)
    _assert_group(got.inputs, want.inputs, "gradient of", exact_bits=exact_bits)
    _assert_group(dict(got.buffers), dict(want.buffers), "buffer", exact_bits=exact_bits)
    if generator:
        assert torch.equal(got.generator, want.generator), (
            "the generator is not where eager left it"
        )


def assert_same(
    program: Any,
    n_rows: int,
    *,
    chunks: int | None,
    exact_bits: bool | None = None,
    generator: bool = True,
    **options: Any,
) -> None:
    """Assert that a program gives eager's numbers in this many chunks.

    In one chunk every bit is compared, unless told otherwise, and the state of the generator.
    """
    want = run_eager(program, n_rows, **options)
    got = run_lazy(program, n_rows, chunks=chunks, **options)
    whole = is_whole(chunks)
    exact_bits = whole if exact_bits is None else exact_bits
    assert_outcomes(got, want, exact_bits=exact_bits, generator=generator or whole)


def assert_passes(program: Any, n_rows: int, *, chunks: int) -> None:
    """Assert how often the rows went through the model.

    Once forward and once backward where the loss is linear in its reductions; where it has a
    barrier, forward once more at the most, and once for a mask of values that gives a
    shape. What the user checkpoints goes forward again before its backward, as the user asked.
    """
    forward, backward = flops_of_eager(program, n_rows)
    got = FlopCounter()
    run_lazy(program, n_rows, chunks=chunks, watch=(got, got))
    once = forward + backward
    n_more = 2 if program.barrier == SHAPE_OF_VALUES else bool(program.barrier)
    n_more += program.name == "checkpoint"
    most = once + n_more * forward if chunks > 1 else once
    assert 0 < got.flops <= most, (
        f"{got.flops} flops; one forward and one backward are {once}, one forward {forward}"
    )


def assert_reproducible(program: Any, n_rows: int, *, chunks: int) -> None:
    """Assert that a program that draws gives the same bits again from the same seed."""
    first = run_lazy(program, n_rows, chunks=chunks)
    second = run_lazy(program, n_rows, chunks=chunks)
    assert_outcomes(second, first, exact_bits=True)


def assert_gradient_of_loss(program: Any, n_rows: int, *, chunks: int) -> None:
    """Assert that the gradient is that of the loss beside it, whatever numbers were drawn.

    The slope along one random direction is compared with two more steps from the same seed. If a
    chunk that runs again saw other masks, they differ.
    """
    step = 1e-6
    outcome = run_lazy(program, n_rows, chunks=chunks)
    generator = torch.Generator().manual_seed(99)
    slopes = {name: g for name, g in outcome.gradients.items() if g is not None}
    directions = {n: torch.randn(g.shape, generator=generator).double() for n, g in slopes.items()}

    def loss_moved(by: float) -> float:
        def change(model: nn.Module) -> None:
            with torch.no_grad():
                for name, direction in directions.items():
                    model.get_parameter(name).add_(by * direction)

        return float(run_lazy(program, n_rows, chunks=chunks, change=change).loss)

    slope = sum(float((g * directions[name]).sum()) for name, g in slopes.items())
    measured = (loss_moved(step) - loss_moved(-step)) / (2 * step)
    assert math.isclose(slope, measured, rel_tol=1e-5, abs_tol=1e-7), (slope, measured)


def chunk_sizes(n_rows: int, chunks: int) -> list[int]:
    """Return the rows of each chunk when `n_rows` are cut in `chunks`, larger ones first."""
    return [len(part) for part in torch.arange(n_rows).tensor_split(min(chunks, n_rows))]


# Stories ----------------------------------------------------------------------------------------

Story = Callable[[Lazy], Any]


def tell(story: Story, lazy: Lazy, seed: int = 0) -> Any:
    """Run a story from a seed and return plain copies of what it saw, and where it left the rng."""
    torch.manual_seed(seed)
    return _settle(story(lazy)), torch.get_rng_state()


def assert_same_story(
    story: Story,
    chunks: int | None,
    *,
    generator: bool = True,
    exact_bits: bool = True,
    tolerance: float | None = None,
    whole: str = "",
    partly: str = "",
) -> None:
    """Assert that a story told with lazy inputs is the story eager tells, and runs in chunks.

    What it returns may be nested in tuples, lists and dicts; numbers are compared as in a program,
    all else by `==`. In one chunk the bits are the same unless `exact_bits` is off. `whole` and
    `partly` say why it cannot be cut, see `chunked.split`.
    """
    want, want_state = tell(story, eager)
    with split(chunks, whole=whole, partly=partly):
        got, got_state = tell(story, koila.lazy)
    exact_bits = exact_bits and is_whole(chunks)
    assert_seen(got, want, "seen", exact_bits=exact_bits, tolerance=tolerance)
    if generator:
        assert torch.equal(got_state, want_state), "the generator is not where eager left it"


def assert_seen(
    got: Any,
    want: Any,
    what: str,
    *,
    exact_bits: bool,
    tolerance: float | None = None,
    largest: float = 0.0,
) -> None:
    """Assert that two nested results are the same.

    Each tensor is compared by its own size, and by the largest of those in one container with it.
    """
    if isinstance(want, dict | list | tuple):
        largest = max(largest_of(want), largest if len(want) == 1 else 0.0)
    how: Any = {"exact_bits": exact_bits, "tolerance": tolerance, "largest": largest}
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor), f"{what}: {got}, eager {want}"
        if exact_bits:
            assert_bits(got, want, what)
        else:
            assert_close(got, want, what, tolerance=tolerance, largest=largest)
    elif want is None:
        assert got is None, f"{what}: {got}, eager None"
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), f"{what}: {got.keys()}, eager {want.keys()}"
        for key, value in want.items():
            assert_seen(got[key], value, f"{what}[{key!r}]", **how)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), f"{what}: {len(got)} entries, eager {len(want)}"
        for i, value in enumerate(want):
            assert_seen(got[i], value, f"{what}[{i}]", **how)
    elif isinstance(want, float) and not exact_bits:
        same = math.isclose(got, want, rel_tol=tolerance or 1e-9, abs_tol=1e-12)
        assert same or (math.isnan(got) and math.isnan(want)), f"{what}: {got}, eager {want}"
    else:
        assert got == want or (got != got and want != want), f"{what}: {got}, eager {want}"


def _settle(value: Any) -> Any:
    """Copy a nested result, so that later steps cannot change it."""
    if isinstance(value, nn.Module):
        return _settle(dict(value.named_parameters()) | dict(value.named_buffers()))
    if isinstance(value, Tensor):
        return plain(value)
    if isinstance(value, dict):
        return {key: _settle(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_settle(entry) for entry in value]
    return value


def gradients(*modules: nn.Module) -> dict[str, Tensor | None]:
    """Return every gradient of some modules by the name of its parameter."""
    return {
        f"{i}.{name}": parameter.grad
        for i, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    }


@contextlib.contextmanager
def unchanged(*modules: nn.Module, tensors: tuple[Tensor, ...] = ()) -> Iterator[None]:
    """Assert that the block changes no parameter, gradient, buffer, tensor or generator.

    So it must be if the block raises, too.
    """

    def look() -> Any:
        return _settle([[m, gradients(m)] for m in modules]), _settle(list(tensors))

    before, state = look(), torch.get_rng_state()
    try:
        yield
    finally:
        assert_seen(look(), before, "state", exact_bits=True)
        assert torch.equal(torch.get_rng_state(), state), "the generator was moved"


# Short programs -----------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    """A custom function: a program that runs in chunks is cut before it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 2


cut: Any = Double.apply


class Programs(dict[str, Callable[..., Any]]):
    """Short programs by name; as a decorator it adds one."""

    def __call__(self, program: Callable[..., Any]) -> Callable[..., Any]:
        self[program.__name__] = program
        return program


#: Runs a program: given what makes its batch lazy, and the number of chunks, returns what is seen.
Run = Callable[[Lazy, int | None], list[Tensor]]


def run_of_rows(program: Callable[..., Any], lazy: Lazy, chunks: int | None) -> list[Tensor]:
    """Run a program of seven rows, their labels and a layer; return what it returns, and the
    gradients of its sum."""
    torch.manual_seed(0)
    net = nn.Linear(6, 4).double()
    x, y = lazy(torch.randn(7, 6).double(), torch.randint(0, 4, (7,)))
    with koila.config(chunks=chunks):
        outs = pytree.tree_leaves(program(x, y, net))
        total = sum(out.sum() for out in outs)
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return [torch.as_tensor(out.detach() * 1) for out in (*outs, *grads)]


def assert_like(got: list[Tensor], want: list[Tensor]) -> None:
    """Assert that tensors are those of eager, to a relative 1e-10."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), other, rtol=TOLERANCE, atol=1e-12)


def assert_same_in_chunks(run: Run, n_rows: int) -> None:
    """Assert that a program gives eager's tensors by default and in several numbers of chunks."""
    want = run(eager, None)
    for chunks in (None, 1, 2, 3, n_rows):
        assert_like(run(koila.lazy, chunks), want)
